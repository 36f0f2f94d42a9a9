"""Run the exported graphs with ONNX Runtime's standard operators.

On the CPU this engine is for machines without this project's operators. It is also the reference
for exports and checks, so it is simple and not fast. On a GPU it needs torch, but neither plans nor
Triton. This engine's calls are not captured in CUDA graphs, because ONNX Runtime copies some shapes
to the host during a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.errors import EESDError, reason, refused
from eesd.common.manifest import MASKED, SLOTS_PROPERTY, GraphInfo, Manifest
from eesd.common.weights import weights_of
from eesd.runtime.engines.base import NO_OUTPUTS, Call, KVCache, StepOutputs, Work
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.operators import buffer, build_remedy

if TYPE_CHECKING:  # the CPU engine needs no torch
    from torch import Tensor

    from eesd.runtime.engines.device import DeviceStream, PreparedCall, ResultMemory, StepInputs
    from eesd.runtime.engines.device_engine import DeviceEngine

HIDDEN = np.float32(MASKED)
NARROW = ("float16", "bfloat16")
"""Element types for which these operators are slow."""
Read = Callable[[Path, ort.SessionOptions], str | bytes]
"""A function that returns the graph that a session loads. It is the path of the graph's file, or
the bytes of a changed graph."""
CPU_PROVIDERS = ["CPUExecutionProvider"]
ORT_TYPES = {"tensor(float)": "float32"} | {
    f"tensor({name})": name for name in ("int64", "float16", "bfloat16")
}
"""The element types for ONNX Runtime's names of types."""
ONNX_TYPES = {"float32": 1, "int64": 7, "float16": 10, "bfloat16": 16}
"""The numbers of element types in ``TensorProto.DataType``. NumPy types are not enough, because
NumPy does not have bfloat16."""
LARGEST_FOLDED = "65536"
"""Maximum size, in bytes, of a constant that ONNX Runtime may fold when it loads a graph. A
transposed weight is larger, so it is not folded. Its Transpose becomes part of the MatMul that
packs the weight. Folding would first write a copy of the weight."""


class OrtEngine:
    """Runs a graph of an engine directory, or its stages in order, in float32 on the CPU. Each
    stage has an ONNX Runtime session.

    Calls run one after another, each over the cache of its sequence.

    The threads of a session wait for each other hundreds of times during a call. They spin during
    the call, and stop spinning at its end. They stop then because draft and verify calls alternate.
    A thread pool that went on spinning would take the cores from the other engine's pool.
    """

    prefill_chunk = 256
    chooses = False

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        stages: Sequence[GraphInfo],
        threads: int,
        read: Read = lambda path, _: str(path),
    ) -> None:
        """Load the stages.

        Args:
            directory: Engine directory.
            manifest: Its manifest.
            stages: The stages of the verify graph, or the draft graph.
            threads: CPU threads of each session.
            read: A function that returns a graph in the form that the session loads.

        Raises:
            EESDError: ONNX Runtime cannot load the graphs.
        """
        self.manifest = manifest
        self._read = read  # keeps alive what sessions got from it
        self.stages = [
            (graph, load_session(directory, manifest, graph, threads, CPU_PROVIDERS, read))
            for graph in stages
        ]

    def new_kv_caches(self, count: int = 1) -> Sequence[HostKVCache]:
        return [HostKVCache(self.manifest) for _ in range(count)]

    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        """Do nothing, because every call is bound separately."""

    def work(self, calls: Sequence[Call]) -> Work:
        """See :meth:`~eesd.runtime.engines.base.Engine.work`. Attention reads the whole cache."""
        slots = sum(_host(call.kv_cache).slots for call in calls)
        return Work(sum(len(call.tokens) for call in calls), slots / len(calls), len(calls))

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """See :meth:`~eesd.runtime.engines.base.Engine.forward`."""
        return [self._run(call) for call in calls]

    def _run(self, call: Call) -> StepOutputs:
        """Run a call through all stages. A call without logits still computes the last node's
        logits, because every graph has logits."""
        kv_cache = _host(call.kv_cache)
        count = len(call.tokens)
        if not count:
            # Without this error, a caller that has no tokens would repeat the call forever.
            raise EESDError("A call of the engine has no tokens.")
        x = np.array([call.tokens], np.int64)
        given: dict[str, NDArray[Any]] = {
            "position_ids": np.array([call.positions], np.int64),
            "write_indices": np.array([call.slot], np.int64),
            "attn_mask": _mask(call, kv_cache.slots),
            "logit_rows": np.arange(0 if call.logits else count - 1, count),
        }
        results: list[NDArray[Any]] = []
        for graph, session in self.stages:
            results = _run_stage(graph, session, {**given, graph.inputs[0].name: x}, kv_cache)
            x = results[0]
        return StepOutputs(*(result[0] for result in results)) if call.logits else NO_OUTPUTS


