"""KV caches of the CPU engine: memory that is reserved once, in tiles that attention reads without
a copy.

A sequence has one piece of memory, [L+E, 2, KV, S / 16] tiles of 16 slots, in the layout of
``runtime/operators/SPECIFICATION.md``: float32, float16, or 8-bit levels with a float32 scale for
each row of a head. Pages are allocated on the first write, and released when a long text ends.
"""

import mmap
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.geometry import DELTA
from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Values

KV_CACHE_DTYPES = ("float32", "float16", "int8")
"""Types of cells, in the order of ``Cells`` in ``runtime/operators/kernels.h``."""
TILE = 16
"""Number of slots in a tile."""
KEPT = 64 << 20
"""Bytes that a cache may keep when another text begins; pages beyond them are released."""
HEADER = 64
"""Bytes of the header before the states of a layer: the number of slots after which each state
stands, and which state is committed."""
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, with which reserved addresses do not count as memory."""


def slots_of(manifest: Manifest) -> int:
    """Number of slots of a cache: those of the text, and room for the nodes of a round after
    them."""
    return -(-(manifest.max_seq_len + manifest.max_tree_nodes + 1) // TILE) * TILE


def tile_bytes(manifest: Manifest) -> int:
    """Bytes of all tiles of a cache of float32."""
    geometry = manifest.geometry
    width = -(-geometry.head_dim // TILE) * TILE
    return 8 * manifest.num_caches * geometry.num_kv_heads * slots_of(manifest) * width


def states_at(manifest: Manifest) -> dict[int, range]:
    """Where the states of layers with the delta rule lie in a cache of float32, in bytes from its
    start, by the index of a layer's first cache."""
    geometry = manifest.geometry
    rule = geometry.delta
    if rule is None:
        return {}
    width = -(-rule.value_dim // TILE) * TILE
    size = HEADER + 8 * rule.value_heads * rule.key_dim * width
    layers = [one for one in range(geometry.num_layers) if geometry.kind(one) == DELTA]
    start = tile_bytes(manifest)
    return {
        geometry.caches_of(layer).start: range(start + size * at, start + size * (at + 1))
        for at, layer in enumerate(layers)
    }


class CpuKVCache:
    """The keys and values of one sequence.

    Layers with the delta rule have records instead, in the memory of their tiles, and two states
    after all tiles; see ``DeltaRule`` in ``runtime/operators/operators.cpp``. States are computed
    from records, so only records are moved or kept.

    Args:
        manifest: Manifest of the engine directory.
        dtype: A type in :data:`KV_CACHE_DTYPES`, to which attention rounds what it writes.

    Attributes:
        address: Address of the memory; a multiple of 4096.
        slots: S.
        limit: Maximum number of slots of a text.
        dtype: Type of an element.
        slot_bytes: Bytes of the keys and values of one token.
    """

    fixed_bytes = 0

    def __init__(self, manifest: Manifest, dtype: str = "float32") -> None:
        geometry = manifest.geometry
        if geometry.delta is not None and dtype != "float32":
            raise EESDError(
                f"{geometry.architecture} needs a KV cache of float32, because its states are "
                f"computed from it; {dtype} was given."
            )
        self.dtype = np.dtype(dtype)
        self.slots = slots_of(manifest)
        self.limit = manifest.max_seq_len
        # Number of cells side by side, and of bytes of a row's scale.
        pair, scale = (2, 4) if dtype == "int8" else (1, 0)
        size = geometry.head_dim
        width = -(-geometry.head_dim // TILE) * TILE
        self.slot_bytes = (
            2 * manifest.num_caches * geometry.num_kv_heads * (size * self.dtype.itemsize + scale)
        )
        tiles = self.slots // TILE
        shape = (manifest.num_caches, 2, geometry.num_kv_heads)
        scales_at = TILE * width * self.dtype.itemsize
        self._tile_bytes = prod(shape) * (scales_at + TILE * scale)
        flags = (
            mmap.MAP_PRIVATE
            | mmap.MAP_ANONYMOUS
            | (_NO_RESERVE if hasattr(mmap, "MADV_DONTNEED") else 0)
        )
        states = states_at(manifest)
        size_of_tiles = tiles * self._tile_bytes
        total = max([size_of_tiles, *(place.stop for place in states.values())])
        try:
            self._map = mmap.mmap(-1, total, flags=flags)
        except (OSError, ValueError, OverflowError):
            mebibytes = total >> 20
            raise EESDError(
                f"There are no {mebibytes} MiB of addresses for a cache of {self.slots} slots."
            ) from None
        whole = np.frombuffer(self._map, np.int8)
        memory = whole[:size_of_tiles].reshape(*shape, tiles, -1)
        self.address = int(memory.ctypes.data)
        keys, values = np.moveaxis(memory[..., :scales_at].view(self.dtype), 1, 0)
        self._keys = keys.reshape(*keys.shape[:3], width // pair, TILE, pair)[
            ..., : size // pair, :, :
        ]
        self._values = values.reshape(*keys.shape[:3], TILE // pair, width, pair)[..., :size, :]
        self._scales = memory[..., scales_at:].reshape(*shape, tiles, TILE, scale)
        self._used = 0
        self._after = [whole[at.start :][:16].view(np.int64) for at in states.values()]
        self._records: dict[int, NDArray[np.float32]] = {}
        for first in states:
            part = (geometry.state_caches, *shape[1:], size)
            rows = memory[first : first + part[0]].view(np.float32).reshape(self.slots, -1)
            self._records[first] = rows[:, : prod(part)].reshape(self.slots, *part)
        starts = [0, *(first + geometry.state_caches for first in states)]
        self._tiled = [*map(slice, starts, [*states, shape[0]])]

    def reserve(self, slots: int) -> None:
        if slots > self.limit:
            raise EESDError(
                f"{slots} tokens do not fit the cache of {self.limit} slots; export with a "
                "larger --max-seq-len."
            )
        self._used = max(self._used, slots)

    def reset(self) -> None:
        if self._used * self._tile_bytes > KEPT * TILE and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._used = 0
        self._drop_states(0)

    def _drop_states(self, start: int) -> None:
        """Drop states after slots from ``start`` on, which are about to change."""
        for after in self._after:
            after[after > start] = 0

    def compact(self, start: int, sources: list[int]) -> None:
        self.fill(start, self._gather(np.array(sources, np.intp)))

    def clear(self, start: int, stop: int | None = None) -> None:
        """Do nothing, because attention reads only slots that a token sees."""

    def read(self, index: int) -> tuple[Values, Values]:
        """Keys and values of one layer, each [1, KV, S, D]: a copy."""
        found = self._gather(np.arange(self.slots))[index]
        if self._scales.shape[-1]:
            found = found[..., :-4] * np.ascontiguousarray(found[..., -4:]).view(np.float32)
        return found[0][None].copy(), found[1][None].copy()

    def values(self, start: int, stop: int) -> Values:
        """A copy [L+E, 2, KV, n, D] of the slots from ``start`` to ``stop - 1``. With int8, each
        row is followed by its scale, 4 bytes."""
        return self._gather(np.arange(start, stop))

    def fill(self, start: int, values: NDArray[Any]) -> None:
        size, pair = self._values.shape[-2:]
        slots = np.arange(start, start + values.shape[3])
        tiles, rows = np.divmod(slots, TILE)
        self._drop_states(start)
        for first, records in self._records.items():
            records[slots] = values[first : first + records.shape[1]].transpose(3, 0, 1, 2, 4)
        for layers in self._tiled:
            # NumPy puts the slots first if index arrays and slices are mixed.
            keys, own = values[layers, ..., :size].transpose(1, 3, 0, 2, 4)
            keys = keys.reshape(*keys.shape[:3], size // pair, pair)
            self._keys[layers, :, tiles, :, rows] = keys
            self._values[layers, :, tiles, rows // pair, :, rows % pair] = own
            self._scales[layers][..., tiles, rows, :] = values[layers, ..., size:]

    def _gather(self, slots: NDArray[np.intp]) -> Values:
        size, pair = self._values.shape[-2:]
        tiles, rows = np.divmod(slots, TILE)
        keys = self._keys[:, :, tiles, :, rows]
        values = self._values[:, :, tiles, rows // pair, :, rows % pair]
        found = np.stack((keys.reshape(*keys.shape[:3], size), values)).transpose(2, 0, 3, 1, 4)
        for first, records in self._records.items():
            found[first : first + records.shape[1]] = records[slots].transpose(1, 2, 3, 0, 4)
        return np.concatenate((found, self._scales[..., tiles, rows, :].view(self.dtype)), -1)
