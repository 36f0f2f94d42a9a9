"""Check that the files of an engine directory are unchanged. The checks compare hashes, sizes and
times."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from eesd.common.errors import EESDError
from eesd.common.manifest import MANIFEST_FILE, FileInfo, LinkInfo, Manifest

_SAMPLES = 256
_SAMPLE_BYTES = 4096
"""Number and size of the pieces of a large file that are hashed. Together, the pieces have one
megabyte. Weights of two models differ in every piece."""


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file.

    Args:
        path: File to hash. The file is read in pieces.
        progress: Called with the number of bytes of each piece.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write bytes at the end, and return their number."""
        self._digest.update(data)
        return self._file.write(data)

    def info(self) -> FileInfo:
        """Describe the bytes written so far."""
        self._file.flush()
        return _info(Path(self._file.name), self._digest.hexdigest())


def file_info(path: Path) -> FileInfo:
    """Describe a file that EESD wrote."""
    return _info(path, sha256_of(path))


def _info(path: Path, sha256: str) -> FileInfo:
    size = path.stat().st_size
    samples = _sampled_sha256(path, size) if size > _SAMPLES * _SAMPLE_BYTES else ""
    return FileInfo(size, sha256, samples)


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


def check_loaded(
    directory: Path, files: Mapping[str, FileInfo] | Mapping[str, LinkInfo], remedy: str
) -> None:
    """Check files that are about to be loaded. This takes milliseconds, because large files are
    checked by samples.

    The samples tell files of different models apart. They rarely show a change of single bytes, but
    :func:`verify_hashes` finds such changes.

    Args:
        directory: Directory of the files.
        files: Descriptions of the files when they were written, by name.
        remedy: Advice about a wrong file. It is part of the error message.

    Raises:
        EESDError: A file is missing, or does not match its description.
    """
    for name, info in files.items():
        path = directory / name
        same = path.exists() and path.stat().st_size == info.size
        if same and info.samples:
            same = _sampled_sha256(path, info.size) == info.samples
        elif same and isinstance(info, FileInfo):
            same = sha256_of(path) == info.sha256
        if not same:
            raise EESDError(f"{path} is not the file that was written there; {remedy}.")


def verify_hashes(
    directory: Path,
    files: Mapping[str, FileInfo],
    remedy: str,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Check files by hashing all of their bytes.

    Args:
        directory: Directory of the files.
        files: Descriptions of the files when they were written, by name.
        remedy: Advice about a changed file. It is part of the error message.
        progress: Called with the bytes of each piece that was checked.

    Raises:
        EESDError: A file is missing or was changed. The message names the first one.
    """
    for name, info in files.items():
        path = directory / name
        if not path.exists():
            raise EESDError(f"{path} is missing; {remedy}.")
        if sha256_of(path, progress) != info.sha256:
            raise EESDError(
                f"{path} was changed after it was written (its SHA-256 differs); {remedy}."
            )


def files_changed(directory: Path, manifest: Manifest) -> bool:
    """Whether any file is newer than the manifest, which exports and builds write last."""
    written = (directory / MANIFEST_FILE).stat().st_mtime_ns
    return any((directory / name).stat().st_mtime_ns > written for name in manifest.sizes)


def verify_files(
    directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Check that no file was changed after the export.

    Files that the export wrote are hashed. Linked files are compared by size, time of last change,
    and the hash of their samples.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        progress: Called with the bytes of each piece that was checked.

    Raises:
        EESDError: A file was changed. The message names the first changed file.
    """
    verify_hashes(directory, manifest.files, "export the model again", progress)
    for name, linked in manifest.linked.items():
        if link_info(directory / name) != linked:
            raise EESDError(
                f"{directory / name}, a link to the checkpoint's own file, was changed after "
                "the export (or copied without its "
                "modification time); export the model again."
            )
        progress(linked.size)
