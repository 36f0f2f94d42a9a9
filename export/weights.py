"""The weight stage: tensors stream one by one from safetensors into ``weights.bin``, cast and transposed on the way."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS, FileInfo
from eesd.common.weights import SCALES, StoredWeight
from eesd.model.checkpoint import StoredTensor
from eesd.model.quantize import quantize

ALIGNMENT = 4096
"""Tensors start at page borders, so that a backend may map them instead of reading them."""


class TensorSource(Protocol):
    """Gives a tensor when asked, and does not hold it before."""

    def read(self) -> Tensor: ...


class TensorLocation(NamedTuple):
    """Where a tensor lies: ``length`` bytes at ``offset`` of a file of the engine directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class WeightLayout:
    """The weights to write, each once and in order; the location of every tensor, linked ones included; the bytes to write."""

    weights: tuple[StoredWeight, ...]
    locations: dict[str, TensorLocation]
    size: int


def layout_weights(
    graphs: Iterable[tuple[StoredWeight, ...]], linked: Mapping[str, StoredTensor] | None = None
) -> WeightLayout:
    """Lay out the weights of several graphs. A weight that several graphs use is stored once."""
    locations: dict[str, TensorLocation] = {}
    order: list[StoredWeight] = []
    end = 0
    for weight in chain.from_iterable(graphs):
        if weight.name in locations:
            continue
        if linked and weight.name in linked:
            tensor = linked[weight.name]
            locations[weight.name] = TensorLocation(tensor.path.name, tensor.offset, tensor.nbytes)
            continue
        for name, length in weight.tensors.items():
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            locations[name] = TensorLocation(WEIGHTS, offset, length)
            end = offset + length
        order.append(weight)
    return WeightLayout(tuple(order), locations, end)


def check_space(directory: Path, needed: int) -> None:
    """Refuse to begin what cannot end."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise EESDError(
            f"The export needs {needed / 1e9:.1f} GB but {directory} has {free / 1e9:.1f} GB free; "
            "free some space or give another --output."
        )


def write_weights(
    path: Path, layout: WeightLayout, sources: Mapping[str, TensorSource], progress: Callable[[str, int], None]
) -> FileInfo:
    """Write the file and hash it on the way. Memory: one tensor.

    Args:
        path: File to write.
        layout: What to write, and where in the file.
        sources: The tensors by the names of their weights.
        progress: Called with the name and bytes of each tensor that was written.
    """
    digest = hashlib.sha256()
    end = 0
    with path.open("wb") as file:
        for weight in layout.weights:
            for name, data in _stored(sources[weight.name].read(), weight).items():
                _, offset, length = layout.locations[name]
                for piece in (bytes(offset - end), data):
                    file.write(piece)
                    digest.update(piece)
                end = offset + length
                progress(name, length)
            del data, piece  # or the next tensor would be read while this one is still there
        file.flush()
        os.fsync(file.fileno())
    return FileInfo(end, digest.hexdigest())


def _stored(tensor: Tensor, weight: StoredWeight) -> dict[str, memoryview]:
    """The bytes of each tensor that is stored for a weight, by name."""
    dtype: torch.dtype = getattr(torch, weight.dtype)
    if tuple(tensor.shape) != weight.shape:
        raise EESDError(f"The tensor {weight.name} has shape {list(tensor.shape)}, the graph wants {list(weight.shape)}.")
    if weight.quantization is not None:
        levels, scales = quantize(tensor, weight.quantization.weights, dtype)
        return {weight.name: _bytes_of(levels), weight.name + SCALES: _bytes_of(scales)}
    if weight.transposed:
        tensor = tensor.t()
    return {weight.name: _bytes_of(tensor.to(dtype, memory_format=torch.contiguous_format).contiguous())}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
