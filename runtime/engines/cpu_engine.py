"""The CPU engine: ONNX Runtime with this project's operators. The operators read packed weights,
and read and write caches in place.

A call may have any tokens of any sequences. Each token has a cache, a position, a slot, and a list
of the slots that it sees. It gets the same bits as when it runs alone. Nothing is padded, and no
token's cost depends on another token's text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.base import NO_OUTPUTS, Call, KVCache, StepOutputs, Work
from eesd.runtime.engines.cpu_cache import CpuKVCache
from eesd.runtime.engines.operators import buffer, make_session

MOST_CALLS = 64
"""Maximum number of cached bindings. If there are more, the least recently used binding is
evicted."""


@dataclass
class _Bound:
    """The buffers of a pass, and the I/O bindings to these buffers. The pass has T tokens with
    paths of P slots, and R of the tokens get logits.

    Attributes:
        ids: [T] int64.
        numbers: [T * 5] int64, ``tokens`` of :func:`~eesd.export.cpu.operator_graph.make_graph`.
        paths: [T, P] int32.
        logit_rows: [R] int64. If all tokens get logits, it never changes.
        results: The last stage's outputs.
        io_bindings: I/O binding of each stage.
        kept: Hidden states between stages.
    """

    ids: NDArray[np.int64]
    numbers: NDArray[np.int64]
    paths: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    results: list[NDArray[Any]]
    io_bindings: list[Any]
    kept: list[NDArray[Any]]


class ResultArrays:
    """Memory that the results of successive calls share. The results of a call are valid until the
    next call."""

    def __init__(self) -> None:
        self._memory: dict[int, NDArray[np.uint8]] = {}

    def array(self, index: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return an array for the result with this index. If the array is larger than before, new
        memory is allocated. Earlier arrays stay valid."""
        size = prod(shape) * np.dtype(dtype).itemsize
        if index not in self._memory or len(self._memory[index]) < size:
            self._memory[index] = np.zeros(size, np.uint8)
        return self._memory[index][:size].view(dtype).reshape(shape)


