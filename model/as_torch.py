"""Conversion of the arrays of checkpoints to torch's tensors."""

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
"""NumPy types that torch does not convert. Each has an integer type with the same bits, and the
type in torch."""


def as_torch(values: Array) -> Tensor:
    """Return a tensor over the memory of an array."""
    bits = _BITS.get(values.dtype)
    with warnings.catch_warnings():
        # torch warns that mapped pages of a file are read-only.
        warnings.simplefilter("ignore")
        if bits is None:
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(bits[0])).view(bits[1])
