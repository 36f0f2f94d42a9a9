"""Trace the torch modules to ONNX graphs (opset 24) without loading any weight.

The modules are created under fake tensors and traced by ``torch.onnx.export``. The graph is then
simplified: reshapes copy dimensions instead of computing them, linear layers that read one input
become one product, and linear weights lose their Transpose because they are stored transposed.
Every weight becomes a reference to external data.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    IdentityEliminationPass,
    RemoveUnusedNodesPass,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from eesd.common.geometry import ExitConfig, Geometry, draft_caches, exit_caches
from eesd.common.manifest import (
    DEFAULT_TOP_K,
    DEFAULT_TREE_NODES,
    SLOTS_PROPERTY,
    GraphInfo,
    TensorInfo,
)
from eesd.common.quantization import UNQUANTIZED, Quantizations
from eesd.common.weights import (
    FACTOR,
    HEAD_TABLES,
    MINIMUMS,
    ROTARY_TABLES,
    SCALES,
    ZEROS,
    StoredWeight,
    can_be_packed,
    graph_name,
    packed_name,
    stored_weight,
)
from eesd.export.constants import constant, is_constant, values_of
from eesd.export.experts import keep_first_experts, repeat_experts
from eesd.export.heads import part_heads
from eesd.export.weights import TensorLocation
from eesd.model.decoder import KV, Decoder, Inputs
from eesd.model.eagle import make_head
from eesd.model.graphs import Draft, Verify
from eesd.model.rotary import rotary_tables
from eesd.runtime.engines.trt_plans import one_node_is_faster

OPSET = 24

BATCH, TOKENS, SLOTS, ROWS = 100_003, 100_019, 100_043, 100_049
SYMBOLS = {BATCH: "B", TOKENS: "n", SLOTS: "S", ROWS: "R"}
"""Sizes that stand for the dynamic dimensions during tracing, and the names that replace them in
the graph.

They are primes that no model has as a size, and fake tensors take no memory. Tracing with symbolic
dimensions gives the same graph but takes three times as long.
"""


_ONNX_TYPES = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "int64": "INT64"}
"""ONNX's names of element types."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        dtype: Element type of weights, caches and activations.
        max_seq_len: S, the slots of the KV cache.
        max_tree_nodes: M, the drafted nodes that fit a round.
        draft_top_k: K, the candidates that the draft reports for each node.
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
    """A traced graph.

    Attributes:
        model: The graph. Its initializers have no data.
        weights: The weights that it uses.
        info: Its description for the manifest.
    """

    model: ir.Model
    weights: tuple[StoredWeight, ...]
    info: GraphInfo


class _EngineModule(nn.Module):
    """Draft or Verify with the inputs and outputs of an engine. The rotary tables are constants.

    The tables are float32 and cast in the graph, so that a 16-bit directory that runs in float32
    loses nothing.
    """

    def __init__(self, module: Draft | Verify, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.module = module
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        write_indices: Tensor,
        attn_mask: Tensor,
        logit_rows: Tensor | None,
        caches: list[KV],
    ) -> tuple[Tensor, ...]:
        cos, sin = self.cos.to(attn_mask.dtype), self.sin.to(attn_mask.dtype)
        inputs = Inputs(cos, sin, position_ids, write_indices, attn_mask, logit_rows=logit_rows)
        *outputs, written = self.module(x, inputs, caches)
        return (*outputs, *(tensor for cache in written for tensor in cache))


