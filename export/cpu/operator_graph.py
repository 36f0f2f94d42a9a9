"""Make graphs of this project's operators from a directory's manifest. They have five nodes per
layer, which read packed weights. Norms after attention and MLP, and other parts that only some
families have, are standard nodes between them.

The graph on disk is standard ONNX, and needs some twenty-five nodes a layer. Its computation
follows from the manifest (geometry, exit head, layers). So this graph is written from the manifest.
It is not made by matching nodes, because a match could miss something. The names and sizes of all
weights are compared with those of the graph on disk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from eesd.common.architecture import (
    DELTA_BIAS,
    DELTA_DECAY,
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
    draft,
    verify,
)
from eesd.common.geometry import SCORES, SLIDING, UNROTATED, Geometry
from eesd.common.manifest import GraphInfo, Manifest
from eesd.common.quantization import DRAFT, EXIT_HEAD, LM_HEAD
from eesd.common.weights import (
    DRAFT_VOCAB,
    EMBEDDINGS,
    HEAD_TABLES,
    ROTARY_TABLES,
    packed_name,
    weights_of,
)
from eesd.export.activations import activated, xielu
from eesd.export.cpu.panels import PLANES, UPPER
from eesd.runtime.engines.cpu_build import WEIGHTS
from eesd.runtime.engines.cpu_cache import slots_of, states_at
from eesd.runtime.engines.operators import DOMAIN

GATINGS = {"silu": 1, "gelu_tanh": 2, "clamped": 3}
"""Number of each activation, as the operators define it."""
GATE_UP = ".gate_up_proj."
"""The part of a weight's name that marks gate and up as packed."""


class Columns(NamedTuple):
    """Columns of a linear weight. ``stop`` is None if all columns are used."""

    weight: str
    start: int = 0
    stop: int | None = None


class Located(NamedTuple):
    """A packed weight. It has a place in the file of packed weights, and the operators'
    parameters."""

    offset: int
    length: int
    numbers: tuple[int, ...]


def make_graph(
    manifest: Manifest,
    graph: GraphInfo,
    locate: Callable[[Columns], Located],
    small: Mapping[str, NDArray[Any]],
) -> bytes:
    """Returns the graph that replaces the one on disk, as the bytes of an ``onnx.ModelProto``.

    Its inputs are:

    * ``input_ids`` [T] int64, or ``hidden`` [T, H];
    * ``tokens`` [T, 5] int64. The columns of a token are the address of its sequence's cache, its
      position, its slot, its context (the number of first slots that it sees), and the length of
      its path;
    * ``paths`` [T, P] int32. A token's path has the slots that it sees after the context, in the
      order of positions. The last slot is the token's own slot;
    * ``logit_rows`` [R] int64, if logits are computed.

    The outputs are those of the graph on disk, except the caches. They are for T tokens instead of
    B times n tokens.

    Args:
        manifest: Manifest of the engine directory.
        graph: The graph on disk.
        locate: A function that packs columns at their first use, and returns their place in the
            file of packed weights.
        small: Norms, biases and rotary tables (float32) and the draft vocabulary (int64), by name.
    """
    return _Builder(manifest, graph, locate, small).build()


