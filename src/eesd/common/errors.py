"""The exception for everything that the user can fix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType


class EESDError(Exception):
    """Bad input. The message is one sentence that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """A message without its middle if it repeats input of thousands of characters. Its end says
    what to do."""
    return message if len(message) <= 1000 else f"{message[:600]} ... {message[-300:]}"


@contextmanager
def refused(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Turn what a library raises, which may be any exception, into an :class:`EESDError`.

    An exception of the caller's own signal handler goes on: it may interrupt any call, and says
    nothing about this one.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EESDError) or _of_handler(error):
            raise
        raise EESDError(sentence(error)) from None


def reason(error: Exception) -> str:
    """What a library says, in a line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def _of_handler(error: Exception) -> bool:
    """Whether the handler of a signal raised it: such a function is called with the frame that it
    interrupts."""
    values = [
        value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()
    ]
    return any(
        isinstance(one, FrameType)
        for value in values
        for one in (value if isinstance(value, tuple) else (value,))
    )
