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
from eesd.export.manifest import WEIGHTS, FileInfo
from eesd.model.checkpoint import StoredTensor
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
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            length = prod(weight.shape) * DTYPES[dtype].itemsize
            places[weight.name] = Place(WEIGHTS, offset, length)
            order.append(weight)
            end = offset + length
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
            _, offset, length = plan.places[weight.name]
            data = _bytes_of(sources[weight.name].read(), weight, DTYPES[dtype])
            for piece in (bytes(offset - end), data):
                file.write(piece)
                digest.update(piece)
            del data, piece  # or the next tensor would be read while this one is still there
            end = offset + length
            progress(weight.name, length)
        file.flush()
        os.fsync(file.fileno())
    return FileInfo(end, digest.hexdigest())


def _bytes_of(tensor: Tensor, weight: WeightRef, dtype: torch.dtype) -> memoryview:
    if weight.transposed:
        tensor = tensor.t()
    if tuple(tensor.shape) != weight.shape:
        raise EESDError(f"The tensor {weight.name} has shape {list(tensor.shape)}, the graph wants {list(weight.shape)}.")
    tensor = tensor.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return tensor.view(torch.uint8).numpy().data
