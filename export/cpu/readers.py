"""Read and pack the weights of a build for the CPU, from an engine directory or a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo

from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS_FILE, GraphInfo, Manifest
from eesd.common.quantization import FP4, FP8
from eesd.common.weights import (
    FACTOR,
    HEAD_TABLES,
    MINIMUMS,
    ROTARY_TABLES,
    SCALES,
    ZEROS,
    StoredWeight,
    read_graph,
    weights_of,
)
from eesd.export.cpu.operator_graph import Columns
from eesd.export.cpu.panels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Packed,
    pack_floats,
    pack_gguf,
    pack_levels,
)
from eesd.export.stored_values import read_tensor, to_float32
from eesd.export.weights import JointTensor, TensorSource, joined, quantized, stored_floats
from eesd.model.arrays import Array
from eesd.model.gguf_file import GgufTensor
from eesd.model.quantized import unpack

_FORMS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


class Reader(ABC):
    """Reads and packs the weights of a graph.

    Attributes:
        weights: Storage of the weights in an engine directory, by name.
    """

    def __init__(self, weights: Mapping[str, StoredWeight]) -> None:
        self.weights = weights

    def small(self) -> dict[str, NDArray[Any]]:
        """All weights that are not matrices, and the rotary tables. They are float32 or int64."""
        tables = (*ROTARY_TABLES, *HEAD_TABLES)
        return {
            name: self._small(name)
            for name, weight in self.weights.items()
            if len(weight.shape) != 2 or name in tables
        }

    @abstractmethod
    def _small(self, name: str) -> NDArray[Any]:
        """A weight that is not a matrix, or a rotary table. Raises ValueError for another shape."""

    @abstractmethod
    def _parts(self, part: Columns) -> dict[str, Array]:
        """The stored arrays of some columns of a matrix.

        Returns:
            A dictionary from suffixes to arrays [inputs, columns] or [inputs / block, columns].
            Levels are int8 or uint8, or float32 for FP8 and FP4. Scales and minimums are float32.
            16-bit values may be uint16.
        """

    def pack(self, part: Columns, planes: bool) -> Packed:
        """Pack some or all columns of a weight.

        Args:
            part: The columns.
            planes: Whether 8-bit levels are packed in two planes, because the draft reads the upper
                4 bits.

        Raises:
            ValueError: A scale or a minimum is not finite.
        """
        parts = self._parts(part)
        weight = self.weights[part.weight]
        values = parts[""]
        of = weight.quantization
        if of is None:
            return pack_floats(values, _FORMS[weight.dtype])
        scales = parts[SCALES]
        minimums = parts.get(MINIMUMS)
        if of.weights == FP8:
            if not np.isfinite(scales).all():
                raise ValueError(f"scales of {part.weight} are not finite")
            return pack_floats(values * np.repeat(scales, of.block, 0), FLOAT32)
        if of.weights == FP4:  # Twice these values are integers, which the operators need.
            values = (values * 2).astype(np.int8)
            scales = scales / 2
        if ZEROS in parts:
            minimums = -(parts[ZEROS].astype(np.float32) * scales)
        return pack_levels(values, scales, minimums, planes)


class DirectoryReader(Reader):
    """Reads an engine directory. Wrong types, shapes or offsets raise ValueError or KeyError."""

    def __init__(self, directory: Path, manifest: Manifest, graph: GraphInfo) -> None:
        super().__init__(weights_of(manifest, graph))
        self._directory = directory
        self._tensors = {
            tensor.name: tensor
            for tensor in read_graph(directory / graph.file).graph.initializer
            if tensor.data_location == TensorProto.EXTERNAL
        }
        stored = {name for weight in self.weights.values() for name in weight.tensors}
        if stored != self._tensors.keys():
            raise ValueError("the graph has other weights")

    def _small(self, name: str) -> NDArray[Any]:
        values, kind = self._read(name)
        if values.shape != self.weights[name].shape:
            raise ValueError(name)
        return to_float32(values, kind)

    def _parts(self, part: Columns) -> dict[str, Array]:
        weight = self.weights[part.weight]
        values, kind = self._read(part.weight)
        file = ExternalDataInfo(self._tensors[part.weight]).location
        across = weight.transposed and file == WEIGHTS_FILE  # stored as [in, out]
        if values.shape != (weight.shape[::-1] if across else weight.shape):
            raise ValueError(part.weight)
        columns = slice(part.start, part.stop)

        def oriented(array: Array) -> Array:
            return (array if across else array.T)[:, columns]

        parts = {"": oriented(to_float32(values, kind) if weight.quantization else values)}
        for suffix in (SCALES, ZEROS, MINIMUMS):
            if part.weight + suffix in weight.tensors:
                parts[suffix] = oriented(to_float32(*self._read(part.weight + suffix)))
        if part.weight + FACTOR in weight.tensors:
            parts[SCALES] = parts[SCALES] * to_float32(*self._read(part.weight + FACTOR))
        return parts

    def _read(self, name: str) -> tuple[NDArray[Any], str]:
        return read_tensor(self._directory, self._tensors[name])


class SourceReader(Reader):
    """Reads a checkpoint, and rounds its weights as for an engine directory.

    Args:
        weights: The weights of the graph, by name.
        sources: Sources of the weights, by the same names.
    """

    def __init__(
        self, weights: Mapping[str, StoredWeight], sources: Mapping[str, TensorSource]
    ) -> None:
        super().__init__(weights)
        self._sources = sources

    def _small(self, name: str) -> NDArray[Any]:
        weight = self.weights[name]
        values = stored_floats(self._sources[name], weight)
        return values if weight.dtype == "int64" else values.astype(np.float32, copy=False)

    def pack(self, part: Columns, planes: bool) -> Packed:
        """See :meth:`Reader.pack`. Blocks of a GGUF file are packed as they are."""
        weight, sources = self._columns(part)
        blocks = _blocks(sources, weight)
        if blocks is None:
            return super().pack(part, planes)
        kind, rows = blocks
        try:
            return pack_gguf(rows, kind, (weight.shape[0], weight.shape[1]), planes)
        except ValueError as error:
            name = sources[0].name if isinstance(sources[0], GgufTensor) else part.weight
            raise EESDError(f"The tensor {name} is damaged ({error}); fetch it again.") from None

    def _columns(self, part: Columns) -> tuple[StoredWeight, Sequence[TensorSource]]:
        """A weight with only some columns, and the tensors of which it consists."""
        weight, source = self.weights[part.weight], self._sources[part.weight]
        sources = source.parts if isinstance(source, JointTensor) else [source]
        if part.stop is None:
            return weight, sources
        size = part.stop - part.start  # gate and up are equally wide
        chosen = [sources[part.start // size]]
        return replace(weight, shape=(size, weight.shape[1])), chosen

    def _parts(self, part: Columns) -> dict[str, Array]:
        weight, sources = self._columns(part)
        of = weight.quantization
        if of is None:
            return {"": stored_floats(joined(sources), weight).T}
        found = quantized(joined(sources), weight)
        values = unpack(found.levels, of.weights, prod(weight.shape))
        scales = found.whole_scales
        parts: dict[str, Array] = {"": values.reshape(weight.stored_shape), SCALES: scales}
        if found.zeros is not None:
            zeros = unpack(found.zeros, of.weights, scales.size)
            parts[ZEROS] = zeros.reshape(scales.shape)
        if found.minimums is not None:
            parts[MINIMUMS] = found.minimums.astype(np.float32)
        across = weight.transposed
        return {suffix: one if across else one.T for suffix, one in parts.items()}


def _blocks(
    sources: Sequence[TensorSource], weight: StoredWeight
) -> tuple[str, NDArray[np.uint8]] | None:
    """Returns the type of the blocks of GGUF tensors, and their bytes [outputs, bytes], if the
    weight keeps their levels."""
    of = weight.quantization
    found = [one.blocks(of) if isinstance(one, GgufTensor) and of else None for one in sources]
    kinds = {one[0] for one in found if one is not None}
    if None in found or len(kinds) != 1:
        return None
    [kind] = kinds
    rows = [one[1] for one in found if one is not None]
    return kind, rows[0] if len(rows) == 1 else np.concatenate(rows)
