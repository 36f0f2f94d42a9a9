"""Compares the products of the kernel for quantized weights with the products of dequantized
weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eesd.common.quantization import BITS, Quantization
from eesd.model.arrays import rounded
from eesd.model.as_torch import as_torch
from eesd.model.quantized import Quantized, dequantize
from eesd.runtime.engines.torch_quantized import arranged, product

ROWS = (1, 5, 16, 33, 70)
"""Numbers of rows. The last number needs two programs, and all others need one program."""


@dataclass(frozen=True)
class Case:
    """A weight [inputs, outputs]."""

    quantization: Quantization
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.quantization.description}, {self.inputs} x {self.outputs}"


CASES = (
    Case(Quantization("int8", 32), 96, 33),
    Case(Quantization("int8", 64, scales="float32"), 192, 64),
    Case(Quantization("int4", 32), 160, 70),
    Case(Quantization("int4", 128, scales="float32"), 256, 40),
    Case(Quantization("int4", 16), 48, 31),
    Case(Quantization("int4", 32), 1120, 40),
    Case(Quantization("uint4", 32, minimums=True, scales="float16"), 96, 45),
    Case(Quantization("uint4", 16, minimums=True), 144, 64),
    Case(Quantization("uint4", 128), 256, 37),
    Case(Quantization("uint4", 64), 64, 24),
)
"""The cases have every type of levels with each kind of scales, zero points and minimums. Some
numbers of outputs are odd, and some are not multiples of a panel."""


def random_weight(quantization: Quantization, inputs: int, outputs: int, dtype: str) -> Quantized:
    """Returns a weight with any levels. It is scaled so that products have about the size of their
    inputs."""
    kind = quantization.weights
    shape = (inputs // quantization.block, outputs)
    size = 2.0 ** (1 - BITS[kind]) * inputs**-0.5
    random = np.random.default_rng(0)
    scales = rounded(size * (0.5 + random.random(shape)), quantization.scales or dtype)
    zeros = (
        random.integers(256, size=(scales.size + 1) // 2, dtype=np.uint8)
        if quantization.zero_points
        else None
    )
    minimums = (
        (-8 * size * random.random(shape)).astype(scales.dtype) if quantization.minimums else None
    )
    levels = random.integers(256, size=inputs * outputs * BITS[kind] // 8, dtype=np.uint8)
    return Quantized(levels, scales, zeros, minimums)


def all_checked(device: str) -> dict[str, dict[str, Any]]:
    """Returns the results of :func:`checked`. The CPU interpreter does not round to bfloat16, and
    multiplies its bits as integers."""
    dtypes = ("float16",) if device == "cpu" else ("float16", "bfloat16")
    return {f"{dtype}: {case}": checked(case, dtype, device) for dtype in dtypes for case in CASES}


def checked(case: Case, of: str, device: str) -> dict[str, Any]:
    """Returns the error of products relative to exact products of the dequantized weights, and
    whether rows depend on each other.

    ``error`` is the largest difference, divided by the error that float32 sums and one rounding to
    the activations' type can cause.
    """
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, of)
    stored = random_weight(case.quantization, case.inputs, case.outputs, of)
    weight = arranged(stored, case.quantization, torch.device(device))
    x = torch.randn(ROWS[-1], case.inputs).to(dtype)
    found = {rows: product(x[:rows].to(device), weight).cpu() for rows in ROWS}
    factors = as_torch(dequantize(stored, case.quantization.weights)).to(dtype).double()
    exact = x.double() @ factors
    every = found[ROWS[-1]]
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5 * (x.double().abs() @ factors.abs())
    return {
        "error": float(((every.double() - exact).abs() / allowed).max()),
        "rows do not depend on each other": all(
            torch.equal(found[rows], every[:rows]) for rows in ROWS
        ),
    }
