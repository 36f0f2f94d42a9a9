"""The build of ``eesd-build --target cpu``, which the CPU engine maps into memory. It consists of
packed weights, and of graphs of this project's operators. The build is the same for all kernels.

The build is in a directory ``cpu-KEY`` in the engine directory. The key is a hash of the engine
directory's contents and the version of the layout, so a stale build is never found.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.integrity import check_loaded, sha256_of
from eesd.common.json_input import from_json, read_json
from eesd.common.manifest import FileInfo, Manifest
from eesd.common.quantization import BLOCK, DRAFT
from eesd.common.weights import EMBEDDINGS, weights_of

LAYOUT = 6
"""The version of the layout of packed weights and graphs."""
WEIGHTS = "weights.bin"
FILES = "files.json"
"""The file of packed weights, and the file that lists all other files with their hashes."""
Check = Callable[[Path, Mapping[str, FileInfo], str], None]
"""A function that checks files of a directory. It receives a remedy for its error message. It is
:func:`~eesd.common.integrity.check_loaded` or :func:`~eesd.common.integrity.verify_hashes`."""


def place_of(directory: Path, manifest: Manifest) -> Path:
    """Return the path of an engine directory's build. Its name has 16 hexadecimal digits of a hash
    of everything that the build depends on."""
    contents = {
        name: info.sha256
        for name, info in manifest.files.items()
        if name.endswith((".onnx", ".bin"))
    } | {name: info.samples for name, info in manifest.linked.items()}
    options = [LAYOUT, manifest.max_seq_len, manifest.max_tree_nodes, manifest.draft_top_k]
    digest = hashlib.sha256(json.dumps([options, contents], sort_keys=True).encode()).hexdigest()
    return directory / f"cpu-{digest[:16]}"


def find_build(directory: Path, manifest: Manifest) -> Path | None:
    """Return the build of an engine directory. Return None if the build is missing, or if one of
    its files has changed."""
    with suppress(EESDError):
        return built_for_cpu(directory, manifest)
    return None


def built_for_cpu(directory: Path, manifest: Manifest, check: Check = check_loaded) -> Path:
    """Check the files of an engine directory's build, and return the build.

    Raises:
        EESDError: There is no build, or one of its files is missing or has changed.
    """
    place = place_of(directory, manifest)
    command = f"eesd-build --target cpu {directory}"
    remedy = f"build it again with: {command} --force"
    if manifest.is_packed:
        remedy = (
            f"remove {directory} (of the cache of --model: eesd-cache clean {directory.name}), and "
            "export the model again"
        )
    elif not place.exists():
        raise EESDError(f"{directory} is not built for the CPU; run: {command}.")
    listed = read_json(place / FILES, remedy)
    try:
        files = from_json(dict[str, FileInfo], listed)
    except ValueError as error:
        raise EESDError(f"{place / FILES} is damaged ({error}); {remedy}.") from None
    is_own = not manifest.is_packed or sha256_of(place / FILES) == manifest.packed
    if not is_own or files.keys() != {WEIGHTS, *(graph.file for graph in manifest.graphs)}:
        raise EESDError(f"{place} is the build of another model; {remedy}.")
    check(place, files, remedy)
    return place


def check_graphs(directory: Path, manifest: Manifest) -> None:
    """Raise :class:`EESDError` if a graph of the directory was changed, because the old build would
    still run."""
    for graph in manifest.graphs:
        if sha256_of(directory / graph.file) != manifest.files[graph.file].sha256:
            raise EESDError(
                f"{directory / graph.file} is not the graph that the manifest describes; "
                "export again."
            )


def describe_build(place: Path) -> str:
    """Return a text with the path and the size of a build."""
    return f"{place} ({sum(file.stat().st_size for file in place.iterdir()) / 1e6:.1f} MB)"


def halved_weights(manifest: Manifest) -> set[str]:
    """Return the names of the weights that the draft and the verify graph read differently. The
    draft's products read only the upper 4 bits, and the verify graph's products read all 8 bits.

    A draft that is the whole model shares these weights with the verify graph. They include the
    embedding table if it is also the LM head.
    """
    whole = manifest.exit_head.is_whole(manifest.geometry)
    alone = not manifest.geometry.tied_embeddings
    found = {
        name: weight.quantization
        for name, weight in weights_of(manifest, manifest.draft).items()
        if whole
    }
    int8 = {
        name
        for name, of in found.items()
        if of is not None and (of.weights, of.block) == ("int8", BLOCK)
    }
    return {
        name for name in int8 if not name.startswith(DRAFT) and not (alone and name == EMBEDDINGS)
    }
