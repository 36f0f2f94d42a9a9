"""Products with quantized weights on a GPU: a kernel in Triton that makes the weights of a tile in registers.

A program of the kernel computes a *panel* of outputs for one or several groups of rows. It goes through the inputs in steps. In
each it reads the levels once, makes of them the weights that :func:`~eesd.model.quantize.dequantize` makes, rounded to the
type of the activations, and multiplies every group by them. Sums are float32 and rounded once, at the end.

A row's bits depend neither on the other rows nor on how many there are: every group is a product of the same shape, whose sums
run over the inputs in the same order in one program. Nothing is tuned when it runs, and no sum is split. The number of groups
only says how many rows share the levels that are read.

Why these sizes: tensor cores multiply 16 rows at least, and for one row more would be waste. With 32 outputs a program, a layer
of 4,096 outputs has 128 programs for the 132 multiprocessors of an H100. A step of 128 inputs is the largest block of a scale,
and 2 KB of 4-bit levels, which lie together in memory. Five steps on the way are 10 KB for a multiprocessor. Memory that
answers after 0.7 us at 3.35 TB/s wants 18 KB, so layers with more outputs come nearer to it. This is computed, not measured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 128
"""Inputs that are multiplied at a time: a multiple of all blocks."""
ROWS = 16
"""Rows of a group."""
MOST_GROUPS = 4
"""Groups of a program. A round of 32 drafts has three."""
STAGES = (6, 6, 6, 4)
"""Steps in a program's shared memory at a time, by the number of groups: as many as all GPUs since Ampere have room for."""


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]  # Triton knows no other types
    x,
    levels,
    scales,
    zeros,
    minimums,
    y,
    rows,
    inputs,
    outputs,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    PANEL: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute y [rows, outputs] for a panel of outputs and some groups of rows; see :func:`multiply`."""
    panel = tl.program_id(1)
    first = tl.program_id(0) * (GROUPS * ROWS)
    columns = panel * PANEL + tl.arange(0, PANEL)
    width: tl.constexpr = PANEL * BITS // 8
    blocks: tl.constexpr = STEP // BLOCK
    levels += panel.to(tl.int64) * inputs * width  # more bytes than int32 counts
    sums = (tl.zeros((ROWS, PANEL), tl.float32),) * GROUPS
    for start in range(0, inputs, STEP):
        taken = start + tl.arange(0, STEP)
        there = taken < inputs
        found = tl.load(levels + taken[:, None] * width + tl.arange(0, width)[None, :], there[:, None], 0)
        if BITS == 4:
            found = tl.interleave(found & 15, found >> 4)
        which = start // BLOCK + tl.arange(0, blocks)
        shared = which[:, None] * outputs + columns[None, :]
        known = (which[:, None] * BLOCK < inputs) & (columns[None, :] < outputs)
        weights = found.to(tl.float32).reshape(blocks, BLOCK, PANEL) - MIDDLE
        if zeros is not None:
            weights -= tl.load(zeros + shared, known, 0).to(tl.float32)[:, None, :]
        weights *= tl.load(scales + shared, known, 0).to(tl.float32)[:, None, :]
        if minimums is not None:
            weights += tl.load(minimums + shared, known, 0).to(tl.float32)[:, None, :]
        factors = weights.reshape(STEP, PANEL).to(x.dtype.element_ty)
        added = ()
        for group in tl.static_range(GROUPS):
            row = first + group * ROWS + tl.arange(0, ROWS)
            part = tl.load(x + row[:, None] * inputs + taken[None, :], (row[:, None] < rows) & there[None, :], 0)
            added = added + (tl.dot(part, factors, sums[group]),)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
    for group in tl.static_range(GROUPS):
        row = first + group * ROWS + tl.arange(0, ROWS)
        result = sums[group].to(y.dtype.element_ty)
        tl.store(y + row[:, None] * outputs + columns[None, :], result, (row[:, None] < rows) & (columns[None, :] < outputs))


def multiply(
    x: Tensor, levels: Tensor, scales: Tensor, zeros: Tensor | None, minimums: Tensor | None, bits: int, middle: int
) -> Tensor:
    """Multiply rows by a quantized weight. Neither waits for the GPU nor allocates anything but the result.

    The first call with another type, block or number of groups compiles for about a second. Triton keeps what it compiled.

    Args:
        x: Rows [n, in], contiguous, of float16 or bfloat16.
        levels: Levels without a sign by panels of P outputs: [panels, in, P] bytes, of 4 bits [panels, in, P / 2], the first
            level of a byte in its low half. P is a power of two.
        scales: Scales [in / block, out].
        zeros: Zero points [in / block, out], a byte each. None: all are zero.
        minimums: Minimums [in / block, out]. None: all are zero.
        bits: Of a level: 8 or 4.
        middle: What is taken from every level: it stands for zero where levels had a sign.

    Returns:
        The products [n, out] in the type of x.
    """
    (rows, inputs), (blocks, outputs) = x.shape, scales.shape
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    groups = min(max(triton.cdiv(rows, ROWS), 1), MOST_GROUPS)
    _multiply[(triton.cdiv(rows, groups * ROWS), len(levels))](
        x,
        levels,
        scales,
        zeros,
        minimums,
        y,
        rows,
        inputs,
        outputs,
        BITS=bits,
        MIDDLE=middle,
        BLOCK=inputs // blocks,
        GROUPS=groups,
        ROWS=ROWS,
        PANEL=8 * levels.shape[2] // bits,
        STEP=STEP,
        num_stages=STAGES[groups - 1],
        enable_fp_fusion=False,  # the weights have the bits of the dequantized ones
    )
    return y
