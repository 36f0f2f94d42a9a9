"""A prepared call of several rows. It runs through an engine's stages on their devices."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.manifest import Manifest
from eesd.model.torch_ops import KV
from eesd.runtime.engines.base import Call, Choose, StepOutputs
from eesd.runtime.engines.cuda_graph import CapturedGraph
from eesd.runtime.engines.device import ALIGNMENT, AttentionMask, StageRunner, StepInputs
from eesd.runtime.engines.device_results import fetch, pack_results, to_host

STRIDE = ALIGNMENT // 8
"""Several inputs are in one int64 buffer. Each begins at a multiple of this number of elements."""

Buffer = TypeVar("Buffer", Tensor, NDArray[np.int64])


class InputViews(NamedTuple, Generic[Buffer]):
    """The inputs of a call as views of one int64 buffer, which is copied to the device in one
    piece.

    Attributes:
        tokens: [B, n].
        positions: [B, n].
        slot: The slot [B] of the first node of each sequence.
        context_len: The numbers [B] that :class:`~eesd.runtime.engines.base.Call` explains.
        tree_mask: A mask [B, n, width], which is 1 if a node sees a slot, and 0 if not.
    """

    tokens: Buffer
    positions: Buffer
    slot: Buffer
    context_len: Buffer
    tree_mask: Buffer


def _buffer_size(batch: int, count: int, width: int) -> int:
    return 2 * _aligned(batch * count) + _aligned(2 * batch) + batch * count * width


def _input_views(buffer: Buffer, batch: int, count: int, width: int) -> InputViews[Buffer]:
    """Return the inputs of ``count`` nodes of ``batch`` sequences, as views of a buffer of
    :func:`_buffer_size` elements."""
    nodes = batch * count
    positions = _aligned(nodes)
    slot = 2 * positions
    return InputViews(
        buffer[:nodes].reshape(batch, count),
        buffer[positions : positions + nodes].reshape(batch, count),
        buffer[slot : slot + batch],
        buffer[slot + batch : slot + 2 * batch],
        buffer[slot + _aligned(2 * batch) :].reshape(batch, count, width),
    )


def _aligned(count: int) -> int:
    return -(-count // STRIDE) * STRIDE


Layer = Callable[[int], Tensor]
"""A function that returns the keys and values [2, B, KV, S, D] of a layer. They are the memory that
calls update."""


def caches_of(stage: StageRunner, layer: Layer) -> list[KV]:
    return [(keys, values) for keys, values in map(layer, stage.graph.caches)]


class _StageStep:
    """One stage's part of a :class:`ForwardStep`. It copies the inputs to the device, computes the
    mask, and runs the graph."""

    def __init__(
        self,
        stage: StageRunner,
        layer: Layer,
        host_inputs: Tensor,
        count: int,
        width: int,
        logit_rows: int,
        slots: int,
        hidden: Tensor | None,
        pool: object,
    ) -> None:
        """Prepare the stage.

        Args:
            stage: The stage.
            layer: The KV caches.
            host_inputs: The inputs in host memory, with the layout of :func:`_input_views`.
            count: n.
            width: Number of columns of the tree mask. It is 0 for a call that has only chains.
            logit_rows: R, the number of nodes at the end of the call that get logits. If R exceeds
                the number of nodes, the last node's logits fill the remaining rows.
            slots: Number of slots, from the first on, that attention reads. 0 means all slots.
            hidden: Memory for the previous stage's hidden state [B, n, hidden], or None if the
                inputs of this stage are the tokens.
            pool: Memory pool for the stage's CUDA graph. If it is None, nothing is captured.
        """
        device = stage.stream.device
        caches = caches_of(stage, layer)
        batch = caches[0][0].shape[0]
        self.stage = stage
        self._host_inputs = host_inputs
        self._device_inputs = torch.zeros_like(host_inputs, device=device)
        views = _input_views(self._device_inputs, batch, count, width)
        tree = (views.context_len, views.tree_mask) if width else None
        self._mask = AttentionMask(caches[0][0], count, slots, views.slot, tree)
        self.x = views.tokens if hidden is None else hidden
        # Keep this tensor: a prepared call stores only addresses.
        self._rows = torch.arange(
            max(count - logit_rows, 0), max(count, logit_rows), device=device
        ).clamp_max(count - 1)
        inputs = StepInputs(self.x, views.positions, views.slot, self._mask, self._rows, caches)
        self._call = stage.prepare(inputs)
        self.results: list[Tensor] = []
        self.host_results: Tensor | None = None  # results of the last stage
        self._graph = CapturedGraph(stage.stream, pool if stage.capturable else None)

    def body(self) -> None:
        self._device_inputs.copy_(self._host_inputs, non_blocking=True)
        self._mask.update()
        self.results = self._call()
        if self.host_results is not None:
            self.host_results.copy_(pack_results(self.results), non_blocking=True)

    def run(self, previous: "_StageStep | None") -> None:
        """Run after the previous stage, in this stage's stream."""
        if previous is not None:
            self.x.copy_(previous.results[0], non_blocking=True)
        self._graph.run(self.body)


