"""Graphs of this project's operators, made from a directory's manifest: five nodes a layer, which
read packed weights. Norms behind attention and MLP, and what else only some families have, are
standard nodes between them.

A graph on disk is standard ONNX, and says the same in some twenty-five nodes a layer. What it
computes follows from the manifest (geometry, exit head, layers), so this graph is written down from
that, and not found by matching nodes: there is nothing that a match could miss. The names and sizes
of all weights are compared with those of the graph on disk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from eesd.common.geometry import FULL, SLIDING, UNROTATED, Eagle, ExitConfig, Geometry, exit_caches
from eesd.common.manifest import GraphInfo, Manifest
from eesd.common.quantization import DRAFT, EXIT_HEAD, LM_HEAD
from eesd.common.weights import (
    DEEP_IN,
    DRAFT_VOCAB,
    EMBEDDINGS,
    FINAL_NORM,
    FUSE,
    FUSE_NORM,
    HEAD_TABLES,
    ROUTER,
    weights_of,
)
from eesd.export.cpu.panels import PLANES, UPPER
from eesd.runtime.engines.cpu_cache import slots_of
from eesd.runtime.engines.operators import DOMAIN

GATINGS = {"silu": 1, "gelu_tanh": 2}
"""The operators' numbers of activations."""


class Columns(NamedTuple):
    """Columns of a linear weight: ``stop`` is None for all of them."""

    weight: str
    start: int = 0
    stop: int | None = None


class Located(NamedTuple):
    """A packed weight: where it lies in the file of packed weights, and what the operators must
    know of it."""

    offset: int
    length: int
    numbers: tuple[int, ...]


@dataclass
class Weights:
    """What a graph is made of.

    Attributes:
        file: Name of the file of packed weights.
        packed: Packs these columns when they are first asked for, and says where they lie.
        small: Norms, biases and rotary tables by name, float32; the draft vocabulary, int64.
    """

    file: str
    packed: Callable[[Columns], Located]
    small: Mapping[str, NDArray[Any]]


def make_graph(manifest: Manifest, graph: GraphInfo, weights: Weights) -> bytes:
    """The graph that stands for one on disk, as the bytes of an ``onnx.ModelProto``.

    Its inputs are ``input_ids`` [T] int64, or ``hidden`` [T, H]; ``tokens`` [T, 5] int64: for each
    token the address of its sequence's cache, its position, its slot, its context (it sees that
    many first slots) and the length of its path; ``paths`` [T, P] int32: the slots that it sees
    behind the context, in the order of positions, its own as the last; and ``logit_rows`` [R] int64
    where logits are computed. Outputs are those of the graph on disk without the caches, of T
    tokens instead of B times n.
    """
    return _Builder(manifest, graph, weights).build()


