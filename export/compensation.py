"""Quantize a layer by its inputs. Each weight compensates the rounding of earlier weights (GPTQ,
arXiv 2210.17323)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from eesd.common.quantization import BITS, BLOCK
from eesd.model.arrays import to_float32
from eesd.model.as_torch import as_torch
from eesd.model.quantize import RANGES, TINY, quantize_blocks
from eesd.model.quantized import Quantized, pack

_DAMPING = 0.01
"""Damping of the squares of the inputs, as a share of their mean. This is GPTQ's default."""


def quantize_for(factor: Tensor, weight: Tensor, kind: str, dtype: str) -> Quantized:
    """Quantize a weight to ``int4`` or ``uint4`` so that the layer's outputs change little.

    Inputs are rounded one after another. The weights of later inputs compensate the error of each
    rounding. The scales and minimums of a block are searched just before the block's inputs are
    rounded.

    Args:
        factor: Result of :func:`compensation` for the layer's inputs [in, in].
        weight: Weight [out, in]. The size ``in`` must be a multiple of a block.
        kind: ``int4`` or ``uint4``.
        dtype: Element type of the scales. Scales of uint4 are always float16.
    """
    values = weight.float().t().contiguous()
    least, most = RANGES[kind]
    levels = torch.empty(values.shape, dtype=torch.int8)
    scales = []
    minimums = []
    for begin in range(0, len(values), BLOCK):
        end = begin + BLOCK
        block = values[begin:end]
        found = quantize_blocks(block.numpy()[None], kind, dtype)
        minimum = np.zeros_like(found.scales) if found.minimums is None else found.minimums
        step = as_torch(to_float32(found.scales[0]))
        low = as_torch(to_float32(minimum[0]))
        errors = torch.empty_like(block)
        for row, own in enumerate(factor[begin:end, begin:end]):
            levels[begin + row] = level = (
                ((block[row] - low) / step.clamp_min(float(TINY))).round_().clamp_(least, most)
            )
            errors[row] = (block[row] - level * step - low) / own[row]
            block[row + 1 :] -= own[row + 1 :, None] * errors[row]
        values[end:] -= factor[begin:end, end:].t() @ errors
        scales.append(found.scales)
        minimums.append(minimum)
    stored = pack(levels.numpy().view(np.uint8), BITS[kind])
    return Quantized(
        stored,
        np.concatenate(scales),
        minimums=np.concatenate(minimums) if kind == "uint4" else None,
    )


def compensation(products: Tensor) -> Tensor:
    """Returns the upper triangular U [in, in] for which U^T U = (products + damping)^-1. Its
    entries are the factors by which later inputs compensate an error.

    Args:
        products: Sum of x x^T over the inputs x of a layer. It is [in, in] in float32. Inputs that
            are always 0 are allowed.
    """
    wide = products.double()
    diagonal = wide.diagonal()
    diagonal += _DAMPING * diagonal.mean() + (diagonal == 0)
    # The upper triangular R satisfies R R^T = products, and U is the inverse of R.
    backwards = torch.linalg.cholesky(wide.flip(0, 1)).flip(0, 1)
    whole = torch.eye(len(wide), dtype=wide.dtype)
    upper: Tensor = torch.linalg.solve_triangular(backwards, whole, upper=True)
    return upper.float()


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """A pool that has torch's number of threads. In each of these threads, torch is
    single-threaded, because splitting every small operation costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
