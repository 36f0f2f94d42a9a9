"""Sequences in several memories in one call of ONNX Runtime on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.base import Call, Part, StepOutputs
from eesd.runtime.engines.joint_graph import NODES, ORDER, SIZES, name_of
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_cpu import CallInputs, ResultMemory, bind_caches, buffer
from eesd.runtime.engines.recent import Recent
from eesd.runtime.engines.rows import HostRows

MOST_BINDINGS = 64
"""Combinations of rows to whose caches the graph stays bound, which takes milliseconds."""


class OrtJointEngine:
    """See :class:`~eesd.runtime.engines.base.JointEngine`. A part that is not given is one node that nobody reads."""

    def __init__(self, manifest: Manifest, stages: Sequence[tuple[GraphInfo, Any]], parts: int) -> None:
        """``stages`` are those of verify, each with a session of its graph for so many parts."""
        self.parts = parts
        self._stages = stages
        self._takes = [{info.name for info in session.get_inputs()} for _, session in stages]
        self._nobody = Part(HostKVCache(manifest, 1), 0, [Call([0], [0], 0)], logits=False)
        self._results = ResultMemory()
        self._bindings = Recent[tuple[Any, ...], tuple[Sequence[Part], list[Any]]](MOST_BINDINGS)

    def forward(self, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        filled = [*parts, *[self._nobody] * (self.parts - len(parts))]
        given = _inputs(filled)
        sizes = {"B": 1, "n": len(given[ORDER]), "R": len(given["logit_rows"])}
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


def _inputs(parts: Sequence[Part]) -> dict[str, NDArray[Any]]:
    """The inputs of the graph, except caches; see :func:`~eesd.runtime.engines.joint_graph.join`."""
    given: dict[str, NDArray[Any]] = {}
    ids: list[int] = []
    order: list[int] = []
    logit_rows: list[int] = []
    before = 0
    for number, part in enumerate(parts):
        rows, nodes = len(part.calls), max(len(call.tokens) for call in part.calls)
        slots = np.arange(_memory(part).slots)
        tokens, positions, which = np.zeros((3, rows, nodes), np.int64)
        inputs = CallInputs(tokens, positions, np.zeros(rows, np.int64), np.zeros((rows, nodes, len(slots)), np.float32))
        for row, call in enumerate(part.calls):
            inputs.set_row(row, call, slots)
            count, start = len(call.tokens), before + row * nodes
            which[row] = len(ids) + np.minimum(np.arange(nodes), count - 1)
            logit_rows += range(len(ids), len(ids) + count) if part.logits else ()
            order += range(start, start + count)
            ids += call.tokens
        before += rows * nodes
        own = {
            SIZES: np.array([rows, nodes]),
            NODES: which,
            "position_ids": inputs.position_ids,
            "write_indices": inputs.write_indices,
            "attn_mask": inputs.mask[:, None],
        }
        given |= {name_of(name, number): array for name, array in own.items()}
    return given | {"input_ids": np.array([ids]), ORDER: np.array(order), "logit_rows": np.array(logit_rows, np.int64)}


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
