"""Find the best scores of each row after Gumbel noise on a GPU. This is one kernel in Triton.

The noise is the same as that of :class:`~eesd.runtime.decoding.sampling.GumbelNoise`. The counter
of Philox4x64-10 consists of the position and the token's group of four. The noise exists in
registers only. Each program finds the best scores of a part of a row. Torch merges the results of
all parts.

The module needs Triton, so it is imported only where Triton works.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 2048
"""Number of scores per program."""


@triton.jit(do_not_specialize=["seed", "size"])  # type: ignore[untyped-decorator]
def _noisy_best(  # type: ignore[no-untyped-def]  # Triton knows no other types
    scores, positions, tokens, values, columns, seed, size, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute :func:`noisy_best` for a part of a row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    place = tl.arange(0, WIDTH)
    column = part * WIDTH + place
    there = column < size
    token = (column if tokens is None else tl.load(tokens + column, there, 0)).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    zero = token * 0
    one, two, three, four = tl.philox_impl(
        token // 4 + 1, zero, zero + position, zero, zero + seed.to(tl.uint64), zero, 10
    )
    number = token % 4
    bits = (
        tl.where(number < 2, tl.where(number == 0, one, two), tl.where(number == 2, three, four))
        >> 12
    )
    uniform = (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    noisy = tl.load(scores + row.to(tl.int64) * size + column, there, -float("inf")) - tl.log(
        -tl.log(uniform)
    )
    found = (row.to(tl.int64) * tl.num_programs(1) + part) * COUNT
    for rank in tl.static_range(COUNT):
        value, best = tl.max(noisy, 0, return_indices=True)
        tl.store(values + found + rank, value)
        # If scores are NaN, ``best`` may be beyond the row.
        tl.store(columns + found + rank, tl.minimum(part * WIDTH + best, size - 1))
        noisy = tl.where(place == best, -float("inf"), noisy)


def noisy_best(
    scores: Tensor, seed: int, positions: Tensor, tokens: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return the best scores after noise is added.

    Args:
        scores: [n, V] float64.
        seed: Seed of the request.
        positions: Positions in the text of the rows' tokens, [n] int64.
        tokens: The token of each column, [V] int64. It is None if the token of each column is the
            column's index.
        count: Number of scores to find, at most V.

    Returns:
        The noisy scores [n, count], best first, and their columns.
    """
    rows, size = scores.shape
    shape = rows, triton.cdiv(size, WIDE), count
    values = torch.empty(shape, dtype=torch.float64, device=scores.device)
    columns = torch.empty(shape, dtype=torch.int64, device=scores.device)
    _noisy_best[shape[:2]](
        scores.contiguous(), positions, tokens, values, columns, seed, size, COUNT=count, WIDTH=WIDE
    )
    best, places = values.flatten(1).topk(count)
    return best, columns.flatten(1).gather(1, places)
