"""Weight-only quantization of linear layers. The 32 weights of a block share a scale and, for
uint4, a minimum.

:class:`~eesd.model.quantized.Quantized` is the stored form.

* ``int8`` has the levels -127 .. 127. The scale maps the block's largest weight to the end of the
  range. With 16-bit scales, all blocks of an output have the scale of its largest weight, because
  only then does TensorRT-RTX multiply by int8 weights directly.
* ``uint4`` has the levels 0 .. 15, with float16 scales and minimums. A search minimizes the block's
  squared error.
* ``int4`` has the levels -8 .. 7 without minimums. It is for TensorRT, which does not support
  minimums. A search finds the scale.
* The levels of ``float8e4m3fn`` are floating-point numbers from -448 to 448. All blocks of an
  output have the scale of its largest weight.
* The levels of ``float4e2m1`` (NVFP4) are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Its
  blocks have 16 weights. A block's scale is an 8-bit number times a factor of the whole weight. It
  maps the block's largest weight to 6 or to 4, whichever has the smaller squared error.

With four bits, clipping the largest weights of a block can be better than coarse levels for all
weights. That is why scales are searched. The levels of each candidate are rounded, and the scale
and the minimum that fit them best are then computed in closed form.

The order of additions depends neither on the number of weights nor on the processor, so levels are
the same everywhere.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eesd.common.quantization import BITS, BLOCK, FP4, FP8, NVFP4
from eesd.model.arrays import (
    FLOAT8,
    NUMPY_TYPES,
    Array,
    in_threads,
    rounded,
    to_float32,
    transposed,
)
from eesd.model.quantized import FP4_LEVELS, Quantized, pack

Floats = NDArray[np.float32]

_CLIPS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8)
"""Factors of a block's range in the search for uint4."""
_REFITS = 2
"""Number of times that the best candidate for uint4 is fitted to its levels again."""
LARGEST = 65504.0
"""Largest absolute weight for uint4. It is the largest float16 number, because minimums are
float16."""
_STEPS = (0.82, 0.9, 0.98, 1.06, 1.14, 1.22)
"""Factors of the scale in the search for int4. At 1, the largest absolute weight is mapped to 8
steps."""
_NEARBY = (0.96, 1.04)
"""Factors of the best scale. They are tried at the end of the search."""
_FP8_LARGEST = 448.0
_LEAST_FACTOR = 2.0**-20
_FP4_ENDS = (6.0, 4.0)
"""Candidate levels for a block's largest weight. There are two, because the gap between the levels
4 and 6 hurts some blocks."""
_FP4_BOUNDS = (FP4_LEVELS[1:] + FP4_LEVELS[:-1]) / 2
"""Bounds between neighbouring levels. A magnitude belongs to the nearest level."""
RANGES = {"int8": (-127, 127), "int4": (-8, 7), "uint4": (0, 15)}
"""Smallest and largest levels."""
TINY = np.float32(1e-30)
"""Smallest divisor. Without it, a block of zeros would divide by 0."""
_PIECE = 1 << 16
"""Number of weights that a thread searches at a time. Small pieces stay in the processor's
cache."""
_INPUTS = 128
"""Number of inputs in a piece. With a smaller number, reading is slow, because the inputs of an
output are consecutive. With a larger number, some threads have no work."""


class Blocks(NamedTuple):
    """Quantized blocks.

    Attributes:
        levels: A byte for each level [count, block, out].
        scales: [count, out].
        minimums: [count, out] for uint4.
    """

    levels: Array
    scales: Array
    minimums: Array | None = None


