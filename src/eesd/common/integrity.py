"""Whether the files of an engine directory are still as they were written: hashes, sizes, times."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.manifest import MANIFEST_FILE, LinkInfo, Manifest

_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""Pieces of a linked file that are hashed: one megabyte in all. Weights of two models differ in
every piece."""


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file.

    Args:
        path: File to hash. It is read in pieces.
        progress: Called with the number of bytes of each piece.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def link_info(path: Path) -> LinkInfo:
    """Describe a file that is linked into the directory."""
    status = path.stat()
    return LinkInfo(status.st_size, status.st_mtime_ns, _sampled_sha256(path, status.st_size))


def _sampled_sha256(path: Path, size: int) -> str:
    """SHA-256 of pieces at equal distances, including the first and the last bytes of the file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def files_changed(directory: Path, manifest: Manifest) -> bool:
    """Whether a file is newer than the manifest. Exports and builds write the manifest last."""
    written = (directory / MANIFEST_FILE).stat().st_mtime_ns
    return any((directory / name).stat().st_mtime_ns > written for name in manifest.sizes)


def verify_files(
    directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Check that no file was changed after the export.

    Files that the export wrote are hashed. For linked files the size, the time of the last change
    and the hash of the samples are compared.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        progress: Called with numbers of bytes that have been checked.

    Raises:
        EESDError: A file was changed. The message names the first one.
    """
    for name, info in manifest.files.items():
        if sha256_of(directory / name, progress) != info.sha256:
            raise EESDError(
                f"{directory / name} was changed after the export (its SHA-256 differs); "
                "export the model again."
            )
    for name, linked in manifest.linked.items():
        if link_info(directory / name) != linked:
            raise EESDError(
                f"{directory / name}, a link to the checkpoint's own file, was changed after "
                "the export (or copied without its "
                "modification time); export the model again."
            )
        progress(linked.size)
