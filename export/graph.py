"""The graph stage: torch modules to ONNX opset 24, without a single weight in memory.

The modules are built under fake tensors and traced by ``torch.onnx.export``, with numbers in place of the dimensions that vary
(see :data:`SYMBOLS`). What comes out is then made lean: reshapes copy their first two dimensions, linear weights lose their
Transpose (they are stored transposed), and every weight becomes a named reference into ``weights.bin``.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, IdentityEliminationPass, RemoveUnusedNodesPass
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.manifest import TOP_K, TREE_NODES, GraphInfo, TensorInfo
from eesd.common.weights import BLOCK, EMBEDDINGS, LM_HEAD, SCALES, Quantization, StoredWeight, stored_weight
from eesd.model.decoder import KV, Decoder, Inputs, rotary_tables
from eesd.model.exit_head import ExitHead
from eesd.model.graphs import Draft, Verify, draft_layers

OPSET = 24

BATCH, TOKENS, SLOTS = 100_003, 100_019, 100_043
SYMBOLS = {BATCH: "B", TOKENS: "n", SLOTS: "S"}
"""Stand-ins for the dimensions that vary: primes that no model has (fake tensors of that size cost nothing), named once the
graph is there. Tracing with symbolic dimensions gives the same graph and takes three times as long."""


@dataclass(frozen=True)
class ExportOptions:
    """Choices of an export: element type, S (slots of the cache), M (nodes of a token tree), K (draft candidates), stages, and
    whether weights stay in the checkpoint's files, and what linear weights are quantized to (``int8``, ``int4``)."""

    dtype: str
    max_seq_len: int
    max_tree_nodes: int = TREE_NODES
    draft_top_k: int = TOP_K
    stages: int = 1
    link_weights: bool = False
    quantize: str | None = None

    @property
    def quantization(self) -> Quantization | None:
        return None if self.quantize is None else Quantization(self.quantize, BLOCK)


@dataclass(frozen=True)
class Graph:
    """A traced graph whose initializers are still empty, what it needs, and its description for the manifest."""

    model: ir.Model
    weights: tuple[StoredWeight, ...]
    info: GraphInfo


class _Program(nn.Module):
    """Gives a module of ``model.graphs`` the flat signature of an engine, with the rotary tables as constants."""

    def __init__(self, program: Draft | Verify, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.program = program
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(
        self, x: Tensor, position_ids: Tensor, write_indices: Tensor, attn_mask: Tensor, caches: list[KV]
    ) -> tuple[Tensor, ...]:
        inputs = Inputs(self.cos, self.sin, position_ids, write_indices, attn_mask)
        *outputs, written = self.program(x, inputs, caches)
        return (*outputs, *(tensor for cache in written for tensor in cache))


def trace(
    name: str,
    geometry: Geometry,
    exit_config: ExitConfig,
    options: ExportOptions,
    layers: range | None = None,
    linked: frozenset[str] = frozenset(),
) -> Graph:
    """Trace ``"draft"``, ``"verify"``, or with its ``layers`` a stage of verify, to ONNX.

    The weights ``linked`` keep the checkpoint's layout and, where they are linear, their Transpose in the graph. Needs
    memory for the graph only, whatever the model's size.
    """
    dtype, layers = getattr(torch, options.dtype), range(geometry.num_layers) if layers is None else layers
    with FakeTensorMode(), _default_dtype(dtype):
        decoder, head = Decoder(geometry), ExitHead(geometry, exit_config)
        if name == "draft":
            program: Draft | Verify = Draft(decoder, head, options.draft_top_k)
            caches, outputs = draft_layers(head, geometry.num_layers), ["logits", "topk_ids", "topk_logprobs"]
        else:
            program = Verify(decoder, head, layers)
            exits = range(geometry.num_layers, geometry.num_layers + exit_config.blocks) if layers.start == 0 else ()
            caches, outputs = [*layers, *exits], ["logits" if layers.stop == geometry.num_layers else "hidden_out"]
        cos, sin = rotary_tables(geometry, options.max_seq_len)
        module = _Program(program, cos.to(dtype), sin.to(dtype)).eval()
        model = _export(module, _example(geometry, len(caches), dtype, hidden=layers.start > 0))
    _name_dimensions(model.graph)
    _name_tensors(model, caches, "hidden" if layers.start > 0 else "input_ids", outputs)
    _make_lean(model)
    weights = _name_weights(model.graph, geometry.tied_embeddings, options, linked)
    _store_weights(model.graph, weights)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    model.graph.name = f"eesd_{name}"
    info = GraphInfo(f"{name}.onnx", tuple(caches), _describe(model.graph.inputs), _describe(model.graph.outputs))
    return Graph(model, weights, info)


def _example(geometry: Geometry, caches: int, dtype: torch.dtype, hidden: bool) -> tuple[Any, ...]:
    ids, positions = (torch.zeros(BATCH, TOKENS, dtype=torch.int64) for _ in range(2))
    x = torch.zeros(BATCH, TOKENS, geometry.hidden_size, dtype=dtype) if hidden else ids
    shape = (BATCH, geometry.num_kv_heads, SLOTS, geometry.head_dim)
    kv = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(caches)]
    return x, positions, torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH, 1, TOKENS, SLOTS, dtype=dtype), kv


