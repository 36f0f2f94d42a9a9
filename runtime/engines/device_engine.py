"""The engine that the GPU backends share: rows, padding to buckets, CUDA graphs, stages, and chains
drafted on the device.

Calls of a round over caches of one memory run as one. On a GPU that has all rows of the memory, so
that what is captured in CUDA graphs does not change. Exact engines give it one node count and all
slots, so one kernel computes a row, whatever runs beside it; others as few as its longest row
needs. Where a row's states do not depend on how many rows there are, an exact call of one sequence
has few nodes, too, and the LM head alone computes as many rows as ever.

The order of a call:

1. :meth:`DeviceEngine.forward` runs pieces of prompts one after another, and then the calls of a
   round together.
2. Its nodes are padded to a bucket. The :class:`ForwardStep` of this size is taken, or made.
3. :meth:`ForwardStep.set_inputs` writes the inputs of all rows into one piece of pinned host
   memory.
4. Each stage copies it to its device, computes the attention mask there if its graph reads one, and
   runs the graph. The last stage copies the few results that the host needs into pinned memory. On
   a GPU its part is a CUDA graph, captured at first.
5. On a GPU the device also chooses tokens from the logits.
6. The host waits, once.

A :class:`DraftLoop` drafts a chain. It has the same order, but runs step 4 for each token, which
comes from the step before it.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.manifest import EXACT_NODES, PREFILL_CHUNK, GraphInfo, Manifest
from eesd.model.torch_ops import KV
from eesd.runtime.engines.base import NO_OUTPUTS, Call, Choose, KVCache, StepOutputs, Work
from eesd.runtime.engines.device import (
    ALIGNMENT,
    AttentionMask,
    DeviceStream,
    StageRunner,
    StepInputs,
)
from eesd.runtime.engines.device_cache import DeviceKVCache, DeviceMemory

LOGGER = logging.getLogger(__name__)
BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Node counts that calls on a GPU are padded to. Results of padding nodes are ignored."""
ROW_BUCKETS = (1, 2, 4, 8, 32, 128)
"""Buckets of calls of several rows where engines are not exact, up to half a round, besides a
round's own: few, because each is captured for each number of slots."""
LARGEST_LEVEL = 8
"""Nodes of a row in the largest calls of a draft over several rows that are prepared."""
STRIDE = ALIGNMENT // 8
"""Inputs in one int64 buffer begin at multiples of this many elements."""
MOST_STEPS = 256
"""Calls over a memory that stay prepared. Of more, the one that was not used for longest is
dropped: on the CPU, where rows come and go, each has a mask, B x n x S, of its own."""


def has_one_count(manifest: Manifest, exact: bool | None) -> bool:
    """Whether rounds have one node count, see :func:`buckets_for`."""
    return manifest.max_tree_nodes + 1 <= EXACT_NODES if exact is None else exact


def buckets_for(
    manifest: Manifest, prefill_chunk: int, exact: bool | None = None
) -> tuple[int, ...]:
    """The buckets of an engine directory: up to the largest round, and the prefill chunk.

    Args:
        manifest: Manifest of the engine directory.
        prefill_chunk: Tokens of the prompt that one call takes at most.
        exact: Whether all rounds, and plain decoding, have one node count: then one kernel computes
            a token's logits, whatever is drafted. None: if a round has at most :data:`EXACT_NODES`
            nodes.
    """
    most = manifest.max_tree_nodes + 1
    smaller = (
        () if has_one_count(manifest, exact) else tuple(count for count in BUCKETS if count < most)
    )
    # A short prompt shall not pay for a long one.
    prefill = {min(PREFILL_CHUNK, prefill_chunk), prefill_chunk}
    return (*smaller, most, *sorted(count for count in prefill if count > most))


