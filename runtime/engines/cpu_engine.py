"""The CPU engine: ONNX Runtime with this project's operators, over packed weights and caches in place.

A call takes any tokens of any sequences. Each has its own cache, position, slot, and a list of what it sees, and gets the bits
that it gets alone: nothing is padded, and no token waits for another one's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.base import Call, JointEngine, KVCache, Part, Rows, StepOutputs
from eesd.runtime.engines.cpu_cache import CpuKVCache, CpuRows
from eesd.runtime.engines.operators import make_session
from eesd.runtime.engines.ort_cpu import ResultMemory, buffer
from eesd.runtime.engines.recent import Recent

MOST_CALLS = 64
"""Shapes of calls that stay bound."""
MOST_KEPT = 64
"""Tokens of the largest call that stays bound. Prompts have many lengths."""


class Request(NamedTuple):
    """A call of one sequence as part of a pass: its cache, and whether its tokens get logits."""

    kv_cache: CpuKVCache
    call: Call
    logits: bool = True


@dataclass
class _Bound:
    """The buffers of a pass of T tokens, with paths of P slots, of which R tokens get logits; and the I/O bindings to them.

    Attributes:
        ids: [T] int64.
        tokens: [T, 5] int64, see :func:`~eesd.runtime.engines.operator_graph.make_graph`.
        paths: [T, P] int32.
        logit_rows: [R] int64.
        results: The last stage's outputs.
        io_bindings: One for each stage.
        kept: Hidden states between stages.
    """

    ids: NDArray[np.int64]
    tokens: NDArray[np.int64]
    paths: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    results: list[NDArray[Any]]
    io_bindings: list[Any]
    kept: list[NDArray[Any]]


class CpuEngine:
    """A graph of an engine directory, or its stages in order."""

    prefill_chunk = 256
    parts = 1 << 30
    """Parts of a joint call: any number."""

    def __init__(
        self,
        packed: Path,
        manifest: Manifest,
        stages: Sequence[GraphInfo],
        threads: int,
        int8_activations: bool = True,
        kernels: str = "",
        profile: bool = False,
        kv_cache_dtype: str = "float32",
    ) -> None:
        """Load the stages.

        Args:
            packed: What :func:`~eesd.runtime.engines.packed.packed_directory` gave.
            manifest: The directory's manifest.
            stages: The stages of verify, or the draft graph.
            threads: CPU threads.
            int8_activations: Whether products with levels round activations to 8 bits, by blocks of 32.
            kernels: Name of the kernels; "" for the fastest ones.
            profile: Whether to record how long nodes take.
            kv_cache_dtype: Of the caches: ``float32`` or ``float16``.

        Raises:
            EESDError: ONNX Runtime cannot load the graphs, or the processor does not support the kernels.
        """
        self.manifest, self._kv_cache_dtype = manifest, kv_cache_dtype
        float16 = kv_cache_dtype == "float16"
        self.stages = [
            (graph, make_session(packed / graph.file, threads, int8_activations, kernels, profile, float16)) for graph in stages
        ]
        self._is_draft = stages[0] == manifest.draft
        self._joint = _Pass(self)

    def new_kv_cache(self) -> CpuKVCache:
        return CpuKVCache(self.manifest, self._kv_cache_dtype)

    def bind(self, kv_cache: KVCache) -> "CpuBinding":
        assert isinstance(kv_cache, CpuKVCache) and kv_cache.dtype == self._kv_cache_dtype
        return CpuBinding(self, kv_cache)

    def new_rows(self, most: int) -> CpuRows:
        return CpuRows(self.manifest, most, self._kv_cache_dtype)

    def bind_rows(self, rows: Rows) -> "CpuRowsBinding":
        assert isinstance(rows, CpuRows) and rows.caches[0].dtype == self._kv_cache_dtype
        return CpuRowsBinding(self, rows)

    def join(self, parts: int, memory: int) -> JointEngine:
        """See :class:`~eesd.runtime.engines.base.JoiningEngine`: this engine itself. It takes no more memory."""
        return self

    def forward(self, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        """See :class:`~eesd.runtime.engines.base.JointEngine`."""
        requests = [Request(cache, call, part.logits) for part in parts for cache, call in _caches(part)]
        outputs = iter(self._joint.run(requests))
        return [[next(outputs) for _ in part.calls] if part.logits else [] for part in parts]

    def bind_pass(self, tokens: int, path: int, logit_rows: int, results: ResultMemory) -> _Bound:
        """Make the buffers of a pass, and bind them.

        Args:
            tokens: T.
            path: P, the slots of the longest path.
            logit_rows: R, the tokens that get logits.
            results: Memory for the last stage's outputs.
        """
        ids = np.zeros(tokens, np.int64)
        given: dict[str, NDArray[Any]] = {
            "tokens": np.zeros((tokens, 5), np.int64),
            "paths": np.zeros((tokens, path), np.int32),
            "logit_rows": np.zeros(logit_rows, np.int64),
        }
        x: NDArray[Any] = ids
        io_bindings, kept = [], []
        outputs: list[NDArray[Any]] = []
        for number, (graph, session) in enumerate(self.stages, start=1):
            io_binding = session.io_binding()
            for node in session.get_inputs():
                io_binding.bind_input(node.name, *buffer(given.get(node.name, x)))
            last = number == len(self.stages)
            rows = logit_rows if last and not self._is_draft else tokens
            outputs = []
            for index, info in enumerate(graph.results):
                shape = (rows, int(info.shape[-1]))
                outputs.append(results.array(index, shape, info.dtype) if last else np.empty(shape, np.float32))
                io_binding.bind_output(info.name, *buffer(outputs[-1]))
            x = outputs[0]
            io_bindings.append(io_binding)
            kept.append(x)
        return _Bound(ids, given["tokens"], given["paths"], given["logit_rows"], outputs, io_bindings, kept)

    def run(self, bound: _Bound) -> None:
        """Run a pass through all stages."""
        for (_, session), io_binding in zip(self.stages, bound.io_bindings, strict=True):
            session.run_with_iobinding(io_binding)


class _Pass:
    """Runs passes, and keeps what is bound for the shapes that come again."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._results = ResultMemory()
        self._bound = Recent[tuple[int, int, int], _Bound](MOST_CALLS)
        self.last: _Bound | None = None

    def run(self, requests: Sequence[Request]) -> list[StepOutputs]:
        """Run the requests in one pass. Returns the outputs of the requests that get logits, in order."""
        if not all(len(request.call.tokens) for request in requests):
            raise EESDError("A call of the engine has no tokens.")  # who asks for nothing would ask again for ever
        count = sum(len(request.call.tokens) for request in requests)
        paths = [_paths(request.call) for request in requests]
        longest = max((len(path) for own in paths if own is not None for path in own), default=0) or 1
        logit_rows = sum(len(request.call.tokens) for request in requests if request.logits)
        key = count, longest, logit_rows
        if count > MOST_KEPT:
            bound = self._engine.bind_pass(*key, self._results)
        else:
            bound = self._bound.get(key, lambda: self._engine.bind_pass(*key, self._results))
        at = 0
        rows: list[int] = []
        for request, own in zip(requests, paths, strict=True):
            stop = at + len(request.call.tokens)
            _fill(bound, at, request, own)
            rows += range(at, stop) if request.logits else ()
            at = stop
        bound.logit_rows[:] = rows
        self._engine.run(bound)
        self.last = bound
        return _outputs(requests, bound.results)


