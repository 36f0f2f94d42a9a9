"""Sequences in several memories in one call of ONNX Runtime on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import FEW_NODES, GraphInfo, Manifest
from eesd.runtime.engines.base import Call, Part, StepOutputs
from eesd.runtime.engines.joint_graph import ATTENDED, KEYS, OWN, QUERIES, name_of
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_cpu import ResultMemory, bind_caches, buffer, set_mask
from eesd.runtime.engines.recent import Recent
from eesd.runtime.engines.rows import HostRows
from eesd.runtime.engines.widened import NARROW

MOST_BINDINGS = 64
"""Combinations of rows to whose caches the graph stays bound, which takes milliseconds."""


class OrtJointEngine:
    """See :class:`~eesd.runtime.engines.base.JointEngine`. A part that is not given has no token of its own: it takes heads of
    others' tokens, and nobody reads what they attend to."""

    def __init__(self, manifest: Manifest, stages: Sequence[tuple[GraphInfo, Any]], parts: int) -> None:
        """``stages`` are those of verify, each with a session of its graph for so many parts."""
        self.parts = parts
        self._manifest = manifest
        self._stages = stages
        self._takes = [{info.name for info in session.get_inputs()} for _, session in stages]
        self._nobody = Part(HostKVCache(manifest, 1), 0, [Call([0], [0], 0)], logits=False)
        alone = _inputs([self._nobody], manifest)  # its rows are among those of any call
        self._nothing = {name: alone[name_of(name, 0)] for name in (QUERIES, KEYS, *OWN)}
        self._results = ResultMemory()
        self._bindings = Recent[tuple[Any, ...], tuple[Sequence[Part], list[Any]]](MOST_BINDINGS)

    def forward(self, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        filled = [*parts, *[self._nobody] * (self.parts - len(parts))]
        given = _inputs(parts, self._manifest)
        for number in range(len(parts), self.parts):
            given |= {name_of(name, number): array for name, array in self._nothing.items()}
        sizes = {"B": 1, "n": len(given[ATTENDED]), "R": len(given["logit_rows"])}
        x, kept = given.pop("input_ids"), [*given.values()]  # an I/O binding does not keep its buffers alive
        for (graph, session), takes, io_binding in zip(self._stages, self._takes, self._bound(filled), strict=True):
            for name, array in {**given, graph.inputs[0].name: x}.items():
                if name in takes:  # only the last stage takes logit_rows
                    io_binding.bind_input(name, *buffer(array))
            last = graph is self._stages[-1][0]
            results = []
            for number, info in enumerate(graph.results):
                shape = info.sized(**sizes)
                results.append(self._results.array(number, shape, info.dtype) if last else np.empty(shape, info.dtype))
                io_binding.bind_output(info.name, *buffer(results[-1]))
            kept += [x, *results]
            session.run_with_iobinding(io_binding)
            x = results[0]
        return _outputs(parts, results)

    def _bound(self, parts: Sequence[Part]) -> list[Any]:
        """An I/O binding for each stage, bound to the caches of the parts."""
        key = tuple(value for part in parts for value in _key(part))
        return self._bindings.get(key, lambda: (parts, self._bind(parts)))[1]

    def _bind(self, parts: Sequence[Part]) -> list[Any]:
        io_bindings = [session.io_binding() for _, session in self._stages]
        for (graph, _), io_binding in zip(self._stages, io_bindings, strict=True):
            for number, part in enumerate(parts):
                bind_caches(io_binding, graph, _layer(part), suffix=name_of("", number))
        return io_bindings


def _inputs(parts: Sequence[Part], manifest: Manifest) -> dict[str, NDArray[Any]]:
    """The inputs of the graph, except caches; see :func:`~eesd.runtime.engines.joint_graph.join`."""
    calls = [call for part in parts for call in part.calls]
    total = sum(len(call.tokens) for call in calls)
    given: dict[str, NDArray[Any]] = {}
    attended: list[NDArray[np.int64]] = []
    logit_rows: list[int] = []
    first = rows_before = 0
    for number, part in enumerate(parts):
        nodes = max(len(call.tokens) for call in part.calls)
        slots = np.arange(_memory(part).slots)
        mask, tokens = np.zeros((len(part.calls), nodes, len(slots)), np.float32), np.zeros((len(part.calls), nodes), np.int64)
        began = first
        for row, call in enumerate(part.calls):
            set_mask(mask[row], call, slots)
            tokens[row] = np.minimum(np.arange(first, first + nodes), first + len(call.tokens) - 1)
            first += len(call.tokens)
        logit_rows += range(began, first) if part.logits else ()
        queries, mask = _queries(_heads(tokens, manifest.geometry.num_heads, total), mask, manifest)
        found = rows_before + np.arange(queries.size).reshape(len(tokens), manifest.geometry.num_heads, -1)
        attended += [found[row, :, : len(call.tokens)].T for row, call in enumerate(part.calls)]
        rows_before += queries.size
        own = {
            QUERIES: queries,
            KEYS: _heads(tokens, manifest.geometry.num_kv_heads, total),
            "write_indices": np.array([call.slot for call in part.calls]),
            "attn_mask": mask[:, None],
        }
        given |= {name_of(name, number): array for name, array in own.items()}
    given |= {
        "input_ids": np.array([[token for call in calls for token in call.tokens]]),
        "position_ids": np.array([[position for call in calls for position in call.positions]]),
        ATTENDED: np.concatenate(attended),
        "logit_rows": np.array(logit_rows, np.int64),
    }
    return {name: np.ascontiguousarray(array) for name, array in given.items()}


def _heads(tokens: NDArray[np.int64], heads: int, total: int) -> NDArray[np.int64]:
    """The rows [B, heads, n] of the heads of tokens [B, n], of ``total`` tokens."""
    return tokens[:, None] + total * np.arange(heads)[:, None]


def _queries(
    queries: NDArray[np.int64], mask: NDArray[np.float32], manifest: Manifest
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Queries [B, H, n] and their mask [B, n, S] as attention takes them: heads of a group folded if there are few nodes, and
    never a single query of a head, as calls of their own have it."""
    batch, heads, nodes = queries.shape
    kv_heads = manifest.geometry.num_kv_heads
    if manifest.dtype in NARROW and kv_heads == 1:  # such graphs do not fold
        return queries, mask
    if heads > kv_heads and nodes <= FEW_NODES * batch:
        return queries.reshape(batch, kv_heads, -1), np.tile(mask, (1, heads // kv_heads, 1))
    if nodes == 1:
        return np.repeat(queries, 2, 2), np.repeat(mask, 2, 1)
    return queries, mask


def _outputs(parts: Sequence[Part], results: Sequence[NDArray[Any]]) -> list[list[StepOutputs]]:
    """Views of the results of each call."""
    found: list[list[StepOutputs]] = []
    at = 0
    for part in parts:
        found.append([])
        for call in part.calls if part.logits else ():
            found[-1].append(StepOutputs(*(result[0, at : at + len(call.tokens)] for result in results)))
            at += len(call.tokens)
    return found


def _memory(part: Part) -> HostRows | HostKVCache:
    assert isinstance(part.memory, HostRows | HostKVCache)
    return part.memory


def _layer(part: Part) -> Callable[[int], NDArray[Any]]:
    """Keys and values of a layer, of the rows that take part."""
    memory = _memory(part)
    return lambda index: memory.layer(index)[:, part.first : part.first + len(part.calls)]


def _key(part: Part) -> tuple[Any, ...]:
    """What the caches of a part depend on. What is bound keeps the memory alive, so that no other one gets its id."""
    memory = _memory(part)
    return id(memory), memory.version, part.first, len(part.calls)
