"""Quantized weights as they are stored: levels, scales, zero points and minimums.

A block is 32 consecutive inputs of one output. Weights are stored as [in, out], so this is the
layout of ONNX's blockwise ``DequantizeLinear`` with axis 0. A stored level ``q`` stands for the
weight ``scale * (q - zero_point) + minimum``. Zero points occur only in checkpoints that were
quantized before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eesd.common.quantization import BITS, FP4, FP8

FP4_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Quantized(NamedTuple):
    """A quantized weight.

    Attributes:
        levels: The bytes of a tensor [in, out]. Two levels of 4 bits share a byte, the first in the
            low half.
        scales: Scales [in / block, out].
        zeros: The bytes of the zero points [in / block, out], packed like the levels; None where
            all are zero.
        minimums: Minimums [in / block, out] in the type of the scales; None where all are zero.
        factor: What all scales are multiplied by, []: a power of two, so that nothing is
            rounded. None: 1.

    An embedding table is the transpose of all this: levels [out, in], scales and minimums
    [out, in / block].
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    factor: Tensor | None = None

    @property
    def whole_scales(self) -> Tensor:
        """Scales times factor in float32."""
        return (
            self.scales.float()
            if self.factor is None
            else self.scales.float() * self.factor.float()
        )


def join_quantized(parts: Sequence[Quantized], inputs: int) -> Quantized:
    """Weights with the same number of ``inputs``, side by side along the outputs."""
    if len(parts) == 1:
        return parts[0]
    widths = [part.scales.shape[1] for part in parts]
    bits = 8 if len(parts[0].levels) == inputs * widths[0] else 4
    zeros = [part.zeros for part in parts if part.zeros is not None]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return Quantized(
        _side_by_side([part.levels for part in parts], inputs, widths, bits),
        torch.cat([part.scales for part in parts], 1),
        _side_by_side(zeros, parts[0].scales.shape[0], widths, bits) if zeros else None,
        torch.cat(minimums, 1) if minimums else None,
    )


def _side_by_side(parts: Sequence[Tensor], rows: int, widths: Sequence[int], bits: int) -> Tensor:
    """Packed tensors [rows, width] as one. Where a width is odd, rows begin within a byte, so they
    are packed anew."""
    if bits == 8 or all(width % 2 == 0 for width in widths):
        return torch.cat([part.view(rows, -1) for part in parts], 1).view(-1)
    levels = [
        unpack(part, "uint4", rows * width) for part, width in zip(parts, widths, strict=True)
    ]
    tensors = [
        part.to(torch.uint8).view(rows, width) for part, width in zip(levels, widths, strict=True)
    ]
    return pack(torch.cat(tensors, 1), bits)


def part_of(weight: Quantized, kind: str, blocks: slice, outputs: Sequence[slice]) -> Quantized:
    """Some blocks of some outputs of a linear weight, as a copy."""
    (count, width), bits = weight.scales.shape, BITS[kind]
    block = len(weight.levels) * 8 // (bits * count * width)
    rows = slice(blocks.start * block, blocks.stop * block)

    def taken(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.cat([values[blocks, some] for some in outputs], 1)

    scales = taken(weight.scales)
    assert scales is not None
    zeros = (
        None
        if weight.zeros is None
        else _packed_part(weight.zeros, (count, width), bits, blocks, outputs)
    )
    levels = _packed_part(weight.levels, (count * block, width), bits, rows, outputs)
    return Quantized(levels, scales, zeros, taken(weight.minimums), weight.factor)


def _packed_part(
    stored: Tensor, shape: tuple[int, int], bits: int, rows: slice, columns: Sequence[slice]
) -> Tensor:
    """Some rows and columns of a packed tensor, packed. Where a column begins within a byte, all
    are unpacked meanwhile."""
    step = 8 // bits
    if shape[1] % step or any(some.start % step or some.stop % step for some in columns):
        values = unpack(stored, "uint4", shape[0] * shape[1]).to(torch.uint8).view(shape)
        return pack(torch.cat([values[rows, some] for some in columns], 1), bits)
    values = stored.view(shape[0], -1)[rows]
    return torch.cat(
        [values[:, some.start // step : some.stop // step] for some in columns], 1
    ).view(-1)


def pack(values: Tensor, bits: int) -> Tensor:
    """The bytes of unsigned values, or of the two's complement of signed ones, of 4 or 8 bits.

    Args:
        values: Bytes of any shape, in the order of the stored tensor.
        bits: 4 or 8.
    """
    flat = values.reshape(-1)
    if bits == 8:
        return flat
    if len(flat) % 2:
        flat = torch.cat((flat, flat.new_zeros(1)))
    return (flat[1::2] << 4) | (flat[::2] & 15)


def unpack(stored: Tensor, kind: str, count: int) -> Tensor:
    """Undo :func:`pack` for ``count`` values of a type such as ``int4`` or ``uint8``; they become
    int16, or float32."""
    if kind == FP8:
        return stored.view(torch.float8_e4m3fn)[:count].float()
    if kind == FP4:
        codes = unpack(stored, "uint4", count)
        return FP4_LEVELS[(codes & 7).long()].copysign_(7.5 - codes)
    signed = not kind.startswith("u")
    values = stored.view(torch.int8 if signed else torch.uint8)
    if BITS[kind] == 4:
        values = torch.stack(((values << 4) >> 4, values >> 4), -1).view(-1)[:count]
    return values.to(torch.int16)


def dequantize(quantized: Quantized, kind: str, axis: int = 0) -> Tensor:
    """Undo :func:`quantize`, for blocks of any size.

    Args:
        quantized: The stored tensors.
        kind: Type of the levels and zero points.
        axis: The axis of the inputs: 0 for a linear weight, 1 for an embedding table.

    Returns:
        The weight [in, out], or the table [out, in], in float32.
    """
    scales = quantized.whole_scales
    rows, columns = scales.shape

    def shared(values: Tensor) -> Tensor:
        return values.view(scales.shape).unsqueeze(axis + 1)

    count = len(quantized.levels) * 8 // BITS[kind]
    levels = unpack(quantized.levels, kind, count).view(
        (rows, -1, columns) if axis == 0 else (rows, columns, -1)
    )
    if quantized.zeros is not None:
        levels = levels - shared(unpack(quantized.zeros, kind, scales.numel()))
    values = levels.float().mul_(shared(scales))
    if quantized.minimums is not None:
        values += shared(quantized.minimums.float())
    return values.view(-1, columns) if axis == 0 else values.view(rows, -1)
