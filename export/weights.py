"""Store the weights of an engine directory. They are streamed into ``weights.bin``, or the
checkpoint's files are hard-linked.

Written tensors are cast, transposed and quantized one by one, so only one tensor is in memory.

Linked tensors stay in the checkpoint's files. Only hard links to these files work with every
backend. ONNX Runtime and TensorRT-RTX refuse ``..`` and absolute paths, and ONNX Runtime also
refuses symbolic links that lead out of the directory. A linked directory survives when the
checkpoint is moved, deleted or downloaded again. :class:`eesd.common.manifest.LinkInfo` detects a
file that was modified in place.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from eesd.common.errors import EESDError
from eesd.common.integrity import HashedFile, link_info
from eesd.common.manifest import DRAFT_VOCAB_FILE, WEIGHTS_FILE, FileInfo, LinkInfo
from eesd.common.quantization import EXIT_HEAD, Quantization
from eesd.common.weights import DRAFT_VOCAB, FACTOR, MINIMUMS, SCALES, ZEROS, StoredWeight
from eesd.model.arrays import NUMPY_TYPES, Array, all_finite, converted, transposed
from eesd.model.family import ChangedTensor, StoredTensor
from eesd.model.gguf_file import GgufTensor
from eesd.model.packed import PackedTensor
from eesd.model.quantize import LARGEST, quantize
from eesd.model.quantized import Quantized, join_quantized
from eesd.model.safetensors_file import CheckpointTensor

ALIGNMENT = 4096
"""Alignment of tensors in ``weights.bin``. It is the page size, so that backends can map the
tensors."""


class TensorSource(Protocol):
    """A tensor that can be read or computed."""

    def read(self) -> Array:
        """Return the tensor, without keeping it in memory."""
        ...


class TensorLocation(NamedTuple):
    """Location of a tensor. The tensor has ``length`` bytes at ``offset`` of a file of the engine
    directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class WeightLayout:
    """The content of ``weights.bin``, and the location of every tensor.

    Attributes:
        weights: The weights to write, in order.
        locations: Location of every stored tensor by its name. Linked tensors are included.
        size: Size of ``weights.bin`` in bytes.
    """

    weights: tuple[StoredWeight, ...]
    locations: dict[str, TensorLocation]
    size: int


def layout_weights(
    graphs: Iterable[tuple[StoredWeight, ...]], linked: Mapping[str, CheckpointTensor] | None = None
) -> WeightLayout:
    """Lay out the weights of several graphs. A weight that several graphs use is stored once.

    Args:
        graphs: The weights of each graph.
        linked: Weights that stay in the checkpoint's files, by name.
    """
    locations: dict[str, TensorLocation] = {}
    written: list[StoredWeight] = []
    end = 0
    for weight in chain.from_iterable(graphs):
        if weight.name in locations:
            continue
        # The draft vocabulary is a separate file, which the runtime reads without the graph.
        if weight.name == EXIT_HEAD + DRAFT_VOCAB:
            locations[weight.name] = TensorLocation(DRAFT_VOCAB_FILE, 0, weight.nbytes)
            continue
        if linked and weight.name in linked:
            tensor = linked[weight.name]
            locations[weight.name] = TensorLocation(tensor.path.name, tensor.offset, tensor.nbytes)
            continue
        for name, length in weight.tensors.items():
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            locations[name] = TensorLocation(WEIGHTS_FILE, offset, length)
            end = offset + length
        written.append(weight)
    return WeightLayout(tuple(written), locations, end)


