"""The exception for errors that the user can fix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType


class EESDError(Exception):
    """Bad input. The message is one sentence that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """Return a message. If it repeats thousands of characters of input, its middle is left out. The
    end of a message is kept, because it says what to do."""
    return message if len(message) <= 1000 else f"{message[:600]} ... {message[-300:]}"


@contextmanager
def refused(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Turn any exception of a library into an :class:`EESDError`.

    An exception raised by the caller's signal handler passes through, because it may interrupt any
    call and has nothing to do with this call.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EESDError) or _of_handler(error):
            raise
        raise EESDError(sentence(error)) from None


def reason(error: Exception) -> str:
    """The message of a library, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def _of_handler(error: Exception) -> bool:
    """Whether a signal handler raised the exception. A handler is recognized by its argument, the
    interrupted frame."""
    for frame, _ in walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            several = value if isinstance(value, tuple) else (value,)
            if any(isinstance(one, FrameType) for one in several):
                return True
    return False
