# ruff: noqa: RUF005, SIM300 -- Triton has no unpacking, and no constant before a name
"""Multiply by quantized weights on a GPU. A Triton kernel dequantizes the weights of a tile in
registers.

A program of the kernel computes a *panel* of outputs for one or several groups of rows, over a part
of the inputs. It processes the inputs in steps. Each step reads its levels once, turns them into
the same weights as :func:`~eesd.model.quantized.dequantize`, rounded to the activations' type, and
multiplies every group by these weights. Sums are float32. Another kernel adds the sums of the
parts, always in the same order, and rounds once.

A row's bits depend neither on the other rows nor on their number, because every group is a product
of the same shape and sums over the inputs in the same order. The parts depend only on the weight.
Nothing is tuned at run time. The number of groups only determines how many rows share each read of
the levels.

Levels are stored in the order in which tensor cores read them. A 32-bit word has eight 4-bit
levels, or four 8-bit levels, of one output. The inputs of these levels are a fixed distance apart,
so a step consists of eight or four products, and neither a level nor a weight ever moves between
threads. Two instructions put two 4-bit levels into the low bits of two 16-bit numbers, whose lowest
bit is worth 1.

The sizes are the best of 24 that were timed on an H200. With them, the products of a block of Llama
3 8B take 82 us for 1 row and 136 us for 33 rows with 4-bit weights, 106 and 154 us with 8-bit
weights, and 129 and 134 us with bfloat16. Reading memory alone would take 31, 59 and 105 us.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Number of rows of a group. It is the minimum for tensor cores."""
MOST_GROUPS = 4
"""Maximum number of groups of a program. A round of 32 drafted tokens has three groups."""
PROGRAMS = 512
"""Number of programs that a weight should have. Inputs are split into parts to reach this
number."""
STEPS = (32, 16, 8, 4)
"""Numbers of steps that a part may have. The largest number that gives a weight enough programs is
used."""
STAGES = 3
"""Number of steps that are in a program's shared memory at the same time."""
WIDE = 512
"""A program adds the parts of this number of sums."""


def _spread(magic: int) -> str:
    """Return PTX that puts the 4-bit levels of two words into the low bits of ``magic``. The result
    is eight pairs of 16-bit numbers."""
    lines = [".reg .b32 t;"]
    for number in range(8):
        byte, high = divmod(number, 2)
        lines.append(f"prmt.b32 t, $8, $9, {(byte + 4) << 8 | byte:#x};")
        if high:
            lines.append("shr.u32 t, t, 4;")
        # Compute t & ... | ... in one instruction.
        lines.append(f"lop3.b32 ${number}, t, 0x000f000f, {magic * 0x10001:#x}, 0xea;")
    return "\n".join(("{", *lines, "}"))