def trace(
    name: str,
    geometry: Geometry,
    exit_config: ExitConfig,
    options: ExportOptions,
    layers: range | None = None,
    linked: frozenset[str] = frozenset(),
) -> Graph:
    """Trace the draft, verify or a stage of verify. The memory it takes does not depend on the size
    of the weights.

    Args:
        name: ``draft`` for the draft; any other name for verify or a stage. The file is called
            ``<name>.onnx``.
        geometry: Geometry of the base model.
        exit_config: Configuration of the exit head.
        options: Options of the export.
        layers: Layers of the stage; None for all.
        linked: Names of weights that stay in the checkpoint's layout. Linear ones keep their
            Transpose in the graph.
    """
    layers = range(geometry.num_layers) if layers is None else layers
    draft: tuple[int, bool] | None = None
    if name == "draft":
        in_place = one_node_is_faster(options.max_seq_len, options.quantization)
        # Plans then copy the caches, folded for no head twice.
        folded = options.dtype != "float32" and not in_place
        draft = (options.draft_top_k, folded)
        caches, outputs = (
            draft_caches(geometry, exit_config),
            ["logits", "topk_ids", "topk_logprobs"],
        )
    else:
        exits = exit_caches(geometry, exit_config) if layers.start == 0 else ()
        caches, outputs = (
            [*layers, *exits],
            ["logits" if layers.stop == geometry.num_layers else "hidden_out"],
        )
    model = _traced(
        geometry, exit_config, options.dtype, options.max_seq_len, layers, len(caches), draft
    )
    _name_dimensions(model.graph)
    _name_tensors(model, caches, "input_ids" if layers.start == 0 else "hidden", outputs)
    _fold_reshapes(model.graph)
    _fold_splits(model.graph)
    if name != "draft" and options.dtype == "float32":
        # It is for the CPU, where the prompts of 16-bit directories seldom are.
        part_heads(model.graph)
    IdentityEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    _name_weights(model.graph)
    repeat_experts(model.graph)
    if not options.link_weights:  # the checkpoint's files have separate weights
        _pack_linear(model.graph, options.quantization)
        RemoveUnusedNodesPass()(model)
    _rename_weights(model.graph, geometry, options, draft=name == "draft")
    weights = _stored_weights(model.graph, options, linked, geometry.wide_norms)
    _use_stored_layout(model.graph, weights)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    model.graph.name = f"eesd_{name}"
    info = GraphInfo(
        f"{name}.onnx",
        tuple(caches),
        _tensor_infos(model.graph.inputs),
        _tensor_infos(model.graph.outputs),
    )
    return Graph(model, weights, info)


def _traced(
    geometry: Geometry,
    exit_config: ExitConfig,
    dtype: str,
    slots: int,
    layers: range,
    caches: int,
    draft: tuple[int, bool] | None,
) -> ir.Model:
    """The graph as torch writes it: the draft if its number of candidates and ``folded`` are given,
    else layers of verify."""
    # A quantized LM head is not the embedding table.
    untied = replace(geometry, tied_embeddings=False)
    with FakeTensorMode(), _default_dtype(getattr(torch, dtype)):
        decoder, head = Decoder(untied), make_head(geometry, exit_config, slots)
        keep_first_experts(decoder)
        module: Draft | Verify = (
            Verify(decoder, head, layers) if draft is None else Draft(decoder, head, *draft)
        )
        engine = _EngineModule(module, *map(torch.tensor, rotary_tables(geometry, slots))).eval()
        first, rows = layers.start == 0, draft is None and layers.stop == geometry.num_layers
        return _export(
            engine, _example_inputs(geometry, caches, getattr(torch, dtype), first, rows)
        )


def _example_inputs(
    geometry: Geometry, caches: int, dtype: torch.dtype, first: bool, rows: bool
) -> tuple[Any, ...]:
    ids, positions = (torch.zeros(BATCH, TOKENS, dtype=torch.int64) for _ in range(2))
    x = ids if first else torch.zeros(BATCH, TOKENS, geometry.hidden_size, dtype=dtype)
    shape = (BATCH, geometry.num_kv_heads, SLOTS, geometry.head_dim)
    kv = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(caches)]
    slot, mask = (
        torch.zeros(BATCH, dtype=torch.int64),
        torch.zeros(BATCH, 1, TOKENS, SLOTS, dtype=dtype),
    )
    return x, positions, slot, mask, torch.zeros(ROWS, dtype=torch.int64) if rows else None, kv


