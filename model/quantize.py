"""Weight-only quantization of linear layers: blocks of 32 weights share a scale, and in the type uint4 a zero point.

A block is 32 consecutive inputs of one output. Weights are stored as [in, out], so this is the layout of ONNX's blockwise
``DequantizeLinear`` with axis 0. A stored level ``q`` stands for the weight ``scale * (q - zero_point)``.

* ``int8``: levels -127 .. 127. The scale maps the block's largest weight to the end of the range. With 16-bit scales all blocks
  of an output have the scale of its largest weight: only then TensorRT-RTX multiplies by int8 weights as they are.
* ``uint4``: levels 0 .. 15, zero points 0 .. 15. Scale and zero point are searched by the block's squared error.
* ``int4``: levels -8 .. 7 without zero points, for TensorRT, which has none. The scale is searched.

Four bits are so few that losing the largest weights of a block can be better than coarse levels for all, hence the search: each
candidate is rounded, and gets the scale that fits its levels best in closed form.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from eesd.common.weights import BITS, BLOCK

_CLIPS = (1.05, 0.97, 0.89, 0.81, 0.73)
"""Factors of a block's range in the search for uint4."""
_STEPS = (0.82, 0.9, 0.98, 1.06, 1.14, 1.22)
"""Factors of the scale in the search for int4. At 1, the largest absolute weight is mapped to 8 steps."""
_NEARBY = (0.96, 1.04)
"""Factors of the best scale that are tried at the end."""
_TINY = 1e-30
"""Smallest divisor, for blocks of zeros."""
_PIECE = 1 << 17
"""Number of weights that a thread searches at a time. Small pieces stay in the processor's cache."""


class Quantized(NamedTuple):
    """A quantized weight.

    Attributes:
        levels: The bytes of a tensor [in, out]. Two levels of 4 bits share a byte, the first in the low half.
        scales: Scales [in / block, out].
        zeros: The bytes of the zero points [in / block, out], packed like the levels; None where all are zero.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None = None


def quantize(weight: Tensor, kind: str, dtype: torch.dtype) -> Quantized:
    """Quantize a weight, piece by piece, so that only the arguments and the results take much memory.

    Args:
        weight: Weight [out, in]; ``in`` must be a multiple of 32.
        kind: ``int8``, ``int4`` or ``uint4``.
        dtype: Element type of the scales.
    """
    outputs, inputs = weight.shape
    levels = torch.empty(inputs * outputs * BITS[kind] // 8, dtype=torch.uint8)
    scales = torch.empty(inputs // BLOCK, outputs, dtype=dtype)
    zeros = torch.zeros(scales.shape, dtype=torch.uint8)
    rows = BLOCK * max(1, _PIECE // (BLOCK * outputs))
    columns = max(1, _PIECE // rows)
    largest = torch.full((outputs,), torch.nan)
    if shares_scales(kind, dtype):
        largest = torch.maximum(weight.amax(1), -weight.amin(1)).float()

    def quantize_strip(begin: int) -> None:
        """Quantize the inputs from ``begin`` on. Their bytes are consecutive."""
        end = min(begin + rows, inputs)
        strip = torch.empty((end - begin) // BLOCK, BLOCK, outputs, dtype=torch.int8)
        at = slice(begin // BLOCK, end // BLOCK)
        for first in range(0, outputs, columns):
            part = slice(first, first + columns)
            blocks = weight[part, begin:end].t().float().reshape(strip[:, :, part].shape)
            strip[:, :, part], scales[at, part], zeros[at, part] = _quantize_blocks(blocks, largest[part], kind, dtype)
        levels[begin * len(levels) // inputs : end * len(levels) // inputs] = pack(strip.view(torch.uint8), BITS[kind])

    with _one_thread_each() as pool:
        list(pool.map(quantize_strip, range(0, inputs, rows)))
    return Quantized(levels, scales, pack(zeros, BITS[kind]) if kind == "uint4" else None)


def exact_levels(weight: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Quantized | None:
    """The levels of a weight whose values lie on a grid already; None if this type of levels cannot hold all of them exactly.

    Args:
        weight: Weight [out, in] in float32.
        scales: Distance [out, in / 32] of neighbouring values of the grid. The sign does not matter: only positive scales are
            stored, because TensorRT asks for them.
        kind: ``int8``, ``int4`` or ``uint4``.
        dtype: Element type of the scales to return.
    """
    scales = scales.abs()
    scales[scales == 0] = 1
    blocks = weight.view(*scales.shape, BLOCK)
    levels = (blocks / scales[:, :, None]).round_()
    low, high = levels.amin(-1).clamp_max_(0), levels.amax(-1).clamp_min_(0)
    zeros = -low if kind == "uint4" else torch.zeros_like(low)
    least, most = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}[kind]
    if (low + zeros).min() < least or (high + zeros).max() > most or not torch.equal(levels * scales[:, :, None], blocks):
        return None
    stored = (levels + zeros[:, :, None]).to(torch.int8).view(torch.uint8).view(weight.shape).t()
    shared = zeros.to(torch.uint8).t()
    return Quantized(pack(stored, BITS[kind]), scales.t().contiguous().to(dtype), pack(shared, 4) if kind == "uint4" else None)


@contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch has. Each runs torch alone: splitting every small operation costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def shares_scales(kind: str, dtype: torch.dtype) -> bool:
    """Whether all blocks of an output get one scale."""
    return kind == "int8" and dtype != torch.float32


def _quantize_blocks(blocks: Tensor, largest: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and zero points of blocks [count, 32, out]; ``largest`` [out] is each output's, for shared scales."""
    if kind == "int8":
        scale = (largest.repeat(len(blocks), 1) if shares_scales(kind, dtype) else blocks.abs().amax(1)) / 127
        zero = torch.zeros_like(scale)
        least, most = -127, 127
    else:
        scale, zero = _Search(blocks).run(kind)
        least, most = 0, 15
    # Half the smallest subnormal number: for subnormal scales it turns rounding to nearest into rounding up.
    half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    scale = (scale + half).to(dtype)
    scale[scale == 0] = 1
    levels = (blocks / scale.float()[:, None]).round_().add_(zero[:, None]).clamp_(least, most)
    if kind == "int4":
        levels -= zero[:, None]
    return levels.to(torch.int8), scale, zero.to(torch.uint8)