class CpuEngine:
    """Runs a graph of an engine directory, or its stages in order."""

    prefill_chunk = 256
    chooses = False

    def __init__(
        self,
        build: Path,
        manifest: Manifest,
        stages: Sequence[GraphInfo],
        threads: int,
        int8_activations: bool = True,
        kernels: str = "",
        kv_cache_dtype: str = "float32",
    ) -> None:
        """Load the stages.

        Args:
            build: Result of :func:`~eesd.runtime.engines.cpu_build.built_for_cpu`.
            manifest: The directory's manifest.
            stages: The stages of the verify graph, or the draft graph.
            threads: CPU threads.
            int8_activations: Whether products with levels round activations to 8 bits, in blocks of
                32.
            kernels: Name of the kernels, or "" for the fastest kernels.
            kv_cache_dtype: Type of the caches, which is ``float32``, ``float16`` or ``int8``.

        Raises:
            EESDError: ONNX Runtime cannot load the graphs, or the processor does not support the
                kernels.
        """
        self.manifest = manifest
        self._dtype = np.dtype(kv_cache_dtype)
        self.stages = [
            (
                graph,
                make_session(
                    build / graph.file, threads, int8_activations, kernels, kv_cache_dtype
                ),
            )
            for graph in stages
        ]
        self._is_draft = stages[0] == manifest.draft
        self._results = ResultArrays()
        self._bound: dict[tuple[int, int, int], _Bound] = {}

    def new_kv_caches(self, count: int = 1) -> Sequence[CpuKVCache]:
        return [CpuKVCache(self.manifest, self._dtype.name) for _ in range(count)]

    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        """Do nothing, because bindings depend only on the sizes of calls."""

    def work(self, calls: Sequence[Call]) -> Work:
        """See :meth:`~eesd.runtime.engines.base.Engine.work`. Each token is computed once, and
        reads only its own text."""
        nodes = 0
        slots = 0
        for call in calls:
            nodes += len(call.tokens)
            slots += call.slot + len(call.tokens)
        return Work(nodes, slots / len(calls), len(calls))

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """See :meth:`~eesd.runtime.engines.base.Engine.forward`. All calls run in one pass."""
        ids = list[int]()
        numbers = list[int]()
        logit_rows = list[int]()
        trees = list[tuple[int, list[list[int]]]]()
        for call in calls:
            start = len(ids)
            paths = [] if call.tree_mask is None else _paths(call)
            ids += call.tokens
            if len(ids) == start:
                # Without this error, a caller that has no tokens would repeat the call forever.
                raise EESDError("A call of the engine has no tokens.")
            if paths:
                trees.append((start, paths))
            if call.logits:
                logit_rows += range(start, len(ids))
            numbers += _numbers(call, paths, self._dtype)
        longest = max([len(path) for _, paths in trees for path in paths], default=1)
        bound = self._bound_for(len(ids), longest, len(logit_rows))
        bound.ids[:] = ids
        bound.numbers[:] = numbers
        for start, paths in trees:
            bound.paths[start : start + len(paths)] = [
                [*path, *[0] * (longest - len(path))] for path in paths
            ]
        if len(logit_rows) < len(ids):
            bound.logit_rows[:] = logit_rows
        for (_, session), io_binding in zip(self.stages, bound.io_bindings, strict=True):
            session.run_with_iobinding(io_binding)
        return _outputs(calls, bound.results, self._is_draft)

    def _bound_for(self, tokens: int, path: int, logit_rows: int) -> _Bound:
        key = tokens, path, logit_rows
        kept = self._bound.pop(key, None)
        bound = self._bound[key] = kept or self._bind(*key)  # the most recently used is at the end
        if len(self._bound) > MOST_CALLS:
            del self._bound[next(iter(self._bound))]
        return bound

    def _bind(self, tokens: int, path: int, logit_rows: int) -> _Bound:
        """Make the buffers of a pass, and bind them.

        Args:
            tokens: T.
            path: P, the number of slots of the longest path.
            logit_rows: R, the number of tokens that get logits.
        """
        ids = np.zeros(tokens, np.int64)
        numbers = np.zeros(tokens * 5, np.int64)
        given: dict[str, NDArray[Any]] = {
            "tokens": numbers.reshape(tokens, 5),
            "paths": np.zeros((tokens, path), np.int32),
            "logit_rows": np.arange(logit_rows),
        }
        x: NDArray[Any] = ids
        io_bindings = []
        kept = []
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
                outputs.append(
                    self._results.array(index, shape, info.dtype)
                    if last
                    else np.empty(shape, np.float32)
                )
                io_binding.bind_output(info.name, *buffer(outputs[-1]))
            x = outputs[0]
            io_bindings.append(io_binding)
            kept.append(x)
        return _Bound(ids, numbers, given["paths"], given["logit_rows"], outputs, io_bindings, kept)


def _paths(call: Call) -> list[list[int]]:
    """Return the slots, in order, that each node of a tree sees after the context."""
    assert call.tree_mask is not None
    paths: list[list[int]] = [[] for _ in call.tokens]
    nodes, columns = np.nonzero(call.tree_mask)
    for node, column in zip(nodes.tolist(), columns.tolist(), strict=True):
        paths[node].append(call.context_len + column)
    return paths


def _numbers(call: Call, paths: list[list[int]], dtype: np.dtype[Any]) -> list[int]:
    """Return a pass's inputs for the tokens of a call. There are five numbers for each token.
    ``paths`` is empty for a chain."""
    kv_cache = call.kv_cache
    assert isinstance(kv_cache, CpuKVCache) and kv_cache.dtype == dtype
    address = kv_cache.address
    slots = range(call.slot, call.slot + len(call.tokens))
    if not paths:
        placed = zip(call.positions, slots, strict=True)
        return [
            number for position, slot in placed for number in (address, position, slot, slot + 1, 0)
        ]
    before = call.context_len
    at = zip(call.positions, slots, paths, strict=True)
    return [
        number
        for position, slot, path in at
        for number in (address, position, slot, before, len(path))
    ]


def _outputs(
    calls: Sequence[Call], results: Sequence[NDArray[Any]], of_all: bool
) -> list[StepOutputs]:
    """Return views of the results of each call. The results have rows for all tokens if ``of_all``
    is True, and only for tokens with logits if not."""
    if len(calls) == 1:
        return [StepOutputs(*results)] if calls[0].logits else [NO_OUTPUTS]
    found = []
    start = 0
    for call in calls:
        stop = start + (len(call.tokens) if call.logits or of_all else 0)
        found.append(
            StepOutputs(*[result[start:stop] for result in results]) if call.logits else NO_OUTPUTS
        )
        start = stop
    return found
