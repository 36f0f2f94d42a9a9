"""An engine on devices, whatever runs its graphs there: node counts in buckets, CUDA graphs, stages, chains drafted ahead."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.manifest import PREFILL_CHUNK, GraphInfo, Manifest
from eesd.model.decoder import KV
from eesd.runtime.engines.base import KVCache, StepOutputs
from eesd.runtime.engines.device import Call, DeviceKVCache, Mask, Program, Repeated

BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Node counts that GPU passes are made for; others are filled up to the next with nodes that nobody looks at."""
ALIGNED = 32
"""Numbers (int64) between two inputs in one buffer: TensorRT wants addresses in steps of 256 bytes."""


def buckets_for(manifest: Manifest, prefill_chunk: int) -> tuple[int, ...]:
    """Counts for rounds, and that of a prefill as the last."""
    most = manifest.max_tree_nodes + 1
    return (*(count for count in BUCKETS if count < most), most, *((prefill_chunk,) if prefill_chunk > most else ()))


class DeviceEngine:
    """A draft or verify graph, or the stages of one, on their devices: ``programs``, and ``drafts`` says which of the two.

    With ``fill`` calls are filled up to the next of a few node counts, ``buckets``; without, they run as they are. A new
    binding runs those that will occur, and then calls ``warmed``.
    """

    def __init__(
        self,
        manifest: Manifest,
        programs: Sequence[Program],
        drafts: bool,
        make_kv_cache: Callable[[], DeviceKVCache],
        prefill_chunk: int,
        fill: bool,
        warmed: Callable[[], None],
    ) -> None:
        self.manifest = manifest
        self.programs = programs
        self.drafts = drafts
        self.buckets = buckets_for(manifest, prefill_chunk) if fill else ()
        self.prefill_chunk = prefill_chunk
        self.warmed = warmed
        self.cuda_graphs = True
        """Whether bindings made from now on record their calls on a GPU."""
        self._make_kv_cache = make_kv_cache

    def new_kv_cache(self) -> DeviceKVCache:
        return self._make_kv_cache()

    def bind(self, kv_cache: KVCache) -> "DeviceBinding":
        assert isinstance(kv_cache, DeviceKVCache)
        binding = DeviceBinding(self, kv_cache)
        if self.buckets:
            binding.warm_up()
        return binding


