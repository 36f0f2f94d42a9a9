"""The operators of this project in NumPy. This is a second implementation of
``runtime/operators/SPECIFICATION.md``, and it gives the same bits.

All values are float32, and each step rounds once. An array has one column or head per lane, so each
operation here is one step of the sums of all lanes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK = 32
CHUNK = 128
BITS = {"bits4": 4, "bits5": 5, "bits6": 6, "bits8": 8, "planes": 8, "upper": 8}


def fma(a: Any, b: Any, c: Any) -> Floats:
    """Returns a b + c, which is rounded only once.

    The product of two float32 is exact in float64. In float64 the sum is rounded to odd. Rounding
    it to float32 then gives the same result as rounding the exact sum (Boldo and Melquiond, 2008).
    """
    product = np.float64(a) * np.float64(b)
    other = np.float64(c)
    total = np.asarray(product + other)
    rest = total - product
    error = (product - (total - rest)) + (other - rest)
    bits = total.view(np.int64)
    wrong = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.asarray((bits + np.where(wrong, step, 0)).view(np.float64)).astype(np.float32)


def add_lanes(values: Floats) -> Floats:
    """Returns the sum over the last axis, which has 16 values. Halves are added until one value is
    left."""
    width = values.shape[-1] // 2
    while width:
        values = values[..., :width] + values[..., width : 2 * width]
        width //= 2
    found: Floats = values[..., 0]
    return found


def lanes(values: Floats) -> Floats:
    """Returns an array [..., n] in the shape [..., ceil(n / 16), 16], padded with zeros."""
    size = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-size // 16) * 16), np.float32)
    padded[..., :size] = values
    return padded.reshape(*values.shape[:-1], -1, 16)


def exponential(a: Floats) -> Floats:
    a = np.clip(a, np.float32(-87), np.float32(88))
    whole = np.rint(a * np.float32(1.44269504))
    rest = fma(whole, np.float32(-0.693359375), a)
    rest = fma(whole, np.float32(2.12194440e-4), rest)
    p: Any = np.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, rest, np.float32(c))
    p = fma(p, rest * rest, rest + np.float32(1))
    found: Floats = np.ldexp(p, whole.astype(np.int32))
    return found


def logarithm(a: Floats) -> Floats:
    """Returns the natural logarithm of normal numbers above 0."""
    r, exponent = np.frexp(a)
    small = r < np.float32(0.707106781)
    whole = (exponent - small).astype(np.float32)
    r = np.where(small, r + r, r) - np.float32(1)
    p: Any = np.float32(7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1):
        p = p * r + np.float32(c)
    for c in (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = p * r + np.float32(c)
    square = r * r
    p = p * r * square - np.float32(2.12194440e-4) * whole
    found: Floats = p - np.float32(0.5) * square + r + np.float32(0.693359375) * whole
    return found


def top_k(logits: Floats, k: int) -> tuple[NDArray[np.int64], Floats]:
    """Returns the columns of the k largest values of each row [T, V], and their
    log-probabilities."""
    order = np.argsort(-np.where(np.isnan(logits), -np.inf, logits), 1, "stable")[:, :k]
    values = np.take_along_axis(logits, order, 1)
    most = values[:, :1]
    with np.errstate(invalid="ignore"):
        split = lanes(exponential(np.where(np.isnan(logits), np.float32(-np.inf), logits) - most))
        total = np.zeros((len(logits), 16), np.float32)
        for i in range(split.shape[1]):
            total = total + split[:, i]
        return order, values - most - logarithm(add_lanes(total))[:, None]


def normalize(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Returns x [..., n] divided by its root mean square and multiplied by the weight."""
    squares = np.zeros((*x.shape[:-1], 16), np.float32)
    split = lanes(x)
    for i in range(split.shape[-2]):
        squares = fma(split[..., i, :], split[..., i, :], squares)
    mean = add_lanes(squares) / np.float32(x.shape[-1])
    factor = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
    found: Floats = x * factor[..., None] * weight
    return found


