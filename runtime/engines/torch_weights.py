"""An engine directory's weights in the modules of ``model/``: mapped from the weight files, each once, not read.

The graphs say where every weight lies: their external data carry the names of the modules' parameters. Quantized weights are
dequantized to the element type while they are loaded: this engine is the reference, not a small engine.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS, GraphInfo, Manifest
from eesd.common.weights import ROTARY_TABLES, SCALES, StoredWeight
from eesd.model.decoder import Decoder
from eesd.model.exit_head import ExitHead
from eesd.model.graphs import Draft, Verify
from eesd.model.quantize import dequantize
from eesd.runtime.engines.device import fitting_gpu


@dataclass(frozen=True)
class StageModules:
    """One stage of verify and, with the first stage if asked for, the draft, over the same weights; and the rotary tables
    [S, D/2] of both."""

    verify: Verify
    draft: Draft | None
    tables: tuple[Tensor, Tensor]


def load_modules(directory: Path, manifest: Manifest, devices: Sequence[torch.device], draft: bool) -> list[StageModules]:
    """Load the stages of verify, each on its device. On the CPU the weights are the pages of the files themselves.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        devices: One for each stage.
        draft: Whether to load the draft. Without it, weights that only the draft uses are not read.

    Raises:
        EESDError: Graphs, weights and manifest are not of one export, or the weights do not fit the GPU.
    """
    files = _map_files(directory, (WEIGHTS, *manifest.linked))
    stages = []
    for number, (graph, device) in enumerate(zip(manifest.verify, devices, strict=True)):
        with_draft = draft and number == 0
        with _one_export(directory):
            weights = _weights(directory, manifest, [graph, manifest.draft] if with_draft else [graph], files)
        with fitting_gpu("The weights"):
            weights = {name: tensor.to(device) for name, tensor in weights.items()}
        cos, sin = (weights.pop(name) for name in ROTARY_TABLES)
        with _one_export(directory):
            decoder, head = _modules(manifest, weights)
        verify = Verify(decoder, head, manifest.stage_layers[number]).eval()
        drafter = Draft(decoder, head, manifest.draft_top_k).eval() if with_draft else None
        stages.append(StageModules(verify, drafter, (cos, sin)))
    return stages


@contextmanager
def _one_export(directory: Path) -> Iterator[None]:
    """Turn a weight that is missing, or has a shape that cannot be, into one sentence."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError, OverflowError):
        raise EESDError(f"The graphs and weights in {directory} do not fit its manifest; export the model again.") from None


def _modules(manifest: Manifest, weights: dict[str, Tensor]) -> tuple[Decoder, ExitHead]:
    """Modules with these weights in them. Parameters without a weight stay empty."""
    with torch.device("meta"):
        decoder, head = Decoder(manifest.geometry), ExitHead(manifest.geometry, manifest.exit_head)
    modules = Draft(decoder, head, manifest.draft_top_k)
    modules.load_state_dict(weights, strict=False, assign=True)
    if manifest.geometry.tied_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    modules.requires_grad_(False)
    return decoder, head


def _map_files(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The bytes of the weight files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the memory is read-only; nothing writes to it
        return {name: torch.from_numpy(np.memmap(directory / name, np.uint8, mode="r")) for name in names}


def _weights(directory: Path, manifest: Manifest, graphs: Sequence[GraphInfo], files: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of some graphs by name, those of linear layers as [out, in]. Raises ValueError or KeyError for others."""
    weights: dict[str, Tensor] = {}
    for graph in graphs:
        stored = _external_tensors(directory / graph.file)
        expected = manifest.weights_of(graph)
        for name, weight in expected.items():
            if name not in weights:
                linked = ExternalDataInfo(stored[name]).location != WEIGHTS
                as_stored = replace(weight, transposed=False, quantization=None) if linked else weight
                weights[name] = _load(as_stored, stored, files)
        if any(name.removesuffix(SCALES) not in expected for name in stored):
            raise ValueError("a weight that the manifest does not have")
    return weights


def _load(weight: StoredWeight, stored: dict[str, TensorProto], files: dict[str, Tensor]) -> Tensor:
    quantization = weight.quantization
    if quantization is None:
        tensor = _view(stored[weight.name], weight.dtype, weight.stored_shape, files)
    else:
        levels = _view(stored[weight.name], quantization.weights, weight.stored_shape, files)
        scales = _view(stored[weight.name + SCALES], weight.dtype, weight.scales_shape, files)
        tensor = dequantize(levels, scales, quantization.weights)
    return tensor.t() if weight.transposed else tensor


def _view(tensor: TensorProto, dtype: str, shape: Sequence[int], files: dict[str, Tensor]) -> Tensor:
    """A tensor in its file: the bytes of a quantized one, else with its type and shape."""
    info = ExternalDataInfo(tensor)
    kind = TensorProto.DataType.Value("FLOAT" if dtype == "float32" else dtype.upper())
    if tensor.data_type != kind or tuple(tensor.dims) != tuple(shape) or info.offset is None or info.length is None:
        raise ValueError(tensor.name)
    data = files[info.location][info.offset : info.offset + info.length]
    return data if dtype.startswith("int") else data.view(getattr(torch, dtype)).view(*shape)


def _external_tensors(path: Path) -> dict[str, TensorProto]:
    """The weights of a graph file by name, without their data."""
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception:  # of protobuf, which is not a dependency of this project
        raise EESDError(f"onnx cannot read {path}; export the model again.") from None
    return {tensor.name: tensor for tensor in graph.initializer if tensor.data_location == TensorProto.EXTERNAL}
