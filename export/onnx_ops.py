"""Write the model's operations as standard ONNX (opset 24), without loading a weight.

Norms, rotary embeddings, cache writes and attention are single operators. Shapes are constants, in
which 0 copies a dimension of the input. Linear layers with the same input become one product over a
packed weight if they are quantized alike. Linear weights are stored transposed, because this is
MatMul's layout.

Drafting must not change any bit of a logit, so a token's results must not depend on the number of
tokens in a pass. For ONNX Runtime's products and norms this always holds. For attention, it holds
only with two or more queries. So the verify graph *folds* the query heads of a KV head into
additional queries of that head. If heads are not grouped, it computes the first query twice. Folded
attention also reads each cache only once. In float32, heads stay separate for prompts. ONNX Runtime
gives each head to one thread, and a few heads would load the threads unevenly. From two nodes on,
both forms give the same bits. The draft graph does not need to fold heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from eesd.common.architecture import (
    DELTA_BIAS,
    DELTA_DECAY,
    DELTA_EPS,
    DELTA_NORM,
    DELTA_SKIP,
    DELTA_TAPS,
    DELTA_TAPS_BIAS,
    LOGIT_BIAS,
    SINKS,
    TAPS,
    XIELU,
    Block,
    Linear,
    Mixture,
    Model,
    Norm,
    Table,
)
from eesd.common.geometry import SLIDING, UNROTATED, Experts, Geometry, Latent
from eesd.common.manifest import MASKED
from eesd.common.quantization import EXIT_HEAD, Quantizations, Shape
from eesd.common.weights import (
    DRAFT_VOCAB,
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
from eesd.export.activations import activated, clamped, xielu

FEW_NODES = 3
"""In a call of B sequences, the verify graph folds query heads if each sequence has at most
``FEW_NODES * B`` nodes. The reason is in docs/decisions/0058."""
CONSTANT = "constant."
"""Prefix of initializers that are not weights."""


def onnx_type(dtype: str) -> int:
    """The number that ``TensorProto.DataType`` has for an element type of this project."""
    names = {"float32": "FLOAT", "float8e4m3fn": "FLOAT8E4M3FN", "float4e2m1": "FLOAT4E2M1"}
    return int(getattr(TensorProto, names.get(dtype, dtype.upper())))


@dataclass
class OnnxOperations:
    """Writes the nodes of one graph. A value is the name of a tensor [B, n, columns].

    The operations fill nodes, initializers and weights.

    Attributes:
        model: The model.
        shapes: Shapes of the weights that the graph uses, by name.
        dtype: Element type of weights, caches and activations.
        slots: Number of rows of the rotary tables, S.
        quantization: Quantization of the weights.
        linked: Names of weights that stay in the checkpoint's layout.
        packs: Whether layers with the same input may be packed.
        draft: Whether this is the draft graph.
        folds: Whether query heads are folded.
        nodes: The nodes so far.
        initializers: The initializers so far, by name. Constants have their values, and weights
            have no data.
        weights: Storage of the weights in use, by name.
    """

    model: Model
    shapes: Mapping[str, Shape]
    dtype: str
    slots: int
    quantization: Quantizations
    linked: frozenset[str]
    packs: bool
    draft: bool
    folds: bool
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    _made: dict[str, str] = field(default_factory=dict)
    """Values that several nodes use, such as dequantized weights, tables and masks."""

    @property
    def geometry(self) -> Geometry:
        """Geometry of the base model."""
        return self.model.geometry

    # --- nodes, constants and weights

    def node(self, kind: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """Add a node, and return its output."""
        output = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def nodes_of(
        self, kind: str, inputs: Sequence[str], count: int, **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs."""
        name = f"{kind}_{len(self.nodes)}"
        outputs = [f"{name}.{index}" for index in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=name, **attributes))
        return outputs

    def constant(self, values: Any, dtype: str = "int64") -> str:
        """A constant. Nodes with the same values share it."""
        array = np.array(values)
        text = "_".join(map(str, array.reshape(-1).tolist())).replace("-", "m")
        name = f"{CONSTANT}{dtype}.{array.ndim}.{text}"
        if name not in self.initializers:
            floats = array.reshape(-1).tolist()
            self.initializers[name] = helper.make_tensor(
                name, onnx_type(dtype), array.shape, floats
            )
        return name

    def _weight(self, name: str, shape: Shape | None = None) -> StoredWeight:
        """A weight by its name in the description. ``shape`` is required for packed weights and
        tables."""
        shape = self.shapes[name] if shape is None else shape
        name = graph_name(name, shape, self.geometry, self.draft, self.dtype, self.quantization)
        if name not in self.weights:
            linked = name in self.linked
            wide = self.geometry.wide_norms
            weight = stored_weight(name, shape, self.dtype, self.quantization, linked, wide)
            self.weights[name] = weight
            for tensor, (kind, of) in _tensors(weight).items():
                self.initializers[tensor] = TensorProto(
                    name=tensor, data_type=onnx_type(kind), dims=of
                )
        return self.weights[name]

    def _matrix(self, name: str, shape: Shape | None = None) -> str:
        """A linear weight [in, out], which is the layout of MatMul."""
        weight = self._weight(name, shape)
        if weight.name in self._made:
            return self._made[weight.name]
        value = weight.name
        if weight.quantization is not None:
            parts = {tensor.removeprefix(weight.name): tensor for tensor in _tensors(weight)}
            axis = 0 if weight.transposed else 1
            value = self._dequantized(parts, weight, weight.stored_shape, axis)
        if not weight.transposed:
            value = self.node("Transpose", [value], perm=[1, 0])
        self._made[weight.name] = value
        return value

    def _dequantized(
        self, parts: Mapping[str, str], weight: StoredWeight, shape: Shape, axis: int
    ) -> str:
        """Dequantize a weight, whose parts are given by their suffixes.

        Scales whose type differs from the directory's are made float32 first. DequantizeLinear
        returns the type of the scales, and nothing may be rounded to 16 bits before the minimum is
        added.

        Args:
            parts: The levels. The scales, zero points, minimums and factor follow if there are any.
            weight: The weight.
            shape: Shape of the levels, in which 0 stands for an unknown dimension.
            axis: Axis of the blocks.
        """
        of = weight.quantization
        assert of is not None
        casts = of.scales is not None and not of.factor
        scales = parts[SCALES]
        if FACTOR in parts:
            scales = self.node("DequantizeLinear", [scales, parts[FACTOR]])
        elif casts:
            scales = self._cast(scales, of.scales, "float32")
        given = [parts[""], scales]
        if ZEROS in parts:
            given.append(parts[ZEROS])
        found = self.node("DequantizeLinear", given, axis=axis, block_size=of.block)
        if MINIMUMS in parts:
            least = self._cast(parts[MINIMUMS], of.scales, "float32")
            blocks = [*shape[:axis], shape[axis] // of.block]
            after = shape[axis + 1 :]
            found = self._reshape(found, [*blocks, of.block, *after])
            found = self.node("Add", [found, self._reshape(least, [*blocks, 1, *after])])
            found = self._reshape(found, shape)
        return self._cast(found, "float32", self.dtype) if casts else found

    def _cast(self, x: str, given: str | None, wanted: str) -> str:
        if given == wanted:
            return x
        return self.node("Cast", [x], to=onnx_type(wanted))

    def _reshape(self, x: str, shape: Sequence[int]) -> str:
        return self.node("Reshape", [x, self.constant(shape)])

    def _split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        return self.nodes_of("Split", [x, self.constant(sizes)], len(sizes), axis=axis)

    def _slice(self, x: str, start: int, stop: int, axis: int) -> str:
        ends = [self.constant([number]) for number in (start, stop, axis)]
        return self.node("Slice", [x, *ends])

    def _unsqueeze(self, x: str, *axes: int) -> str:
        return self.node("Unsqueeze", [x, self.constant(axes)])

    # --- operations

    def embed(self, ids: str, table: Table) -> str:
        weight = self._weight(f"{table.name}.weight")
        parts = {tensor.removeprefix(weight.name): tensor for tensor in _tensors(weight)}
        rows = {suffix: self.node("Gather", [part, ids]) for suffix, part in parts.items()}
        x = rows[""]
        if weight.quantization is not None:
            x = self._dequantized(rows, weight, (0, 0, weight.shape[1]), 2)
        if table.scale == 1:
            return x
        wide = self._cast(x, self.dtype, "float32")
        scaled = self.node("Mul", [wide, self.constant(table.scale, "float32")])
        return self._cast(scaled, "float32", self.dtype)

    def weight(self, module: str, size: int) -> str:
        return self._weight(f"{module}.weight").name

    def multiply(self, x: str, y: str, name: str) -> str:
        return self.node("Mul", [x, y])

    def times(self, x: str, module: str, size: int, name: str) -> str:
        wide = [self._cast(x, self.dtype, "float32"), self.weight(module, size)]
        return self._narrow(self.node("Mul", wide))

    def limit(self, x: str, most: float, name: str) -> str:
        bounds = [self.constant(bound, self.dtype) for bound in (-most, most)]
        return self.node("Clip", [x, *bounds])

    def norm(self, x: str, norm: Norm) -> str:
        if norm.groups > 1:
            apart = self._reshape(x, [0, 0, norm.groups, -1])
            return self._reshape(self.norm(apart, norm._replace(groups=1)), [0, 0, -1])
        if norm.bare:
            wide = self._cast(x, self.dtype, "float32")
            given = [wide, self.constant([1.0] * norm.bare, "float32")]
            normed = self.node("RMSNormalization", given, axis=-1, epsilon=norm.eps, stash_type=1)
            return self._cast(normed, "float32", self.dtype)
        weight = self._weight(f"{norm.name}.weight")
        x = self._cast(x, self.dtype, weight.dtype)
        attributes: dict[str, Any] = {"axis": -1, "epsilon": norm.eps, "stash_type": 1}
        given = [x, weight.name]
        if norm.bias:
            given.append(self._weight(f"{norm.name}.bias").name)
        kind = "LayerNormalization" if norm.centred else "RMSNormalization"
        normed = self.node(kind, given, **attributes)
        return self._cast(normed, weight.dtype, self.dtype)

    def scale(self, x: str, gate: str, name: str) -> str:
        return self.node("Mul", [x, self.node("Sigmoid", [gate])])

    def activate(self, x: str, block: Block, name: str) -> str:
        """Compute xielu in float32, because 16-bit types are too coarse for its differences of
        exponentials."""
        kind = block.geometry.activation
        if kind != "xielu":
            return activated(self.node, x, kind)
        weight = self._weight(f"{block.prefix}{XIELU}.weight")
        factors = self._split(self._cast(weight.name, weight.dtype, "float32"), [1, 1], 0)
        wide = self._cast(x, self.dtype, "float32")
        found = xielu(self.node, self._float, wide, factors)
        return self._cast(found, "float32", self.dtype)

    def _float(self, value: float) -> str:
        return self.constant(value, "float32")

    def product(
        self,
        x: str,
        layers: Sequence[Linear],
        name: str,
        norm: Norm | None = None,
        residual: Sequence[str] = (),
        activation: str = "",
    ) -> str:
        if norm:
            x = self.norm(x, norm)
        y = self._linear(x, layers)
        if activation:
            y = self._gated(y, layers, activation)
        return self.add(residual, y, name)

    def _linear(self, x: str, layers: Sequence[Linear]) -> str:
        """The outputs of linear layers side by side."""
        names = [f"{layer.name}.weight" for layer in layers]
        several = len(layers) > 1 and self.packs
        if several and can_be_packed(names, self.shapes.__getitem__, self.quantization):
            return self._packed(x, names, layers)
        outputs = [self.node("MatMul", [x, self._matrix(name)]) for name in names]
        for index, layer in enumerate(layers):
            if layer.bias:
                bias = self._weight(f"{layer.name}.bias").name
                outputs[index] = self.node("Add", [outputs[index], bias])
        return self.concat(outputs, "")

    def _packed(self, x: str, names: Sequence[str], layers: Sequence[Linear]) -> str:
        """The outputs of layers whose weights are packed into one."""
        rows = sum(layer.outputs for layer in layers)
        inputs = self.shapes[names[0]][1]
        y = self.node("MatMul", [x, self._matrix(packed_name(names), (rows, inputs))])
        biases = [f"{layer.name}.bias" for layer in layers if layer.bias]
        if not biases:
            return y
        return self.node("Add", [y, self._weight(packed_name(biases), (rows,)).name])

    def _gated(self, y: str, layers: Sequence[Linear], activation: str) -> str:
        """Returns the activated gate times up. Gate and up are side by side in y."""
        gate, up = self._split(y, [layer.outputs for layer in layers], -1)
        if activation == "clamped":
            wide = [self._cast(part, self.dtype, "float32") for part in (gate, up)]
            return self._cast(clamped(self.node, self._float, *wide), "float32", self.dtype)
        if activation == "silu":
            active = self.node("Mul", [gate, self.node("Sigmoid", [gate])])
        else:
            active = self.node("Gelu", [gate], approximate="tanh")
        return self.node("Mul", [active, up])

    def mixture(
        self,
        x: str,
        block: Block,
        mixture: Mixture,
        name: str,
        norm: Norm | None,
        residual: Sequence[str],
    ) -> str:
        """Run each expert on all tokens.

        If a token does not use an expert, the expert's inputs for this token are 0. Its outputs are
        then 0, too, and never exceed the range of the type.
        """
        routed = self.norm(x, mixture.router_norm) if mixture.router_norm else ""
        if norm:
            x = self.norm(x, norm)
        weights = self._shares(routed or x, block, mixture)
        zero = self.constant(0.0, self.dtype)
        sizes = self.node("Abs", [weights]) if mixture.scales else weights
        uses = self.node("Cast", [self.node("Greater", [sizes, zero])], to=onnx_type(self.dtype))
        ones = [1] * len(mixture.experts)
        columns = zip(self._split(uses, ones, -1), self._split(weights, ones, -1), strict=True)
        total = ""
        for (gate, up, down), (used, weight) in zip(mixture.experts, columns, strict=True):
            own = self.node("Mul", [x, used])
            gated = self._gated(
                self._linear(own, [gate, up]), [gate, up], block.geometry.activation
            )
            added = self.node("Mul", [self._linear(gated, [down]), weight])
            total = self.node("Add", [total, added]) if total else added
        return self.add(residual, total, name)

    def _shares(self, x: str, block: Block, mixture: Mixture) -> str:
        """Returns the weights of the experts [B, n, E]. A weight is 0 if the token does not use the
        expert."""
        experts = block.geometry.experts
        assert experts is not None
        if experts.choice_bias:  # differences of the sums are too small for 16 bits
            matrix = self._matrix(f"{mixture.router.name}.weight")
            wide = [self._cast(one, self.dtype, "float32") for one in (x, matrix)]
            logits = self.node("MatMul", wide)
        else:
            logits = self._cast(self._linear(x, [mixture.router]), self.dtype, "float32")
        if experts.scores == "sigmoid":
            shares = self.node("Sigmoid", [logits])
        elif experts.scores == "softmax":
            shares = self.node("Softmax", [logits], axis=-1)
        else:
            shares = logits
        ranks = self._ranks(shares, experts, mixture)
        best, indices = self._largest(ranks, experts.used)
        if experts.scores == "sparsemixer":
            best = self._near_shares(logits, best, indices, experts)
        elif ranks != shares:
            best = self.node("GatherElements", [shares, indices], axis=-1)
        if experts.normed:
            total = self.node("ReduceSum", [best, self.constant([-1])], keepdims=1)
            if experts.norm_eps:
                total = self.node("Add", [total, self.constant(experts.norm_eps, "float32")])
            best = self.node("Div", [best, total])
        if mixture.scales:
            factors = self._cast(self.weight(mixture.scales, experts.count), self.dtype, "float32")
            best = self.node("Mul", [best, self.node("Gather", [factors, indices])])
        if experts.scale != 1:
            best = self.node("Mul", [best, self.constant(experts.scale, "float32")])
        shape = self.node("Shape", [shares])
        none = self.node("Expand", [self.constant(0.0, "float32"), shape])
        found = self.node("ScatterElements", [none, indices, best], axis=-1)
        return self._cast(found, "float32", self.dtype)

    def _near_shares(self, logits: str, best: str, indices: str, experts: Experts) -> str:
        """The shares [B, n, k] of sparsemixer. A chosen logit is the largest of the logits that are
        left, so its share is the largest, too."""
        left = logits
        shares = list[str]()
        ones = [1] * experts.used
        none = self.constant(-1e30, "float32")
        parts = (self._split(one, ones, -1) for one in (best, indices))
        for most, index in zip(*parts, strict=True):
            size = self.node("Max", [self.node("Abs", [logits]), most])
            distance = self.node("Div", [self.node("Sub", [most, logits]), size])
            far = self.node("Greater", [distance, self.constant(experts.margin, "float32")])
            gates = self.node("Softmax", [self.node("Where", [far, none, left])], axis=-1)
            shares.append(self.node("ReduceMax", [gates, self.constant([-1])], keepdims=1))
            hidden = self.node("Expand", [none, self.node("Shape", [index])])
            left = self.node("ScatterElements", [left, index, hidden], axis=-1)
        return self.concat(shares, "")

    def _largest(self, x: str, count: int) -> list[str]:
        """The largest values of each row, and their columns."""
        return self.nodes_of("TopK", [x, self.constant([count])], 2, axis=-1)

    def _ranks(self, scores: str, experts: Experts, mixture: Mixture) -> str:
        """Returns the scores that choose experts. They include biases, and are very small outside
        of the groups that a token uses."""
        if mixture.bias:
            scores = self.node("Add", [scores, self.weight(mixture.bias, experts.count)])
        if experts.groups == 1:
            return scores
        apart = self._reshape(scores, [0, 0, experts.groups, -1])
        best = self._largest(apart, experts.group_best)[0]
        ranks = self.node("ReduceSum", [best, self.constant([-1])], keepdims=0)
        used = self._largest(ranks, experts.used_groups)[1]
        shape = self.node("Shape", [ranks])
        far = self.node("Expand", [self.constant(-1e30, "float32"), shape])
        zeros = self.node("Expand", [self.constant(0.0, "float32"), self.node("Shape", [used])])
        added = self.node("ScatterElements", [far, used, zeros], axis=-1)
        return self._reshape(self.node("Add", [apart, self._unsqueeze(added, -1)]), [0, 0, -1])

    def add(self, residual: Sequence[str], y: str, name: str) -> str:
        if not residual:
            return y
        first, *others = residual
        total = self.node("Add", [first, y])
        for other in others:
            total = self.node("Add", [total, other])
        return total

    def split(self, x: str, sizes: Sequence[int], names: Sequence[str]) -> Sequence[str]:
        return self._split(x, sizes, -1)

    def concat(self, parts: Sequence[str], name: str) -> str:
        if len(parts) == 1:
            return parts[0]
        return self.node("Concat", parts, axis=-1)

    def by_heads(self, x: str, layers: Sequence[Linear], name: str) -> str:
        parts = self.nodes_of("Split", [x], len(layers), axis=-1, num_outputs=len(layers))
        found = [self._linear(part, [one]) for part, one in zip(parts, layers, strict=True)]
        return self.concat(found, "")

    def _latent_attention(self, qkv: str, block: Block, latent: Latent, attends: bool) -> str:
        """Attention to the rows in the caches. A row consists of a slot's keys, followed by its
        values.

        The values of this attention are whole rows, because TensorRT needs keys and values of one
        size.
        """
        geometry = block.geometry
        counts = [geometry.num_heads] * attends + [1]
        sizes = [count * size for count in counts for size in (latent.rank, latent.rotary)]
        parts = self._split(qkv, sizes, -1)
        rows = []
        for still, turned in zip(parts[::2], parts[1::2], strict=True):
            own = self._turned(self._heads_apart(turned, latent.rotary), block, "")
            rows.append(self.node("Concat", [self._heads_apart(still, latent.rank), own], axis=-1))
        row = self._heads_joined(rows[-1], latent.width)
        caches = self._write_states(row, latent.width, range(block.cache, block.cache + 1))
        if not attends:
            return ""
        keys = self._slice(self.node("Concat", caches, axis=-1), 0, latent.width, -1)
        y = self._attended(rows[0], keys, keys, self._mask(block), geometry)
        return self._heads_joined(
            self._slice(y, 0, latent.rank, -1), geometry.num_heads * latent.rank
        )

    def attention(self, qkv: str, block: Block, name: str, attends: bool) -> str:
        geometry = block.geometry
        if geometry.latent:
            return self._latent_attention(qkv, block, geometry.latent, attends)
        kv_heads = geometry.num_kv_heads
        size = geometry.head_dim
        heads = self._heads_apart(qkv, size)
        counts = [geometry.num_heads] * attends + [kv_heads, kv_heads] * block.writes
        parts = self._split(heads, counts, 1)
        if block.writes:
            keys = self._as_cached(self._turned(parts[-2], block, "self_attn.k_norm"), block)
            self._write(f"key_{block.cache}", keys)
            self._write(f"value_{block.cache}", self._as_cached(parts[-1], block))
        if not attends:
            return ""
        q = self._turned(parts[0], block, "self_attn.q_norm")
        written = (f"{part}_{block.cache}_out" for part in ("key", "value"))
        keys, values = (self._as_heads(cache, block) for cache in written)
        mask = self._mask(block)
        if geometry.sinks:
            attended = self._attended_with_sinks(q, keys, values, mask, block)
        else:
            attended = self._attended(q, keys, values, mask, geometry)
        return self._heads_joined(attended, geometry.num_heads * size)

    def _units(self, block: Block) -> int:
        """Number of cache heads that hold one head of a block."""
        return block.geometry.head_dim // self.geometry.head_dim

    def _as_cached(self, x: str, block: Block) -> str:
        """Keys or values [B, heads, n, D] of a block, in the shape of the caches."""
        heads = block.geometry.num_kv_heads
        units = self._units(block)
        if units > 1:
            apart = self._reshape(x, [0, heads, -1, units, self.geometry.head_dim])
            apart = self.node("Transpose", [apart], perm=[0, 1, 3, 2, 4])
            x = self._reshape(apart, [0, heads * units, -1, self.geometry.head_dim])
        spare = self.geometry.num_kv_heads - heads * units
        return self.node("Pad", [x, self.constant([0] * 5 + [spare, 0, 0])]) if spare else x

    def _as_heads(self, cache: str, block: Block) -> str:
        """Keys or values of a cache in the shape [B, heads, S, D] that a block uses."""
        key = f"{cache} of {block.kind}"
        if key in self._made:
            return self._made[key]
        heads = block.geometry.num_kv_heads
        units = self._units(block)
        found = cache
        if heads * units < self.geometry.num_kv_heads:
            found = self._slice(cache, 0, heads * units, 1)
        if units > 1:
            found = self._reshape(found, [0, heads, units, -1, self.geometry.head_dim])
            found = self.node("Transpose", [found], perm=[0, 1, 3, 2, 4])
            found = self._reshape(found, [0, heads, -1, block.geometry.head_dim])
        self._made[key] = found
        return found

    def _attended_with_sinks(self, q: str, keys: str, values: str, mask: str, block: Block) -> str:
        """Attention [B, H, n, D] with sinks. The softmax has one more score for each head, which is
        its sink.

        ONNX's operator has no sinks. Scores are computed in the graph's type, and the softmax is
        computed in float32.
        """
        geometry = block.geometry
        kv_heads = geometry.num_kv_heads
        group = geometry.num_heads // kv_heads
        size = geometry.head_dim
        q = self._reshape(q, [0, kv_heads, group, -1, size])  # [B, KV, group, n, D]
        q = self.node(
            "Mul", [self._cast(q, self.dtype, "float32"), self._float(geometry.score_scale)]
        )
        q = self._cast(q, "float32", self.dtype)
        keys = self.node("Transpose", [self._unsqueeze(keys, 2)], perm=[0, 1, 2, 4, 3])
        scores = self.node("MatMul", [q, keys])
        scores = self.node("Add", [scores, self._unsqueeze(mask, 1)])
        scores = self._cast(scores, self.dtype, "float32")
        weight = self._weight(f"{block.prefix}{SINKS}.weight")
        sinks = self._cast(weight.name, weight.dtype, "float32")
        sinks = self._reshape(sinks, [1, kv_heads, group, 1, 1])
        shape = self.node("Shape", [scores], end=4)
        shape = self.node("Concat", [shape, self.constant([1])], axis=0)
        beside = self.node("Expand", [sinks, shape])
        weights = self.node("Softmax", [self.node("Concat", [beside, scores], axis=-1)], axis=-1)
        weights = self._slice(weights, 1, 2**31 - 1, -1)
        weights = self._cast(weights, "float32", self.dtype)
        attended = self.node("MatMul", [weights, self._unsqueeze(values, 2)])
        return self._reshape(attended, [0, geometry.num_heads, -1, size])

    def _heads_apart(self, x: str, size: int) -> str:
        """Reshape [B, n, heads D] to [B, heads, n, D]."""
        return self.node("Transpose", [self._reshape(x, [0, 0, -1, size])], perm=[0, 2, 1, 3])

    def _heads_joined(self, x: str, columns: int, tokens: int = 0) -> str:
        """Reshape [B, heads, n, D] to [B, n, heads D]."""
        apart = self.node("Transpose", [x], perm=[0, 2, 1, 3])
        return self._reshape(apart, [0, tokens, columns])

    def _turned(self, x: str, block: Block, norm: str) -> str:
        """Queries or keys [B, heads, n, D], normalized and rotated."""
        geometry = block.geometry
        if geometry.qk_norm and not geometry.qk_norm_rotated:
            x = self.norm(x, block.norm(norm))
        if block.kind != UNROTATED:
            x = self.node("RotaryEmbedding", [x, *self._tables(block), "position_ids"])
        if geometry.qk_norm and geometry.qk_norm_rotated:
            x = self.norm(x, block.norm(norm))
        return x

    def _tables(self, block: Block) -> list[str]:
        """The rotary tables of a block, rounded from float32."""
        geometry = block.geometry
        half = geometry.rotary_dim // 2
        columns = geometry.rotary_columns if block.eagle else self.geometry.rotary_columns
        local = block.kind == SLIDING and geometry.local_theta > 0
        names = HEAD_TABLES if block.eagle else ROTARY_TABLES
        return [self._table(name, half, columns, local) for name in names]

    def _table(self, name: str, half: int, columns: int, local: bool) -> str:
        key = f"{name}.{'local' if local else 'full'}"
        if key not in self._made:
            weight = self._weight(name, (self.slots, columns))
            value = self._cast(weight.name, "float32", self.dtype)
            if columns > half:
                start = columns - half if local else 0
                value = self._slice(value, start, start + half, 1)
            self._made[key] = value
        return self._made[key]

    def _write(self, cache: str, new: str) -> str:
        """Write keys or values [B, KV, n, D] into a cache, which becomes an output."""
        return self.node("TensorScatter", [cache, new, "write_indices"], f"{cache}_out", axis=2)

    def _attended(self, q: str, keys: str, values: str, mask: str, geometry: Geometry) -> str:
        """Grouped-query attention [B, H, n, D] over all slots of the caches [B, KV, S, D]."""
        group = geometry.num_heads // geometry.num_kv_heads
        attributes: dict[str, Any] = {"scale": geometry.score_scale}
        if geometry.attention_cap:
            attributes["softcap"] = geometry.attention_cap
        if not self._folded(geometry):
            return self.node("Attention", [q, keys, values, mask], **attributes)
        if group == 1:
            twice = self.node("Concat", [q, self._slice(q, 0, 1, 2)], axis=2)
            found = self.node("Attention", [twice, keys, values, mask], **attributes)
            return self._slice(found, 0, -1, 2)
        size = geometry.latent.width if geometry.latent else geometry.head_dim
        folded = self.constant([0, geometry.num_kv_heads, -1, size])
        apart = [0, geometry.num_heads, -1, size]
        if self._parts_heads:
            folded = self._where_many(self.constant(apart), folded)
        found = self.node("Reshape", [q, folded])
        found = self.node("Attention", [found, keys, values, mask], **attributes)
        return self._reshape(found, apart)

    def _folded(self, geometry: Geometry) -> bool:
        """Whether attention folds query heads. TensorRT-RTX has no kernel for folded heads with one
        KV head."""
        has_kernel = geometry.num_kv_heads > 1 or self.dtype == "float32"
        return self.folds and has_kernel and not geometry.sinks

    @property
    def _parts_heads(self) -> bool:
        """Whether heads stay separate in calls with many nodes. This happens only in float32,
        because long prompts rarely run in 16 bits on the CPU."""
        return not self.draft and self.dtype == "float32"

    def _where_many(self, many: str, few: str) -> str:
        """Returns one of two shapes. ``many`` is the shape for calls with many nodes, and ``few``
        is the shape for calls with few."""
        key = f"where {many} {few}"
        if key not in self._made:
            self._made[key] = self.node("Where", [self._has_many_nodes(), many, few])
        return self._made[key]

    def _has_many_nodes(self) -> str:
        """Returns whether a call has many nodes, with shape [1]."""
        if "many" not in self._made:
            batch = self.node("Shape", ["position_ids"], start=0, end=1)
            count = self.node("Shape", ["position_ids"], start=1, end=2)
            few = self.node("Mul", [batch, self.constant([FEW_NODES])])
            self._made["many"] = self.node("Less", [few, count])
        return self._made["many"]

    def _mask(self, block: Block) -> str:
        """Returns the mask of a block's attention. It has a row for each query of a KV head."""
        geometry = block.geometry
        kind = "eagle" if block.eagle else block.kind
        make = {"eagle": self._own_mask, SLIDING: self._near_mask}.get(kind)
        group = geometry.num_heads // geometry.num_kv_heads
        key = f"mask {kind if make else 'all'} {group}"
        if key not in self._made:
            mask = make() if make else "attn_mask"
            self._made[key] = self._repeated(mask, group) if self._folded(geometry) else mask
        return self._made[key]

    def _repeated(self, mask: str, group: int) -> str:
        """Turn a mask [B, 1, n, S] into a mask [B, 1, group n, S] for folded heads."""
        if group == 1:
            return self.node("Concat", [mask, self._slice(mask, 0, 1, 2)], axis=2)
        if not self._parts_heads:
            return self.node("Concat", [mask] * group, axis=2)
        times = [self.constant([1, 1, count, 1]) for count in (1, group)]
        return self.node("Tile", [mask, self._where_many(*times)])

    def _near_mask(self) -> str:
        """The mask of sliding layers, which hides tokens outside the window.

        A round's uncommitted slots are within the window of each of its nodes, because the window
        is longer than a round. So a slot's number can serve as its position.
        """
        window = self.constant(self.geometry.window)
        first = self.node("Sub", [self._unsqueeze("position_ids", 1, 3), window])
        hidden = self.node("LessOrEqual", [self._numbers(3), first])
        hidden = self.node("Cast", [hidden], to=onnx_type(self.dtype))
        hidden = self.node("Mul", [hidden, self.constant(float(MASKED), self.dtype)])
        return self.node("Min", ["attn_mask", hidden])

    def _own_mask(self) -> str:
        """The mask of an EAGLE-3 head, which hides the first slot from all tokens except the
        first."""
        is_first = self.node("Equal", [self._numbers(3), self.constant(0)])
        follows = self.node("Greater", [self._own_slots(), self.constant(0)])
        hidden = self.node("And", [is_first, self._unsqueeze(follows, 1, 3)])
        masked = self.constant(float(MASKED), self.dtype)
        return self.node("Where", [hidden, masked, "attn_mask"])

    def _numbers(self, axis: int) -> str:
        """The numbers 0, 1, ... along an axis of the mask."""
        key = f"numbers {axis}"
        if key not in self._made:
            size = self.node("Shape", ["attn_mask"], start=axis, end=axis + 1)
            ends = self.constant(0), self.node("Squeeze", [size]), self.constant(1)
            self._made[key] = self.node("Range", ends)
        return self._made[key]

    def _own_slots(self) -> str:
        """The slot of each token [B, n]."""
        return self.node("Add", [self._unsqueeze("write_indices", 1), self._numbers(2)])

    def convolution(self, x: str, block: Block, name: str) -> str:
        """The weighted sum is computed in float32, beginning with the earliest token."""
        hidden = block.geometry.hidden_size
        gate, gate_behind, given = self._split(x, [hidden] * 3, -1)
        state = self.node("Mul", [gate, given])
        caches = self._write_states(state, hidden, block.state_caches)
        total = self._convolved(state, caches, block, TAPS, block.geometry.taps)
        return self.node("Mul", [gate_behind, self._cast(total, "float32", self.dtype)])

    def _convolved(
        self, state: str, states: str | Sequence[str], block: Block, name: str, taps: int
    ) -> str:
        """Returns the float32 sums [B, n, columns] of a convolution over states. The states are in
        caches, or side by side in a float32 tensor [B, S, columns]."""
        columns = self.shapes[f"{block.prefix}{name}.weight"][0]
        weights = self._split(self._wide(block, name), [1] * taps, 2)
        total = ""
        for distance, one in zip(reversed(range(taps)), weights, strict=True):
            if not distance:
                found = self._cast(state, self.dtype, "float32")
            elif isinstance(states, str):
                found = self._rows_at(states, self._ancestors(distance), columns)
            else:
                found = self._read_states(self._ancestors(distance), states)
                found = self._cast(found, self.dtype, "float32")
            part = self.node("Mul", [found, self._reshape(one, [columns])])
            total = self.node("Add", [total, part]) if total else part
        return total

    def _rows_at(self, states: str, slots: str, columns: int) -> str:
        """Returns the states [B, n, columns] at slots [B, n] of a tensor [B, S, columns]. A slot of
        -1 gives zeros."""
        is_there = self.node("GreaterOrEqual", [slots, self.constant(0)])
        is_there = self.node("Cast", [is_there], to=TensorProto.FLOAT)
        slots = self._unsqueeze(self.node("Clip", [slots, self.constant(0)]), 2)
        every = self.node("Expand", [slots, self.constant([1, 1, columns])])
        found = self.node("GatherElements", [states, every], axis=1)
        return self.node("Mul", [found, self._unsqueeze(is_there, 2)])

    def _wide(self, block: Block, name: str) -> str:
        """A weight of a block in float32."""
        weight = self._weight(f"{block.prefix}{name}.weight")
        return self._cast(weight.name, weight.dtype, "float32")

    def delta_rule(self, x: str, block: Block, name: str) -> str:
        """The deltas of the delta rule are computed token by token, and everything else is computed
        as matrix products.

        States and outputs are computed in float32.
        """
        rule = block.geometry.delta
        assert rule is not None
        mixed, gates, *numbers = self._split(x, [*rule.inputs.values()], -1)
        *steps, inputs = (self._cast(one, self.dtype, "float32") for one in numbers)
        states = self._all_states(block)
        old, keys, deltas, logs = self._split(states, rule.parts, -1)
        old = self._scattered(old, self._cast(mixed, self.dtype, "float32"))
        convolved = self._convolved(mixed, old, block, DELTA_TAPS, rule.taps)
        if rule.conv_bias:
            convolved = self.node("Add", [convolved, self._wide(block, DELTA_TAPS_BIAS)])
        columns = self._split(self._silu(convolved), [rule.keys, rule.keys, rule.values], -1)
        q, k = (self._heads_apart(one, rule.key_dim) for one in columns[:2])
        v = self._heads_apart(columns[2], rule.value_dim)
        if not rule.space:
            q = self.node("Mul", [self._unit(q), self._float(rule.key_dim**-0.5)])
            k = self._unit(k)
        inputs = self.node("Add", [inputs, self._wide(block, DELTA_BIAS)])
        sizes = self.node("Softplus", [inputs])
        rate = self.node("Exp", [self._wide(block, DELTA_DECAY)])
        new = self.node("Neg", [self.node("Mul", [sizes, rate])])
        decays = self._decays(self._scattered(logs, new))
        own = self._heads_joined(k, rule.keys)
        keys = self._heads_apart(self._scattered(keys, own), rule.key_dim)
        keys = self.node("Transpose", [keys], perm=[0, 1, 3, 2])
        # There are at least two rows, because ONNX Runtime adds the products of a single row in
        # another order.
        rows = self._grouped(
            self.node("Concat", [k, q], axis=2), keys, rule.value_heads // rule.key_heads
        )
        scores = self.nodes_of("Split", [rows], 2, axis=2, num_outputs=2)
        weights = [self.node("Mul", [one, decays]) for one in scores]
        if rule.space:
            solved = self.node("Mul", [v, self._heads_apart(sizes, 1)])
            all_new = self._heads_joined(solved, rule.values)
            deltas = self._heads_apart(self._scattered(deltas, all_new), rule.value_dim)
        else:
            unknown = self.node("ConstantOfShape", [self.node("Shape", [columns[2]])])
            deltas = self._heads_apart(self._scattered(deltas, unknown), rule.value_dim)
            rates = self._heads_apart(self.node("Sigmoid", [steps[0]]), 1)
            deltas, solved = self._solved(weights[0], v, rates, deltas, f"{block.prefix}deltas")
        joined = self._heads_joined(solved, rule.values)
        state = [mixed, *[self._narrow(one) for one in (own, joined, new)]]
        self._write_states(self.concat(state, ""), sum(rule.parts), block.state_caches)
        twice = [weights[1], self._slice(weights[1], 0, 1, 2)]
        y = self.node("MatMul", [self.node("Concat", twice, axis=2), deltas])
        y = self._slice(y, 0, -1, 2)
        if rule.space:
            skip = self._reshape(self._wide(block, DELTA_SKIP), [-1, 1, 1])
            y = self.node("Add", [y, self.node("Mul", [v, skip])])
        else:
            y = self.norm(self._narrow(y), block.norm(DELTA_NORM))
            y = self._cast(y, self.dtype, "float32")
        gate = self._silu(self._cast(gates, self.dtype, "float32"))
        return self._narrow(self.node("Mul", [self._heads_joined(y, rule.values), gate]))

    def _narrow(self, x: str) -> str:
        """A float32 value in the graph's type."""
        return self._cast(x, "float32", self.dtype)

    def _all_states(self, block: Block) -> str:
        """The states [B, S, numbers] in all slots of a block's caches, before the call."""
        caches = self._state_caches(block.state_caches)
        columns = len(caches) * self.geometry.num_kv_heads * self.geometry.head_dim
        states = self._heads_joined(self.node("Concat", caches, axis=1), columns)
        return self._slice(
            self._cast(states, self.dtype, "float32"), 0, block.geometry.state_size, 2
        )

    def _scattered(self, states: str, new: str) -> str:
        """Returns states [B, S, columns] in which the slots of the call's tokens have the ``new``
        states [B, n, columns]."""
        return self.node("TensorScatter", [states, new, "write_indices"], axis=1)

    def _decays(self, logs: str) -> str:
        """Returns the factor by which each visible slot's outer product has decayed at each token,
        [B, heads, n, S]. It is computed from the logarithms of the decays [B, S, heads]. It is 0
        for slots that the token does not see."""
        logs = self._unsqueeze(self.node("Transpose", [logs], perm=[0, 2, 1]), 2)
        seen = self.node("Greater", ["attn_mask", self.constant(MASKED / 2, self.dtype)])
        later = self.node("Where", [seen, logs, self._float(0.0)])
        sums = self.node("CumSum", [later, self.constant(3)], exclusive=1, reverse=1)
        return self.node("Exp", [self.node("Where", [seen, sums, self._float(-np.inf)])])

    def _grouped(self, rows: str, keys: str, group: int) -> str:
        """Returns the products of rows [B, key heads, n, D] with all keys, as [B, value heads, n,
        S]. Each key head has ``group`` value heads."""
        scores = self._unsqueeze(self.node("MatMul", [rows, keys]), 2)
        scores = self.node("Concat", [scores] * group, axis=2)
        shape = self.node("Shape", [scores], start=3)
        heads = self.constant([0, -1])
        return self.node("Reshape", [scores, self.node("Concat", [heads, shape], axis=0)])

    def _solved(self, weights: str, v: str, steps: str, deltas: str, name: str) -> list[str]:
        """Returns the deltas of all slots, and the deltas of the call's tokens [B, heads, n, D].

        A token's delta needs the deltas of earlier tokens, so deltas are computed one after
        another. Each delta is one sum over all slots, so its bits do not depend on the number of
        tokens in the call.
        """
        inputs = [f"{name}.{part}" for part in ("old", "weights", "v", "steps", "slots")]
        old, row, value, step, slot = inputs
        outer = self.nodes
        self.nodes = []
        row = self.node("Unsqueeze", [row, self.constant([2])], f"{name}.row")
        known = self.node("MatMul", [row, old], f"{name}.known")
        value = self.node("Unsqueeze", [value, self.constant([2])], f"{name}.value")
        rest = self.node("Sub", [value, known], f"{name}.rest")
        step = self.node("Unsqueeze", [step, self.constant([2])], f"{name}.step")
        new = self.node("Mul", [rest, step], f"{name}.new")
        self.node("TensorScatter", [old, new, slot], f"{name}.all", axis=2)
        self.node("Squeeze", [new, self.constant([2])], f"{name}.own")
        kinds = [TensorProto.FLOAT] * 4 + [TensorProto.INT64]
        given = [
            helper.make_tensor_value_info(one, kind, None)
            for one, kind in zip(inputs, kinds, strict=True)
        ]
        made = [
            helper.make_tensor_value_info(f"{name}.{part}", TensorProto.FLOAT, None)
            for part in ("all", "own")
        ]
        body = helper.make_graph(self.nodes, name, given, made)
        self.nodes = outer
        return self.nodes_of(
            "Scan",
            [deltas, weights, v, steps, self._own_slots()],
            2,
            body=body,
            num_scan_inputs=4,
            scan_input_axes=[2, 2, 2, 1],
            scan_output_axes=[2],
        )

    def _silu(self, x: str) -> str:
        return self.node("Mul", [x, self.node("Sigmoid", [x])])

    def _unit(self, x: str) -> str:
        """Vectors divided by their lengths."""
        squares = self.node("ReduceSumSquare", [x, self.constant([-1])], keepdims=1)
        squares = self.node("Add", [squares, self._float(DELTA_EPS)])
        return self.node("Div", [x, self.node("Sqrt", [squares])])

    def _state_caches(self, indices: range) -> list[str]:
        """Names of the caches of states. The keys and the values of each index follow each
        other."""
        return [f"{part}_{cache}" for cache in indices for part in ("key", "value")]

    def write_state(self, x: str, name: str) -> str:
        width = self.geometry.hidden_size if self.model.head.eagle else self.model.state_width
        self._write_states(x, width, self.model.state_caches)
        return x

    def _write_states(self, x: str, width: int, indices: range) -> list[str]:
        """Write states [B, n, width] into caches. Returns the written caches."""
        caches = self._state_caches(indices)
        kv_heads = self.geometry.num_kv_heads
        size = self.geometry.head_dim
        spare = len(caches) * kv_heads * size - width
        if spare:
            x = self.node("Pad", [x, self.constant([0, 0, 0, 0, 0, spare])])
        parts = self._split(self._heads_apart(x, size), [kv_heads] * len(caches), 1)
        return [self._write(cache, part) for cache, part in zip(caches, parts, strict=True)]

    def _gathered(self, cache: str, slots: str) -> str:
        """Returns the rows of a cache at slots [B, 1, n, 1], with shape [B, KV, n, D]."""
        shape = self.constant([1, self.geometry.num_kv_heads, 1, self.geometry.head_dim])
        every = self.node("Expand", [slots, shape])
        return self.node("GatherElements", [cache, every], axis=2)

    def carry_state(self, name: str) -> str:
        is_there = self.node("Greater", ["write_indices", self.constant(0)])
        number = self.node("Cast", [is_there], to=TensorProto.INT64)
        before = self._unsqueeze(self.node("Sub", ["write_indices", number]), 1, 2, 3)
        factor = self.node("Cast", [is_there], to=onnx_type(self.dtype))
        factor = self._unsqueeze(factor, 1, 2, 3)
        zeros = self.node("Mul", ["position_ids", self.constant(0)])
        every = self._unsqueeze(self._cast(zeros, "int64", self.dtype), 1, 3)
        found = []
        for cache in self._state_caches(self.model.state_caches):
            state = self.node("Mul", [self._gathered(cache, before), factor])
            self._write(cache, self.node("Add", [state, every]))
            found.append(state)
        return self._heads_joined(self.node("Concat", found, axis=1), self.model.state_width, 1)

    def parent_state(self, name: str, written: str | None = None) -> str:
        suffix = "" if written is None else "_out"
        caches = [f"{cache}{suffix}" for cache in self._state_caches(self.model.state_caches)]
        return self._read_states(self._ancestors(1), caches)

    def _read_states(self, slots: str, caches: Sequence[str]) -> str:
        """Returns the states [B, n, hidden] in slots [B, n] of caches. A slot of -1 gives zeros."""
        is_there = self.node("GreaterOrEqual", [slots, self.constant(0)])
        is_there = self.node("Cast", [is_there], to=onnx_type(self.dtype))
        slots = self._unsqueeze(self.node("Clip", [slots, self.constant(0)]), 1, 3)
        parts = [self._gathered(cache, slots) for cache in caches]
        geometry, hidden = self.geometry, self.geometry.hidden_size
        columns = len(parts) * geometry.num_kv_heads * geometry.head_dim
        states = self._heads_joined(self.node("Concat", parts, axis=1), columns)
        if columns > hidden:
            states = self._slice(states, 0, hidden, 2)
        return self.node("Mul", [states, self._unsqueeze(is_there, 2)])

    def _ancestors(self, distance: int) -> str:
        """Returns the slots [B, n] of each token's ancestor at this distance, or -1 if there is
        none."""
        if distance == 0:
            return self._own_slots()
        key = f"ancestors {distance}"
        if key not in self._made:
            self._made[key] = self._parents(self._ancestors(distance - 1))
        return self._made[key]

    def _parents(self, slots: str) -> str:
        """Returns the last visible slot [B, n] before a given slot [B, n] for each token, or -1 if
        there is none."""
        seen = self.node("Gather", ["attn_mask", self.constant(0)], axis=1)
        seen = self.node("Greater", [seen, self.constant(MASKED / 2, self.dtype)])
        earlier = self.node("Less", [self._numbers(3), self._unsqueeze(slots, 2)])
        before = self.node("And", [seen, earlier])
        numbers = self.node("Cast", [self._numbers(3)], to=TensorProto.FLOAT)  # exact below 2 ** 24
        found = self.node("Where", [before, numbers, self.constant(-1.0, "float32")])
        found = self.node("ReduceMax", [found, self.constant([-1])], keepdims=0)
        return self.node("Cast", [found], to=TensorProto.INT64)

    def last(self, x: str) -> str:
        return self.node("Gather", [x, "logit_rows"], axis=1)

    def logits(self, x: str, head: Linear, norm: Norm | None, cap: float) -> str:
        product = self.product(x, [head._replace(bias=False)], "logits", norm)
        if head.bias:
            product = self.node("Add", [product, self.weight(LOGIT_BIAS, head.outputs)])
        logits = self._cast(product, self.dtype, "float32")
        if not cap:
            return logits
        most = self.constant(cap, "float32")
        return self.node("Mul", [self.node("Tanh", [self.node("Div", [logits, most])]), most])

    def draft_vocab(self, columns: int) -> str:
        """The ids of the draft vocabulary [Vd]."""
        return self._weight(EXIT_HEAD + DRAFT_VOCAB, (columns,)).name


def _tensors(weight: StoredWeight) -> dict[str, tuple[str, Shape]]:
    """Element type and shape of the stored tensors of a weight, by name."""
    of = weight.quantization
    if of is None:
        return {weight.name: (weight.dtype, weight.stored_shape)}
    kinds = {SCALES: weight.scales_dtype, MINIMUMS: weight.scales_dtype, ZEROS: of.weights}
    found = {weight.name: (of.weights, weight.stored_shape)}
    for suffix, kind in kinds.items():
        if weight.name + suffix in weight.tensors:
            found[weight.name + suffix] = (kind, weight.scales_shape)
    if of.factor:
        found[weight.name + FACTOR] = (weight.dtype, ())
    return found
