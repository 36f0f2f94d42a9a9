"""Weight-only quantization of linear layers: int8 or int4 in blocks of 32 weights with one scale, symmetric, no zero point.

A block is 32 consecutive inputs of one output, as ONNX's blockwise ``DequantizeLinear`` (axis 0 of weights stored [in, out])
wants it. The scale is that which brings the block's largest weight to the end of the range, so that rounding to nearest
moves no weight by more than half a scale.
"""

import torch
from torch import Tensor

BLOCK = 32
"""Inputs that share a scale: what both ONNX Runtime's and TensorRT's kernels take."""
SCALES = ".scales"
"""What the name of a quantized weight's scales ends with."""
BITS = {"int8": 8, "int4": 4}
LEVELS = {"int8": 127, "int4": 7}
"""Most steps of a scale to either side of zero; -128 and -8 stay unused, so that the range is symmetric."""
_CHUNK = 1 << 22


def quantize(weight: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The levels of ``weight`` [out, in] as int8 [in, out], or for int4 as uint8 [in * out / 2] with two to a byte, the
    first in the low half; and the scales [in / 32, out] in ``dtype``. ``in`` must be a multiple of 32.

    Works through the tensor in pieces: the only large things in memory are what is given and what is returned.
    """
    outputs, inputs = weight.shape
    scales = torch.empty(inputs // BLOCK, outputs, dtype=dtype)
    packed, kinds = kind == "int4", torch.finfo(dtype)
    # Half the least number of the type: among subnormal numbers it turns rounding to the nearest into rounding up.
    half = kinds.smallest_normal * kinds.eps / 2
    stored = torch.empty(inputs * outputs // 2, dtype=torch.uint8) if packed else torch.empty(inputs, outputs, dtype=torch.int8)
    step = BLOCK * max(1, _CHUNK // (BLOCK * outputs))
    for begin in range(0, inputs, step):
        blocks = weight[:, begin : begin + step].t().float().view(-1, BLOCK, outputs)
        scale = (blocks.abs().amax(1) / LEVELS[kind] + half).to(dtype)
        scale[scale == 0] = 1
        levels = (blocks / scale.float()[:, None]).round_().clamp_(-LEVELS[kind], LEVELS[kind]).to(torch.int8)
        scales[begin // BLOCK : (begin + step) // BLOCK] = scale
        if packed:
            low, high = levels.reshape(-1, 2).unbind(1)
            stored[begin * outputs // 2 : (begin + step) * outputs // 2] = ((high << 4) | (low & 15)).view(torch.uint8)
        else:
            stored[begin : begin + step] = levels.reshape(-1, outputs)
    return stored, scales


def dequantize(stored: Tensor, scales: Tensor, kind: str) -> Tensor:
    """What :func:`quantize` made of a weight, as [in, out] in the type of ``scales``."""
    if kind == "int4":
        both = stored.view(torch.int8)
        stored = torch.stack(((both << 4) >> 4, both >> 4), -1)
    levels = stored.view(scales.shape[0], BLOCK, scales.shape[1])
    return (levels.to(scales.dtype) * scales[:, None]).view(-1, scales.shape[1])
