"""Find the tokens that should be avoided in JSON, although the grammar allows them.

* Letters written as ``\\uXXXX``. A schema's grammar compares keys by their spelling, so
  ``"\\u0061"`` would be another key than ``"a"``, and could have a value of any type. Half a
  surrogate pair would not even be text.
* Endless digits. Each part of a number may have at most :data:`DIGITS` digits. This is enough to
  tell 64-bit floats apart, and too few for an infinite number.

Both remain allowed where no other token is allowed.
"""

from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

OUTSIDE, INSIDE, ESCAPED = range(3)
"""The modes are outside strings, inside a string, and after a backslash in a string."""
DIGITS = {"integer": 40, "fraction": 17, "exponent": 2}
"""Maximum number of digits in each part of a number."""


class Place(NamedTuple):
    """The state at the end of a text. It has the mode, the current part of a number, and the number
    of digits of this part so far."""

    mode: int = OUTSIDE
    part: str = ""
    digits: int = 0

    def after(self, data: bytes) -> "Place":
        """Return the place to which the text ``data`` leads from this place."""
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
    """The tokens to avoid at each place of a JSON text, for one vocabulary."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._bytes = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
        self._digits = np.array(
            [len(data) - len(data.lstrip(b"0123456789")) for data in self._bytes]
        )
        """Number of digits at the beginning of each token."""
        spelled = [
            [_spells(mode, data) for data in self._bytes] for mode in (OUTSIDE, INSIDE, ESCAPED)
        ]
        self._spelled = np.array(spelled)

    def after(self, place: Place, token: int) -> Place:
        """Return the place after a token."""
        return place.after(self._bytes[token])

    def without(self, mask: NDArray[np.bool_], place: Place) -> NDArray[np.bool_]:
        """Return a mask [V] without the tokens to avoid, unless there are no other tokens."""
        wanted = mask & ~self._spelled[place.mode]
        if place.part:
            wanted &= (self._digits == 0) | (self._digits + place.digits <= DIGITS[place.part])
        return wanted if wanted.any() else mask


def _spells(mode: int, data: bytes) -> bool:
    """Whether a token that begins in this mode writes ``\\u``, or the ``u`` after a backslash."""
    if mode == ESCAPED and data[:1] == b"u":
        return True
    at = data.find(b"\\u")
    while at >= 0:
        if Place(mode).after(data[: at + 1]).mode == ESCAPED:
            return True
        at = data.find(b"\\u", at + 1)
    return False
