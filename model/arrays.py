"""Arrays with the values of tensors. This module has the element types by name, and conversions
that round like torch. The module needs no torch."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eesd.common.machine import cores

Array = NDArray[Any]
Job = TypeVar("Job")

FLOAT8: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
}
"""Element types, by name, of tensors that are not levels."""
_PIECE = 1 << 17
"""Number of values that a thread converts at a time."""
_ROWS = 16
"""Number of rows to transpose at a time. It is the number of float32 values in a cache line of the
processor."""


def in_threads(job: Callable[[Job], None], jobs: Iterable[Job]) -> None:
    """Run jobs on all processors. NumPy releases the GIL while it computes."""
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(job, jobs))


def to_float32(values: Array) -> NDArray[np.float32]:
    """Return the values in float32. They are not copied if they are float32 already."""
    return values.astype(np.float32, copy=False)


@np.errstate(over="ignore")  # callers check for infinite values
def rounded(values: Array, dtype: str) -> Array:
    """Round the values to another type as torch does. Values are rounded to nearest. float64 is
    rounded to 16 bits through float32."""
    if values.dtype == np.float64:
        values = to_float32(values)
    return values.astype(NUMPY_TYPES[dtype], copy=False)


def converted(values: Array, dtype: str) -> Array:
    """:func:`rounded` for large arrays. The result is contiguous."""
    if values.dtype == NUMPY_TYPES[dtype]:
        return np.ascontiguousarray(values)
    found = np.empty(values.shape, NUMPY_TYPES[dtype])
    if values.ndim == 0:
        found[...] = rounded(values, dtype)
        return found
    step = max(1, _PIECE * len(values) // max(values.size, 1))

    def convert(first: int) -> None:
        found[first : first + step] = rounded(values[first : first + step], dtype)

    in_threads(convert, range(0, len(values), step))
    return found


def transposed(values: Array, dtype: str | None = None) -> Array:
    """Return the contiguous transpose of a matrix, optionally in another type. Some rows are
    transposed at a time, which is several times as fast as a plain copy."""
    if values.flags.f_contiguous and dtype in (None, values.dtype.name):
        return values.T
    found = np.empty(values.shape[::-1], values.dtype if dtype is None else NUMPY_TYPES[dtype])

    def transpose(first: int) -> None:
        some = values[first : first + _ROWS]
        found[:, first : first + _ROWS] = (some if dtype is None else rounded(some, dtype)).T

    if values.size <= _PIECE:
        for first in range(0, len(values), _ROWS):
            transpose(first)
    else:
        in_threads(transpose, range(0, len(values), _ROWS))
    return found


def all_finite(values: Array) -> bool:
    """Whether no value is infinite or NaN. Read as integers, such values have the largest bit
    patterns of either sign."""
    size = values.dtype.itemsize
    infinity = int(np.array(np.inf, values.dtype).view(f"u{size}"))
    positive, negative = (values.view(f"{kind}{size}").max(initial=0) for kind in "iu")
    return bool(positive < infinity and negative < infinity | 1 << (8 * size - 1))


def equal(values: Array, others: Array) -> bool:
    """Whether two arrays are equal. The comparison needs little memory, even for large arrays."""
    return values.shape == others.shape and all(map(np.array_equal, values, others))
