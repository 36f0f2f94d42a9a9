"""Makes models that consist of one operator of this project, and random inputs for them. It also
checks their results."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from eesd.export.cpu.panels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NARROW,
    SPLIT,
    UPPER,
    Packed,
    pack_floats,
    pack_levels,
)
from eesd.runtime.engines import operators
from support import specification
from support.specification import BITS, BLOCK, Floats, Heads, Weight

NOTHING = np.zeros(0, np.float32)
PLANES_OF = ("planes", "upper")
"""The formats that have two planes. They have a scale for each 32 inputs, and no minimums."""
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 70, 130)
MOST = max(ROWS)
Array = NDArray[Any]
Input = tuple[str, Array | int]
"""The name of a node's input, and its constant value. An input that each call gives has its element
type instead of a value."""


def one_node(
    path: Path,
    kind: str,
    inputs: Sequence[Input],
    outputs: Sequence[int] = (TensorProto.FLOAT,),
    **attributes: Any,
) -> Path:
    """Write a model of one node. ``outputs`` are types."""
    given = []
    constants = []
    for name, value in inputs:
        if isinstance(value, np.ndarray):
            constants.append(numpy_helper.from_array(value, name))
        else:
            given.append(helper.make_tensor_value_info(name, value, None))
    names = [name for name, _ in inputs]
    found = [
        helper.make_tensor_value_info(f"y{number}", of, None) for number, of in enumerate(outputs)
    ]
    node = helper.make_node(
        kind, names, [value.name for value in found], domain=operators.DOMAIN, **attributes
    )
    graph = helper.make_graph([node], "one", given, found, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(operators.DOMAIN, 1)]
    path.write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    )
    return path


def run(session: Any, **given: Array) -> Floats:
    found: Floats = session.run(None, given)[0]
    return found


def bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def assert_same(found: Floats, expected: Floats, what: object = "") -> None:
    assert found.shape == expected.shape, what
    differ = bits(found) != bits(expected)
    assert not differ.any(), (
        f"{what}: {differ.sum()} of {differ.size} values have other bits, e.g. {found[differ][0]!r}"
    )


def or_nothing(values: Floats | None) -> Floats:
    """An absent input has no elements."""
    return NOTHING if values is None else values


def random_weight(
    random: np.random.Generator,
    form: str,
    inputs: int,
    outputs: int,
    fine: bool,
    kind: int,
    minimums: bool,
    signed: bool = True,
) -> Weight:
    """Returns a random weight in this format. Its levels cover the whole range, and it has scales
    and minimums of this kind."""
    if form not in BITS:
        values = random.normal(0, 0.4, (inputs, outputs)).astype(np.float32)
        if form == "float16":
            values = values.astype(np.float16).astype(np.float32)
        if form == "bfloat16":
            values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return Weight(form, values)
    if form in PLANES_OF:
        fine = minimums = False
    size = 1 << BITS[form]
    block = 16 if fine else 32
    levels = random.integers(0, size, (inputs, outputs))
    levels[0, 0] = 0
    levels[-1, -1] = size - 1
    shape = inputs // block, outputs
    scales = random.uniform(0.3, 1, shape) / size
    found = -random.uniform(0.2, 0.6, shape)
    if kind == SPLIT:
        scales = split(random, scales, 256 // block)
        found = split(random, found, 256 // block)
    if kind == NARROW:
        scales = scales.astype(np.float16)
        found = found.astype(np.float16)
    zero = size // 2 if signed and not minimums else 0
    return Weight(
        form,
        None,
        levels,
        zero,
        scales.astype(np.float32),
        found.astype(np.float32) if minimums else None,
    )


def split(random: np.random.Generator, values: Array, rows: int) -> Array:
    """Returns values close to these for each of ``rows`` rows. The values of a row are a float16
    number times 6-bit or 8-bit integers, which have no common divisor."""
    most = int(random.choice([63, 127]))
    integers = random.integers(-most, most + 1, values.shape)
    integers[::rows] = most
    integers[1::rows] = most - 1
    factors = (values[::rows] / most).astype(np.float16).astype(np.float64)
    found: Array = integers * np.repeat(factors, rows, 0)
    return found


def pack(weight: Weight) -> Packed:
    if weight.values is None:
        levels = (weight.levels - weight.zero).astype(np.int8 if weight.zero else np.uint8)
        planes = weight.form in PLANES_OF
        packed = pack_levels(levels, weight.scales, weight.minimums, planes)
        if weight.form == "upper":
            return replace(packed, numbers=(UPPER, *packed.numbers[1:]))
        return packed
    if weight.form == "float32":
        return pack_floats(weight.values, FLOAT32)
    if weight.form == "float16":
        return pack_floats(weight.values.astype(np.float16).view(np.uint16), FLOAT16)
    return pack_floats((weight.values.view(np.uint32) >> 16).astype(np.uint16), BFLOAT16)


@dataclass
class Product:
    """A product with random inputs of :data:`MOST` rows."""

    parts: list[Weight]
    norm: Floats | None = None
    bias: Floats | None = None
    residual: bool = False
    gating: int = 0
    epsilon: float = 1e-3
    seed: int = 0
    x: Floats = field(init=False)
    added: Floats = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        inputs = self.parts[0].shape[0]
        outputs = sum(part.shape[1] for part in self.parts) // (2 if self.gating else 1)
        # The blocks differ in the size of their values, so that using the scale of another block is
        # detected. One block is 0, and another is far below all others.
        sizes = random.uniform(0.05, 3, (MOST, inputs // BLOCK + 1, 1))
        sizes[3, 0] = 0
        sizes[4, -2:] = 1e-38
        self.x = (
            (random.normal(0, 1, (MOST, inputs // BLOCK + 1, BLOCK)) * sizes)
            .reshape(MOST, -1)[:, :inputs]
            .astype(np.float32)
        )
        self.added = random.normal(0, 1, (MOST, outputs)).astype(np.float32)

    @property
    def residuals(self) -> Floats | None:
        """The rows that are added, if any."""
        return self.added if self.residual else None

    def inputs(self) -> list[Input]:
        return [
            ("x", TensorProto.FLOAT),
            ("norm", or_nothing(self.norm)),
            ("bias", or_nothing(self.bias)),
            ("residual", TensorProto.FLOAT),
            *((f"w{i}", pack(part).data) for i, part in enumerate(self.parts)),
        ]

    def attributes(self) -> dict[str, Any]:
        numbers = [number for part in self.parts for number in pack(part).numbers]
        return {"epsilon": self.epsilon, "gating": self.gating, "matrices": numbers}

    def write(self, path: Path) -> Path:
        return one_node(path, "Product", self.inputs(), **self.attributes())

    def run(self, session: Any, first: int = 0, last: int = MOST) -> Floats:
        residual = or_nothing(self.residuals)[first:last]
        return run(session, x=self.x[first:last], residual=residual)

    def specified(self, int8: bool) -> Floats:
        with np.errstate(over="ignore"):
            return specification.product(
                self.x,
                self.parts,
                int8,
                self.norm,
                self.epsilon,
                self.bias,
                self.residuals,
                self.gating,
            )

    def in_float64(self, int8: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the result, and the unit of its error, which is the sum of the absolute
        products."""
        x = self.x.astype(np.float64)
        if self.norm is not None:
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(self.epsilon)) * self.norm
        rounded = x
        if len(x[0]) % BLOCK == 0 and int8:
            rounded = specification.round_blocks(x.astype(np.float32)).dequantized()
        inputs = [rounded if part.values is None else x for part in self.parts]
        each = [
            (own, part.dequantized().astype(np.float64))
            for own, part in zip(inputs, self.parts, strict=True)
        ]
        y = np.concatenate([own @ w for own, w in each], 1)
        size = np.concatenate([np.abs(own) @ np.abs(w) for own, w in each], 1) + 1e-30
        if self.bias is not None:
            y += self.bias
            size += np.abs(self.bias)
        if self.gating:
            gate, up = np.split(y, 2, 1)
            g, u = np.split(size, 2, 1)
            with np.errstate(over="ignore"):
                y = gated_in_float64(gate, up, self.gating)
                size = g * u + g + u
        if self.residual:
            y += self.added
            size += np.abs(self.added)
        return y, size


