"""Write files and directories that appear complete or not at all, and remove the leftovers of
killed processes.

A writer writes beside the final name, to ``.NAME.eesd-RANDOM.new``. A directory that it replaces is
moved to ``.old`` for a moment. Before either exists, the writer creates
``.NAME.eesd-RANDOM.lock`` and keeps it locked. The operating system unlocks it when the process
ends for any reason. So if the lock can be taken, the files beside it are leftovers. The next run
that writes to the same place removes them. Files that no run wrote are never removed. Each caller
defines which files are foreign.
"""

import logging
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os.path import lexists
from pathlib import Path
from typing import NamedTuple

from eesd.common.errors import EESDError

if sys.platform != "win32":
    import fcntl

LOGGER = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"(?s)\.(?P<name>.+)\.eesd-(?P<key>[0-9a-f]{16})\.(?P<kind>lock|new|old)")
_MAGIC = "EESD writes the files beside this one."
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``. It is renamed to ``path`` if the block succeeds, and
    deleted if it raises."""
    with temporary_beside(path) as temporary:
        yield temporary
        temporary.replace(path)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``. A file or directory with this name is deleted when the
    block ends."""
    with claimed(path) as claim:
        yield claim.new


def _not_empty(directory: Path) -> str:
    return "it is not empty" * any(directory.iterdir())


@contextmanager
def directory_written_whole(
    output: Path, foreign: Callable[[Path], str] = _not_empty
) -> Iterator[Path]:
    """A temporary directory beside ``output``. It is renamed to ``output`` if the block succeeds,
    and deleted if it raises.

    Args:
        output: The directory to write. It must not be a link when the block ends.
        foreign: Returns the reason not to replace an existing directory, as "it ...", or "" if it
            may be replaced.

    Raises:
        EESDError: The existing directory may not be replaced. The new directory is kept next to it,
            and the message gives its path.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with claimed(output) as claim:
        claim.new.mkdir()
        yield claim.new
        if kept := claim.move_aside(foreign):
            raise EESDError(
                f"{output} is not replaced: {kept}; the new content is in {claim.keep(claim.new)}."
            )
        claim.new.rename(output)


def is_temporary(name: str) -> bool:
    """Whether this is a name that this module gives to temporary files."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(directory: Path, name: str | None = None) -> None:
    """Remove the leftovers of killed processes in a directory, and put back a directory that a
    killed process had moved aside.

    Each removal is logged as a one-line warning. Files that may belong to a running process are
    kept. If their lock is held, they are kept silently. If that is unknown, a warning is logged.

    Args:
        directory: The directory to search. It need not exist.
        name: The final name of the leftovers to remove, or None to remove leftovers of all names.
    """
    with suppress(OSError):
        found = filter(None, (_TEMPORARY.fullmatch(path.name) for path in directory.iterdir()))
        for written, key in {
            (match["name"], match["key"]) for match in found if name in (None, match["name"])
        }:
            Claim(directory / written, key).sweep()


