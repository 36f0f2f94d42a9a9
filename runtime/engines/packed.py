"""What the CPU engine loads: packed weights and graphs of this project's operators, made once of an engine directory.

They are in a directory ``cpu-KEY`` in the engine directory, or where that cannot be written in the user's cache. The key
follows from the engine directory's contents and the version of the layout, so nothing stale is found. It may be deleted: it is
made again in seconds.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole
from eesd.common.integrity import sha256_of
from eesd.common.json_input import read_json
from eesd.common.machine import user_cache
from eesd.common.manifest import WEIGHTS_FILE, GraphInfo, Manifest
from eesd.common.weights import FACTOR, FP4, FP8, HEAD_TABLES, MINIMUMS, ROTARY_TABLES, SCALES, ZEROS
from eesd.runtime.engines.graph_file import read_graph
from eesd.runtime.engines.panels import BFLOAT16, FLOAT16, FLOAT32, Levels, Packed, pack_floats, pack_levels
from eesd.runtime.engines.stored_values import read_tensor, to_float32

if TYPE_CHECKING:
    from eesd.runtime.engines.operator_graph import Columns

LAYOUT = 4
"""Version of packed weights and graphs. Another one makes them again."""
_NAME = re.compile("cpu-[0-9a-f]{16}")
_FILES = re.compile(r"weights\.bin|sizes\.json|(draft|verify|verify_[0-9]+|states)\.onnx")
"""The last of the graphs is of a distillation."""
WEIGHTS, SIZES = "weights.bin", "sizes.json"
ALIGNMENT = 4096
_TWICE_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
"""Twice the magnitudes of the smallest floating-point numbers, which are integers."""


class _MadeElsewhere(Exception):
    """Ends the making of a packed directory that is there by now."""


def packed_directory(directory: Path, manifest: Manifest) -> Path:
    """The directory of packed weights and graphs, which is made if there is none.

    Args:
        directory: Engine directory.
        manifest: Its manifest.

    Raises:
        EESDError: Graphs, weights and manifest do not fit each other, or there is no place to write to.
    """
    for graph in manifest.graphs:  # what was packed would run, whatever became of them
        if sha256_of(directory / graph.file) != manifest.files[graph.file].sha256:
            raise EESDError(f"{directory / graph.file} is not the graph that the manifest describes; export again.")
    found = find_packed(directory, manifest)
    if found is not None:
        return found
    problem = ""
    for place in _places(directory, manifest):
        try:
            if place.is_symlink() or (place.exists() and not is_packed(place)):
                raise OSError(f"{place} holds other files")
            with suppress(_MadeElsewhere), directory_written_whole(place, foreign) as new:
                _write(directory, manifest, new)
                if _is_complete(place, manifest):  # another process was faster, and may be reading its files now
                    raise _MadeElsewhere
            return place
        except OSError as error:
            problem = str(error)
    raise EESDError(f"The packed weights of {directory} cannot be written ({problem}); set EESD_CACHE_DIR to a directory.")


def find_packed(directory: Path, manifest: Manifest) -> Path | None:
    """The directory that :func:`packed_directory` made, if it is whole; nothing is made."""
    return next((place for place in _places(directory, manifest) if _is_complete(place, manifest)), None)


def describe_packed(place: Path) -> str:
    """Where a directory of packed weights is, and how large."""
    return f"{place} ({sum(file.stat().st_size for file in place.iterdir()) / 1e6:.1f} MB)"


def is_packed(path: Path) -> bool:
    """Whether :func:`packed_directory` made this directory, and it holds no other files."""
    return _NAME.fullmatch(path.name) is not None and not path.is_symlink() and path.is_dir() and not foreign(path)


def foreign(path: Path) -> str:
    """Why a directory with the name of packed weights may not be replaced; "" if it holds nothing else."""
    other = (file.name for file in path.iterdir() if not (_FILES.fullmatch(file.name) and file.is_file()))
    return next((f"it also holds {name}" for name in other), "")


def _places(directory: Path, manifest: Manifest) -> list[Path]:
    """Where packed weights may be, in the order in which the places are tried."""
    name = f"cpu-{_key(manifest)}"
    return [parent / name for parent in (directory, user_cache()) if parent is not None]


def _key(manifest: Manifest) -> str:
    """16 hexadecimal digits of everything that the packed files depend on."""
    contents = {name: info.sha256 for name, info in manifest.files.items()}
    contents |= {name: info.samples for name, info in manifest.linked.items()}
    options = [LAYOUT, manifest.max_seq_len, manifest.max_tree_nodes, manifest.draft_top_k]
    return hashlib.sha256(json.dumps([options, contents], sort_keys=True).encode()).hexdigest()[:16]


def _is_complete(place: Path, manifest: Manifest) -> bool:
    """Whether all files are there and have their sizes."""
    try:
        sizes = read_json(place / SIZES, "")
        names = {WEIGHTS, *(graph.file for graph in manifest.graphs)}
        return isinstance(sizes, dict) and sizes.keys() == names and all(
            (place / name).stat().st_size == size for name, size in sizes.items()
        )  # fmt: skip
    except (EESDError, OSError):
        return False


def _write(directory: Path, manifest: Manifest, place: Path) -> None:
    from eesd.runtime.engines.operator_graph import Located, Weights, halved_weights, make_graph, products_of

    packed: dict[Columns, Located] = {}
    small: dict[str, NDArray[Any]] = {}
    try:
        halved = halved_weights(manifest)
        with (place / WEIGHTS).open("wb") as file:
            for graph in manifest.graphs:
                reader = _Reader(directory, manifest, graph)
                small |= reader.small()
                for part in products_of(manifest, graph):
                    if part in packed:
                        continue
                    weight = reader.pack(part, part.weight in halved)
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    packed[part] = Located(file.tell(), weight.data.nbytes, weight.numbers)
                    file.write(weight.data.data)
        for graph in manifest.graphs:
            (place / graph.file).write_bytes(make_graph(manifest, graph, Weights(WEIGHTS, packed, small)))
    except (KeyError, ValueError, TypeError, OverflowError, AssertionError):
        raise EESDError(f"The graphs and weights in {directory} do not fit its manifest; export the model again.") from None
    sizes = {path.name: path.stat().st_size for path in place.iterdir()}
    (place / SIZES).write_text(json.dumps(sizes) + "\n")


class _Reader:
    """Reads the weights of a graph of an engine directory. Wrong types, shapes or places raise ValueError or KeyError."""

    def __init__(self, directory: Path, manifest: Manifest, graph: GraphInfo) -> None:
        from onnx import TensorProto

        self._directory, self._manifest = directory, manifest
        self._weights = manifest.weights_of(graph)
        initializers = read_graph(directory / graph.file).graph.initializer
        self._tensors = {tensor.name: tensor for tensor in initializers if tensor.data_location == TensorProto.EXTERNAL}
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

    def pack(self, part: "Columns", planes: bool) -> Packed:
        """Some columns of a weight, or all of them, in two planes if the draft shall read the upper half of their bits."""
        weight = self._weights[part.weight]
        values, kind = self._read(part.weight)
        across = weight.transposed and self._tensor_file(part.weight) == WEIGHTS_FILE  # stored as [in, out]
        if values.shape != (weight.shape[::-1] if across else weight.shape):
            raise ValueError(part.weight)
        columns = slice(part.start, part.stop)

        def oriented(array: NDArray[Any]) -> NDArray[Any]:
            return (array if across else array.T)[:, columns]

        if weight.quantization is None:
            form = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}[kind]
            return pack_floats(oriented(values), form)
        parts: dict[str, NDArray[Any]] = {}
        for suffix in (suffix for suffix in (SCALES, ZEROS, MINIMUMS) if part.weight + suffix in weight.tensors):
            parts[suffix] = oriented(to_float32(*self._read(part.weight + suffix)))
        if weight.quantization.factor:
            parts[SCALES] = parts[SCALES] * to_float32(*self._read(part.weight + FACTOR))
        if not all(np.isfinite(array).all() for array in parts.values()):
            raise ValueError(part.weight)
        if kind == FP8:
            block = weight.quantization.block
            return pack_floats(oriented(to_float32(values, kind)) * np.repeat(parts[SCALES], block, 0), FLOAT32)
        if kind == FP4:  # the operators know integers
            values, parts[SCALES] = np.where(values & 8, -1, 1) * _TWICE_FP4[values & 7], parts[SCALES] / 2
        zeros, levels = parts.get(ZEROS), oriented(values).astype(np.int16)
        zeros = None if zeros is None else zeros.astype(np.int16)
        return pack_levels(Levels(levels, parts[SCALES], zeros, parts.get(MINIMUMS)), planes)

    def _tensor_file(self, name: str) -> str:
        from onnx.external_data_helper import ExternalDataInfo

        return str(ExternalDataInfo(self._tensors[name]).location)

    def _read(self, name: str) -> tuple[NDArray[Any], str]:
        return read_tensor(self._directory, self._tensors[name])
