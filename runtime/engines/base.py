"""What the decoder needs from an engine and from a KV cache, whatever runs them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest

Logits = NDArray[np.float32]
Choose = Callable[[Any], Any]
"""Work for a device behind a call: from its logits [n, V], a tensor on the device, to what the host needs of them, a tensor
[n, ...] of float64 there, or None for nothing."""
Values = NDArray[Any]
"""Keys and values of n tokens in host memory, [L+E, 2, KV, n, D], in an order of layers that the backend knows. 16-bit ones
are given as their bits."""


class StepOutputs:
    """Results for n nodes. They are views that the next ``forward`` of the same binding overwrites.

    Attributes:
        topk_ids, topk_logprobs: From a draft engine, the K most likely tokens of each node, [n, K].
        chosen: What a :data:`Choose` made of the logits, [n, ...]; None: nothing.
    """

    def __init__(
        self,
        logits: Logits | Callable[[], Logits],
        topk_ids: NDArray[np.int64] | None = None,
        topk_logprobs: NDArray[np.float32] | None = None,
        argmax_ids: NDArray[np.int64] | None = None,
        chosen: NDArray[np.float64] | None = None,
    ) -> None:
        """``logits`` [n, V] float32, or a function that fetches them when they are first used: a greedy round does not use
        them. A verify engine on a device gives ``argmax_ids`` [n], which are fewer bytes to fetch than logits."""
        self._logits = logits
        self.topk_ids = topk_ids
        self.topk_logprobs = topk_logprobs
        self._argmax_ids = argmax_ids
        self.chosen = chosen

    @property
    def logits(self) -> Logits:
        """[n, V] float32."""
        if not isinstance(self._logits, np.ndarray):
            self._logits = self._logits()
        return self._logits

    def argmax(self, row: int) -> int:
        """The most likely token of a node, see :func:`most_likely`. Where a device chose it, its logit is not checked."""
        return most_likely(self.logits[row]) if self._argmax_ids is None else int(self._argmax_ids[row])


def most_likely(logits: Logits) -> int:
    """The most likely token by logits [V]; the one with the lowest id among equals.

    Raises:
        EESDError: A logit is NaN, or infinitely large.
    """
    token = int(logits.argmax())  # NumPy finds a NaN first
    check_largest(logits[token])
    return token


def check_largest(logit: np.floating[Any]) -> None:
    """Raise :class:`EESDError` if the largest of some logits is NaN, or infinitely large: no token may be chosen from them."""
    if not logit < np.inf:
        raise EESDError(
            "The model's logits are no finite numbers, so no token can be chosen; check its weights, and with 16-bit engines "
            "export with --dtype float32."
        )


class Call(NamedTuple):
    """The arguments of :meth:`Binding.forward`."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slot: int
    context_len: int = 0
    tree_mask: NDArray[np.bool_] | None = None


class KVCache(Protocol):
    """The KV cache [L+E, 2, B, KV, S, D] that both engines read and write in place, wherever its memory is."""

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots. Raises :class:`EESDError` beyond the limit."""
        ...

    def reset(self) -> None:
        """Begin another sequence."""
        ...

    def compact(self, start: int, sources: list[int]) -> None:
        """Move the slots ``sources`` (ascending, each at or behind its target) to ``start``, ``start + 1``, ..."""
        ...

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of one layer, each [B, KV, S, D]: a copy in host memory."""
        ...

    def values(self, start: int, stop: int) -> Values:
        """Keys and values of the slots from ``start`` to ``stop - 1``, of all layers. They may be the memory itself."""
        ...

    def fill(self, start: int, values: Values) -> None:
        """Write what :meth:`values` of such a cache gave, from the slot ``start`` on, for which there is room."""
        ...


class Rows(Protocol):
    """KV caches of several sequences in one piece of memory, [L+E, 2, B, KV, S, D], so that one call runs them all.

    The rows in use are the first ones. All have the same S, for which attention pays.
    """

    @property
    def slots(self) -> int:
        """S now."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether all rows have all slots from the beginning, and keep them; else S follows the longest text."""
        ...

    @property
    def ragged(self) -> bool:
        """Whether each row has slots and nodes of its own, so that no row pays for another one's text or draft."""
        ...

    def resize(self, slots: int, used: Sequence[int]) -> None:
        """Have at least this many slots, and not many more.

        Args:
            slots: Slots that a row needs.
            used: Slots of each row in use, which are kept.
        """
        ...

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first slots of a row to another one."""
        ...

    def take(self, row: int, kv_cache: KVCache, used: int) -> None:
        """Copy the first slots of a sequence that has a cache of its own."""
        ...

    def take_over(self, row: int, other: "Rows", source: int, used: int) -> None:
        """Copy the first slots of the row ``source`` of other rows of this engine."""
        ...

    def values(self, row: int, start: int, stop: int) -> Values:
        """Keys and values of a row's slots from ``start`` to ``stop - 1``. They may be the memory itself."""
        ...


