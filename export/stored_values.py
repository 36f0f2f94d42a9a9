"""Read the values of an engine directory's tensors. They are NumPy arrays over mapped pages of its
files."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx.external_data_helper import ExternalDataInfo

from eesd.common.quantization import BITS, FP4, FP8

KINDS = {
    1: "float32",
    3: "int8",
    7: "int64",
    10: "float16",
    16: "bfloat16",
    17: FP8,
    21: "uint4",
    22: "int4",
    23: FP4,
}
"""Element types by their number in ``TensorProto.DataType``."""
_AS_INTEGERS = {"float16": "uint16", "bfloat16": "uint16"} | dict.fromkeys(
    (FP8, FP4, "int4", "uint4"), "uint8"
)
"""NumPy types that represent element types that NumPy lacks. 4-bit types are read as bytes."""
_SMALL = {FP8: ml_dtypes.float8_e4m3fn, FP4: ml_dtypes.float4_e2m1fn}


def read_tensor(directory: Path, tensor: Any) -> tuple[NDArray[Any], str]:
    """Read a stored tensor and its element type. 16-bit values are returned as uint16, and
    :data:`FP8` values are returned as uint8.

    4-bit levels are widened. Integers become int8, and :data:`FP4` levels become their codes. (This
    function is needed because onnx's reader refuses files with several hard links.)

    Args:
        directory: Engine directory.
        tensor: The tensor in a graph, an ``onnx.TensorProto`` with external data.

    Raises:
        KeyError, ValueError, TypeError, OverflowError, OSError: The directory does not have these
            values.
    """
    info = ExternalDataInfo(tensor)
    kind = KINDS[tensor.data_type]
    shape = tuple(tensor.dims)
    if Path(info.location).name != info.location:
        raise ValueError(tensor.name)
    half = BITS[kind] == 4
    count = int(np.prod(shape))
    dtype = _AS_INTEGERS.get(kind, kind)
    size = (count + 1) // 2 if half else count
    if info.length != size * np.dtype(dtype).itemsize:
        raise ValueError(tensor.name)
    raw = np.memmap(
        directory / info.location, dtype, mode="r", offset=info.offset or 0, shape=(size,)
    )
    if not half:
        return raw.reshape(shape), kind
    both = np.stack((raw & 15, raw >> 4), -1).reshape(-1)[:count].view(np.int8)
    if kind == "int4":
        both = (both ^ 8) - 8
    return both.reshape(shape), kind


def to_float32(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """Convert floating-point values of :func:`read_tensor` to float32 without rounding. Other
    values are returned unchanged."""
    if kind == "float16":
        return values.view(np.float16).astype(np.float32)
    if kind == "bfloat16":
        bits = np.empty(values.shape, np.uint32)  # a bfloat16 is the upper half of a float32
        np.left_shift(values, 16, out=bits, dtype=np.uint32)
        return bits.view(np.float32)
    if kind in _SMALL:
        floats: NDArray[np.float32] = values.view(_SMALL[kind]).astype(np.float32)
        return floats
    return values
