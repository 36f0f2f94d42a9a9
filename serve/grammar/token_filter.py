"""Tokens that a request allows or forbids by name. The fields are vLLM's ``allowed_token_ids`` and
``bad_words``."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.constraint import GrammarConstraint
from eesd.runtime.request import ConstraintError
from eesd.runtime.text import TextCodec


def word_tokens(words: Sequence[str], codec: TextCodec) -> list[tuple[int, ...]]:
    """Return two tokenizations of each word. One is for the beginning of a text, and one is for the
    place after a space."""
    ways = dict.fromkeys(
        tuple(codec.ids(before + word.lstrip(), special=False))
        for word in words
        for before in ("", " ")
    )
    return [way for way in ways if way]


class TokenFilter:
    """A :class:`~eesd.runtime.request.Constraint` that combines lists of tokens with another
    constraint.

    Args:
        size: Number of tokens in the vocabulary.
        only: The allowed tokens, or None if all tokens are allowed.
        words: Forbidden sequences of tokens.
        inner: The other constraint, or None if there is none.

    Attributes:
        ignored: Keywords of a JSON schema that are not enforced.
    """

    def __init__(
        self,
        size: int,
        only: Sequence[int] | None,
        words: Sequence[tuple[int, ...]],
        inner: GrammarConstraint | None = None,
    ) -> None:
        self._mask = np.full(size, only is None)
        self._words = words
        self._inner = inner
        self.ignored = inner.ignored if inner else frozenset()
        if only is not None:
            self._mask[list(only)] = True

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return the mask [V] of the tokens that may follow ``tokens``.

        Raises:
            ConstraintError: No token may follow, or the other constraint failed.
        """
        mask = self._mask.copy()
        if self._inner:
            mask &= self._inner.allowed(tokens)
        for *before, last in self._words:
            if not before or list(tokens[-len(before) :]) == before:
                mask[last] = False
        if not mask.any():
            raise ConstraintError(
                "allowed_token_ids and bad_words leave no token to choose; allow more tokens."
            )
        return mask

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return the tokens that the other constraint forces."""
        return self._inner.forced(tokens, most) if self._inner else ()
