"""Read safetensors files tensor by tensor.

Plain reads replace the memory maps of safetensors. Mapped pages would count as resident memory, and
plain reads keep the peak at the size of one tensor. Tensors are read only on demand.
"""

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from eesd.common.errors import EESDError
from eesd.model.arrays import NUMPY_TYPES, Array, all_finite

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Element types by their names in the format."""
FINGERPRINTED = 1024
"""Number of bytes of each tensor that enter the fingerprint of a model."""
_MAX_HEADER = 100_000_000
"""The format's limit. A longer header means another format."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor in a safetensors or GGUF file.

    Attributes:
        path: The file.
        name: Name of the tensor.
        offset: Offset of the data in the file, in bytes.
        nbytes: Length of the data in bytes.
        shape: Shape of the tensor.
        stored: Element type as the format names it, such as ``BF16``. GGUF's floating-point types
            have the same names.
    """

    path: Path
    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stored: str

    @property
    def dtype(self) -> str:
        """Element type of the tensor. Raises :class:`EESDError` if it is not a floating-point
        type."""
        if self.stored not in DTYPES:
            raise EESDError(
                f"{self.path}: the tensor {self.name} is stored as {self.stored}; supported "
                f"are {', '.join(DTYPES)} "
                "(give the unquantized checkpoint)."
            )
        return DTYPES[self.stored]

    def read(self) -> Array:
        """Read the tensor into memory.

        Raises:
            EESDError: The file is truncated, or a value is infinite or not a number.
        """
        dtype = NUMPY_TYPES[self.dtype]
        return self.checked(self.read_bytes().view(dtype).reshape(self.shape))

    def checked(self, values: Array) -> Array:
        """Return these values if all are finite. Raises :class:`EESDError` if a value is infinite
        or NaN."""
        if not all_finite(values):
            raise EESDError(
                f"{self.path}: the tensor {self.name} has values that are not finite numbers; "
                "fetch it again."
            )
        return values

    def read_bytes(self, length: int | None = None) -> NDArray[np.uint8]:
        """Read the first ``length`` bytes of the tensor, or all bytes. The tensor can have any
        type. Raises :class:`EESDError` if the file is truncated."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = np.empty(self.nbytes if length is None else min(length, self.nbytes), np.uint8)
            if file.readinto(data.data) != len(data):
                raise EESDError(f"{self.path} is truncated; fetch the file again.")
        return data

    def rows(self, start: int, stop: int) -> "CheckpointTensor":
        """Return some rows as a tensor over bytes of the same file."""
        row = self.nbytes // max(self.shape[0], 1)
        return replace(
            self,
            offset=self.offset + start * row,
            nbytes=(stop - start) * row,
            shape=(stop - start, *self.shape[1:]),
        )

    def head(self) -> bytes:
        """The first kilobyte of the tensor, for the fingerprint."""
        return self.read_bytes(FINGERPRINTED).tobytes()


def read_header(path: Path) -> dict[str, CheckpointTensor]:
    """Find the tensors of a safetensors file. The file has 8 bytes with the length of the header,
    then the header in JSON, then the data.

    Raises:
        EESDError: The file is missing, truncated or damaged, or has another format.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise EESDError(
            f"{path} is missing; the checkpoint is incomplete, fetch it again."
        ) from None
    if not path.is_file():
        raise EESDError(f"{path} is not a file; fetch it again.")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            problem = "truncated" if length <= _MAX_HEADER else "not a safetensors file"
            raise EESDError(
                f"{path} is {problem}; fetch the file again (only safetensors checkpoints are "
                "supported)."
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise EESDError(
                f"{path} is not a safetensors file; only safetensors checkpoints are supported."
            ) from None
    try:
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        tensors = {name: _tensor(path, 8 + length, size, name, entry) for name, entry in entries}
        # The library detects other faults, such as overlapping tensors.
        with safe_open(path, "numpy"):
            return tensors
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise EESDError(
            f"{path} is damaged: its header is invalid; fetch the file again."
        ) from None
    except SafetensorError as error:
        raise EESDError(
            f"{path} is damaged, and the safetensors library refuses it ({error}); fetch the "
            "file again."
        ) from None


def _tensor(path: Path, base: int, size: int, name: str, entry: dict[str, Any]) -> CheckpointTensor:
    """One entry of a header. The file has ``size`` bytes, and its data begin at ``base``."""
    stored = str(entry["dtype"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(length) for length in entry["shape"])
    if base + end > size:
        raise EESDError(
            f"{path} is truncated: the tensor {name} ends past the end of the file; fetch it again."
        )
    # Tensors of other types cannot be read, but do no harm.
    wrong = stored in DTYPES and end - start != prod(shape) * NUMPY_TYPES[DTYPES[stored]].itemsize
    if start < 0 or end < start or min(shape, default=0) < 0 or wrong:
        raise EESDError(
            f"{path} is damaged: the tensor {name} has the wrong number of bytes; fetch it again."
        )
    return CheckpointTensor(path, name, base + start, end - start, shape, stored)
