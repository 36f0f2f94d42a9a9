"""The stored form of quantized weights, which consists of levels, scales, zero points and minimums.

A block is 32 consecutive inputs of one output. Weights are stored as [in, out], the layout of
ONNX's blockwise ``DequantizeLinear`` with axis 0. A stored level ``q`` stands for the weight
``scale * (q - zero_point) + minimum``. Zero points occur only in checkpoints that were already
quantized.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.common.quantization import BITS, FP4, FP8
from eesd.model.arrays import FLOAT8, Array, to_float32

Bytes = NDArray[np.uint8]

FP4_LEVELS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = {
    FP4: np.concatenate((FP4_LEVELS, -FP4_LEVELS)),
    FP8: np.arange(256).astype(np.uint8).view(FLOAT8).astype(np.float32),
}
"""The values of levels. The code of a level is its index."""


class Quantized(NamedTuple):
    """A quantized weight.

    Attributes:
        levels: The bytes of a tensor [in, out]. Two 4-bit levels share a byte. The first level is
            in the low half.
        scales: Scales [in / block, out].
        zeros: The bytes of the zero points [in / block, out], packed like the levels. None means
            that all zero points are 0.
        minimums: Minimums [in / block, out] in the type of the scales. None means that all minimums
            are 0.
        factor: Factor of all scales (a scalar array), or None for 1. It is a power of two, so that
            nothing is rounded.

    All arrays of an embedding table are transposed. The levels are [out, in], and the scales and
    minimums are [out, in / block].
    """

    levels: Bytes
    scales: Array
    zeros: Bytes | None = None
    minimums: Array | None = None
    factor: Array | None = None

    @property
    def whole_scales(self) -> NDArray[np.float32]:
        """The scales multiplied by the factor, in float32."""
        scales = to_float32(self.scales)
        return scales if self.factor is None else scales * to_float32(self.factor)


def join_quantized(parts: Sequence[Quantized], inputs: int) -> Quantized:
    """Join weights with the same number of ``inputs`` along the outputs."""
    if len(parts) == 1:
        return parts[0]
    widths = [part.scales.shape[1] for part in parts]
    bits = 8 if len(parts[0].levels) == inputs * widths[0] else 4
    zeros = [part.zeros for part in parts if part.zeros is not None]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    joined = Quantized(
        _side_by_side([part.levels for part in parts], inputs, widths, bits),
        np.concatenate([part.scales for part in parts], 1),
    )
    if zeros:
        packed = _side_by_side(zeros, parts[0].scales.shape[0], widths, bits)
        joined = joined._replace(zeros=packed)
    if minimums:
        joined = joined._replace(minimums=np.concatenate(minimums, 1))
    return joined


def _side_by_side(parts: Sequence[Bytes], rows: int, widths: Sequence[int], bits: int) -> Bytes:
    """Join packed tensors [rows, width]. If a width is odd, rows begin within a byte, so they are
    repacked."""
    if bits == 8 or all(width % 2 == 0 for width in widths):
        return np.concatenate([part.reshape(rows, -1) for part in parts], 1).reshape(-1)
    levels = [
        fields(part)[: rows * width].reshape(rows, width)
        for part, width in zip(parts, widths, strict=True)
    ]
    return pack(np.concatenate(levels, 1), bits)


def part_of(weight: Quantized, kind: str, blocks: slice, outputs: Sequence[slice]) -> Quantized:
    """Return a copy of some blocks of some outputs of a linear weight."""
    count, width = weight.scales.shape
    bits = BITS[kind]
    block = len(weight.levels) * 8 // (bits * count * width)
    rows = slice(blocks.start * block, blocks.stop * block)

    def taken(values: Array) -> Array:
        return np.concatenate([values[blocks, some] for some in outputs], 1)

    levels = _packed_part(weight.levels, (count * block, width), bits, rows, outputs)
    part = weight._replace(levels=levels, scales=taken(weight.scales))
    if weight.zeros is not None:
        zeros = _packed_part(weight.zeros, (count, width), bits, blocks, outputs)
        part = part._replace(zeros=zeros)
    if weight.minimums is not None:
        part = part._replace(minimums=taken(weight.minimums))
    return part


def _packed_part(
    stored: Bytes, shape: tuple[int, int], bits: int, rows: slice, columns: Sequence[slice]
) -> Bytes:
    """Return some rows and columns of a packed tensor. The result is packed, too. If a column
    begins within a byte, the tensor is unpacked first."""
    step = 8 // bits
    if shape[1] % step or any(some.start % step or some.stop % step for some in columns):
        values = fields(stored)[: shape[0] * shape[1]].reshape(shape)
        return pack(np.concatenate([values[rows, some] for some in columns], 1), bits)
    values = stored.reshape(shape[0], -1)[rows]
    return np.concatenate(
        [values[:, some.start // step : some.stop // step] for some in columns], 1
    ).reshape(-1)


def pack(values: Bytes, bits: int) -> Bytes:
    """Pack values of 4 or 8 bits into bytes. The values are unsigned, or signed in two's
    complement.

    Args:
        values: The values as bytes, in the order of the stored tensor. They can have any shape.
        bits: 4 or 8.
    """
    flat = values.reshape(-1)
    if bits == 8:
        return flat
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    pairs = np.ascontiguousarray(flat).view("<u2")  # packs both bytes of a pair at once
    return ((pairs & 15) | ((pairs >> 4) & 240)).astype(np.uint8)


def fields(packed: Bytes) -> Bytes:
    """Return the 4-bit numbers in bytes. The low half of each byte comes first."""
    found = np.empty((len(packed), 2), np.uint8)
    np.bitwise_and(packed, 15, out=found[:, 0])
    np.right_shift(packed, 4, out=found[:, 1])
    return found.reshape(-1)


def unpack(stored: Bytes, kind: str, count: int) -> Array:
    """Undo :func:`pack` for ``count`` values of a type such as ``int4`` or ``uint8``. Returns int8,
    uint8, or float32."""
    codes = fields(stored)[:count] if BITS[kind] == 4 else stored[:count]
    if kind in _VALUES:
        values: NDArray[np.float32] = _VALUES[kind].take(codes)
        return values
    if kind == "int4":
        return (codes ^ 8).view(np.int8) - np.int8(8)
    return codes.view(kind if BITS[kind] == 8 else np.uint8)


def dequantize(quantized: Quantized, kind: str, axis: int = 0) -> NDArray[np.float32]:
    """Undo :func:`quantize`. Blocks can have any size.

    Args:
        quantized: The stored tensors.
        kind: Type of the levels and zero points.
        axis: The axis of the inputs: 0 for a linear weight, 1 for an embedding table.

    Returns:
        The weight [in, out], or the table [out, in], in float32.
    """
    scales = quantized.whole_scales
    rows, columns = scales.shape

    def shared(values: Array) -> Array:
        return np.expand_dims(values.reshape(scales.shape), axis + 1)

    count = len(quantized.levels) * 8 // BITS[kind]
    levels = unpack(quantized.levels, kind, count).reshape(
        (rows, -1, columns) if axis == 0 else (rows, columns, -1)
    )
    if quantized.zeros is not None:
        levels = levels.astype(np.int16) - shared(unpack(quantized.zeros, kind, scales.size))
    values = to_float32(levels)
    values *= shared(scales)
    if quantized.minimums is not None:
        values += shared(to_float32(quantized.minimums))
    return values.reshape(-1, columns) if axis == 0 else values.reshape(rows, -1)
