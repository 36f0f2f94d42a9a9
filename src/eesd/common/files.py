"""Files and directories that appear under their names whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``. It takes that name when the block ends normally; otherwise it is deleted."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """The nearest directory above ``path`` that exists."""
    return next(parent for parent in path.resolve().parents if parent.exists())


@contextmanager
def directory_written_whole(output: Path) -> Iterator[Path]:
    """A temporary directory beside ``output``. It is renamed to ``output`` if the block succeeds, and deleted if it raises."""
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield staged
        staged.chmod(0o755)
        if output.exists():
            _replace(output, staged)
        else:
            staged.rename(output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _replace(output: Path, staged: Path) -> None:
    """Replace ``output`` by ``staged``, or leave ``output`` as it was if that fails."""
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-old-", dir=output.parent))
    try:
        output.rename(aside / output.name)
        try:
            staged.rename(output)
        except BaseException:
            (aside / output.name).rename(output)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
