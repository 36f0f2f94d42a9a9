"""Portions of the training text. A run on a CPU trains on a small amount of text first and then
doubles it repeatedly, so that the first acceptance figures come after minutes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

FIRST = 32
"""Number of texts or rows in the first portion on a CPU."""


class Portion(NamedTuple):
    """A part of the training.

    Attributes:
        size: Number of texts or rows in use, counted from the first.
        end: The step at which the portion ends.
    """

    size: int
    end: int


def portions(size: int, steps: int, first: int) -> list[Portion]:
    """Split a training into portions. Each portion has twice the text of the previous portion.

    Args:
        size: Number of texts or rows.
        steps: Steps of the training. A portion ends after its share of the steps.
        first: Size of the first portion.
    """
    found = []
    while first < size:
        found.append(Portion(first, steps * first // size))
        first *= 2
    return [*(portion for portion in found if portion.end), Portion(size, steps)]


def time_left(seconds: float) -> str:
    """Return a duration in words."""
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes / 60:.1f} h"


class HeldSignals:
    """Signals that are held back until the end of a block.

    Attributes:
        came: The first signal that arrived, or None. The handler sets it.
    """

    def __init__(self) -> None:
        self.came: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or number


@contextmanager
def held_signals() -> Iterator[HeldSignals]:
    """Defer SIGTERM, SIGHUP and Ctrl-C until the end of the block. The block checks ``came`` and
    saves its work. The usual handlers run afterwards."""
    held = HeldSignals()
    before = {}
    with suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            before[number] = signal.signal(number, held)
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held.came is not None:
            signal.raise_signal(held.came)
