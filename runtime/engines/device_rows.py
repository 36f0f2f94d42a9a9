"""Several sequences in one call of a :class:`~eesd.runtime.engines.device_engine.DeviceEngine`.

On the CPU a call has the rows that it is given. On a GPU it has all rows, padded as rounds are: then one kernel computes a row,
whatever runs beside it, and what is captured in CUDA graphs does not change.
"""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Call, StepOutputs, Values
from eesd.runtime.engines.device import ALIGNMENT, DeviceStream, active_shards, explain_out_of_memory, to_host
from eesd.runtime.engines.device_engine import DeviceEngine, ForwardStep, active_streams
from eesd.runtime.engines.kv_cache import STEP
from eesd.runtime.engines.recent import Recent
from eesd.runtime.engines.rows import GrowingRows

MOST_CALLS = 128
"""Calls that stay prepared on the CPU. One has a mask, B x n x S, of its own."""


class DeviceRows(GrowingRows):
    """Rows in the engines' element type, with a shard on the device of each stage."""

    shards: list[Tensor]

    def __init__(
        self, manifest: Manifest, streams: Sequence[DeviceStream], most: int, *, grow: bool = False, spare: int = 0
    ) -> None:
        """Allocate the rows, all zeros.

        Args:
            manifest: Manifest of the engine directory.
            streams: The stream of each stage.
            most: B.
            grow: Follow the longest text. Otherwise every row has all ``gpu_slots`` of the manifest, because a captured CUDA
                graph needs fixed addresses.
            spare: Of rows that grow, the slots behind those that are asked for, for padding nodes.

        Raises:
            EESDError: The rows do not fit the GPU.
        """
        self.fixed = not grow
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)
        self._streams, self._spare = streams, spare
        layers = [stage.caches for stage in manifest.verify]
        super().__init__(manifest, most, STEP if grow else manifest.gpu_slots, layers)

    def _zeros(self, shard: int, shape: tuple[int, ...]) -> Tensor:
        stream = self._streams[shard]
        if stream.device.type == "cpu":
            return _lazy_zeros(shape, self._dtype)
        with explain_out_of_memory(f"The KV caches of {self.most} rows of {shape[4]} slots"), stream.activate():
            return torch.zeros(shape, dtype=self._dtype, device=stream.device)

    def _active_shards(self) -> Iterator[Tensor]:
        return active_shards(self._streams, self.shards)

    @torch.inference_mode()
    def resize(self, slots: int, used: Sequence[int]) -> None:
        super().resize(slots + self._spare, used)

    @torch.inference_mode()
    def _copy(self, row: int, shards: Sequence[Tensor], source: int, used: int) -> None:
        """Also clear what is behind: a slot that overflowed to infinity in another text would count with 0 x infinity."""
        super()._copy(row, shards, source, used)
        for shard in self._active_shards():
            shard[:, :, row, :, used:] = 0

    @torch.inference_mode()
    def values(self, row: int, start: int, stop: int) -> Values:
        return to_host([shard[:, :, row, :, start:stop] for shard in self._active_shards()])


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in main memory, of which pages that are not touched are not taken. Products may depend on the alignment."""
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


class DeviceRowsBinding:
    """A :class:`~eesd.runtime.engines.device_engine.DeviceEngine` bound to rows. A call is finished when it returns."""

    def __init__(self, engine: DeviceEngine, rows: DeviceRows) -> None:
        self._engine, self._rows = engine, rows
        self._version = -1
        self._steps = Recent[tuple[int, int, int], ForwardStep](MOST_CALLS)
        capture = engine.cuda_graphs and engine.stages[0].stream.on_gpu
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        if rows.fixed:  # no round shall wait for what the first call prepares
            self.forward(0, [Call([0], [0], 0)])
            for stage in engine.stages:
                engine.on_warm_up(stage.graph)

    @torch.inference_mode()
    def forward(self, first: int, calls: Sequence[Call]) -> list[StepOutputs]:
        if self._version != self._rows.version:
            self._version = self._rows.version
            self._steps.clear()
        start, all_calls = (0, self._filled(first, calls)) if self._rows.fixed else (first, calls)
        count = self._engine.padded(max(len(call.tokens) for call in calls))
        with active_streams(self._engine.stages):
            key = start, len(all_calls), count
            step = self._steps.get(key, lambda: self._prepare(*key))
            step.set_inputs(all_calls)
            step.run()
            return [step.outputs(first - start + row, len(call.tokens)) for row, call in enumerate(calls)]

    def _filled(self, first: int, calls: Sequence[Call]) -> list[Call | None]:
        """Calls for all rows. Those that only fill the call write the last slots, which hold no text."""
        filled: list[Call | None] = [None] * self._rows.most
        filled[first : first + len(calls)] = calls
        return filled

    def _prepare(self, first: int, batch: int, count: int) -> ForwardStep:
        def layer(index: int) -> Tensor:
            values: Tensor = self._rows.layer(index)[:, first : first + batch]
            return values

        return ForwardStep(self._engine, layer, count, count, count, self._pool)
