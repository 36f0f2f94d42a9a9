"""Weight-only quantization of linear layers: blocks of 32 weights share a scale, and in the type
uint4 a minimum.

:class:`~eesd.model.quantized.Quantized` is the stored form.

* ``int8``: levels -127 .. 127. The scale maps the block's largest weight to the end of the range.
  With 16-bit scales all blocks of an output have the scale of its largest weight: only then
  TensorRT-RTX multiplies by int8 weights as they are.
* ``uint4``: levels 0 .. 15, with float16 scales and minimums. Both are searched by the block's
  squared error.
* ``int4``: levels -8 .. 7 without minimums, for TensorRT, which has none. The scale is searched.
* ``float8e4m3fn``: levels are floating-point numbers from -448 to 448. All blocks of an output have
  the scale of its largest weight.
* ``float4e2m1``: levels are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, in blocks of 16
  (NVFP4). A block's scale is a number of 8 bits times a factor of the whole weight. It maps the
  block's largest weight to 6 or to 4, whichever has the smaller squared error.

Four bits are so few that losing the largest weights of a block can be better than coarse levels for
all, hence the search: each candidate is rounded, and gets the scale and the minimum that fit its
levels best in closed form.

:func:`quantize_for` knows the inputs of a layer, and lets weights make up for the rounding of those
before (GPTQ).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from eesd.common.quantization import BITS, BLOCK, FP4, FP8, NVFP4
from eesd.model.quantized import FP4_LEVELS, Quantized, pack

_CLIPS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8)
"""Factors of a block's range in the search for uint4."""
_REFITS = 2
"""How often the best candidate for uint4 is fitted to its levels once more."""
LARGEST = 65504.0
"""Largest absolute weight that uint4 can hold: the largest float16, which the minimum may be."""
_STEPS = (0.82, 0.9, 0.98, 1.06, 1.14, 1.22)
"""Factors of the scale in the search for int4. At 1, the largest absolute weight is mapped to 8
steps."""
_NEARBY = (0.96, 1.04)
"""Factors of the best scale that are tried at the end."""
_FP8_LARGEST = 448.0
_LEAST_FACTOR = 2.0**-20
_FP4_ENDS = (6.0, 4.0)
"""Levels that a block's largest weight may get: the numbers between 4 and 6 are missing, which
hurts some blocks."""
_FP4_BOUNDS = (FP4_LEVELS[1:] + FP4_LEVELS[:-1]) / 2
"""Between which of these a magnitude is says which level is the nearest."""
_TINY = 1e-30
"""Smallest divisor, for blocks of zeros."""
_DAMPING = 0.01
"""The damping of the inputs' squares, as a share of their mean: GPTQ's default."""
_PIECE = 1 << 17
"""Number of weights that a thread searches at a time. Small pieces stay in the processor's
cache."""


