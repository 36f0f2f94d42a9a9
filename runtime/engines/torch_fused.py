"""The operations of the torch engine on a GPU. Their kernels are written in Triton.

Torch runs a norm, a rotation or a write into the cache as a kernel for each arithmetic operation. A
decoding pass has so few rows that a kernel takes about as long as its launch. Here a block has four
matrix products (with joined weights) instead of seven, and six other kernels instead of about
fifty. These kernels compute in float32, and round only where torch's last operation does. A row's
bits depend neither on the other rows nor on their number.

Attention is computed in *splits* of the slots (Flash-Decoding, Dao et al. 2023). If one program
read all slots of a head, as in torch's attention for few queries, a decoding call would have too
few programs for a GPU. The ends of splits depend on the number of slots that a call may see. The
slots that a token sees are derived from its slot or from the tree, so there is no mask. Calls with
more tokens than a round, such as those of prompts, use torch's attention.

On an H200, a verify pass of one node through 8 layers of Llama 3 8B takes 1.75 ms with 4,096 slots
and 1.96 ms with 32,768 slots. Torch's operators took 3.24 and 8.07 ms. Merely reading the weights
and the cache takes 1.13 and 1.11 ms at 4.15 TB/s (``lab/lease``).

The module needs Triton, so it is imported only where Triton works.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import linear

from eesd.common.architecture import Block, Linear, Norm
from eesd.common.geometry import Geometry
from eesd.common.manifest import MASKED
from eesd.model.graphs import Draft, Verify
from eesd.model.torch_ops import Inputs, TorchOperations, attend
from eesd.runtime.engines.torch_quantized import ComputedBefore

MOST_NODES = 64
"""Maximum number of tokens of a sequence for which attention is computed in splits, without a
mask."""
MOST_SPLITS = 64
LEAST_SPLIT = 128
"""The maximum number of splits, and the minimum number of slots of a split."""
ROWS = 64
"""Number of queries in a program of attention. It is the same for every number of tokens, so that a
query's bits do not depend on the number of tokens."""
WIDEST_HEAD = 256
"""Maximum size of a head. Wider heads do not fit the shared memory of all GPUs."""
WIDE = 1024
"""Number of values that a program of an elementwise kernel computes."""
PART = 4096
"""A program looks for the best among this number of logits."""
HIDDEN = tl.constexpr(float(MASKED))
TOP = tl.constexpr(2**31 - 1)
NONE = tl.constexpr(-(2**63))
"""The largest value of each half of a key, and a number below all keys; see
:func:`_best_of_part`."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The linear layers whose weights are adjacent in memory, so that they run as one layer."""


