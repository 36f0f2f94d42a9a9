"""Paths that commands write. Commands delete only files that this project's commands wrote."""

import errno
import os
from collections.abc import Callable
from os.path import lexists
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.files import claimed


def resolved(path: Path) -> Path:
    """``path`` with links and ".." resolved as they are now. Raises OSError if links form a
    circle."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def existing_parent(path: Path) -> Path:
    """The nearest directory above ``path`` that exists."""
    return next(parent for parent in resolved(path).parents if parent.exists())


def check_own(path: Path, beginning: str) -> None:
    """Raise :class:`EESDError` for a link, and for a file that does not begin with the text that
    the command writes first. An empty file is fine."""
    own = not path.is_symlink()
    if own and path.is_file():
        with path.open("rb") as file:
            own = file.read(len(beginning)) in (b"", beginning.encode())
    if not own:
        raise EESDError(
            f"{path} exists, and this command did not write it; give another file, or move it away."
        )


def remove_directory(path: Path, foreign: Callable[[Path], str]) -> str:
    """Delete a directory unless it is ``foreign``. Returns the reason for keeping it, or "" if it
    was deleted."""
    with claimed(path) as claim:
        kept = claim.move_aside(foreign)
        if not kept and lexists(claim.old):
            # If this run is killed, the next run deletes the directory and does not put it back.
            claim.old.rename(claim.new)
    return kept
