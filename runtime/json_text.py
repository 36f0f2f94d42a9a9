"""What a text of JSON should not go on with, though its grammar allows it.

* Letters as ``\\uXXXX``. A schema's grammar tells keys apart as they are spelled, so ``"\\u0061"``
  would be another key than ``"a"``, with a value of any type. Half a surrogate pair would be no
  text at all.
* Digits without end. A number has at most :data:`DIGITS` of each part: as many as 64-bit floats can
  tell apart, and none is infinite.

Both stay allowed where nothing else may come.
"""

from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

OUTSIDE, INSIDE, ESCAPED = range(3)
"""Outside of strings, inside of one, and behind a backslash in one."""
DIGITS = {"integer": 40, "fraction": 17, "exponent": 2}
"""Most digits of a part of a number."""


class Place(NamedTuple):
    """Where a text has come to: in strings, and in which part of a number behind how many of its
    digits."""

    mode: int = OUTSIDE
    part: str = ""
    digits: int = 0

    def after(self, data: bytes) -> "Place":
        """The place behind more text."""
        mode, part, digits = self
        for letter in data.decode("latin-1"):
            if mode == ESCAPED:
                mode = INSIDE
            elif letter == '"':
                mode = INSIDE if mode == OUTSIDE else OUTSIDE
                part = ""
                digits = 0
            elif mode == INSIDE:
                mode = ESCAPED if letter == "\\" else INSIDE
            elif letter in "0123456789":
                part = part or "integer"
                digits = digits + 1
            elif letter == "." and part:
                part = "fraction"
                digits = 0
            elif letter in "eE" and part:
                part = "exponent"
                digits = 0
            elif letter not in "+-" or part != "exponent":
                part = ""
                digits = 0
        return Place(mode, part, digits)


class JSONTokens:
    """The tokens of a vocabulary that should not come where a text of JSON has come to."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._bytes = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
        self._digits = np.array(
            [len(data) - len(data.lstrip(b"0123456789")) for data in self._bytes]
        )
        """How many digits each token begins with."""
        spelled = [
            [_spells(mode, data) for data in self._bytes] for mode in (OUTSIDE, INSIDE, ESCAPED)
        ]
        self._spelled = np.array(spelled)

    def after(self, place: Place, token: int) -> Place:
        """The place behind a token."""
        return place.after(self._bytes[token])

    def without(self, mask: NDArray[np.bool_], place: Place) -> NDArray[np.bool_]:
        """A mask [V] without those tokens, unless it has no others."""
        wanted = mask & ~self._spelled[place.mode]
        if place.part:
            wanted &= (self._digits == 0) | (self._digits + place.digits <= DIGITS[place.part])
        return wanted if wanted.any() else mask


def _spells(mode: int, data: bytes) -> bool:
    """Whether a token writes ``\\u``, or its ``u``, where it begins in this mode."""
    if mode == ESCAPED and data[:1] == b"u":
        return True
    at = data.find(b"\\u")
    while at >= 0:
        if Place(mode).after(data[: at + 1]).mode == ESCAPED:
            return True
        at = data.find(b"\\u", at + 1)
    return False
