"""Draft a chain on a device without involving the host between steps."""

import numpy as np
import torch
from numpy.typing import NDArray

from eesd.common.manifest import Manifest
from eesd.runtime.engines.cuda_graph import CapturedGraph
from eesd.runtime.engines.device import AttentionMask, StageRunner, StepInputs
from eesd.runtime.engines.device_results import pack_results
from eesd.runtime.engines.forward_step import STRIDE, Layer, caches_of


class DraftLoop:
    """Drafts a chain on the device. Each step runs one node, whose token comes from the previous
    step. The host waits only once."""

    def __init__(
        self, manifest: Manifest, stage: StageRunner, layer: Layer, slots: int, pool: object
    ) -> None:
        """Prepare the step. Its attention reads the first ``slots`` slots, or all slots if
        ``slots`` is 0. ``pool`` is the memory pool for its CUDA graph. If it is None, nothing is
        captured."""
        self._stream = stage.stream
        device = stage.stream.device
        pinned = stage.stream.on_gpu
        # The rows begin with the step's token, position, slot and number.
        self._host_inputs = torch.zeros((4, STRIDE), dtype=torch.int64, pin_memory=pinned)
        self._device_inputs = torch.zeros_like(self._host_inputs, device=device)
        self._token, position, slot, self._step = self._device_inputs[:, :1].unbind()
        self._counters = self._device_inputs[1:, 0]
        caches = caches_of(stage, layer)
        self._mask = AttentionMask(caches[0][0], 1, slots, slot)
        inputs = StepInputs(
            self._token[None], position[None], slot, self._mask, torch.zeros_like(slot), caches
        )
        self._call = stage.prepare(inputs)
        self._results = torch.zeros(
            (manifest.max_tree_nodes, 2, 1, manifest.draft_top_k), device=device
        )
        self._host_results = torch.zeros(self._results.shape, pin_memory=pinned)
        self._graph = CapturedGraph(stage.stream, pool if stage.capturable else None)
        self._given, self._found = (
            self._host_inputs.numpy()[:, 0],
            self._host_results[:, :, 0].numpy(),
        )
        self._parts = [
            (self._host_results[:count], self._results[:count])
            for count in range(len(self._results) + 1)
        ]

    def _body(self) -> None:
        """Draft a token."""
        self._mask.update()
        results = self._call()
        self._results.index_copy_(0, self._step, pack_results(results)[None])
        self._token.copy_(results[1][0, :, 0])
        self._counters.add_(1)

    def run(
        self, token: int, slot: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Run ``count`` steps after ``token``. Returns the ids and the log-probabilities of each
        step, [count, K]."""
        self._given[:] = token, slot, slot, 0
        self._device_inputs.copy_(self._host_inputs, non_blocking=True)
        if self._graph.needs_capture:
            self._graph.capture(self._body)
            self._device_inputs.copy_(self._host_inputs, non_blocking=True)  # capture() ran a step
        for _ in range(count):
            self._graph.run(self._body)
        here, there = self._parts[count]
        here.copy_(there, non_blocking=True)
        self._stream.synchronize()
        return self._found[:count, 0].astype(np.int64), self._found[:count, 1].copy()