class Claim(NamedTuple):
    """The temporary names of one writer.

    Attributes:
        target: The final name.
        key: Random text, which ensures that no two writers share a name.
    """

    target: Path
    key: str

    @property
    def lock(self) -> Path:
        return self._path("lock")

    @property
    def new(self) -> Path:
        return self._path("new")

    @property
    def old(self) -> Path:
        return self._path("old")

    def _path(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.eesd-{self.key}.{kind}")

    def put_back(self) -> bool:
        """Undo the first rename of a replacement if the second rename did not happen. Returns
        whether anything was undone."""
        if lexists(self.target) or not lexists(self.old):
            return False
        self.old.rename(self.target)
        return True

    def move_aside(self, foreign: Callable[[Path], str]) -> str:
        """Move the existing directory to ``old`` unless it is ``foreign``. Returns the reason for
        leaving it in place, or "" if it was moved."""
        if not lexists(self.target):
            return ""
        if not self.target.is_dir() or self.target.is_symlink():
            return "it is no directory"
        kept = foreign(self.target)
        if not kept:
            self.target.rename(self.old)
            kept = "it cannot be read"
            try:
                kept = foreign(self.old)  # files may have been added in the meantime
            finally:
                if kept:
                    self.keep(self.old)
        return kept

    def keep(self, path: Path) -> Path:
        """Give a temporary directory a permanent name. It is the final name, or a similar name next
        to it. Returns this name."""
        lasting = self.target
        if lexists(lasting):
            lasting = self.target.with_name(f"{self.target.name}-{self.key}")
        path.rename(lasting)
        return lasting

    def clean_up(self) -> None:
        """Delete all files of the claim. The lock is deleted last, because without it no process
        could tell to whom the other files belong."""
        with suppress(OSError):
            self.put_back()
        if (
            _delete(self.new)
            and (lexists(self.target) or not lexists(self.old))
            and _delete(self.old)
        ):
            self.lock.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Clean up if the writer is dead. If it may be alive, change nothing."""
        left = lexists(self.new) or lexists(self.old)
        # A lock without text comes from a writer that has written nothing else: it was killed
        # before it could, or has not come that far yet.
        with suppress(OSError), _taken(self.lock) as (is_free, text):
            if not is_free:
                return
            sure = _from_this_machine(text) if text else not left
            # If another directory has taken the place of one that was moved aside, only their owner
            # can decide which to keep.
            if sure and not (lexists(self.new) and lexists(self.old) and lexists(self.target)):
                if self.put_back():
                    LOGGER.warning("Restored %s, which a killed run had moved aside.", self.target)
                    left = lexists(self.new)
                self.clean_up()
                if not (lexists(self.new) or lexists(self.old)):
                    if left:
                        LOGGER.warning(
                            "Removed files that a killed run left next to %s.", self.target
                        )
                    return
        kept = " and ".join(str(path) for path in (self.new, self.old) if lexists(path))
        if kept:
            sentence = (
                "A run that may still be going on left %s; if none writes to %s, delete it, or "
                "rename it to keep it."
            )
            LOGGER.warning(sentence, kept, self.target)


@contextmanager
def claimed(target: Path) -> Iterator[Claim]:
    """Temporary names for ``target``, under a lock. They are cleaned up when the block ends."""
    remove_leftovers(target.parent, target.name)
    claim, lock = _new_claim(target)
    try:
        os.write(lock, f"{_MAGIC}\n{socket.gethostname()}\n{_boot_id()}\n{os.getpid()}\n".encode())
        yield claim
    finally:
        try:
            claim.clean_up()
        finally:
            os.close(lock)


def _new_claim(target: Path) -> tuple[Claim, int]:
    """Create and lock the lock file of a new claim. Also returns its descriptor."""
    while True:
        claim = Claim(target, secrets.token_hex(8))
        try:
            lock = os.open(claim.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:  # the user knows only the final name
            raise OSError(error.errno, error.strerror, str(target)) from None
        # Another run, looking for leftovers, may take the lock first and delete the file.
        if try_lock(lock) is not False and claim.lock.exists():
            return claim, lock
        os.close(lock)


@contextmanager
def _taken(lock: Path) -> Iterator[tuple[bool, str]]:
    """Try to lock an existing lock file. Yields whether the lock was taken, and the file's text.

    Raises:
        OSError: It is unknown whether another process holds the lock.
    """
    file = os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        is_free = try_lock(file)
        if is_free is None:
            raise OSError("there are no locks here")
        yield is_free, os.read(file, 4096).decode(errors="replace")
    finally:
        os.close(file)


def try_lock(file: int) -> bool | None:
    """Lock an open file without waiting. Returns False if another process has the lock, or None if
    the file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks, as on some network file systems
        return None
    return True


def _from_this_machine(text: str) -> bool:
    """Whether a lock file with this text was written on this machine.

    Locks work across all containers of a machine. On some network file systems they do not work
    across machines.
    """
    magic, host, boot, *_ = [*text.split("\n"), "", "", ""]
    return magic == _MAGIC and (host == socket.gethostname() or (boot != "" and boot == _boot_id()))


def _boot_id() -> str:
    """An id that all containers of a machine share until it restarts, or "" if there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _delete(path: Path) -> bool:
    """Delete a file or a directory, but not the target of a link. Returns whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return not lexists(path)


def user_cache() -> Path | None:
    """The directory for files that EESD can make again, as configured by the user or the system.
    The result is None for a user without a home directory."""
    if given := os.environ.get("EESD_CACHE_DIR"):
        return Path(given)
    of_system = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA")}
    parent = os.environ.get("XDG_CACHE_HOME") or of_system.get(sys.platform) or "~/.cache"
    try:
        return Path(parent).expanduser() / "eesd"
    except RuntimeError:
        return None
