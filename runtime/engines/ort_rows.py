"""Several sequences in one call of ONNX Runtime on the CPU."""

from collections.abc import Sequence

import numpy as np

from eesd.runtime.engines.base import Call, StepOutputs
from eesd.runtime.engines.ort_cpu import BoundCall, OrtEngine, ResultMemory
from eesd.runtime.engines.recent import Recent
from eesd.runtime.engines.rows import HostRows

MOST_CALLS = 128
"""Calls that stay bound. One has a mask, B x n x S floats, of its own; results are in shared memory."""


class OrtRowsBinding:
    """An :class:`~eesd.runtime.engines.ort_cpu.OrtEngine` bound to the KV caches of several sequences."""

    def __init__(self, engine: OrtEngine, rows: HostRows) -> None:
        self._engine, self._rows = engine, rows
        self._results = ResultMemory()
        self._version = -1
        self._calls = Recent[tuple[int, int, int], BoundCall](MOST_CALLS)

    def forward(self, first: int, calls: Sequence[Call]) -> list[StepOutputs]:
        if self._version != self._rows.version:
            self._version = self._rows.version
            self._calls.clear()
            self._slots = np.arange(self._rows.slots)
        key = first, len(calls), max(len(call.tokens) for call in calls)
        bound = self._calls.get(key, lambda: self._bind(*key))
        for row, call in enumerate(calls):
            bound.set_row(row, call, self._slots)
        self._engine.run(bound)
        return [bound.outputs(row, len(call.tokens)) for row, call in enumerate(calls)]

    def _bind(self, first: int, rows: int, count: int) -> BoundCall:
        layer = self._rows.layer
        return self._engine.bind_call(lambda index: layer(index)[:, first : first + rows], count, count, self._results)
