"""The KV slab: one buffer that both engines read and write in place."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.export.manifest import Manifest
from eesd.runtime.errors import EESDError

STEP = 128
"""Slots are added in multiples of it, and an eighth of what there is at least."""


class GrowingSlab:
    """Keys and values of all L + E caches, [L+E, 2, B, KV, S, D], in the memory that a subclass's ``_zeros`` takes.

    Slot i holds the i-th token of the sequence; the round's root sits at slot w and drafted nodes behind it. Attention costs
    what S says, not what is filled, so S follows the text in small steps, up to ``limit``. ``generation`` counts the changes
    of S: who binds ``data`` must bind it again when it changed.
    """

    data: Any
    """An array or a tensor: what is done here is written alike for both."""

    def __init__(self, manifest: Manifest, slots: int) -> None:
        self.limit = manifest.max_seq_len
        self.generation = 0
        self._first = min(slots, self.limit)
        self._shape = (manifest.num_caches, 2, 1, manifest.num_kv_heads)
        self._head_dim = manifest.head_dim
        self.data = self._zeros((*self._shape, self._first, self._head_dim))

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    @property
    def slots(self) -> int:
        return int(self.data.shape[4])

    def reserve(self, slots: int) -> None:
        """Make room for at least ``slots`` slots (one copy of what is there); :class:`EESDError` beyond the limit."""
        if slots <= self.slots:
            return
        if slots > self.limit:
            raise EESDError(f"{slots} tokens do not fit the cache of {self.limit} slots; export with a larger --max-seq-len.")
        wanted = max(slots, self.slots + self.slots // 8)
        data = self._zeros((*self._shape, min(-(-wanted // STEP) * STEP, self.limit), self._head_dim))
        data[..., : self.slots, :] = self.data
        self.data = data
        self.generation += 1

    def reset(self) -> None:
        """Begin another sequence: back to the first size, so that a short text does not pay for a long one before it."""
        if self.slots > self._first:
            self.data = self._zeros((*self._shape, self._first, self._head_dim))
            self.generation += 1

    def compact(self, start: int, sources: list[int]) -> None:
        """Move the slots ``sources`` (ascending, each at or behind its target) to ``start``, ``start + 1``, ..."""
        self.data[..., start : start + len(sources), :] = self.data[..., sources, :]


class KVSlab(GrowingSlab):
    """A slab in host memory, in float32."""

    data: NDArray[np.float32]

    def __init__(self, manifest: Manifest, slots: int = STEP) -> None:
        super().__init__(manifest, slots)

    def _zeros(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return np.zeros(shape, dtype=np.float32)

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self.data[index, 0].copy(), self.data[index, 1].copy()
