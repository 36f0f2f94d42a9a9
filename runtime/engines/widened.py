"""16-bit graphs in float32: ONNX Runtime on the CPU is fast in float32 only, so graphs are changed in memory when loaded.

Weights, scales, inputs, outputs and caches become float32. Every float16 and bfloat16 value is a float32 value, so nothing is
rounded. Quantized levels and rotary tables (which are float32 in every directory) are read from their files as usual.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest, TensorInfo
from eesd.runtime.engines.graph_file import read_graph

NARROW = ("float16", "bfloat16")
"""Element types that are widened."""

Widened = dict[str, Any]
"""Widened weights by name, as ONNX Runtime's values: graphs that share weights share them. They must live as long as the
sessions, which read those that they did not pack."""


def widened_info(graph: GraphInfo) -> GraphInfo:
    """The description of a graph after :func:`widen`."""

    def wide(tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        return tuple(replace(tensor, dtype="float32") if tensor.dtype in NARROW else tensor for tensor in tensors)

    return replace(graph, inputs=wide(graph.inputs), outputs=wide(graph.outputs))


def widening_memory(manifest: Manifest) -> int:
    """Bytes of memory that loading a widened directory takes at most: its weights, and those that ONNX Runtime packs for each
    graph, in float32."""
    wide = replace(manifest, dtype="float32")
    weights = {name: weight.nbytes for graph in wide.graphs for name, weight in wide.weights_of(graph).items()}
    return sum(weights.values()) + sum(wide.weight_bytes(graph) for graph in wide.graphs)


def widen(path: Path, options: ort.SessionOptions, widened: Widened, threads: int = 1) -> Any:
    """Read a graph, and make it and its weights float32.

    Args:
        path: The graph.
        options: Options of the session that will run it. They get the weights.
        widened: Weights that other graphs of the directory have already widened. Those of this one are added.
        threads: Weights that are widened at the same time.

    Returns:
        The changed graph, an ``onnx.ModelProto``.

    Raises:
        EESDError: onnx cannot read the graph, or the weights are not where the graph says.
    """
    from onnx import TensorProto
    from onnx.external_data_helper import ExternalDataInfo

    model = read_graph(path)
    kinds = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    narrow = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type in kinds}

    def read(name: str) -> Any:
        tensor = narrow[name]
        values = _mapped(path.parent, ExternalDataInfo(tensor), tuple(tensor.dims))
        return ort.OrtValue.ortvalue_from_numpy(_to_float32(values, tensor.data_type == TensorProto.BFLOAT16))

    missing = [name for name in narrow if name not in widened]
    try:
        with ThreadPoolExecutor(threads) as pool:
            widened |= zip(missing, pool.map(read, missing), strict=True)
    except (ValueError, TypeError, OverflowError, OSError):
        raise EESDError(f"{path} and its weights do not fit each other; export the model again.") from None
    for tensor in narrow.values():
        tensor.data_type = TensorProto.FLOAT
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in kinds:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for attribute in (a for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"):
        attribute.i = TensorProto.FLOAT if attribute.i in kinds else attribute.i
    del model.graph.value_info[:]
    options.add_external_initializers(list(narrow), [widened[name] for name in narrow])
    return model


def _mapped(directory: Path, location: Any, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """The 16-bit values of a tensor: mapped pages of its file. (onnx's own reader refuses files that have several hard links.)

    Raises:
        ValueError, TypeError, OverflowError, OSError: There are no such values in the directory.
    """
    if Path(location.location).name != location.location or location.length != 2 * prod(shape):
        raise ValueError(location.location)
    return np.memmap(directory / location.location, np.uint16, mode="r", offset=location.offset, shape=shape)


def _to_float32(values: NDArray[np.uint16], bfloat16: bool) -> NDArray[np.float32]:
    """Widen 16-bit values, which NumPy sees as integers because it has no bfloat16."""
    if not bfloat16:
        return values.view(np.float16).astype(np.float32)
    bits = np.empty(values.shape, np.uint32)  # a bfloat16 is the upper half of a float32
    np.left_shift(values, 16, out=bits, dtype=np.uint32)
    return bits.view(np.float32)
