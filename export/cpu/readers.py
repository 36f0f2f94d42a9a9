"""The weights that a build for the CPU packs: those of an engine directory, or of a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    Levels,
    Packed,
    pack_floats,
    pack_gguf,
    pack_levels,
)
from eesd.export.stored_values import read_tensor, to_float32
from eesd.export.weights import JointTensor, TensorSource, quantized, stored_floats
from eesd.model.arrays import Array
from eesd.model.gguf_file import GgufTensor
from eesd.model.quantized import unpack

_FORMS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


class Reader(ABC):
    """Reads and packs the weights of a graph.

    Attributes:
        weights: How an engine directory stores them, by name.
    """

    def __init__(self, weights: Mapping[str, StoredWeight]) -> None:
        self.weights = weights

    def small(self) -> dict[str, NDArray[Any]]:
        """Everything that is no matrix, in float32 or int64, and the rotary tables."""
        return {name: self._small(name) for name in self._small_names()}

    def _small_names(self) -> Iterator[str]:
        for name, weight in self.weights.items():
            if len(weight.shape) != 2 or name in (*ROTARY_TABLES, *HEAD_TABLES):
                yield name

    @abstractmethod
    def _small(self, name: str) -> NDArray[Any]:
        """A weight that is no matrix. Raises ValueError if it has another shape."""

    @abstractmethod
    def _parts(self, part: Columns) -> tuple[dict[str, Array], str]:
        """What is stored for some columns of a matrix, and the type of its values or levels.

        Returns:
            Arrays [inputs, columns] or [inputs / block, columns] by suffix. Scales, minimums and
            levels of floating point are float32, and values of 16 bits may be uint16.
        """

    def pack(self, part: Columns, planes: bool) -> Packed:
        """Some columns of a weight, or all of them.

        Args:
            part: The columns.
            planes: Whether levels of 8 bits are packed in two planes, because the draft reads the
                upper half of their bits.

        Raises:
            ValueError: A scale or a minimum is not finite.
        """
        (parts, kind), of = self._parts(part), self.weights[part.weight].quantization
        values = parts.pop("")
        if of is None:
            return pack_floats(values, _FORMS[kind])
        if not all(np.isfinite(array).all() for array in parts.values()):
            raise ValueError(f"scales or minimums of {part.weight} are not finite")
        if kind == FP8:
            return pack_floats(values * np.repeat(parts[SCALES], of.block, 0), FLOAT32)
        if kind == FP4:  # Twice a value is an integer, which the operators know.
            values = (2 * values).astype(np.int8)
            parts[SCALES] = parts[SCALES] / 2
        levels = Levels(values, parts[SCALES], parts.get(ZEROS), parts.get(MINIMUMS))
        return pack_levels(levels, planes)


class DirectoryReader(Reader):
    """Reads an engine directory. Wrong types, shapes or places raise ValueError or KeyError."""

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

    def _parts(self, part: Columns) -> tuple[dict[str, Array], str]:
        weight = self.weights[part.weight]
        values, kind = self._read(part.weight)
        file = ExternalDataInfo(self._tensors[part.weight]).location
        across = weight.transposed and file == WEIGHTS_FILE  # stored as [in, out]
        if kind in (FP8, FP4):
            values = to_float32(values, kind)
        if values.shape != (weight.shape[::-1] if across else weight.shape):
            raise ValueError(part.weight)
        columns = slice(part.start, part.stop)

        def oriented(array: Array) -> Array:
            return (array if across else array.T)[:, columns]

        parts = {"": oriented(values)}
        for suffix in (SCALES, ZEROS, MINIMUMS):
            if part.weight + suffix in weight.tensors:
                parts[suffix] = oriented(to_float32(*self._read(part.weight + suffix)))
        if part.weight + FACTOR in weight.tensors:
            parts[SCALES] = parts[SCALES] * to_float32(*self._read(part.weight + FACTOR))
        return parts, kind

    def _read(self, name: str) -> tuple[NDArray[Any], str]:
        return read_tensor(self._directory, self._tensors[name])


class SourceReader(Reader):
    """Reads a checkpoint, and rounds as an engine directory's weights are rounded.

    Args:
        weights: The weights of the graph, by name.
        sources: Where they come from, by the same names.
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
            return pack_gguf(
                rows.reshape(-1), kind, (weight.shape[0], weight.shape[1]), None, planes
            )
        except ValueError as error:
            name = sources[0].name if isinstance(sources[0], GgufTensor) else part.weight
            raise EESDError(f"The tensor {name} is damaged ({error}); fetch it again.") from None

    def _columns(self, part: Columns) -> tuple[StoredWeight, Sequence[TensorSource]]:
        """A weight of some columns only, and the tensors that it consists of."""
        weight, source = self.weights[part.weight], self._sources[part.weight]
        sources = source.parts if isinstance(source, JointTensor) else [source]
        if part.stop is None:
            return weight, sources
        size = part.stop - part.start  # gate and up, which are as wide as each other
        chosen = [sources[part.start // size]]
        return replace(weight, shape=(size, weight.shape[1])), chosen

    def _parts(self, part: Columns) -> tuple[dict[str, Array], str]:
        weight, sources = self._columns(part)
        source = sources[0] if len(sources) == 1 else JointTensor(sources)
        of = weight.quantization
        if of is None:
            return {"": stored_floats(source, weight).T}, weight.dtype
        levels, scales, zeros, minimums, factor = quantized(source, weight)
        scales = scales.astype(np.float32)
        if factor is not None:
            scales = scales * factor.astype(np.float32)
        count = weight.shape[0] * weight.shape[1]
        parts = {"": unpack(levels, of.weights, count).reshape(weight.stored_shape), SCALES: scales}
        if zeros is not None:
            parts[ZEROS] = unpack(zeros, of.weights, scales.size).reshape(scales.shape)
        if minimums is not None:
            parts[MINIMUMS] = minimums.astype(np.float32)
        across = weight.transposed
        return {suffix: one if across else one.T for suffix, one in parts.items()}, of.weights


def _blocks(
    sources: Sequence[TensorSource], weight: StoredWeight
) -> tuple[str, NDArray[np.uint8]] | None:
    """The type of the blocks of tensors of a GGUF file, and their bytes [outputs, bytes], if the
    weight keeps their levels."""
    of = weight.quantization
    found = [one.blocks(of) if isinstance(one, GgufTensor) and of else None for one in sources]
    kinds = {one[0] for one in found if one is not None}
    if None in found or len(kinds) != 1:
        return None
    [kind] = kinds
    rows = [one[1] for one in found if one is not None]
    return kind, rows[0] if len(rows) == 1 else np.concatenate(rows)
