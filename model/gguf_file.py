"""Read GGUF files, the model files of llama.cpp. The metadata are read first, and each tensor on
demand.

A file begins with ``GGUF``, a version, and the numbers of tensors and of metadata. The metadata
follow, then a table of the tensors, and then the data of the tensors. All numbers are
little-endian. A tensor of a quantized type consists of blocks of 32 or 256 consecutive inputs of
one output. The ``gguf`` library dequantizes them. Their levels, scales and minimums can also be
read without dequantizing.

The header is parsed here, because ``gguf.GGUFReader`` trusts the lengths in a damaged file
(decision 0124).
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.errors import EESDError
from eesd.common.machine import pip_install
from eesd.common.quantization import BITS, MXFP4, Quantization
from eesd.model.arrays import NUMPY_TYPES, Array, all_finite, transposed
from eesd.model.gguf_parts import part_of
from eesd.model.quantized import Quantized, pack
from eesd.model.safetensors_file import DTYPES, FINGERPRINTED, CheckpointTensor

OWN_LEVELS = {
    "Q4_0": Quantization("int4", 32, scales="float16"),
    "Q4_1": Quantization("uint4", 32, minimums=True, scales="float16"),
    "Q5_0": Quantization("int8", 32, scales="float16"),
    "Q5_1": Quantization("int8", 32, minimums=True, scales="float16"),
    "Q8_0": Quantization("int8", 32, scales="float16"),
    "Q2_K": Quantization("uint4", 16, minimums=True, scales="float32"),
    "Q3_K": Quantization("int4", 16, scales="float32"),
    "Q4_K": Quantization("uint4", 32, minimums=True, scales="float32"),
    "Q5_K": Quantization("int8", 32, minimums=True, scales="float32"),
    "Q6_K": Quantization("int8", 16, scales="float32"),
    "MXFP4": MXFP4,
}
"""The smallest element types that hold the levels of each quantized type. Scales of K-quants are
products of a float16 and an integer, which float32 holds exactly."""
QUANTIZED = tuple(OWN_LEVELS)
"""The supported types of quantized tensors."""
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of the metadata types with a fixed size."""
_STRING = 8
_ARRAY = 9
_VERSIONS = (2, 3)
_NUMBER = "split.no"
_COUNT = "split.count"
_ALIGNMENT = 32
"""Default alignment of the data."""


