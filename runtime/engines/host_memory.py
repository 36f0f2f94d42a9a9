"""Host memory for keys and values, which stays when the number of slots changes."""

from math import prod

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import Manifest

SPARE, SMALL = 4, 64 << 20
"""Memory is kept if it has at most this many times what is needed, or this many bytes: getting pages from the system takes
longer than copying does."""


class HostMemory:
    """Keys and values of B sequences, [L+E, 2, B, KV, S, D], float32.

    Slots that nobody wrote hold anything finite. Pages that are not touched are not taken.

    Attributes:
        data: The memory as it is laid out now. Another S moves all of it.
    """

    def __init__(self, manifest: Manifest, rows: int, slots: int) -> None:
        geometry = manifest.geometry
        self._outer, self._inner = (manifest.num_caches, 2), (rows, geometry.num_kv_heads)
        self._head_dim = geometry.head_dim
        self._memory = np.zeros(self._size(slots), np.float32)
        self.data = self._view(slots)

    @property
    def slots(self) -> int:
        """S now."""
        return int(self.data.shape[4])

    def resize(self, slots: int, rows: int, used: int) -> None:
        """Have S slots. The first ``used`` slots of the first ``rows`` sequences are kept."""
        old, size = self.data, self._size(slots)
        if not size <= len(self._memory) <= max(SPARE * size, SMALL // self._memory.itemsize):
            self._memory = np.zeros(size, np.float32)
        self.data = self._view(slots)
        # Both layouts may be in the same memory. A layer lies behind where it was if S grows, and before it if not: in this
        # order each is written only where others have been read. Within one, NumPy sees to it.
        layers = [*np.ndindex(*self._outer)]
        for layer in reversed(layers) if slots > old.shape[4] else layers:
            self.data[layer][:rows, :, :used] = old[layer][:rows, :, :used]

    def _size(self, slots: int) -> int:
        return prod((*self._outer, *self._inner, slots, self._head_dim))

    def _view(self, slots: int) -> NDArray[np.float32]:
        return self._memory[: self._size(slots)].reshape(*self._outer, *self._inner, slots, self._head_dim)