def quantize(weight: Array, kind: str, dtype: str) -> Quantized:
    """Quantize a weight piece by piece, so that only the arguments and the results are large.

    Args:
        weight: Weight [out, in]. The number of inputs must be a multiple of the block size. For
            uint4, no value may be beyond :data:`LARGEST`.
        kind: One of :data:`~eesd.common.quantization.LEVELS`.
        dtype: Element type of the scales, or of their factor. The scales of uint4 are always
            float16.
    """
    outputs, inputs = weight.shape
    block = NVFP4.block if kind == FP4 else BLOCK
    type_of_scales = {"uint4": NUMPY_TYPES["float16"], FP4: FLOAT8}.get(kind, NUMPY_TYPES[dtype])
    levels = np.empty(inputs * outputs * BITS[kind] // 8, np.uint8)
    scales = np.empty((inputs // block, outputs), type_of_scales)
    minimums = np.empty_like(scales) if kind == "uint4" else None
    columns = max(1, _PIECE // _INPUTS)
    shares = kind in (FP8, FP4) or shares_scales(kind, dtype)
    largest = _largest(weight) if shares else None
    factor = None if kind != FP4 or largest is None else _common_factor(largest, dtype)

    def quantize_strip(begin: int) -> None:
        """Quantize the inputs from ``begin`` on. Their bytes are consecutive."""
        end = min(begin + _INPUTS, inputs)
        strip = np.empty(((end - begin) // block, block, outputs), np.uint8)
        at = slice(begin // block, end // block)
        for first in range(0, outputs, columns):
            part = slice(first, first + columns)
            blocks = transposed(to_float32(weight[part, begin:end])).reshape(
                strip[:, :, part].shape
            )
            found = quantize_blocks(
                blocks, kind, dtype, None if largest is None else largest[part], factor
            )
            strip[:, :, part] = found.levels.view(np.uint8)
            scales[at, part] = found.scales
            if minimums is not None:
                minimums[at, part] = found.minimums
        levels[begin * len(levels) // inputs : end * len(levels) // inputs] = pack(
            strip, BITS[kind]
        )

    in_threads(quantize_strip, range(0, inputs, _INPUTS))
    return Quantized(levels, scales, minimums=minimums, factor=factor)


def shares_scales(kind: str, dtype: str) -> bool:
    """Whether all blocks of an output share one scale."""
    return kind == FP8 or (kind == "int8" and dtype != "float32")


@np.errstate(all="ignore")  # the scale of the largest possible weights would be infinite
def quantize_blocks(
    blocks: Floats,
    kind: str,
    dtype: str,
    largest: Floats | None = None,
    factor: Array | None = None,
) -> Blocks:
    """Quantize blocks [count, block, out].

    Args:
        blocks: The weights.
        kind: One of :data:`~eesd.common.quantization.LEVELS`.
        dtype: Element type of the scales.
        largest: The largest absolute weight of each output [out], if all blocks of an output share
            a scale.
        factor: The factor of all scales of FP4 (a scalar array).
    """
    if kind == "uint4":
        return _MinimumSearch(blocks).run()
    if factor is not None:
        return _best_of_ends(blocks, float(factor))
    if kind == "int4":
        scales = _ScaleSearch(blocks).run()
    else:
        of_blocks = np.abs(blocks).max(1) if largest is None else np.tile(largest, (len(blocks), 1))
        scales = of_blocks / np.float32(127 if kind == "int8" else _FP8_LARGEST)
    # Half the smallest subnormal number turns rounding to nearest into rounding up for subnormal
    # scales.
    limits = ml_dtypes.finfo(NUMPY_TYPES[dtype])  # type: ignore[no-untyped-call]
    scales = rounded(scales + float(limits.smallest_subnormal) / 2, dtype)
    scales[scales == 0] = 1
    levels = blocks / to_float32(scales)[:, None]
    if kind == FP8:
        return Blocks(_float8(np.clip(levels, -_FP8_LARGEST, _FP8_LARGEST, out=levels)), scales)
    least, most = RANGES[kind]
    return Blocks(
        np.clip(np.rint(levels, out=levels), least, most, out=levels).astype(np.int8), scales
    )


def _float8(values: Floats) -> NDArray[np.uint8]:
    """Return the bits of the nearest FP8 numbers for values from -448 to 448. The results are the
    same as with ml_dtypes, but take a fraction of the time.

    The bits of an FP8 number of at least 2 ** -6 (whose bits are 8) are the upper bits of a float32
    minus a constant, because the offsets of the exponents differ. The bits of a smaller number
    count units of 2 ** -9.
    """
    sizes = np.abs(values)
    bits = sizes.view(np.int32)
    large = np.right_shift(bits, 20)
    large &= 1
    # After these bits are added, cutting off the lower bits rounds to the nearest number, and ties
    # to even.
    large += (1 << 19) - 1
    large += bits
    large >>= 20
    large -= (127 - 7) << 3
    found = np.maximum(large, 8, out=large).astype(np.uint8)
    np.rint(np.multiply(sizes, 512, out=sizes), out=sizes)
    found += np.clip(sizes, 0, 8, out=sizes).astype(np.uint8)
    found -= 8
    found |= values.view(np.uint8)[..., 3::4] & 128
    return found


def _largest(weight: Array) -> Floats:
    """Return the largest absolute weight of each output [out]."""
    found = np.empty(len(weight), np.float32)
    step = max(1, _PIECE // weight.shape[1])

    def find(first: int) -> None:
        found[first : first + step] = np.abs(to_float32(weight[first : first + step])).max(1)

    in_threads(find, range(0, len(weight), step))
    return found


def _common_factor(largest: Floats, dtype: str) -> Array:
    """Return the factor of all scales of an NVFP4 weight. It is the smallest power of two (in
    ``dtype``) for which no scale is too large."""
    mantissa, exponent = np.frexp(
        max(float(largest.max()) / (_FP4_ENDS[-1] * _FP8_LARGEST), _LEAST_FACTOR)
    )
    return rounded(np.array(np.ldexp(1.0, exponent - (mantissa == 0.5))), dtype)


def _best_of_ends(blocks: Floats, factor: float) -> Blocks:
    """Quantize blocks [count, 16, out] to NVFP4. In each block, the largest weight gets the better
    of its two candidate levels."""
    sizes = np.abs(blocks)
    work = np.empty_like(blocks)
    largest = sizes.max(1)
    best = np.zeros(largest.shape, FLOAT8)
    least = np.full_like(largest, np.inf)
    for end in _FP4_ENDS:
        scales = (largest / np.float32(end * factor)).astype(FLOAT8)
        whole = to_float32(scales) * np.float32(factor)
        magnitudes = _magnitudes(sizes, whole, work)
        FP4_LEVELS.take(magnitudes, out=work, mode="clip")
        np.subtract(np.multiply(work, whole[:, None], out=work), sizes, out=work)
        error = _sums(np.square(work, out=work), work)
        best = np.where(error < least, scales.view(np.uint8), best.view(np.uint8)).view(FLOAT8)
        least = np.minimum(error, least)
    codes = _magnitudes(sizes, to_float32(best) * np.float32(factor), work)
    codes |= np.left_shift(blocks < 0, 3, dtype=np.uint8)
    return Blocks(codes, best)


def _magnitudes(sizes: Floats, scales: Floats, work: Floats) -> NDArray[np.uint8]:
    """Return the nearest levels of FP4 for absolute weights [count, 16, out]. Ties go to the lower
    level. Overwrites ``work``."""
    np.divide(sizes, np.maximum(scales, TINY)[:, None], out=work)
    found = np.zeros(work.shape, np.uint8)
    above = np.empty(work.shape, bool)
    for bound in _FP4_BOUNDS:
        found += np.greater(work, bound, out=above)
    return found


def _sums(values: Floats, work: Floats) -> Floats:
    """Return the sums [count, out] of blocks [count, block, out]. Halves are added until one row is
    left. Overwrites ``work``."""
    half = values.shape[1] // 2
    rest = np.add(values[:, :half], values[:, half:], out=work[:, :half])
    while half > 1:
        half //= 2
        rest = np.add(rest[:, :half], rest[:, half:], out=rest[:, :half])
    return rest[:, 0].copy()


class _ScaleSearch:
    """A search for the scales with the smallest squared error. The blocks are [count, 32, out], and
    the levels are -8 .. 7.

    For given levels, the best scale is sum(w l) / sum(l l). Compared with zero levels, this scale
    lowers the squared error by sum(w l)^2 / sum(l l). Candidates are compared by this gain.
    """

    def __init__(self, blocks: Floats) -> None:
        self._blocks = blocks
        self._levels = np.empty_like(blocks)
        self._products = np.empty_like(blocks)
        self._scale = np.zeros((blocks.shape[0], blocks.shape[2]), np.float32)
        self._gain = np.full_like(self._scale, -1)

    def run(self) -> Floats:
        """Return the scales [count, out]."""
        largest = np.abs(self._blocks, out=self._products).max(1)
        for step in _STEPS:
            self._try(largest * (step / 8))
        scale = self._scale
        for factor in _NEARBY:
            self._try(scale * factor)
        return np.maximum(self._fit(self._scale)[0], 0)

    def _try(self, scale: Floats) -> None:
        """Fit scales, and keep them for the blocks where they are the best scales so far."""
        fitted, gain = self._fit(scale)
        self._scale = np.where(gain > self._gain, fitted, self._scale)
        self._gain = np.maximum(gain, self._gain)

    def _fit(self, scale: Floats) -> tuple[Floats, Floats]:
        """Return the best scale for the levels that ``scale`` gives, and the gain of that scale."""
        levels = self._levels
        products = self._products
        np.multiply(self._blocks, np.reciprocal(np.maximum(scale, TINY))[:, None], out=levels)
        np.clip(np.rint(levels, out=levels), -8, 7, out=levels)
        dot = _sums(np.multiply(self._blocks, levels, out=products), products)
        squares = _sums(np.multiply(levels, levels, out=products), products)
        best = np.divide(dot, np.maximum(squares, TINY), out=squares)
        return best, dot * best


class _MinimumSearch:
    """A search for the scales and minimums of uint4. The blocks are [count, 32, out], and the
    levels are 0 .. 15.

    Every candidate is rounded to float16 before its levels are chosen. Candidates are compared by
    the squared error of the stored values. The first candidate maps the block's smallest and
    largest weights to the levels 0 and 15, so weights that have already been quantized this way get
    the same levels.
    """

    def __init__(self, blocks: Floats) -> None:
        self._blocks = blocks
        self._levels = np.empty_like(blocks)
        self._work = np.empty_like(blocks)
        self._mean = _sums(blocks, self._work) / blocks.shape[1]
        self._scale, self._minimum = np.zeros((2, *self._mean.shape), np.float32)
        self._error = np.full_like(self._mean, np.inf)

    def run(self) -> Blocks:
        """Return the best levels, scales and minimums."""
        low = self._blocks.min(1)
        high = self._blocks.max(1)
        self._try((high - low) / 15, low)
        for clip in _CLIPS:
            scale = (high - low) * (clip / 15)
            self._try(*self._fitted(scale, (high + low) / 2 - 7.5 * scale))
        for _ in range(_REFITS):
            self._try(*self._fitted(self._scale, self._minimum))
        self._choose_levels(self._scale, self._minimum)
        return Blocks(
            self._levels.astype(np.int8),
            self._scale.astype(np.float16),
            self._minimum.astype(np.float16),
        )

    def _try(self, scale: Floats, minimum: Floats) -> None:
        """Keep scales and minimums for the blocks where they have the smallest error so far."""
        scale, minimum = self._choose_levels(scale, minimum)
        work = np.multiply(self._levels, scale[:, None], out=self._work)
        np.subtract(np.add(work, minimum[:, None], out=work), self._blocks, out=work)
        error = _sums(np.square(work, out=work), work)
        better = error < self._error
        self._scale = np.where(better, scale, self._scale)
        self._minimum = np.where(better, minimum, self._minimum)
        self._error = np.minimum(error, self._error)

    def _choose_levels(self, scale: Floats, minimum: Floats) -> tuple[Floats, Floats]:
        """Choose the nearest levels for scales and minimums rounded to float16. Returns the rounded
        scales and minimums."""
        scale, minimum = (
            np.clip(values, least, LARGEST).astype(np.float16).astype(np.float32)
            for values, least in ((scale, 0), (minimum, -LARGEST))
        )
        levels = np.subtract(self._blocks, minimum[:, None], out=self._levels)
        np.multiply(levels, np.reciprocal(np.maximum(scale, TINY))[:, None], out=levels)
        np.clip(np.rint(levels, out=levels), 0, 15, out=levels)
        return scale, minimum

    def _fitted(self, scale: Floats, minimum: Floats) -> tuple[Floats, Floats]:
        """Return the scales and minimums with the smallest squared error for the levels that the
        given scales and minimums lead to."""
        scale, _ = self._choose_levels(scale, minimum)
        count = self._blocks.shape[1]
        levels = self._levels
        mean = _sums(levels, self._work) / count
        spread = _sums(np.square(levels, out=self._work), self._work) - count * np.square(mean)
        products = _sums(np.multiply(self._blocks, levels, out=self._work), self._work)
        scale = np.where(
            spread > 0, (products - count * mean * self._mean) / np.maximum(spread, TINY), scale
        )
        return scale, self._mean - scale * mean