def _export(module: nn.Module, example: tuple[Any, ...]) -> ir.Model:
    with _quiet():
        exported = torch.onnx.export(
            module, example, dynamo=True, opset_version=OPSET, optimize=False, verbose=False
        )
    assert exported is not None
    return exported.model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings about packages that are not used here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _name_dimensions(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(
                [_symbol(dim) if isinstance(dim, int) else dim for dim in value.shape]
            )


def _symbol(dim: int) -> int | str:
    """The symbol of a traced size; a size that was computed from n has none of its own, and is
    called after how."""
    times, more = divmod(dim, TOKENS)
    if times and more < 2 and dim not in SYMBOLS:
        return f"{times}n" + "+1" * more
    return SYMBOLS.get(dim, dim)


def _name_tensors(model: ir.Model, caches: list[int], first: str, outputs: list[str]) -> None:
    """Name inputs and outputs. A cache is ``key_3`` as input and ``key_3_out`` as output."""
    model.graph.inputs[0].name = first
    names = [f"{part}_{index}" for index in caches for part in ("key", "value")]
    for value, name in zip(model.graph.inputs[-len(names) :], names, strict=True):
        value.name = name
    for value, name in zip(
        model.graph.outputs, [*outputs, *(f"{name}_out" for name in names)], strict=True
    ):
        value.name = name


def _fold_reshapes(graph: ir.Graph) -> None:
    """Replace computed target shapes by constants: 0 copies the dimension of the input, -1 is a
    multiple of n."""
    for node in list(graph):
        shape = node.inputs[1] if node.op_type == "Reshape" else None
        producer = shape.producer() if shape is not None else None
        if producer is None or producer.op_type != "Concat":
            continue
        parts = [
            ir.convenience.get_const_tensor(part) for part in producer.inputs if part is not None
        ]
        dims = [int(part.numpy().item()) for part in parts if part is not None]
        assert dims[0] == BATCH and len(dims) == len(producer.inputs)
        dims = [0, 0 if dims[1] == TOKENS else dims[1], *dims[2:]]
        dims = [-1 if dim and dim % TOKENS == 0 else dim for dim in dims]
        node.replace_input_with(1, constant(graph, "reshape", dims))
        node.attributes.pop("allowzero", None)


def _fold_splits(graph: ir.Graph) -> None:
    """Replace SplitToSequence and the SequenceAt behind it by one Split."""
    for node in [node for node in graph if node.op_type == "SplitToSequence"]:
        parts = [use.node for use in node.outputs[0].uses()]
        assert all(part.op_type == "SequenceAt" for part in parts)
        sizes = values_of(node.inputs[1])
        sizes = sizes * len(parts) if len(sizes) == 1 else sizes
        attributes = {"axis": node.attributes["axis"].as_int()}
        split = ir.node(
            "Split",
            [node.inputs[0], constant(graph, "split", sizes)],
            attributes,
            num_outputs=len(sizes),
        )
        graph.insert_before(node, split)
        for part in parts:
            new = split.outputs[values_of(part.inputs[1])[0]]
            new.name, new.shape, new.type = (
                part.outputs[0].name,
                part.outputs[0].shape,
                part.outputs[0].type,
            )
            part.outputs[0].replace_all_uses_with(new)
            graph.remove(part, safe=True)
        graph.remove(node, safe=True)


def _name_weights(graph: ir.Graph) -> None:
    """Give the initializers the names of the modules' parameters, and remove unused ones."""
    for old in list(graph.initializers):
        value = graph.initializers[old]
        if is_constant(value):
            continue
        del graph.initializers[old]
        if value.uses():
            value.name = old.removeprefix("module.")
            graph.initializers[value.name] = value


def _pack_linear(graph: ir.Graph, quantization: Quantizations) -> None:
    """Compute linear layers that read one input, and whose outputs are concatenated, as one product
    over a packed weight.

    Those whose weights are not quantized alike stay apart.
    """
    for concat in [node for node in graph if node.op_type == "Concat"]:
        layers = [_match_linear(value) for value in concat.inputs if value is not None]
        found = [layer for layer in layers if layer is not None]
        if len(found) < len(layers):
            continue
        shapes = {
            str(layer.weight.name): tuple(layer.weight.shape.numpy())
            for layer in found
            if layer.weight.shape is not None
        }
        if not can_be_packed(list(shapes), shapes.__getitem__, quantization):
            continue
        x = found[0].x
        weight = _packed_weight(graph, [layer.weight for layer in found])
        transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
        nodes = [transpose, ir.node("MatMul", [x, transpose.outputs[0]])]
        biases = [layer.bias for layer in found if layer.bias is not None]
        if biases:
            nodes.append(ir.node("Add", [nodes[-1].outputs[0], _packed_weight(graph, biases)]))
        graph.insert_before(concat, nodes)
        old, new = concat.outputs[0], nodes[-1].outputs[0]
        new.name, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new)
        graph.remove(concat, safe=True)


