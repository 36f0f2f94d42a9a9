"""The interfaces of engines and KV caches."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest

Logits = NDArray[np.float32]
Choose = Callable[[Any], Any]
"""A function that runs on the device after a call. It maps the logits [n, V] to the values for the
host [n, ...] in float64, or to None. Both tensors are on the device."""
Values = NDArray[Any]
"""The keys and values of n tokens in host memory. The array is [L+E, 2, KV, n, D], and the order of
layers is the backend's. 16-bit values are represented by their bits."""


class StepOutputs:
    """The results of a call of n nodes. They are views that the next call of the same engine may
    overwrite.

    Attributes:
        topk_ids, topk_logprobs: The ids and log-probabilities [n, K] of the K most likely tokens of
            each node. Only a draft engine returns them.
        chosen: The result [n, ...] of the call's :data:`Choose` function, if the call had one.
        levels: Number of levels that a draft call ran. If there are several levels, row i belongs
            to level i.
    """

    def __init__(
        self,
        logits: Logits | Callable[[], Logits],
        topk_ids: NDArray[np.int64] | None = None,
        topk_logprobs: NDArray[np.float32] | None = None,
        argmax_ids: NDArray[np.int64] | None = None,
        chosen: NDArray[np.float64] | None = None,
        *,
        levels: int = 1,
    ) -> None:
        """``logits`` is [n, V] float32, or a function that fetches them when they are first used. A
        greedy round does not need the logits: a verify engine on a device also returns
        ``argmax_ids`` [n], which have far fewer bytes to fetch."""
        self._logits = logits
        self.topk_ids = topk_ids
        self.topk_logprobs = topk_logprobs
        self._argmax_ids = argmax_ids
        self.chosen = chosen
        self.levels = levels

    @property
    def logits(self) -> Logits:
        """The logits [n, V] in float32."""
        if not isinstance(self._logits, np.ndarray):
            self._logits = self._logits()
        return self._logits

    def fetched(self) -> "StepOutputs":
        """These outputs, with a copy of the logits."""
        self._logits = self.logits.copy()
        return self

    def argmax(self, row: int) -> int:
        """Return the most likely token of a node; see :func:`most_likely`. The logit of a token
        that a device chose is not checked."""
        return (
            most_likely(self.logits[row])
            if self._argmax_ids is None
            else int(self._argmax_ids[row])
        )


def most_likely(logits: Logits) -> int:
    """Return the most likely token according to the logits [V]. If several tokens are equally
    likely, it is the token with the lowest id.

    Raises:
        EESDError: A logit is NaN, or infinitely large.
    """
    token = int(logits.argmax())  # NumPy finds a NaN first
    check_largest(logits.item(token))
    return token


def check_largest(logit: float) -> None:
    """Raise :class:`EESDError` if a row's largest logit is NaN or infinitely large, because no
    token may be chosen from such a row."""
    if not logit < inf:
        raise EESDError(
            "The model's logits are not finite, so no token can be chosen; check its "
            "weights, or export with --dtype float32 if the engines have 16 bits."
        )


class KVCache(Protocol):
    """The KV cache [L+E, 2, KV, S, D] of one sequence. Both engines read and write it in place. It
    may be in any kind of memory."""

    @property
    def slot_bytes(self) -> int:
        """Number of bytes of the keys and values of one token."""

    @property
    def fixed_bytes(self) -> int:
        """Number of bytes that the cache takes regardless of the text's length. It is 0 if the
        cache grows with the text."""

    def reserve(self, slots: int) -> None:
        """Make room for at least this number of slots. Raises :class:`EESDError` if the limit is
        exceeded."""

    def reset(self) -> None:
        """Begin another sequence."""

    def compact(self, start: int, sources: list[int]) -> None:
        """Move the slots ``sources`` to ``start``, ``start + 1`` and so on. The sources are in
        ascending order, and each is at or after its target."""

    def clear(self, start: int, stop: int | None = None) -> None:
        """Make the slots from ``start`` to ``stop - 1`` harmless. If ``stop`` is None, these are
        all slots from ``start`` on. Some engines multiply a masked slot by 0, and 0 x NaN is
        NaN."""

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return a copy of one layer's keys and values, each [1, KV, S, D], in host memory."""

    def values(self, start: int, stop: int) -> Values:
        """Keys and values of all layers in the slots from ``start`` to ``stop - 1``. The result may
        be a view of the memory."""

    def fill(self, start: int, values: Values) -> None:
        """Write keys and values, which :meth:`values` of a similar cache returned, to the slots
        from ``start`` on. There must be room for them."""


class Call(NamedTuple):
    """A call runs n tokens of one sequence. Their keys and values go to the slots
    ``slot`` to ``slot + n - 1``.

    Attributes:
        kv_cache: The cache of the sequence. It has room for the tokens.
        tokens: The ids [n] of a round's tokens. If ``logits`` is False, they may be a piece of the
            prompt, which has at most :attr:`Engine.prefill_chunk` tokens.
        positions: Positions in the text [n], for the rotary embedding.
        slot: Slot of the first token.
        context_len: With a ``tree_mask``, every token sees all slots below this slot.
        tree_mask: Mask [n, m] of the slots ``context_len`` to ``context_len + m - 1`` that each
            token also sees. It is None if the tokens are a chain, in which each token sees every
            slot up to its own.
        logits: Whether the tokens get logits. Tokens of a prompt do not need logits.
        choose: A function that chooses tokens on the device. It may be set only if the engine's
            :attr:`Engine.chooses` is True.
        levels: Maximum number of levels that a draft engine drafts after a single token. Each level
            follows the most likely token of the previous level. The engine may draft fewer levels,
            but it drafts at least one. A call for several levels returns no logits.
    """

    kv_cache: KVCache
    tokens: Sequence[int]
    positions: Sequence[int]
    slot: int
    context_len: int = 0
    tree_mask: NDArray[np.bool_] | None = None
    logits: bool = True
    choose: Choose | None = None
    levels: int = 1


class Work(NamedTuple):
    """Amount of work in some calls of an engine.

    Attributes:
        nodes: Number of nodes of all sequences, including padding.
        slots: Number of slots that the attention of a sequence reads, on average.
        rows: Number of sequences, including rows that only fill the call.
    """

    nodes: int
    slots: float
    rows: int


class Engine(Protocol):
    """A loaded draft or verify graph."""

    manifest: Manifest
    prefill_chunk: int
    """Maximum number of prompt tokens in one call."""

    @property
    def chooses(self) -> bool:
        """Whether the logits are on a device on which choosing tokens with :attr:`Call.choose` is
        faster than copying the logits."""

    def new_kv_caches(self, count: int = 1) -> "Sequence[KVCache]":
        """Return the caches of ``count`` sequences. Calls of this directory's engines may run these
        sequences together.

        Raises:
            EESDError: The engine cannot run this number of sequences together.
        """

    def prepare(self, kv_caches: "Sequence[KVCache]") -> None:
        """Prepare calls over the caches that one call of :meth:`new_kv_caches` returned, so that no
        round has to wait for the preparation. The contents of the caches do not change."""

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run calls of different sequences. If the backend can, it runs them in one pass. Every
        token gets the same bits as when its sequence runs alone. The exception is a GPU without
        ``exact``, on which the bits depend on the number of nodes and slots that the longest
        sequence needs.

        Returns:
            The outputs of each call, which are empty for a call without logits.
        """

    def work(self, calls: Sequence[Call]) -> Work:
        """Return the amount of work in a :meth:`forward` with at least one call."""


NO_OUTPUTS = StepOutputs(np.zeros((0, 0), np.float32))
"""The outputs of a call without logits."""