@triton.jit(do_not_specialize=["eps"])  # type: ignore[untyped-decorator]
def _normalize(x, added, weight, total, y, size, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute a row of :func:`normalize`."""
    at = tl.arange(0, WIDTH)
    there = at < size
    row = tl.program_id(0).to(tl.int64) * size
    value = tl.load(x + row + at, there, 0)
    if added is not None:
        value = (value.to(tl.float32) + tl.load(added + row + at, there, 0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + row + at, value, there)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scaled = wide.to(value.dtype).to(tl.float32) * tl.load(weight + at, there, 0).to(tl.float32)
    tl.store(y + row + at, scaled.to(value.dtype), there)


def normalize(
    x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add the two tensors [..., size] if there are two. Returns the sum and its RMSNorm."""
    x, size = x.contiguous(), x.shape[-1]
    total = x if added is None else torch.empty_like(x)
    y = torch.empty_like(x)
    width = triton.next_power_of_2(size)
    added = added if added is None else added.contiguous()
    warps = min(max(width // 512, 1), 16)
    _normalize[(x.numel() // size,)](
        x, added, weight, total, y, size, eps, WIDTH=width, num_warps=warps
    )
    return total, y


@triton.jit  # type: ignore[untyped-decorator]
def _gate(x, y, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute a part of a row of :func:`gate`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = at < size
    gate = tl.load(x + row * 2 * size + at, there, 0)
    wide = gate.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    value = opened * tl.load(x + row * 2 * size + size + at, there, 0).to(tl.float32)
    tl.store(y + row * size + at, value.to(gate.dtype), there)


def gate(x: Tensor) -> Tensor:
    """Compute SwiGLU [..., size] of gate and up, which are side by side in x [..., 2 size]."""
    x = x.contiguous()
    size = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], size))
    _gate[(y.numel() // size, triton.cdiv(size, WIDE))](x, y, size, WIDTH=WIDE)
    return y


@triton.jit(do_not_specialize=["count", "eps"])  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    position_ids,
    write_indices,
    q_norm,
    k_norm,
    q,
    keys,
    values,
    count,
    cache_row,
    cache_head,
    heads,
    kv_heads,
    eps,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one head of one token for :func:`rotate_and_write`. The heads of queries come first,
    then the heads of keys, then the heads of values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token // count
    at = tl.arange(0, WIDTH)
    there = at < HALF
    given = x + (token * (heads + 2 * kv_heads) + head) * (2 * HALF) + at
    first = tl.load(given, there, 0)
    second = tl.load(given + HALF, there, 0)
    slot = tl.load(write_indices + row) + token % count
    is_query = head < heads
    is_value = head >= heads + kv_heads
    written = row * cache_row + (head - heads) % kv_heads * cache_head + slot * (2 * HALF) + at
    if is_value:
        tl.store(values + written, first, there)
        tl.store(values + written + HALF, second, there)
    else:
        one = first.to(tl.float32)
        two = second.to(tl.float32)
        if q_norm is not None:
            scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * HALF) + eps)
            norm = q_norm if is_query else k_norm
            one = (one * scale).to(first.dtype).to(tl.float32) * tl.load(norm + at, there, 0).to(
                tl.float32
            )
            two = (two * scale).to(first.dtype).to(tl.float32) * tl.load(
                norm + HALF + at, there, 0
            ).to(tl.float32)
        angle = tl.load(position_ids + token) * HALF + at
        c = tl.load(cos + angle, there, 0).to(tl.float32)
        s = tl.load(sin + angle, there, 0).to(tl.float32)
        turned = (one * c - two * s).to(first.dtype)
        other = (two * c + one * s).to(first.dtype)
        if is_query:
            tl.store(q + (token * heads + head) * (2 * HALF) + at, turned, there)
            tl.store(q + (token * heads + head) * (2 * HALF) + HALF + at, other, there)
        else:
            tl.store(keys + written, turned, there)
            tl.store(keys + written + HALF, other, there)


def rotate_and_write(
    x: Tensor,
    rotary_tables: tuple[Tensor, Tensor],
    position_ids: Tensor,
    write_indices: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotate queries and keys, and write keys and values into their slots.

    Args:
        x: Queries, keys and values [B, n, (H + 2 KV) D] of all heads side by side. H may be 0.
        rotary_tables: cos and sin, each [S, D/2].
        position_ids: [B, n].
        write_indices: The slot [B] of each sequence's first token.
        norms: Weights [D] of the norms of queries and keys, if the model has them.
        eps: Epsilon of the norms.
        cache: Keys and values [B, KV, S, D] with equal strides. A slot's numbers are contiguous.

    Returns:
        The queries [B, n, H, D].
    """
    keys, values = cache
    batch, count = x.shape[:2]
    kv_heads, size = keys.shape[1::2]
    heads = x.shape[2] // size - 2 * kv_heads
    x = x.contiguous()
    q = x.new_empty((batch, count, heads, size))
    sizes = {"HALF": size // 2, "WIDTH": triton.next_power_of_2(size // 2), "num_warps": 1}
    given = (*rotary_tables, position_ids, write_indices, *(norms or (None, None)))
    written = (q, keys, values)
    _rotate_and_write[(batch * count, heads + 2 * kv_heads)](
        x, *given, *written, count, *keys.stride()[:2], heads, kv_heads, eps, **sizes
    )
    return q


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    write_indices,
    below,
    tree,
    sums,
    peaks,
    count,
    columns,
    cache_row,
    cache_head,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute a split of the slots, for a KV head and some of its queries: sums before division,
    their peak and their weight."""
    STEP: tl.constexpr = 64 if WIDTH <= 128 else 32
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = (head // KV_HEADS).to(tl.int64)
    kv_head = head % KV_HEADS
    begin = split * SPLIT
    first = tl.load(write_indices + row).to(tl.int32)
    end = tl.minimum(begin + SPLIT, first + count)
    if begin >= end:
        return
    query = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    wanted = query < GROUP * count
    token = row * count + query % count
    # Index of the query among all heads of all tokens.
    place = token * (KV_HEADS * GROUP) + kv_head * GROUP + query // count
    at = tl.arange(0, WIDTH)
    there = at < SIZE
    both = wanted[:, None] & there[None, :]
    asked = tl.load(q + place[:, None] * SIZE + at[None, :], both, 0)
    cache = row * cache_row + kv_head * cache_head
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, SPLIT, STEP):
        slot = begin + start + tl.arange(0, STEP)
        seen = slot < end
        known = seen[:, None] & there[None, :]
        found = tl.load(keys + cache + slot[:, None] * SIZE + at[None, :], known, 0)
        scores = tl.dot(asked, tl.trans(found)) * scale
        if tree is None:
            hidden = slot[None, :] > first + (query % count)[:, None]
        else:
            column = slot - tl.load(below + row).to(tl.int32)
            inside = seen & (column >= 0) & (column < columns)
            sees = tl.load(
                tree + token[:, None] * columns + column[None, :],
                wanted[:, None] & inside[None, :],
                0,
            )
            hidden = (column >= 0)[None, :] & (sees == 0)
        scores += tl.where(hidden, HIDDEN, 0.0)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        kept = tl.exp(peak - higher)
        weight = weight * kept + tl.sum(shares, 1)
        found = tl.load(values + cache + slot[:, None] * SIZE + at[None, :], known, 0)
        total = tl.dot(shares.to(found.dtype), found, total * kept[:, None])
        peak = higher
    part = split * tl.num_programs(1).to(tl.int64) * (GROUP * count) + place
    tl.store(sums + part[:, None] * SIZE + at[None, :], total, both)
    tl.store(peaks + 2 * part, peak, wanted)
    tl.store(peaks + 2 * part + 1, weight, wanted)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    sums,
    peaks,
    first,
    y,
    count,
    heads,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the splits of one head of one token."""
    place = tl.program_id(0).to(tl.int64)
    used = tl.load(first + place // (heads * count)).to(tl.int32) + count
    split = tl.arange(0, SPLITS)
    at = tl.arange(0, WIDTH)
    known = split * SPLIT < used
    there = at < SIZE
    part = split * tl.num_programs(0).to(tl.int64) + place
    peak = tl.load(peaks + 2 * part, known, -float("inf"))
    shares = tl.exp(peak - tl.max(peak, 0))
    weight = tl.sum(shares * tl.load(peaks + 2 * part + 1, known, 0), 0)
    found = tl.load(sums + part[:, None] * SIZE + at[None, :], known[:, None] & there[None, :], 0)
    total = tl.sum(shares[:, None] * found, 0)
    tl.store(y + place * SIZE + at, (total / weight).to(y.dtype.element_ty), there)


def attend_in_splits(q: Tensor, cache: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    """Compute grouped-query attention for calls of few tokens. The kernel never reads slots after
    the call's own slots.

    Args:
        q: Queries [B, n, H, D].
        cache: Keys and values [B, KV, S, D] with equal strides. A slot's numbers are contiguous.
        inputs: The slots of the tokens, and the slots that they see. They also give the shape [B,
            1, n, s] of a mask for the first s slots.

    Returns:
        [B, n, H D].
    """
    keys, values = cache
    batch, count, heads, size = q.shape
    kv_heads = keys.shape[1]
    slots = inputs.attn_mask.shape[3]
    below, tree = inputs.tree or (None, None)
    first = inputs.write_indices
    width = max(triton.next_power_of_2(size), 16)
    group = heads // kv_heads
    split = max(LEAST_SPLIT, triton.next_power_of_2(triton.cdiv(slots, MOST_SPLITS)))
    splits = triton.cdiv(slots, split)
    sums = torch.empty((splits, batch * count * heads, size), dtype=torch.float32, device=q.device)
    peaks = torch.empty((splits, batch * count * heads, 2), dtype=torch.float32, device=q.device)
    sizes = {"SIZE": size, "WIDTH": width, "SPLIT": split}
    into = sums, peaks, count, 0 if tree is None else tree.shape[2], *keys.stride()[:2], size**-0.5
    programs = splits, batch * kv_heads, triton.cdiv(group * count, ROWS)
    _attend[programs](
        q,
        keys,
        values,
        first,
        below,
        tree,
        *into,
        kv_heads,
        group,
        ROWS=ROWS,
        **sizes,
        num_stages=2,
    )
    y = q.new_empty((batch, count, heads * size))
    _combine[(batch * count * heads,)](
        sums, peaks, first, y, count, heads, **sizes, SPLITS=triton.next_power_of_2(splits)
    )
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_part(logits, keys, peaks, size, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute a part of a row of :func:`find_best`: the keys of its best logits, its peak, and its
    weight.

    A key is an integer of 64 bits. Its upper half is the logit's bits, changed so that they ascend
    with the logit (NaN is the highest, and zeros are equal, as in torch's argmax). Its lower half
    is a number that falls with the column. So no two keys are equal.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * WIDTH + tl.arange(0, WIDTH)
    there = column < size
    value = tl.load(logits + row * size + column, there, -float("inf")).to(tl.float32)
    found = row * tl.num_programs(1) + part
    if peaks is not None:
        peak = tl.max(value, 0)
        tl.store(peaks + 2 * found, peak)
        # All logits may be -inf.
        tl.store(peaks + 2 * found + 1, tl.sum(tl.exp(value - tl.maximum(peak, -3e38)), 0))
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(value != value, TOP, tl.where(bits < 0, bits ^ TOP, bits))
    key = tl.where(there, (order.to(tl.int64) << 32) | (TOP - column), NONE)
    for rank in tl.static_range(COUNT):
        best = tl.max(key, 0)
        tl.store(keys + found * COUNT + rank, best)
        key = tl.where(key == best, NONE, key)


@triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]
def _join_best(  # type: ignore[no-untyped-def]
    keys, peaks, tokens, best, parts, COUNT: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr
):
    """Combine the parts of a row of :func:`find_best`."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    if peaks is not None:
        part = tl.arange(0, PARTS)
        peak = tl.load(peaks + 2 * (row * parts + part), part < parts, -float("inf"))
        weight = tl.load(peaks + 2 * (row * parts + part) + 1, part < parts, 0)
        highest = tl.max(peak, 0)
        total = highest + tl.log(tl.sum(weight * tl.exp(peak - highest), 0))
    at = tl.arange(0, KEYS)
    key = tl.load(keys + row * parts * COUNT + at, at < parts * COUNT, NONE)
    for rank in tl.static_range(COUNT):
        top = tl.max(key, 0)
        key = tl.where(key == top, NONE, key)
        column = TOP - (top & TOP)
        token = column if tokens is None else tl.load(tokens + column)
        tl.store(best + row * COUNT + rank, token.to(tl.float32))
        if peaks is not None:
            order = (top >> 32).to(tl.int32)
            value = tl.where(order < 0, order ^ TOP, order).to(tl.float32, bitcast=True)
            tl.store(best + (rows + row) * COUNT + rank, value - total)


def find_best(logits: Tensor, count: int, tokens: Tensor | None = None) -> Tensor:
    """Find the most likely tokens and their log-probabilities. Among equally likely tokens, the
    first is chosen.

    Args:
        logits: [B, n, V].
        count: K, which is at most V, or 0 to find only the most likely token.
        tokens: The token of each column, [V] int64. It is None if the token of each column is the
            column's index.

    Returns:
        A float32 tensor [2 B, n, K] with the ids [B, n, K], followed by the log-probabilities [B,
        n, K]. If ``count`` is 0, the tokens [B, n, 1].
    """
    batch, nodes, size = logits.shape
    kept = max(count, 1)
    device = logits.device
    rows = batch * nodes
    parts = triton.cdiv(size, PART)
    keys = torch.empty((rows, parts, kept), dtype=torch.int64, device=device)
    peaks = torch.empty((rows, parts, 2), device=device) if count else None
    best = torch.empty((2 * batch if count else batch, nodes, kept), device=device)
    _best_of_part[(rows, parts)](logits.contiguous(), keys, peaks, size, COUNT=kept, WIDTH=PART)
    of_row = {"PARTS": triton.next_power_of_2(parts), "KEYS": triton.next_power_of_2(parts * kept)}
    _join_best[(rows,)](keys, peaks, tokens, best, parts, COUNT=kept, **of_row)
    return best


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension. The result is a view if they are adjacent in
    memory, and a copy if not."""
    first = parts[0]
    step = parts[0].stride(0)
    begin = first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.stride() != first.stride()
            or part.storage_offset() != begin
        ):
            return torch.cat([part.detach() for part in parts])
        begin += step * len(part)
    return first.detach().as_strided(
        (sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset()
    )


@dataclass
class Sum:
    """The hidden states x, and a term that the next norm adds to them.

    Attributes:
        x: Hidden states [B, n, hidden].
        added: The term to add, which is the output of attention.
        total: The sum. Set by the norm that computes it.
    """

    x: Tensor
    added: Tensor
    total: Tensor | None = None


class FusedOperations(TorchOperations):
    """The operations of Llama's blocks."""

    def norm(self, x: Tensor | Sum, norm: Norm) -> Tensor:
        weight = self.module(norm.name).weight
        if isinstance(x, Tensor):
            return normalize(x, weight, norm.eps)[1]
        x.total, y = normalize(x.x, weight, norm.eps, x.added)
        return y

    def linear(self, x: Tensor, layers: Sequence[Linear]) -> Tensor:
        """Compute one product if the layers' weights are adjacent in memory."""
        apart = [one for one in layers if not isinstance(self.module(one.name), ComputedBefore)]
        found = [self.module(layer.name) for layer in apart]
        if len(found) == 1 or not all(isinstance(one, nn.Linear) for one in found):
            return super().linear(x, apart)
        biases = [one.bias for one in found if one.bias is not None]
        return linear(x, joined([one.weight for one in found]), joined(biases) if biases else None)

    def gated(self, y: Tensor, activation: str) -> Tensor:
        return gate(y)

    def add(self, residual: Sequence[Tensor | Sum], y: Tensor, name: str) -> Any:
        known: list[Any] = [one.total if isinstance(one, Sum) else one for one in residual]
        if name.endswith(".attended") and len(known) == 1:
            return Sum(known[0], y)
        return super().add(known, y, name)

    def attention(self, qkv: Tensor, block: Block, name: str, attends: bool) -> Tensor:
        geometry = block.geometry
        inputs = self._inputs(block)
        cache = self.caches[block.cache]
        norms = None
        if geometry.qk_norm:
            names = (block.norm(f"self_attn.{part}_norm").name for part in "kq")
            of_keys, of_queries = (self.module(name).weight for name in names)
            norms = of_queries if attends else of_keys, of_keys
        places = (inputs.cos, inputs.sin), inputs.position_ids, inputs.write_indices
        q = rotate_and_write(qkv, *places, norms, geometry.rms_norm_eps, cache)
        if not attends:
            return qkv
        if q.shape[1] <= MOST_NODES:
            return attend_in_splits(q, cache, inputs)
        return attend(q.transpose(1, 2), *cache, inputs, geometry).transpose(1, 2).flatten(2)


def fuse(*modules: Draft | Verify) -> None:
    """Make graphs use this module's kernels. A draft graph and a verify graph may share modules.

    Models with parts that Llama does not have, or with an EAGLE-3 head, keep torch's operations,
    because the kernels do not support them. The kernel that finds the most likely tokens is used
    for all models.
    """
    for module in modules:
        module.best = find_best
        geometry, head = module.described
        if _has_other_parts(geometry) or head.eagle:
            continue
        module.unmasked = MOST_NODES
        module.operations = FusedOperations
        for parent in module.modules():
            for names in TOGETHER:
                found = [getattr(parent, name, None) for name in names]
                _put_together([one for one in found if isinstance(one, nn.Linear)])


def _put_together(layers: Sequence[nn.Linear]) -> None:
    """Turn the weights of linear layers into views of one tensor, and their biases into views of
    another. Layers that a graph does not use have no weights, and are left unchanged."""
    layers = [layer for layer in layers if not layer.weight.is_meta]
    for kind in ("weight", "bias"):
        parts = [getattr(layer, kind) for layer in layers if getattr(layer, kind) is not None]
        if parts:
            views = torch.split(joined(parts), [len(part) for part in parts])
            for layer, view in zip(layers, views, strict=True):
                setattr(layer, kind, nn.Parameter(view, requires_grad=False))


def computes_by_rows(verify: Verify) -> bool:
    """Return whether a row's states do not depend on a call's number of rows. With torch's products
    they do depend on it."""
    blocks = [verify.get_submodule(f"model.layers.{index}") for index in verify.layers]
    products = [isinstance(one, nn.Linear) for block in blocks for one in block.modules()]
    return verify.operations is FusedOperations and not any(products)


def _has_other_parts(geometry: Geometry) -> bool:
    """Return whether a block differs from Llama's blocks in any computation, or has heads that are
    too wide."""
    return bool(
        geometry.head_dim > WIDEST_HEAD
        or geometry.qk_norm_joint
        or geometry.qk_norm_rotated
        or geometry.norm_behind
        or geometry.centred_norms
        or geometry.parallel
        or not geometry.gated
        or geometry.wide_norms
        or geometry.activation != "silu"
        or geometry.attention_scale
        or geometry.attention_cap
        or geometry.sinks
        or geometry.qkv_limit
        or geometry.layer_kinds
        or geometry.experts
    )
