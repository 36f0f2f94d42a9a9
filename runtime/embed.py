"""EESD inside a service that already runs TensorRT: its engines, contexts, stream and memory, and nothing global of ours."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest, load_manifest
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.device import Place
from eesd.runtime.engines.trt_engine import open_tensorrt
from eesd.runtime.engines.trt_plans import computes
from eesd.runtime.llm import LLM, Speculation


@dataclass(frozen=True)
class Host:
    """What a service gives to EESD and goes on owning.

    ``verify`` holds the ``ICudaEngine`` of each stage of verify, ``draft`` that of the draft (None: plain decoding).
    ``make_context`` makes an execution context of an engine, without memory of its own
    (``ExecutionContextAllocationStrategy.USER_MANAGED``); each node count asks for one. Everything is done in ``stream``, which
    must not be the default one (another library's is a ``torch.cuda.ExternalStream``).

    ``kv_cache`` is memory for the KV caches, [L+E, 2, 1, KV, S, D] in the engines' type (one tensor for each stage); ``scratch``
    bytes for contexts to work in, as many as the largest engine's ``device_memory_size_v2``. Memory that is not given comes
    from torch. While EESD's calls run, nobody else may use these.
    """

    verify: Sequence[Any]
    draft: Any
    make_context: Callable[[Any], Any]
    stream: torch.cuda.Stream
    kv_cache: Sequence[Tensor] = ()
    scratch: Tensor | None = None


def embed(engine_dir: str | os.PathLike[str], host: Host, speculation: Speculation) -> LLM:
    """An :class:`LLM` over a service's own engines, which it loaded from the plans of ``engine_dir``.

    Raises :class:`EESDError` where the engines are not those of the directory's manifest.
    """
    directory = Path(engine_dir)
    manifest = load_manifest(directory)
    place = Place(torch.device("cuda", host.stream.device_index), host.stream)
    return LLM(directory, manifest, open_given(manifest, host, place), speculation if host.draft else None)


def open_given(manifest: Manifest, host: Host, place: Place) -> Engines:
    """The engines of ``host``, all at one place."""
    places = [place] * len(manifest.verify)
    given = _Given(manifest, host)
    return Engines(*open_tensorrt(manifest, given, host.draft is not None, places, host.kv_cache, host.scratch))


class _Given:
    """A host's engines as a :class:`eesd.runtime.trt_engine.Source`."""

    def __init__(self, manifest: Manifest, host: Host) -> None:
        if len(host.verify) != len(manifest.verify):
            raise EESDError(
                f"The manifest has {len(manifest.verify)} stages of verify, and {len(host.verify)} engines are given."
            )
        self._engines = {graph.file: engine for graph, engine in zip(manifest.verify, host.verify, strict=True)}
        if host.draft is not None:
            self._engines[manifest.draft.file] = host.draft
        self._make_context = host.make_context
        chunks = [engine.get_tensor_profile_shape("position_ids", 1)[2][1] for engine in self._engines.values()]
        self.prefill_chunk = int(min(chunks))

    def load(self, graph: GraphInfo) -> Any:
        engine = self._engines[graph.file]
        if not computes(engine, graph):
            raise EESDError(f"The engine given for {graph.file} has other inputs or outputs than the manifest says.")
        return engine

    def context(self, engine: Any, graph: GraphInfo) -> Any:
        return self._make_context(engine)

    def keep_kernels(self, graph: GraphInfo) -> None:
        """The host keeps its own."""
