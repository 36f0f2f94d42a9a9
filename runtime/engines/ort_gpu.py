"""ONNX Runtime over memory on a GPU (its CUDA provider): the graphs as they were exported, without a plan to build.

Calls are not recorded as CUDA graphs, because ONNX Runtime copies some shapes to the host on its way.
"""

from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from torch import Tensor

from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.device import Call, DeviceKVCache, Place, Run, device_streams, empty_results, named_tensors
from eesd.runtime.engines.device_engine import DeviceEngine, engine_pair
from eesd.runtime.engines.ort_cpu import CPU, load_session

ELEMENT = {torch.float32: 1, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}
"""ONNX's numbers for element types: NumPy has no bfloat16."""


class OrtStageRunner:
    """A session at a place."""

    capturable = False

    def __init__(self, session: Any, graph: GraphInfo, place: Place) -> None:
        self.place = place
        self.caches = graph.caches
        self._session = session
        self._graph = graph
        self._options = ort.RunOptions()
        # The pass waits for its stream by itself, once.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def prepare(self, call: Call) -> Run:
        io = self._session.io_binding()
        results = empty_results(self._graph, call)
        inputs, outputs = named_tensors(self._graph, call, results)
        for name, tensor in inputs.items():
            io.bind_input(name, *_where(tensor))
        for name, tensor in outputs.items():
            io.bind_output(name, *_where(tensor))

        def run() -> list[Tensor]:
            self._session.run_with_iobinding(io, self._options)
            return results

        return run


def _where(tensor: Tensor) -> tuple[Any, ...]:
    """Where and what a tensor is, in ONNX Runtime's words."""
    device = tensor.device
    return device.type, device.index or 0, ELEMENT[tensor.dtype], list(tensor.shape), tensor.data_ptr()


def open_ort_device(
    directory: Path, manifest: Manifest, threads: int, draft: bool, device: str | None = None
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Verify and (if wanted) draft, each stage of verify on a GPU of its own if there are so many."""
    places = device_streams(len(manifest.verify), device)
    on_cpu = places[0].stream is None

    def program(graph: GraphInfo, place: Place) -> OrtStageRunner:
        return OrtStageRunner(load_session(directory, manifest, graph, threads, _providers(place)), graph, place)

    verify = [program(graph, place) for graph, place in zip(manifest.verify, places, strict=True)]
    make_kv_cache = partial(DeviceKVCache, manifest, places, grow=on_cpu)
    drafter = program(manifest.draft, places[0]) if draft else None
    return engine_pair(manifest, verify, drafter, make_kv_cache, fill=not on_cpu)


def _providers(place: Place) -> list[Any]:
    if place.stream is None:
        return CPU
    return [("CUDAExecutionProvider", {"device_id": place.device.index, "user_compute_stream": str(place.handle)})]