@dataclass
class _Builder:
    """The table of operations that writes a graph of this project's operators.

    A value is the name of a tensor [T, columns].
    """

    manifest: Manifest
    graph: GraphInfo
    locate: Callable[[Columns], Located]
    small: Mapping[str, NDArray[Any]]
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = weights_of(self.manifest, self.graph)
        self._draft = self.graph == self.manifest.draft
        self._model = Model(self.manifest.geometry, self.manifest.exit_head)

    @property
    def _geometry(self) -> Geometry:
        return self.manifest.geometry

    def build(self) -> bytes:
        layers = self.manifest.base_layers(self.graph)
        hidden = [None, self._geometry.hidden_size]
        x = "input_ids" if layers.start == 0 else "hidden"
        first = _input(x, [None] if layers.start == 0 else hidden, layers.start == 0)
        inputs = [
            first,
            _input("tokens", [None, 5]),
            _input("paths", [None, None], kind=TensorProto.INT32),
        ]
        if self._draft:
            draft(self, self._model, x)
            return self._to_bytes(inputs, self._best())
        x = verify(self, self._model, x, layers)
        if layers.stop == self._geometry.num_layers:
            return self._to_bytes([*inputs, _input("logit_rows", [None])], [_output("logits")])
        self._node("Identity", [x], "hidden_out", domain="")
        return self._to_bytes(inputs, [_output("hidden_out")])

    def _best(self) -> list[Any]:
        """Add the nodes that find the most likely tokens. Returns the outputs of the draft."""
        has_vocab = self.manifest.exit_head.draft_vocab
        ids = self._small(EXIT_HEAD + DRAFT_VOCAB) if has_vocab else self._small()
        found = ["topk_ids", "topk_logprobs"]
        top_k = self.manifest.draft_top_k
        self.nodes.append(helper.make_node("TopK", ["logits", ids], found, domain=DOMAIN, k=top_k))
        return [_output("logits"), _output(found[0], TensorProto.INT64), _output(found[1])]

    def embed(self, ids: str, table: Table) -> str:
        found = self._columns(f"{table.name}.weight")
        numbers = self._numbers([found], whole=True)
        name = f"{table.name}.embedded"
        x = self._node("Embed", [ids, self._packed(found)], name, matrices=numbers)
        if table.scale == 1:
            return x
        return self._standard("Mul", [x, self._float(table.scale)])

    def weight(self, module: str, size: int) -> str:
        return self._small(f"{module}.weight")

    def multiply(self, x: str, y: str, name: str) -> str:
        return self._node("Mul", [x, y], name, domain="")

    def times(self, x: str, module: str, size: int, name: str) -> str:
        return self.multiply(x, self._small(f"{module}.weight"), name)

    def limit(self, x: str, most: float, name: str) -> str:
        bounds = [self._scalar(f"bound {bound}", bound) for bound in (-most, most)]
        return self._node("Clip", [x, *bounds], name, domain="")

    def norm(self, x: str, norm: Norm) -> str:
        if norm.groups > 1:
            apart = self._reshape(x, [0, norm.groups, -1])
            return self._reshape(self.norm(apart, norm._replace(groups=1)), [0, -1])
        if norm.bare:
            ones = f"ones {norm.bare}"
            self._constant(ones, np.ones(norm.bare, np.float32))
            return self._standard(
                "RMSNormalization", [x, ones], axis=-1, stash_type=1, epsilon=norm.eps
            )
        weight = f"{norm.name}.weight"
        given = [x, self._small(weight)]
        if norm.bias:
            given.append(self._small(f"{norm.name}.bias"))
        return self._standard(
            "LayerNormalization" if norm.centred else "RMSNormalization",
            given,
            axis=-1,
            stash_type=1,
            epsilon=norm.eps,
        )

    def scale(self, x: str, gate: str, name: str) -> str:
        return self._standard("Mul", [x, self._standard("Sigmoid", [gate])])

    def activate(self, x: str, block: Block, name: str) -> str:
        kind = block.geometry.activation
        if kind != "xielu":
            return activated(self._standard, x, kind)
        weight = self._small(f"{block.prefix}{XIELU}.weight")
        factors = self.split(weight, [1, 1], [f"{name}.above", f"{name}.below"])
        return xielu(self._standard, self._float, x, factors)

    def _standard(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node of standard ONNX, and return its output."""
        name = f"{kind}_{len(self.nodes)}"
        return self._node(kind, inputs, name, domain="", **attributes)

    def _reshape(self, x: str, shape: Sequence[int]) -> str:
        name = f"shape {shape}"
        self._constant(name, np.array(shape, np.int64))
        return self._standard("Reshape", [x, name])

    def _float(self, value: float) -> str:
        return self._number(f"number {value}", value)

    def product(
        self,
        x: str,
        layers: Sequence[Linear],
        name: str,
        norm: Norm | None = None,
        residual: Sequence[str] = (),
        activation: str = "",
    ) -> str:
        if norm is not None and norm.centred:  # The product operators do not compute such norms.
            x = self.norm(x, norm)
            norm = None
        parts = self._parts(layers)
        biases = self._biases(layers)
        given = [x, self._norm_weight(norm), biases, self._residual(residual, name)]
        return self._node(
            "Product",
            [*given, *map(self._packed, parts)],
            name,
            epsilon=norm.eps if norm else self._geometry.rms_norm_eps,
            gating=GATINGS[activation] if activation else 0,
            matrices=self._numbers(parts),
        )

    def _parts(self, layers: Sequence[Linear]) -> list[Columns]:
        """The columns of some layers.

        The operator takes gate and up of an MLP as two matrices, even if they are packed into one.
        """
        names = [f"{layer.name}.weight" for layer in layers]
        packed = self._find(packed_name(names)) if len(names) > 1 else None
        if packed is None:
            return [self._columns(name) for name in names]
        if GATE_UP in packed:
            width = layers[0].outputs
            return [Columns(packed, 0, width), Columns(packed, width, 2 * width)]
        return [Columns(packed)]

    def _biases(self, layers: Sequence[Linear]) -> str:
        """The biases of some layers side by side."""
        return self._small(*self._bias_names(layers))

    def _bias_names(self, layers: Sequence[Linear]) -> list[str]:
        """Returns the names, in this graph, of the biases of the layers that form one product."""
        names = [f"{layer.name}.bias" for layer in layers if layer.bias]
        packed = packed_name(names) if len(names) > 1 else ""
        return [packed] if packed in self._names else names

    def _experts_biases(self, mixture: Mixture) -> list[str]:
        """The biases of gate and up of all experts, and the biases of down."""
        inner = list[str]()
        outer = list[str]()
        for gate, up, down in mixture.experts:
            inner += self._bias_names([gate, up])
            outer += self._bias_names([down])
        return [self._small(*inner), self._small(*outer)]

    def _norm_weight(self, norm: Norm | None) -> str:
        return self._small(f"{norm.name}.weight") if norm else self._small()

    def _residual(self, residual: Sequence[str], name: str) -> str:
        """The sum of the residuals. It is computed beforehand, because a product adds only one
        tensor."""
        if len(residual) > 1:
            return self._node("Add", residual, f"{name}.residual", domain="")
        return residual[0] if residual else self._small()

    def mixture(
        self,
        x: str,
        block: Block,
        mixture: Mixture,
        name: str,
        norm: Norm | None,
        residual: Sequence[str],
    ) -> str:
        if norm is not None and norm.centred:  # The operator does not compute such norms.
            x = self.norm(x, norm)
            norm = None
        experts = block.geometry.experts
        parts = list[Columns]()
        assert experts is not None
        for gate, up, down in mixture.experts:
            parts += [*self._parts([gate, up]), self._columns(f"{down.name}.weight")]
        router_norm = mixture.router_norm or norm
        logits = self.product(x, [mixture.router], f"{block.prefix}experts", router_norm)
        given = [x, self._norm_weight(norm), logits, self._residual(residual, name)]
        given += self._experts_biases(mixture)
        for module in (mixture.scales, mixture.bias):
            given.append(self.weight(module, experts.count) if module else self._small())
        return self._node(
            "Mixture",
            [*given, *map(self._packed, parts)],
            name,
            epsilon=block.geometry.rms_norm_eps,
            gating=GATINGS[block.geometry.activation],
            used=experts.used,
            normed=int(experts.normed),
            scores=SCORES.index(experts.scores),
            groups=experts.groups,
            used_groups=experts.used_groups,
            group_best=experts.group_best,
            norm_eps=experts.norm_eps,
            scale=experts.scale,
            margin=experts.margin,
            matrices=self._numbers(parts),
        )

    def add(self, residual: Sequence[str], y: str, name: str) -> str:
        return self._node("Add", [self._residual(residual, name), y], name, domain="")

    def split(self, x: str, sizes: Sequence[int], names: Sequence[str]) -> Sequence[str]:
        given = f"{x}.sizes"
        self._constant(given, np.array(sizes, np.int64))
        self.nodes.append(helper.make_node("Split", [x, given], names, axis=-1))
        return names

    def concat(self, parts: Sequence[str], name: str) -> str:
        return self._node("Concat", parts, name, domain="", axis=-1)

    def by_heads(self, x: str, layers: Sequence[Linear], name: str) -> str:
        parts = [self._columns(f"{layer.name}.weight") for layer in layers]
        given = [x, *map(self._packed, parts)]
        return self._node("ByHeads", given, name, matrices=self._numbers(parts))

    def attention(self, qkv: str, block: Block, name: str, attends: bool) -> str:
        geometry = block.geometry
        latent = geometry.latent
        norms = [self._small()] * 2
        if geometry.qk_norm:
            parts = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
            norms = [self._small(f"{block.prefix}{part}") for part in parts]
        sinks = self._small()
        if attends and geometry.sinks:
            sinks = self._small(f"{block.prefix}{SINKS}.weight")
        return self._node(
            "Attention",
            [qkv, "tokens", "paths", *self._tables(block), *norms, sinks],
            name,
            heads=geometry.num_heads if attends else 0,
            kv_heads=geometry.num_kv_heads,
            head_dim=latent.width if latent else geometry.head_dim,
            rank=latent.rank if latent else 0,
            slots=slots_of(self.manifest),
            cache_heads=self._geometry.num_kv_heads,
            cache_dim=self._geometry.head_dim,
            writes=int(block.writes),
            layer=block.cache,
            scale=geometry.score_scale,
            cap=geometry.attention_cap,
            window=geometry.window if block.kind == SLIDING else 0,
            epsilon=geometry.rms_norm_eps,
            hides_first=int(block.eagle is not None),
            norms_last=int(geometry.qk_norm_rotated),
        )

    def _tables(self, block: Block) -> list[str]:
        """Returns the rotary tables of a block. The tables are empty if nothing is rotated."""
        if block.eagle is not None:
            return [self._small(table) for table in HEAD_TABLES]
        if block.kind == UNROTATED:
            return [self._small()] * 2
        if not self._geometry.local_theta:
            return [self._small(table) for table in ROTARY_TABLES]
        half = block.geometry.head_dim // 2
        names = list[str]()
        columns = slice(-half, None) if block.kind == SLIDING else slice(half)
        for table in ROTARY_TABLES:
            names.append(f"{table}_of_{block.kind}")
            if names[-1] not in self.initializers:
                self._constant(names[-1], self.small[table][:, columns])
        return names

    def convolution(self, x: str, block: Block, name: str) -> str:
        weight = self._small(f"{block.prefix}{TAPS}.weight")
        given = [x, "tokens", "paths", weight]
        return self._states("Convolution", given, name, block.cache, block.geometry.hidden_size)

    def delta_rule(self, x: str, block: Block, name: str) -> str:
        rule = block.geometry.delta
        assert rule is not None
        last = DELTA_SKIP if rule.space else DELTA_NORM
        parts = (DELTA_TAPS, DELTA_DECAY, DELTA_BIAS, last, DELTA_TAPS_BIAS)
        weights = [self._small(f"{block.prefix}{part}.weight") for part in parts]
        return self._states(
            "DeltaRule",
            [x, "tokens", "paths", *weights],
            name,
            block.state_caches.start,
            block.geometry.state_size,
            **asdict(rule),
            states_at=states_at(self.manifest)[block.state_caches.start].start,
            keeps=int(not self._draft),
            epsilon=block.geometry.rms_norm_eps,
        )

    def write_state(self, x: str, name: str) -> str:
        return self._head_states("WriteState", [x, "tokens"], name)

    def carry_state(self, name: str) -> str:
        return self._head_states("CarryState", ["tokens"], name)

    def parent_state(self, name: str, written: str | None = None) -> str:
        given = [] if written is None else [written]
        return self._head_states("ParentState", ["tokens", "paths", *given], name)

    def _head_states(self, kind: str, inputs: Sequence[str], output: str) -> str:
        """A node that writes or reads states of the head."""
        geometry, head = self._model
        size = geometry.hidden_size if head.eagle else self._model.state_width
        return self._states(kind, inputs, output, self._model.state_caches[0], size)

    def _states(
        self, kind: str, inputs: Sequence[str], output: str, cache: int, size: int, **more: Any
    ) -> str:
        """Add a node that writes or reads states of ``size`` values, in the caches from ``cache``
        on."""
        geometry = self._geometry
        return self._node(
            kind,
            inputs,
            output,
            kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            slots=slots_of(self.manifest),
            layer=cache,
            size=size,
            **more,
        )

    def last(self, x: str) -> str:
        return self._node("Gather", [x, "logit_rows"], "last", domain="", axis=0)

    def logits(self, x: str, head: Linear, norm: Norm | None, cap: float) -> str:
        name = "uncapped" if cap else "logits"
        plain = head._replace(bias=False)
        logits = self.product(x, [plain], f"{name}_without_bias" if head.bias else name, norm)
        if head.bias:
            given = [logits, self.weight(LOGIT_BIAS, head.outputs)]
            logits = self._node("Add", given, name, domain="")
        if not cap:
            return logits
        number = self._number("logit_cap", cap)
        small = self._node("Div", [logits, number], "logits_in_caps", domain="")
        bounded = self._node("Tanh", [small], "logits_in_one", domain="")
        return self._node("Mul", [bounded, number], "logits", domain="")

    def _scalar(self, name: str, value: float) -> str:
        self._constant(name, np.array(value, np.float32))
        return name

    def _number(self, name: str, value: float) -> str:
        self._constant(name, np.array([value], np.float32))
        return name

    def _find(self, name: str) -> str | None:
        """The name of a weight in this graph, or the name of the draft's copy."""
        if (
            name == LM_HEAD
            and name not in self._names
            and DRAFT + name not in self._names
            and self._geometry.tied_embeddings
        ):
            name = EMBEDDINGS
        return next((found for found in (DRAFT + name, name) if found in self._names), None)

    def _columns(self, name: str) -> Columns:
        found = self._find(name)
        assert found is not None, name
        return Columns(found)

    def _packed(self, part: Columns) -> str:
        """The initializer of a packed weight."""
        name = f"{part.weight}[{part.start}:{part.stop or ''}]"
        if name not in self.initializers:
            offset, length, _ = self.locate(part)
            tensor = TensorProto(
                name=name,
                data_type=TensorProto.UINT8,
                dims=[length],
                data_location=TensorProto.EXTERNAL,
            )
            for key, value in (
                ("location", WEIGHTS),
                ("offset", offset),
                ("length", length),
            ):
                tensor.external_data.add(key=key, value=str(value))
            self.initializers[name] = tensor
        return name

    def _numbers(self, parts: Sequence[Columns], whole: bool = False) -> list[int]:
        """The operators' parameters for these weights. The draft reads only the upper plane of
        two-plane weights, unless ``whole`` is true."""
        upper = {PLANES: UPPER} if self._draft and not whole else {}
        given = [self.locate(part).numbers for part in parts]
        return [number for form, *others in given for number in (upper.get(form, form), *others)]

    def _small(self, *names: str) -> str:
        """Returns the initializer of a norm, a table, or biases side by side. It is empty for names
        that the graph lacks."""
        found = [name for name in names if self._find(name) is not None]
        name = "+".join(found) or "nothing"
        if name not in self.initializers:
            values = [self.small[str(self._find(one))] for one in found]
            self._constant(name, np.concatenate(values) if values else np.zeros(0, np.float32))
        return name

    def _constant(self, name: str, values: NDArray[Any]) -> None:
        self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)

    def _node(
        self, kind: str, inputs: Sequence[str], output: str, domain: str = DOMAIN, **attributes: Any
    ) -> str:
        self.nodes.append(
            helper.make_node(kind, list(inputs), [output], name=output, domain=domain, **attributes)
        )
        return output

    def _to_bytes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bytes:
        graph = helper.make_graph(
            self.nodes, "eesd", inputs, outputs, [*self.initializers.values()]
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
        model: onnx.ModelProto = helper.make_model(
            graph, opset_imports=opsets, ir_version=11, producer_name="eesd"
        )
        data: bytes = model.SerializeToString()
        return data


def _input(
    name: str, shape: Sequence[int | None], integer: bool = True, kind: int = TensorProto.INT64
) -> Any:
    return helper.make_tensor_value_info(name, kind if integer else TensorProto.FLOAT, shape)


def _output(name: str, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, [None, None])
