"""Files and directories that appear under their names whole or not at all, and what killed
processes left of them.

What is being written lies beside its final name as ``.NAME.eesd-RANDOM.new``; a directory that it
replaces is moved to ``.old`` for a moment. Before either exists there is
``.NAME.eesd-RANDOM.lock``, which the writing process keeps locked. The operating system unlocks it
when the process ends, however it ends: a lock that can be taken shows that the files beside it are
leftovers. The next run that writes to the same place removes them. What no run wrote is never
removed: the caller says what is foreign.
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
    """A temporary file beside ``path``. It takes that name when the block ends normally; otherwise
    it is deleted."""
    with temporary_beside(path) as temporary:
        yield temporary
        temporary.replace(path)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """The name of a temporary file or directory beside ``path``. What is there when the block ends
    is deleted."""
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
        output: The directory to write. It is no link by then.
        foreign: Says of a directory that was there why it may not be replaced, as "it ..."; "" if
            it may.

    Raises:
        EESDError: What is there may not be replaced. The new directory is kept beside it, and the
            message says where.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with claimed(output) as claim:
        claim.new.mkdir()
        yield claim.new
        if kept := claim.move_aside(foreign):
            raise EESDError(
                f"{output} is not replaced: {kept}; what was written is in {claim.keep(claim.new)}."
            )
        claim.new.rename(output)


def is_temporary(name: str) -> bool:
    """Whether this module gives such a name to temporary files."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(directory: Path, name: str | None = None) -> None:
    """Remove what killed processes left in a directory, and put back a directory that one had moved
    aside.

    Each is logged as a warning, in one line. What may belong to a process that still runs is kept:
    without a word if its lock is held, and with a warning if that cannot be known.

    Args:
        directory: The directory to look in. It need not exist.
        name: Only what was being written under this name. None: everything.
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
        key: Random, so that no two writers share a name.
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
        """Undo the first of the two renames of a replacement if the second did not happen. Returns
        whether it did that."""
        if lexists(self.target) or not lexists(self.old):
            return False
        self.old.rename(self.target)
        return True

    def move_aside(self, foreign: Callable[[Path], str]) -> str:
        """Move the directory of the final name to ``old``, unless it is ``foreign``. Returns why it
        stays, or ""."""
        if not lexists(self.target):
            return ""
        kept = (
            foreign(self.target)
            if self.target.is_dir() and not self.target.is_symlink()
            else "it is no directory"
        )
        if not kept:
            self.target.rename(self.old)
            kept = "it cannot be read"
            try:
                kept = foreign(self.old)  # something may have come in the meantime
            finally:
                if kept:
                    self.keep(self.old)
        return kept

    def keep(self, path: Path) -> Path:
        """Give a directory with a temporary name a lasting one: the final name, or one beside it.
        Returns that."""
        lasting = (
            self.target.with_name(f"{self.target.name}-{self.key}")
            if lexists(self.target)
            else self.target
        )
        path.rename(lasting)
        return lasting

    def clean_up(self) -> None:
        """Delete everything, the lock last: without it nobody could tell what the rest is."""
        with suppress(OSError):
            self.put_back()
        if (
            _delete(self.new)
            and (lexists(self.target) or not lexists(self.old))
            and _delete(self.old)
        ):
            self.lock.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Clean up if the writer is dead; otherwise, or if that is not sure, leave everything as it
        is."""
        left = lexists(self.new) or lexists(self.old)
        # A lock without text was made by a writer that was killed, or has not gone on, before it
        # wrote anything else.
        with suppress(OSError), _taken(self.lock) as (is_free, text):
            if not is_free:
                return
            sure = _from_this_machine(text) if text else not left
            # Something took the place of a directory that was moved aside: only its owner knows
            # which of the two is wanted.
            if sure and not (lexists(self.new) and lexists(self.old) and lexists(self.target)):
                if self.put_back():
                    LOGGER.warning(
                        "%s is back, which a killed run had moved aside to replace it.", self.target
                    )
                    left = lexists(self.new)
                self.clean_up()
                if not (lexists(self.new) or lexists(self.old)):
                    if left:
                        LOGGER.warning("Removed what a killed run left beside %s.", self.target)
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
    """Temporary names for what will be ``target``, under a lock. They are cleaned up at the end."""
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
    """Create and lock the lock file of a new claim; returns its descriptor, too."""
    while True:
        claim = Claim(target, secrets.token_hex(8))
        try:
            lock = os.open(claim.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:  # the user knows the final name only
            raise OSError(error.errno, error.strerror, str(target)) from None
        # Another run that just looks for leftovers may take the lock first, and delete the file.
        if try_lock(lock) is not False and claim.lock.exists():
            return claim, lock
        os.close(lock)


@contextmanager
def _taken(lock: Path) -> Iterator[tuple[bool, str]]:
    """Try to lock an existing lock file. Gives whether that worked, and the file's text.

    Raises:
        OSError: It is not known whether another process holds the lock.
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
    """Lock an open file without waiting. False: another process has the lock. None: there are no
    locks here."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return None
    return True


def _from_this_machine(text: str) -> bool:
    """Whether the lock file with this text was written on this machine.

    Locks reach all containers of a machine. On some network file systems they do not reach other
    machines.
    """
    magic, host, boot, *_ = [*text.split("\n"), "", "", ""]
    return magic == _MAGIC and (host == socket.gethostname() or (boot != "" and boot == _boot_id()))


def _boot_id() -> str:
    """A number that is the same in all containers of a machine, until it starts again. Empty where
    there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _delete(path: Path) -> bool:
    """Delete a file or a directory, and never what a link points at. Returns whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return not lexists(path)


def user_cache() -> Path | None:
    """Where EESD keeps what it can make again, as the user or the system says. None for a user
    without a home."""
    given = os.environ.get("EESD_CACHE_DIR")
    xdg = os.environ.get("XDG_CACHE_HOME")
    of_system = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA")}.get(
        sys.platform
    )
    try:
        return Path(given) if given else Path(xdg or of_system or "~/.cache").expanduser() / "eesd"
    except RuntimeError:
        return None
