"""The standard graphs of an engine directory. These are the draft graph, and the verify graph or
its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from eesd.common.architecture import Model, draft, verify
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, draft_columns
from eesd.common.manifest import (
    DEFAULT_TOP_K,
    DEFAULT_TREE_NODES,
    SLOTS_PROPERTY,
    GraphInfo,
    TensorInfo,
)
from eesd.common.quantization import UNQUANTIZED, Quantizations
from eesd.common.shapes import graph_needs
from eesd.common.weights import StoredWeight
from eesd.export.onnx_ops import OnnxOperations, onnx_type
from eesd.export.weights import TensorLocation
from eesd.runtime.engines.trt_plans import one_node_is_faster

OPSET = 24
IR_VERSION = 10


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        dtype: Element type of weights, caches and activations.
        max_seq_len: Number of slots of the KV cache, S.
        max_tree_nodes: The largest number of drafted nodes in a round, M.
        draft_top_k: Number of candidates that the draft returns for each node, K.
        stages: Number of stages of the verify graph.
        link_weights: Whether weights stay in the checkpoint's files where possible.
        quantization: Quantization of the weights.
    """

    dtype: str
    max_seq_len: int
    max_tree_nodes: int = DEFAULT_TREE_NODES
    draft_top_k: int = DEFAULT_TOP_K
    stages: int = 1
    link_weights: bool = False
    quantization: Quantizations = UNQUANTIZED


@dataclass(frozen=True)
class Graph:
    """A standard graph.

    Attributes:
        model: The graph, an ``onnx.ModelProto``. Its weights have no data yet.
        weights: The weights that it uses.
        info: Its description for the manifest.
    """

    model: Any
    weights: tuple[StoredWeight, ...]
    info: GraphInfo


def make_graph(
    name: str,
    geometry: Geometry,
    exit_config: ExitConfig,
    options: ExportOptions,
    layers: range | None = None,
    linked: frozenset[str] = frozenset(),
) -> Graph:
    """Write the draft graph, the verify graph or one of its stages. No weight is read.

    Args:
        name: Use ``draft`` for the draft graph. Any other name stands for the verify graph or a
            stage. The file is ``<name>.onnx``.
        geometry: Geometry of the base model.
        exit_config: Configuration of the exit head.
        options: Options of the export.
        layers: Layers of the stage, or None for all layers.
        linked: Names of weights that stay in the checkpoint's layout. The graph transposes linear
            weights.
    """
    if layers is None:
        layers = range(geometry.num_layers)
    is_draft = name == "draft"
    model = Model(geometry, exit_config)
    needs = graph_needs(geometry, exit_config, None if is_draft else layers)
    o = OnnxOperations(
        model=model,
        shapes=needs.weights,
        dtype=options.dtype,
        slots=options.max_seq_len,
        quantization=options.quantization,
        linked=linked,
        packs=not options.link_weights,
        draft=is_draft,
        folds=not is_draft or _draft_folds(options),
    )
    results = _write_draft(o, options.draft_top_k) if is_draft else _write_verify(o, layers)
    caches = sorted(needs.caches)
    inputs = _inputs(o, is_draft, layers)
    kv = _cache_infos(o, caches)
    outputs = [*results, *(TensorInfo(f"{one.name}_out", one.shape, one.dtype) for one in kv)]
    info = GraphInfo(f"{name}.onnx", tuple(caches), (*inputs, *kv), tuple(outputs))
    return Graph(_model(name, o, info), tuple(o.weights.values()), info)


def _draft_folds(options: ExportOptions) -> bool:
    """Whether the draft graph folds query heads. Its results do not affect the output.

    For one token, engines have a faster attention with separate heads. TensorRT-RTX has no such
    attention for long caches, and copies the cache before reading it. It copies it once if heads
    are folded, and once per head if they are not.
    """
    in_place = one_node_is_faster(options.max_seq_len, options.quantization)
    return options.dtype != "float32" and not in_place


def _write_draft(o: OnnxOperations, top_k: int) -> list[TensorInfo]:
    """Write the draft graph with its most likely tokens. Returns its outputs without the caches."""
    logits = _called(o, draft(o, o.model, "input_ids"), "logits")
    best, columns = o.nodes_of("TopK", [logits, o.constant([top_k])], 2, axis=-1)
    total = o.node("ReduceLogSumExp", [logits, o.constant([-1])], keepdims=1)
    o.node("Sub", [best, total], "topk_logprobs")
    geometry, head = o.model
    if head.draft_vocab:
        o.node("Gather", [o.draft_vocab(head.draft_vocab), columns], "topk_ids")
    else:
        _called(o, columns, "topk_ids")
    size = draft_columns(geometry, head)
    return [
        TensorInfo("logits", ("B", "n", size), "float32"),
        TensorInfo("topk_ids", ("B", "n", top_k), "int64"),
        TensorInfo("topk_logprobs", ("B", "n", top_k), "float32"),
    ]


