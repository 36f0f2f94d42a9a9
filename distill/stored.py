"""Files that a run writes and reads again. A stopped run, a full disk or an edit may have damaged
them in the meantime."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.files import written_whole

MAKE_AGAIN = "delete it, and the next run makes it again"


def damaged(path: Path, remedy: str = MAKE_AGAIN) -> EESDError:
    """Return the error for a file that no run can have written."""
    return EESDError(f"{path} is damaged; {remedy}.")


def load_tensors(path: Path, remedy: str = MAKE_AGAIN) -> dict[str, Tensor]:
    """Read a safetensors file. Raises :class:`EESDError` with the remedy if the file cannot be
    read."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError):
        raise damaged(path, remedy) from None
    return tensors


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Add the name of the file or directory to errors that occur while it is written. Errors of
    safetensors and of full disks do not contain it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError)
            else str(error).removeprefix("Error while serializing: ")
        )
        raise EESDError(
            f"{path} cannot be written ({reason}); free some space, and the same command continues."
        ) from None


@contextmanager
def saved_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary file. It gets the name ``path`` when the block ends normally. Errors name
    ``path``."""
    with saving(path), written_whole(path) as temporary:
        yield temporary
