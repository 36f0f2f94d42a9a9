"""Run engines of TensorRT and TensorRT-RTX on torch's device memory. It does not matter where the
engines come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest
from eesd.runtime.engines.device import (
    ALIGNMENT,
    DeviceStream,
    PreparedCall,
    ResultMemory,
    StepInputs,
    device_streams,
    explain_out_of_memory,
    tensors_by_name,
)
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.device_engine import DeviceEngine, make_engines
from eesd.runtime.engines.trt_plans import attended_slots


@dataclass(eq=False)
class TrtStageRunner:
    """Runs a graph in a TensorRT engine.

    Each prepared call has a separate execution context, because a captured CUDA graph depends on
    the shapes of its context.

    Attributes:
        graph: The graph.
        decode_nodes: Largest node count of profile 0. Larger calls are prefill calls and use
            profile 1.
        make_context: A function that makes an execution context that has no memory.
        stream: The stream to run in, with its device.
        scratch: Working memory of the contexts. The contexts run one after another, so they share
            the memory.
        capturable: Whether all calls prepared so far can be captured in a CUDA graph.
    """

    graph: GraphInfo
    decode_nodes: int
    make_context: Callable[[], Any]
    stream: DeviceStream
    scratch: Tensor
    capturable: bool = True

    def __post_init__(self) -> None:
        self._results = ResultMemory(self.graph, self.stream.device, self.decode_nodes)

    def prepare(self, inputs: StepInputs) -> PreparedCall:
        graph = self.graph
        count = inputs.position_ids.shape[1]
        stream = self.stream
        context = self.make_context()
        if context is None:
            raise EESDError(
                f"TensorRT cannot create an execution context of {graph.file}; the GPU's "
                "memory may be too small."
            )
        context.set_optimization_profile_async(int(count > self.decode_nodes), stream.handle)
        stream.synchronize()
        results = self._results.tensors(inputs)
        named, outputs = tensors_by_name(graph, inputs, results)
        for name, tensor in named.items():
            _check(context.set_input_shape(name, tuple(tensor.shape)), graph, count)
        for name, tensor in (named | outputs).items():
            if not stream.aligned(tensor):
                raise EESDError(
                    f"TensorRT needs {name} aligned; export with a --max-seq-len that is a "
                    "multiple of 16."
                )
            _check(context.set_tensor_address(name, tensor.data_ptr()), graph, count)
        _check(not context.infer_shapes(), graph, count)
        context.set_device_memory(self.scratch.data_ptr(), self.scratch.nbytes)
        if stream.on_gpu and hasattr(context, "is_stream_capturable"):
            self.capturable &= bool(context.is_stream_capturable(stream.handle))

        def run() -> list[Tensor]:
            if not context.execute_async_v3(stream.handle):
                raise EESDError(
                    f"TensorRT could not run {graph.file}; its log (eesd.tensorrt) says why."
                )
            return results

        return run


def _check(accepted: bool, graph: GraphInfo, count: int) -> None:
    """Raise an error if TensorRT did not accept a call of ``count`` nodes."""
    if not accepted:
        raise EESDError(
            f"The plan of {graph.file} takes no call of {count} nodes; build it again with: "
            "eesd-build --force."
        )


Tensors = Tensor | Sequence[Tensor]
KVMemory = Tensors | Callable[[int], Tensors]
"""Memory for one sequence (see :class:`~eesd.runtime.engines.device_cache.RowMemory`), or a
function that makes memory for a number of sequences. A single tensor need not be in a list."""


class EngineSource(Protocol):
    """The source of TensorRT engines. It is the plans of a directory, or a service that has loaded
    engines."""

    @property
    def prefill_chunk(self) -> int:
        """Maximum number of prompt tokens that every verify engine takes in one call."""

    @property
    def max_batch(self) -> int:
        """Number of sequences that every engine takes in one decoding call."""

    def load(self, graph: GraphInfo) -> Any:
        """Load the ``ICudaEngine`` of a graph on the current GPU."""

    def make_context(self, engine: Any, graph: GraphInfo) -> Any:
        """Make an execution context that has no memory."""

    def save_kernels(self, graph: GraphInfo) -> None:
        """Save the kernels that were compiled for a graph. This method is called after a binding
        has warmed up."""


def open_tensorrt(
    manifest: Manifest,
    source: EngineSource,
    draft: bool,
    streams: Sequence[DeviceStream] | None = None,
    kv_memory: KVMemory = (),
    scratch: Tensor | Sequence[Tensor] | None = None,
    exact: bool | None = None,
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Load the engines of a directory.

    Args:
        manifest: Manifest of the engine directory.
        source: The source of the TensorRT engines.
        draft: Whether to load the draft engine.
        streams: The stream of each verify stage. Stages on one GPU share its stream. By default,
            the stages are spread over the GPUs.
        kv_memory: Memory for the KV cache of one sequence, or a function that makes memory. The
            function is called for each session that is opened while others are open, and for the
            rows of a batch. Default: allocate with torch.
        scratch: Working memory of the execution contexts. It is one tensor for all stages, or one
            tensor for each stage. Default: allocate with torch.
        exact: See :func:`~eesd.runtime.engines.device_engine.buckets_for`.

    Returns:
        The verify engine and the draft engine.

    Raises:
        EESDError: An engine cannot be loaded or does not update its cache in place, or ``scratch``
            does not fit.
    """
    streams = streams or device_streams(len(manifest.verify))
    graphs = [
        *zip(manifest.verify, streams, strict=True),
        *([(manifest.draft, streams[0])] if draft else []),
    ]
    engines = {}
    for graph, stream in graphs:
        with stream.activate():
            engines[graph.file] = engine = source.load(graph)
        _check_caches(engine, manifest, graph)
    scratches = _scratch_memory(graphs, engines, streams, scratch)

    def runner(graph: GraphInfo, stream: DeviceStream) -> TrtStageRunner:
        decode_nodes = 1 if graph is manifest.draft else manifest.max_tree_nodes + 1
        make_context = partial(source.make_context, engines[graph.file], graph)
        return TrtStageRunner(graph, decode_nodes, make_context, stream, scratches[stream])

    stages = [runner(*one) for one in graphs]
    drafter = stages.pop() if draft else None
    return make_engines(
        manifest,
        stages,
        drafter,
        _memory_maker(manifest, streams, source, kv_memory),
        pad=True,
        one_by_one=True,
        slots=(
            attended_slots(manifest, manifest.verify[0]),
            attended_slots(manifest, manifest.draft) if draft else (),
        ),
        prefill_chunk=source.prefill_chunk,
        exact=exact,
        on_warm_up=source.save_kernels,
    )


