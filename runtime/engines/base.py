"""What an engine is to the decode loop, whatever runs it."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.decoding.sampling import Logits


class StepOutputs:
    """Results for n nodes; views that the next ``forward`` of the same binding overwrites.

    ``logits`` [n, V] float32, given as they are or as a function that fetches them when somebody asks: a prefill's nobody does,
    nor a greedy round's. From a draft engine also the K most likely tokens, ``topk_ids`` and ``topk_logprobs`` [n, K].
    Verify on a device gives ``best`` [n], the likeliest token of each node: fewer bytes to fetch than logits.
    """

    def __init__(
        self,
        logits: Logits | Callable[[], Logits],
        topk_ids: NDArray[np.int64] | None = None,
        topk_logprobs: NDArray[np.float32] | None = None,
        best: NDArray[np.int64] | None = None,
    ) -> None:
        self._logits = logits
        self.topk_ids = topk_ids
        self.topk_logprobs = topk_logprobs
        self._best = best

    @property
    def logits(self) -> Logits:
        if not isinstance(self._logits, np.ndarray):
            self._logits = self._logits()
        return self._logits

    def argmax(self, row: int) -> int:
        """The likeliest token of a node; the one with the lowest id among equals."""
        return int(self.logits[row].argmax() if self._best is None else self._best[row])


class KVCache(Protocol):
    """The KV cache [L+E, 2, B, KV, S, D] that both engines read and write in place, wherever its memory is."""

    def reserve(self, slots: int) -> None:
        """Make room for at least ``slots`` slots; :class:`EESDError` beyond the limit."""
        ...

    def reset(self) -> None:
        """Begin another sequence."""
        ...

    def compact(self, start: int, sources: list[int]) -> None:
        """Move the slots ``sources`` (ascending, each at or behind its target) to ``start``, ``start + 1``, ..."""
        ...

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of one cache, each [B, KV, S, D]: a copy in host memory."""
        ...


class Binding(Protocol):
    """An engine tied to one KV cache."""

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int = 0,
        visible: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        """Run n tokens, writing their keys and values at ``slot`` .. ``slot + n - 1``.

        Every token sees the slots below ``base``; ``visible`` [n, m] says which of the slots ``base`` .. ``base + m - 1``
        it sees besides. Without ``visible`` the tokens are a chain: each sees every slot up to its own.
        """
        ...


@runtime_checkable
class ChainBinding(Protocol):
    """A binding of a draft engine that can draft a chain by itself, without the host between its steps."""

    def draft_chain(self, token: int, slot: int, count: int) -> StepOutputs:
        """``count`` steps behind ``token`` at ``slot``, each fed the likeliest token of the one before; a row for each.

        They have no logits.
        """
        ...


class Engine(Protocol):
    """A loaded draft or verify graph."""

    prefill_chunk: int
    """Tokens of the prompt that one call may take."""

    def new_kv_cache(self) -> KVCache:
        """A kv_cache in the memory that this backend's engines use."""
        ...

    def bind(self, kv_cache: KVCache) -> Binding:
        """Tie the engine to a kv_cache; many bindings may live side by side."""
        ...
