"""The engine of the GPU backends. It handles rows, padding to buckets, and prompts.

A round's calls over caches of one memory run as one call. On a GPU this call has all rows of the
memory, so that CUDA graphs stay valid. In exact engines the call always has the same node count and
all slots, so the same kernel computes a row, whatever other rows run with it. Other engines use the
smallest call into which the longest row fits. If a row's states do not depend on the number of
rows, an exact call of one sequence may have few nodes, too, and only the LM head computes the full
number of rows.

The order of a call:

1. :meth:`DeviceEngine.forward` runs prompt pieces one after another, and then the calls of a round
   together.
2. It pads the nodes to a bucket, and takes or makes the
   :class:`~eesd.runtime.engines.forward_step.ForwardStep` of this size.
3. ``ForwardStep.set_inputs`` writes the inputs of all rows into one piece of pinned host memory.
4. Each stage copies the inputs to its device, computes the attention mask there if its graph reads
   one, and runs the graph. The last stage copies the few results that the host needs into pinned
   memory. On a GPU each stage is a CUDA graph, captured in its first run.
5. On a GPU the device also chooses tokens from the logits.
6. The host waits once.

A :class:`~eesd.runtime.engines.draft_loop.DraftLoop` drafts a chain. It runs step 4 once for each
token of the chain. Each token comes from the previous run.
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from eesd.common.manifest import EXACT_NODES, PREFILL_CHUNK, GraphInfo, Manifest
from eesd.runtime.engines.base import NO_OUTPUTS, Call, KVCache, StepOutputs, Work
from eesd.runtime.engines.device import DeviceStream, StageRunner
from eesd.runtime.engines.device_cache import DeviceKVCache, RowMemory
from eesd.runtime.engines.device_results import fetch, no_logits
from eesd.runtime.engines.draft_loop import DraftLoop
from eesd.runtime.engines.forward_step import ForwardStep

LOGGER = logging.getLogger(__name__)
BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Calls on a GPU are padded to these node counts. The results of padding nodes are ignored."""
ROW_BUCKETS = (1, 2, 4, 8, 32, 128)
"""The buckets, up to half a round, of calls of several rows on engines that are not exact. There
are few buckets because a CUDA graph is captured for each bucket and each number of slots."""
LARGEST_LEVEL = 8
"""Maximum number of nodes per row in the prepared draft calls over several rows."""
MOST_STEPS = 256
"""Maximum number of prepared calls over a memory. If there are more, the least recently used call
is dropped. On the CPU, where rows come and go, each prepared call holds a mask of B x n x S
numbers."""


def has_one_count(manifest: Manifest, exact: bool | None) -> bool:
    """Whether all rounds have the same node count; see :func:`buckets_for`."""
    return manifest.max_tree_nodes + 1 <= EXACT_NODES if exact is None else exact


def buckets_for(
    manifest: Manifest, prefill_chunk: int, exact: bool | None = None
) -> tuple[int, ...]:
    """Return the buckets of an engine directory. These are the buckets up to the largest round, and
    the prefill chunk.

    Args:
        manifest: Manifest of the engine directory.
        prefill_chunk: Maximum number of prompt tokens in one call.
        exact: Whether all rounds, and plain decoding, have the same node count, so that the same
            kernel computes a token's logits whatever is drafted. If it is None, this is so if a
            round has at most :data:`EXACT_NODES` nodes.
    """
    most = manifest.max_tree_nodes + 1
    smaller = [count for count in BUCKETS if count < most and not has_one_count(manifest, exact)]
    # A short prompt must not pay for a long chunk.
    prefill = {min(PREFILL_CHUNK, prefill_chunk), prefill_chunk}
    return (*smaller, most, *sorted(count for count in prefill if count > most))


