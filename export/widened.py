"""Run 16-bit graphs in float32 for checks. On the CPU, ONNX Runtime's operators are fast only in
float32.

Weights, scales, inputs, outputs and caches become float32. Every float16 and bfloat16 value is a
float32 value, so nothing is rounded. Quantized levels and rotary tables are read from their files
as usual. (Rotary tables are float32 in every directory.)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, numpy_helper

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest, TensorInfo
from eesd.common.quantization import FP4
from eesd.common.weights import read_graph
from eesd.export.stored_values import read_tensor, to_float32
from eesd.runtime.engines.ort_engine import NARROW, OrtEngine

Widened = dict[str, Any]
"""Widened weights by name. They are ONNX Runtime values that several graphs share. They must
outlive the sessions, because the sessions read all weights that they have not packed."""


def reference(
    directory: Path, manifest: Manifest, stages: Sequence[GraphInfo], threads: int
) -> OrtEngine:
    """Run ONNX Runtime's operators on the CPU, with 16-bit weights that are widened in memory.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        stages: The stages of the verify graph, or the draft graph.
        threads: CPU threads of each session.

    Raises:
        EESDError: The graphs cannot be loaded, or the weights are not in the place to which the
            graphs refer.
    """
    has_small_floats = any(one.weights == FP4 for one in manifest.quantization.used)
    if manifest.dtype not in NARROW and not has_small_floats:
        return OrtEngine(directory, manifest, stages, threads)
    widened: Widened = {}

    def read(path: Path, options: ort.SessionOptions) -> bytes:
        return widen(path, options, widened, threads)

    verify = tuple(map(_widened_info, manifest.verify))
    wide = replace(manifest, draft=_widened_info(manifest.draft), verify=verify)
    return OrtEngine(
        directory, wide, [_widened_info(graph) for graph in stages], threads, read=read
    )


def _widened_info(graph: GraphInfo) -> GraphInfo:
    """The description of a graph after :func:`widen`."""

    def wide(tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        return tuple(
            replace(tensor, dtype="float32") if tensor.dtype in NARROW else tensor
            for tensor in tensors
        )

    return replace(graph, inputs=wide(graph.inputs), outputs=wide(graph.outputs))


def widen(path: Path, options: ort.SessionOptions, widened: Widened, threads: int = 1) -> bytes:
    """Read a graph, and make it and its weights float32.

    Args:
        path: The graph.
        options: Options of its session. This function adds the widened weights, and the directory
            of the other weights.
        widened: Weights of the directory that are already widened. This function adds the weights
            of this graph.
        threads: Number of weights to widen at the same time.

    Returns:
        The changed graph, serialized for a session.

    Raises:
        EESDError: onnx cannot read the graph, or the weights are not in the place to which the
            graph refers.
    """
    model = read_graph(path)
    kinds = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    try:
        given = _decode_fp4(model.graph, path.parent, widened)
        given += _widen_weights(
            [one for one in model.graph.initializer if one.data_type in kinds],
            path.parent,
            widened,
            threads,
        )
    except (KeyError, ValueError, TypeError, OverflowError, OSError):
        raise EESDError(
            f"{path} and its weights do not fit each other; export the model again."
        ) from None
    # Intermediate values keep their shapes, because ONNX Runtime would take quadratic time to infer
    # them.
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type in kinds:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in kinds:
                attribute.i = TensorProto.FLOAT
    options.add_external_initializers(given, [widened[name] for name in given])
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent)
    )
    data: bytes = model.SerializeToString()
    return data


def _widen_weights(
    tensors: list[Any], directory: Path, widened: Widened, threads: int
) -> list[str]:
    """Make 16-bit weights float32. Arguments, results and errors are those of
    :func:`_decode_fp4`."""
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:  # a constant of the graph
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    tensors = [tensor for tensor in tensors if tensor.data_location == TensorProto.EXTERNAL]
    missing = [tensor for tensor in tensors if tensor.name not in widened]
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda one: to_float32(*read_tensor(directory, one)), missing)
        widened |= {
            one.name: ort.OrtValue.ortvalue_from_numpy(values)
            for one, values in zip(missing, found, strict=True)
        }
    for tensor in tensors:
        tensor.data_type = TensorProto.FLOAT
    return [tensor.name for tensor in tensors]


def _decode_fp4(graph: Any, directory: Path, widened: Widened) -> list[str]:
    """Convert 4-bit floating-point weights to float32, because ONNX Runtime cannot dequantize them.

    Args:
        graph: The graph. The nodes that dequantize these weights are removed.
        directory: Directory of the graph and its weights.
        widened: The float32 values are added to this dictionary.

    Returns:
        The names of the weights.

    Raises:
        KeyError, ValueError, TypeError, OverflowError, OSError: The weights are not in the place to
            which the graph refers.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    fp4 = {name for name, tensor in tensors.items() if tensor.data_type == TensorProto.FLOAT4E2M1}
    dequantizing = {
        node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"
    }
    names = {output: node.input[0] for output, node in dequantizing.items() if node.input[0] in fp4}
    for output, name in names.items():
        if name not in widened:
            scales_name = dequantizing[output].input[1]
            parts = [tensors[name]]
            if scales_name in dequantizing:  # 8-bit scales, and their factor
                parts += [tensors[part] for part in dequantizing[scales_name].input]
            else:
                parts.append(tensors[scales_name])
            levels, *factors = (to_float32(*read_tensor(directory, part)) for part in parts)
            scales = reduce(np.multiply, factors)
            values = levels * np.repeat(scales, len(levels) // len(scales), 0)
            widened[name] = ort.OrtValue.ortvalue_from_numpy(values)
        tensors[name].data_type = TensorProto.FLOAT
    unused = {*names, *(dequantizing[output].input[1] for output in names)}
    kept = [node for node in graph.node if node.output[0] not in unused]
    for node in kept:
        node.input[:] = [names.get(one, one) for one in node.input]
    used = {name for node in kept for name in node.input}
    for values, left in (
        (graph.node, kept),
        (graph.initializer, [one for one in graph.initializer if one.name in used]),
    ):
        del values[:]
        values.extend(left)
    return list(names.values())