class RowsBinding(Protocol):
    """An engine bound to the KV caches of several sequences."""

    def forward(self, first: int, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run a call for each of the rows from ``first`` on, as one; each row gets the outputs of its own nodes.

        All rows take as many nodes as the longest. What a shorter one gets more is written behind its own nodes, so every row
        needs room for the longest call.
        """
        ...


class Part(NamedTuple):
    """Sequences of a joint call that share a memory.

    Attributes:
        memory: Rows, or a KV cache of one sequence.
        first: The first of its rows that takes part.
        calls: The nodes of this row and of those behind it.
        logits: Whether its nodes get logits; those of a prompt do not need them.
    """

    memory: "Rows | KVCache"
    first: int
    calls: Sequence[Call]
    logits: bool = True


class Binding(Protocol):
    """An engine bound to one KV cache."""

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        context_len: int = 0,
        tree_mask: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        """Run n tokens, and write their keys and values to the slots ``slot`` to ``slot + n - 1``.

        Args:
            tokens: Ids [n]. Plans take those of a round at most.
            positions: Positions in the text [n], for the rotary embedding.
            slot: Slot of the first token.
            context_len: With a ``tree_mask``: every token sees the slots below it.
            tree_mask: [n, m]; which of the slots ``context_len`` to ``context_len + m - 1`` each token sees besides. Without
                it the tokens are a chain: each sees every slot up to its own.
        """
        ...

    def prefill(self, tokens: Sequence[int], slot: int) -> None:
        """Write the keys and values of n tokens of a prompt, at most :attr:`Engine.prefill_chunk`: a chain without logits.

        Their slots, which are also their positions, are ``slot`` to ``slot + n - 1``.
        """
        ...


@runtime_checkable
class ChainBinding(Protocol):
    """A binding of a draft engine that drafts a chain by itself, without the host between its steps."""

    def draft_chain(self, token: int, slot: int, count: int) -> StepOutputs:
        """Run ``count`` steps behind ``token`` at ``slot``; each takes the most likely token of the step before it.

        Returns:
            A row for each step, without logits.
        """
        ...


@runtime_checkable
class ChoosingBinding(Protocol):
    """A binding whose logits are on a device, where work behind a call can choose tokens. The host still waits once."""

    @property
    def chooses(self) -> bool:
        """Whether that is worth it. If not, the host shall choose."""
        ...

    def forward_and_choose(self, call: Call, choose: Choose) -> StepOutputs:
        """:meth:`Binding.forward`, with :attr:`StepOutputs.chosen`."""
        ...


class Engine(Protocol):
    """A loaded draft or verify graph."""

    prefill_chunk: int
    """Tokens of the prompt that one call takes at most."""

    def new_kv_cache(self) -> KVCache:
        """A KV cache in the memory that this backend's engines use."""
        ...

    def bind(self, kv_cache: KVCache) -> Binding:
        """Bind the engine to a KV cache. Several bindings may exist side by side."""
        ...


@runtime_checkable
class RowsEngine(Engine, Protocol):
    """An engine that runs several sequences in one call, as those of all backends do."""

    manifest: Manifest

    def new_rows(self, most: int) -> Rows:
        """Memory for the KV caches of at most this many sequences.

        Raises:
            EESDError: The engine cannot run so many in one call, or not without their changing each other's logits.
        """
        ...

    def bind_rows(self, rows: Rows) -> RowsBinding:
        """Bind the engine to several sequences."""
        ...


class JointEngine(Protocol):
    """Runs sequences in several memories in one call, each with as many nodes and slots as its part has.

    All sequences of one memory have the same number of nodes and of slots. Here a long text does not make short ones pay, and a
    piece of a prompt shares a call with rows that decode. Every node gets the bits that it gets otherwise.
    """

    parts: int
    """Parts that a call takes at most."""

    def forward(self, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        """Run the parts, some of which have logits; of each of those the outputs of its calls, of the others nothing.

        A row with fewer nodes than others of its part is filled up in attention alone; it needs room for that, see
        :meth:`RowsBinding.forward`.
        """
        ...


@runtime_checkable
class JoiningEngine(RowsEngine, Protocol):
    """An engine that can be had as a :class:`JointEngine`, too."""

    def join(self, parts: int, memory: int) -> JointEngine | None:
        """Load it for so many parts. Its weights then are in memory twice; None if they take more than ``memory`` bytes.

        Raises:
            EESDError: It cannot be loaded.
        """
        ...