def open_on_cpu(
    directory: Path, manifest: Manifest, threads: int, draft: bool
) -> tuple[OrtEngine, OrtEngine | None]:
    """Load a directory's verify engine and, with ``draft``, its draft engine on the CPU.

    Raises:
        EESDError: The directory has 16-bit engines, or ONNX Runtime cannot load them.
    """
    if manifest.dtype in NARROW:
        raise EESDError(
            f"ONNX Runtime's own operators run float32 engines on the CPU, and {directory} "
            f"has {manifest.dtype} ones; export "
            f"with --dtype float32, choose the backend torch, or {build_remedy()}."
        )
    verify = OrtEngine(directory, manifest, manifest.verify, threads)
    return verify, OrtEngine(directory, manifest, [manifest.draft], threads) if draft else None


def _run_stage(
    graph: GraphInfo, session: Any, given: dict[str, NDArray[Any]], kv_cache: HostKVCache
) -> list[NDArray[Any]]:
    """Run a graph with the inputs ``given``. Caches are updated in place, and the other outputs are
    returned."""
    io_binding = session.io_binding()
    for info in graph.inputs[: -2 * len(graph.caches)]:
        io_binding.bind_input(info.name, *buffer(given[info.name]))
    for info in graph.results:
        io_binding.bind_output(info.name)
    for index in graph.caches:
        for kind, cache in zip(("key", "value"), kv_cache.data[index], strict=True):
            io_binding.bind_input(f"{kind}_{index}", *buffer(cache))
            io_binding.bind_output(f"{kind}_{index}_out", *buffer(cache))
    session.run_with_iobinding(io_binding)
    return [value.numpy() for value in io_binding.get_outputs()[: len(graph.results)]]


def _mask(call: Call, slots: int) -> NDArray[np.float32]:
    """Return the additive mask [1, 1, n, S] of the slots that each token must not see."""
    at = np.arange(slots)
    count = len(call.tokens)
    if call.tree_mask is None:
        hidden = at > np.arange(call.slot, call.slot + count)[:, None]
    else:
        hidden = np.repeat(at[None] >= call.context_len, count, 0)
        hidden[:, call.context_len : call.context_len + call.tree_mask.shape[1]] = ~call.tree_mask
    return np.where(hidden, HIDDEN, np.float32(0))[None, None]


class OrtStageRunner:
    """Runs a graph in an ONNX Runtime session for a
    :class:`~eesd.runtime.engines.device_engine.DeviceEngine`."""

    capturable = False

    def __init__(
        self, session: Any, graph: GraphInfo, stream: DeviceStream, results: ResultMemory
    ) -> None:
        self.graph = graph
        self.stream = stream
        self._session = session
        self._results = results
        self._options = ort.RunOptions()
        # The engine waits for the stream once for all stages.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def prepare(self, inputs: StepInputs) -> PreparedCall:
        from eesd.runtime.engines.device import tensors_by_name

        io_binding = self._session.io_binding()
        results = self._results.tensors(inputs)
        named, outputs = tensors_by_name(self.graph, inputs, results)
        for name, tensor in named.items():
            io_binding.bind_input(name, *_tensor_buffer(tensor))
        for name, tensor in outputs.items():
            io_binding.bind_output(name, *_tensor_buffer(tensor))

        def run() -> list[Tensor]:
            self._session.run_with_iobinding(io_binding, self._options)
            return results

        return run


