"""The KV cache: the memory that both engines read and write in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest
from eesd.runtime.engines.host_memory import HostMemory

STEP = 128
"""Capacity grows by at least 12.5 %, rounded up to a multiple of this many slots."""


class GrowingKVCache:
    """Keys and values of all L + E layers, [L+E, 2, B, KV, S, D], in memory that a subclass's ``_zeros`` allocates.

    Slot i holds the i-th token of the sequence; a round's root is in slot w, and its drafted nodes are behind it. Attention
    costs what S says, not what is filled, so S follows the text in small steps, up to ``limit``.

    Where the stages of verify run on several devices, each device has a shard: the layers of its stage.

    Attributes:
        shards: Arrays or tensors [layers, 2, B, KV, S, D]; the code here works on both.
        version: Number of changes of S. Whoever binds the memory must bind it again when the version changed.
        limit: Most slots.
    """

    shards: list[Any]

    def __init__(self, manifest: Manifest, slots: int, layers: Sequence[Sequence[int]] | None = None, spare: int = 0) -> None:
        """``layers`` lists the layers of each shard; None: all in one. ``spare`` slots are allocated behind those that tokens
        may use: nodes that only pad a call are written there."""
        self.limit = manifest.max_seq_len
        self.version = 0
        self._first = min(slots, self.limit)
        self._spare = spare
        self._head_dim = manifest.geometry.head_dim
        layers = layers or [range(manifest.num_caches)]
        self._rows = {layer: (shard, row) for shard, group in enumerate(layers) for row, layer in enumerate(group)}
        self._shapes = [(len(group), 2, 1, manifest.geometry.num_kv_heads) for group in layers]
        self.shards = self._allocate(self._first)

    def _zeros(self, shard: int, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def _allocate(self, slots: int) -> list[Any]:
        return [self._zeros(shard, (*shape, slots + self._spare, self._head_dim)) for shard, shape in enumerate(self._shapes)]

    @property
    def slots(self) -> int:
        """S now, spare slots included."""
        return int(self.shards[0].shape[4])

    def layer(self, index: int) -> Any:
        """Keys and values of one layer, [2, B, KV, S, D]: the memory itself."""
        shard, row = self._rows[index]
        return self.shards[shard][row]

    def reserve(self, slots: int) -> None:
        """Make room for at least this many slots; growing copies the cache once. Raises :class:`EESDError` beyond the limit."""
        capacity = self.slots - self._spare
        if slots <= capacity:
            return
        if slots > self.limit:
            raise EESDError(f"{slots} tokens do not fit the cache of {self.limit} slots; export with a larger --max-seq-len.")
        wanted = max(slots, capacity + capacity // 8)
        self._resize(min(-(-wanted // STEP) * STEP, self.limit), self.slots)

    def reset(self) -> None:
        """Begin another sequence at the first size, so that a short text does not pay for a long one before it."""
        if self.slots > self._first + self._spare:
            self._resize(self._first, 0)

    def _resize(self, slots: int, used: int) -> None:
        """Have ``slots`` for tokens; the first ``used`` are kept."""
        old, self.shards = self.shards, self._allocate(slots)
        for new, before in zip(self.shards, old, strict=True):
            new[..., :used, :] = before[..., :used, :]
        self.version += 1

    def compact(self, start: int, sources: list[int]) -> None:
        """Move the slots ``sources`` (ascending, each at or behind its target) to ``start``, ``start + 1``, ..."""
        for shard in self.shards:
            shard[..., start : start + len(sources), :] = shard[..., sources, :]


class HostKVCache(GrowingKVCache):
    """A KV cache in host memory, float32."""

    shards: list[NDArray[np.float32]]

    def __init__(self, manifest: Manifest, slots: int = STEP) -> None:
        self._memory = HostMemory(manifest, 1, min(slots, manifest.max_seq_len))
        super().__init__(manifest, slots)

    @property
    def data(self) -> NDArray[np.float32]:
        """All layers, [L+E, 2, B, KV, S, D]."""
        return self._memory.data

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of one layer, each [B, KV, S, D]: a copy."""
        keys, values = self.layer(index).copy()
        return keys, values

    def _allocate(self, slots: int) -> list[Any]:
        return [self._memory.data]

    def _resize(self, slots: int, used: int) -> None:
        self._memory.resize(slots, 1, used)
        self.shards = [self._memory.data]
        self.version += 1

    def values(self, start: int, stop: int) -> NDArray[np.float32]:
        """See :meth:`~eesd.runtime.engines.base.KVCache.values`: the memory itself."""
        return self.data[:, :, 0, :, start:stop]

    def fill(self, start: int, values: NDArray[Any]) -> None:
        self.data[:, :, 0, :, start : start + values.shape[3]] = values
