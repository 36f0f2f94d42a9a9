"""Load an engine directory's weights into the modules of ``model/``. The weight files are mapped
into memory instead of read.

The graphs' entries of external data give the position of each weight. Weights have the names of the
modules' parameters.

On a GPU, 16-bit directories use this project's kernels. The quantized weights of linear layers then
stay quantized (``torch_quantized.py``), and blocks run fewer kernels (``torch_fused.py``). In all
other cases weights are dequantized when they are loaded, and quantization saves no memory. These
cases are the CPU (where the torch engine is the reference), float32, embedding tables, and ranks
that would cut a block of levels (:meth:`~eesd.common.weights.StoredWeight.keeps_levels`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import DRAFT_VOCAB_FILE, WEIGHTS_FILE, GraphInfo, Manifest
from eesd.common.quantization import DRAFT, LEVELS, LM_HEAD, Quantization, parts_of
from eesd.common.terminal import notice
from eesd.common.weights import (
    DEEP,
    EMBEDDINGS,
    FACTOR,
    INPUTS,
    MINIMUMS,
    ROTARY_TABLES,
    SCALES,
    ZEROS,
    StoredWeight,
    part_shapes,
    read_graph,
    split_side,
    weights_of,
)
from eesd.model.arrays import FLOAT8, NUMPY_TYPES, Array
from eesd.model.as_torch import as_torch
from eesd.model.decoder import Decoder, ExitHead, make_head
from eesd.model.graphs import Draft, Graph, Verify
from eesd.model.quantized import Quantized, dequantize, part_of
from eesd.runtime.engines.device import explain_out_of_memory
from eesd.runtime.engines.team import Split
from eesd.runtime.engines.torch_quantized import (
    TYPES,
    ComputedBefore,
    QuantizedLinear,
    QuantizedWeight,
    arranged,
    fault_of_kernel,
)


@dataclass(frozen=True)
class Levels:
    """The tensors of a weight that stays quantized, as stored in the files."""

    stored: Quantized
    quantization: Quantization

    def to(self, device: torch.device) -> QuantizedWeight:
        return arranged(self.stored, self.quantization, device)


Files = dict[str, NDArray[np.uint8]]
"""The bytes of the weight files by name. They are mapped pages."""
Weights = dict[str, Tensor | QuantizedWeight]
"""Weights by name. Linear weights that are tensors have the shape [out, in]."""


@dataclass(frozen=True)
class StageModules:
    """The modules of one device.

    Attributes:
        verify: The verify stage.
        draft: The draft, with the same weights. Only the first stage has a draft.
        rotary_tables: cos and sin, each [S, D/2].
        by_rows: Whether a row's states in a verify call do not depend on the call's number of rows.
    """

    verify: Verify
    draft: Draft | None
    rotary_tables: tuple[Tensor, Tensor]
    by_rows: bool


def load_modules(
    directory: Path,
    manifest: Manifest,
    devices: Sequence[torch.device],
    draft: bool,
    split: Split | None = None,
    kernels: bool | None = None,
) -> list[StageModules]:
    """Load the verify stages. On the CPU, weights are not copies but the mapped pages of the files.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        devices: The device of each stage.
        draft: Whether to load the draft. Without it, weights that only the draft uses are not
            loaded.
        split: This process's part of the blocks, or None for all blocks.
        kernels: Whether to use Triton kernels. With these kernels, weights stay quantized and
            blocks run fewer kernels. If it is None, they are used on GPUs where they work.

    Raises:
        EESDError: Graphs, weights and manifest do not match, or the weights do not fit the GPU.
    """
    if kernels is None:
        kernels = has_kernels(manifest, devices[0])
    own = manifest if split is None else manifest.on_rank(split.ranks)
    draft_vocab = [DRAFT_VOCAB_FILE] if manifest.exit_head.draft_vocab else []
    files = _map_files(directory, (WEIGHTS_FILE, *draft_vocab, *manifest.linked))
    stages = []
    for number, (graph, device) in enumerate(zip(manifest.verify, devices, strict=True)):
        with_draft = draft and number == 0
        graphs = [graph, manifest.draft] if with_draft else [graph]
        with _explain_mismatch(directory):
            stored = _load_weights(directory, manifest, graphs, files, kernels, split)
        with explain_out_of_memory("The weights"):
            weights = {name: weight.to(device) for name, weight in stored.items()}
        del stored  # this frees dequantized weights
        with _explain_mismatch(directory):
            add = None if split is None else split.add
            verify = Verify(*_empty_modules(own), manifest.stage_layers[number], add)
            drafting = [Draft(*_empty_modules(own), own.draft_top_k, add) for _ in graphs[1:]]
            for of, module in zip(graphs, (verify, *drafting), strict=True):
                _set_weights(module, own, weights, weights_of(manifest, of))
        by_rows = False
        if kernels:
            from eesd.runtime.engines.torch_fused import computes_by_rows, fuse

            fuse(verify, *drafting)
            by_rows = computes_by_rows(verify)
        cos, sin = (
            # A stage may have no attention, and so no rotary tables.
            _tensor(weights.get(name, torch.empty(0))).to(device, getattr(torch, manifest.dtype))
            for name in ROTARY_TABLES
        )
        stages.append(StageModules(verify, drafting[0] if drafting else None, (cos, sin), by_rows))
    return stages


def has_kernels(manifest: Manifest, device: torch.device) -> bool:
    """Return whether a device is a GPU on which the kernels support this directory's type. Logs a
    notice if the kernels do not work on it."""
    if device.type == "cpu" or manifest.dtype not in TYPES:
        return False
    fault = fault_of_kernel(device, getattr(torch, manifest.dtype))
    if fault and any(one.integers for one in manifest.quantization.used):
        notice(
            "The GPU works slowly, and the quantized weights take the memory of "
            f"{manifest.dtype} weights: {fault}."
        )
    elif fault:
        notice(f"The GPU works slowly: {fault}.")
    return fault is None


def _tensor(weight: Tensor | QuantizedWeight) -> Tensor:
    """Return a weight that is never quantized."""
    assert isinstance(weight, Tensor)
    return weight


@contextmanager
def _explain_mismatch(directory: Path) -> Iterator[None]:
    """Turn the errors of a missing weight or a wrong shape into an :class:`EESDError`."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError, OverflowError):
        raise EESDError(
            f"The graphs and weights in {directory} do not fit its manifest; export the model "
            "again."
        ) from None