def check_product(
    product: Product,
    path: Path,
    int8: bool,
    names: Sequence[str],
    threads: Sequence[int] = (1, 2, 3),
) -> None:
    """All kernels, numbers of rows and threads give the bits of the specification, and these are
    close to results in float64."""
    product.write(path)
    expected = product.specified(int8)
    exact, size = product.in_float64(int8)
    # After norm and rounding to 8 bits in float32, a level at the edge may become its neighbour.
    tolerance = 1e-2 if int8 and product.norm is not None else 3e-6
    assert (np.abs(expected - exact) <= tolerance * size).all(), (
        f"off by {(np.abs(expected - exact) / size).max()}"
    )
    for name in names:
        session = operators.make_session(path, 1, int8, name)
        for rows in ROWS:
            first = (MOST - rows) * 2 // 3
            assert_same(
                product.run(session, first, first + rows),
                expected[first : first + rows],
                f"{name}, {rows} rows",
            )
    for count in threads[1:]:
        session = operators.make_session(path, count, int8, names[0])
        for rows in (1, 5, 17, 70, MOST):
            assert_same(
                product.run(session, 0, rows), expected[:rows], f"{count} threads, {rows} rows"
            )


def gated_in_float64(
    gate: NDArray[np.float64], up: NDArray[np.float64], gating: int
) -> NDArray[np.float64]:
    """Returns the activated gate multiplied by up."""
    inner = gate
    if gating == 2:
        inner = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    elif gating == 3:
        gate = np.minimum(gate, 7)
        up = np.clip(up, -7, 7) + 1
        inner = 1.702 * gate
    found: NDArray[np.float64] = gate / (1 + np.exp(-inner)) * up
    return found