@dataclass(eq=False, repr=False)
class DeviceEngine:
    """A draft or verify engine on devices.

    Attributes:
        manifest: Manifest of the engine directory.
        stages: The stages in order. A draft engine has one stage.
        is_draft: Whether this is the draft engine.
        make_memory: A function that makes memory for the KV caches of a number of sequences.
        buckets: The node counts to which calls are padded. It is empty if calls are not padded to
            buckets. If it is (1,), the nodes of a call run one after another.
        slots: The numbers of slots that attention may read, in ascending order. The last number is
            that of the whole cache. A call reads the smallest number of slots that includes its
            padded nodes. If there are no numbers, calls read the whole cache.
        multiple: If there are no buckets, calls are padded to a multiple of this number.
        prefill_chunk: Maximum number of prompt tokens in one call.
        exact: Whether rows of a batch must not change each other's logits. If so, their calls have
            one node count and read whole caches. If not, a call uses the smallest of
            :attr:`row_buckets`, and the smallest number of slots, that hold its longest row.
        on_warm_up: A function that is called with each graph at the end of :meth:`prepare`.
        least_logits: Minimum number of rows that the LM head computes for a sequence in a round.
        cuda_graphs: Whether calls over memory that is new to the engine use CUDA graphs. This has
            no effect on the CPU.
        chooses: Whether sessions let the device choose tokens instead of copying logits. Default:
            True on a GPU.
    """

    manifest: Manifest
    stages: Sequence[StageRunner]
    is_draft: bool
    make_memory: Callable[[int], RowMemory]
    buckets: tuple[int, ...]
    slots: tuple[int, ...]
    multiple: int
    prefill_chunk: int
    exact: bool
    on_warm_up: Callable[[GraphInfo], None]
    least_logits: int = 0
    cuda_graphs: bool = True
    chooses: bool = field(init=False)
    _prepared: "WeakKeyDictionary[RowMemory, _Prepared]" = field(
        init=False, default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self.chooses = self.stages[-1].stream.on_gpu

    def new_kv_caches(self, count: int = 1) -> Sequence[DeviceKVCache]:
        if count > 1 and not self.exact and not self.is_draft:
            LOGGER.warning(
                "Requests of a batch may change the rounding of each other's logits, and so "
                "their tokens; use --exact to prevent this."
            )
        return self.make_memory(count).caches()

    @torch.inference_mode()
    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        """Prepare and run a call for each bucket and number of slots. A draft engine drafts a chain
        in calls of one node.

        The calls' writes to a cache are undone, because another engine may have filled the cache.
        Calls of several rows write only to each row's last slots.
        """
        kv_cache = _row(kv_caches[0])
        memory = kv_cache.memory
        if not self.buckets:
            return
        if memory.rows == 1:
            self._warm_up(kv_cache)
        else:
            self._warm_up_rows(memory)
            if not self.is_draft:  # draft engines do not run prompts
                self._of_prompts()._warm_up(self._staging(memory))
        for stage in self.stages:
            self.on_warm_up(stage.graph)

    def _warm_up(self, kv_cache: DeviceKVCache) -> None:
        counts = self.buckets[:1] if self.is_draft else self.buckets
        for count in counts:
            more = [slots for slots in self.slots[:-1] if slots >= count]
            # From each of these first slots on, a call reads more slots.
            for slot in (0, *(slots + 1 - count for slots in more)):
                with kv_cache.kept(slot, slot + count):
                    self.forward(
                        [
                            Call(
                                kv_cache,
                                [0] * count,
                                range(slot, slot + count),
                                slot,
                                logits=self.is_draft,
                            )
                        ]
                    )
                    if self.is_draft:
                        self._draft_chain(Call(kv_cache, [0], (), slot))

    def _warm_up_rows(self, memory: RowMemory) -> None:
        most = LARGEST_LEVEL if self.is_draft else self.manifest.max_tree_nodes + 1
        counts = [count for count in self.row_buckets if count <= most]
        if self.exact:
            counts = [*self.row_buckets[:1]]
        for count in counts:
            for slots in {
                self._seen_over(memory, stop) for stop in (count, *self.slots) if stop >= count
            }:
                step = self._step(memory, 0, memory.rows, count, slots)
                step.set_inputs([None] * memory.rows)
                step.run([])

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """The buckets of calls over memory of several rows."""
        most = self.manifest.max_tree_nodes + 1
        few = {most, *(count for count in ROW_BUCKETS if 2 * count <= most)}
        if self.exact and self.is_draft:
            return self.buckets
        if self.exact:
            return tuple(count for count in self.buckets if count >= most)
        return tuple(count for count in self.buckets if count in few)

    def _of_prompts(self) -> "DeviceEngine":
        """Return a copy of this engine for the prompts of a batch. It has only the buckets that are
        larger than a round."""
        alone = copy(self)
        alone.buckets = tuple(
            count for count in self.buckets if count > self.manifest.max_tree_nodes
        )
        return alone

    @property
    def last_positions(self) -> tuple[int, ...]:
        """The last positions before attention reads more slots, in ascending order. The same kernel
        computes all tokens between two of these positions.

        There are none if rounds have several node counts, because tokens may then depend on the
        draft anyway.
        """
        most = self.manifest.max_tree_nodes + 1
        if self.is_draft or not self.buckets or self.buckets[0] < most:
            return ()
        return tuple(slots - self.buckets[0] for slots in self.slots[:-1])

    def of_one_node(self) -> "DeviceEngine | None":
        """Return a copy of this engine for plain decoding without a draft. Its calls of one node
        are not padded to a round, so its logits may be rounded differently. Return None if calls of
        one node are never padded."""
        if not self.buckets or self.buckets[0] == 1:
            return None
        alone = copy(self)
        alone.buckets = (1, *self.buckets)
        return alone

    def seen(self, stop: int) -> int:
        """Return the number of slots that attention reads in a call whose padded nodes end before
        the slot ``stop``. 0 means all slots."""
        return next((slots for slots in self.slots if slots >= stop), 0)

    def _seen_over(self, memory: RowMemory, stop: int) -> int:
        """Do the same as :meth:`seen` for calls over a memory. Exact calls read whole rows, so that
        rows do not depend on each other."""
        if memory.rows > 1 and self.exact:
            return 0
        return self.seen(stop)

    def padded(self, count: int, rows: int = 1) -> int:
        """Return the padded node count of a call of ``count`` nodes over memory of ``rows``
        rows."""
        if not self.buckets:
            return -(-count // self.multiple) * self.multiple
        buckets = self.buckets if rows == 1 else self.row_buckets
        return min((bucket for bucket in buckets if bucket >= count), default=count)

    def work(self, calls: Sequence[Call]) -> Work:
        """See :meth:`~eesd.runtime.engines.base.Engine.work`, for calls of a round over one
        memory."""
        memory = _row(calls[0].kv_cache).memory
        count, slots = self._size(calls, memory)
        rows = memory.rows if memory.fixed else len(calls)
        return Work(rows * count, slots or memory.slots, rows)

    def _size(self, calls: Sequence[Call], memory: RowMemory) -> tuple[int, int]:
        """Return the number of nodes of each row, and the number of slots that attention reads (0
        means all slots). The longest row determines both."""
        count = self.padded(max(len(call.tokens) for call in calls), memory.rows)
        return count, self._seen_over(memory, max(call.slot for call in calls) + count)

    @torch.inference_mode()
    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """See :meth:`~eesd.runtime.engines.base.Engine.forward`. Prompt pieces run before a round,
        one after another.

        A call is finished when this returns.
        """
        if len(calls) == 1:
            return [self._run_one(calls[0])]
        outputs: dict[int, StepOutputs] = {}
        together: dict[int, list[int]] = {}
        for number, call in enumerate(calls):
            if self._fits_round(call):
                together.setdefault(id(_row(call.kv_cache).memory), []).append(number)
            else:
                outputs[number] = _kept(self._run_one(call))
        for numbers in together.values():
            found = self._together([calls[number] for number in numbers])
            outputs |= zip(numbers, found if len(together) == 1 else map(_kept, found), strict=True)
        return [outputs[number] for number in range(len(calls))]

    def _fits_round(self, call: Call) -> bool:
        return call.logits and len(call.tokens) <= self.manifest.max_tree_nodes + 1

    def _run_one(self, call: Call) -> StepOutputs:
        """Run a call of one sequence."""
        memory = _row(call.kv_cache).memory
        if call.levels > 1:
            return self._draft_chain(call)
        if memory.fixed and memory.rows > 1 and not self._fits_round(call):
            return self._staged(call)
        if call.logits:
            return self._together([call])[0]
        self._prefill(call)
        return NO_OUTPUTS

    def _staged(self, call: Call) -> StepOutputs:
        """Run a call of one row in the memory of a single sequence, so that calls are captured
        once, and not for each row."""
        row = _row(call.kv_cache)
        stop = call.slot + len(call.tokens)
        staging = self._staging(row.memory)
        staging.copy_from(row, 0, call.slot)
        staging.clear(call.slot)
        outputs = self._of_prompts()._run_one(call._replace(kv_cache=staging))
        row.copy_from(staging, call.slot, stop)
        return outputs

    def _staging(self, memory: RowMemory) -> DeviceKVCache:
        """Return the separate cache in which the prompts of several rows run."""
        prepared = self._prepared_over(memory)
        if prepared.staging is None:
            prepared.staging = self.make_memory(1).caches()[0]
        return prepared.staging

    def _prefill(self, call: Call) -> None:
        """Run a prompt piece, in several calls if the end of a cache requires it."""
        tokens = call.tokens
        slot = call.slot
        memory = _row(call.kv_cache).memory
        while tokens:
            # Padding nodes are written after the last token, and must not pass the end of the
            # cache.
            fitting = (bucket for bucket in self.buckets if slot + bucket <= memory.slots)
            count = min(len(tokens), max(fitting, default=len(tokens)))
            # A call as small as a round has already been captured, with logits for all of its
            # nodes.
            only_caches = self.padded(count) > self.manifest.max_tree_nodes + 1
            self._run(
                [Call(call.kv_cache, tokens[:count], range(slot, slot + count), slot)], only_caches
            )
            tokens = tokens[count:]
            slot = slot + count

    def _together(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run a round's calls over caches of one memory."""
        if self.buckets == (1,) and any(len(call.tokens) > 1 for call in calls):
            return self._one_by_one(calls)
        return self._run(calls)

    def _one_by_one(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run draft calls node by node, each node with its row of the mask."""
        kept: list[list[Tensor]] = [[] for _ in calls]
        found: list[list[StepOutputs]] = [[] for _ in calls]

        def keep(number: int, row: Tensor) -> Any:
            own = kept[number]
            call = calls[number]
            own.append(row.clone())  # the next call overwrites it
            if call.choose is None or len(own) < len(call.tokens):
                return None
            return call.choose(torch.cat(own))

        for at in range(max(len(call.tokens) for call in calls)):
            left = [number for number, call in enumerate(calls) if at < len(call.tokens)]
            steps = [
                _node(calls[number], at)._replace(choose=partial(keep, number)) for number in left
            ]
            for number, outputs in zip(left, self._run(steps), strict=True):
                assert outputs.topk_ids is not None and outputs.topk_logprobs is not None
                ids = outputs.topk_ids
                logprobs = outputs.topk_logprobs.copy()
                found[number].append(StepOutputs(no_logits, ids, logprobs, chosen=outputs.chosen))
        return [
            _joined(own, rows, self.stages[-1].stream)
            for own, rows in zip(found, kept, strict=True)
        ]

    def _run(self, calls: Sequence[Call], only_caches: bool = False) -> list[StepOutputs]:
        """Run calls over rows of one memory. If ``only_caches`` is True, the logits are not used,
        so each row computes logits for only one node."""
        rows = [_row(call.kv_cache).row for call in calls]
        memory = _row(calls[0].kv_cache).memory
        first, stop = (0, memory.rows) if memory.fixed else (min(rows), max(rows) + 1)
        padded, slots = self._size(calls, memory)
        given: list[Call | None] = [None] * (stop - first)
        for row, call in zip(rows, calls, strict=True):
            given[row - first] = call
        step = self._step(memory, first, stop - first, padded, slots, only_caches)
        step.set_inputs(given)
        return step.run(
            [
                (row - first, len(call.tokens), call.choose)
                for row, call in zip(rows, calls, strict=True)
            ]
        )

    def _draft_chain(self, call: Call) -> StepOutputs:
        """Draft the levels of a call without involving the host between them. The outputs have no
        logits."""
        memory = _row(call.kv_cache).memory
        row = _row(call.kv_cache).row
        prepared = self._prepared_over(memory)
        slots = 0
        if memory.rows == 1:
            slots = self.seen(call.slot + call.levels)
        key = row, slots
        with self.stages[0].stream.activate():
            if key not in prepared.loops:
                layer = partial(memory.layer, first=row, rows=1)
                prepared.loops[key] = DraftLoop(
                    self.manifest, self.stages[0], layer, slots, prepared.pool
                )
            ids, logprobs = prepared.loops[key].run(call.tokens[0], call.slot, call.levels)
        return StepOutputs(no_logits, ids, logprobs, levels=call.levels)

    def _prepared_over(self, memory: RowMemory) -> "_Prepared":
        """Return the prepared calls for one memory. Calls that are bound to former tensors of the
        memory are dropped."""
        found = self._prepared.get(memory)
        if found is None:
            capture = self.cuda_graphs and self.stages[0].stream.on_gpu
            found = self._prepared[memory] = _Prepared(
                torch.cuda.graph_pool_handle() if capture else None, memory.version
            )
        if found.version != memory.version:
            found.version = memory.version
            found.steps.clear()
            found.loops.clear()
        return found

    def _step(
        self,
        memory: RowMemory,
        first: int,
        rows: int,
        count: int,
        slots: int = 0,
        only_caches: bool = False,
    ) -> ForwardStep:
        """Return a prepared call of ``count`` nodes of each row. Its attention reads ``slots``
        slots (0 means all slots). The call is captured and kept if ``count`` is a bucket or, if
        there are no buckets, fits a round."""
        prepared = self._prepared_over(memory)
        largest_round = self.padded(self.manifest.max_tree_nodes + 1)
        reused = count in self.buckets or (not self.buckets and count <= largest_round)
        key = first, rows, count, slots, only_caches
        step = prepared.steps.pop(key, None)
        if step is None:
            width = largest_round if count <= largest_round else 0
            pool = prepared.pool if reused else None
            layer = partial(memory.layer, first=first, rows=rows)
            step = ForwardStep(
                self.manifest,
                self.stages,
                self.is_draft,
                layer,
                count,
                width,
                1 if only_caches else max(count, self.least_logits),
                pool,
                slots,
            )
        if reused:
            prepared.steps[key] = step  # the order is from least to most recently used
            if len(prepared.steps) > MOST_STEPS:
                del prepared.steps[next(iter(prepared.steps))]
        return step


@dataclass
class _Prepared:
    """The prepared calls of an engine for one memory.

    Attributes:
        pool: Memory pool for CUDA graphs, or None if nothing is captured.
        version: Version of the memory for which they are prepared.
        steps: The prepared calls. The key consists of the first row, the numbers of rows, nodes,
            and slots that attention reads, and ``only_caches``.
        loops: The prepared draft chains for each row and number of slots.
        staging: The cache in which prompts run if fixed memory has several rows. It is made for the
            first such prompt.
    """

    pool: object
    version: int
    steps: dict[tuple[int, int, int, int, bool], ForwardStep] = field(default_factory=dict)
    loops: dict[tuple[int, int], DraftLoop] = field(default_factory=dict)
    staging: DeviceKVCache | None = None


def _row(kv_cache: KVCache) -> DeviceKVCache:
    assert isinstance(kv_cache, DeviceKVCache)
    return kv_cache


def _kept(outputs: StepOutputs) -> StepOutputs:
    """Return outputs whose logits are fetched before another call overwrites them."""
    if outputs is not NO_OUTPUTS:
        outputs.fetched()
    return outputs


def _node(call: Call, at: int) -> Call:
    """Return a node of a call as a separate call."""
    mask = None if call.tree_mask is None else call.tree_mask[at : at + 1]
    return Call(
        call.kv_cache,
        call.tokens[at : at + 1],
        call.positions[at : at + 1],
        call.slot + at,
        call.context_len,
        mask,
    )


def _joined(
    outputs: Sequence[StepOutputs], rows: Sequence[Tensor], stream: DeviceStream
) -> StepOutputs:
    """Join the outputs of the nodes of a draft call. The joined logits are the ``rows``, which stay
    on the device."""
    ids = np.concatenate([one.topk_ids for one in outputs if one.topk_ids is not None])
    logprobs = np.concatenate(
        [one.topk_logprobs for one in outputs if one.topk_logprobs is not None]
    )
    return StepOutputs(
        partial(fetch, lambda: torch.cat(list(rows)), stream),
        ids,
        logprobs,
        chosen=outputs[-1].chosen,
    )


def make_engines(
    manifest: Manifest,
    verify: Sequence[StageRunner],
    draft: StageRunner | None,
    make_memory: Callable[[int], RowMemory],
    *,
    pad: bool,
    multiple: int = 1,
    one_by_one: bool = False,
    slots: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    prefill_chunk: int | None = None,
    exact: bool | None = None,
    by_rows: bool = False,
    on_warm_up: Callable[[GraphInfo], None] = lambda _: None,
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Build the engines of an engine directory from stage runners.

    Args:
        manifest: Manifest of the engine directory.
        verify: The stages of verify in order.
        draft: The draft, or None for no draft engine.
        make_memory: A function that makes memory for the KV caches of a number of sequences. Both
            engines use this memory.
        pad: Whether to pad calls to buckets.
        multiple: If there are no buckets, verify calls are padded to a multiple of this number.
            Draft calls need no padding, because rounding in the draft does not change the output.
        one_by_one: Whether the nodes of a draft call run one after another.
        slots: The numbers of slots that attention may read in verify calls, and those for draft
            calls. See :class:`DeviceEngine`.
        prefill_chunk: Maximum number of prompt tokens in one call. If calls are padded, the default
            is the manifest's ``gpu_prefill_chunk``. If not, it is 128, or the number of slots if
            that is smaller.
        exact: See :func:`buckets_for`. It applies to padded verify calls. Draft calls use the
            smallest bucket.
        by_rows: Whether a row's states in a verify call are independent of the call's number of
            rows. If so, exact calls of one sequence use the smallest bucket, too, and only the LM
            head computes the rows of the largest round.
        on_warm_up: See :class:`DeviceEngine`.

    Returns:
        The verify engine and the draft engine.
    """
    chunk = prefill_chunk or manifest.gpu_prefill_chunk
    if not pad:
        chunk = prefill_chunk or min(PREFILL_CHUNK, manifest.max_seq_len)
    engine = partial(
        DeviceEngine,
        manifest,
        make_memory=make_memory,
        prefill_chunk=chunk,
        exact=not pad or has_one_count(manifest, exact),
        on_warm_up=on_warm_up,
    )
    rounds: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    if pad:
        rounds = buckets_for(manifest, chunk, exact=False if by_rows else exact)
        levels = buckets_for(manifest, chunk, exact=False)
    if one_by_one:
        levels = (1,)
    verifier = engine(
        verify,
        is_draft=False,
        buckets=rounds,
        slots=slots[0],
        multiple=multiple,
        least_logits=(manifest.max_tree_nodes + 1) * by_rows,
    )
    if draft is None:
        return verifier, None
    return verifier, engine([draft], is_draft=True, buckets=levels, slots=slots[1], multiple=1)
