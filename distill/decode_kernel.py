"""Attention of one token a row on a GPU: a kernel in Triton that reads as much of each row's caches as its text fills.

A program goes through the slots of one row and KV head, with the queries of all heads that share them, so each key and value is
read once. torch's own kernels would repeat the caches for every head, or read all slots of all rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16
"""Tensor cores multiply 16 rows at least. So many query heads may share a KV head."""
SLOTS = 64
"""Slots that are read at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # Triton knows no other types
    queries,
    keys,
    values,
    positions,
    y,
    slots,
    scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Compute y [B, KV, GROUP, SIZE] for a row and a KV head; see :func:`decode_attention`."""
    row = tl.program_id(0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(positions + row).to(tl.int32) + 1
    element, query = tl.arange(0, SIZE), tl.arange(0, QUERIES)
    at = (place * GROUP + query[:, None]) * SIZE + element[None, :]
    there = query[:, None] < GROUP
    asked = tl.load(queries + at, mask=there, other=0.0)
    keys += place.to(tl.int64) * slots * SIZE
    values += place.to(tl.int64) * slots * SIZE
    most = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mean = tl.zeros((QUERIES, SIZE), tl.float32)
    for start in range(0, length, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot[:, None] < length
        key = tl.load(keys + slot[:, None] * SIZE + element[None, :], mask=inside, other=0.0)
        value = tl.load(values + slot[:, None] * SIZE + element[None, :], mask=inside, other=0.0)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(slot[None, :] < length, score, -1e30)
        larger = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - larger[:, None])
        kept = tl.exp(most - larger)
        total = total * kept + tl.sum(weight, 1)
        mean = mean * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = larger
    tl.store(y + at, (mean / total[:, None]).to(y.dtype.element_ty), mask=there)


def decode_attention(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention of the token at each row's position over the slots up to its own.

    Args:
        queries: [B, KV, G, D], of the G query heads of each KV head; D is a power of 2 of at least 16, G at most ``QUERIES``.
        keys: Cache [B, KV, S, D].
        values: Cache [B, KV, S, D].
        positions: Position of each row's token [B], which is its slot.

    Returns:
        [B, KV, G, D].
    """
    batch, kv_heads, group, size = queries.shape
    y = torch.empty_like(queries, memory_format=torch.contiguous_format)
    _attend[(batch, kv_heads)](
        queries.contiguous(), keys, values, positions, y, keys.shape[2], size**-0.5,
        GROUP=group, SIZE=size, QUERIES=QUERIES, SLOTS=SLOTS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