class _Search:
    """Search of the scales and zero points with the least squared error for blocks [count, 32, out], with 16 levels.

    For given levels l = q - zero_point, the best scale is sum(w l) / sum(l l), and its squared error is lower by
    sum(w l)^2 / sum(l l) than that of levels that are all zero. Candidates are compared by this gain.
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self._levels, self._products = torch.empty_like(blocks), torch.empty_like(blocks)
        self._scale = self._zero = torch.zeros(blocks.shape[0], blocks.shape[2])
        self._gain = torch.full_like(self._scale, -1)

    def run(self, kind: str) -> tuple[Tensor, Tensor]:
        """The scales and zero points [count, out]. int4 is searched as levels 0 .. 15 with the zero point 8."""
        if kind == "int4":
            largest = self._blocks.abs().amax(1)
            for step in _STEPS:
                self._try(largest * (step / 8), torch.full_like(largest, 8))
        else:
            low, high = self._blocks.amin(1).clamp_max_(0), self._blocks.amax(1).clamp_min_(0)
            for clip in _CLIPS:
                scale = (high - low) * (clip / 15)
                self._try(scale, (7.5 - (high + low) / 2 / scale.clamp_min(_TINY)).round_().clamp_(0, 15))
            scale, zero = self._scale, self._zero
            for shift in (-1, 1):
                self._try(scale, (zero + shift).clamp_(0, 15))
        scale, zero = self._scale, self._zero
        for factor in _NEARBY:
            self._try(scale * factor, zero)
        return self._fit(self._scale, self._zero)[0].clamp_min_(0), self._zero

    def _try(self, scale: Tensor, zero: Tensor) -> None:
        """Take scales and zero points where they are better than the best so far. The scale is fitted first."""
        fitted, gain = self._fit(scale, zero)
        better = gain > self._gain
        self._scale, self._zero = torch.where(better, fitted, self._scale), torch.where(better, zero, self._zero)
        self._gain = torch.maximum(gain, self._gain)

    def _fit(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """The best scale for the levels that a scale and a zero point give, and its gain."""
        levels, products = self._levels, self._products
        torch.mul(self._blocks, scale.clamp_min(_TINY).reciprocal_()[:, None], out=levels)
        torch.clamp(levels.round_(), -zero[:, None], 15 - zero[:, None], out=levels)
        dot = torch.mul(self._blocks, levels, out=products).sum(1)
        best = dot / torch.mul(levels, levels, out=products).sum(1).clamp_min_(_TINY)
        return best, dot * best


def join_quantized(parts: Sequence[Quantized], inputs: int) -> Quantized:
    """Weights with the same ``inputs``, side by side along the outputs. Their numbers of outputs must be even."""
    if len(parts) == 1:
        return parts[0]
    blocks = parts[0].scales.shape[0]
    zeros = [part.zeros.view(blocks, -1) for part in parts if part.zeros is not None]
    return Quantized(
        torch.cat([part.levels.view(inputs, -1) for part in parts], 1).view(-1),
        torch.cat([part.scales for part in parts], 1),
        torch.cat(zeros, 1).view(-1) if zeros else None,
    )


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
    """Undo :func:`pack` for ``count`` values of a type such as ``int4`` or ``uint8``; they become int16."""
    signed = not kind.startswith("u")
    values = stored.view(torch.int8 if signed else torch.uint8)
    if BITS[kind] == 4:
        values = torch.stack(((values << 4) >> 4, values >> 4), -1).view(-1)[:count]
    return values.to(torch.int16)


def dequantize(quantized: Quantized, kind: str) -> Tensor:
    """Undo :func:`quantize`, for blocks of any size.

    Args:
        quantized: The stored tensors.
        kind: Type of the levels and zero points.

    Returns:
        The weight [in, out] in the element type of the scales.
    """
    scales = quantized.scales
    count = len(quantized.levels) * 8 // BITS[kind]
    levels = unpack(quantized.levels, kind, count).view(scales.shape[0], -1, scales.shape[1])
    if quantized.zeros is not None:
        levels = levels - unpack(quantized.zeros, kind, scales.numel()).view(scales.shape)[:, None]
    return (levels.to(scales.dtype) * scales[:, None]).view(-1, scales.shape[1])
