"""Weight-only quantization of linear layers: symmetric int8 or int4 with one scale for each block of 32 weights.

A block is 32 consecutive inputs of one output. Weights are stored as [in, out], so this is the layout of ONNX's blockwise
``DequantizeLinear`` with axis 0. The scale maps the block's largest weight to the end of the range. Rounding to nearest then
changes no weight by more than half a scale.
"""

import torch
from torch import Tensor

from eesd.common.weights import BITS, BLOCK

LEVELS = {"int8": 127, "int4": 7}
"""Largest level. The range is symmetric: -128 and -8 are not used."""
_PIECE = 1 << 21
"""Number of weights that are converted to float32 at a time."""


def quantize(weight: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize a weight, piece by piece, so that only the arguments and the results take much memory.

    Args:
        weight: Weight [out, in]; ``in`` must be a multiple of 32.
        kind: ``int8`` or ``int4``.
        dtype: Element type of the scales.

    Returns:
        The levels and the scales. The levels are the bytes of a tensor [in, out]; int4 has two levels in a byte, the first in
        the low half. The scales are [in / 32, out].
    """
    outputs, inputs = weight.shape
    stored = torch.empty(inputs * outputs * BITS[kind] // 8, dtype=torch.uint8)
    scales = torch.empty(inputs // BLOCK, outputs, dtype=dtype)
    # Half the smallest subnormal number: for subnormal scales it turns rounding to nearest into rounding up.
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
    """Undo :func:`quantize`.

    Args:
        stored: The levels.
        scales: The scales [in / 32, out].
        kind: ``int8`` or ``int4``.

    Returns:
        The weight [in, out] in the element type of ``scales``.
    """
    levels = stored.view(torch.int8)
    if kind == "int4":
        levels = torch.stack(((levels << 4) >> 4, levels >> 4), -1)
    blocks = levels.view(scales.shape[0], BLOCK, scales.shape[1])
    return (blocks.to(scales.dtype) * scales[:, None]).view(-1, scales.shape[1])