class ForwardStep:
    """A forward call through all stages of an engine. Its numbers of nodes and sequences are
    fixed."""

    def __init__(
        self,
        manifest: Manifest,
        stages: Sequence[StageRunner],
        is_draft: bool,
        layer: Layer,
        count: int,
        width: int,
        logit_rows: int,
        pool: object,
        slots: int = 0,
    ) -> None:
        """Prepare the call.

        Args:
            manifest: Manifest of the engine directory.
            stages: The stages of the engine.
            is_draft: Whether the stages belong to the draft engine.
            layer: The KV caches, which determine the number of sequences.
            count: n, including padding.
            width: Number of columns of the tree mask. It is 0 for a call that has only chains and
                more nodes than a round.
            logit_rows: R, the number of nodes at the end of each sequence that get logits. In a
                draft, all nodes get logits.
            pool: Memory pool for CUDA graphs. If it is None, nothing is captured.
            slots: Number of slots, from the first on, that attention reads. 0 means all slots.
        """
        pinned = stages[0].stream.on_gpu
        cache = layer(stages[0].graph.caches[0])
        self._batch, self._slots = cache.shape[1:4:2]
        self._count = count
        self._is_draft = is_draft
        self._last_position = manifest.max_seq_len - 1
        host_inputs = torch.zeros(
            _buffer_size(self._batch, count, width), dtype=torch.int64, pin_memory=pinned
        )
        views = _input_views(host_inputs.numpy(), self._batch, count, width)
        self._inputs = [
            InputViews(*(view[row : row + 1] for view in views)) for row in range(self._batch)
        ]
        self._chain = np.tri(count, width, dtype=np.int64)
        self._stages: list[_StageStep] = []
        for stage in stages:
            hidden = None
            shape = (self._batch, count, manifest.geometry.hidden_size)
            # Memory belongs to the current stream, and a context to the current device.
            with stage.stream.activate():
                if self._stages:
                    hidden = torch.zeros(shape, dtype=cache.dtype, device=stage.stream.device)
                self._stages.append(
                    _StageStep(
                        stage, layer, host_inputs, count, width, logit_rows, slots, hidden, pool
                    )
                )
        # A draft's results are ids, followed by log-probabilities.
        shape = (
            (2 * self._batch, count, manifest.draft_top_k)
            if is_draft
            else (self._batch, logit_rows, 1)
        )
        self._host_results = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)
        self._stages[-1].host_results, self._found = self._host_results, self._host_results.numpy()

    def set_inputs(self, calls: Sequence[Call | None]) -> None:
        """Write the inputs of each sequence, which has up to n nodes. None stands for a sequence
        that only fills the call. Such a sequence writes to its last slots."""
        for inputs, call in zip(self._inputs, calls, strict=True):
            if call is None:
                self._set_row(inputs, (), (), self._slots - self._count)
            else:
                self._set_row(
                    inputs, call.tokens, call.positions, call.slot, call.context_len, call.tree_mask
                )

    def _set_row(
        self,
        inputs: InputViews[NDArray[np.int64]],
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        context_len: int = 0,
        tree_mask: NDArray[np.bool_] | None = None,
    ) -> None:
        given = len(tokens)
        inputs.tokens[:, :given] = tokens
        inputs.positions[:, :given] = positions
        if given < self._count:
            # Positions of padding nodes must be within the rotary tables, but the spare slots at
            # the end of the cache are beyond them.
            last = np.minimum(range(slot + given, slot + self._count), self._last_position)
            inputs.tokens[:, given:] = 0
            inputs.positions[:, given:] = last
        inputs.slot[:], inputs.context_len[:] = slot, slot if tree_mask is None else context_len
        inputs.tree_mask[:] = self._chain if tree_mask is None else 0
        if tree_mask is not None:
            inputs.tree_mask[:, :given, : tree_mask.shape[1]] = tree_mask

    def run(self, wanted: Sequence[tuple[int, int, Choose | None]]) -> list[StepOutputs]:
        """Run all stages, and wait for the results.

        Args:
            wanted: Three values for each sequence. They are its index, the number of nodes (from
                the first on) whose results are returned, and the function that chooses from its
                logits.
        """
        with ExitStack() as stack:  # enter each stream once: entering takes as long as a launch
            for previous, step in zip((None, *self._stages), self._stages, strict=False):
                # Earlier streams stay current on their devices, because copies from these devices
                # run in them.
                stack.enter_context(step.stage.stream.activate())
                step.run(previous)
            chosen = [self._chosen(*one) for one in wanted]
        self._stages[-1].stage.stream.synchronize()
        return [
            self._outputs(row, count, None if one is None else one.numpy())
            for (row, count, _), one in zip(wanted, chosen, strict=True)
        ]

    def _chosen(self, row: int, count: int, choose: Choose | None) -> Tensor | None:
        """Choose from a sequence's logits, and begin to copy the choice to the host."""
        if choose is None:
            return None
        last = self._stages[-1]
        return to_host(choose(last.results[0][row, :count].float()), last.stage.stream)

    def _outputs(self, row: int, count: int, chosen: NDArray[np.float64] | None) -> StepOutputs:
        """Return the results of the first ``count`` nodes of a sequence."""
        last = self._stages[-1]
        results, every = self._found[row :: self._batch, :count], last.results[0]
        fetch_logits = partial(fetch, lambda: every[row, :count].float(), last.stage.stream)
        if self._is_draft:
            return StepOutputs(fetch_logits, results[0].astype(np.int64), results[1], chosen=chosen)
        return StepOutputs(
            fetch_logits, argmax_ids=results[0, :, 0].astype(np.int64), chosen=chosen
        )