@dataclass
class _Builder:
    manifest: Manifest
    graph: GraphInfo
    weights: Weights
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names = weights_of(self.manifest, self.graph)
        self._draft = self.graph == self.manifest.draft

    @property
    def _geometry(self) -> Geometry:
        return self.manifest.geometry

    @property
    def _exit(self) -> ExitConfig:
        return self.manifest.exit_head

    def build(self) -> bytes:
        layers = self.manifest.base_layers(self.graph)
        x = "input_ids" if layers.start == 0 else "hidden"
        first = _input(
            x,
            [None] if layers.start == 0 else [None, self._geometry.hidden_size],
            layers.start == 0,
        )
        if layers.start == 0:
            x = self._embed(x)
        embedded, states = x, []
        for layer in layers:
            x = self._block(f"model.layers.{layer}.", x, layer)
            if layer == self._exit.layer - 1 and not self._draft:
                self._write_exit_caches(x)
            if layer + 1 in self._exit.read_layers:
                states.append(x)
        if states and self._exit.eagle:
            self._write_eagle(self._exit.eagle, embedded, states)
        elif states:
            self._write_deep_states(states)
        inputs, outputs = (
            [
                first,
                _input("tokens", [None, 5]),
                _input("paths", [None, None], kind=TensorProto.INT32),
            ],
            [],
        )
        if self._draft:
            outputs = self._predict_draft(x)
        elif layers.stop == self._geometry.num_layers:
            inputs.append(_input("logit_rows", [None]))
            self._node("Gather", [x, "logit_rows"], "last", domain="", axis=0)
            self._logits("last", LM_HEAD, FINAL_NORM, self._geometry.logit_cap)
            outputs = [_output("logits")]
        else:
            self._node("Identity", [x], "hidden_out", domain="")
            outputs = [_output("hidden_out")]
        return self._model(inputs, outputs)

    def _embed(self, ids: str) -> str:
        table = self._columns(EMBEDDINGS)
        x = self._node(
            "Embed",
            [ids, self._packed(table)],
            "embedded",
            matrices=self._numbers([table], whole=True),
        )
        scale = self._geometry.embedding_scale
        return (
            x
            if scale == 1
            else self._node("Mul", [x, self._number("embedding_scale", scale)], "scaled", domain="")
        )

    def _logits(self, x: str, head: str, norm: str, cap: float) -> None:
        """The logits of x, called ``logits``, between the caps if there are some."""
        logits = self._product(x, [self._columns(head)], "uncapped" if cap else "logits", norm=norm)
        if cap:
            number = self._number("logit_cap", cap)
            small = self._node("Div", [logits, number], "logits_in_caps", domain="")
            self._node(
                "Mul",
                [self._node("Tanh", [small], "logits_in_one", domain=""), number],
                "logits",
                domain="",
            )

    def _number(self, name: str, value: float) -> str:
        self._constant(name, np.array([value], np.float32))
        return name

    def _joined(self, y: str, norm: str, x: str, name: str) -> str:
        """x plus the norm of y."""
        return self._node("Add", [x, self._norm(y, norm)], name, domain="")

    def _norm(self, x: str, norm: str) -> str:
        return self._node(
            "RMSNormalization",
            [x, self._small(norm)],
            f"{norm}.normed",
            domain="",
            axis=-1,
            stash_type=1,
            epsilon=self._epsilon(norm),
        )

    def _epsilon(self, norm: str) -> float:
        eagle = self._exit.eagle if norm.startswith(EXIT_HEAD) else None
        return (eagle.block if eagle else self._geometry).rms_norm_eps

    def _block(self, prefix: str, x: str, cache: int, more: str = "") -> str:
        attended = self._attention(prefix, x, cache, self._geometry)
        base = cache < self._geometry.num_layers
        geometry = self._geometry.of_layer(cache) if base else self._geometry.dense
        residual = self._node("Add", [x, more], f"{prefix}sum", domain="") if more else x
        return self._behind_attention(prefix, attended, residual, geometry)

    def _behind_attention(
        self, prefix: str, attended: str, residual: str, geometry: Geometry
    ) -> str:
        before, behind = geometry.norm_before, geometry.norm_behind
        x = self._product(
            attended,
            [self._columns(f"{prefix}self_attn.o_proj.weight")],
            f"{prefix}attended",
            bias=["self_attn.o_proj.bias"],
            prefix=prefix,
            residual="" if behind else residual,
        )
        if behind:
            x = self._joined(
                x, f"{prefix}post_self_attn_layernorm.weight", residual, f"{prefix}joined"
            )
        norm = f"{prefix}post_attention_layernorm.weight" if before else ""
        name, residual = (f"{prefix}down", "") if behind else (f"{prefix}out", x)
        added = (self._mlp if geometry.experts is None else self._mixture)(
            prefix, x, norm, residual, name, geometry
        )
        return (
            self._joined(added, f"{prefix}post_mlp_layernorm.weight", x, f"{prefix}out")
            if behind
            else added
        )

    def _mlp(
        self, prefix: str, x: str, norm: str, residual: str, name: str, geometry: Geometry
    ) -> str:
        parts, packed = self._gate_and_up(f"{prefix}mlp.", geometry.intermediate_size)
        bias = ["mlp.gate_up_proj.bias"] if packed else ["mlp.gate_proj.bias", "mlp.up_proj.bias"]
        gating = GATINGS[geometry.activation]
        gated = self._product(
            x, parts, f"{prefix}gated", norm=norm, prefix=prefix, gating=gating, bias=bias
        )
        down = [self._columns(f"{prefix}mlp.down_proj.weight")]
        return self._product(
            gated, down, name, bias=["mlp.down_proj.bias"], prefix=prefix, residual=residual
        )

    def _gate_and_up(self, mlp: str, width: int) -> tuple[list[Columns], bool]:
        """The two weights of so many columns, and whether they are one in the directory."""
        packed = self._find(f"{mlp}gate_up_proj.weight")
        if packed is not None:
            return [Columns(packed, 0, width), Columns(packed, width, 2 * width)], True
        return [self._columns(f"{mlp}{name}_proj.weight") for name in ("gate", "up")], False

    def _mixture(
        self, prefix: str, x: str, norm: str, residual: str, name: str, geometry: Geometry
    ) -> str:
        experts, parts = geometry.experts, list[Columns]()
        assert experts is not None
        for expert in range(experts.count):
            mlp = f"{prefix}mlp.experts.{expert}."
            parts += [
                *self._gate_and_up(mlp, experts.size)[0],
                self._columns(f"{mlp}down_proj.weight"),
            ]
        logits = self._product(x, [self._columns(prefix + ROUTER)], f"{prefix}experts", norm=norm)
        given = [x, self._small(norm) if norm else self._small(), logits, residual or self._small()]
        return self._node(
            "Mixture",
            [*given, *map(self._packed, parts)],
            name,
            epsilon=geometry.rms_norm_eps,
            gating=GATINGS[geometry.activation],
            used=experts.used,
            normed=int(experts.normed),
            matrices=self._numbers(parts),
        )

    def _attention(
        self,
        prefix: str,
        x: str,
        cache: int,
        geometry: Geometry,
        attends: bool = True,
        eagle: bool = False,
    ) -> str:
        """Keys and values of x into a cache, and what queries attend to. What an EAGLE-3 head reads
        is normalized before."""
        wanted = ("q", "k", "v") if attends else ("k", "v")
        packed = f"self_attn.{'qkv' if attends else 'kv'}_proj"
        if self._find(f"{prefix}{packed}.weight") is not None:
            modules = [packed]
        else:
            modules = [f"self_attn.{name}_proj" for name in wanted]
        parts = [self._columns(f"{prefix}{module}.weight") for module in modules]
        norm = "" if eagle or not geometry.norm_before else f"{prefix}input_layernorm.weight"
        bias = [f"{module}.bias" for module in modules]
        qkv = self._product(x, parts, f"{prefix}qkv", norm=norm, bias=bias, prefix=prefix)
        kind = FULL if eagle else self._kind(cache)
        norms = [self._small(f"{prefix}self_attn.{name}_norm.weight") for name in ("q", "k")]
        if geometry.qk_norm_joint:
            qkv, norms = self._normed_together(prefix, qkv, wanted), [self._small(), self._small()]
        return self._node(
            "Attention",
            [
                qkv,
                "tokens",
                "paths",
                *([self._small(table) for table in HEAD_TABLES] if eagle else self._tables(kind)),
                *norms,
            ],
            f"{prefix}attention",
            heads=geometry.num_heads if attends else 0,
            kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            slots=slots_of(self.manifest),
            layer=cache,
            scale=geometry.score_scale,
            cap=geometry.attention_cap,
            window=geometry.window if kind == SLIDING else 0,
            epsilon=geometry.rms_norm_eps,
            hides_first=int(eagle),
            norms_last=int(geometry.qk_norm_rotated),
        )

    def _kind(self, cache: int) -> str:
        """Kind of the layer, or of the exit head's block, that has this cache."""
        layers = self._geometry.num_layers
        return (
            self._geometry.kind(cache)
            if cache < layers
            else self._geometry.head_kinds(self._exit.blocks)[cache - layers]
        )

    def _tables(self, kind: str) -> list[str]:
        """The rotary tables of a kind of layers; empty ones where nothing is rotated."""
        if kind == UNROTATED:
            return [self._small()] * 2
        half, local = self._geometry.head_dim // 2, self._geometry.local_theta > 0
        if not local:
            return [self._small("cos"), self._small("sin")]
        columns, names = slice(half, None) if kind == SLIDING else slice(half), []
        for table in ("cos", "sin"):
            names.append(f"{table}_of_{SLIDING if kind == SLIDING else FULL}")
            if names[-1] not in self.initializers:
                self._constant(names[-1], self.weights.small[table][:, columns])
        return names

    def _normed_together(self, prefix: str, qkv: str, wanted: Sequence[str]) -> str:
        """Queries and keys normalized over all heads, beside the values."""
        heads = {
            "q": self._geometry.num_heads,
            "k": self._geometry.num_kv_heads,
            "v": self._geometry.num_kv_heads,
        }
        sizes = f"{prefix}sizes_of_{''.join(wanted)}"
        self._constant(
            sizes, np.array([heads[name] * self._geometry.head_dim for name in wanted], np.int64)
        )
        parts = [f"{prefix}{name}" for name in wanted]
        self.nodes.append(helper.make_node("Split", [qkv, sizes], parts, axis=-1))
        for index, name in enumerate(wanted[:-1]):
            parts[index] = self._norm(parts[index], f"{prefix}self_attn.{name}_norm.weight")
        return self._node("Concat", parts, f"{prefix}qkv_normed", domain="", axis=-1)

    def _write_exit_caches(self, x: str) -> None:
        """What verify computes of the exit head: the keys and values of its blocks."""
        layers, last = self._geometry.num_layers, self._exit.blocks - 1
        for block in range(last):
            x = self._block(f"{EXIT_HEAD}blocks.{block}.", x, layers + block)
        if self._exit.blocks:
            self._attention(
                f"{EXIT_HEAD}blocks.{last}.", x, layers + last, self._geometry, attends=False
            )

    def _write_deep_states(self, hidden: Sequence[str]) -> None:
        state = ""
        for index, x in enumerate(hidden):
            prefix = f"{EXIT_HEAD}deep.{index}."
            parts = [self._columns(f"{prefix}state_proj.weight")]
            state = self._product(
                x, parts, f"{prefix}state", norm=f"{prefix}norm.weight", residual=state
            )
        self._states("WriteState", [state, "tokens"], "deep_state")

    def _states(self, kind: str, inputs: Sequence[str], output: str) -> str:
        """A node that writes or reads states."""
        geometry, cache = self._geometry, exit_caches(self._geometry, self._exit)[self._exit.blocks]
        size = (
            geometry.hidden_size
            if self._exit.eagle
            else 2 * geometry.num_kv_heads * geometry.head_dim
        )
        return self._node(
            kind,
            inputs,
            output,
            kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            slots=slots_of(self.manifest),
            layer=cache,
            size=size,
        )

    def _write_eagle(self, eagle: Eagle, embedded: str, states: Sequence[str]) -> None:
        """What verify computes of an EAGLE-3 head: the fused states, and from those of the tokens
        before keys and values."""
        norms = [f"{EXIT_HEAD}{FUSE_NORM}.{index}.weight" for index in range(eagle.fuse_norms)]
        parts = list(map(self._norm, states, norms)) if len(norms) > 1 else states
        joined, fuse = (
            self._node("Concat", parts, "states", domain="", axis=1),
            self._columns(f"{EXIT_HEAD}{FUSE}.weight"),
        )
        fused = self._product(joined, [fuse], "fused", norm=norms[0] if len(norms) == 1 else "")
        written = self._states("WriteState", [fused, "tokens"], "written")
        state = self._states("ParentState", ["tokens", "paths", written], "before")
        self._eagle_attention(eagle, embedded, state, attends=False)

    def _eagle_attention(
        self, eagle: Eagle, embedded: str, state: str, attends: bool
    ) -> tuple[str, str]:
        """What the block's queries attend to, and what the block adds to."""
        prefix = f"{EXIT_HEAD}blocks.0."
        given = ((embedded, "input_layernorm"), (state, "hidden_norm"))
        normed = [self._norm(x, f"{prefix}{norm}.weight") for x, norm in given]
        read = self._node("Concat", normed, "read", domain="", axis=1)
        attended = self._attention(
            prefix, read, self._geometry.num_layers, eagle.block, attends, eagle=True
        )
        return attended, normed[1] if eagle.normed_residual else state

    def _eagle_block(self, eagle: Eagle, embedded: str) -> str:
        """The input of the LM head, after the norm."""
        state = self._states("ParentState", ["tokens", "paths"], "before")
        x = self._behind_attention(
            f"{EXIT_HEAD}blocks.0.",
            *self._eagle_attention(eagle, embedded, state, True),
            eagle.block,
        )
        output = self._norm(x, f"{EXIT_HEAD}norm.weight")
        self._states("WriteState", [output if eagle.normed_output else x, "tokens"], "written")
        return output

    def _predict_draft(self, x: str) -> list[Any]:
        more = ""
        if self._exit.deep:
            state = self._states("CarryState", ["tokens"], "deep_state")
            more = self._product(state, [self._columns(f"{EXIT_HEAD}{DEEP_IN}.weight")], "more")
        x = self._eagle_block(self._exit.eagle, x) if self._exit.eagle else x
        for block in range(0 if self._exit.eagle else self._exit.blocks):
            last = block == self._exit.blocks - 1
            x = self._block(
                f"{EXIT_HEAD}blocks.{block}.",
                x,
                self._geometry.num_layers + block,
                more if last else "",
            )
        head = f"{EXIT_HEAD}{LM_HEAD}" if self._exit.own_lm_head else LM_HEAD
        norm = "" if self._exit.eagle else f"{EXIT_HEAD}norm.weight"
        self._logits(x, head, norm, 0.0 if self._exit.blocks else self._geometry.logit_cap)
        ids = self._small(EXIT_HEAD + DRAFT_VOCAB) if self._exit.draft_vocab else self._small()
        outputs = ["topk_ids", "topk_logprobs"]
        self.nodes.append(
            helper.make_node(
                "TopK", ["logits", ids], outputs, domain=DOMAIN, k=self.manifest.draft_top_k
            )
        )
        return [_output("logits"), _output("topk_ids", TensorProto.INT64), _output("topk_logprobs")]

    def _product(
        self,
        x: str,
        parts: Sequence[Columns],
        name: str,
        norm: str = "",
        bias: Sequence[str] = (),
        prefix: str = "",
        residual: str = "",
        gating: int = 0,
    ) -> str:
        """x, normalized if there is a norm, times the parts side by side."""
        found = [self._find(prefix + one) for one in bias]
        biases = [one for one in found if one is not None]
        assert not biases or len(biases) == len(bias)
        joined = self._small(*biases)
        given = [x, self._small(norm) if norm else self._small(), joined, residual or self._small()]
        inputs = [*given, *map(self._packed, parts)]
        numbers = self._numbers(parts)
        return self._node(
            "Product", inputs, name, epsilon=self._epsilon(norm), gating=gating, matrices=numbers
        )

    def _find(self, name: str) -> str | None:
        """The name that a weight has in this graph: its own, or that of the draft's copy."""
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
            offset, length, _ = self.weights.packed(part)
            tensor = TensorProto(
                name=name,
                data_type=TensorProto.UINT8,
                dims=[length],
                data_location=TensorProto.EXTERNAL,
            )
            for key, value in (
                ("location", self.weights.file),
                ("offset", offset),
                ("length", length),
            ):
                tensor.external_data.add(key=key, value=str(value))
            self.initializers[name] = tensor
        return name

    def _numbers(self, parts: Sequence[Columns], whole: bool = False) -> list[int]:
        """What the operators must know of weights. Of two planes the draft reads the upper one, but
        ``whole`` ones."""
        upper = {PLANES: UPPER} if self._draft and not whole else {}
        given = [self.weights.packed(part).numbers for part in parts]
        return [number for form, *others in given for number in (upper.get(form, form), *others)]

    def _small(self, *names: str) -> str:
        """The initializer of a norm, a table, or biases side by side; an empty one for names that
        the graph has not."""
        found = [name for name in names if self._find(name) is not None]
        name = "+".join(found) or "nothing"
        if name not in self.initializers:
            values = [self.weights.small[str(self._find(one))] for one in found]
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

    def _model(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bytes:
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