def engine_pair(
    manifest: Manifest,
    verify: Sequence[Program],
    draft: Program | None,
    make_kv_cache: Callable[[], DeviceKVCache],
    fill: bool,
    prefill_chunk: int | None = None,
    warmed: Callable[[GraphInfo], None] = lambda _: None,
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """The verify engine over its stages and, if there is a program for it, the draft engine; ``warmed`` is told each graph
    whose calls have run."""
    chunk = prefill_chunk or min(PREFILL_CHUNK, manifest.max_seq_len)

    def engine(programs: Sequence[Program], graphs: Sequence[GraphInfo], drafts: bool) -> DeviceEngine:
        def tell() -> None:
            for graph in graphs:
                warmed(graph)

        return DeviceEngine(manifest, programs, drafts, make_kv_cache, chunk, fill, tell)

    return engine(verify, manifest.verify, False), engine([draft], [manifest.draft], True) if draft else None


class DeviceBinding:
    """A :class:`DeviceEngine` on one kv_cache. A call is done when it returns."""

    def __init__(self, engine: DeviceEngine, kv_cache: DeviceKVCache) -> None:
        self._engine = engine
        self._kv_cache = kv_cache
        self._generation = kv_cache.generation
        self._passes: dict[tuple[int, bool], _Pass] = {}
        self._chain: _Chain | None = None
        capture = engine.cuda_graphs and engine.programs[0].place.stream is not None
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def warm_up(self) -> None:
        """Run the usual calls once, into slots that hold nothing yet, so that no round has to wait for it. The draft of a
        chain takes one node a call."""
        for count in self._engine.buckets[:1] if self._engine.drafts else self._engine.buckets:
            self.forward([0] * count, range(count), 0)
        self._engine.warmed()

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int = 0,
        visible: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        self._refresh()
        count = len(tokens)
        # Nodes filled in behind write to slots that no token owns, if there are so many.
        rows = next((bucket for bucket in self._engine.buckets if bucket >= count), count)
        if slot + rows > self._kv_cache.slots:
            rows = count
        with self._active():
            work = self._pass(rows, visible is not None)
            work.fill(tokens, positions, slot, base, visible)
            work.launch()
            return work.outputs(count)

    def _active(self) -> ExitStack:
        """On every device its stream: memory that is taken within belongs to it."""
        with ExitStack() as stack:
            for program in self._engine.programs:
                stack.enter_context(program.place.active())
            return stack.pop_all()

    def _refresh(self) -> None:
        """Forget what is bound to memory that the kv_cache has left."""
        if self._generation != self._kv_cache.generation:
            self._generation = self._kv_cache.generation
            self._passes.clear()
            self._chain = None

    def _pass(self, rows: int, tree: bool) -> "_Pass":
        found = self._passes.get((rows, tree))
        if found is None:
            engine = self._engine
            repeated = rows in engine.buckets or (not engine.buckets and rows <= engine.manifest.max_tree_nodes + 1)
            width = engine.manifest.max_tree_nodes + 1 if tree else 0
            found = _Pass(engine, self._kv_cache, rows, width, self._pool if repeated else None)
            if repeated:
                self._passes[rows, tree] = found
        return found

    @torch.inference_mode()
    def draft_chain(self, token: int, slot: int, count: int) -> StepOutputs:
        """As in :class:`eesd.runtime.engine.ChainBinding`."""
        self._refresh()
        with self._active():
            if self._chain is None:
                self._chain = _Chain(self._engine, self._kv_cache, self._pool)
            ids, logprobs = self._chain.run(token, slot, count)
        return StepOutputs(_no_logits, ids, logprobs)


def _no_logits() -> NDArray[np.float32]:
    raise AssertionError("a chain drafted ahead keeps no logits")


def _caches(program: Program, kv_cache: DeviceKVCache) -> list[KV]:
    caches = (kv_cache.cache(index) for index in program.caches)
    return [(keys, values) for keys, values in caches]


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _sections(numbers: Tensor, count: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Parts of a call's numbers: tokens [n], positions [n], slot [1], base [1], and what a tree's nodes see [n, width]."""
    step = _aligned(count)
    slot = 2 * step
    visible = numbers[slot + ALIGNED :].view(count, width) if width else numbers[:0]
    return numbers[:count], numbers[step : step + count], numbers[slot : slot + 1], numbers[slot + 1 : slot + 2], visible


class _Stage:
    """One stage's part of a pass: numbers to the device, mask, run."""

    def __init__(
        self, program: Program, kv_cache: DeviceKVCache, numbers: Tensor, shape: tuple[int, int], x: Tensor | None
    ) -> None:
        """``numbers`` (pinned) is laid out as in :func:`_sections`. Without an ``x`` of its own the stage takes the tokens."""
        (count, width), device = shape, program.place.device
        self.program = program
        self._host, self._numbers = numbers, torch.zeros_like(numbers, device=device)
        tokens, positions, slot, base, visible = _sections(self._numbers, count, width)
        mask = torch.zeros((1, 1, count, kv_cache.slots), dtype=kv_cache.parts[0].dtype, device=device)
        self._mask = Mask(mask, slot, base, visible if width else None)
        self.x = tokens[None] if x is None else x
        self._run = program.prepare(Call(self.x, positions[None], slot, mask, _caches(program, kv_cache)))
        self.results: list[Tensor] = []

    def body(self) -> None:
        self._numbers.copy_(self._host, non_blocking=True)
        self._mask.fill()
        self.results = self._run()


class _Pass:
    """A call of one node count through all stages."""

    def __init__(self, engine: DeviceEngine, kv_cache: DeviceKVCache, count: int, width: int, pool: object) -> None:
        """``width`` columns say what the nodes of a tree see; 0 for a chain."""
        self._count, manifest = count, engine.manifest
        pinned = engine.programs[0].place.stream is not None
        size = 2 * _aligned(count) + ALIGNED + count * width
        self._numbers = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._sections = [section.numpy() for section in _sections(self._numbers, count, width)]
        self._stages: list[_Stage] = []
        for program in engine.programs:
            x = None
            if self._stages:
                shape = (1, count, manifest.geometry.hidden_size)
                x = torch.zeros(shape, dtype=kv_cache.parts[0].dtype, device=program.place.device)
            self._stages.append(_Stage(program, kv_cache, self._numbers, (count, width), x))
        found = (2, count, manifest.draft_top_k) if engine.drafts else (1, count, 1)
        self._results = torch.zeros(found, dtype=torch.float32, pin_memory=pinned)
        bodies = [*(stage.body for stage in self._stages[:-1]), self._last]
        self._work = [
            Repeated(body, stage.program.place, pool if stage.program.capturable else None)
            for body, stage in zip(bodies, self._stages, strict=True)
        ]

    def _last(self) -> None:
        """The last stage, and its results to the host."""
        self._stages[-1].body()
        self._results.copy_(pack(self._stages[-1].results), non_blocking=True)

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int,
        visible: NDArray[np.bool_] | None,
    ) -> None:
        all_tokens, all_positions, its_slot, its_base, seen = self._sections
        given = len(tokens)
        all_tokens[:given], all_tokens[given:] = tokens, 0
        all_positions[:given] = positions
        # Behind the last they count up, within the rotary tables because a slot is there for each.
        all_positions[given:] = range(slot + given, slot + self._count)
        its_slot[0], its_base[0] = slot, base
        if visible is not None:
            seen[:] = 0
            seen[:given, : visible.shape[1]] = visible

    def launch(self) -> None:
        before: _Stage | None = None
        for stage, work in zip(self._stages, self._work, strict=True):
            with stage.program.place.active():
                if before is not None:
                    stage.x.copy_(before.results[0], non_blocking=True)
                if not work.prepared:
                    work.prepare()
                work()
            before = stage
        self._stages[-1].program.place.wait()

    def outputs(self, count: int) -> StepOutputs:
        """Results of the first ``count`` nodes."""
        logits = self._stages[-1].results[0]
        packed = self._results[:, :count].numpy()
        if len(packed) == 1:
            return StepOutputs(lambda: to_host(logits[0, :count]), best=packed[0, :, 0].astype(np.int64))
        return StepOutputs(lambda: to_host(logits[0, :count]), packed[0].astype(np.int64), packed[1])


class _Chain:
    """Single-node draft passes, each fed by the one before on the device; the host looks at the end."""

    def __init__(self, engine: DeviceEngine, kv_cache: DeviceKVCache, pool: object) -> None:
        (program,), manifest = engine.programs, engine.manifest
        self._place, device = program.place, program.place.device
        pinned = self._place.stream is not None
        self._host = torch.zeros((4, ALIGNED), dtype=torch.int64, pin_memory=pinned)
        self._numbers = torch.zeros_like(self._host, device=device)
        """Token, position, slot, and the number of the step, each at the beginning of a row."""
        token, position, slot, self._step = self._numbers[:, :1].unbind()
        mask = torch.zeros((1, 1, 1, kv_cache.slots), dtype=kv_cache.parts[0].dtype, device=device)
        self._mask = Mask(mask, slot)
        self._token, self._counters = token, self._numbers[1:, 0]
        self._run = program.prepare(Call(token[None], position[None], slot, mask, _caches(program, kv_cache)))
        shape = (manifest.max_tree_nodes, 2, 1, manifest.draft_top_k)
        self._found = torch.zeros(shape, device=device)
        self._found_host = torch.zeros(shape, pin_memory=pinned)
        self._work = Repeated(self._body, self._place, pool if program.capturable else None)

    def _body(self) -> None:
        self._mask.fill()
        results = self._run()
        self._found.index_copy_(0, self._step, pack(results)[None])
        self._token.copy_(results[1][0, :, 0])
        self._counters.add_(1)

    def run(self, token: int, slot: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids and log-probabilities of the steps, each [count, K]."""
        self._host.numpy()[:, 0] = token, slot, slot, 0
        self._numbers.copy_(self._host, non_blocking=True)
        if not self._work.prepared:
            self._work.prepare()
            self._numbers.copy_(self._host, non_blocking=True)
        for _ in range(count):
            self._work()
        self._found_host[:count].copy_(self._found[:count], non_blocking=True)
        self._place.wait()
        found = self._found_host[:count, :, 0].numpy()
        return found[:, 0].astype(np.int64), found[:, 1].copy()


def pack(results: Sequence[Tensor]) -> Tensor:
    """What the host wants to know first, as one float32 tensor, which holds every id below 2^24 exactly.

    Of a draft its candidates, ids over log-probabilities [2, n, K]; of verify the likeliest tokens [1, n, 1].
    """
    if len(results) == 1:
        return results[0].argmax(-1, keepdim=True).float()
    return torch.cat((results[1].float(), results[2]))


def to_host(tensor: Tensor) -> NDArray[np.float32]:
    """A float32 tensor of the current stream as an array; on the CPU a view."""
    if tensor.device.type == "cuda":
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        tensor = host
    array: NDArray[np.float32] = tensor.numpy()
    return array
