"""ONNX Runtime's CUDA provider: runs the exported graphs on a GPU, without plans to build.

Calls are not captured in CUDA graphs, because ONNX Runtime copies some shapes to the host during a call.
"""

from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from torch import Tensor

from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.device import (
    DeviceStream,
    PreparedCall,
    ResultMemory,
    StepInputs,
    device_streams,
    tensors_by_name,
)
from eesd.runtime.engines.device_cache import DeviceMemory
from eesd.runtime.engines.device_engine import DeviceEngine, make_engines
from eesd.runtime.engines.ort_cpu import CPU_PROVIDERS, load_session

ONNX_TYPES = {torch.float32: 1, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}
"""Numbers of the element types in ``TensorProto.DataType``. NumPy types do not do, because NumPy has no bfloat16."""


class OrtStageRunner:
    """A graph in an ONNX Runtime session."""

    capturable = False

    def __init__(self, session: Any, graph: GraphInfo, stream: DeviceStream, largest_round: int) -> None:
        self.graph = graph
        self.stream = stream
        self._session = session
        self._results = ResultMemory(graph, stream.device, largest_round)
        self._options = ort.RunOptions()
        # The engine waits for the stream itself, once for all stages.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def prepare(self, inputs: StepInputs) -> PreparedCall:
        io_binding = self._session.io_binding()
        results = self._results.tensors(inputs)
        named, outputs = tensors_by_name(self.graph, inputs, results)
        for name, tensor in named.items():
            io_binding.bind_input(name, *_buffer(tensor))
        for name, tensor in outputs.items():
            io_binding.bind_output(name, *_buffer(tensor))

        def run() -> list[Tensor]:
            self._session.run_with_iobinding(io_binding, self._options)
            return results

        return run


def _buffer(tensor: Tensor) -> tuple[Any, ...]:
    """The arguments that ``bind_input`` and ``bind_output`` take for a tensor."""
    device = tensor.device
    return device.type, device.index or 0, ONNX_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr()


def open_ort_gpu(
    directory: Path, manifest: Manifest, threads: int, draft: bool, device: str | None = None, exact: bool | None = None
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Load the engines of a directory.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        threads: CPU threads of each session.
        draft: Whether to load the draft engine.
        device: Where to run; see :func:`~eesd.runtime.engines.device.device_streams`.
        exact: On a GPU, see :func:`~eesd.runtime.engines.device_engine.buckets_for`.

    Returns:
        The verify engine and the draft engine.
    """
    streams = device_streams(len(manifest.verify), device)

    def load(graph: GraphInfo, stream: DeviceStream) -> OrtStageRunner:
        session = load_session(directory, manifest, graph, threads, _providers(stream))
        return OrtStageRunner(session, graph, stream, manifest.max_tree_nodes + 1)

    verify = [load(graph, stream) for graph, stream in zip(manifest.verify, streams, strict=True)]
    on_gpu = streams[0].on_gpu
    make_memory = partial(DeviceMemory, manifest, streams, grow=not on_gpu, spare=manifest.max_tree_nodes + 1)
    drafter = load(manifest.draft, streams[0]) if draft else None
    return make_engines(manifest, verify, drafter, make_memory, pad=on_gpu, exact=exact)


def _providers(stream: DeviceStream) -> list[Any]:
    if not stream.on_gpu:
        return CPU_PROVIDERS
    return [("CUDAExecutionProvider", {"device_id": stream.device.index, "user_compute_stream": str(stream.handle)})]
