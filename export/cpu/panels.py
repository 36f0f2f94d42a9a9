"""Pack weights for the operators of this project, in panels of 16 columns
(``runtime/operators/SPECIFICATION.md``).

The library of operators packs them. Nothing is rounded. Stored levels, scales and minimums are kept
in the fewest bits that hold them exactly.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.machine import cores
from eesd.runtime.engines.operators import library

FLOAT32, FLOAT16, BFLOAT16, BITS4, BITS5, BITS6, BITS8, PLANES, UPPER = range(9)
"""Numbers of the formats, as the operators define them. The last two have the same bytes, which are
8-bit levels in two 4-bit planes. ``UPPER`` reads only the first plane."""
NARROW, WIDE, SPLIT = range(3)
"""Types of scales and minimums. They are float16, float32, or int8 times a float16 for 256 inputs,
as in K-quants."""
_FLOATS = ("float32", "float16", "bfloat16")
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_LEVELS = ("int8", "uint8")
_STORED = (*_FLOATS, *_LEVELS, *_BLOCKS)
"""Types of stored weights, in the order of the library's numbers."""


@dataclass(frozen=True)
class Packed:
    """A weight in panels.

    Attributes:
        data: The bytes of the panels.
        numbers: The operators' parameters. In order, they are the format, the inputs, the outputs,
            the level of zero, whether each scale is for 16 inputs, the type of scales and minimums,
            and whether there are minimums.
    """

    data: NDArray[np.uint8]
    numbers: tuple[int, ...]


class _Array(ctypes.Structure):
    """The address of an array [inputs, outputs], and the number of bytes between neighbours."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("input_step", ctypes.c_int64),
        ("output_step", ctypes.c_int64),
    )


class _Source(ctypes.Structure):
    """A stored weight. This is ``Source`` in ``runtime/operators/stored.h``."""

    _fields_ = (
        ("type", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("planes", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("values", _Array),
        ("scales", _Array),
        ("minimums", _Array),
    )


def pack_floats(weight: NDArray[np.generic], form: int) -> Packed:
    """Pack floats unchanged.

    Args:
        weight: [inputs, outputs], float32 or 16-bit, in any memory order.
        form: One of the first three formats.

    Raises:
        ValueError: The weight has another type.
        EESDError: The library of operators is not built.
    """
    if weight.dtype.itemsize != (4 if form == FLOAT32 else 2) or not 0 <= form < len(_FLOATS):
        raise ValueError(f"floats of the format {form} cannot be {weight.dtype}")
    return _pack(_Source(form, *weight.shape, values=_array(weight)))


def pack_levels(
    levels: NDArray[np.integer[Any]],
    scales: NDArray[np.float32],
    minimums: NDArray[np.float32] | None = None,
    planes: bool = False,
) -> Packed:
    """Pack levels in the narrowest format that holds them. The value of input i in column j is
    ``scale * level + minimum``. Arrays may have any memory order.

    Args:
        levels: [inputs, outputs] int8 or uint8.
        scales: [inputs / block, outputs] float32.
        minimums: [inputs / block, outputs] float32, or None if all minimums are zero.
        planes: Whether to put 8-bit levels into two planes if this is possible.

    Raises:
        ValueError: The arrays do not fit each other, or a scale or minimum is not finite.
        EESDError: The library of operators is not built.
    """
    values = _array(levels)
    kind = levels.dtype.name
    if kind not in _LEVELS:
        raise ValueError(f"levels of {kind} cannot be packed")
    for part in (scales, scales if minimums is None else minimums):
        if part.dtype != np.float32 or part.shape != (len(scales), levels.shape[1]):
            raise ValueError("scales and minimums are float32 of one shape")
    source = _Source(_STORED.index(kind), *levels.shape, len(scales), planes, 0, values)
    source.scales = _array(scales)
    if minimums is not None:
        source.minimums = _array(minimums)
    return _pack(source)


def pack_gguf(
    blocks: NDArray[np.uint8], kind: str, shape: tuple[int, int], planes: bool = False
) -> Packed:
    """Pack a tensor of a GGUF file without another copy.

    Args:
        blocks: Bytes of the tensor, in memory or mapped.
        kind: Type of the blocks, from ``Q4_0`` to ``Q6_K``.
        shape: Numbers of outputs and inputs, as in the file.
        planes: As in :func:`pack_levels`.

    Raises:
        ValueError: There are no such blocks, or a scale or minimum is not finite.
        EESDError: The library of operators is not built.
    """
    if kind not in _BLOCKS:
        raise ValueError(f"blocks of the type {kind} cannot be packed")
    values = _Array(blocks.ctypes.data)
    return _pack(_Source(_STORED.index(kind), *shape[::-1], 0, planes, blocks.nbytes, values))


def _array(array: NDArray[Any]) -> _Array:
    if array.ndim != 2:
        raise ValueError(f"a weight has two dimensions, not {array.ndim}")
    return _Array(array.ctypes.data, *array.strides)


def _pack(source: _Source) -> Packed:
    """Pack a weight. The caller must keep its arrays in memory."""
    numbers = (ctypes.c_int64 * 8)()
    threads = ctypes.c_int64(cores())
    _call("eesd_plan", ctypes.byref(source), threads, numbers)
    *described, size = numbers
    data = np.empty(size, np.uint8)
    target = ctypes.c_void_p(data.ctypes.data)
    _call("eesd_pack", ctypes.byref(source), threads, numbers, target)
    return Packed(data, tuple(described))


def _call(name: str, *arguments: Any) -> None:
    function = library()[name]
    function.restype = ctypes.c_char_p
    refusal = function(*arguments)
    if refusal is not None:
        raise ValueError(refusal.decode())
