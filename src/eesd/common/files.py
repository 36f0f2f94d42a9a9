"""Files that appear under their names whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its name when the block ends well and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