def _empty_modules(manifest: Manifest) -> tuple[Decoder, ExitHead]:
    """Make the modules of a model, or of this rank's part of the model, on the meta device."""
    with torch.device("meta"):
        return Decoder(manifest.geometry), make_head(
            manifest.geometry, manifest.exit_head, manifest.max_seq_len
        )


def _set_weights(module: Graph, manifest: Manifest, weights: Weights, names: Iterable[str]) -> None:
    """Set the weights of a graph. Parameters without a weight stay on the meta device.

    A layer with a quantized weight replaces all layers whose weights it contains.

    Args:
        module: The graph.
        manifest: The manifest, or the manifest of this rank's part.
        weights: Weights by name.
        names: The weights of the graph.
    """
    used = {name.removeprefix(DRAFT): weights[name] for name in names}
    own: dict[str, Tensor] = {}
    for name, weight in used.items():
        if not isinstance(weight, QuantizedWeight):
            own |= _unpacked(name, weight, manifest)
            continue
        bias = used.get(name.removesuffix("weight") + "bias")
        layers = [part.removesuffix(".weight") for part in parts_of(name)]
        outputs = _outputs(name, weight.scales.shape[1], manifest)
        for layer, columns in zip(layers, outputs, strict=True):
            module.set_submodule(layer, ComputedBefore(columns))
        first = QuantizedLinear(weight, None if bias is None else _tensor(bias), outputs[0])
        module.set_submodule(layers[0], first)
    module.load_state_dict(own, strict=False, assign=True)
    if manifest.geometry.tied_embeddings and LM_HEAD not in used:
        module.lm_head.weight = module.get_parameter(EMBEDDINGS)
    module.requires_grad_(False).eval()


def _map_files(directory: Path, names: Iterable[str]) -> Files:
    """Map files into memory as bytes."""
    return {name: np.memmap(directory / name, np.uint8, mode="r") for name in names}


def _load_weights(
    directory: Path,
    manifest: Manifest,
    graphs: Sequence[GraphInfo],
    files: Files,
    kernels: bool,
    split: Split | None,
) -> dict[str, Tensor | Levels]:
    """Load the weights of graphs by name. Linear weights that are tensors have the shape [out, in].

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        graphs: The graphs whose weights to load.
        files: Bytes of the weight files by name.
        kernels: Whether the quantized weights of linear layers stay quantized.
        split: This process's part of the blocks, or None for all blocks.

    Raises:
        KeyError, ValueError: The graphs do not have the weights that the manifest lists.
    """
    weights: dict[str, Tensor | Levels] = {}
    ranks = 1 if split is None else split.ranks
    for graph in graphs:
        stored = _external_tensors(directory / graph.file)
        expected = weights_of(manifest, graph)
        for name, weight in expected.items():
            if name not in weights:
                linked = ExternalDataInfo(stored[name]).location != WEIGHTS_FILE
                as_stored = (
                    replace(weight, transposed=False, quantization=None) if linked else weight
                )
                found = _load_weight(
                    as_stored, stored, files, kernels and as_stored.keeps_levels(ranks)
                )
                if split is not None:
                    found = _own_part(weight, found, manifest, split)
                weights[name] = found
        if not stored.keys() <= {name for weight in expected.values() for name in weight.tensors}:
            raise ValueError("a weight that is not in the manifest")
    return weights