def check_space(directory: Path, needed: int) -> None:
    """Raise :class:`EESDError` if the disk of ``directory`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise EESDError(
            f"The export needs {needed / 1e9:.1f} GB but {directory} has {free / 1e9:.1f} GB free; "
            "free some space, or write to another disk."
        )


def write_weights(
    path: Path,
    layout: WeightLayout,
    sources: Mapping[str, TensorSource],
    progress: Callable[[str, int], None],
) -> FileInfo:
    """Write ``weights.bin`` tensor by tensor, and hash it at the same time.

    Args:
        path: File to write.
        layout: The weights to write, and their locations.
        sources: The tensors by name.
        progress: Called with the name and the bytes of each tensor that was written.
    """
    end = 0
    with path.open("wb") as file:
        hashed = HashedFile(file)
        for weight in layout.weights:
            for name, data in _encode(sources[weight.name], weight).items():
                _, offset, length = layout.locations[name]
                hashed.write(bytes(offset - end))
                hashed.write(data)
                end = offset + length
                progress(name, length)
            del data  # This frees it before the next tensor is read.
        file.flush()
        os.fsync(file.fileno())
        return hashed.info()


class JointTensor:
    """Several tensors of a checkpoint, which are stacked into one for a packed weight."""

    def __init__(self, parts: Sequence[TensorSource]) -> None:
        self.parts = parts

    def read(self) -> Array:
        return np.concatenate([part.read() for part in self.parts])


def joined(parts: Sequence[TensorSource]) -> TensorSource:
    """Returns the source of a whole weight, given the sources of its parts."""
    return parts[0] if len(parts) == 1 else JointTensor(parts)


def quantized(source: TensorSource, weight: StoredWeight) -> Quantized:
    """Returns the levels of a quantized weight. These are the checkpoint's own levels if they fit.

    The parts of a packed weight are quantized one by one, or together if they share a factor. Both
    ways give the same values.
    """
    assert weight.quantization is not None
    apart = isinstance(source, JointTensor) and not weight.quantization.factor
    parts = source.parts if isinstance(source, JointTensor) and apart else [source]
    return join_quantized([_levels(part, weight) for part in parts], weight.shape[1])


class RoundedTensor(ChangedTensor):
    """A tensor whose levels have already been chosen.

    Attributes:
        chosen: Stored levels by quantization. They are weights, scales and other parts, and are set
            by :meth:`of`.
    """

    chosen: Mapping[Quantization, tuple["SavedArray | None", ...]] = {}

    @classmethod
    def of(
        cls, stored: StoredTensor, quantization: Quantization, levels: Quantized, file: BinaryIO
    ) -> "RoundedTensor":
        """The same tensor with levels for one more quantization. These levels are appended to a
        file."""
        tensor = cls(stored, lambda values: values)
        saved = tuple(None if part is None else SavedArray.at_end(part, file) for part in levels)
        earlier = stored.chosen if isinstance(stored, RoundedTensor) else {}
        tensor.chosen = {**earlier, quantization: saved}
        return tensor

    def levels(self, quantization: Quantization) -> Quantized | None:
        """The chosen levels, if there are any."""
        saved = self.chosen.get(quantization)
        if saved is None:
            return None
        parts: list[Any] = [None if part is None else part.read() for part in saved]
        return Quantized(*parts)


class SavedArray(NamedTuple):
    """An array in a file that only this process reads."""

    path: Path
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def at_end(cls, values: Array, file: BinaryIO) -> "SavedArray":
        """Append an array to a file."""
        saved = cls(Path(file.name), file.tell(), values.dtype, values.shape)
        file.write(_bytes_of(values))
        return saved

    def read(self) -> Array:
        size = prod(self.shape) * self.dtype.itemsize
        return (
            np.fromfile(self.path, np.uint8, size, offset=self.offset)
            .view(self.dtype)
            .reshape(self.shape)
        )


def own_levels(part: TensorSource, weight: StoredWeight) -> Quantized | None:
    """The tensor's levels, if a weight can be stored with them."""
    quantization = weight.quantization
    assert quantization is not None
    if isinstance(part, RoundedTensor):
        return part.levels(quantization)
    if isinstance(part, GgufTensor):
        return part.levels(quantization, weight.transposed)
    if isinstance(part, PackedTensor):
        return part.levels(quantization, _scales_dtype(weight))
    return None


def _scales_dtype(weight: StoredWeight) -> str:
    assert weight.quantization is not None
    return weight.dtype if weight.quantization.factor else weight.scales_dtype


