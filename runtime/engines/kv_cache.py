"""The KV cache: the memory that both engines read and write in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest

STEP = 128
"""Slots are added in multiples of it, and an eighth of what there is at least."""


class GrowingKVCache:
    """Keys and values of all L + E caches, [L+E, 2, B, KV, S, D], in the memory that a subclass's ``_zeros`` takes.

    Slot i holds the i-th token of the sequence; the round's root sits at slot w and drafted nodes behind it. Attention costs
    what S says, not what is filled, so S follows the text in small steps, up to ``limit``. ``generation`` counts the changes
    of S: who binds the memory must bind it again when it changed.

    Where stages of verify run on devices of their own, each has a part of the caches: ``caches`` lists those of each part.
    """

    parts: list[Any]
    """Arrays or tensors: what is done here is written alike for both."""

    def __init__(self, manifest: Manifest, slots: int, caches: Sequence[Sequence[int]] | None = None) -> None:
        self.limit = manifest.max_seq_len
        self.generation = 0
        self._first = min(slots, self.limit)
        self._head_dim = manifest.geometry.head_dim
        caches = caches or [range(manifest.num_caches)]
        self._where = {cache: (part, row) for part, group in enumerate(caches) for row, cache in enumerate(group)}
        self._shapes = [(len(group), 2, 1, manifest.geometry.num_kv_heads) for group in caches]
        self.parts = self._all_zeros(self._first)

    def _zeros(self, part: int, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def _all_zeros(self, slots: int) -> list[Any]:
        return [self._zeros(part, (*shape, slots, self._head_dim)) for part, shape in enumerate(self._shapes)]

    @property
    def slots(self) -> int:
        return int(self.parts[0].shape[4])

    def cache(self, index: int) -> Any:
        """Keys and values of one cache, [2, B, KV, S, D]: the memory itself."""
        part, row = self._where[index]
        return self.parts[part][row]

    def reserve(self, slots: int) -> None:
        """Make room for at least ``slots`` slots (one copy of what is there); :class:`EESDError` beyond the limit."""
        if slots <= self.slots:
            return
        if slots > self.limit:
            raise EESDError(f"{slots} tokens do not fit the cache of {self.limit} slots; export with a larger --max-seq-len.")
        wanted = max(slots, self.slots + self.slots // 8)
        larger = self._all_zeros(min(-(-wanted // STEP) * STEP, self.limit))
        for new, old in zip(larger, self.parts, strict=True):
            new[..., : self.slots, :] = old
        self.parts = larger
        self.generation += 1

    def reset(self) -> None:
        """Begin another sequence: back to the first size, so that a short text does not pay for a long one before it."""
        if self.slots > self._first:
            self.parts = self._all_zeros(self._first)
            self.generation += 1

    def compact(self, start: int, sources: list[int]) -> None:
        """Move the slots ``sources`` (ascending, each at or behind its target) to ``start``, ``start + 1``, ..."""
        for part in self.parts:
            part[..., start : start + len(sources), :] = part[..., sources, :]


class HostKVCache(GrowingKVCache):
    """A kv_cache in host memory, in float32."""

    parts: list[NDArray[np.float32]]

    def __init__(self, manifest: Manifest, slots: int = STEP) -> None:
        super().__init__(manifest, slots)

    @property
    def data(self) -> NDArray[np.float32]:
        """All caches, [L+E, 2, B, KV, S, D]."""
        return self.parts[0]

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of one cache, each [B, KV, S, D]: a copy."""
        keys, values = self.cache(index).copy()
        return keys, values

    def _zeros(self, part: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.zeros(shape, dtype=np.float32)
