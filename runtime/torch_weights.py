"""An engine directory's weights in the modules of ``model/``: mapped from ``weights.bin``, not read, and each there once.

The graphs say where every weight lies: their external data have the names of the modules' parameters. Quantized weights, whose
scales lie beside them, become the element type when they are loaded: this engine shows what is right, not what is small.
"""

import warnings
from collections.abc import Iterator
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
from eesd.runtime.errors import EESDError


@dataclass(frozen=True)
class Programs:
    """Verify and, if it was asked for, draft, over the same weights; and the rotary tables [S, D/2] of both."""

    verify: Verify
    draft: Draft | None
    tables: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Place:
    """Where a weight lies in ``weights.bin`` (bytes), its shape there, and its element type or what it is quantized to."""

    offset: int
    length: int
    shape: tuple[int, ...]
    kind: str


@contextmanager
def fitting_gpu(what: str) -> Iterator[None]:
    """Say what did not fit the GPU, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise EESDError(f"{what} do not fit the GPU's memory; free some, or export with a smaller --max-seq-len.") from None


def load_programs(directory: Path, manifest: Manifest, device: torch.device, draft: bool) -> Programs:
    """The programs with their weights on ``device``; on the CPU these are the pages of the file itself.

    Without ``draft``, what only the draft needs stays in the file. Raises :class:`EESDError` when graphs, weights and manifest
    are not of one export.
    """
    with _refusing(directory):
        decoder, head = _empty_modules(manifest)
    verify, drafting = Verify(decoder, head), Draft(decoder, head, manifest.draft_top_k)
    wanted = _places(directory, [stage.file for stage in manifest.verify], manifest)
    of_draft = _places(directory, [manifest.draft.file], manifest)
    linear = {f"{name}.weight" for name, module in drafting.named_modules() if isinstance(module, nn.Linear)}
    named = {name for name, _ in drafting.named_parameters()} | {"cos", "sin"}
    quantized = {name for name, place in (wanted | of_draft).items() if place.kind in QUANTIZED}
    if (wanted | of_draft).keys() != named | {name + SCALES for name in quantized} or not quantized <= linear:
        raise _unfit(directory)
    with _refusing(directory):
        mapped = _mapped(directory / WEIGHTS, wanted | of_draft if draft else wanted, linear)
    with fitting_gpu("The weights"):
        state = {name: tensor.to(device) for name, tensor in mapped.items()}
    tables = state.pop("cos"), state.pop("sin")
    with _refusing(directory):
        drafting.load_state_dict(state, strict=False, assign=True)
    if manifest.tied_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    drafting.requires_grad_(False).eval()
    return Programs(verify.eval(), drafting if draft else None, tables)


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


def _places(directory: Path, files: list[str], manifest: Manifest) -> dict[str, _Place]:
    """The place of every weight of some graphs, by name; refused where one is of another type or in another file."""
    allowed = [manifest.dtype] if manifest.quantization is None else [manifest.dtype, manifest.quantization.weights]
    kinds = {TensorProto.DataType.Value("FLOAT" if kind == "float32" else kind.upper()): kind for kind in allowed}
    places: dict[str, _Place] = {}
    for file in files:
        try:
            graph = onnx.load(directory / file, load_external_data=False).graph
        except Exception:  # of protobuf, which is no dependency of ours
            raise EESDError(f"onnx cannot read {directory / file}; export the model again.") from None
        for tensor in graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            info = ExternalDataInfo(tensor)
            if tensor.data_type not in kinds or info.location != WEIGHTS or info.offset is None or info.length is None:
                raise _unfit(directory)
            places[tensor.name] = _Place(info.offset, info.length, tuple(tensor.dims), kinds[tensor.data_type])
    return places


def _mapped(path: Path, places: dict[str, _Place], linear: set[str]) -> dict[str, Tensor]:
    """The weights by name, as the file's own pages or dequantized; those of linear layers, stored [in, out], as views."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory cannot be written: nobody will
        data = torch.from_numpy(np.memmap(path, np.uint8, mode="r"))

    def stored(place: _Place) -> Tensor:
        piece = data[place.offset : place.offset + place.length]
        return piece if place.kind in QUANTIZED else piece.view(getattr(torch, place.kind)).view(place.shape)

    tensors = {}
    for name, place in places.items():
        if name.endswith(SCALES):
            continue
        tensor = stored(place)
        if place.kind in QUANTIZED:
            tensor = dequantize(tensor, stored(places[name + SCALES]), place.kind)
        tensors[name] = tensor.t() if name in linear else tensor
    return tensors