def _library() -> Any:
    """Import the ``gguf`` library, which only GGUF files need."""
    try:
        import gguf
    except ImportError:
        raise EESDError(
            f"Reading a GGUF file needs gguf; install it with: {pip_install('export')}."
        ) from None
    return gguf


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file, or of all files of a split model.

    Attributes:
        path: The file, or the first of several.
        metadata: The values by key. A value is a number, a boolean, a string, or a list.
        tensors: Stored tensors by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, CheckpointTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file. For a model in several files, give the first file. The
    headers of all files are then read.

    Raises:
        EESDError: The file has another format, byte order or version, or is truncated or damaged.
            It may also not be the first part of a model, or the other parts may be missing or not
            fit it.
    """
    first = _read_header(path)
    count = first.metadata.get(_COUNT, 0)
    if count in (0, 1):
        return first
    if type(count) is not int or not 0 < count < 10**5:
        raise EESDError(
            f"{path} has a {_COUNT} that is not a number of parts; fetch the file again."
        )
    if first.metadata.get(_NUMBER) != 0 or path != part_of(path, 1, count):
        raise EESDError(
            f"{path} is one of the {count} parts of a model; give the first one, with its own "
            f"name: {part_of(path, 1, count).name}."
        )
    files = [first, *(_read_part(path, number, count) for number in range(2, count + 1))]
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    total = first.metadata.get("split.tensors.count")
    if not len(tensors) == sum(len(file.tensors) for file in files) == total:
        raise EESDError(
            f"{path} and the parts beside it have {len(tensors)} tensors, and the first one says "
            f"{shown(total)}; they are of different models, fetch all of them again."
        )
    return replace(first, tensors=tensors)


def _read_part(first: Path, number: int, count: int) -> GgufFile:
    """Return the path of part ``number`` of a model (counted from 1), given the path of the first
    part."""
    path = part_of(first, number, count)
    if not path.is_file():
        raise EESDError(
            f"{first} is the first of {count} parts, and {path.name} is missing beside it; "
            "fetch it."
        )
    found = _read_header(path)
    if (found.metadata.get(_NUMBER), found.metadata.get(_COUNT)) != (number - 1, count):
        raise EESDError(f"{path} is not part {number} of {count} of a model; fetch it again.")
    return found


def _read_header(path: Path) -> GgufFile:
    with path.open("rb") as file:
        header = _Header(file, path)
        if file.read(4) != b"GGUF":
            raise EESDError(
                f"{path} is neither a directory nor a GGUF file; give a Hugging Face model "
                "directory or a GGUF file."
            )
        version = header.number("I")
        if version not in _VERSIONS:
            kind = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
            raise EESDError(
                f"{path} {kind}; supported are little-endian GGUF files of the versions 2 and 3."
            )
        num_tensors = header.number("Q")
        num_values = header.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = header.text()
            if key in metadata:
                raise header.damaged(f"{key[:80]!r} is given twice")
            metadata[key] = header.value(header.number("I"))
        entries = [header.entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise header.damaged("general.alignment is not a size")
        start = -(-file.tell() // alignment) * alignment
        tensors = {entry[0]: header.tensor(start, *entry) for entry in entries}
    if len(tensors) < len(entries):
        raise header.damaged("two tensors have the same name")
    return GgufFile(path, metadata, tensors)


class _Header:
    """Reads a header from beginning to end. A length that exceeds the file is refused."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = path.stat().st_size

    def damaged(self, reason: str) -> EESDError:
        return EESDError(f"{self._path} is damaged: {reason}; fetch the file again.")

    def number(self, form: str) -> Any:
        return self._numbers(form, 1)[0]

    def text(self) -> str:
        try:
            return self._bytes(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.damaged("a text in its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Read a value of the metadata."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.damaged(f"its metadata have a value of type {kind}")
        kind = self.number("I")
        count = self.number("Q")
        if kind in _SCALARS:
            return list(self._numbers(_SCALARS[kind], count))
        if kind != _STRING:
            raise self.damaged(f"its metadata have a list of type {kind}")
        # The file's size limits the list, because each string takes at least the bytes of its
        # length field.
        return [self.text() for _ in range(count)]

    def entry(self) -> tuple[str, tuple[int, ...], str, int]:
        """Read the name, the shape, the type and the offset of a tensor. (In the file, a shape
        starts with the innermost dimension.)"""
        name = self.text()
        shape = self._numbers("Q", self.number("I"))[::-1]
        number, offset = self.number("I"), self.number("Q")
        try:
            return name, shape, _library().GGMLQuantizationType(number).name, offset
        except ValueError:
            return name, shape, f"type {number}", offset

    def tensor(
        self, start: int, name: str, shape: tuple[int, ...], stored: str, offset: int
    ) -> CheckpointTensor:
        """Return a tensor of a file whose data begin at ``start``."""
        nbytes = 0  # tensors of unknown types cannot be read
        if stored in _library().GGMLQuantizationType.__members__:
            values, size = _library().GGML_QUANT_SIZES[_library().GGMLQuantizationType[stored]]
            if not shape or prod(shape) == 0 or shape[-1] % values:
                raise self.damaged(
                    f"the tensor {name[:80]} has a shape that its type {stored} cannot have"
                )
            nbytes = prod(shape) // values * size
        if start + offset + nbytes > self._size:
            raise EESDError(
                f"{self._path} is truncated: the tensor {name[:80]} ends past the end of the "
                "file; fetch it again."
            )
        return CheckpointTensor(self._path, name, start + offset, nbytes, shape, stored)

    def _numbers(self, form: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self._bytes(count * struct.calcsize(form)))

    def _bytes(self, length: int) -> bytes:
        if length > self._size - self._file.tell():
            raise EESDError(
                f"{self._path} is truncated or damaged: its header goes beyond the end; fetch "
                "the file again."
            )
        return self._file.read(length)


class GgufTensor:
    """A tensor of a GGUF file. Reading it dequantizes it, or reorders its rows or columns.

    Args:
        stored: The stored tensor.
        order: For each row, the index of the stored row. None stands for all rows in the stored
            order.
        columns: The same for columns.

    Attributes:
        name: Name in the file.
        shape: Shape of the tensor.
        nbytes: Length of the data in the file.
    """

    def __init__(
        self,
        stored: CheckpointTensor,
        order: NDArray[np.int64] | None = None,
        columns: NDArray[np.int64] | None = None,
    ) -> None:
        self.name = stored.name
        rows = stored.shape[:1] if order is None else (len(order),)
        self.shape = (*rows, *stored.shape[1:])
        self.nbytes = stored.nbytes
        self._stored = stored
        self._order = order
        self._columns = columns

    @property
    def dtype(self) -> str:
        """Element type that :meth:`read` returns. Raises :class:`EESDError` if the stored type is
        not supported."""
        if self._stored.stored in DTYPES:
            return self._stored.dtype
        if self._stored.stored not in QUANTIZED or len(self.shape) != 2:
            raise EESDError(
                f"{self._stored.path}: the tensor {self.name} of {len(self.shape)} dimensions "
                "is stored as "
                f"{self._stored.stored}, which is not supported; supported are F32, F16, "
                "BF16, and for matrices "
                f"{', '.join(QUANTIZED)}."
            )
        return "float32"

    def rows(self, start: int, stop: int) -> "GgufTensor":
        """Return some rows of a tensor in stored order. They are read from the same file."""
        assert self._order is None
        row = self.nbytes // max(self.shape[0], 1)
        offset = self._stored.offset + start * row
        shape = (stop - start, *self.shape[1:])
        return GgufTensor(
            replace(self._stored, offset=offset, nbytes=(stop - start) * row, shape=shape)
        )

    def reordered(self, order: NDArray[np.int64]) -> "GgufTensor":
        """Return the rows of the tensor in this order."""
        assert self._columns is None
        return GgufTensor(self._stored, order if self._order is None else self._order[order])

    def with_columns(self, order: NDArray[np.int64]) -> "GgufTensor":
        """Return the columns of a matrix in this order."""
        assert self._columns is None
        return GgufTensor(self._stored, self._order, order)

    def matrices_below_each_other(self) -> "GgufTensor":
        """Return one tensor [count rows, columns] that stacks several matrices
        [count, rows, columns]."""
        assert self._order is None
        return GgufTensor(replace(self._stored, shape=(prod(self.shape[:-1]), self.shape[-1])))

    @property
    def quantization(self) -> Quantization | None:
        """The quantization with the stored levels of a linear weight, or None for a tensor of
        floats. It is also None if columns that share a scale are no longer next to each other."""
        own = OWN_LEVELS.get(self._stored.stored)
        if own is None or self._columns is None:
            return own
        groups = self._columns.reshape(-1, own.block)
        first = groups[:, :1]
        fits = (first % own.block == 0).all() and (groups == first + np.arange(own.block)).all()
        return own if fits else None

    def read(self) -> Array:
        """Read the tensor. A quantized tensor becomes float32.

        Raises:
            EESDError: The file is truncated, or a value is infinite or not a number.
        """
        return self._stored.checked(self._values(self._rows(self.shape[0])))

    def head(self) -> bytes:
        """The first kilobyte of the read tensor, for the fingerprint. It is the same as for a
        safetensors checkpoint with these values."""
        row = prod(self.shape[1:]) * NUMPY_TYPES[self.dtype].itemsize
        rows = self._rows(min(-(-FINGERPRINTED // row), self.shape[0]))
        return self._values(rows).tobytes()[:FINGERPRINTED]

    def levels(self, quantization: Quantization, is_transposed: bool = True) -> Quantized | None:
        """Return the stored levels if the quantization equals the file's, or differs only in that
        its levels have 8 bits.

        Args:
            quantization: The wanted quantization.
            is_transposed: Whether to return levels [in, out]. If not, they are [out, in], as for an
                embedding table.

        Raises:
            EESDError: The file is truncated, or a scale or minimum is infinite or not a number.
        """
        if not self._keeps(quantization):
            return None
        return self._stored_levels(quantization.weights, is_transposed)

    def blocks(self, quantization: Quantization) -> tuple[str, NDArray[np.uint8]] | None:
        """Return the type of the stored blocks and the bytes of all rows [rows, bytes]. The result
        is None unless :meth:`levels` would return the levels and the operator library packs such
        blocks."""
        if not self._keeps(quantization) or self.quantization == MXFP4:
            return None
        if self._columns is not None:  # cuts blocks of 256 columns
            return None
        return self._stored.stored, self._rows(self.shape[0])

    def _keeps(self, quantization: Quantization) -> bool:
        own = self.quantization
        if own is None or own == MXFP4:  # 8-bit integers cannot hold the levels of MXFP4
            return quantization == own
        return quantization in (own, replace(own, weights="int8"))

    def _stored_levels(self, kind: str, is_transposed: bool) -> Quantized:
        """Return the stored levels as this element type, with their scales and minimums."""
        rows = self._rows(self.shape[0])
        size = _library().GGML_QUANT_SIZES[_library().GGMLQuantizationType[self._stored.stored]][1]
        with np.errstate(all="ignore"):  # damaged scales are reported below
            found = _unpack_blocks(self._stored.stored, rows.reshape(-1, size))
        levels = self._in_order(found[0].view(np.uint8).reshape(self.shape[0], -1))
        shared = [
            None if part is None else self._in_order(part.reshape(self.shape[0], -1))
            for part in found[1:]
        ]
        for part in shared:
            if part is not None and not all_finite(part):
                raise EESDError(
                    f"{self._stored.path}: the tensor {self.name} has scales or minimums that "
                    "are not finite numbers; fetch it again."
                )
        if is_transposed:
            levels = transposed(levels)
            shared = [None if part is None else transposed(part) for part in shared]
        scales, minimums = shared
        assert scales is not None
        return Quantized(pack(levels, BITS[kind]), scales, minimums=minimums)

    def _in_order(self, values: Array) -> Array:
        """Return the columns of a matrix in order. A column of ``values`` belongs to one or to
        several columns of the tensor."""
        if self._columns is None:
            return values
        width = self.shape[-1] // values.shape[1]
        return np.ascontiguousarray(values[:, self._columns[::width] // width])

    def _rows(self, count: int) -> NDArray[np.uint8]:
        """Return the bytes of the first rows, in order."""
        order = None if self._order is None else self._order[:count]
        last = count if order is None else int(order.max()) + 1
        size = self.nbytes // self._stored.shape[0]
        stored = self._stored.read_bytes(last * size).reshape(last, size)
        return stored if order is None else stored[order]

    def _values(self, rows: NDArray[np.uint8]) -> Array:
        shape = (len(rows), *self.shape[1:])
        if self.dtype != "float32" or self._stored.stored in DTYPES:
            return self._in_order(rows.view(NUMPY_TYPES[self.dtype]).reshape(shape))
        with np.errstate(all="ignore"):  # damaged scales are reported as non-finite values
            values: Array = _library().dequantize(
                rows, _library().GGMLQuantizationType[self._stored.stored]
            )
            return self._in_order(values.reshape(shape))


def _unpack_blocks(
    kind: str, blocks: NDArray[np.uint8]
) -> tuple[NDArray[np.int8], NDArray[np.floating[Any]], NDArray[np.floating[Any]] | None]:
    """Return the levels, scales and minimums of blocks [count, bytes] of a type, in order.
    ggml-common.h defines the blocks."""
    if kind == "MXFP4":
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
        return _fields(blocks[:, 1:], 16, (0, 4), 4).view(np.int8), scales, None
    if kind in _K_QUANTS:
        return _K_QUANTS[kind](blocks)
    minimums = _halves(blocks, 2) if kind.endswith("_1") else None
    scales = _halves(blocks, 0)
    rest = blocks[:, 2 if minimums is None else 4 :]
    if kind == "Q8_0":
        return rest.view(np.int8), scales, minimums
    middle = {"Q4_0": np.int8(8), "Q5_0": np.int8(16)}.get(kind, np.int8(0))
    if kind.startswith("Q4"):
        return _fields(rest, 16, (0, 4), 4).view(np.int8) - middle, scales, minimums
    high = np.unpackbits(rest[:, :4], axis=1, bitorder="little")
    levels = _fields(rest[:, 4:], 16, (0, 4), 4) | high << 4
    return levels.view(np.int8) - middle, scales, minimums


def _q2_k(
    blocks: NDArray[np.uint8],
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    scale, least = (_halves(blocks, at).astype(np.float32) for at in (80, 82))
    levels = _fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 2).view(np.int8)
    return levels, scale * (blocks[:, :16] & 15), -(least * (blocks[:, :16] >> 4))


def _q3_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.float32], None]:
    high = _fields(blocks[:, :32], 32, range(8), 1).view(np.int8)
    levels = _fields(blocks[:, 32:96], 32, (0, 2, 4, 6), 2).view(np.int8) + 4 * high - np.int8(4)
    scales = (
        _fields(blocks[:, 96:104], 8, (0, 4), 4)
        | _fields(blocks[:, 104:108], 4, (0, 2, 4, 6), 2) << 4
    )
    return levels, _halves(blocks, 108).astype(np.float32) * (scales.astype(np.float32) - 32), None


def _q4_k(
    blocks: NDArray[np.uint8],
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    return _fields(blocks[:, 16:], 32, (0, 4), 4).view(np.int8), *_k_scales(blocks)


def _q5_k(
    blocks: NDArray[np.uint8],
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    levels = (
        _fields(blocks[:, 48:], 32, (0, 4), 4) | _fields(blocks[:, 16:48], 32, range(8), 1) << 4
    )
    return levels.view(np.int8), *_k_scales(blocks)


def _q6_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.float32], None]:
    levels = (
        _fields(blocks[:, :128], 64, (0, 4), 4)
        | _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 2) << 4
    )
    scales = _halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return levels.view(np.int8) - np.int8(32), scales, None


_K_QUANTS = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


def _k_scales(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the 8 scales and the 8 minimums of each block of Q4_K or Q5_K. Each has 6 bits. The
    upper two bits of the last four are stored separately."""
    scale, least = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    low = blocks[:, 12:16]
    scales = np.concatenate((first & 63, (low & 15) | (first >> 6) << 4), axis=1)
    minimums = np.concatenate((second & 63, (low >> 4) | (second >> 6) << 4), axis=1)
    return scale * scales, -(least * minimums)


def _halves(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float16]:
    """Return the float16 value at an offset within each block [count, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _fields(
    data: NDArray[np.uint8], group: int, shifts: Sequence[int], bits: int
) -> NDArray[np.uint8]:
    """Return bit fields of bytes [count, bytes]. For each group of bytes, all fields at the first
    shift come first, then all fields at the second shift."""
    shift = np.array(shifts, np.uint8)[:, None]
    fields = (data.reshape(len(data), -1, 1, group) >> shift) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)
