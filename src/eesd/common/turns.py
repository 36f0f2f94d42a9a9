"""Let one process make a file or directory while others wait for it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eesd.common.files import Claim, try_lock

if sys.platform != "win32":
    import fcntl

_KEY = "0" * 16
"""Takes the place of a writer's random key, so that all processes use the same lock."""


@contextmanager
def turn(target: Path, waits: Callable[[], None] | None) -> Iterator[bool]:
    """Hold the lock of a path while the block runs. Yields whether this process holds it.

    The operating system frees the lock when a process ends for any reason. The lock file is next to
    ``target``. :mod:`eesd.common.files`, which defines its name, removes the leftovers of killed
    processes. Where there are no locks, as on Windows, processes do not wait.

    Args:
        target: The file or directory that the process makes. Its parent exists.
        waits: Called once before this process waits for another. With None, the process does not
            wait, and may not get the lock.
    """
    path = Claim(target, _KEY).lock
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if try_lock(file) is False:
                if waits is None:
                    yield False
                    return
                waits()
                waits = _nothing
                fcntl.flock(file, fcntl.LOCK_EX)
            # If the path no longer names this file, the previous process deleted it, and a third
            # process may have made a new one.
            if _is_named(file, path):
                try:
                    yield True
                finally:
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
                return
        finally:
            os.close(file)


def _nothing() -> None:
    """Takes the place of ``waits`` after its only call."""


def _is_named(file: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