def _write_verify(o: OnnxOperations, layers: range) -> list[TensorInfo]:
    """Write the verify graph or one of its stages. Returns its outputs without the caches."""
    x = verify(o, o.model, "input_ids" if layers.start == 0 else "hidden", layers)
    if layers.stop < o.geometry.num_layers:
        _called(o, x, "hidden_out")
        return [TensorInfo("hidden_out", ("B", "n", o.geometry.hidden_size), o.dtype)]
    _called(o, x, "logits")
    return [TensorInfo("logits", ("B", "R", o.geometry.vocab_size), "float32")]


def _called(o: OnnxOperations, value: str, name: str) -> str:
    """Rename a value that is an output of the graph."""
    for node in o.nodes:
        for names in (node.input, node.output):
            names[:] = [name if one == value else one for one in names]
    return name


def _inputs(o: OnnxOperations, is_draft: bool, layers: range) -> list[TensorInfo]:
    """The inputs that are not caches."""
    first = TensorInfo("input_ids", ("B", "n"), "int64")
    if not is_draft and layers.start > 0:
        first = TensorInfo("hidden", ("B", "n", o.geometry.hidden_size), o.dtype)
    found = [
        first,
        TensorInfo("position_ids", ("B", "n"), "int64"),
        TensorInfo("write_indices", ("B",), "int64"),
        TensorInfo("attn_mask", ("B", 1, "n", "S"), o.dtype),
    ]
    if not is_draft and layers.stop == o.geometry.num_layers:
        found.append(TensorInfo("logit_rows", ("R",), "int64"))
    return found


def _cache_infos(o: OnnxOperations, caches: list[int]) -> list[TensorInfo]:
    """The caches as inputs."""
    shape = ("B", o.geometry.num_kv_heads, "S", o.geometry.head_dim)
    names = [f"{part}_{index}" for index in caches for part in ("key", "value")]
    return [TensorInfo(name, shape, o.dtype) for name in names]


def _model(name: str, o: OnnxOperations, info: GraphInfo) -> Any:
    inputs, outputs = (
        [helper.make_tensor_value_info(one.name, onnx_type(one.dtype), one.shape) for one in infos]
        for infos in (info.inputs, info.outputs)
    )
    check_cache_readers(o.nodes, name)
    initializers = [*o.initializers.values()]
    graph = helper.make_graph(o.nodes, f"eesd_{name}", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", OPSET)]
    model: Any = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="eesd"
    )
    helper.set_model_props(model, {SLOTS_PROPERTY: str(o.slots)})
    return model


def check_cache_readers(nodes: Sequence[Any], name: str) -> None:
    """Check that only the node that writes a cache in place reads it.

    ONNX Runtime chooses the order of independent nodes, so a reader that precedes the writer in the
    graph may run after it. A node that copies the cache may read it if the written values depend on
    the copy.

    Args:
        nodes: The nodes of the graph, in an order in which they can run.
        name: Name of the graph. It is used in the error message.

    Raises:
        EESDError: Another node reads a cache.
    """
    written = {node.input[0]: node for node in nodes if node.op_type == "TensorScatter"}
    for cache, writer in written.items():
        found = {*writer.input[1:]}  # The values that the writer depends on.
        for node in reversed(nodes):
            if found.intersection(node.output):
                found.update(node.input)
        for node in nodes:
            copies = node.op_type in ("GatherElements", "Concat") and found.intersection(
                node.output
            )
            if cache in node.input and node is not writer and not copies:
                raise EESDError(
                    f"In the graph {name} a {node.op_type} reads {cache} besides the node that "
                    "writes it in place, and may run after it; please report this model."
                )


def to_proto(graph: Graph, locations: Mapping[str, TensorLocation]) -> onnx.ModelProto:
    """The graph with its weights as external data at ``locations``."""
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    for tensor in model.graph.initializer:
        if tensor.name in locations:
            tensor.data_location = TensorProto.EXTERNAL
            file, offset, length = locations[tensor.name]
            for key, value in (("location", file), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    return model
