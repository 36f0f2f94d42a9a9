"""The exit head: what turns the hidden state after layer N into a draft of the next token.

E decoder blocks, a norm, and the base model's LM head (or a trained copy of it). Stored as a checkpoint of its own,
``exit_head.safetensors`` beside ``exit_head.json``, bound to its base model by a fingerprint.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.prior import CalibrationPrior
from eesd.model.config import read_json
from eesd.model.decoder import KV, Block, Decoder, Inputs, RMSNorm

WEIGHTS, CONFIG = "exit_head.safetensors", "exit_head.json"


class ExitHead(nn.Module):
    """Blocks, norm and LM head on the hidden state [B, n, hidden] after layer N; caches: one for each block."""

    def __init__(self, geometry: Geometry, exit_config: ExitConfig) -> None:
        super().__init__()
        self.exit_config = exit_config
        self.blocks = nn.ModuleList(Block(geometry) for _ in range(exit_config.blocks))
        self.norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.lm_head = nn.Linear(geometry.hidden_size, geometry.vocab_size, bias=False) if exit_config.own_lm_head else None

    def forward(self, x: Tensor, inputs: Inputs, caches: list[KV], lm_head: nn.Linear) -> tuple[Tensor, list[KV]]:
        """Draft logits [B, n, V] (through ``lm_head`` unless the head has its own) and the written caches."""
        x, written = self.features(x, inputs, caches)
        own = self.lm_head
        logits: Tensor = (lm_head if own is None else own)(x)
        return logits, written

    def features(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> tuple[Tensor, list[KV]]:
        """What the LM head gets, [B, n, hidden], and the written caches."""
        written = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        return self.norm(x), written

    def write(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> list[KV]:
        """Only the keys and values: the first E - 1 blocks run, the last one just projects.

        The verify pass does this on its own hidden state after layer N, so the draft never has to catch up.
        """
        written = []
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return [*written, last.write(x, inputs, caches[-1])]


def check_exit(geometry: Geometry, layer: int, blocks: int) -> None:
    """Refuse an exit layer or a block count that the model cannot have."""
    if not 1 <= layer < geometry.num_layers:
        raise EESDError(
            f"The exit layer must be between 1 and {geometry.num_layers - 1} for this {geometry.num_layers}-layer model; "
            f"{layer} was given."
        )
    if not 1 <= blocks <= geometry.num_layers:
        raise EESDError(f"The exit head must have between 1 and {geometry.num_layers} blocks; {blocks} were given.")


def initial_names(geometry: Geometry, exit_config: ExitConfig) -> dict[str, str]:
    """For each parameter of an untrained head, the base parameter that it starts from: the last E layers, norm, LM head."""
    names = {"norm.weight": "model.norm.weight"}
    if exit_config.own_lm_head:
        names["lm_head.weight"] = "model.embed_tokens.weight" if geometry.tied_embeddings else "lm_head.weight"
    with torch.device("meta"):
        block = Block(geometry)
    for index in range(exit_config.blocks):
        layer = geometry.num_layers - exit_config.blocks + index
        for name in block.state_dict():
            names[f"blocks.{index}.{name}"] = f"model.layers.{layer}.{name}"
    return names


def initialise(decoder: Decoder, exit_config: ExitConfig) -> ExitHead:
    """A head that starts from the base model's last layers, norm and (if it has its own) LM head."""
    check_exit(decoder.geometry, exit_config.layer, exit_config.blocks)
    head = ExitHead(decoder.geometry, exit_config)
    base = decoder.state_dict()
    head.load_state_dict({k: base[v] for k, v in initial_names(decoder.geometry, exit_config).items()})
    return head


def save(head: ExitHead, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the head; each file appears whole or not at all, the JSON (which makes it a checkpoint) last."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().to(dtype).contiguous() for name, value in head.state_dict().items()}
    with written_whole(directory / WEIGHTS) as temporary:
        save_file(state, temporary)
    save_config(head.exit_config, directory)


def save_config(config: ExitConfig, directory: Path) -> None:
    """Write the JSON alone, beside the weights that it describes."""
    with written_whole(directory / CONFIG) as temporary:
        temporary.write_text(json.dumps(asdict(config), indent=2) + "\n")


def read_exit_config(directory: Path, base: str) -> ExitConfig:
    """The configuration of a stored head; refused when it was trained on another model than the one fingerprinted ``base``."""
    if not (directory / CONFIG).exists():
        raise EESDError(f"{directory / CONFIG} is missing; give the directory of a trained exit head.")
    raw = read_json(directory / CONFIG)
    try:
        config = ExitConfig(**raw | {"calibration": None})
        if not isinstance(config.base, str) or not all(isinstance(n, int) for n in (config.layer, config.blocks)):
            raise TypeError
    except TypeError:
        raise EESDError(f"{directory / CONFIG} is not an exit head's configuration; point --exit-head at one.") from None
    if config.base != base:
        raise EESDError(
            f"The exit head in {directory} was trained on another base model "
            f"(fingerprint {config.base[:12]}, this model is {base[:12]}); train one for this model."
        )
    calibration = raw.get("calibration")
    try:
        return replace(config, calibration=None if calibration is None else CalibrationPrior.from_dict(calibration))
    except ValueError as error:
        raise EESDError(
            f"The calibration in {directory / CONFIG} is damaged ({error}); "
            "delete this entry, and make it again with eesd-distill --steps 0."
        ) from None
