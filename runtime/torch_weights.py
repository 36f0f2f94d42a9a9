"""An engine directory's weights in the modules of ``model/``: mapped from ``weights.bin``, not read, and each there once.

The graphs say where every weight lies: their external data have the names of the modules' parameters. Quantized weights, whose
scales lie beside them, become the element type when they are loaded: this engine shows what is right, not what is small.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor, nn

from eesd.export.manifest import QUANTIZED, WEIGHTS, Manifest
from eesd.model.config import ModelConfig
from eesd.model.decoder import Decoder
from eesd.model.exit_head import ExitConfig, ExitHead
from eesd.model.graphs import Draft, Verify
from eesd.model.quantize import SCALES, dequantize
from eesd.runtime.device import fitting_gpu
from eesd.runtime.errors import EESDError


@dataclass(frozen=True)
class Programs:
    """A stage of verify and, with the first if it was asked for, the draft, over the same weights; and the rotary tables
    [S, D/2] of both."""

    verify: Verify
    draft: Draft | None
    tables: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Place:
    """Where a weight lies in a file (bytes), its shape there, and its element type or what it is quantized to."""

    file: str
    offset: int
    length: int
    shape: tuple[int, ...]
    kind: str


def load_programs(directory: Path, manifest: Manifest, devices: Sequence[torch.device], draft: bool) -> list[Programs]:
    """The stages of verify with their weights on ``devices``; on the CPU these are the pages of the file itself.

    Without ``draft``, what only the draft needs stays in the file. Raises :class:`EESDError` when graphs, weights and manifest
    are not of one export.
    """
    drafting = _places(directory, manifest.draft.file, manifest)
    stages = [_places(directory, stage.file, manifest) for stage in manifest.verify]
    with _refusing(directory):
        decoder, head = _empty_modules(manifest)
    every = Draft(decoder, head, manifest.draft_top_k)
    linear = {f"{name}.weight" for name, module in every.named_modules() if isinstance(module, nn.Linear)}
    found = drafting.copy()
    for places in stages:
        found |= places
    quantized = {name for name, place in found.items() if place.kind in QUANTIZED}
    named = {name for name, _ in every.named_parameters()} | {"cos", "sin"} | {name + SCALES for name in quantized}
    if found.keys() != named or not quantized <= linear:
        raise _unfit(directory)
    programs = []
    for number, (places, device) in enumerate(zip(stages, devices, strict=True)):
        with_draft = draft and number == 0
        with _refusing(directory):
            mapped = _mapped(directory, places | drafting if with_draft else places, linear)
        with fitting_gpu("The weights"):
            state = {name: tensor.to(device) for name, tensor in mapped.items()}
        tables = state.pop("cos"), state.pop("sin")
        with _refusing(directory):
            decoder, head = _filled_modules(manifest, state)
        verify = Verify(decoder, head, manifest.stage_layers[number]).eval()
        drafter = Draft(decoder, head, manifest.draft_top_k).eval() if with_draft else None
        programs.append(Programs(verify, drafter, tables))
    return programs


def _filled_modules(manifest: Manifest, state: dict[str, Tensor]) -> tuple[Decoder, ExitHead]:
    """Modules with these weights in them; what has none stays empty."""
    decoder, head = _empty_modules(manifest)
    modules = Draft(decoder, head, manifest.draft_top_k)
    modules.load_state_dict(state, strict=False, assign=True)
    if manifest.tied_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    modules.requires_grad_(False)
    return decoder, head


def _unfit(directory: Path) -> EESDError:
    return EESDError(f"The graphs and weights in {directory} do not fit its manifest; export the model again.")


@contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """For what torch raises where a shape cannot be, or is not that of what is stored."""
    try:
        yield
    except (RuntimeError, OverflowError):
        raise _unfit(directory) from None


def _empty_modules(manifest: Manifest) -> tuple[Decoder, ExitHead]:
    """The modules without memory. What only reading a checkpoint needs is left empty in their configuration, and so is the
    rotary embedding: its tables are stored."""
    config = ModelConfig(
        architecture=manifest.architecture,
        vocab_size=manifest.vocab_size,
        hidden_size=manifest.hidden_size,
        intermediate_size=manifest.intermediate_size,
        num_layers=manifest.num_layers,
        num_heads=manifest.num_heads,
        num_kv_heads=manifest.num_kv_heads,
        head_dim=manifest.head_dim,
        max_positions=manifest.max_seq_len,
        rms_norm_eps=manifest.rms_norm_eps,
        rope_theta=0.0,
        rope_scaling=None,
        tied_embeddings=manifest.tied_embeddings,
        qkv_bias=manifest.qkv_bias,
        output_bias=manifest.output_bias,
        mlp_bias=manifest.mlp_bias,
        qk_norm=manifest.qk_norm,
        dtype=manifest.dtype,
        bos_token_id=manifest.bos_token_id,
        eos_token_ids=manifest.eos_token_ids,
    )
    with torch.device("meta"):
        head = ExitHead(config, ExitConfig(manifest.exit_layer, manifest.exit_blocks, manifest.exit_own_lm_head))
        return Decoder(config), head


def _places(directory: Path, file: str, manifest: Manifest) -> dict[str, _Place]:
    """The place of every weight of a graph, by name; refused where one is of another type or in a file of no weights."""
    allowed = [manifest.dtype] if manifest.quantization is None else [manifest.dtype, manifest.quantization.weights]
    kinds = {TensorProto.DataType.Value("FLOAT" if kind == "float32" else kind.upper()): kind for kind in allowed}
    known = {WEIGHTS, *manifest.linked}
    try:
        graph = onnx.load(directory / file, load_external_data=False).graph
    except Exception:  # of protobuf, which is no dependency of ours
        raise EESDError(f"onnx cannot read {directory / file}; export the model again.") from None
    places: dict[str, _Place] = {}
    for tensor in graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        info = ExternalDataInfo(tensor)
        if tensor.data_type not in kinds or info.location not in known or info.offset is None or info.length is None:
            raise _unfit(directory)
        places[tensor.name] = _Place(info.location, info.offset, info.length, tuple(tensor.dims), kinds[tensor.data_type])
    return places


def _mapped(directory: Path, places: dict[str, _Place], linear: set[str]) -> dict[str, Tensor]:
    """The weights by name, as the files' own pages or dequantized; those of linear layers as [out, in]: so they are in a linked
    file, in ``weights.bin`` they are [in, out]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory cannot be written: nobody will
        files = {place.file for place in places.values()}
        data = {file: torch.from_numpy(np.memmap(directory / file, np.uint8, mode="r")) for file in files}

    def stored(place: _Place) -> Tensor:
        piece = data[place.file][place.offset : place.offset + place.length]
        return piece if place.kind in QUANTIZED else piece.view(getattr(torch, place.kind)).view(place.shape)

    tensors = {}
    for name, place in places.items():
        if name.endswith(SCALES):
            continue
        tensor = stored(place)
        if place.kind in QUANTIZED:
            tensor = dequantize(tensor, stored(places[name + SCALES]), place.kind)
        tensors[name] = tensor.t() if name in linear and place.file == WEIGHTS else tensor
    return tensors
