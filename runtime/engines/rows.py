"""KV caches of several sequences in one piece of memory, so that one call runs them all."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Call, StepOutputs
from eesd.runtime.engines.host_memory import HostMemory
from eesd.runtime.engines.kv_cache import STEP, HostKVCache


class RowsBinding(Protocol):
    """An engine bound to the KV caches of several sequences."""

    def forward(self, first: int, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run a call for each of the rows from ``first`` on, as one; each row gets the outputs of its own nodes.

        All rows take as many nodes as the longest. What a shorter one gets more is written behind its own nodes, so every row
        needs room for the longest call.
        """
        ...


class HostRows:
    """Keys and values of B sequences, [L+E, 2, B, KV, S, D], float32, in host memory.

    The rows in use are the first ones. All have the same S, for which attention pays, so S follows the longest text.

    Attributes:
        version: Number of changes of the memory. Whoever binds it must bind it again when the version changed.
    """

    def __init__(self, manifest: Manifest, rows: int) -> None:
        """``rows`` is the most that will be in use. Memory that is not touched is not taken."""
        self.version = 0
        self._memory = HostMemory(manifest, rows, STEP)

    @property
    def data(self) -> NDArray[np.float32]:
        """The memory. It moves when the version changes."""
        return self._memory.data

    @property
    def slots(self) -> int:
        """S now."""
        return self._memory.slots

    def resize(self, slots: int, used: Sequence[int]) -> None:
        """Have at least this many slots, and not many more.

        Args:
            slots: Slots that a row needs.
            used: Slots of each row in use, which are kept.
        """
        step = STEP if slots <= 8 * STEP else slots // 8 // STEP * STEP  # the longer, the rarer
        length = -(-slots // step) * step
        if length <= self.slots <= length + length // 2:
            return
        self._memory.resize(length, len(used), max(used, default=0))
        self.version += 1

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first slots of a row to another one."""
        self.data[:, :, target, :, :used] = self.data[:, :, source, :, :used]

    def take(self, row: int, kv_cache: HostKVCache, used: int) -> None:
        """Copy the first slots of a sequence that has a cache of its own."""
        self.write(row, 0, kv_cache.data[:, :, 0, :, :used])

    def write(self, row: int, start: int, values: NDArray[np.float32]) -> None:
        """Write keys and values [L+E, 2, KV, n, D] into a row."""
        self.data[:, :, row, :, start : start + values.shape[3]] = values

    def read(self, row: int, start: int, stop: int) -> NDArray[np.float32]:
        """Keys and values of a row, [L+E, 2, KV, n, D]: the memory itself."""
        return self.data[:, :, row, :, start:stop]
