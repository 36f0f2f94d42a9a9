"""KV caches of the CPU engine. Their memory is reserved once, and consists of tiles that attention
reads without a copy.

A sequence has one piece of memory with [L+E, 2, KV, S / 16] tiles of 16 slots.
``runtime/operators/SPECIFICATION.md`` describes the layout. The numbers are float32, float16, or
8-bit levels with a float32 scale for each row of a head. Layers whose heads have other sizes use a
part of the same memory, and the rows of latent attention take the place of a layer's keys and
values. Pages are allocated on the first write, and released when a long text ends.
"""

import mmap
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.architecture import Model
from eesd.common.errors import EESDError
from eesd.common.geometry import RULED
from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Values

KV_CACHE_DTYPES = ("float32", "float16", "int8")
"""The types of cells, in the order of ``Cells`` in ``runtime/operators/kernels.h``."""
TILE = 16
"""Number of slots in a tile."""
KEPT = 64 << 20
"""Number of bytes that a cache may keep when another text begins. All further pages are
released."""
HEADER = 64
"""Number of bytes of the header before the states of a layer. The header has the number of slots
before each state, and the index of the committed state."""
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE. With this flag, reserved addresses do not count as memory."""


def slots_of(manifest: Manifest) -> int:
    """Return the number of slots of a cache. It has slots for the text, and then room for the nodes
    of a round."""
    return -(-(manifest.max_seq_len + manifest.max_tree_nodes + 1) // TILE) * TILE


def tile_bytes(manifest: Manifest) -> int:
    """Number of bytes of all tiles of a float32 cache."""
    geometry = manifest.geometry
    width = _width(geometry.head_dim)
    return 8 * manifest.num_caches * geometry.num_kv_heads * slots_of(manifest) * width


def states_at(manifest: Manifest) -> dict[int, range]:
    """Return the byte ranges, in a float32 cache, of the states of layers with the delta rule or a
    state space. The keys are the indices of each layer's first cache of states."""
    geometry = manifest.geometry
    rule = geometry.delta
    if rule is None:
        return {}
    width = -(-rule.value_dim // TILE) * TILE
    size = HEADER + 8 * rule.value_heads * rule.key_dim * width
    model = Model(geometry, manifest.exit_head)
    layers = [one for one in map(model.layer, range(geometry.num_layers)) if one.kind in RULED]
    start = tile_bytes(manifest)
    return {
        layer.state_caches.start: range(start + size * at, start + size * (at + 1))
        for at, layer in enumerate(layers)
    }


class CpuKVCache:
    """The keys and values of one sequence.

    Layers with the delta rule or a state space have records in the memory of their tiles instead,
    and two states after all tiles. See ``DeltaRule`` in ``runtime/operators/operators.cpp``. States
    are computed from records, so only records are moved or kept.

    Args:
        manifest: Manifest of the engine directory.
        dtype: A type in :data:`KV_CACHE_DTYPES`, to which attention rounds the numbers that it
            writes.

    Attributes:
        address: Address of the memory, which is a multiple of 4096.
        slots: S.
        limit: Maximum number of slots of a text.
        dtype: Type of an element.
        slot_bytes: Number of bytes of the keys and values of one token.
    """

    fixed_bytes = 0

    def __init__(self, manifest: Manifest, dtype: str = "float32") -> None:
        geometry = manifest.geometry
        if geometry.delta is not None and dtype != "float32":
            raise EESDError(
                f"{geometry.architecture} needs a KV cache of float32, because its states are "
                f"computed from it; {dtype} was given."
            )
        if geometry.latent is not None and dtype == "int8":
            raise EESDError(
                f"{geometry.architecture} needs a KV cache of float32 or float16, because a row of "
                "latent attention has no scales; int8 was given."
            )
        self.dtype = np.dtype(dtype)
        self.slots = slots_of(manifest)
        self.limit = manifest.max_seq_len
        scale = 4 if dtype == "int8" else 0  # bytes of a row's scale
        size = geometry.head_dim
        self.slot_bytes = (
            2 * manifest.num_caches * geometry.num_kv_heads * (size * self.dtype.itemsize + scale)
        )
        tiles = self.slots // TILE
        shape = (manifest.num_caches, 2, geometry.num_kv_heads)
        self._shape = geometry.num_kv_heads, size + scale
        self._tile_bytes = prod(shape) * (TILE * _width(size) * self.dtype.itemsize + TILE * scale)
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
                f"The address space has no {mebibytes} MiB for a cache of {self.slots} slots."
            ) from None
        whole = np.frombuffer(self._map, np.int8)
        memory = whole[:size_of_tiles].reshape(*shape, tiles, -1)
        self.address = int(memory.ctypes.data)
        self._parts = list[_Rows | _Records | _LatentRows]()
        for (first, heads, width), layers in groupby(enumerate(_parts_of(manifest)), itemgetter(1)):
            indices = [index for index, _ in layers]
            which = slice(indices[0], indices[-1] + 1)
            if first in states:
                self._parts.append(_Records(memory[which], which, self._shape))
            elif heads == 0:
                self._parts.append(_LatentRows(memory[which], which, width, self.dtype))
            else:
                rows = _Rows(memory[which], which, heads, width, self.dtype, scale)
                self._parts.append(rows)
        self._used = 0
        self._after = [whole[at.start :][:16].view(np.int64) for at in states.values()]

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
        """Drop the states that include slots from ``start`` on, because these slots are about to
        change."""
        for after in self._after:
            after[after > start] = 0

    def compact(self, start: int, sources: list[int]) -> None:
        self.fill(start, self._gather(np.array(sources, np.intp)))

    def clear(self, start: int, stop: int | None = None) -> None:
        """Do nothing, because attention reads only slots that a token sees."""

    def read(self, index: int) -> tuple[Values, Values]:
        """Return a copy of one layer's keys and values, each [1, KV, S, D]."""
        part = next(one for one in self._parts if index < one.which.stop)
        found = part.gather(np.arange(self.slots))[index - part.which.start]
        if part.scale:
            found = found[..., :-4] * np.ascontiguousarray(found[..., -4:]).view(np.float32)
        heads, columns = self._shape
        keys, values = _shaped(found, (heads, columns - part.scale))
        return keys[None].copy(), values[None].copy()

    def values(self, start: int, stop: int) -> Values:
        """Return a copy [L+E, 2, KV, n, D] of the slots from ``start`` to ``stop - 1``. With int8,
        the scale of a row (4 bytes) follows the row."""
        return self._gather(np.arange(start, stop))

    def fill(self, start: int, values: NDArray[Any]) -> None:
        slots = np.arange(start, start + values.shape[3])
        self._drop_states(start)
        for part in self._parts:
            part.fill(slots, _shaped(values[part.which], part.shape))

    def _gather(self, slots: NDArray[np.intp]) -> Values:
        if len(self._parts) == 1:
            return self._parts[0].gather(slots)
        return np.concatenate([_shaped(part.gather(slots), self._shape) for part in self._parts])


