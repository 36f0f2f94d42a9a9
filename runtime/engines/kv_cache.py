"""KV caches that grow with the text. This module has the rule of growth, and the cache in host
memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest

STEP = 128
"""Capacity grows by at least 12.5 %, rounded up to a multiple of this number of slots."""


def grown(capacity: int, slots: int, limit: int) -> int:
    """Return the new capacity of a cache that needs ``slots`` slots, which is more than its current
    capacity.

    Raises:
        EESDError: ``slots`` is more than ``limit``.
    """
    if slots > limit:
        raise EESDError(
            f"{slots} tokens do not fit the cache of {limit} slots; export with a larger "
            "--max-seq-len."
        )
    return min(-(-max(slots, capacity + capacity // 8) // STEP) * STEP, limit)


class HostKVCache:
    """The keys and values of one sequence in host memory, in the form of the exported graphs.

    Slot i is for the i-th token of the sequence. If a round's root is in slot w, the round's
    drafted nodes are in the slots after w. The cost of attention depends on S, not on the number of
    filled slots, so S grows with the text in small steps, up to ``limit``.

    Attributes:
        data: All layers, [L+E, 2, 1, KV, S, D] float32.
        limit: Maximum number of slots.
    """

    fixed_bytes = 0

    def __init__(self, manifest: Manifest, slots: int = STEP) -> None:
        geometry = manifest.geometry
        self.limit = manifest.max_seq_len
        self.slot_bytes = 8 * manifest.num_caches * geometry.num_kv_heads * geometry.head_dim
        self._first = min(slots, self.limit)
        self.data: NDArray[np.float32] = np.zeros(
            (manifest.num_caches, 2, 1, geometry.num_kv_heads, self._first, geometry.head_dim),
            np.float32,
        )

    @property
    def slots(self) -> int:
        """Current S."""
        return int(self.data.shape[4])

    def reserve(self, slots: int) -> None:
        if slots > self.slots:
            self._resize(grown(self.slots, slots, self.limit), self.slots)

    def reset(self) -> None:
        """Begin another sequence at the first size, so that a short text does not pay for an
        earlier long text."""
        if self.slots > self._first:
            self._resize(self._first, 0)
        self.clear(0)

    def _resize(self, slots: int, used: int) -> None:
        """Change the number of slots. The first ``used`` slots are kept."""
        old = self.data
        self.data = np.zeros((*old.shape[:4], slots, old.shape[5]), np.float32)
        self.data[..., :used, :] = old[..., :used, :]

    def compact(self, start: int, sources: list[int]) -> None:
        self.data[..., start : start + len(sources), :] = self.data[..., sources, :]

    def clear(self, start: int, stop: int | None = None) -> None:
        self.data[..., start:stop, :] = 0

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        keys, values = self.data[index].copy()
        return keys, values

    def values(self, start: int, stop: int) -> NDArray[np.float32]:
        """See :meth:`~eesd.runtime.engines.base.KVCache.values`. The result is a view of the
        memory."""
        return self.data[:, :, 0, :, start:stop]

    def fill(self, start: int, values: NDArray[Any]) -> None:
        self.data[:, :, 0, :, start : start + values.shape[3]] = values