@dataclass
class Weight:
    """A weight [K, N] in the operators' form.

    Attributes:
        form: ``float32``, ``float16``, ``bfloat16`` or one of :data:`BITS`.
        values: The values, if the format is a floating-point format.
        levels: [K, N], from 0 on.
        zero: The level for 0.
        scales, minimums: [K / 32 or 16, N]; minimums may be None.
    """

    form: str
    values: Floats | None = None
    levels: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    zero: int = 0
    scales: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    minimums: Floats | None = None

    @property
    def fine(self) -> bool:
        return len(self.levels) // len(self.scales) == 16

    @property
    def read(self) -> Floats:
        """The levels as products read them. In an upper plane, these are the values of the upper 4
        bits."""
        if self.form == "upper":
            return (self.levels - self.levels % 16 + 7.5).astype(np.float32)
        return self.levels.astype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.levels if self.values is None else self.values).shape

    def dequantized(self) -> Floats:
        """Returns the values [K, N] whose columns Embed returns."""
        if self.values is not None:
            return self.values
        block = len(self.levels) // len(self.scales)
        found: Floats = (self.read - np.float32(self.zero)) * np.repeat(self.scales, block, 0)
        if self.minimums is not None:
            found += np.repeat(self.minimums, block, 0)
        return found


@dataclass(frozen=True)
class Rounded:
    """Activations in 8 bits. They have levels [T, K], and a scale for each block [T, K / 32]."""

    levels: NDArray[np.int64]
    scales: Floats

    def dequantized(self) -> NDArray[np.float64]:
        return self.levels.astype(np.float64) * np.repeat(self.scales.astype(np.float64), BLOCK, 1)


def round_blocks(x: Floats) -> Rounded:
    levels, scales = round_rows(x.reshape(len(x), -1, BLOCK), 127)
    return Rounded(levels.reshape(x.shape), scales)


def round_rows(x: Floats, most: int) -> tuple[NDArray[np.int64], Floats]:
    """Returns the levels of rows [..., n], and the scales of the rows [...]. The largest level of a
    row is ``most`` or -most."""
    largest = np.abs(x).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest >= SMALLEST, np.float32(most) / largest, np.float32(0))
    return np.rint(x * inverse[..., None]).astype(np.int64), largest / np.float32(most)


SMALLEST = np.float32(2.0**-100)
"""In blocks whose largest value is below this, all levels are 0."""


