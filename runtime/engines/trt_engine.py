"""TensorRT or TensorRT-RTX: engines over one KV cache and one working memory, wherever the engines come from."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.device import (
    Call,
    DeviceKVCache,
    Place,
    Run,
    device_streams,
    empty_results,
    fitting_gpu,
    named_tensors,
)
from eesd.runtime.engines.device_engine import DeviceEngine, engine_pair

ALIGNMENT = 256
"""Bytes: what TensorRT asks of the addresses of inputs and outputs."""


class TrtStageRunner:
    """An engine at a place.

    Each node count gets an execution context of its own: a recorded CUDA graph depends on the shapes that its context has.
    Contexts run one after another and work in one ``scratch`` memory.
    """

    def __init__(
        self,
        graph: GraphInfo,
        decode_nodes: int,
        make_context: Callable[[], Any],
        place: Place,
        scratch: Tensor,
    ) -> None:
        """``decode_nodes`` is the largest call of profile 0; larger ones are prefills, of profile 1."""
        self.place = place
        self.caches = graph.caches
        self.capturable = True
        self._graph = graph
        self._decode_nodes = decode_nodes
        self._make_context = make_context
        self._scratch = scratch

    def prepare(self, call: Call) -> Run:
        count, place = call.position_ids.shape[1], self.place
        context = self._make_context()
        if context is None:
            raise EESDError(f"TensorRT makes no execution context of {self._graph.file}; the GPU's memory may be too small.")
        context.set_optimization_profile_async(int(count > self._decode_nodes), place.handle)
        place.wait()
        results = empty_results(self._graph, call)
        inputs, outputs = named_tensors(self._graph, call, results)
        for name, tensor in inputs.items():
            _agreed(context.set_input_shape(name, tuple(tensor.shape)), self._graph, count)
        for name, tensor in (inputs | outputs).items():
            if tensor.storage_offset() * tensor.itemsize % ALIGNMENT:
                raise EESDError(f"TensorRT wants {name} aligned; export with a --max-seq-len that is a multiple of 16.")
            _agreed(context.set_tensor_address(name, tensor.data_ptr()), self._graph, count)
        _agreed(not context.infer_shapes(), self._graph, count)
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.nbytes)
        if place.stream is not None and hasattr(context, "is_stream_capturable"):
            self.capturable &= bool(context.is_stream_capturable(place.handle))

        def run() -> list[Tensor]:
            if not context.execute_async_v3(place.handle):
                raise EESDError(f"TensorRT could not run {self._graph.file}; its log (eesd.tensorrt) says why.")
            return results

        return run


def _agreed(answer: bool, graph: GraphInfo, count: int) -> None:
    if not answer:
        raise EESDError(f"The plan of {graph.file} takes no call of {count} nodes; build it again with: eesd-build --force.")


class Source(Protocol):
    """Where engines come from: the plans of a directory, or a service that has loaded them."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens of the prompt that every engine takes in one call."""
        ...

    def load(self, graph: GraphInfo) -> Any:
        """The ``ICudaEngine`` of a graph, on the current GPU."""
        ...

    def context(self, engine: Any, graph: GraphInfo) -> Any:
        """An execution context without memory of its own."""
        ...

    def keep_kernels(self, graph: GraphInfo) -> None:
        """Every call of the graph has run once: what was compiled for it may be kept."""
        ...


def open_tensorrt(
    manifest: Manifest,
    source: Source,
    draft: bool,
    places: Sequence[Place] | None = None,
    kv_cache: Sequence[Tensor] = (),
    scratch: Tensor | None = None,
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Verify and (if wanted) draft, each stage of verify on a GPU of its own if there are so many.

    ``kv_cache`` and ``scratch`` are memory that somebody else owns; without them it is taken from torch.
    """
    places = places or device_streams(len(manifest.verify))
    graphs = [*zip(manifest.verify, places, strict=True), *([(manifest.draft, places[0])] if draft else [])]
    engines = {}
    for graph, place in graphs:
        with place.active():
            engines[graph.file] = source.load(graph)
    shared = _scratch(graphs, engines, scratch)
    programs = [
        TrtStageRunner(
            graph,
            manifest.max_tree_nodes + 1,
            partial(source.context, engines[graph.file], graph),
            place,
            shared[place],
        )
        for graph, place in graphs
    ]
    make_kv_cache = partial(DeviceKVCache, manifest, places, given=kv_cache)
    drafter = programs.pop() if draft else None
    return engine_pair(
        manifest, programs, drafter, make_kv_cache, fill=True, prefill_chunk=source.prefill_chunk, warmed=source.keep_kernels
    )


def _scratch(graphs: Sequence[tuple[GraphInfo, Place]], engines: dict[str, Any], given: Tensor | None) -> dict[Place, Tensor]:
    """Memory for the contexts of each place: they run one after another, so the largest need is enough."""
    needs: dict[Place, int] = {}
    for graph, place in graphs:
        needs[place] = max(needs.get(place, 1), engines[graph.file].device_memory_size_v2)
    if given is not None:
        if given.nbytes < max(needs.values()):
            raise EESDError(f"{given.nbytes} bytes of working memory are given, and these engines need {max(needs.values())}.")
        return dict.fromkeys(needs, given)
    with fitting_gpu("The engines' working memory"):
        return {place: torch.empty(size, dtype=torch.uint8, device=place.device) for place, size in needs.items()}