@dataclass
class Mixture:
    """A mixture of experts with random inputs of :data:`MOST` rows. Each expert has gate, up and
    down projections."""

    experts: list[list[Weight]]
    used: int
    normed: bool = True
    norm: Floats | None = None
    residual: bool = False
    gating: int = 1
    epsilon: float = 1e-3
    biases: tuple[Floats, Floats] | None = None
    factors: Floats | None = None
    choice: specification.Choice | None = None

    def __post_init__(self) -> None:
        random = np.random.default_rng(0)
        shape = MOST, self.experts[0][0].shape[0]
        self.x, self.added = (random.normal(0, 1, shape).astype(np.float32) for _ in range(2))
        self.logits = random.normal(0, 3, (MOST, len(self.experts))).astype(np.float32)
        self.logits[:, ::2] = np.rint(self.logits[:, ::2])  # some are equal
        self.logits[5] = 1

    @property
    def residuals(self) -> Floats | None:
        """The rows that are added, if any."""
        return self.added if self.residual else None

    def inputs(self) -> list[Input]:
        weights = (weight for expert in self.experts for weight in expert)
        return [
            ("x", TensorProto.FLOAT),
            ("norm", or_nothing(self.norm)),
            ("logits", TensorProto.FLOAT),
            ("residual", TensorProto.FLOAT),
            *zip(("inner", "outer"), self.biases or (NOTHING, NOTHING), strict=True),
            ("factors", NOTHING if self.factors is None else self.factors),
            ("bias", NOTHING if self.choice is None else self.choice.bias),
            *((f"w{i}", pack(weight).data) for i, weight in enumerate(weights)),
        ]

    def attributes(self) -> dict[str, Any]:
        numbers = [
            number
            for expert in self.experts
            for weight in expert
            for number in pack(weight).numbers
        ]
        own = {
            "epsilon": self.epsilon,
            "gating": self.gating,
            "used": self.used,
            "normed": int(self.normed),
        }
        choice = self.choice or specification.Choice(0, NOTHING)
        own |= {name: one for name, one in vars(choice).items() if name != "bias"}
        return own | {"matrices": numbers}

    def write(self, path: Path) -> Path:
        return one_node(path, "Mixture", self.inputs(), **self.attributes())

    def run(self, session: Any, first: int = 0, last: int = MOST) -> Floats:
        residual = or_nothing(self.residuals)[first:last]
        return run(session, x=self.x[first:last], logits=self.logits[first:last], residual=residual)

    def specified(self, int8: bool) -> Floats:
        return specification.mixture(
            self.x,
            self.experts,
            self.logits,
            self.used,
            self.normed,
            int8,
            self.norm,
            self.epsilon,
            self.residuals,
            self.gating,
            self.biases,
            self.factors,
            self.choice,
        )

    def in_float64(self) -> NDArray[np.float64]:
        x = self.x.astype(np.float64)
        logits = self.logits.astype(np.float64)
        if self.norm is not None:
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(self.epsilon)) * self.norm
        shares = np.exp(logits - np.logaddexp.reduce(logits, 1)[:, None])
        choice = self.choice or specification.Choice(0, NOTHING)
        used, weights = specification.route(self.logits, self.used, False, self.choice)
        if choice.scores == 1:
            shares = 1 / (1 + np.exp(-logits))
        elif choice.scores == 2:
            np.put_along_axis(shares, used, weights.astype(np.float64), 1)
        unused = np.ones_like(shares)
        np.put_along_axis(unused, used, 0, 1)
        shares[unused > 0] = 0
        if self.normed:
            shares /= shares.sum(1, keepdims=True) + choice.norm_eps
        shares *= choice.scale
        if self.factors is not None:
            shares *= self.factors
        y = np.zeros_like(x)
        no_biases = [np.zeros(len(self.experts))] * 2
        for number, (share, parts) in enumerate(zip(shares.T, self.experts, strict=True)):
            gate, up, down = (part.dequantized().astype(np.float64) for part in parts)
            inner, outer = (one[number] for one in self.biases or no_biases)
            g, u = np.split(np.concatenate([x @ gate, x @ up], 1) + inner, 2, 1)
            y += share[:, None] * (gated_in_float64(g, u, self.gating) @ down + outer)
        if self.residual:
            y += self.added
        return y