class _Records:
    """The records of a layer with the delta rule or a state space, as a view of the memory of its
    tiles.

    Args:
        memory: [caches, 2, KV, S / 16, bytes of a tile] of the layer.
        which: Its caches.
        shape: Number of KV heads of a cache, and head size.

    Attributes:
        which: The caches.
        shape: Number of KV heads of a cache, and head size.
    """

    scale = 0

    def __init__(self, memory: NDArray[np.int8], which: slice, shape: tuple[int, int]) -> None:
        self.which = which
        self.shape = shape
        part = (len(memory), 2, *shape)
        slots = memory.shape[3] * TILE
        rows = memory.view(np.float32).reshape(slots, -1)
        self._rows = rows[:, : prod(part)].reshape(slots, *part)

    def gather(self, slots: NDArray[np.intp]) -> Values:
        """Return a copy [caches, 2, KV, n, D] of some slots."""
        return self._rows[slots].transpose(1, 2, 3, 0, 4)

    def fill(self, slots: NDArray[np.intp], values: NDArray[Any]) -> None:
        """Write records that :meth:`gather` returned into some slots."""
        self._rows[slots] = values.transpose(3, 0, 1, 2, 4)


class _LatentRows:
    """The rows of successive layers with latent attention, as views of the memory.

    Args:
        memory: [layers, 2, 1, S / 16, bytes of a tile] of the caches.
        which: The layers.
        width: Size of a row.
        dtype: Type of an element.

    Attributes:
        which: The layers.
        shape: One KV head, and half of a row.
    """

    scale = 0

    def __init__(
        self, memory: NDArray[np.int8], which: slice, width: int, dtype: np.dtype[Any]
    ) -> None:
        self.which = which
        self.shape = 1, -(-width // 4) * 2
        tiles = memory.shape[3]
        size = tiles * TILE * _width(width) * dtype.itemsize
        cells = memory.reshape(len(memory), -1)[:, :size].view(dtype)
        self._cells = cells.reshape(len(memory), tiles, -1, TILE)[:, :, :width]

    def gather(self, slots: NDArray[np.intp]) -> Values:
        """Return a copy [layers, 2, 1, n, half of a row] of some slots."""
        tiles, rows = np.divmod(slots, TILE)
        found = self._cells[:, tiles, :, rows]  # [n, layers, width]
        heads, half = self.shape
        whole = np.pad(found, ((0, 0), (0, 0), (0, 2 * half - found.shape[2])))
        return whole.reshape(*found.shape[:2], 2, heads, half).transpose(1, 2, 3, 0, 4)

    def fill(self, slots: NDArray[np.intp], values: NDArray[Any]) -> None:
        """Write rows that :meth:`gather` returned into some slots."""
        tiles, rows = np.divmod(slots, TILE)
        whole = values.transpose(3, 0, 1, 2, 4).reshape(len(slots), len(values), -1)
        self._cells[:, tiles, :, rows] = whole[..., : self._cells.shape[2]]


class _Rows:
    """The keys and values of successive layers with the same head sizes, as views of the memory.

    Args:
        memory: [layers, 2, KV, S / 16, bytes of a tile] of the caches.
        which: The layers.
        heads: Number of KV heads of these layers.
        size: Head size.
        dtype: Type of an element.
        scale: Bytes of a row's scale.

    Attributes:
        which: The layers.
        scale: Bytes of a row's scale.
        shape: Number of KV heads, and number of elements of a row with its scale.
    """

    def __init__(
        self,
        memory: NDArray[np.int8],
        which: slice,
        heads: int,
        size: int,
        dtype: np.dtype[Any],
        scale: int,
    ) -> None:
        self.which = which
        self.scale = scale
        self.shape = heads, size + scale
        self._size = size
        self._pair = 2 if scale else 1  # number of adjacent cells
        scales_at = TILE * _width(size) * dtype.itemsize
        tiles = memory.shape[3]
        tile = scales_at + TILE * scale
        flat = memory.reshape(len(memory), 2, -1)[..., : heads * tiles * tile]
        whole = flat.reshape(len(memory), 2, heads, tiles, tile)
        keys, values = np.moveaxis(whole[..., :scales_at].view(dtype), 1, 0)
        pair = self._pair
        self._keys = keys.reshape(*keys.shape[:3], -1, TILE, pair)[..., : size // pair, :, :]
        self._values = values.reshape(*keys.shape[:3], TILE // pair, -1, pair)[..., :size, :]
        self._scales = whole[..., scales_at:].reshape(*whole.shape[:4], TILE, scale)

    def gather(self, slots: NDArray[np.intp]) -> Values:
        """Return a copy [layers, 2, heads, n, elements of a row] of some slots."""
        tiles, rows = np.divmod(slots, TILE)
        size = self._size
        pair = self._pair
        keys = self._keys[:, :, tiles, :, rows]
        values = self._values[:, :, tiles, rows // pair, :, rows % pair]
        found = np.stack((keys.reshape(*keys.shape[:3], size), values)).transpose(2, 0, 3, 1, 4)
        return np.concatenate((found, self._scales[..., tiles, rows, :].view(found.dtype)), -1)

    def fill(self, slots: NDArray[np.intp], values: NDArray[Any]) -> None:
        """Write rows that :meth:`gather` returned into some slots."""
        tiles, rows = np.divmod(slots, TILE)
        size = self._size
        pair = self._pair
        # If index arrays and slices are mixed, NumPy puts the slots first.
        keys, own = values[..., :size].transpose(1, 3, 0, 2, 4)
        self._keys[:, :, tiles, :, rows] = keys.reshape(*keys.shape[:3], size // pair, pair)
        self._values[:, :, tiles, rows // pair, :, rows % pair] = own
        self._scales[..., tiles, rows, :] = values[..., size:]


def _width(size: int) -> int:
    """Return the number of values that a head's row has in a tile."""
    return -(-size // TILE) * TILE


def _parts_of(manifest: Manifest) -> list[tuple[int, int, int]]:
    """Return three numbers for each cache. The first number is the index of the first cache of its
    layer if the layer has states, or -1. The second is the number of KV heads, or 0 for rows of
    latent attention. The third is the size of a head or row."""
    geometry = manifest.geometry
    found = [(-1, geometry.num_kv_heads, geometry.head_dim)] * manifest.num_caches
    for first in states_at(manifest):
        for cache in range(first, first + geometry.state_caches):
            found[cache] = (first, *found[cache][1:])
    if geometry.own_heads or geometry.latent:
        model = Model(geometry, manifest.exit_head)
        blocks = [model.layer(layer) for layer in range(geometry.num_layers)]
        blocks += [model.exit_block(index) for index in range(manifest.exit_head.blocks)]
        for block in blocks:
            own = block.geometry
            sizes = (0, own.latent.width) if own.latent else (own.num_kv_heads, own.head_dim)
            found[block.cache] = -1, *sizes
    return found


def _shaped(values: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """Return the rows [..., heads, n, columns] of slots in another shape. ``shape`` has the new
    numbers of heads and columns. Zeros are added or removed at the end."""
    heads, columns = shape
    if values.shape[-3::2] == shape:
        return values
    rows = np.moveaxis(values, -2, -3)
    rows = rows.reshape(*rows.shape[:-2], -1)[..., : heads * columns]
    spare = heads * columns - rows.shape[-1]
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, spare)])
    return np.moveaxis(rows.reshape(*rows.shape[:-1], heads, columns), -2, -3)
