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

from eesd.runtime.engines.torch_quantized import WORDS

ROWS = 16
"""Rows of a group."""
MOST_GROUPS = 4
"""Groups of a program. A round of 32 drafts has three."""
PROGRAMS = 512
"""Inputs are split in parts until a weight has so many programs."""
STEPS = (32, 16, 8, 4)
"""Steps of a part: the most with which a weight has enough programs."""
WIDE = 512
"""Sums that a program adds."""
WARPS = 4
STAGES = (3, 3, 3, 3)
"""Steps in a program's shared memory at a time, by the number of groups: as many as all GPUs since Ampere have room for."""


def _spread(bits: int, float16: bool) -> str:
    """PTX that makes of two words numbers of 16 bits: a level is put into the low bits of 128, for float16 of 1,024, where they
    count ones. Result k has the k-th level of both."""
    magic, mask = (0x6400 if float16 else 0x4300), (1 << bits) - 1
    lines = [".reg .b32 t, s, minus;", "mov.b32 minus, 0xbf80bf80;"]
    for number in range(32 // bits):
        byte, high = divmod(number * bits, 8)
        selector = (byte + 4) << 8 | byte
        lines.append(f"prmt.b32 t, $WORD0, $WORD1, {selector:#x};")
        if high:
            lines.append("shr.u32 t, t, 4;")
        if bits == 8 and not float16:  # too many bits: 128 and seven of them, less 128 or 256 by the eighth
            lines.append("lop3.b32 s, t, 0x00800080, 0x43804380, 0x6a;")
            lines.append("lop3.b32 t, t, 0x007f007f, 0x43004300, 0xea;")
            lines.append(f"fma.rn.bf16x2 ${number}, s, minus, t;")
        else:
            lines.append(f"lop3.b32 ${number}, t, {mask * 0x10001:#x}, {magic * 0x10001:#x}, 0xea;")
    words = 32 // bits
    body = "\n".join(lines).replace("$WORD0", f"${words}").replace("$WORD1", f"${words + 1}")
    return "{\n" + body + "\n}"


FOUR_FLOAT16 = tl.constexpr(_spread(4, True))
FOUR_BFLOAT16 = tl.constexpr(_spread(4, False))
EIGHT_FLOAT16 = tl.constexpr(_spread(8, True))
EIGHT_BFLOAT16 = tl.constexpr(_spread(8, False))


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(words, DTYPE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The levels in words: tensors of numbers that :func:`_base` is added to, the lowest bits first."""
    numbers = ()
    if ASM and BITS == 4 and DTYPE == tl.bfloat16:
        kinds: tl.constexpr = (tl.bfloat16,) * 8
        numbers = tl.inline_asm_elementwise(FOUR_BFLOAT16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], kinds, True, 2)
    elif ASM and BITS == 4:
        kinds: tl.constexpr = (tl.float16,) * 8
        numbers = tl.inline_asm_elementwise(FOUR_FLOAT16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], kinds, True, 2)
    elif ASM and DTYPE == tl.float16:
        kinds: tl.constexpr = (tl.float16,) * 4
        numbers = tl.inline_asm_elementwise(EIGHT_FLOAT16, "=r,=r,=r,=r,r,r", [words], kinds, True, 2)
    elif ASM:
        kinds: tl.constexpr = (tl.bfloat16,) * 4
        numbers = tl.inline_asm_elementwise(EIGHT_BFLOAT16, "=r,=r,=r,=r,r,r", [words], kinds, True, 2)
    else:
        for number in tl.static_range(32 // BITS):
            level = words >> (number * BITS) & ((1 << BITS) - 1)
            if DTYPE == tl.float16:
                numbers = numbers + ((level.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True),)
            elif BITS == 4:
                numbers = numbers + ((level.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True),)
            else:
                numbers = numbers + ((level | 0x4B000000).to(tl.float32, bitcast=True),)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _shared(values, begin, inputs, outputs, first, column, BLOCK: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the inputs of a block share, [in / BLOCK, out], for a panel and ``COUNT`` blocks from the input ``begin`` on."""
    found = ()
    if values is not None:
        for number in tl.static_range(COUNT):
            block = begin // BLOCK + number
            known = (first + column < outputs) & (block * BLOCK < inputs)
            found = found + (tl.load(values + block * outputs + first + column, known, 0),)  # noqa: RUF005
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
    """Compute y [rows, outputs] for a panel of outputs and some groups of rows; see :func:`multiply`."""
    panel, piece = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * (GROUPS * ROWS)
    part: tl.constexpr = STEP * BITS // 32  # inputs of a product
    SHARED: tl.constexpr = STEP // BLOCK if BLOCK < STEP else 1  # scales of an output in a step
    DTYPE: tl.constexpr = x.dtype.element_ty
    base: tl.constexpr = 1024 if DTYPE == tl.float16 else (128 if BITS == 4 else (-128 if ASM else 8388608))
    at, column = tl.arange(0, part), tl.arange(0, PANEL)
    levels += panel.to(tl.int64) * tl.cdiv(inputs, STEP) * (part * PANEL)
    first_column = panel * PANEL
    column_there = first_column + column < outputs
    sums = (tl.zeros((ROWS, PANEL), tl.float32),) * GROUPS
    begun = piece * (STEPS * STEP)
    # What inputs share is loaded a step ahead. It is too little for the copies that Triton makes in the background.
    factors_of = _shared(scales, begun, inputs, outputs, first_column, column, BLOCK, SHARED)
    zeros_of = _shared(zeros, begun, inputs, outputs, first_column, column, BLOCK, SHARED)
    minimums_of = _shared(minimums, begun, inputs, outputs, first_column, column, BLOCK, SHARED)
    for step in range(0, STEPS):
        start = piece * STEPS + step
        after = (start + 1) * STEP
        next_factors = _shared(scales, after, inputs, outputs, first_column, column, BLOCK, SHARED)
        next_zeros = _shared(zeros, after, inputs, outputs, first_column, column, BLOCK, SHARED)
        next_minimums = _shared(minimums, after, inputs, outputs, first_column, column, BLOCK, SHARED)
        place = tl.minimum(start, tl.cdiv(inputs, STEP) - 1)  # the last piece may have fewer steps, and then multiplies by zero
        words = tl.load(levels + place * (part * PANEL) + column[None, :] * part + at[:, None])
        numbers = _numbers(words, DTYPE, BITS, ASM)
        for number in tl.static_range(32 // BITS):
            begin = start * STEP + number * part
            scale = factors_of[number * SHARED * BITS // 32]
            weights = numbers[number] - (base + MIDDLE)
            if zeros is not None:
                weights -= zeros_of[number * SHARED * BITS // 32].to(weights.dtype)[None, :]
            if minimums is not None or scale.dtype != weights.dtype:
                weights = weights.to(tl.float32) * scale.to(tl.float32)[None, :]
            else:
                weights = weights * scale[None, :]
            if minimums is not None:
                weights += minimums_of[number * SHARED * BITS // 32].to(tl.float32)[None, :]
            factors = weights.to(DTYPE)
            added = ()
            for group in tl.static_range(GROUPS):
                row = tl.minimum(first + group * ROWS + tl.arange(0, ROWS), rows - 1)  # the last one again where there is none
                if WHOLE:
                    given = tl.load(x + row[:, None] * inputs + (begin + at)[None, :])
                else:
                    given = tl.load(x + row[:, None] * inputs + (begin + at)[None, :], (begin + at < inputs)[None, :], 0)
                added = added + (tl.dot(given, factors, sums[group]),)  # type: ignore[assignment]  # noqa: RUF005
            sums = added
        factors_of, zeros_of, minimums_of = next_factors, next_zeros, next_minimums
    y += piece.to(tl.int64) * rows * outputs
    for group in tl.static_range(GROUPS):
        row = first + group * ROWS + tl.arange(0, ROWS)
        result = sums[group].to(y.dtype.element_ty)
        place = y + row[:, None] * outputs + panel * PANEL + column[None, :]
        tl.store(place, result, (row[:, None] < rows) & column_there[None, :])


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
    step = WORDS * 32 // bits
    all_steps = triton.cdiv(inputs, step)
    steps = next((n for n in STEPS if len(levels) * triton.cdiv(all_steps, n) >= PROGRAMS), STEPS[-1])
    parts = triton.cdiv(all_steps, steps)
    sums = y if parts == 1 else torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    _multiply[(triton.cdiv(rows, groups * ROWS), len(levels), parts)](
        x,
        levels,
        scales,
        zeros,
        minimums,
        sums,
        rows,
        inputs,
        outputs,
        BITS=bits,
        MIDDLE=middle,
        BLOCK=inputs // blocks,
        GROUPS=groups,
        ROWS=ROWS,
        PANEL=levels.shape[2],
        STEP=step,
        STEPS=steps,
        WHOLE=inputs == parts * steps * step,
        ASM=x.is_cuda,
        num_stages=STAGES[groups - 1],
        num_warps=WARPS,
        enable_fp_fusion=False,  # the weights have the bits of the dequantized ones
    )
    if parts > 1:
        _add_parts[(triton.cdiv(rows * outputs, WIDE),)](sums, y, rows * outputs, PARTS=parts, WIDTH=WIDE)
    return y