def _own_part(
    weight: StoredWeight, found: Tensor | Levels, manifest: Manifest, split: Split
) -> Tensor | Levels:
    """Return this rank's part of a weight or a bias. Only the first rank has the bias of a layer
    whose input is split."""
    name, side = weight.name, split_side(weight.name)
    if side is None:
        return found
    if side == INPUTS and isinstance(found, Tensor) and found.ndim == 1:
        return torch.zeros_like(found) if split.rank else found
    size = weight.shape[side]
    sizes = [size]
    if name.startswith(DEEP):
        sizes = [size // 2] * 2
    elif side != INPUTS:
        sizes = _outputs(name, size, manifest)
    shares = split.ranges(sizes)
    if isinstance(found, Tensor):
        return torch.cat(
            [found.narrow(side, share.start, share.stop - share.start) for share in shares], side
        )
    blocks, outputs = found.stored.scales.shape
    [rows] = split.ranges([blocks]) if side == INPUTS else [slice(0, blocks)]
    columns = [slice(0, outputs)] if side == INPUTS else shares
    return Levels(
        part_of(found.stored, found.quantization.weights, rows, columns), found.quantization
    )


def _unpacked(name: str, tensor: Tensor, manifest: Manifest) -> dict[str, Tensor]:
    """Return views of the parts of a packed weight, by name."""
    return dict(
        zip(parts_of(name), torch.split(tensor, _outputs(name, len(tensor), manifest)), strict=True)
    )


def _outputs(name: str, outputs: int, manifest: Manifest) -> list[int]:
    """Return the number of outputs of each part of a weight."""
    parts = parts_of(name)
    return (
        [shape[0] for shape in part_shapes(parts, manifest.geometry, manifest.exit_head)]
        if len(parts) > 1
        else [outputs]
    )


def _load_weight(
    weight: StoredWeight, stored: dict[str, TensorProto], files: Files, keep_levels: bool
) -> Tensor | Levels:
    """Return a weight. It is a view of its file or a dequantized copy, with the shape [out, in]. If
    the weight stays quantized, return its levels instead."""
    quantization = weight.quantization
    if quantization is None:
        tensor = as_torch(
            _stored_tensor(stored[weight.name], weight.dtype, weight.stored_shape, files)
        )
        return tensor.t() if weight.transposed else tensor
    whole = _stored_levels(weight, quantization, stored, files)
    if keep_levels:
        return Levels(whole, quantization)
    values = dequantize(whole, quantization.weights, 0 if weight.transposed else 1)
    tensor = as_torch(values).to(getattr(torch, weight.dtype))
    return tensor.t() if weight.transposed else tensor


def _stored_levels(
    weight: StoredWeight, quantization: Quantization, stored: dict[str, TensorProto], files: Files
) -> Quantized:
    """Return the tensors of a quantized weight as views of their file. Raises ValueError if the
    file has too few bytes."""
    kind = quantization.weights
    shape = weight.scales_shape
    types = {SCALES: weight.scales_dtype}
    if quantization.zero_points:
        types[ZEROS] = kind
    if quantization.minimums:
        types[MINIMUMS] = weight.scales_dtype
    parts = {
        suffix: _stored_tensor(stored[weight.name + suffix], dtype, shape, files)
        for suffix, dtype in types.items()
    }
    parts[""] = _stored_tensor(stored[weight.name], kind, weight.stored_shape, files)
    if any(part.nbytes != weight.tensors[weight.name + suffix] for suffix, part in parts.items()):
        raise ValueError(weight.name)
    if quantization.factor:
        parts[SCALES] = parts[SCALES].view(FLOAT8).reshape(shape)
        parts[FACTOR] = _stored_tensor(stored[weight.name + FACTOR], weight.dtype, (), files)
    return Quantized(
        parts[""], parts[SCALES], parts.get(ZEROS), parts.get(MINIMUMS), parts.get(FACTOR)
    )


def _stored_tensor(tensor: TensorProto, dtype: str, shape: Sequence[int], files: Files) -> Array:
    """Return a view of a tensor in its file. If the tensor is quantized, the view has flat bytes.
    If not, it is an array of the tensor's type and shape.

    Args:
        tensor: The tensor of the graph.
        dtype: The element type that it must have.
        shape: The shape that it must have.
        files: Bytes of the weight files by name.

    Raises:
        KeyError, ValueError: The tensor is in another file, or has another type or shape.
    """
    info = ExternalDataInfo(tensor)
    kind = TensorProto.DataType.Value("FLOAT" if dtype == "float32" else dtype.upper())
    if (
        tensor.data_type != kind
        or tuple(tensor.dims) != tuple(shape)
        or info.offset is None
        or info.length is None
    ):
        raise ValueError(tensor.name)
    data = files[info.location][info.offset : info.offset + info.length]
    return data if dtype in LEVELS else data.view(NUMPY_TYPES[dtype]).reshape(shape)


def _external_tensors(path: Path) -> dict[str, TensorProto]:
    """Return the external tensors of a graph file by name, without their data."""
    return {
        tensor.name: tensor
        for tensor in read_graph(path).graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
    }