def check_mixture(mixture: Mixture, path: Path, int8: bool, names: Sequence[str]) -> None:
    """All kernels, numbers of rows and threads give the bits of the specification, and these are
    close to results in float64."""
    mixture.write(path)
    expected = mixture.specified(int8)
    levels = int8 and mixture.experts[0][0].values is None
    exact = mixture.in_float64()
    assert np.abs(expected - exact).max() < (0.05 if levels else 1e-5) * np.abs(exact).max()
    for name, threads in [*((name, 1) for name in names), (names[0], 2), (names[0], 3)]:
        session = operators.make_session(path, threads, int8, name)
        for rows in (1, 2, 5, 9, 33, MOST):
            first = (MOST - rows) * 2 // 3
            assert_same(
                mixture.run(session, first, first + rows),
                expected[first : first + rows],
                f"{name}, {rows} rows",
            )


UNWRITTEN = -1
"""The byte in all cells that no token may read. In an int8 cache, four such bytes are a scale that
is NaN."""


class Cache:
    """Caches of layers in the form that the operators use. They are filled with forbidden numbers,
    so that a test detects when an unwritten slot is read."""

    def __init__(
        self, layers: int, kv_heads: int, slots: int, head_dim: int, dtype: str = "float32"
    ) -> None:
        self.width = -(-head_dim // 16) * 16
        size = layers * 2 * kv_heads * slots * (self.width + 4 * (dtype == "int8"))
        memory = np.full(size + 64, UNWRITTEN, dtype)
        self.array: Array = memory[-memory.ctypes.data % 64 // memory.itemsize :][:size]
        shape = layers, 2, kv_heads, slots // 16
        if dtype == "int8":
            tiles = self.array.reshape(*shape, -1)
            self.keys: Array = tiles[:, 0, ..., : 16 * self.width].reshape(
                layers, kv_heads, -1, self.width // 2, 16, 2
            )
            self.values: Array = tiles[:, 1, ..., : 16 * self.width].reshape(
                layers, kv_heads, -1, 8, self.width, 2
            )
            self.scales = tiles[..., 16 * self.width :].view(np.float32)
            return
        self.keys = self.array.reshape(*shape, self.width, 16)[:, 0]
        self.values = self.array.reshape(layers, 2, kv_heads, slots, self.width)[:, 1]
        # Cells after a head's values are multiplied, though the results are not used, so they must
        # not be NaN.
        self.keys[..., head_dim:, :] = 0
        self.values[..., head_dim:] = 0

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def rows(self, layer: int, slot: int, head_dim: int) -> tuple[Floats, Floats]:
        """Returns the keys and values [KV, D] of a slot in float32."""
        tile = slot // 16
        row = slot % 16
        if self.array.dtype == np.int8:
            keys = self.keys[layer, :, tile, :, row].reshape(-1, self.width)[:, :head_dim]
            values = self.values[layer, :, tile, row // 2, :head_dim, row % 2]
            scales = self.scales[layer, :, :, tile, row, None]
            return keys * scales[0], values * scales[1]
        keys = self.keys[layer, :, tile, :head_dim, row]
        values = self.values[layer, :, slot, :head_dim]
        return keys.astype(np.float32), values.astype(np.float32)


@dataclass
class Text:
    """A sequence of tokens, each at a place in a tree. It has their queries, keys and values.

    Attributes:
        qkv: [nodes, (H + 2 KV) D].
        paths: For each node, the nodes that it sees. They are in the order of their positions, so
            the node itself is last.
    """

    qkv: Floats
    paths: list[list[int]]
    cache: Cache


@dataclass
class Attention:
    """An attention layer with random tables and norms."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    slots: int = 384
    layers: int = 2
    layer: int = 1
    norms: bool = False
    seed: int = 0
    dtype: str = "float32"
    hides_first: bool = False
    cap: float = 0
    window: int = 0
    rotates: bool = True
    norms_last: bool = False
    sinks: bool = False
    cache_heads: int = 0
    cache_dim: int = 0

    def __post_init__(self) -> None:
        random = self.random = np.random.default_rng(self.seed)
        angles = random.uniform(0, 6.3, (self.slots, self.head_dim // 2))
        norms = random.normal(1, 0.3, (2, self.head_dim)).astype(np.float32)
        self.spec = Heads(
            self.heads,
            self.kv_heads,
            self.head_dim,
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            self.head_dim**-0.5,
            1e-3,
            norms[0] if self.norms else None,
            norms[1] if self.norms else None,
            self.dtype,
            self.hides_first,
            self.cap,
            self.window,
            self.rotates,
            self.norms_last,
            random.normal(0, 2, self.heads).astype(np.float32) if self.sinks else None,
        )

    def session(self, path: Path, threads: int = 1, name: str = "") -> Any:
        """A session of the model written by :meth:`write`."""
        return operators.make_session(path, threads, True, name, kv_cache_dtype=self.dtype)

    def inputs(self) -> list[Input]:
        spec = self.spec
        return [
            ("qkv", TensorProto.FLOAT),
            ("tokens", TensorProto.INT64),
            ("paths", TensorProto.INT32),
            ("cos", spec.cos if spec.rotates else NOTHING),
            ("sin", spec.sin if spec.rotates else NOTHING),
            ("q_norm", or_nothing(spec.q_norm)),
            ("k_norm", or_nothing(spec.k_norm)),
            ("sinks", or_nothing(spec.sinks)),
        ]

    def write(self, path: Path, **changed: int) -> Path:
        return one_node(path, "Attention", self.inputs(), **self.attributes() | changed)

    def attributes(self) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "slots": self.slots,
            "cache_heads": self.cache_heads or self.kv_heads,
            "cache_dim": self.cache_dim or self.head_dim,
            "writes": 1,
            "rank": 0,
            "layer": self.layer,
            "scale": float(self.spec.scale),
            "epsilon": self.spec.epsilon,
            "hides_first": int(self.hides_first),
            "norms_last": int(self.norms_last),
            "cap": float(self.cap),
            "window": self.window,
        }

    def text(self, nodes: int, parents: Sequence[int] = ()) -> Text:
        """Returns a chain of ``nodes`` tokens, followed by nodes with these parents (indices of
        tokens)."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = self.random.normal(0, 1.2, (nodes + len(parents), width)).astype(np.float32)
        paths = [list(range(node + 1)) for node in range(nodes)]
        for node, parent in enumerate(parents, start=nodes):
            paths.append([*paths[parent], node])
        shape = self.cache_heads or self.kv_heads, self.slots, self.cache_dim or self.head_dim
        return Text(qkv, paths, Cache(self.layers, *shape, self.dtype))

    def specified(self, text: Text, nodes: Sequence[int]) -> Floats:
        """[nodes, H D]."""
        q, k, v = self.spec.split(text.qkv)
        keys = np.stack(
            [
                self.spec.turned(k[i], len(path) - 1, self.spec.k_norm)
                for i, path in enumerate(text.paths)
            ],
            1,
        )
        values = v.transpose(1, 0, 2)
        found = []
        for node in nodes:
            path = text.paths[node]
            query = self.spec.turned(q[node], len(path) - 1, self.spec.q_norm)
            found.append(self.spec.attend(query, keys[:, path], values[:, path]).reshape(-1))
        return np.stack(found)

    def in_float64(self, text: Text, nodes: Sequence[int]) -> NDArray[np.float64]:
        q, k, v = (part.astype(np.float64) for part in self.spec.split(text.qkv))

        def turned(
            x: NDArray[np.float64], position: int, norm: Floats | None
        ) -> NDArray[np.float64]:
            if norm is not None:  # a rotation keeps the mean square
                x = (
                    x
                    / np.sqrt((x * x).mean(-1, keepdims=True) + self.spec.epsilon)
                    * (1 if self.norms_last else norm)
                )
            if self.rotates:
                angle = self.spec.cos[position] + 1j * self.spec.sin[position].astype(np.float64)
                half = self.head_dim // 2
                pairs = (x[..., :half] + 1j * x[..., half:]) * angle
                x = np.concatenate([pairs.real, pairs.imag], -1)
            if norm is not None and self.norms_last:
                return x * norm
            return x

        found = []
        for node in nodes:
            path = text.paths[node]
            keys = np.stack([turned(k[i], j, self.spec.k_norm) for j, i in enumerate(path)], 1)
            query = turned(q[node], len(path) - 1, self.spec.q_norm).reshape(
                self.kv_heads, -1, self.head_dim
            )
            keys = keys[:, -self.window :]
            path = path[-self.window :]
            scores = np.einsum("ghd,gsd->ghs", query, keys) * self.spec.scale
            if self.cap:
                scores = self.cap * np.tanh(scores / self.cap)
            if self.hides_first and len(path) > 1:
                scores[..., 0] = -np.inf
            if self.spec.sinks is not None:
                beside = self.spec.sinks.reshape(self.kv_heads, -1, 1)
                scores = np.concatenate([beside, scores], -1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            weights = weights[..., -len(path) :]
            found.append(np.einsum("ghs,sgd->ghd", weights, v[path]).reshape(-1))
        return np.stack(found)


def chain(text: Text, first: int, last: int) -> tuple[Floats, Array, list[list[int]]]:
    """Returns the arguments (qkv, tokens, paths) of a call over consecutive tokens of a text. Each
    token is in the slot of its position."""
    tokens = [(text.cache.address, t, t, t + 1, 0) for t in range(first, last)]
    return text.qkv[first:last], np.array(tokens, np.int64).reshape(-1, 5), [[] for _ in tokens]


def tree(
    text: Text, first: int, last: int, slot: int | None = None
) -> tuple[Floats, Array, list[list[int]]]:
    """Returns the arguments of a call over the nodes from ``first`` on. All tokens before them are
    the context. The nodes are in the slots from ``slot`` on."""
    shift = 0
    if slot is not None:
        shift = slot - first
    own = [
        [node + shift for node in text.paths[node] if node >= first] for node in range(first, last)
    ]
    tokens = [
        (text.cache.address, len(text.paths[node]) - 1, node + shift, first, len(path))
        for node, path in zip(range(first, last), own, strict=True)
    ]
    return text.qkv[first:last], np.array(tokens, np.int64).reshape(-1, 5), own


def attend(session: Any, *calls: tuple[Floats, Array, list[list[int]]]) -> list[Floats]:
    """Run several calls as one. Returns the result of each."""
    longest = max((len(path) for _, _, paths in calls for path in paths), default=0)
    paths = np.full((sum(len(call[2]) for call in calls), longest), -1, np.int32)
    row = 0
    for call in calls:
        for path in call[2]:
            paths[row, : len(path)] = path
            row += 1
    qkv = np.concatenate([call[0] for call in calls])
    tokens = np.concatenate([call[1] for call in calls])
    y = run(session, qkv=qkv, tokens=tokens, paths=paths)
    return np.split(y, np.cumsum([len(call[0]) for call in calls])[:-1])


def prefill(session: Any, text: Text, count: int, pieces: Sequence[int] = (1 << 30,)) -> Floats:
    """Run the first ``count`` tokens in pieces. The pieces have these sizes in turn."""
    found = []
    at = 0
    number = 0
    while at < count:
        stop = min(count, at + pieces[number % len(pieces)])
        found += attend(session, chain(text, at, stop))
        at = stop
        number = number + 1
    return np.concatenate(found)


def check_float16(path: Path, names: Sequence[str]) -> None:
    """Check that ties go to even, that subnormal numbers are kept, and that numbers out of range
    become the largest number."""
    edges = [
        0.0,
        -0.0,
        65504,
        65519.9,
        65520,
        -7e4,
        3e38,
        2**-14,
        2**-24,
        2**-25,
        1.5 * 2**-24,
        3 * 2**-25,
        5 * 2**-25,
        1e-40,
        1 + 2**-11,
        1 + 3 * 2**-11,
        1 + 2**-11 + 2**-20,
        2047.5 * 2**-25,
        2**-14 - 2**-26,
        -(1 + 2**-12),
    ]
    random = np.random.default_rng(0).normal(0, 1, 300).astype(np.float32)
    numbers = np.concatenate(
        [np.array(edges, np.float32), random, random * np.float32(1e-6), random * np.float32(3e4)]
    )
    values = numbers[: len(numbers) // 64 * 64].reshape(-1, 64)
    layer = Attention(heads=0, kv_heads=1, head_dim=64, layers=1, layer=0, dtype="float16")
    text = layer.text(len(values))
    count = len(values)
    qkv, tokens, _ = chain(text, 0, count)
    qkv[:, 64:] = values
    for name in names:
        session = layer.session(layer.write(path), 1, name)
        assert run(session, qkv=qkv, tokens=tokens, paths=np.zeros((count, 0), np.int32)).shape == (
            count,
            0,
        )
        assert_same(
            text.cache.values[0, 0, :count].astype(np.float32), layer.spec.cached(values), name
        )
        keys = text.cache.keys[0, 0, np.arange(count) // 16, :, np.arange(count) % 16].astype(
            np.float32
        )
        turned = [layer.spec.turned(qkv[slot, :64], slot, None) for slot in range(count)]
        assert_same(keys, layer.spec.cached(np.stack(turned)), name)


def top(path: Path, k: int, ids: Array = NOTHING, threads: int = 1, kernels: str = "") -> Any:
    """Returns a session of the operator that finds the k largest logits of each row."""
    given: list[tuple[str, Array | int]] = [("logits", TensorProto.FLOAT), ("ids", ids)]
    outputs = (TensorProto.INT64, TensorProto.FLOAT)
    return operators.make_session(
        one_node(path, "TopK", given, outputs, k=k), threads, True, kernels
    )


def load(library: Path, monkeypatch: Any) -> None:
    """Use another library of operators for all new sessions."""
    ctypes.CDLL(str(library), os.RTLD_LOCAL)
    monkeypatch.setattr(operators, "LIBRARY", library)
    operators._library.cache_clear()