def _export(module: nn.Module, example: tuple[Any, ...]) -> ir.Model:
    with _quiet():
        exported = torch.onnx.export(module, example, dynamo=True, opset_version=OPSET, optimize=False, verbose=False)
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
    """Keep the exporter's notes about packages that we do not use off the user's terminal."""
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
            value.shape = ir.Shape([SYMBOLS.get(dim, dim) if isinstance(dim, int) else dim for dim in value.shape])


def _name_tensors(model: ir.Model, caches: list[int], first: str, outputs: list[str]) -> None:
    """Caches are ``key_3`` going in and ``key_3_out`` coming out; so is the hidden state between stages."""
    model.graph.inputs[0].name = first
    names = [f"{part}_{index}" for index in caches for part in ("key", "value")]
    for value, name in zip(model.graph.inputs[4:], names, strict=True):
        value.name = name
    for value, name in zip(model.graph.outputs, [*outputs, *(f"{name}_out" for name in names)], strict=True):
        value.name = name


def _make_lean(model: ir.Model) -> None:
    _constant_reshapes(model.graph)
    IdentityEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


def _constant_reshapes(graph: ir.Graph) -> None:
    """Replace target shapes [B, n, ...] by constants: 0 copies a dimension of the input."""
    for node in list(graph):
        shape = node.inputs[1] if node.op_type == "Reshape" else None
        producer = shape.producer() if shape is not None else None
        if producer is None or producer.op_type != "Concat":
            continue
        constants = [ir.convenience.get_const_tensor(part) for part in producer.inputs if part is not None]
        dims = [int(constant.numpy().item()) for constant in constants if constant is not None]
        assert dims[:2] == [BATCH, TOKENS] and len(dims) == len(producer.inputs)
        dims[:2] = [0, 0]
        name = "reshape_" + "_".join(map(str, dims)).replace("-", "m")
        target = graph.initializers.get(name)
        if target is None:
            target = ir.val(name, const_value=ir.tensor(dims, dtype=ir.DataType.INT64, name=name))
            target.meta["constant"] = True
            graph.initializers[name] = target
        node.replace_input_with(1, target)
        node.attributes.pop("allowzero", None)


def _name_weights(
    graph: ir.Graph, tied_embeddings: bool, options: ExportOptions, linked: frozenset[str]
) -> tuple[StoredWeight, ...]:
    """Give the initializers their checkpoint names and say how each is stored. Unused ones go."""
    weights = []
    for old in list(graph.initializers):
        value = graph.initializers[old]
        if value.meta.get("constant"):
            continue
        del graph.initializers[old]
        if not value.uses():
            continue
        name = old.removeprefix("program.")
        # A tied LM head is the embedding table; tracing may have kept either name.
        value.name = EMBEDDINGS if name == LM_HEAD and tied_embeddings else name
        assert value.shape is not None
        graph.initializers[value.name] = value
        weights.append(
            stored_weight(value.name, value.shape.numpy(), options.dtype, options.quantization, value.name in linked)
        )
    return tuple(weights)


def _store_weights(graph: ir.Graph, weights: tuple[StoredWeight, ...]) -> None:
    """Fold the Transpose of transposed weights; put a blockwise DequantizeLinear between quantized ones and their MatMul."""
    for weight in weights:
        value = graph.initializers[weight.name]
        value.shape = ir.Shape(weight.stored_shape)
        if weight.transposed:
            for user, _ in list(value.uses()):
                assert user.op_type == "Transpose", f"{weight.name} is used by {user.op_type}, not as a linear weight"
                user.outputs[0].replace_all_uses_with(value)
                graph.remove(user, safe=True)
        if weight.quantization is not None:
            scales = ir.val(weight.name + SCALES, dtype=value.dtype, shape=weight.scales_shape)
            graph.initializers[weight.name + SCALES] = scales
            uses = [(use.node, use.idx) for use in value.uses()]
            wide = ir.node("DequantizeLinear", [value, scales], {"axis": 0, "block_size": weight.quantization.block})
            graph.insert_before(uses[0][0], wide)
            for node, index in uses:
                node.replace_input_with(index, wide.outputs[0])
            value.dtype = ir.DataType[weight.quantization.weights.upper()]


def _describe(values: Any) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(
            value.name,
            tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape),
            {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "INT64": "int64"}[value.dtype.name],
        )
        for value in values
    )


def to_proto(graph: Graph, places: Mapping[str, tuple[str, int, int]]) -> onnx.ModelProto:
    """The graph as a ModelProto whose weights are external data: ``places`` gives each one's (file, offset, length)."""
    for name, value in graph.model.graph.initializers.items():
        if name in places:
            assert value.dtype is not None and value.shape is not None
            value.const_value = ir.ExternalTensor(*places[name], value.dtype, shape=value.shape, name=name)
    graph.model.producer_name = "eesd"
    return ir.to_proto(graph.model)
