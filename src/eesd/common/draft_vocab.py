"""The draft vocabulary. It consists of the tokens that a draft can predict, and defines the columns
of the draft's logits.

A draft step of a small model spends much of its time on the LM head, though most text uses few of
the tokens. The verifier can still choose tokens that the draft cannot predict, so the vocabulary
affects only acceptance. The module needs no torch.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import DRAFT_VOCAB_FILE, Manifest

Ids = NDArray[np.int64]


def are_draft_vocab(ids: NDArray[np.integer], vocab_size: int) -> bool:
    """Whether these are ids of the vocabulary, in ascending order and without repetition."""
    return bool((np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < vocab_size)


class DraftColumns:
    """The token of each column of the draft's logits. Without a draft vocabulary, column i is token
    i."""

    def __init__(self, ids: Ids | None = None) -> None:
        """``ids`` [Vd] is the draft vocabulary in ascending order, or None for the whole
        vocabulary."""
        self._ids = ids

    def tokens(self, columns: NDArray[np.int64] | Sequence[int]) -> Ids:
        """Token ids for columns."""
        columns = np.asarray(columns, np.int64)
        return columns if self._ids is None else self._ids[columns]

    def of(self, tokens: Sequence[int] | Ids) -> NDArray[np.int64] | Sequence[int]:
        """The columns of these tokens. Tokens without a column are left out."""
        if self._ids is None:
            return tokens
        columns: NDArray[np.int64] = np.searchsorted(self._ids, tokens)[
            self.has(tokens, len(self._ids))
        ]
        return columns

    def has(self, tokens: Sequence[int] | Ids, size: int) -> NDArray[np.bool_]:
        """Whether each of these tokens has one of the first ``size`` columns."""
        if self._ids is None:
            return np.asarray(tokens) < size
        known: NDArray[np.bool_] = (
            self._ids[np.minimum(np.searchsorted(self._ids, tokens), len(self._ids) - 1)] == tokens
        )
        return known

    def spread(self, values: NDArray[np.float64], vocab_size: int) -> NDArray[np.float64]:
        """Turn values of columns into values of tokens [V]. Tokens without a column get 0."""
        if self._ids is None:
            return values
        spread = np.zeros(vocab_size)
        spread[self._ids] = values
        return spread


WHOLE = DraftColumns()
"""Columns of the verifier's logits, and of the logits of a draft that can predict every token."""


def load_draft_vocab(directory: Path, manifest: Manifest) -> Ids | None:
    """Read the draft vocabulary of an engine directory. Returns its ids [Vd] in ascending order, or
    None if the draft has the whole vocabulary.

    Raises:
        EESDError: The file does not hold ids of the vocabulary in ascending order.
    """
    if not manifest.exit_head.draft_vocab:
        return None
    ids = np.fromfile(directory / DRAFT_VOCAB_FILE, "<i8").astype(np.int64)
    if len(ids) != manifest.exit_head.draft_vocab or not are_draft_vocab(
        ids, manifest.geometry.vocab_size
    ):
        raise EESDError(f"{directory / DRAFT_VOCAB_FILE} is damaged; export the model again.")
    return ids