def multiply(x: Floats, weight: Weight, int8: bool) -> Floats:
    """Returns the product [T, N] of x [T, K] and a weight."""
    total = np.zeros((len(x), weight.shape[1]), np.float32)
    if weight.values is not None:
        for k in range(x.shape[1]):
            total = fma(x[:, k : k + 1], weight.values[k], total)
        return total
    size = 16 if weight.fine else 32
    rounded = round_blocks(x)
    for part in range(x.shape[1] // size):
        inputs = slice(part * size, part * size + size)
        levels = weight.read[inputs] - np.float32(weight.zero)
        scale = weight.scales[part]
        if int8:
            own = rounded.scales[:, part * size // BLOCK, None]
            sums = rounded.levels[:, inputs] @ levels.astype(np.float64)
            total = fma(sums.astype(np.float32), scale * own, total)
            share = own * rounded.levels[:, inputs].sum(1)[:, None].astype(np.float32)
        else:
            both = [np.zeros_like(total), np.zeros_like(total)]
            for k in range(size):
                both[k % 2] = fma(levels[k], x[:, inputs.start + k, None], both[k % 2])
            total = fma(both[0] + both[1], scale, total)
            values = x[:, inputs]
            share = add_lanes(values if weight.fine else values[:, :16] + values[:, 16:])[:, None]
        if weight.minimums is not None:
            total = fma(weight.minimums[part], share, total)
    return total


def product(
    x: Floats,
    parts: list[Weight],
    int8: bool,
    norm: Floats | None = None,
    epsilon: float = 0,
    bias: Floats | None = None,
    residual: Floats | None = None,
    gating: int = 0,
) -> Floats:
    if norm is not None:
        x = normalize(x, norm, epsilon)
    y = np.concatenate([multiply(x, part, int8) for part in parts], 1)
    if bias is not None:
        y = y + bias
    if gating:
        gate, up = np.split(y, 2, 1)
        inner = gate
        if gating == 2:
            inner = gate * fma(gate * gate, np.float32(0.0713548163), np.float32(1.59576912))
        elif gating == 3:
            gate = np.minimum(gate, np.float32(7))
            up = np.clip(up, np.float32(-7), np.float32(7)) + np.float32(1)
            inner = gate * np.float32(1.702)
        y = gate / (np.float32(1) + exponential(np.float32(0) - inner)) * up
    return y if residual is None else y + residual


@dataclass(frozen=True)
class Choice:
    """Says how experts are chosen if they are not chosen by their logits.

    Attributes:
        scores: 0 for a softmax, 1 for sigmoids, 2 for sparsemixer.
        bias: Biases of the choice [E].
        groups: Number of groups of experts.
        used_groups: Number of groups that a token uses.
        group_best: Number of the best ranks in a group that are added for the group's sum.
        norm_eps: Number that is added to the sum of the weights.
        scale: Factor of the weights.
        margin: Largest distance of a logit that counts for sparsemixer.
    """

    scores: int
    bias: Floats
    groups: int = 1
    used_groups: int = 1
    group_best: int = 1
    norm_eps: float = 0.0
    scale: float = 1.0
    margin: float = 0.02

    def weights(self, logits: Floats, used: int) -> tuple[NDArray[np.int64], Floats]:
        """Returns the experts of each row [T, E] in descending order of their ranks, and their
        scores."""
        if self.scores == 2:
            return self._near_shares(logits, used)
        if self.scores == 1:
            scores = np.float32(1) / (np.float32(1) + exponential(np.float32(0) - logits))
        else:
            logprob = top_k(logits, 1)[1]
            scores = exponential(logits - logits.max(1, keepdims=True) + logprob)
        ranks = (scores + self.bias).reshape(len(logits), self.groups, -1)
        sums = np.zeros(ranks.shape[:2], np.float32)
        for place in range(self.group_best):
            sums = sums + -np.sort(-ranks, 2)[:, :, place]
        left_out = np.argsort(-sums, 1, "stable")[:, self.used_groups :]
        np.put_along_axis(ranks, left_out[:, :, None], -np.inf, 1)
        found = np.argsort(-ranks.reshape(logits.shape), 1, "stable")[:, :used]
        return found, np.take_along_axis(scores, found, 1)

    def _near_shares(self, logits: Floats, used: int) -> tuple[NDArray[np.int64], Floats]:
        found, _ = top_k(logits, used)
        left = np.ones(logits.shape, bool)
        weights = np.zeros(found.shape, np.float32)
        for place in range(used):
            most = np.take_along_axis(logits, found[:, place : place + 1], 1)
            with np.errstate(divide="ignore", invalid="ignore"):
                far = (most - logits) / np.maximum(np.abs(logits), most) > np.float32(self.margin)
            terms = np.where(left & ~far, exponential(logits - most), np.float32(0))
            weights[:, place] = np.float32(1) / np.cumsum(terms, 1, dtype=np.float32)[:, -1]
            np.put_along_axis(left, found[:, place : place + 1], False, 1)
        return found, weights


def route(
    logits: Floats, used: int, normed: bool, choice: Choice | None = None
) -> tuple[NDArray[np.int64], Floats]:
    """Returns the experts of each row [T, E] in ascending order, and their weights."""
    if choice is None:
        found, logprobs = top_k(logits, used)
        weights = exponential(logprobs)
    else:
        found, weights = choice.weights(logits, used)
    if normed:
        total = np.zeros(len(weights), np.float32)
        for place in range(used):
            total = total + weights[:, place]
        weights = weights / (total[:, None] + np.float32(choice.norm_eps if choice else 0))
    order = np.argsort(found, 1)
    return np.take_along_axis(found, order, 1), np.take_along_axis(weights, order, 1)


def mixture(
    x: Floats,
    experts: list[list[Weight]],
    logits: Floats,
    used: int,
    normed: bool,
    int8: bool,
    norm: Floats | None = None,
    epsilon: float = 0,
    residual: Floats | None = None,
    gating: int = 1,
    biases: tuple[Floats, Floats] | None = None,
    factors: Floats | None = None,
    choice: Choice | None = None,
) -> Floats:
    """Compute a mixture of experts. ``experts`` has the gate, up and down projections of each
    expert. ``biases`` has the biases of gate and up [E, 2 I] and the biases of down [E, H].
    ``factors`` [E] multiply the weights of the experts."""
    found, weights = route(logits, used, normed, choice)
    if factors is not None:
        weights = weights * factors[found]
    if choice is not None:
        weights = weights * np.float32(choice.scale)
    y = np.zeros_like(x)
    for number, (gate, up, down) in enumerate(experts):  # a token's experts in ascending order
        tokens, places = np.nonzero(found == number)
        if len(tokens):
            inner, outer = (None, None) if biases is None else (one[number] for one in biases)
            gated = product(x[tokens], [gate, up], int8, norm, epsilon, inner, gating=gating)
            given = product(gated, [down], int8, bias=outer)
            y[tokens] = fma(weights[tokens, places, None], given, y[tokens])
    return y if residual is None else y + residual


@dataclass(frozen=True)
class Heads:
    """The parameters of attention. Its inputs are not among them."""

    heads: int
    kv_heads: int
    head_dim: int
    cos: Floats
    sin: Floats
    scale: float
    epsilon: float = 0
    q_norm: Floats | None = None
    k_norm: Floats | None = None
    dtype: str = "float32"
    hides_first: bool = False
    cap: float = 0
    window: int = 0
    rotates: bool = True
    norms_last: bool = False
    sinks: Floats | None = None

    def cached(self, x: Floats) -> Floats:
        """Returns keys or values, rounded as a floating-point cache rounds them."""
        limit = np.float32(65504)
        if self.dtype == "float32":
            return x
        return np.clip(x, -limit, limit).astype(np.float16).astype(np.float32)

    def split(self, qkv: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns the queries, keys and values of qkv, each of shape [T, heads, D]."""
        every = qkv.reshape(len(qkv), -1, self.head_dim)
        return (
            every[:, : self.heads],
            every[:, self.heads : self.heads + self.kv_heads],
            every[:, self.heads + self.kv_heads :],
        )

    def turned(self, x: Floats, position: int, norm: Floats | None) -> Floats:
        """Returns heads [..., D] that are first normalized and then rotated, or the other way
        round."""
        if norm is not None and not self.norms_last:
            x = normalize(x, norm, self.epsilon)
        if self.rotates:
            half = self.head_dim // 2
            cos = self.cos[position]
            sin = self.sin[position]
            first = x[..., :half]
            second = x[..., half:]
            x = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        if norm is not None and self.norms_last:
            return normalize(x, norm, self.epsilon)
        return x

    def attend(self, query: Floats, keys: Floats, values: Floats) -> Floats:
        """Returns the attention of a token's rotated queries [heads, D] to keys and values [KV,
        positions, D]. The values are added in the order of positions."""
        group = self.heads // self.kv_heads
        seen = keys.shape[1]
        keys = np.repeat(keys, group, 0)
        values = np.repeat(values, group, 0)
        scores: Floats = np.zeros((self.heads, seen), np.float32)
        scale = np.float32(self.scale)
        if self.dtype == "int8":
            levels, scales = round_rows(keys, 127)
            own, factor = round_rows(query, 32767)
            scores = np.einsum("hsd,hd->hs", levels, own).astype(np.float32) * (
                scales * (factor * scale)[:, None]
            )
        else:
            keys = self.cached(keys)
            values = self.cached(values)
            for d in range(self.head_dim):
                scores = fma(keys[:, :, d], query[:, d, None], scores)
            scores = scores * scale
        if self.cap:
            cap = np.float32(self.cap)
            scores = cap - (cap + cap) / (exponential((scores + scores) / cap) + np.float32(1))
        total: list[Floats] = []
        first = int(self.hides_first and seen > 1)
        if self.window:
            first = max(0, seen - self.window)
        for start in range(0, seen, CHUNK):
            if start + CHUNK <= first:
                continue
            chunk = slice(start, start + CHUNK)
            part = _chunk(scores[:, chunk], values[:, chunk], first - start, self.dtype == "int8")
            total = part if not total else _merge(total, part)
        if self.sinks is not None:
            ones = np.ones(self.heads, np.float32)
            total = _merge(total, [self.sinks, ones, np.zeros_like(total[2])])
        return total[2] * (np.float32(1) / total[1])[:, None]


def _chunk(scores: Floats, values: Floats, absent: int, int8: bool) -> list[Floats]:
    """Returns the maximum and the sum of the weights [heads], and the weighted sum of the values
    [heads, D]. There are at most 128 positions. The first ``absent`` positions are left out."""
    most = scores[:, max(absent, 0) :].max(1)
    weights = exponential(np.minimum(scores - most[:, None], 0))
    weights[:, : max(absent, 0)] = 0
    split = lanes(weights)
    sums = split[:, 0]
    for i in range(1, split.shape[1]):
        sums = sums + split[:, i]
    if int8:
        levels, scales = round_rows(values, 127)
        factors, scale = round_rows(weights * scales, 32767)
        return [
            most,
            add_lanes(sums),
            np.einsum("hs,hsd->hd", factors, levels).astype(np.float32) * scale[:, None],
        ]
    out = np.zeros((len(scores), values.shape[2]), np.float32)
    for j in range(scores.shape[1]):
        out = fma(weights[:, j, None], values[:, j], out)
    return [most, add_lanes(sums), out]


def _merge(total: list[Floats], part: list[Floats]) -> list[Floats]:
    most = np.maximum(total[0], part[0])
    old = exponential(total[0] - most)
    new = exponential(part[0] - most)
    return [
        most,
        fma(total[1], old, part[1] * new),
        fma(total[2], old[:, None], part[2] * new[:, None]),
    ]


@dataclass
class Rule:
    """A layer with the gated delta rule or a state space. It processes one path of tokens.

    Attributes:
        key_heads, value_heads, key_dim, value_dim: Its sizes.
        weights: Weights of the convolution [mixed, taps].
        decay, bias: Logarithms of the decay rates, and the biases of their inputs, [value_heads].
        norm: Weight of the norm [value_dim], or a state space's factors of values [value_heads].
        epsilon: Epsilon of the norm.
        taps_bias: Biases of the convolution [mixed], or None.
        space: Whether it is a state space.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    weights: Floats
    decay: Floats
    bias: Floats
    norm: Floats
    epsilon: float
    taps_bias: Floats | None = None
    space: bool = False

    def outputs(self, x: Floats) -> Floats:
        """Returns the outputs [T, values] of consecutive tokens x [T, columns]."""
        heads = self.value_heads
        keys = self.key_heads * self.key_dim
        values = heads * self.value_dim
        sizes = [2 * keys + values, values, *([] if self.space else [heads])]
        mixed, gates, *steps, decays = np.split(x, np.cumsum(sizes), axis=1)
        q, k, v = np.split(self._convolved(mixed), [keys, 2 * keys], axis=1)
        q, k = (one.reshape(len(x), -1, self.key_dim) for one in (q, k))
        if not self.space:
            q = _unit(q) * (np.float32(1) / np.sqrt(np.float32(self.key_dim)))
            k = _unit(k) * np.float32(1)
        group = heads // self.key_heads
        q, k = (np.repeat(one, group, 1) for one in (q, k))
        v = v.reshape(len(x), heads, -1)
        lengths = _softplus(decays + self.bias)
        logs = (0 - lengths) * exponential(self.decay)
        states = np.zeros((heads, self.key_dim, self.value_dim), np.float32)
        y = np.zeros_like(v)
        for t in range(len(x)):
            states = states * exponential(logs[t])[:, None, None]
            if self.space:
                delta = v[t] * lengths[t, :, None]
            else:
                known = np.zeros_like(v[t])
                for i in range(self.key_dim):
                    known = fma(states[:, i], k[t, :, i, None], known)
                delta = (v[t] - known) * _logistic(steps[0][t])[:, None]
            states = fma(k[t, :, :, None], delta[:, None], states)
            for i in range(self.key_dim):
                y[t] = fma(states[:, i], q[t, :, i, None], y[t])
        y = fma(self.norm[:, None], v, y) if self.space else normalize(y, self.norm, self.epsilon)
        return y.reshape(len(x), -1) * (gates / (np.float32(1) + exponential(0 - gates)))

    def _convolved(self, x: Floats) -> Floats:
        taps = self.weights.shape[1]
        total = np.zeros_like(x)
        if self.taps_bias is not None:
            total = total + self.taps_bias
        for distance in reversed(range(taps)):
            there = x[: max(len(x) - distance, 0)]
            weight = self.weights[:, taps - 1 - distance]
            total[distance:] = fma(weight, there, total[distance:])
        return total / (np.float32(1) + exponential(0 - total))


def _unit(x: Floats) -> Floats:
    """Returns x [..., n] divided by its Euclidean length."""
    squares = np.zeros((*x.shape[:-1], 16), np.float32)
    split = lanes(x)
    for i in range(split.shape[-2]):
        squares = fma(split[..., i, :], split[..., i, :], squares)
    length = np.sqrt(add_lanes(squares) + np.float32(1e-6))
    found: Floats = x * (np.float32(1) / length)[..., None]
    return found


def _logistic(x: Floats) -> Floats:
    return np.float32(1) / (np.float32(1) + exponential(0 - x))


def _softplus(x: Floats) -> Floats:
    power = exponential(x)
    total = np.float32(1) + power
    with np.errstate(invalid="ignore"):
        found = logarithm(total) * power / (total - np.float32(1))
    found = np.where(total == 1, power, found)
    return np.where(x > 20, x, found)
