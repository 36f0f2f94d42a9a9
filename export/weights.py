"""The weight stage: tensors stream one by one from safetensors into ``weights.bin``, cast and transposed on the way."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eesd.export.graph import DTYPES, WeightRef
from eesd.export.manifest import BITS, WEIGHTS, FileInfo
from eesd.model.checkpoint import StoredTensor
from eesd.model.quantize import BLOCK, SCALES, quantize
from eesd.runtime.errors import EESDError

ALIGNMENT = 4096
"""Tensors start at page borders, so that a backend may map them instead of reading them."""


class Source(Protocol):
    """Something that gives a tensor when asked, and not before."""

    def read(self) -> Tensor: ...


class Place(NamedTuple):
    """Where a weight lies: ``length`` bytes at ``offset`` of a file of the engine directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Plan:
    """The weights to write, each once and in order; the places of all, of linked ones too; the bytes to write."""

    weights: tuple[WeightRef, ...]
    places: dict[str, Place]
    size: int


def plan_weights(graphs: Iterable[tuple[WeightRef, ...]], dtype: str, linked: Mapping[str, StoredTensor] | None = None) -> Plan:
    """Lay out the weights of several graphs; what more than one of them uses gets one place."""
    places: dict[str, Place] = {}
    order: list[WeightRef] = []
    end = 0
    for weights in graphs:
        for weight in weights:
            if weight.name in places:
                continue
            if linked and weight.name in linked:
                tensor = linked[weight.name]
                places[weight.name] = Place(tensor.path.name, tensor.offset, tensor.nbytes)
                continue
            for name, length in _lengths(weight, DTYPES[dtype]):
                offset = -(-end // ALIGNMENT) * ALIGNMENT
                places[name] = Place(WEIGHTS, offset, length)
                end = offset + length
            order.append(weight)
    return Plan(tuple(order), places, end)


def check_space(directory: Path, needed: int) -> None:
    """Refuse to begin what cannot end."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise EESDError(
            f"The export needs {needed / 1e9:.1f} GB but {directory} has {free / 1e9:.1f} GB free; "
            "free some space or give another --output."
        )


def write_weights(
    path: Path, plan: Plan, sources: Mapping[str, Source], dtype: str, progress: Callable[[str, int], None]
) -> FileInfo:
    """Write the file and hash it on the way; ``progress`` is told each tensor's name and bytes. Memory: one tensor."""
    digest = hashlib.sha256()
    end = 0
    with path.open("wb") as file:
        for weight in plan.weights:
            for name, data in _stored(sources[weight.name].read(), weight, DTYPES[dtype]).items():
                _, offset, length = plan.places[name]
                for piece in (bytes(offset - end), data):
                    file.write(piece)
                    digest.update(piece)
                end = offset + length
                progress(name, length)
            del data, piece  # or the next tensor would be read while this one is still there
        file.flush()
        os.fsync(file.fileno())
    return FileInfo(end, digest.hexdigest())


def _lengths(weight: WeightRef, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Name and bytes of everything that is stored for a weight."""
    count = prod(weight.shape)
    if weight.quantized is None:
        return [(weight.name, count * dtype.itemsize)]
    return [(weight.name, count * BITS[weight.quantized] // 8), (weight.name + SCALES, count // BLOCK * dtype.itemsize)]


def _stored(tensor: Tensor, weight: WeightRef, dtype: torch.dtype) -> dict[str, memoryview]:
    """The bytes of everything that is stored for a weight, by name."""
    shape = tuple(reversed(weight.shape)) if weight.transposed else weight.shape
    if tuple(tensor.shape) != shape:
        raise EESDError(f"The tensor {weight.name} has shape {list(tensor.shape)}, the graph wants {list(shape)}.")
    if weight.quantized is not None:
        levels, scales = quantize(tensor, weight.quantized, dtype)
        return {weight.name: _bytes_of(levels), weight.name + SCALES: _bytes_of(scales)}
    if weight.transposed:
        tensor = tensor.t()
    return {weight.name: _bytes_of(tensor.to(dtype, memory_format=torch.contiguous_format).contiguous())}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
