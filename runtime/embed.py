"""Run EESD inside a service that already uses TensorRT. EESD then uses the service's engines,
contexts, stream and memory.

No global state is changed.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from eesd.common.checks import check_path
from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest, load_manifest
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.device import DeviceStream
from eesd.runtime.engines.trt_engine import KVMemory, open_tensorrt
from eesd.runtime.engines.trt_plans import matches_graph
from eesd.runtime.llm import LLM, Speculation, models_sampling

DEFAULT_STREAMS = (0, 1)
"""The handles of CUDA's default stream. This stream cannot be captured, and other streams wait for
it."""


@dataclass(frozen=True)
class Host:
    """Resources that a service lends to EESD. The service must not use them while an EESD call
    runs.

    Attributes:
        verify: The ``ICudaEngine`` of each stage of the verify graph. Each engine is loaded on the
            device of its stage.
        draft: The ``ICudaEngine`` of the draft, which is loaded on the device of the first stage.
            If it is None, EESD decodes plainly.
        make_context: A function that returns an execution context of an engine. The context has no
            memory (``ExecutionContextAllocationStrategy.USER_MANAGED``). No other code may use this
            context. EESD calls the function for each node count and number of slots that attention
            reads, while the engine's device is current. For TensorRT-RTX the context must use
            ``DynamicShapesKernelSpecializationStrategy.EAGER``, because a CUDA graph would keep the
            fallback kernels of a lazy context. All contexts of an engine should share a runtime
            cache. Without a shared cache, each context compiles the engine's kernels again.
        stream: The CUDA stream for all work, or a list with a stream for each verify stage. Stages
            on the same device must have the same stream. No stream may be the default stream. An
            int is the ``cudaStream_t`` of another library on the current device.
        kv_cache: Memory for the KV cache. It is either a tensor [layer caches of the stage, 2, B,
            KV, S, D] for each verify stage, or a tensor [2, B, KV, S, D] for each layer cache. The
            tensors have the engines' element type, S is the manifest's ``gpu_slots``, and B is 1.
            Instead of the memory, it may be a function of B that returns such memory for B
            sequences. The function is called for each session that is opened while others are open.
            A :class:`~eesd.runtime.batch.service.Service` calls it for the rows, and once with B =
            1 for prompts. By default, torch allocates the memory.
        scratch: Working memory of the execution contexts. It is one tensor, or one tensor for each
            stage, and has at least the largest ``device_memory_size_v2`` of the engines. By
            default, torch allocates the memory.
    """

    verify: Sequence[Any]
    draft: Any
    make_context: Callable[[Any], Any]
    stream: torch.cuda.Stream | int | Sequence[torch.cuda.Stream | int]
    kv_cache: KVMemory = ()
    scratch: Tensor | Sequence[Tensor] | None = None


def embed(
    engine_dir: str | os.PathLike[str],
    host: Host,
    speculation: Speculation,
    exact: bool | None = None,
) -> LLM:
    """Make an :class:`LLM` that runs on a service's engines.

    Args:
        engine_dir: The engine directory whose plans the service has loaded.
        host: The service's engines, stream and memory.
        speculation: How to draft.
        exact: See :func:`~eesd.runtime.llm.load`.

    Raises:
        EESDError: The engines do not match the directory's manifest, a stream is a default stream,
            or the host's memory has the wrong size or address.
    """
    directory = check_path(
        "engine_dir", engine_dir, "the engine directory whose plans the service has loaded"
    )
    manifest = load_manifest(directory)
    engines = open_host_engines(manifest, host, stage_streams(host, len(manifest.verify)), exact)
    return LLM(
        directory, manifest, engines, speculation if host.draft else None, models_sampling(manifest)
    )


def stage_streams(host: Host, stages: int) -> list[DeviceStream]:
    """Return the stream of each verify stage. Raises :class:`EESDError` if the number of streams is
    wrong, or if a stream cannot be used."""
    lent = host.stream if isinstance(host.stream, Sequence) else [host.stream] * stages
    if len(lent) != stages:
        raise EESDError(
            f"The manifest has {stages} stages of verify, but {len(lent)} streams were given."
        )
    given = [_stream(one) for one in lent]
    streams = [DeviceStream(torch.device("cuda", stream.device_index), stream) for stream in given]
    if len({(stream.device, stream.handle) for stream in streams}) != len(
        {stream.device for stream in streams}
    ):
        raise EESDError(
            "Stages of verify on one device must share its stream: give the same stream for "
            "each of them."
        )
    return streams


def _stream(lent: Any) -> torch.cuda.Stream:
    """A stream of the host as a torch stream."""
    handle = lent if isinstance(lent, int) else getattr(lent, "cuda_stream", None)
    if handle is None:
        raise EESDError(
            f"The stream given is a {type(lent).__name__}; give a torch.cuda.Stream, or the "
            "int of a cudaStream_t."
        )
    if handle in DEFAULT_STREAMS:
        raise EESDError(
            "The stream given is the default stream, which a CUDA graph cannot capture; "
            "create a stream."
        )
    return torch.cuda.ExternalStream(handle) if isinstance(lent, int) else lent  # type: ignore[no-untyped-call]


def open_host_engines(
    manifest: Manifest, host: Host, streams: Sequence[DeviceStream], exact: bool | None = None
) -> Engines:
    """Open the engines of ``host``. Each verify stage runs in its stream. The draft runs in the
    stream of the first stage."""
    source = _HostEngines(manifest, host)
    draft = host.draft is not None
    verify, drafter = open_tensorrt(
        manifest, source, draft, streams, host.kv_cache, host.scratch, exact
    )
    return Engines(verify, drafter, in_place=exact is True, last_positions=verify.last_positions)


class _HostEngines:
    """A host's engines as an :class:`~eesd.runtime.engines.trt_engine.EngineSource`."""

    def __init__(self, manifest: Manifest, host: Host) -> None:
        if len(host.verify) != len(manifest.verify):
            raise EESDError(
                f"The manifest has {len(manifest.verify)} stages of verify, but "
                f"{len(host.verify)} engines were given."
            )
        self._engines = {
            graph.file: engine for graph, engine in zip(manifest.verify, host.verify, strict=True)
        }
        if host.draft is not None:
            self._engines[manifest.draft.file] = host.draft
        self._host = host
        self._contexts = WeakSet[Any]()

    @property
    def prefill_chunk(self) -> int:
        """Number of prompt tokens that every verify engine takes in one call."""
        return int(
            min(
                engine.get_tensor_profile_shape("position_ids", 1)[2][1]
                for engine in self._host.verify
            )
        )

    @property
    def max_batch(self) -> int:
        """Number of sequences that every engine takes in one decoding call."""
        return int(
            min(
                engine.get_tensor_profile_shape("position_ids", 0)[2][0]
                for engine in self._engines.values()
            )
        )

    def load(self, graph: GraphInfo) -> Any:
        engine = self._engines[graph.file]
        if not matches_graph(engine, graph):
            raise EESDError(
                f"The engine given for {graph.file} has other inputs or outputs than the "
                "manifest says."
            )
        return engine

    def make_context(self, engine: Any, graph: GraphInfo) -> Any:
        context = self._host.make_context(engine)
        if context in self._contexts:
            raise EESDError(
                "make_context gave a context that is in use already; give another one in each "
                "call, because a CUDA graph keeps "
                "the shapes of its context."
            )
        if context is not None:
            self._contexts.add(context)
        return context

    def save_kernels(self, graph: GraphInfo) -> None:
        """Do nothing, because the host service is responsible for saving kernels."""
