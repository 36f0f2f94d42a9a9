"""``eesd-build --target cpu``: pack an engine directory's weights, and write graphs of this
project's operators over them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo

from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole
from eesd.common.manifest import WEIGHTS_FILE, GraphInfo, Manifest
from eesd.common.outputs import remove_directory
from eesd.common.quantization import FP4, FP8
from eesd.common.turns import turn
from eesd.common.weights import (
    FACTOR,
    HEAD_TABLES,
    MINIMUMS,
    ROTARY_TABLES,
    SCALES,
    ZEROS,
    read_graph,
    weights_of,
)
from eesd.export.cache import foreign_build, is_build
from eesd.export.cpu.operator_graph import Columns, Located, Weights, make_graph
from eesd.export.cpu.panels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Levels,
    Packed,
    pack_floats,
    pack_levels,
)
from eesd.export.stored_values import read_tensor, to_float32
from eesd.runtime.engines.cpu_build import (
    SIZES,
    WEIGHTS,
    check_graphs,
    find_build,
    halved_weights,
    place_of,
)

ALIGNMENT = 4096
_TWICE_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
"""Twice the magnitudes of the smallest floating-point numbers, which are integers."""


def build_for_cpu(directory: Path, manifest: Manifest, force: bool = False) -> Path:
    """Build an engine directory for the CPU. A build that is whole stays as it is; a new one takes
    the place of older ones.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        force: Whether to replace a complete build.

    Returns:
        The directory of the build, in the engine directory.

    Raises:
        EESDError: Graphs, weights and manifest do not fit each other, or the directory cannot be
            written.
    """
    check_graphs(directory, manifest)
    place = place_of(directory, manifest)
    if find_build(directory, manifest) and not force:
        return place
    try:
        with turn(place, lambda: None):
            # Another process may have built it meanwhile.
            if force or not find_build(directory, manifest):
                if place.is_symlink() or (place.is_dir() and foreign_build(place)):
                    raise EESDError(f"{place} holds other files; move it away.")
                with directory_written_whole(place, foreign_build) as new:
                    _write(directory, manifest, new)
                for other in directory.glob("cpu-*"):  # of an older layout, or of other graphs
                    if other != place and is_build(other):
                        remove_directory(other, foreign_build)
    except OSError as error:
        raise EESDError(
            f"{directory} cannot be built for the CPU: {place} cannot be written "
            f"({error.strerror})."
        ) from None
    return place


def _write(directory: Path, manifest: Manifest, place: Path) -> None:
    packed: dict[Columns, Located] = {}  # graphs share weights
    try:
        halved = halved_weights(manifest)
        with (place / WEIGHTS).open("wb") as file:
            for graph in manifest.graphs:
                reader = _Reader(directory, manifest, graph)

                def pack(part: Columns, reader: _Reader = reader) -> Located:
                    if part not in packed:
                        weight = reader.pack(part, part.weight in halved)
                        file.write(bytes(-file.tell() % ALIGNMENT))
                        packed[part] = Located(file.tell(), weight.data.nbytes, weight.numbers)
                        file.write(weight.data.data)
                    return packed[part]

                (place / graph.file).write_bytes(
                    make_graph(manifest, graph, Weights(WEIGHTS, pack, reader.small()))
                )
    except (KeyError, ValueError, TypeError, OverflowError, AssertionError):
        raise EESDError(
            f"The graphs and weights in {directory} do not fit its manifest; export the model "
            "again."
        ) from None
    sizes = {path.name: path.stat().st_size for path in place.iterdir()}
    (place / SIZES).write_text(json.dumps(sizes) + "\n")


class _Reader:
    """Reads the weights of a graph of an engine directory. Wrong types, shapes or places raise
    ValueError or KeyError."""

    def __init__(self, directory: Path, manifest: Manifest, graph: GraphInfo) -> None:
        self._directory, self._manifest = directory, manifest
        self._weights = weights_of(manifest, graph)
        initializers = read_graph(directory / graph.file).graph.initializer
        self._tensors = {
            tensor.name: tensor
            for tensor in initializers
            if tensor.data_location == TensorProto.EXTERNAL
        }
        stored = {name for weight in self._weights.values() for name in weight.tensors}
        if stored != self._tensors.keys():
            raise ValueError("the graph has other weights")

    def small(self) -> dict[str, NDArray[Any]]:
        """Everything that is no matrix, in float32 or int64, and the rotary tables."""
        return {name: self._small(name) for name in self._matrices(False)}

    def _matrices(self, wanted: bool) -> Iterator[str]:
        for name, weight in self._weights.items():
            if (len(weight.shape) == 2 and name not in (*ROTARY_TABLES, *HEAD_TABLES)) == wanted:
                yield name

    def _small(self, name: str) -> NDArray[Any]:
        values, kind = self._read(name)
        if values.shape != self._weights[name].shape:
            raise ValueError(name)
        return to_float32(values, kind)

    def pack(self, part: Columns, planes: bool) -> Packed:
        """Some columns of a weight, or all of them, in two planes if the draft shall read the upper
        half of their bits."""
        weight = self._weights[part.weight]
        values, kind = self._read(part.weight)
        # Stored as [in, out].
        across = weight.transposed and self._tensor_file(part.weight) == WEIGHTS_FILE
        if values.shape != (weight.shape[::-1] if across else weight.shape):
            raise ValueError(part.weight)
        columns = slice(part.start, part.stop)

        def oriented(array: NDArray[Any]) -> NDArray[Any]:
            return (array if across else array.T)[:, columns]

        if weight.quantization is None:
            form = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}[kind]
            return pack_floats(oriented(values), form)
        parts: dict[str, NDArray[Any]] = {}
        for suffix in (
            suffix for suffix in (SCALES, ZEROS, MINIMUMS) if part.weight + suffix in weight.tensors
        ):
            parts[suffix] = oriented(to_float32(*self._read(part.weight + suffix)))
        if weight.quantization.factor:
            parts[SCALES] = parts[SCALES] * to_float32(*self._read(part.weight + FACTOR))
        if not all(np.isfinite(array).all() for array in parts.values()):
            raise ValueError(part.weight)
        if kind == FP8:
            block = weight.quantization.block
            return pack_floats(
                oriented(to_float32(values, kind)) * np.repeat(parts[SCALES], block, 0), FLOAT32
            )
        if kind == FP4:  # the operators know integers
            values = np.where(values & 8, np.int8(-1), np.int8(1)) * _TWICE_FP4[values & 7]
            parts[SCALES] = parts[SCALES] / 2
        levels = Levels(oriented(values), parts[SCALES], parts.get(ZEROS), parts.get(MINIMUMS))
        return pack_levels(levels, planes)

    def _tensor_file(self, name: str) -> str:
        return str(ExternalDataInfo(self._tensors[name]).location)

    def _read(self, name: str) -> tuple[NDArray[Any], str]:
        return read_tensor(self._directory, self._tensors[name])