def _check_caches(engine: Any, manifest: Manifest, graph: GraphInfo) -> None:
    """Raise :class:`EESDError` unless every cache has the right number of slots and is updated in
    place, because later calls would not see writes to a copy."""
    for tensor in graph.outputs[len(graph.results) :]:
        slots = engine.get_tensor_shape(tensor.name)[2]
        if slots != manifest.gpu_slots:
            raise EESDError(
                f"The plan of {graph.file} is for caches of {slots} slots, and its calls need "
                f"{manifest.gpu_slots}; "
                "build it again with: eesd-build --force."
            )
        if engine.get_aliased_input_tensor(tensor.name) != tensor.name.removesuffix("_out"):
            raise EESDError(
                f"The plan of {graph.file} does not update {tensor.name.removesuffix('_out')} "
                "in place, as TensorRT's "
                "KVCacheUpdate layers do; build it again with: eesd-build --force."
            )


def _memory_maker(
    manifest: Manifest, streams: Sequence[DeviceStream], source: EngineSource, given: KVMemory
) -> Callable[[int], RowMemory]:
    """Return a function that makes memory for KV caches. Each open session has separate memory, and
    so have the caches of a batch."""
    unused = [] if callable(given) else [given]

    def lent(rows: int, tensors: Tensors) -> RowMemory:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise EESDError(
                "The kv_cache given must be tensors of torch; see docs/embedding.md for "
                "memory of other libraries."
            )
        return RowMemory(manifest, streams, rows, given=tensors)

    def make(rows: int) -> RowMemory:
        if rows > 1 and rows > source.max_batch:
            raise EESDError(
                f"The plans take {source.max_batch} rows in a call, and the batch may have "
                f"{rows}; build them with: eesd-build "
                f"--batch {rows}, or start with max_rows {source.max_batch}."
            )
        if callable(given):
            return lent(rows, given(rows))
        if len(given) == 0:
            return RowMemory(manifest, streams, rows)
        if rows > 1:
            raise EESDError(
                f"The kv_cache given is for one sequence; for {rows} rows give a function "
                "that makes memory."
            )
        if not unused:
            raise EESDError(
                "The kv_cache given belongs to another open session; close that first, or "
                "give a function that makes memory."
            )
        return lent(1, unused.pop())

    return make


def _scratch_memory(
    graphs: Sequence[tuple[GraphInfo, DeviceStream]],
    engines: dict[str, Any],
    stages: Sequence[DeviceStream],
    given: Tensor | Sequence[Tensor] | None,
) -> dict[DeviceStream, Tensor]:
    """Return memory for the execution contexts of each stream. It has the size that the stream's
    largest engine needs.

    Args:
        graphs: Each graph, and the stream in which it runs.
        engines: The TensorRT engines by the name of the graph file.
        stages: The stream of each verify stage.
        given: The memory to use, which is one tensor for all stages or one tensor for each stage.
            If it is None, memory is allocated.
    """
    sizes: dict[DeviceStream, int] = {}
    for graph, stream in graphs:
        sizes[stream] = max(sizes.get(stream, 1), engines[graph.file].device_memory_size_v2)
    if given is None:
        with explain_out_of_memory("The engines' scratch memory"):
            return {
                stream: torch.empty(size, dtype=torch.uint8, device=stream.device)
                for stream, size in sizes.items()
            }
    given = [given] * len(stages) if isinstance(given, Tensor) else given
    if len(given) != len(stages):
        raise EESDError(
            f"There are {len(stages)} stages of verify, and {len(given)} tensors of scratch "
            "memory are given."
        )
    for stream, memory in zip(stages, given, strict=True):
        if memory.nbytes < sizes[stream]:
            raise EESDError(
                f"{memory.nbytes} bytes of scratch memory are given, and these engines need "
                f"{sizes[stream]}."
            )
        if not (memory.is_contiguous() and stream.lies_here(memory) and stream.aligned(memory)):
            raise EESDError(
                f"The scratch memory given is on {memory.device} at {memory.data_ptr():#x}; "
                "these engines need contiguous "
                f"memory on {stream.device}, at a multiple of {ALIGNMENT} bytes."
            )
    return dict(zip(stages, given, strict=True))