class _Linear(NamedTuple):
    """A linear layer in a traced graph: MatMul with the Transpose of a weight [out, in], and
    perhaps Add with a bias [out]."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def _match_linear(output: ir.Value) -> _Linear | None:
    """The linear layer that computes ``output``; None if something else does."""
    bias, node = None, output.producer()
    if node is not None and node.op_type == "Add":
        bias = node.inputs[1]
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "MatMul" or node.inputs[0] is None or node.inputs[1] is None:
        return None
    transpose = node.inputs[1].producer()
    if transpose is None or transpose.op_type != "Transpose" or transpose.inputs[0] is None:
        return None
    return _Linear(node.inputs[0], transpose.inputs[0], bias)


def _packed_weight(graph: ir.Graph, parts: list[ir.Value]) -> ir.Value:
    """A new initializer for the parts, one below the other."""
    shapes = [part.shape.numpy() for part in parts if part.shape is not None]
    name = packed_name([str(part.name) for part in parts])
    packed = ir.val(
        name, dtype=parts[0].dtype, shape=(sum(shape[0] for shape in shapes), *shapes[0][1:])
    )
    graph.initializers[name] = packed
    return packed


def _rename_weights(
    graph: ir.Graph, geometry: Geometry, options: ExportOptions, draft: bool
) -> None:
    """Give weights the names that :func:`~eesd.common.weights.graph_name` says. Two of one name
    become one."""
    for old in list(graph.initializers):
        value = graph.initializers[old]
        if is_constant(value) or value.shape is None:
            continue
        name = graph_name(
            old, tuple(value.shape.numpy()), geometry, draft, options.dtype, options.quantization
        )
        if name == old:
            continue
        del graph.initializers[old]
        if name in graph.initializers:
            value.replace_all_uses_with(graph.initializers[name])
        else:
            value.name = name
            graph.initializers[name] = value


def _stored_weights(
    graph: ir.Graph, options: ExportOptions, linked: frozenset[str], wide_norms: bool
) -> tuple[StoredWeight, ...]:
    """Remove weights that are not used any more, and decide how each of the others is stored."""
    weights = []
    for name in list(graph.initializers):
        value = graph.initializers[name]
        if is_constant(value):
            continue
        if not value.uses():
            del graph.initializers[name]
            continue
        assert value.shape is not None
        shape, linked_here = value.shape.numpy(), name in linked
        weights.append(
            stored_weight(name, shape, options.dtype, options.quantization, linked_here, wide_norms)
        )
    return tuple(weights)


def _use_stored_layout(graph: ir.Graph, weights: tuple[StoredWeight, ...]) -> None:
    """Adapt the graph to the stored weights: remove the Transpose of transposed ones, dequantize
    quantized ones."""
    for weight in weights:
        value = graph.initializers[weight.name]
        value.shape = ir.Shape(weight.stored_shape)
        if weight.transposed:
            for user, _ in list(value.uses()):
                assert user.op_type == "Transpose", (
                    f"{weight.name} is used by {user.op_type}, not as a linear weight"
                )
                user.outputs[0].replace_all_uses_with(value)
                graph.remove(user, safe=True)
        if weight.quantization is not None:
            _dequantize(graph, value, weight)


def _dequantize(graph: ir.Graph, value: ir.Value, weight: StoredWeight) -> None:
    """Make a weight its levels, and dequantize them where they are used: of a table that is
    gathered, only those rows."""
    assert weight.quantization is not None and value.dtype is not None
    uses, dtype = [(use.node, use.idx) for use in value.uses()], value.dtype
    value.dtype = ir.DataType[weight.quantization.weights.upper()]
    kind = weight.quantization.scales
    scales = dtype if kind is None else ir.DataType[_ONNX_TYPES.get(kind, kind.upper())]
    suffixes = {SCALES: scales}
    if weight.quantization.minimums:
        suffixes[MINIMUMS] = scales
    if weight.quantization.zero_points:
        suffixes[ZEROS] = value.dtype
    parts = {"": value}
    if weight.quantization.factor:
        suffixes[FACTOR] = dtype
    for suffix, of in suffixes.items():
        shape = () if suffix == FACTOR else weight.scales_shape
        parts[suffix] = ir.val(weight.name + suffix, dtype=of, shape=shape)
        graph.initializers[weight.name + suffix] = parts[suffix]
    gathers = [node for node, _ in uses if node.op_type == "Gather"]
    for gather in gathers:
        rows = {
            suffix: ir.node("Gather", [part, gather.inputs[1]]) for suffix, part in parts.items()
        }
        graph.insert_before(gather, list(rows.values()))
        shape = (0, 0, weight.shape[1])  # 0: as many as there are
        outputs = {suffix: node.outputs[0] for suffix, node in rows.items()}
        new, old = _dequantized(graph, gather, outputs, weight, shape, 2, dtype), gather.outputs[0]
        new.name, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new)
        graph.remove(gather, safe=True)
    products = [(node, index) for node, index in uses if node.op_type != "Gather"]
    if products:
        new = _dequantized(
            graph,
            products[0][0],
            parts,
            weight,
            weight.stored_shape,
            0 if weight.transposed else 1,
            dtype,
        )
        for node, index in products:
            node.replace_input_with(index, new)


def _dequantized(
    graph: ir.Graph,
    before: ir.Node,
    parts: Mapping[str, ir.Value],
    weight: StoredWeight,
    shape: tuple[int, ...],
    axis: int,
    dtype: ir.DataType,
) -> ir.Value:
    """Dequantize the parts of a weight, by suffix, in nodes before another one.

    Scales of another type than the directory's are made float32 first: DequantizeLinear returns the
    type of the scales, and nothing may be rounded to 16 bits before the minimum is added. Those
    with a factor are dequantized by it.

    Args:
        graph: The graph.
        before: Node that uses the weight.
        parts: Levels, and what belongs to them.
        weight: The weight.
        shape: Shape of the levels; 0 for dimensions that are not known.
        axis: Axis of the blocks.
        dtype: Element type of the directory.
    """
    assert weight.quantization is not None
    block, nodes = weight.quantization.block, list[ir.Node]()

    def add(kind: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        nodes.append(ir.node(kind, inputs, attributes))
        return nodes[-1].outputs[0]

    def reshaped(value: ir.Value, sizes: tuple[int, ...]) -> ir.Value:
        return add("Reshape", [value, constant(graph, "reshape", list(sizes))])

    widened, cast = {}, weight.quantization.scales is not None and not weight.quantization.factor
    for suffix in (SCALES, MINIMUMS):
        if suffix in parts:
            narrow = cast and weight.quantization.scales != "float32"
            widened[suffix] = (
                add("Cast", [parts[suffix]], to=ir.DataType.FLOAT) if narrow else parts[suffix]
            )
    if FACTOR in parts:
        widened[SCALES] = add("DequantizeLinear", [parts[SCALES], parts[FACTOR]])
    zeros = [parts[ZEROS]] if ZEROS in parts else []
    found = add(
        "DequantizeLinear", [parts[""], widened[SCALES], *zeros], axis=axis, block_size=block
    )
    if MINIMUMS in parts:
        blocks = (*shape[:axis], shape[axis] // block)
        found = reshaped(found, (*blocks, block, *shape[axis + 1 :]))
        found = add("Add", [found, reshaped(widened[MINIMUMS], (*blocks, 1, *shape[axis + 1 :]))])
        found = reshaped(found, shape)
    if cast and dtype != ir.DataType.FLOAT:
        found = add("Cast", [found], to=dtype)
    graph.insert_before(before, nodes)
    return found


def _tensor_infos(values: Any) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(
            value.name,
            tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape),
            {name: dtype for dtype, name in _ONNX_TYPES.items()}[value.dtype.name],
        )
        for value in values
    )


def to_proto(graph: Graph, locations: Mapping[str, TensorLocation]) -> onnx.ModelProto:
    """Convert a graph to a ModelProto whose weights are external data at ``locations``."""
    for name, value in graph.model.graph.initializers.items():
        if name in locations:
            assert value.dtype is not None and value.shape is not None
            value.const_value = ir.ExternalTensor(
                *locations[name], value.dtype, shape=value.shape, name=name
            )
    graph.model.producer_name = "eesd"
    tables = graph.model.graph.initializers
    rotary_shape = tables[HEAD_TABLES[0] if HEAD_TABLES[0] in tables else ROTARY_TABLES[0]].shape
    assert rotary_shape is not None
    graph.model.metadata_props[SLOTS_PROPERTY] = str(rotary_shape[0])
    return ir.to_proto(graph.model)
