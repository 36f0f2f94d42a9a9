"""Implements ``eesd-build --target cpu``, which packs weights, and writes graphs of this project's
operators."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole
from eesd.common.integrity import HashedFile, file_info
from eesd.common.manifest import GraphInfo, Manifest
from eesd.common.outputs import remove_directory
from eesd.common.turns import turn
from eesd.export.cache import foreign_build, is_build
from eesd.export.cpu.operator_graph import Columns, Located, make_graph
from eesd.export.cpu.readers import DirectoryReader, Reader
from eesd.runtime.engines.cpu_build import (
    FILES,
    WEIGHTS,
    check_graphs,
    find_build,
    halved_weights,
    place_of,
)

ALIGNMENT = 4096


def build_for_cpu(directory: Path, manifest: Manifest, force: bool = False) -> Path:
    """Build an engine directory for the CPU. A complete build is kept, and a new build replaces
    older builds.

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
    if find_build(directory, manifest) and (manifest.is_packed or not force):
        return place
    manifest.check_whole(directory)
    try:
        with turn(place, lambda: None):
            # Another process may have built it in the meantime.
            if force or not find_build(directory, manifest):
                if place.is_symlink() or (place.is_dir() and foreign_build(place)):
                    raise EESDError(f"{place} holds other files; move it away.")
                with directory_written_whole(place, foreign_build) as new:
                    _write(directory, manifest, new)
                for other in directory.glob("cpu-*"):  # The build was made from other graphs.
                    if other != place and is_build(other):
                        remove_directory(other, foreign_build)
    except OSError as error:
        raise EESDError(
            f"{directory} cannot be built for the CPU: {place} cannot be written "
            f"({error.strerror})."
        ) from None
    return place


def _write(directory: Path, manifest: Manifest, place: Path) -> None:
    try:
        write_build(manifest, place, partial(DirectoryReader, directory, manifest))
    except (KeyError, ValueError, TypeError, OverflowError, AssertionError):
        raise EESDError(
            f"The graphs and weights in {directory} do not fit its manifest; export the model "
            "again."
        ) from None


def write_build(
    manifest: Manifest,
    place: Path,
    reader_of: Callable[[GraphInfo], Reader],
    progress: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """Write packed weights and graphs.

    Args:
        manifest: Manifest of the engine directory.
        place: Directory to write into.
        reader_of: Opens the weights of a graph.
        progress: Called with the name and the stored bytes of each weight that was packed.
    """
    packed: dict[Columns, Located] = {}  # graphs share weights
    halved = halved_weights(manifest)
    with (place / WEIGHTS).open("wb") as file:
        hashed = HashedFile(file)
        for graph in manifest.graphs:
            reader = reader_of(graph)

            def pack(part: Columns, reader: Reader = reader) -> Located:
                if part not in packed:
                    weight = reader.pack(part, part.weight in halved)
                    hashed.write(bytes(-file.tell() % ALIGNMENT))
                    packed[part] = Located(file.tell(), weight.data.nbytes, weight.numbers)
                    hashed.write(weight.data.data)
                    progress(part.weight, weight.data.nbytes)
                return packed[part]

            made = make_graph(manifest, graph, pack, reader.small())
            (place / graph.file).write_bytes(made)
        files = {WEIGHTS: hashed.info()}
    files |= {graph.file: file_info(place / graph.file) for graph in manifest.graphs}
    listed = {name: asdict(info) for name, info in files.items()}
    (place / FILES).write_text(json.dumps(listed, indent=1) + "\n")
