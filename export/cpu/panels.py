"""Weights as the operators of this project read them: panels of 16 columns, see
``runtime/operators/SPECIFICATION.md``.

Nothing is rounded: levels, scales and minimums are those of the engine directory, in the fewest
bits that hold them exactly.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL, BLOCK, SUPER = 16, 32, 256
FLOAT32, FLOAT16, BFLOAT16, BITS4, BITS5, BITS6, BITS8, PLANES, UPPER = range(9)
"""Formats, as the operators number them. The last two have the same bytes, levels of 8 bits in two
planes of 4: ``UPPER`` reads only the first plane."""
NARROW, WIDE, SPLIT = range(3)
"""What scales and minimums are: float16, float32, or int8 times a float16 for 256 inputs, as
K-quants have them."""


@dataclass(frozen=True)
class Levels:
    """A quantized weight: column j of input i is ``scale * (level - zero_point) + minimum``.

    Attributes:
        levels: Integers [inputs, outputs] from -128 to 255.
        scales: [inputs / block, outputs] float32.
        zeros: Zero points [inputs / block, outputs]; None: 0.
        minimums: [inputs / block, outputs] float32; None: 0.
    """

    levels: NDArray[np.int16]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int16] | None = None
    minimums: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Packed:
    """A weight in panels.

    Attributes:
        data: Its bytes.
        numbers: What the operators must know: format, inputs, outputs, level of zero, whether a
            scale is for 16 inputs, what scales and minimums are, whether there are minimums.
    """

    data: NDArray[np.uint8]
    numbers: tuple[int, ...]


def pack_floats(weight: NDArray[np.generic], form: int) -> Packed:
    """Pack a weight [inputs, outputs] of float32, or of 16 bits given as uint16, in one of the
    first three formats."""
    return Packed(_pack_rows(weight, 1).reshape(-1), (form, *weight.shape, 0, 0, 0, 0))


def pack_levels(weight: Levels, planes: bool = False) -> Packed:
    """Pack levels in the narrowest format that holds them; with ``planes`` 8 bits in two planes,
    where that is possible."""
    inputs, outputs = weight.levels.shape
    scales, minimums = weight.scales, weight.minimums
    if weight.zeros is not None:
        assert minimums is None
        minimums = -(weight.zeros.astype(np.float32) * scales)
    block = inputs // len(scales)
    if block > BLOCK:  # a scale for more inputs is repeated
        scales = np.repeat(scales, block // BLOCK, 0)
        minimums = None if minimums is None else np.repeat(minimums, block // BLOCK, 0)
    fine = block < BLOCK
    form, zero = _format(int(weight.levels.min()), int(weight.levels.max()))
    blocks = _blocks((weight.levels + zero).astype(np.uint8))
    if planes and form == BITS8 and not fine and minimums is None:
        form = PLANES
    halves = 2 if fine else 1
    shared: list[NDArray[Any]] = [part for part in (scales, minimums) if part is not None]
    split = None
    if all(map(_fits_float16, shared)):
        kind, shared = NARROW, [part.astype(np.float16) for part in shared]
    elif inputs % SUPER == 0 and (split := _split_all(shared, SUPER // BLOCK * halves)):
        kind, shared = SPLIT, [part for part, _ in split]
    else:
        kind = WIDE
    data = np.concatenate(
        [_pack_bits(blocks, form), *(_pack_rows(part, halves) for part in shared)], -1
    )
    if split:
        supers = data.reshape(len(data), inputs // SUPER, -1)
        data = np.concatenate([*(_pack_rows(factors, 1) for _, factors in split), supers], -1)
    data = data.reshape(-1)
    if form == PLANES:
        data = np.concatenate([data, _pack_bits(blocks, BITS4).reshape(-1)])
    return Packed(data, (form, inputs, outputs, zero, int(fine), kind, int(minimums is not None)))


def _format(least: int, most: int) -> tuple[int, int]:
    """The narrowest format that holds these levels, and what must be added to them."""
    for form, size in ((BITS4, 16), (BITS5, 32), (BITS6, 64), (BITS8, 256)):
        zero = 0 if least >= 0 else size // 2
        if least + zero >= 0 and most + zero < size:
            return form, zero
    raise AssertionError(f"levels from {least} to {most}")


def _fits_float16(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def _split_all(
    parts: list[NDArray[Any]], rows: int
) -> list[tuple[NDArray[np.int8], NDArray[np.float16]]] | None:
    """Scales and minimums, each as integers and a factor for so many rows of them; None if one of
    them is no such product."""
    found = []
    for part in parts:
        split = _split(part, rows)
        if split is None:
            return None
        found.append(split)
    return found


def _split(
    values: NDArray[np.float32], rows: int
) -> tuple[NDArray[np.int8], NDArray[np.float16]] | None:
    """Find integers [count, outputs] and factors [count / rows, outputs] whose products are these
    values.

    The largest value of a group is some integer times the factor. The integers that files have
    there are tried first.
    """
    count, outputs = values.shape
    groups = values.reshape(-1, rows, outputs).transpose(0, 2, 1).reshape(-1, rows)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)[:, 0]
    integers, factors = np.zeros(groups.shape, np.int8), np.zeros(len(groups), np.float16)
    pending = np.flatnonzero(largest)
    first = (63, -128, 127, 15)
    for most in (*first, *(most for most in range(126, 0, -1) if most not in first)):
        if not len(pending):
            break
        with np.errstate(all="ignore"):
            factor = (largest[pending] / np.float32(most)).astype(np.float16)
            wanted = groups[pending]
            quotients = np.rint(wanted / factor.astype(np.float32)[:, None])
            fits = (
                (quotients * factor.astype(np.float32)[:, None] == wanted)
                & (np.abs(quotients + 0.5) < 128)
            ).all(1)
        integers[pending[fits]], factors[pending[fits]] = (
            quotients[fits].astype(np.int8),
            factor[fits],
        )
        pending = pending[~fits]
    if len(pending):
        return None
    whole = integers.reshape(-1, outputs, rows).transpose(0, 2, 1).reshape(count, outputs)
    return whole, factors.reshape(-1, outputs)


def _blocks(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Levels [inputs, outputs] as [panels, blocks, 8, 64]: of 4 inputs in turn, the levels of 16
    columns."""
    split = _padded(levels).reshape(len(levels) // BLOCK, 8, 4, -1, PANEL).transpose(3, 0, 1, 4, 2)
    return np.ascontiguousarray(split).reshape(*split.shape[:3], 64)


def _pack_bits(blocks: NDArray[np.uint8], form: int) -> NDArray[np.uint8]:
    """Levels [panels, blocks, 8, 64] as the bytes of a block [panels, blocks, bytes], or of a block
    in the upper plane."""
    shape = blocks.shape[:2]
    if form == BITS8:
        return blocks.reshape(*shape, 512)
    low = blocks >> 4 if form == PLANES else blocks & 15
    parts: list[Any] = [(low[:, :, :4] | low[:, :, 4:] << 4).reshape(*shape, 256)]
    if form == BITS5:
        parts.append(np.packbits(blocks >> 4, -1, bitorder="little").reshape(*shape, 64))
    if form == BITS6:
        high = (blocks >> 4).reshape(*shape, 2, 4, 64)
        joined = (
            high[:, :, :, 0] | high[:, :, :, 1] << 2 | high[:, :, :, 2] << 4 | high[:, :, :, 3] << 6
        )
        parts.append(joined.reshape(*shape, 128))
    return np.concatenate(parts, -1)


def _pack_rows(values: NDArray[Any], halves: int) -> NDArray[np.uint8]:
    """Values [rows, outputs], ``halves`` rows of 16 columns one after another, as bytes [panels,
    rows / halves, bytes]."""
    split = _padded(values).reshape(len(values) // halves, halves, -1, PANEL).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(split).reshape(*split.shape[:2], -1).view(np.uint8)


def _padded(values: NDArray[Any]) -> NDArray[Any]:
    """Zeros behind the last column up to a whole panel."""
    return np.pad(values, ((0, 0), (0, -values.shape[1] % PANEL)))