def open_on_device(
    directory: Path,
    manifest: Manifest,
    threads: int,
    draft: bool,
    device: str | None = None,
    exact: bool | None = None,
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Load the engines of a directory with ONNX Runtime's CUDA provider.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        threads: CPU threads of each session.
        draft: Whether to load the draft engine.
        device: Device to run on; see :func:`~eesd.runtime.engines.device.device_streams`.
        exact: See :func:`~eesd.runtime.engines.device_engine.buckets_for`. It only matters on GPUs.

    Returns:
        The verify engine and the draft engine.
    """
    from eesd.runtime.engines.device import ResultMemory, device_streams
    from eesd.runtime.engines.device_cache import RowMemory
    from eesd.runtime.engines.device_engine import make_engines

    streams = device_streams(len(manifest.verify), device)
    most = manifest.max_tree_nodes + 1

    def load(graph: GraphInfo, stream: DeviceStream) -> OrtStageRunner:
        session = load_session(directory, manifest, graph, threads, _providers(stream))
        return OrtStageRunner(session, graph, stream, ResultMemory(graph, stream.device, most))

    verify = [load(graph, stream) for graph, stream in zip(manifest.verify, streams, strict=True)]
    on_gpu = streams[0].on_gpu
    make_memory = partial(RowMemory, manifest, streams, grow=not on_gpu, spare=most)
    drafter = load(manifest.draft, streams[0]) if draft else None
    return make_engines(manifest, verify, drafter, make_memory, pad=on_gpu, exact=exact)


def _providers(stream: DeviceStream) -> list[Any]:
    if not stream.on_gpu:
        return CPU_PROVIDERS
    return [
        (
            "CUDAExecutionProvider",
            {"device_id": stream.device.index, "user_compute_stream": str(stream.handle)},
        )
    ]


def load_session(
    directory: Path,
    manifest: Manifest,
    graph: GraphInfo,
    threads: int,
    providers: Sequence[Any],
    read: Read = lambda path, _: str(path),
) -> Any:
    """Load a graph into an ONNX Runtime session.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        graph: The graph.
        threads: CPU threads of the session.
        providers: Execution providers.
        read: See :class:`OrtEngine`.

    Raises:
        EESDError: The graph cannot be loaded, or it does not have the inputs and outputs in the
            manifest, to which buffers are bound.
    """
    path = directory / graph.file
    options = _options(manifest, graph, threads)
    model = read(path, options)
    with refused(lambda error: f"ONNX Runtime cannot load {path} ({reason(error)}); export again."):
        session = ort.InferenceSession(model, options, providers=providers)
    found = [
        (t.name, tuple(t.shape), ORT_TYPES.get(t.type))
        for t in (*session.get_inputs(), *session.get_outputs())
    ]
    if found != [(t.name, t.shape, t.dtype) for t in (*graph.inputs, *graph.outputs)]:
        raise EESDError(f"{path} is not the graph that the manifest describes; export again.")
    slots = session.get_modelmeta().custom_metadata_map.get(SLOTS_PROPERTY)
    if slots != str(manifest.max_seq_len):
        raise EESDError(
            f"{path} is for {slots} slots, and the manifest says {manifest.max_seq_len}; "
            "export again."
        )
    return session


def _options(manifest: Manifest, graph: GraphInfo, threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as exceptions anyway
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    if any(weight.quantization for weight in weights_of(manifest, graph).values()):
        # Turn levels into float32 when the graph is loaded. With MatMulNBits, a row's bits would
        # depend on whether the call has other rows
        # (docs/decisions/0139-without-operators-levels-become-float32.md).
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    else:
        options.add_session_config_entry(
            "optimization.constant_folding_max_output_size_in_bytes", LARGEST_FOLDED
        )
    return options


def _host(kv_cache: KVCache) -> HostKVCache:
    assert isinstance(kv_cache, HostKVCache)
    return kv_cache


def _tensor_buffer(tensor: Tensor) -> tuple[Any, ...]:
    """Return the arguments that ``bind_input`` and ``bind_output`` take for a tensor."""
    device = tensor.device
    dtype = str(tensor.dtype).removeprefix("torch.")
    return device.type, device.index or 0, ONNX_TYPES[dtype], list(tensor.shape), tensor.data_ptr()
