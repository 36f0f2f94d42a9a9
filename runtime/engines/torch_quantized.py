"""Linear layers of the torch engine whose weights stay quantized in a GPU's memory.

The levels are arranged for the kernel of ``torch_kernel.py`` when they are loaded. That file needs
Triton, which comes with torch's wheels for Linux. :func:`fault_of_kernel` tests whether Triton
works. This file can be imported without Triton.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from eesd.common.quantization import BITS, Quantization
from eesd.model.arrays import NUMPY_TYPES
from eesd.model.as_torch import as_torch
from eesd.model.quantized import Quantized, dequantize, fields

TYPES = ("float16", "bfloat16")
"""The element types of directories whose weights stay quantized. float32 on a GPU is only for
comparisons."""
PANEL = 128
"""Number of outputs that a program of the kernel computes."""
WORDS = 16
"""Number of 32-bit words per output in a step, which is also the number of inputs of a product and
the minimum size of a block."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [in, out] in the kernel's form; see
    :func:`~eesd.runtime.engines.torch_kernel.multiply`."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    minimums: Tensor | None
    bits: int
    middle: int


def arranged(
    weight: Quantized, quantization: Quantization, device: torch.device
) -> QuantizedWeight:
    """Move a weight to a device, and arrange its levels there as the kernel reads them.

    Args:
        weight: The stored tensors of a weight [in, out].
        quantization: Its quantization.
        device: The device.
    """
    kind = quantization.weights
    bits = BITS[quantization.weights]
    blocks, outputs = weight.scales.shape
    inputs = blocks * quantization.block
    levels = as_torch(weight.levels).to(device)
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), -1).view(-1)[: inputs * outputs]
    levels = levels.view(inputs, outputs)
    signed = not kind.startswith("u")
    middle = 1 << (bits - 1) if signed else 0
    zeros = None
    if weight.zeros is not None:
        found = fields(weight.zeros)[: blocks * outputs].reshape(blocks, outputs)
        zeros = as_torch(found).to(device)
    return QuantizedWeight(
        _words(levels ^ middle, bits),  # the level -128 or -8 becomes 0
        as_torch(weight.scales).to(device),
        zeros,
        None if weight.minimums is None else as_torch(weight.minimums).to(device),
        bits,
        middle,
    )


def _words(levels: Tensor, bits: int) -> Tensor:
    """Return unsigned levels [in, out] (one byte each) in the form that ``multiply`` takes."""
    inputs, outputs = levels.shape
    count = 32 // bits
    levels = nn.functional.pad(levels, (0, -outputs % PANEL, 0, -inputs % (WORDS * count)))
    apart = levels.view(-1, count, WORDS, levels.shape[1] // PANEL, PANEL).permute(1, 3, 0, 4, 2)
    words = torch.zeros(apart.shape[1:], dtype=torch.int32, device=levels.device)
    for number, part in enumerate(apart):
        words |= part.int() << (number * bits)
    return words


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight. It may be the first of several layers that read the
    same input.

    The first layer then computes one product with the outputs of all layers side by side. The other
    layers are :class:`ComputedBefore`.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, out_features: int) -> None:
        """Take the weight and the bias of all layers. ``out_features`` is the number of outputs of
        the first layer."""
        super().__init__()
        self.out_features = out_features
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., out] for inputs x [..., in]."""
        y = product(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class ComputedBefore(nn.Module):
    """A linear layer whose outputs an earlier :class:`QuantizedLinear` has computed. It has no
    outputs itself."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :0]


def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Multiply x [n, in] by a weight. Returns the product [n, out] in the type of x."""
    from eesd.runtime.engines.torch_kernel import multiply

    return multiply(
        x.contiguous(),
        weight.levels,
        weight.scales,
        weight.zeros,
        weight.minimums,
        weight.bits,
        weight.middle,
    )


@cache
def fault_of_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason, as a clause, why a device cannot multiply by quantized weights. Return
    None if it can.

    The function tries the kernel, because Triton also needs a supported driver, a C compiler, and a
    writable folder.
    """
    scales = np.linspace(0.01, 0.3, 3 * 48, dtype=np.float32).reshape(3, 48)
    stored = Quantized(
        np.arange(96 * 48 // 2).astype(np.uint8),
        scales.astype(NUMPY_TYPES[str(dtype).removeprefix("torch.")]),
    )
    x = torch.ones((2, 96), dtype=dtype, device=device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            found = product(x, arranged(stored, Quantization("int4", 32), device)).float().cpu()
    except ImportError:
        return "Triton is not installed"
    except Exception as error:  # this may be any error of a compiler, a driver or a file system
        return (
            "Triton fails on it "
            f"({str(error).strip().partition(chr(10))[0] or type(error).__name__})"
        )
    expected = as_torch(dequantize(stored, "int4")).to(dtype).float().sum(0)
    return (
        None
        if torch.allclose(found, expected.expand(2, -1), atol=0.05, rtol=0.01)
        else "Triton multiplies wrongly on it"
    )
