"""Sequences in several memories in one call of ONNX Runtime on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.base import Call, Part, StepOutputs
from eesd.runtime.engines.joint_graph import PARTS, SIZES, name_of
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_cpu import CallInputs, ResultMemory, buffer
from eesd.runtime.engines.ort_rows import MOST_CALLS
from eesd.runtime.engines.rows import HostRows
from eesd.runtime.engines.widened import widened_info


@dataclass
class _BoundPart(CallInputs):
    """The inputs of a part. ``memory`` is what its caches are in, ``slots`` are 0 to S - 1."""

    memory: HostRows | HostKVCache
    slots: NDArray[np.int64]


@dataclass
class _BoundCall:
    """The I/O bindings of a call, one for each stage, the parts, and the buffers that the bindings do not keep alive."""

    io_bindings: list[Any]
    parts: list[_BoundPart]
    buffers: list[NDArray[Any]]
    results: list[NDArray[Any]]


class OrtJointEngine:
    """See :class:`~eesd.runtime.engines.base.JointEngine`. A part that is not given is one node that nobody reads."""

    def __init__(self, manifest: Manifest, stages: Sequence[tuple[GraphInfo, Any]], parts: int) -> None:
        """``stages`` are those of verify, each with a session of its graph for so many parts."""
        self.parts = parts
        self._stages = [(widened_info(graph), session) for graph, session in stages]
        self._nobody = Part(HostKVCache(manifest, 1), 0, [Call([0], [0], 0)], logits=False)
        self._results = ResultMemory()
        self._calls: dict[tuple[Any, ...], _BoundCall] = {}

    def forward(self, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        filled = [*parts, *[self._nobody] * (self.parts - len(parts))]
        key = tuple(_key(part) for part in filled)
        bound = self._calls.pop(key, None) or self._bind(filled)
        self._calls[key] = bound  # the last one used is the last one dropped
        if len(self._calls) > MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        for part, inputs in zip(filled, bound.parts, strict=True):
            for row, call in enumerate(part.calls):
                inputs.set_row(row, call, inputs.slots)
        for (_, session), io_binding in zip(self._stages, bound.io_bindings, strict=True):
            session.run_with_iobinding(io_binding)
        found: list[list[StepOutputs]] = []
        at = 0
        for part in parts:
            found.append([])
            for call in part.calls if part.logits else ():
                found[-1].append(StepOutputs(*(result[0, at : at + len(call.tokens)] for result in bound.results)))
                at += _nodes(part)
        return found

    def _bind(self, parts: Sequence[Part]) -> _BoundCall:
        sizes = np.array([len(part.calls) * _nodes(part) for part in parts])
        ids = np.zeros((1, sizes.sum()), np.int64)
        ends = sizes.cumsum()
        given: dict[str, NDArray[Any]] = {PARTS: sizes}
        bound = []
        for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
            rows, nodes, slots = len(part.calls), _nodes(part), _memory(part).slots
            mask = np.zeros((rows, 1, nodes, slots), np.float32)
            tokens = ids[0, end - sizes[number] : end].reshape(rows, nodes)
            positions, write = np.zeros((rows, nodes), np.int64), np.zeros(rows, np.int64)
            bound.append(_BoundPart(tokens, positions, write, mask[:, 0], _memory(part), np.arange(slots)))
            own = {SIZES: np.array([rows, nodes]), "position_ids": positions, "write_indices": write, "attn_mask": mask}
            given |= {name_of(name, number): array for name, array in own.items()}
        given["logit_rows"] = np.concatenate(
            [np.arange(end - size, end) for part, size, end in zip(parts, sizes, ends, strict=True) if part.logits]
        )
        io_bindings: list[Any] = []
        buffers, x = [*given.values()], ids
        for graph, session in self._stages:
            io_binding = session.io_binding()
            given[graph.inputs[0].name] = x
            self._bind_caches(io_binding, graph, parts)
            for name in (value.name for value in session.get_inputs() if value.name in given):
                io_binding.bind_input(name, *buffer(given[name]))
            last = len(io_bindings) == len(self._stages) - 1
            outputs = []
            for number, info in enumerate(graph.results):
                shape = info.sized(B=1, n=ids.shape[1], R=len(given["logit_rows"]))
                outputs.append(self._results.array(number, shape, info.dtype) if last else np.zeros(shape, info.dtype))
                io_binding.bind_output(info.name, *buffer(outputs[-1]))
            x = outputs[0]
            buffers.append(x)
            io_bindings.append(io_binding)
        return _BoundCall(io_bindings, bound, buffers, outputs)

    def _bind_caches(self, io_binding: Any, graph: GraphInfo, parts: Sequence[Part]) -> None:
        for number, part in enumerate(parts):
            for index in graph.caches:
                memory = _memory(part).layer(index)[:, part.first : part.first + len(part.calls)]
                for kind, cache in zip(("key", "value"), memory, strict=True):
                    io_binding.bind_input(name_of(f"{kind}_{index}", number), *buffer(cache))
                    io_binding.bind_output(name_of(f"{kind}_{index}_out", number), *buffer(cache))


def _memory(part: Part) -> HostRows | HostKVCache:
    assert isinstance(part.memory, HostRows | HostKVCache)
    return part.memory


def _nodes(part: Part) -> int:
    """Nodes of every sequence of a part: those of the longest."""
    return max(len(call.tokens) for call in part.calls)


def _key(part: Part) -> tuple[Any, ...]:
    """What a bound call depends on. It keeps the memory alive, so that no other one gets its id."""
    memory = _memory(part)
    return id(memory), memory.version, part.first, len(part.calls), _nodes(part), part.logits