def _levels(part: TensorSource, weight: StoredWeight) -> Quantized:
    quantization = weight.quantization
    assert quantization is not None
    own = own_levels(part, weight)
    if own is not None:
        return own
    assert weight.transposed and quantization.zero_points is False, (
        "only a checkpoint's own levels are stored so"
    )
    values = part.read()
    if quantization.minimums and max(values.max(), -values.min()) > LARGEST:
        raise EESDError(
            f"The tensor {weight.name} has values beyond {LARGEST:.0f}, which int4 cannot hold; "
            "give --quantize none and --quantize-draft none."
        )
    return quantize(values, quantization.weights, _scales_dtype(weight))


def _read(source: TensorSource, weight: StoredWeight) -> Array:
    tensor = source.read()
    if tensor.shape != weight.shape:
        raise EESDError(
            f"The tensor {weight.name} has shape {list(tensor.shape)}, but the graph needs "
            f"{list(weight.shape)}."
        )
    return tensor


def stored_floats(source: TensorSource, weight: StoredWeight, across: bool = False) -> Array:
    """Returns the values of an unquantized weight, rounded to the type in which it is stored.

    Args:
        source: The tensor.
        weight: The weight.
        across: Whether to return the transpose.

    Raises:
        EESDError: The tensor has another shape, or values that the type cannot hold.
    """
    tensor = _read(source, weight)
    values = (transposed if across else converted)(tensor, weight.dtype)
    if tensor.dtype != values.dtype and not all_finite(values):
        raise EESDError(
            f"The tensor {weight.name} has values that {weight.dtype} cannot hold; give another "
            "--dtype."
        )
    return values


def _encode(source: TensorSource, weight: StoredWeight) -> dict[str, memoryview]:
    """Returns the bytes of each stored tensor of a weight, by its name."""
    if weight.quantization is not None:
        parts = zip(("", SCALES, ZEROS, MINIMUMS, FACTOR), quantized(source, weight), strict=True)
        return {weight.name + suffix: _bytes_of(part) for suffix, part in parts if part is not None}
    values = stored_floats(source, weight, weight.transposed)
    return {weight.name: _bytes_of(values)}


def _bytes_of(values: Array) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def linkable_tensors(
    sources: Mapping[str, TensorSource], dtype: str
) -> dict[str, CheckpointTensor]:
    """Select the tensors that graphs can use directly from the checkpoint's files.

    They must have the engine's element type, and an offset that is a multiple of its width (torch
    maps no other offset).

    Args:
        sources: The tensors by name.
        dtype: Element type of the engines.

    Raises:
        EESDError: No tensor can be linked.
    """
    width = NUMPY_TYPES[dtype].itemsize
    stored = {
        name: source for name, source in sources.items() if isinstance(source, CheckpointTensor)
    }
    linkable = {name: t for name, t in stored.items() if t.dtype == dtype and t.offset % width == 0}
    if not linkable:
        other = next(iter(stored.values())).dtype
        raise EESDError(
            "--link-weights uses the checkpoint's weights as they are, and none of them is "
            f"stored as {dtype} "
            f"(the first is {other}); leave the option out, or give the checkpoint's own --dtype."
        )
    return linkable


def link_files(directory: Path, tensors: Iterable[CheckpointTensor]) -> dict[str, LinkInfo]:
    """Hard-link the files of some tensors into a directory, under their own names. Symbolic links
    are followed.

    Args:
        directory: Directory to link into.
        tensors: Tensors of the checkpoint.

    Returns:
        Description of each linked file by name.

    Raises:
        EESDError: The file system refuses the links.
    """
    paths = sorted({tensor.path for tensor in tensors})
    for path in paths:
        try:
            # Files in the hub's cache are symbolic links.
            os.link(path.resolve(), directory / path.name)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            raise EESDError(
                f"{path} cannot be linked into {directory.parent} ({error.strerror}): hard "
                "links need one file system that "
                "supports them, and files that you own; give an --output beside the "
                "checkpoint, or leave --link-weights out."
            ) from None
    return {path.name: link_info(path) for path in paths}
