"""Memory for several sequences: what the backends have in common, and that of the CPU."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import KVCache, Rows, Values
from eesd.runtime.engines.host_memory import HostMemory
from eesd.runtime.engines.kv_cache import GrowingKVCache

STEP = 32
"""Slots by which rows grow, at least: fewer than for one sequence, because attention pays for the empty slots of all rows."""


class GrowingRows:
    """See :class:`~eesd.runtime.engines.base.Rows`. S follows the longest text, unless the rows are fixed.

    Where the stages of verify run on several devices, each device has a shard: the layers of its stage.

    Attributes:
        shards: Arrays or tensors [layers, 2, B, KV, S, D]; the code here works on both.
        version: Number of changes of the memory. Whoever binds it must bind it again when the version changed.
        most: B.
    """

    shards: list[Any]
    fixed = ragged = False

    def __init__(self, manifest: Manifest, most: int, slots: int = STEP, layers: Sequence[Sequence[int]] | None = None) -> None:
        """``layers`` lists the layers of each shard; None: all in one."""
        self.version = 0
        self.most = most
        layers = layers or [range(manifest.num_caches)]
        self._at = {layer: (shard, row) for shard, group in enumerate(layers) for row, layer in enumerate(group)}
        self._outer = [(len(group), 2, most, manifest.geometry.num_kv_heads) for group in layers]
        self._head_dim = manifest.geometry.head_dim
        self.shards = self._allocate(slots)

    def _zeros(self, shard: int, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def _allocate(self, slots: int) -> list[Any]:
        return [self._zeros(shard, (*outer, slots, self._head_dim)) for shard, outer in enumerate(self._outer)]

    def _active_shards(self) -> Iterable[Any]:
        return self.shards

    @property
    def slots(self) -> int:
        return int(self.shards[0].shape[4])

    @property
    def slot_bytes(self) -> int:
        return sum(shard[:, :, 0, :, 0].nbytes for shard in self.shards)

    def layer(self, index: int) -> Any:
        """Keys and values of one layer, [2, B, KV, S, D]: the memory itself."""
        shard, row = self._at[index]
        return self.shards[shard][row]

    def resize(self, slots: int, used: Sequence[int]) -> None:
        if self.fixed:
            return
        step = STEP if slots <= 8 * STEP else slots // 8 // STEP * STEP  # the longer, the rarer
        length = -(-slots // step) * step
        if not length <= self.slots <= length + length // 2:
            self._resize(length, used)
            self.version += 1

    def _resize(self, slots: int, used: Sequence[int]) -> None:
        old, self.shards = self.shards, self._allocate(slots)
        for mine, before in zip(self._active_shards(), old, strict=True):
            for row, count in enumerate(used):
                mine[:, :, row, :, :count] = before[:, :, row, :, :count]

    def move(self, source: int, target: int, used: int) -> None:
        self._copy(target, self.shards, source, used)

    def take(self, row: int, kv_cache: KVCache, used: int) -> None:
        assert isinstance(kv_cache, GrowingKVCache)
        self._copy(row, kv_cache.shards, 0, used)

    def take_over(self, row: int, other: Rows, source: int, used: int) -> None:
        assert isinstance(other, GrowingRows)
        self._copy(row, other.shards, source, used)

    def _copy(self, row: int, shards: Sequence[Any], source: int, used: int) -> None:
        for mine, theirs in zip(self._active_shards(), shards, strict=True):
            mine[:, :, row, :, :used] = theirs[:, :, source, :, :used]

    def values(self, row: int, start: int, stop: int) -> Values:
        raise NotImplementedError


class HostRows(GrowingRows):
    """Rows in host memory, float32. Memory that is not touched is not taken."""

    shards: list[NDArray[np.float32]]

    def __init__(self, manifest: Manifest, most: int) -> None:
        self._memory = HostMemory(manifest, most, STEP)
        super().__init__(manifest, most)

    def values(self, row: int, start: int, stop: int) -> Values:
        return self.shards[0][:, :, row, :, start:stop]

    def _allocate(self, slots: int) -> list[Any]:
        return [self._memory.data]

    def _resize(self, slots: int, used: Sequence[int]) -> None:
        self._memory.resize(slots, len(used), max(used, default=0))
        self.shards = [self._memory.data]
