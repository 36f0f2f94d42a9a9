"""The bridge from arrays, which checkpoints are read as, to the tensors that torch's modules
compute with."""

import warnings

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from eesd.model.arrays import FLOAT8, Array

_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, torch.bfloat16),
    FLOAT8: (np.uint8, torch.float8_e4m3fn),
}
"""Types that torch takes from no array: the integers with their bits, and torch's type."""


def as_torch(values: Array) -> Tensor:
    """A tensor over the memory of an array."""
    bits = _BITS.get(values.dtype)
    with warnings.catch_warnings():
        # Of pages that a file is mapped to: torch warns that nothing may write to them.
        warnings.simplefilter("ignore")
        return (
            torch.from_numpy(values)
            if bits is None
            else torch.from_numpy(values.view(bits[0])).view(bits[1])
        )