@dataclass(eq=False, repr=False)
class DeviceEngine:
    """A draft or verify engine on devices.

    Attributes:
        manifest: Manifest of the engine directory.
        stages: The stages in order; a draft engine has one.
        is_draft: Whether this is the draft engine.
        make_memory: Makes memory for the KV caches of a number of sequences.
        buckets: Node counts that calls are padded to; empty if they are not padded to buckets.
            (1,): the nodes of a call run one after another.
        slots: How many of the first slots of the caches attention may read, ascending, the last all
            of them; empty: always all. A call reads the fewest that hold its padded nodes.
        multiple: Without buckets, calls are padded to a multiple of this.
        prefill_chunk: Tokens of the prompt that one call takes at most.
        exact: Whether rows of a batch cannot change each other's logits: their calls have one node
            count and read whole caches. Otherwise a call has the smallest of :attr:`row_buckets`,
            and reads the fewest slots, that hold its longest row.
        on_warm_up: Called with each graph after :meth:`prepare`.
        least_logits: The least number of rows that the LM head computes for a sequence in a round.
        cuda_graphs: Whether calls over memory that is new to the engine use CUDA graphs. It has no
            effect on the CPU.
        chooses: Whether sessions let the device choose tokens, instead of copying logits. Default:
            on a GPU.
    """

    manifest: Manifest
    stages: Sequence[StageRunner]
    is_draft: bool
    make_memory: Callable[[int], DeviceMemory]
    buckets: tuple[int, ...]
    slots: tuple[int, ...]
    multiple: int
    prefill_chunk: int
    exact: bool
    on_warm_up: Callable[[GraphInfo], None]
    least_logits: int = 0
    cuda_graphs: bool = True
    chooses: bool = field(init=False)
    _prepared: "WeakKeyDictionary[DeviceMemory, _Prepared]" = field(
        init=False, default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self.chooses = self.stages[-1].stream.on_gpu

    def new_kv_caches(self, count: int = 1) -> Sequence[DeviceKVCache]:
        if count > 1 and not self.exact and not self.is_draft:
            LOGGER.warning(
                "Requests of a batch may change how a token's logits round, and so the token; "
                "--exact prevents it."
            )
        return self.make_memory(count).caches()

    @torch.inference_mode()
    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        """Prepare and run a call for each bucket and number of slots. A draft drafts a chain in
        calls of one node.

        What the calls write is undone: another engine may have filled the cache. Those of several
        rows write nothing of them.
        """
        kv_cache = _row(kv_caches[0])
        memory = kv_cache.memory
        if not self.buckets:
            return
        if memory.rows == 1:
            self._warm_up(kv_cache)
        else:
            self._warm_up_rows(memory)
            if not self.is_draft:  # a draft runs no prompts
                self._of_prompts()._warm_up(self._staging(memory))
        for stage in self.stages:
            self.on_warm_up(stage.graph)

    def _warm_up(self, kv_cache: DeviceKVCache) -> None:
        for count in self.buckets[:1] if self.is_draft else self.buckets:
            more = [slots for slots in self.slots[:-1] if slots >= count]
            # The first ones whose calls read more slots.
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
                        self.draft_chain(kv_cache, 0, slot, 1)

    def _warm_up_rows(self, memory: DeviceMemory) -> None:
        most = LARGEST_LEVEL if self.is_draft else self.manifest.max_tree_nodes + 1
        for count in (
            self.row_buckets[:1]
            if self.exact
            else (count for count in self.row_buckets if count <= most)
        ):
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
        if self.exact:
            return (
                self.buckets
                if self.is_draft
                else tuple(count for count in self.buckets if count >= most)
            )
        return tuple(count for count in self.buckets if count in few)

    def _of_prompts(self) -> "DeviceEngine":
        """This engine for prompts beside rows, which need no smaller calls than a round's."""
        alone = copy(self)
        alone.buckets = tuple(
            count for count in self.buckets if count > self.manifest.max_tree_nodes
        )
        return alone

    @property
    def last_positions(self) -> tuple[int, ...]:
        """The last positions whose tokens one kernel computes, ascending; behind them attention
        reads more slots.

        Empty if rounds have several node counts: then tokens may depend on what is drafted anyway.
        """
        most = self.manifest.max_tree_nodes + 1
        one_count = not self.is_draft and self.buckets and self.buckets[0] >= most
        return tuple(slots - self.buckets[0] for slots in self.slots[:-1]) if one_count else ()

    def of_one_node(self) -> "DeviceEngine | None":
        """This engine as plain decoding would have it without a draft: its calls of one node are
        not padded to a round's. None: they never are. Its logits may round otherwise."""
        if not self.buckets or self.buckets[0] == 1:
            return None
        alone = copy(self)
        alone.buckets = (1, *self.buckets)
        return alone

    def seen(self, stop: int) -> int:
        """How many of the first slots attention reads in a call whose padded nodes end before the
        slot ``stop``; 0: all."""
        return next((slots for slots in self.slots if slots >= stop), 0)

    def _seen_over(self, memory: DeviceMemory, stop: int) -> int:
        """The same for calls over a memory, whose rows are read whole where they must not depend on
        each other."""
        return 0 if memory.rows > 1 and self.exact else self.seen(stop)

    def padded(self, count: int, rows: int = 1) -> int:
        """The node count that a call of ``count`` nodes, over memory of so many rows, is padded
        to."""
        if self.buckets:
            return next(
                (
                    bucket
                    for bucket in (self.buckets if rows == 1 else self.row_buckets)
                    if bucket >= count
                ),
                count,
            )
        return -(-count // self.multiple) * self.multiple

    def work(self, calls: Sequence[Call]) -> Work:
        """See :meth:`~eesd.runtime.engines.base.Engine.work`, for calls of a round over one
        memory."""
        memory = _row(calls[0].kv_cache).memory
        count, slots = self._size(calls, memory)
        rows = memory.rows if memory.fixed else len(calls)
        return Work(rows * count, slots or memory.slots, rows)

    def _size(self, calls: Sequence[Call], memory: DeviceMemory) -> tuple[int, int]:
        """The nodes of each row, and how many of the first slots attention reads; 0: all. The
        longest row decides."""
        count = self.padded(max(len(call.tokens) for call in calls), memory.rows)
        return count, self._seen_over(memory, max(call.slot for call in calls) + count)

    @torch.inference_mode()
    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """See :meth:`~eesd.runtime.engines.base.Engine.forward`. Pieces of prompts run before a
        round, one after another.

        A call is finished when this returns.
        """
        if len(calls) == 1:
            return [self._alone(calls[0])]
        outputs: dict[int, StepOutputs] = {}
        together: dict[int, list[int]] = {}
        for number, call in enumerate(calls):
            if self._fits_round(call):
                together.setdefault(id(_row(call.kv_cache).memory), []).append(number)
            else:
                outputs[number] = _kept(self._alone(call))
        for numbers in together.values():
            found = self._together([calls[number] for number in numbers])
            outputs |= zip(numbers, found if len(together) == 1 else map(_kept, found), strict=True)
        return [outputs[number] for number in range(len(calls))]

    def _fits_round(self, call: Call) -> bool:
        return call.logits and len(call.tokens) <= self.manifest.max_tree_nodes + 1

    def _alone(self, call: Call) -> StepOutputs:
        """Run a call of one sequence."""
        memory = _row(call.kv_cache).memory
        if memory.fixed and memory.rows > 1 and not self._fits_round(call):
            return self._staged(call)
        if call.logits:
            return self._together([call])[0]
        self._prefill(call)
        return NO_OUTPUTS

    def _staged(self, call: Call) -> StepOutputs:
        """Run a call of one row of several in memory for one, whose calls are captured once and not
        for each row."""
        row = _row(call.kv_cache)
        stop = call.slot + len(call.tokens)
        staging = self._staging(row.memory)
        staging.copy_from(row, 0, call.slot)
        staging.clear(call.slot)
        outputs = self._of_prompts()._alone(call._replace(kv_cache=staging))
        row.copy_from(staging, call.slot, stop)
        return outputs

    def _staging(self, memory: DeviceMemory) -> DeviceKVCache:
        """The cache beside several rows in which their prompts run."""
        prepared = self._prepared_over(memory)
        if prepared.staging is None:
            prepared.staging = self.make_memory(1).caches()[0]
        return prepared.staging

    def _prefill(self, call: Call) -> None:
        """Run a piece of a prompt, in as many calls as it takes at the end of a cache."""
        tokens = call.tokens
        slot = call.slot
        memory = _row(call.kv_cache).memory
        while tokens:
            # Padding nodes write behind the last token, up to the end of the cache.
            most = (
                max(bucket for bucket in self.buckets if slot + bucket <= memory.slots)
                if self.buckets
                else len(tokens)
            )
            count = min(len(tokens), most)
            # A call that fits a round is captured already, with logits for all of its nodes.
            only_caches = self.padded(count) > self.manifest.max_tree_nodes + 1
            self._run(
                [Call(call.kv_cache, tokens[:count], range(slot, slot + count), slot)], only_caches
            )
            tokens = tokens[count:]
            slot = slot + count

    def _together(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run calls of a round over caches of one memory."""
        one_by_one = self.buckets == (1,) and any(len(call.tokens) > 1 for call in calls)
        return self._one_by_one(calls) if one_by_one else self._run(calls)

    def _one_by_one(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """Run calls of the draft as a call for each node. Its row of the mask says whether a node
        sees those before it."""
        kept: list[list[Tensor]] = [[] for _ in calls]
        found: list[list[StepOutputs]] = [[] for _ in calls]

        def keep(number: int, row: Tensor) -> Any:
            own = kept[number]
            call = calls[number]
            own.append(row.clone())  # the next call overwrites it
            return (
                call.choose(torch.cat(own))
                if call.choose and len(own) == len(call.tokens)
                else None
            )

        for at in range(max(len(call.tokens) for call in calls)):
            left = [number for number, call in enumerate(calls) if at < len(call.tokens)]
            steps = [
                _node(calls[number], at)._replace(choose=partial(keep, number)) for number in left
            ]
            for number, outputs in zip(left, self._run(steps), strict=True):
                assert outputs.topk_ids is not None and outputs.topk_logprobs is not None
                ids = outputs.topk_ids
                logprobs = outputs.topk_logprobs.copy()
                found[number].append(StepOutputs(_no_logits, ids, logprobs, chosen=outputs.chosen))
        return [
            _joined(own, rows, self.stages[-1].stream)
            for own, rows in zip(found, kept, strict=True)
        ]

    def _run(self, calls: Sequence[Call], only_caches: bool = False) -> list[StepOutputs]:
        """Run calls over rows of one memory. With ``only_caches`` each has logits for one node,
        because they are not used."""
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

    @torch.inference_mode()
    def draft_chain(self, kv_cache: KVCache, token: int, slot: int, count: int) -> StepOutputs:
        """See :data:`~eesd.runtime.engines.base.DraftChain`."""
        memory = _row(kv_cache).memory
        row = _row(kv_cache).row
        prepared = self._prepared_over(memory)
        key = (row, self.seen(slot + count) if memory.rows == 1 else 0)
        with self.stages[0].stream.activate():
            if key not in prepared.loops:
                layer = partial(memory.layer, first=row, rows=1)
                prepared.loops[key] = DraftLoop(self, layer, key[1], prepared.pool)
            ids, logprobs = prepared.loops[key].run(token, slot, count)
        return StepOutputs(_no_logits, ids, logprobs)

    def _prepared_over(self, memory: DeviceMemory) -> "_Prepared":
        """What is prepared over a memory. Calls that are bound to memory that it no longer uses are
        dropped."""
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
        memory: DeviceMemory,
        first: int,
        rows: int,
        count: int,
        slots: int = 0,
        only_caches: bool = False,
    ) -> "ForwardStep":
        """The call of ``count`` nodes of each row whose attention reads the first ``slots`` slots;
        0: all. It is captured and kept if ``count`` is a bucket or, without buckets, fits a
        round."""
        prepared = self._prepared_over(memory)
        largest_round = self.padded(self.manifest.max_tree_nodes + 1)
        reused = count in self.buckets if self.buckets else count <= largest_round

        key = first, rows, count, slots, only_caches
        step = prepared.steps.pop(key, None)
        if step is None:
            width = largest_round if count <= largest_round else 0
            pool = prepared.pool if reused else None
            layer = partial(memory.layer, first=first, rows=rows)
            step = ForwardStep(
                self,
                layer,
                count,
                width,
                1 if only_caches else max(count, self.least_logits),
                pool,
                slots,
            )
        if reused:
            prepared.steps[key] = step  # the last one used is the last one
            if len(prepared.steps) > MOST_STEPS:
                del prepared.steps[next(iter(prepared.steps))]
        return step


@dataclass
class _Prepared:
    """What an engine has prepared over a memory.

    Attributes:
        pool: Memory pool for CUDA graphs; None: nothing is captured.
        version: Of the memory, for which this is prepared.
        steps: Calls by first row, rows, nodes, slots that attention reads, and whether they have no
            logits.
        loops: Chains of the draft by row and slots.
        staging: Of several rows that are fixed, the cache beside them in which their prompts run.
    """

    pool: object
    version: int
    steps: "dict[tuple[int, int, int, int, bool], ForwardStep]" = field(default_factory=dict)
    loops: "dict[tuple[int, int], DraftLoop]" = field(default_factory=dict)
    staging: DeviceKVCache | None = None


def _row(kv_cache: KVCache) -> DeviceKVCache:
    assert isinstance(kv_cache, DeviceKVCache)
    return kv_cache


def _kept(outputs: StepOutputs) -> StepOutputs:
    """Outputs whose logits are fetched before another call overwrites them."""
    return outputs if outputs is NO_OUTPUTS else outputs.fetched()


def _node(call: Call, at: int) -> Call:
    """A node of a call as a call of its own."""
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
    """The outputs of the nodes of a draft's call, whose logits are the ``rows`` on the device."""
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
    make_memory: Callable[[int], DeviceMemory],
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
        draft: The draft; None: no draft engine.
        make_memory: Makes memory for the KV caches of a number of sequences, for both engines.
        pad: Whether to pad calls to buckets.
        multiple: Without buckets, pad verify's calls to multiples of this. The draft's calls need
            no padding: nothing that they compute reaches the output.
        one_by_one: Whether the draft takes one node a call.
        slots: How many of the first slots attention may read, in verify and in the draft; see
            :class:`DeviceEngine`.
        prefill_chunk: Tokens of the prompt that one call takes at most. Default: the manifest's
            ``gpu_prefill_chunk`` if calls are padded, else 128, or the slots of the cache if fewer.
        exact: Of padded calls, see :func:`buckets_for`. The draft's calls have as few nodes as
            possible.
        by_rows: Whether a row's states in verify do not depend on how many rows a call has. Then
            exact calls of one sequence have as few nodes as the others, and the LM head alone
            computes the rows of the largest round.
        on_warm_up: See :class:`DeviceEngine`.

    Returns:
        The verify engine and the draft engine.
    """
    chunk = prefill_chunk or (
        manifest.gpu_prefill_chunk if pad else min(PREFILL_CHUNK, manifest.max_seq_len)
    )
    engine = partial(
        DeviceEngine,
        manifest,
        make_memory=make_memory,
        prefill_chunk=chunk,
        exact=not pad or has_one_count(manifest, exact),
        on_warm_up=on_warm_up,
    )
    rounds = buckets_for(manifest, chunk, exact=False if by_rows else exact) if pad else ()
    levels = (1,) if one_by_one else buckets_for(manifest, chunk, exact=False) if pad else ()
    drafter = (
        engine([draft], is_draft=True, buckets=levels, slots=slots[1], multiple=1)
        if draft
        else None
    )
    least = manifest.max_tree_nodes + 1 if by_rows else 0
    return engine(
        verify,
        is_draft=False,
        buckets=rounds,
        slots=slots[0],
        multiple=multiple,
        least_logits=least,
    ), drafter


def _no_logits() -> NDArray[np.float32]:
    raise AssertionError("a chain that the device drafted has no logits")


Buffer = TypeVar("Buffer", Tensor, NDArray[np.int64])


class InputViews(NamedTuple, Generic[Buffer]):
    """The inputs of a call as views of one int64 buffer, which is copied to the device in one
    piece.

    Attributes:
        tokens: [B, n].
        positions: [B, n].
        slot: Slot of the first node of each sequence, [B].
        context_len: See :class:`~eesd.runtime.engines.base.Call`; [B].
        tree_mask: 1 where a node sees a slot, else 0; [B, n, width].
    """

    tokens: Buffer
    positions: Buffer
    slot: Buffer
    context_len: Buffer
    tree_mask: Buffer


def _buffer_size(batch: int, count: int, width: int) -> int:
    return 2 * _aligned(batch * count) + _aligned(2 * batch) + batch * count * width


def _input_views(buffer: Buffer, batch: int, count: int, width: int) -> InputViews[Buffer]:
    """The inputs of ``count`` nodes of ``batch`` sequences in a buffer of :func:`_buffer_size`
    elements."""
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


_ONE_CAPTURE = Lock()
"""Held by the thread that captures."""


class CapturedGraph:
    """Work on a device that is captured in a CUDA graph and replayed. Without a pool it simply runs
    each time.

    Each call is given the work, which is always the same. The graph does not keep it: that would be
    a cycle with its owner, which would hold memory on the GPU until the collector runs.
    """

    def __init__(self, stream: DeviceStream, pool: Any) -> None:
        """Make a graph of work in ``stream``. ``pool``: the memory pool that it shares with
        others; None: do not capture."""
        self._stream = stream
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def needs_capture(self) -> bool:
        return self._pool is not None and self._graph is None

    def capture(self, work: Callable[[], None]) -> None:
        """Run the work once, because libraries initialize themselves in their first call, and then
        capture it.

        Work that cannot be captured runs without a graph from then on.
        """
        work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads of the process may use the GPU meanwhile without breaking
            # the capture. But a capture begins by waiting for the whole GPU, which is an error
            # while another thread captures.
            with (
                _ONE_CAPTURE,
                collector_off(),
                torch.cuda.graph(
                    graph, self._pool, self._stream.cuda_stream, capture_error_mode="thread_local"
                ),
            ):
                work()
        except RuntimeError as error:
            LOGGER.warning("A call runs without a CUDA graph, and so slower: %s", error)
            self._pool = None
        else:
            self._graph = graph

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, which is captured first where that is still to do."""
        if self.needs_capture:
            self.capture(work)
        if self._graph is None:
            work()
        else:
            self._graph.replay()


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running: while work is captured, freeing memory of the
    GPU is an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Layer = Callable[[int], Tensor]
"""Gives keys and values of a layer, [2, B, KV, S, D]: the memory that calls update."""


def _caches(stage: StageRunner, layer: Layer) -> list[KV]:
    return [(keys, values) for keys, values in map(layer, stage.graph.caches)]


class _StageStep:
    """One stage's part of a :class:`ForwardStep`: copy the inputs to the device, compute the mask,
    run the graph."""

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
            host_inputs: Inputs in host memory, laid out as in :func:`_input_views`.
            count: n.
            width: Columns of the tree mask; 0: a call for chains only.
            logit_rows: R; the last nodes get logits. Of more than there are nodes, the others are
                the last node's.
            slots: Attention reads so many of the first slots; 0: all.
            hidden: Memory for the previous stage's hidden state [B, n, hidden]; None: this stage
                takes the tokens.
            pool: Memory pool for its CUDA graph; None: do not capture.
        """
        device = stage.stream.device
        caches = _caches(stage, layer)
        batch = caches[0][0].shape[0]
        self.stage = stage
        self._host_inputs = host_inputs
        self._device_inputs = torch.zeros_like(host_inputs, device=device)
        views = _input_views(self._device_inputs, batch, count, width)
        tree = (views.context_len, views.tree_mask) if width else None
        self._mask = AttentionMask(caches[0][0], count, slots, views.slot, tree)
        self.x = views.tokens if hidden is None else hidden
        # A prepared call keeps addresses, not memory.
        self._rows = torch.arange(
            max(count - logit_rows, 0), max(count, logit_rows), device=device
        ).clamp_max(count - 1)
        inputs = StepInputs(self.x, views.positions, views.slot, self._mask, self._rows, caches)
        self._call = stage.prepare(inputs)
        self.results: list[Tensor] = []
        self.host_results: Tensor | None = None  # of the last stage
        self._graph = CapturedGraph(stage.stream, pool if stage.capturable else None)

    def body(self) -> None:
        self._device_inputs.copy_(self._host_inputs, non_blocking=True)
        self._mask.update()
        self.results = self._call()
        if self.host_results is not None:
            self.host_results.copy_(pack_results(self.results), non_blocking=True)

    def run(self, previous: "_StageStep | None") -> None:
        """Run behind the previous stage, in this one's stream."""
        if previous is not None:
            self.x.copy_(previous.results[0], non_blocking=True)
        self._graph.run(self.body)


class ForwardStep:
    """A forward call of one node count and number of sequences through all stages of an engine."""

    def __init__(
        self,
        engine: DeviceEngine,
        layer: Layer,
        count: int,
        width: int,
        logit_rows: int,
        pool: object,
        slots: int = 0,
    ) -> None:
        """Prepare the call.

        Args:
            engine: The engine.
            layer: The KV caches, which say how many sequences there are.
            count: n, padding included.
            width: Columns of the tree mask; 0: a call for chains only, of more nodes than a round
                has.
            logit_rows: R; the last nodes of each sequence get logits. A draft's all do.
            pool: Memory pool for CUDA graphs; None: do not capture.
            slots: Attention reads so many of the first slots; 0: all.
        """
        manifest = engine.manifest
        pinned = engine.stages[0].stream.on_gpu
        cache = layer(engine.stages[0].graph.caches[0])
        self._batch, self._slots = cache.shape[1:4:2]
        self._count = count
        self._is_draft = engine.is_draft
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
        for stage in engine.stages:
            hidden = None
            shape = (self._batch, count, manifest.geometry.hidden_size)
            # Memory is of the current stream, and a context of the current device.
            with stage.stream.activate():
                if self._stages:
                    hidden = torch.zeros(shape, dtype=cache.dtype, device=stage.stream.device)
                self._stages.append(
                    _StageStep(
                        stage, layer, host_inputs, count, width, logit_rows, slots, hidden, pool
                    )
                )
        # Of a draft ids and then log-probabilities.
        shape = (
            (2 * self._batch, count, manifest.draft_top_k)
            if engine.is_draft
            else (self._batch, logit_rows, 1)
        )
        self._host_results = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)
        self._stages[-1].host_results, self._found = self._host_results, self._host_results.numpy()

    def set_inputs(self, calls: Sequence[Call | None]) -> None:
        """Write the inputs of each sequence, up to n nodes. None: one that only fills the call, and
        writes its last slots."""
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
            # Positions of padding nodes must be within the rotary tables. Spare slots at the end of
            # the cache are beyond them.
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
            wanted: Sequences, the number of their first nodes whose results are returned, and what
                chooses from their logits.
        """
        with ExitStack() as stack:  # each stream once: that takes as long as a launch
            for previous, step in zip((None, *self._stages), self._stages, strict=False):
                # Those before stay current: copies from there run in them.
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
        return _to_host(choose(last.results[0][row, :count].float()), last.stage.stream)

    def _outputs(self, row: int, count: int, chosen: NDArray[np.float64] | None) -> StepOutputs:
        """The results of the first ``count`` nodes of a sequence."""
        last = self._stages[-1]
        results, every = self._found[row :: self._batch, :count], last.results[0]
        fetch_logits = partial(fetch, lambda: every[row, :count].float(), last.stage.stream)
        if self._is_draft:
            return StepOutputs(fetch_logits, results[0].astype(np.int64), results[1], chosen=chosen)
        return StepOutputs(
            fetch_logits, argmax_ids=results[0, :, 0].astype(np.int64), chosen=chosen
        )


class DraftLoop:
    """A chain drafted on the device: each step of one node takes its token from the step before it.
    The host waits once."""

    def __init__(self, engine: DeviceEngine, layer: Layer, slots: int, pool: object) -> None:
        """Prepare the step, which sees the first ``slots`` slots; 0: all. ``pool`` is the memory
        pool for its CUDA graph, None: do not capture."""
        (stage,) = engine.stages
        manifest = engine.manifest
        self._stream = stage.stream
        device = stage.stream.device
        pinned = stage.stream.on_gpu
        # Token, position, slot and number of the step, each at the beginning of a row.
        self._host_inputs = torch.zeros((4, STRIDE), dtype=torch.int64, pin_memory=pinned)
        self._device_inputs = torch.zeros_like(self._host_inputs, device=device)
        self._token, position, slot, self._step = self._device_inputs[:, :1].unbind()
        self._counters = self._device_inputs[1:, 0]
        caches = _caches(stage, layer)
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
        """Run ``count`` steps behind ``token``. Returns the ids and the log-probabilities of each
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


def pack_results(results: Sequence[Tensor]) -> Tensor:
    """The results that the host always needs, as one float32 tensor; float32 holds every id below
    2^24 exactly.

    Args:
        results: Results of a :data:`~eesd.runtime.engines.device.PreparedCall`.

    Returns:
        For a draft, ids and then log-probabilities of the candidates [2 B, n, K]; for verify, the
        most likely tokens [B, R, 1].
    """
    if len(results) == 2:  # a kernel has made it
        return results[1]
    if len(results) == 1:
        return results[0].argmax(-1, keepdim=True).float()
    return torch.cat((results[1].float(), results[2]))


def _to_host(tensor: Tensor | None, stream: DeviceStream) -> Tensor | None:
    """Begin to copy a tensor to the host, in the current stream; on the CPU it is there."""
    if tensor is None or not stream.on_gpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def fetch(make: Callable[[], Tensor], stream: DeviceStream) -> NDArray[np.float32]:
    """Make a float32 tensor in a stream, and copy it to the host; on the CPU the array shares its
    memory."""
    with stream.activate():
        tensor = _to_host(make(), stream)
    stream.synchronize()
    assert tensor is not None
    array: NDArray[np.float32] = tensor.numpy()
    return array