def _fill(bound: _Bound, at: int, request: Request, paths: list[NDArray[np.intp]] | None) -> None:
    """Write what a pass is told of the tokens of a request."""
    tokens, positions, slot, context_len, _ = request.call
    stop = at + len(tokens)
    bound.ids[at:stop] = tokens
    rows = bound.tokens[at:stop]
    rows[:, 0] = request.kv_cache.address
    rows[:, 1] = positions
    rows[:, 2] = range(slot, slot + len(tokens))
    if paths is None:
        rows[:, 3] = range(slot + 1, slot + 1 + len(tokens))
        rows[:, 4] = 0
        return
    for row, own, path in zip(rows, bound.paths[at:stop], paths, strict=True):
        row[3], row[4] = context_len, len(path)
        own[: len(path)] = path


def _paths(call: Call) -> list[NDArray[np.intp]] | None:
    """The slots that each node sees behind the context, in order; None for a chain."""
    if call.tree_mask is None:
        return None
    return [np.flatnonzero(row) + call.context_len for row in call.tree_mask]


def _outputs(requests: Sequence[Request], results: Sequence[NDArray[Any]]) -> list[StepOutputs]:
    """Views of the results of each request that gets logits."""
    found, at = [], 0
    for request in requests:
        if request.logits:
            stop = at + len(request.call.tokens)
            found.append(StepOutputs(*(result[at:stop] for result in results)))
            at = stop
    return found


def _caches(part: Part) -> list[tuple[CpuKVCache, Call]]:
    """The cache of each call of a part."""
    memory = part.memory
    if isinstance(memory, CpuRows):
        return list(zip(memory.caches[part.first :], part.calls, strict=False))
    assert isinstance(memory, CpuKVCache)
    return [(memory, call) for call in part.calls]


class CpuBinding:
    """A :class:`CpuEngine` bound to the cache of one sequence."""

    def __init__(self, engine: CpuEngine, kv_cache: CpuKVCache) -> None:
        self._engine, self._kv_cache, self._pass = engine, kv_cache, _Pass(engine)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        context_len: int = 0,
        tree_mask: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        call = Call(tokens, positions, slot, context_len, tree_mask)
        return self._pass.run([Request(self._kv_cache, call)])[0]

    def prefill(self, tokens: Sequence[int], slot: int) -> None:
        call = Call(tokens, range(slot, slot + len(tokens)), slot)
        self._pass.run([Request(self._kv_cache, call, logits=False)])

    def run_again(self, count: int) -> None:
        """Repeat the session calls of the last pass, over ``count`` tokens, without the code around them, to time them."""
        assert self._pass.last is not None and len(self._pass.last.ids) == count
        self._engine.run(self._pass.last)


class CpuRowsBinding:
    """A :class:`CpuEngine` bound to the caches of several sequences."""

    def __init__(self, engine: CpuEngine, rows: CpuRows) -> None:
        self._rows, self._pass = rows, _Pass(engine)

    def forward(self, first: int, calls: Sequence[Call]) -> list[StepOutputs]:
        """See :class:`~eesd.runtime.engines.base.RowsBinding`; here no row takes more nodes than its own."""
        return self._pass.run([Request(cache, call) for cache, call in _caches(Part(self._rows, first, calls))])
