"""Change the standard graphs of plans as TensorRT requires."""

from pathlib import Path
from typing import Any

import numpy as np

from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.trt_plans import attended_slots


def plan_graph(
    directory: Path, manifest: Manifest, graph: GraphInfo, max_batch: int, whole: bool
) -> bytes:
    """Returns the graph in the form that TensorRT reads, for a file next to the weights in
    ``directory``.

    If ``whole`` is true, the parser makes each attention one kernel, or the build fails. If it is
    false, an attention may also be built from parts. The builder still uses a kernel for each
    profile that has one. Fixed dimensions are filled in, and attention reads only the first slots.
    TensorRT-RTX multiplies by int8 weights directly only if each output has one scale, so equal
    scales of all blocks become one.
    """
    import onnx

    model = onnx.load(directory / graph.file, load_external_data=False)
    if len(attended_slots(manifest, graph)) > 1:
        attend_to_first(model.graph)
    fixed = {"S": manifest.gpu_slots}
    if max_batch == 1:
        fixed["B"] = 1
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in fixed:
                dim.dim_value = fixed[dim.dim_param]
    join_scales(model, directory)
    fold_heads(model.graph)
    if not whole:
        for node in model.graph.node:
            if node.op_type == "Attention":
                node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))
    del model.graph.value_info[:]  # the shapes of intermediate values are still symbolic
    return bytes(model.SerializeToString())


def attend_to_first(graph: Any) -> None:
    """Let attention read only the first slots. The mask has a column for each of these slots. There
    are fewer of them than S.

    Attention then copies only this part of the caches. The caches are still updated in place.
    """
    from onnx import helper, numpy_helper

    mask = next(value for value in graph.input if value.name == "attn_mask")
    mask.type.tensor_type.shape.dim[3].dim_param = "s"
    numbers = {"first_slot": 0, "slot_axis": 2}
    graph.initializer.extend(
        numpy_helper.from_array(np.array([number]), name) for name, number in numbers.items()
    )
    nodes = [helper.make_node("Shape", [mask.name], ["slots_seen"], start=3, end=4)]
    for node in graph.node:
        if node.op_type == "Attention":
            for place, name in enumerate(node.input[1:3], 1):
                node.input[place] = f"{name}_seen"
                nodes.append(
                    helper.make_node(
                        "Slice",
                        [name, "first_slot", "slots_seen", "slot_axis"],
                        [node.input[place]],
                    )
                )
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def fold_heads(graph: Any) -> None:
    """Fold query heads in all calls. TensorRT fuses attention only if the number of heads is
    known."""
    many = {node.output[0] for node in graph.node if node.op_type == "Less"}
    for_few = {
        node.output[0]: node.input[2]
        for node in graph.node
        if node.op_type == "Where" and node.input[0] in many
    }
    used = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if used.intersection(node.output):
            node.input[:] = [for_few.get(name, name) for name in node.input]
            used.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def join_scales(model: Any, directory: Path) -> None:
    """Give 8-bit weights one scale for each output ([out]) if their scales [blocks, out] are equal
    in all blocks."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    eight_bits = (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN)
    for node in model.graph.node:
        scales = tensors.get(node.input[1]) if node.op_type == "DequantizeLinear" else None
        if (
            scales is None
            or len(scales.dims) != 2
            or tensors[node.input[0]].data_type not in eight_bits
        ):
            continue
        place = ExternalDataInfo(scales)
        shape = tuple(scales.dims)
        bits = np.uint32 if scales.data_type == onnx.TensorProto.FLOAT else np.uint16
        values = np.memmap(
            directory / place.location, bits, mode="r", offset=place.offset or 0, shape=shape
        )
        if (values != values[0]).any():
            continue
        next(entry for entry in scales.external_data if entry.key == "length").value = str(
            values[0].nbytes
        )
        del scales.dims[0]
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("axis", 1))
