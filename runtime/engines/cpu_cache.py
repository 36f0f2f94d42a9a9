"""KV caches of the CPU engine: memory that is reserved once, in tiles that its attention reads without a copy.

A sequence has one piece of memory, [L+E, 2, KV, S, width], of float32 or float16. Keys lie in tiles of 16 slots, [S / 16,
width, 16], so that scores need no sums across lanes; values in slots, [S, width]. ``width`` is the size of a head, rounded up
to a multiple of 16. Pages come when they are written, and are given back when a long text ends.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Values

TILE = 16
"""Slots whose keys lie in one tile."""
KEPT = 64 << 20
"""Bytes that a cache may keep when another text begins; of more, the pages are given back."""
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: addresses are not counted as memory."""


def slots_of(manifest: Manifest) -> int:
    """Slots of a cache: those of the text, and room for the nodes of a round behind its last one."""
    return -(-(manifest.max_seq_len + manifest.max_tree_nodes + 1) // TILE) * TILE


class CpuKVCache:
    """The keys and values of one sequence.

    Args:
        manifest: Of the engine directory.
        dtype: ``float32``, or ``float16``, to which attention rounds what it writes.

    Attributes:
        address: Of the memory; a multiple of 4096.
        slots: S.
        limit: Most slots of a text.
        dtype: Of an element.
        slot_bytes: Bytes of the keys and values of one token.
    """

    fixed_bytes = 0

    def __init__(self, manifest: Manifest, dtype: str = "float32") -> None:
        geometry = manifest.geometry
        self.dtype = np.dtype(dtype)
        self.slots, self.limit = slots_of(manifest), manifest.max_seq_len
        self.slot_bytes = 2 * self.dtype.itemsize * manifest.num_caches * geometry.num_kv_heads * geometry.head_dim
        self._head_dim, self._width = geometry.head_dim, -(-geometry.head_dim // TILE) * TILE
        self._shape = (manifest.num_caches, 2, geometry.num_kv_heads, self.slots * self._width)
        size = int(np.prod(self._shape)) * self.dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if hasattr(mmap, "MADV_DONTNEED") else 0)
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except (OSError, ValueError, OverflowError):
            raise EESDError(f"There are no {size >> 20} MiB of addresses for a cache of {self.slots} slots.") from None
        memory = np.frombuffer(self._map, self.dtype).reshape(self._shape)
        self.address = int(memory.ctypes.data)
        self._keys = memory[:, 0].reshape(*self._shape[:1], self._shape[2], self.slots // TILE, self._width, TILE)
        self._values = memory[:, 1].reshape(*self._shape[:1], self._shape[2], self.slots, self._width)
        self._used = 0

    def reserve(self, slots: int) -> None:
        if slots > self.limit:
            raise EESDError(f"{slots} tokens do not fit the cache of {self.limit} slots; export with a larger --max-seq-len.")
        self._used = max(self._used, slots)

    def reset(self) -> None:
        per_slot = self.dtype.itemsize * int(np.prod(self._shape)) // self.slots
        if self._used * per_slot > KEPT and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._used = 0

    def compact(self, start: int, sources: list[int]) -> None:
        self.fill(start, self._gather(np.array(sources, np.intp)))

    def clear(self, start: int, stop: int | None = None) -> None:
        """Do nothing: attention reads no slot that a token does not see."""

    def read(self, index: int) -> tuple[Values, Values]:
        """Keys and values of one layer, each [1, KV, S, D]: a copy."""
        every = self._gather(np.arange(self.slots), slice(index, index + 1))
        return every[0, 0][None].copy(), every[0, 1][None].copy()

    def values(self, start: int, stop: int) -> Values:
        """A copy [L+E, 2, KV, n, D] of the slots from ``start`` to ``stop - 1``."""
        return self._gather(np.arange(start, stop))

    def fill(self, start: int, values: NDArray[Any]) -> None:
        count = values.shape[3]
        slots = np.arange(start, start + count)
        # An index array beside a slice: NumPy puts the slots first.
        self._keys[:, :, slots // TILE, : self._head_dim, slots % TILE] = values[:, 0].transpose(2, 0, 1, 3)
        self._values[:, :, start : start + count, : self._head_dim] = values[:, 1]

    def _gather(self, slots: NDArray[np.intp], layers: slice = slice(None)) -> Values:
        keys = self._keys[layers, :, slots // TILE, : self._head_dim, slots % TILE].transpose(1, 2, 0, 3)
        return np.stack((keys, self._values[layers][:, :, slots, : self._head_dim]), 1)
