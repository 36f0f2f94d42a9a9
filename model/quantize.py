"""Weight-only quantization of linear layers: int8 or int4 in blocks of 32 weights with one scale, symmetric, no zero point.

A block is 32 consecutive inputs of one output, as ONNX's blockwise ``DequantizeLinear`` (axis 0 of weights stored [in, out])
wants it. The scale is that which brings the block's largest weight to the end of the range, so that rounding to nearest
moves no weight by more than half a scale.
"""

import torch
from torch import Tensor

from eesd.common.weights import BITS, BLOCK

LEVELS = {"int8": 127, "int4": 7}
"""Most steps of a scale to either side of zero; -128 and -8 stay unused, so that the range is symmetric."""
_PIECE = 1 << 21
"""Weights that are in float32 at a time."""


def quantize(weight: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The levels of ``weight`` [out, in] as the bytes of a tensor [in, out], int4 with two to a byte, the first in the low
    half; and the scales [in / 32, out] in ``dtype``. ``in`` must be a multiple of 32.

    Works through the tensor in pieces: the only large things in memory are what is given and what is returned.
    """
    outputs, inputs = weight.shape
    stored = torch.empty(inputs * outputs * BITS[kind] // 8, dtype=torch.uint8)
    scales = torch.empty(inputs // BLOCK, outputs, dtype=dtype)
    # Half the least number of the type: among subnormal numbers it turns rounding to the nearest into rounding up.
    half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    step = BLOCK * max(1, _PIECE // (BLOCK * outputs))
    for begin in range(0, inputs, step):
        end = min(begin + step, inputs)
        blocks = weight[:, begin:end].t().float().reshape(-1, BLOCK, outputs)
        scale = (blocks.abs().amax(1) / LEVELS[kind] + half).to(dtype)
        scale[scale == 0] = 1
        levels = (blocks / scale.float()[:, None]).round_().clamp_(-LEVELS[kind], LEVELS[kind]).to(torch.int8).reshape(-1)
        if kind == "int4":
            levels = (levels[1::2] << 4) | (levels[::2] & 15)
        stored[begin * len(stored) // inputs : end * len(stored) // inputs] = levels.view(torch.uint8)
        scales[begin // BLOCK : end // BLOCK] = scale
    return stored, scales


def dequantize(stored: Tensor, scales: Tensor, kind: str) -> Tensor:
    """What :func:`quantize` made of a weight, as [in, out] in the type of ``scales``."""
    levels = stored.view(torch.int8)
    if kind == "int4":
        levels = torch.stack(((levels << 4) >> 4, levels >> 4), -1)
    blocks = levels.view(scales.shape[0], BLOCK, scales.shape[1])
    return (blocks.to(scales.dtype) * scales[:, None]).view(-1, scales.shape[1])