SPREAD_FLOAT16 = tl.constexpr(_spread(0x6400))
"""Puts levels into the low bits of the float16 number 1,024, whose lowest bit is worth 1."""
SPREAD_BFLOAT16 = tl.constexpr(_spread(0x4300))
"""Puts levels into the low bits of the bfloat16 number 128, whose lowest bit is worth 1."""
FLOAT16 = tl.constexpr((tl.float16,) * 8)
BFLOAT16 = tl.constexpr((tl.bfloat16,) * 8)
REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words, DTYPE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The levels in words as numbers, from the lowest bits on. Each number includes a base, which
    :func:`_multiply` subtracts."""
    numbers = ()
    if ASM and BITS == 4 and DTYPE == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(SPREAD_BFLOAT16, REGISTERS, [words], BFLOAT16, True, 2)
    elif ASM and BITS == 4:
        numbers = tl.inline_asm_elementwise(SPREAD_FLOAT16, REGISTERS, [words], FLOAT16, True, 2)
    else:
        for number in tl.static_range(32 // BITS):
            level = words >> (number * BITS) & ((1 << BITS) - 1)
            if DTYPE == tl.float16:
                numbers = numbers + ((level.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True),)  # type: ignore[assignment]
            elif BITS == 4:
                numbers = numbers + ((level.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True),)  # type: ignore[assignment]
            else:  # bfloat16 has too few bits for 8-bit levels
                numbers = numbers + ((level | 0x4B000000).to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _shared(values, begin, inputs, outputs, column, BLOCK: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values [in / BLOCK, out] that the inputs of a block share, for columns and ``COUNT`` blocks
    from the input ``begin`` on."""
    found = ()
    if values is not None:
        for number in tl.static_range(COUNT):
            block = begin // BLOCK + number
            known = (column < outputs) & (block * BLOCK < inputs)
            found = found + (tl.load(values + block * outputs + column, known, 0),)  # type: ignore[assignment]
    return found


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
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute y [rows, outputs] for a panel of outputs and some groups of rows; see
    :func:`multiply`."""
    panel = tl.program_id(1)
    part = tl.program_id(2)
    WORDS: tl.constexpr = STEP * BITS // 32
    SHARED: tl.constexpr = STEP // BLOCK if BLOCK < STEP else 1  # scales of an output in a step
    DTYPE: tl.constexpr = x.dtype.element_ty
    base: tl.constexpr = 1024 if DTYPE == tl.float16 else (128 if BITS == 4 else 1 << 23)
    at = tl.arange(0, WORDS)
    column = panel * PANEL + tl.arange(0, PANEL)
    place = tl.arange(0, PANEL)[None, :] * WORDS + at[:, None]
    levels += panel.to(tl.int64) * tl.cdiv(inputs, STEP) * (WORDS * PANEL)
    sums = (tl.zeros((ROWS, PANEL), tl.float32),) * GROUPS
    # Shared values are loaded a step ahead here, because they are too few for the copies that
    # Triton makes in the background.
    begin = part * (STEPS * STEP)
    scale = _shared(scales, begin, inputs, outputs, column, BLOCK, SHARED)
    zero = _shared(zeros, begin, inputs, outputs, column, BLOCK, SHARED)
    minimum = _shared(minimums, begin, inputs, outputs, column, BLOCK, SHARED)
    for step in range(0, STEPS):
        begin = (part * STEPS + step) * STEP
        next_scale = _shared(scales, begin + STEP, inputs, outputs, column, BLOCK, SHARED)
        next_zero = _shared(zeros, begin + STEP, inputs, outputs, column, BLOCK, SHARED)
        next_minimum = _shared(minimums, begin + STEP, inputs, outputs, column, BLOCK, SHARED)
        # The last part may have fewer steps; in the remaining steps, zeros are multiplied by
        # arbitrary levels.
        words = tl.load(
            levels
            + tl.minimum(begin, (inputs - 1) // STEP * STEP) // STEP * (WORDS * PANEL)
            + place
        )
        numbers = _numbers(words, DTYPE, BITS, ASM)
        for number in tl.static_range(32 // BITS):
            weights = numbers[number] - (base + MIDDLE)
            if zeros is not None:
                weights -= zero[number * SHARED * BITS // 32].to(weights.dtype)[None, :]
            factor = scale[number * SHARED * BITS // 32]
            if minimums is not None or factor.dtype != weights.dtype:
                weights = weights.to(tl.float32) * factor.to(tl.float32)[None, :]
            else:
                weights = weights * factor[None, :]
            if minimums is not None:
                weights += minimum[number * SHARED * BITS // 32].to(tl.float32)[None, :]
            added = ()
            for group in tl.static_range(GROUPS):
                row = tl.program_id(0) * (GROUPS * ROWS) + group * ROWS + tl.arange(0, ROWS)
                taken = begin + number * WORDS + at
                row = tl.minimum(row, rows - 1)  # beyond the last row, use the last row
                source = x + row[:, None] * inputs + taken[None, :]
                given = tl.load(source) if WHOLE else tl.load(source, (taken < inputs)[None, :], 0)
                added = added + (tl.dot(given, weights.to(DTYPE), sums[group]),)  # type: ignore[assignment]
            sums = added
        scale = next_scale
        zero = next_zero
        minimum = next_minimum
    y += part.to(tl.int64) * rows * outputs
    for group in tl.static_range(GROUPS):
        row = tl.program_id(0) * (GROUPS * ROWS) + group * ROWS + tl.arange(0, ROWS)
        result = sums[group].to(y.dtype.element_ty)
        tl.store(
            y + row[:, None] * outputs + column[None, :],
            result,
            (row[:, None] < rows) & (column[None, :] < outputs),
        )


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _add_parts(parts, y, size, PARTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the parts of sums [PARTS, size], always in the same order."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = at < size
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + at, there, 0)
    tl.store(y + at, total.to(y.dtype.element_ty), there)


def multiply(
    x: Tensor,
    levels: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minimums: Tensor | None,
    bits: int,
    middle: int,
) -> Tensor:
    """Multiply rows by a quantized weight. This does not wait for the GPU, and allocates only the
    result.

    The first call with a new type, block size or number of groups compiles a kernel, which takes
    about a second. Triton keeps compiled kernels.

    Args:
        x: Contiguous rows [n, in] of float16 or bfloat16.
        levels: Unsigned levels in 32-bit words [panels, steps, P, W]. From its low bits on, word j
            of panel p, step s and output c has the levels of output p P + c and the inputs s K + j,
            s K + j + W and so on. K is the number of inputs in a step, which is 8 W with 4 bits and
            4 W with 8 bits. P and W are powers of two, and no block is smaller than W.
        scales: Scales [in / block, out].
        zeros: Zero points [in / block, out] of one byte each, or None if all are 0.
        minimums: Minimums [in / block, out], or None if all are 0.
        bits: Number of bits of a level, which is 8 or 4.
        middle: Number that is subtracted from every level. If the original levels were signed, it
            is the level that stands for 0.

    Returns:
        The products [n, out] in the type of x.
    """
    rows, inputs = x.shape
    blocks, outputs = scales.shape
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    groups = min(max(triton.cdiv(rows, ROWS), 1), MOST_GROUPS)
    step = levels.shape[3] * 32 // bits
    all_steps = triton.cdiv(inputs, step)
    steps = next(
        (n for n in STEPS if len(levels) * triton.cdiv(all_steps, n) >= PROGRAMS), STEPS[-1]
    )
    parts = triton.cdiv(all_steps, steps)
    sums = (
        y
        if parts == 1
        else torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    )
    sizes = {
        "BITS": bits,
        "MIDDLE": middle,
        "BLOCK": inputs // blocks,
        "GROUPS": groups,
        "ROWS": ROWS,
    }
    sizes |= {
        "PANEL": levels.shape[2],
        "STEP": step,
        "STEPS": steps,
        "WHOLE": inputs == parts * steps * step,
    }
    # Without fused multiply-add, the weights have the same bits as dequantized weights.
    options = {"ASM": x.is_cuda, "num_stages": STAGES, "enable_fp_fusion": False}
    programs = (triton.cdiv(rows, groups * ROWS), len(levels), parts)
    weight = (levels, scales, zeros, minimums)
    _multiply[programs](x, *weight, sums, rows, inputs, outputs, **sizes, **options)
    if parts > 1:
        _add_parts[(triton.cdiv(rows * outputs, WIDE),)](
            sums, y, rows * outputs, PARTS=parts, WIDTH=WIDE
        )
    return y