def quantize(weight: Tensor, kind: str, dtype: torch.dtype) -> Quantized:
    """Quantize a weight, piece by piece, so that only the arguments and the results take much
    memory.

    Args:
        weight: Weight [out, in]; ``in`` must be a multiple of a block. For uint4, no value may be
            beyond :data:`LARGEST`.
        kind: One of :data:`~eesd.common.quantization.LEVELS`.
        dtype: Element type of the scales, or of their factor; the scales of uint4 are float16.
    """
    if kind == FP4:
        return _quantize_nvfp4(weight, dtype)
    if kind == "uint4":
        dtype = torch.float16
    outputs, inputs = weight.shape
    levels = torch.empty(inputs * outputs * BITS[kind] // 8, dtype=torch.uint8)
    scales = torch.empty(inputs // BLOCK, outputs, dtype=dtype)
    minimums = torch.zeros_like(scales)
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
            if kind == "uint4":
                strip[:, :, part], scales[at, part], minimums[at, part] = _quantize_with_minimum(
                    blocks
                )
            else:
                strip[:, :, part], scales[at, part] = _quantize_blocks(
                    blocks, largest[part], kind, dtype
                )
        levels[begin * len(levels) // inputs : end * len(levels) // inputs] = pack(
            strip.view(torch.uint8), BITS[kind]
        )

    with one_thread_each() as pool:
        list(pool.map(quantize_strip, range(0, inputs, rows)))
    return Quantized(levels, scales, minimums=minimums if kind == "uint4" else None)


def quantize_for(factor: Tensor, weight: Tensor, kind: str, dtype: torch.dtype) -> Quantized:
    """Quantize a weight to ``int4`` or ``uint4`` so that the layer's outputs change little: GPTQ
    (arXiv 2210.17323).

    Inputs are rounded one after another. The weights of later inputs make up for the error of each.
    Scales and minimums of a block are searched when its turn comes.

    Args:
        factor: What :func:`compensation` makes of the layer's inputs [in, in].
        weight: Weight [out, in]; ``in`` must be a multiple of a block.
        kind: ``int4`` or ``uint4``.
        dtype: Element type of the scales; those of uint4 are float16.
    """
    values = weight.float().t().contiguous()
    least, most = (0, 15) if kind == "uint4" else (-8, 7)
    levels = torch.empty(values.shape, dtype=torch.int8)
    scales, minimums = [], []
    for begin in range(0, len(values), BLOCK):
        end = begin + BLOCK
        block = values[begin:end]
        if kind == "uint4":
            _, scale, minimum = _quantize_with_minimum(block[None])
        else:
            _, scale = _quantize_blocks(block[None], block[0], kind, dtype)
            minimum = torch.zeros_like(scale)
        step, low = scale[0].float(), minimum[0].float()
        errors = torch.empty_like(block)
        for row, own in enumerate(factor[begin:end, begin:end]):
            levels[begin + row] = level = (
                ((block[row] - low) / step.clamp_min(_TINY)).round_().clamp_(least, most)
            )
            errors[row] = (block[row] - level * step - low) / own[row]
            block[row + 1 :] -= own[row + 1 :, None] * errors[row]
        values[end:] -= factor[begin:end, end:].t() @ errors
        scales.append(scale)
        minimums.append(minimum)
    stored = pack(levels.view(torch.uint8), BITS[kind])
    return Quantized(
        stored, torch.cat(scales), minimums=torch.cat(minimums) if kind == "uint4" else None
    )


def compensation(products: Tensor) -> Tensor:
    """The upper triangular U [in, in] with U^T U = (products + damping)^-1: how inputs make up for
    the error of one before.

    Args:
        products: Sum of x x^T over the inputs x of a layer [in, in], in float32. Inputs that are
            always 0 are allowed.
    """
    wide = products.double()
    diagonal = wide.diagonal()
    diagonal += _DAMPING * diagonal.mean() + (diagonal == 0)
    # R with R R^T = products, so that U is its inverse.
    backwards = torch.linalg.cholesky(wide.flip(0, 1)).flip(0, 1)
    whole = torch.eye(len(wide), dtype=wide.dtype)
    upper: Tensor = torch.linalg.solve_triangular(backwards, whole, upper=True)
    return upper.float()


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch has. Each runs torch alone: splitting every small operation costs
    more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def shares_scales(kind: str, dtype: torch.dtype) -> bool:
    """Whether all blocks of an output get one scale."""
    return kind == FP8 or (kind == "int8" and dtype != torch.float32)


def _quantize_blocks(
    blocks: Tensor, largest: Tensor, kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Levels and scales of blocks [count, 32, out], not as uint4; ``largest`` [out] is each
    output's, for shared scales."""
    if kind == "int4":
        scale = _ScaleSearch(blocks).run()
    else:
        most = 127 if kind == "int8" else _FP8_LARGEST
        scale = (
            largest.repeat(len(blocks), 1) if shares_scales(kind, dtype) else blocks.abs().amax(1)
        ) / most
    # Half the smallest subnormal number: for subnormal scales it turns rounding to nearest into
    # rounding up.
    half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    scale = (scale + half).to(dtype)
    scale[scale == 0] = 1
    levels = blocks / scale.float()[:, None]
    if kind == FP8:
        return levels.clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).view(
            torch.int8
        ), scale
    least, most = (-127, 127) if kind == "int8" else (-8, 7)
    return levels.round_().clamp_(least, most).to(torch.int8), scale


def _quantize_nvfp4(weight: Tensor, dtype: torch.dtype) -> Quantized:
    """Quantize a weight [out, in] as NVFP4, some outputs at a time."""
    block, (outputs, inputs) = NVFP4.block, weight.shape
    largest = torch.maximum(weight.amax(), -weight.amin()).float()
    # No scale is too large.
    exponent = (largest / (_FP4_ENDS[-1] * _FP8_LARGEST)).clamp_min(_LEAST_FACTOR).log2().ceil()
    factor = exponent.exp2().to(dtype)
    codes = torch.empty(inputs, outputs, dtype=torch.uint8)
    scales = torch.empty(inputs // block, outputs, dtype=torch.float8_e4m3fn)
    step = max(1, _PIECE // inputs)

    def quantize_outputs(first: int) -> None:
        part = slice(first, first + step)
        blocks = weight[part].float().reshape(-1, inputs // block, block)
        best = _best_of_ends(blocks, factor)
        codes[:, part], scales[:, part] = best[0].view(-1, inputs).t(), best[1].t()

    with one_thread_each() as pool:
        list(pool.map(quantize_outputs, range(0, outputs, step)))
    return Quantized(pack(codes, 4), scales, factor=factor)


def _best_of_ends(blocks: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks [out, count, 16] as NVFP4, with the end for the largest weight
    that fits a block best."""
    found = []
    for end in _FP4_ENDS:
        wanted = blocks.abs().amax(2) / (end * factor.float())
        scales = wanted.to(torch.float8_e4m3fn)
        whole = Quantized(blocks, scales, factor=factor).whole_scales[:, :, None]
        magnitude = torch.bucketize(blocks.abs() / whole.clamp_min(_TINY), _FP4_BOUNDS)
        error = (FP4_LEVELS[magnitude] * whole - blocks.abs()).square().sum(2)
        found.append((magnitude.to(torch.uint8) | (blocks < 0).to(torch.uint8) << 3, scales, error))
    (codes, scales, error), (others, other_scales, other_error) = found
    better = other_error < error
    bits = torch.where(better, other_scales.view(torch.uint8), scales.view(torch.uint8))
    return torch.where(better[:, :, None], others, codes), bits.view(torch.float8_e4m3fn)


class _ScaleSearch:
    """Search of the scales with the least squared error for blocks [count, 32, out], with the
    levels -8 .. 7.

    For given levels, the best scale is sum(w l) / sum(l l), and its squared error is lower by sum(w
    l)^2 / sum(l l) than that of levels that are all zero. Candidates are compared by this gain.
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self._levels, self._products = torch.empty_like(blocks), torch.empty_like(blocks)
        self._scale = torch.zeros(blocks.shape[0], blocks.shape[2])
        self._gain = torch.full_like(self._scale, -1)

    def run(self) -> Tensor:
        """The scales [count, out]."""
        largest = self._blocks.abs().amax(1)
        for step in _STEPS:
            self._try(largest * (step / 8))
        scale = self._scale
        for factor in _NEARBY:
            self._try(scale * factor)
        return self._fit(self._scale)[0].clamp_min_(0)

    def _try(self, scale: Tensor) -> None:
        """Take scales where they are better than the best so far. They are fitted first."""
        fitted, gain = self._fit(scale)
        self._scale = torch.where(gain > self._gain, fitted, self._scale)
        self._gain = torch.maximum(gain, self._gain)

    def _fit(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The best scale for the levels that a scale gives, and its gain."""
        levels, products = self._levels, self._products
        torch.mul(self._blocks, scale.clamp_min(_TINY).reciprocal_()[:, None], out=levels)
        torch.clamp(levels.round_(), -8, 7, out=levels)
        dot = torch.mul(self._blocks, levels, out=products).sum(1)
        best = dot / torch.mul(levels, levels, out=products).sum(1).clamp_min_(_TINY)
        return best, dot * best


def _quantize_with_minimum(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and minimums of blocks [count, 32, out] as uint4.

    Every candidate is rounded to float16 before its levels are chosen, and compared by the squared
    error of what is stored. The first one maps the block's least and largest weight to the levels 0
    and 15: it finds again what was quantized so before.
    """
    low, high = blocks.amin(1), blocks.amax(1)
    best = _Candidate(blocks, (high - low) / 15, low)
    for clip in _CLIPS:
        scale = (high - low) * (clip / 15)
        first = _Candidate(blocks, scale, (high + low) / 2 - 7.5 * scale)
        best = best.better(_Candidate(blocks, *first.fitted(blocks)))
    for _ in range(_REFITS):
        best = best.better(_Candidate(blocks, *best.fitted(blocks)))
    return best.levels.to(torch.int8), best.scale, best.minimum


class _Candidate:
    """Scales and minimums [count, out] for blocks [count, 32, out], rounded to float16, with the
    levels and squared errors."""

    def __init__(self, blocks: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self.scale, self.minimum = (
            scale.clamp(0, LARGEST).half(),
            minimum.clamp(-LARGEST, LARGEST).half(),
        )
        scale, minimum = self.scale.float()[:, None], self.minimum.float()[:, None]
        self.levels = (
            ((blocks - minimum) * scale.clamp_min(_TINY).reciprocal()).round_().clamp_(0, 15)
        )
        self.error = (self.levels * scale).add_(minimum).sub_(blocks).square_().sum(1)

    def better(self, other: "_Candidate") -> "_Candidate":
        """The candidate with the smaller error, block by block. Reuses this one."""
        worse = other.error < self.error
        for name in ("scale", "minimum", "error"):
            setattr(self, name, torch.where(worse, getattr(other, name), getattr(self, name)))
        self.levels = torch.where(worse[:, None], other.levels, self.levels)
        return self

    def fitted(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The scales and minimums with the least squared error for the levels."""
        count, levels, mean = blocks.shape[1], self.levels.mean(1), blocks.mean(1)
        spread = self.levels.square().sum(1) - count * levels.square()
        scale = ((blocks * self.levels).sum(1) - count * levels * mean) / spread.clamp_min(_TINY)
        scale = torch.where(spread > 0, scale, self.scale)
        return scale, mean - scale * levels
