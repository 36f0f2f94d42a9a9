"""ONNX Runtime on the CPU: caches bound in place, everything else in buffers that are bound once for each node count."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import MASKED, PREFILL_CHUNK, GraphInfo, Manifest
from eesd.runtime.engines.base import KVCache, StepOutputs
from eesd.runtime.engines.kv_cache import HostKVCache

CPU = ["CPUExecutionProvider"]
TYPES = {
    "tensor(float)": "float32",
    "tensor(int64)": "int64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}
FLOAT32_ACTIVATIONS = "1"
"""Accuracy level of MatMulNBits. With level 4 activations become int8 on the way, where the last bit of one may turn a whole
level of it: a pass over several nodes then differs from a pass over one by 0.1 in a logit, and drafting changes tokens."""


class OrtEngine:
    """One graph of an engine directory, or the stages of one in order, each in an ONNX Runtime session.

    Its threads spin within a call, where they wait for one another hundreds of times, and stop at its end: draft and verify
    alternate, and a pool that goes on spinning takes the cores from the other's.
    """

    prefill_chunk = PREFILL_CHUNK

    def __init__(self, directory: Path, manifest: Manifest, stages: Sequence[GraphInfo], threads: int) -> None:
        if manifest.dtype != "float32":
            raise EESDError(
                f"{directory} holds {manifest.dtype} engines, ONNX Runtime on the CPU runs float32: "
                "export with --dtype float32, or run them as they are with --backend torch."
            )
        self.manifest = manifest
        self.stages = [(graph, load_session(directory, manifest, graph, threads, CPU)) for graph in stages]

    def new_kv_cache(self) -> HostKVCache:
        return HostKVCache(self.manifest)

    def bind(self, kv_cache: KVCache) -> "OrtBinding":
        assert isinstance(kv_cache, HostKVCache)
        return OrtBinding(self, kv_cache)


def load_session(directory: Path, manifest: Manifest, graph: GraphInfo, threads: int, providers: Sequence[Any]) -> Any:
    """The session of a graph file, which must have the tensors that the manifest says: buffers are bound by that."""
    path = directory / graph.file
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", FLOAT32_ACTIVATIONS)
    if providers == CPU and manifest.quantization is not None and manifest.quantization.weights == "int8":
        # With float32 activations MatMulNBits has a kernel for int4 only; int8 weights become float32 at load.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        session = ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # its exceptions share no base class
        reason = str(error).splitlines()[0][:200]
        raise EESDError(f"ONNX Runtime cannot load {path} ({reason}); export again.") from None
    found = [(t.name, tuple(t.shape), TYPES.get(t.type)) for t in (*session.get_inputs(), *session.get_outputs())]
    if found != [(t.name, t.shape, t.dtype) for t in (*graph.inputs, *graph.outputs)]:
        raise EESDError(f"{path} is not the graph that the manifest describes; export again.")
    return session


@dataclass
class _Bound:
    """The buffers for one node count, and the binding of each stage that points at them and at the kv_cache.

    ``passed`` holds what each stage gives: hidden states, which the next one reads where they are, and at last the logits.
    """

    ios: list[Any]
    passed: list[NDArray[Any]]
    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    write_indices: NDArray[np.int64]
    mask: NDArray[np.float32]
    outputs: StepOutputs


class OrtBinding:
    """An :class:`OrtEngine` on one kv_cache.

    Buffers are bound when a node count first occurs and kept until the kv_cache grows; those of prefill chunks, whose counts
    are many and whose logits are large, are not kept.
    """

    def __init__(self, engine: OrtEngine, kv_cache: HostKVCache) -> None:
        self._engine = engine
        self._kv_cache = kv_cache
        self._generation = kv_cache.generation
        self._bound: dict[int, _Bound] = {}
        self._slots = np.arange(kv_cache.slots)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int = 0,
        visible: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        if self._generation != self._kv_cache.generation:
            self._generation = self._kv_cache.generation
            self._bound.clear()
            self._slots = np.arange(self._kv_cache.slots)
        count = len(tokens)
        bound = self._bound.get(count)
        if bound is None:
            bound = self._bind(count)
            if count <= self._engine.manifest.max_tree_nodes + 1:
                self._bound[count] = bound
        bound.input_ids[0] = tokens
        bound.position_ids[0] = positions
        bound.write_indices[0] = slot
        if visible is None:
            np.multiply(self._slots > np.arange(slot, slot + count)[:, None], MASKED, out=bound.mask)
        else:
            bound.mask.fill(MASKED)
            bound.mask[:, :base] = 0
            bound.mask[:, base : base + visible.shape[1]] = np.where(visible, np.float32(0), np.float32(MASKED))
        self._run(bound)
        return bound.outputs

    def run_again(self, count: int) -> None:
        """The raw sessions' calls of the last ``forward`` over ``count`` nodes, and nothing around them: for measuring."""
        self._run(self._bound[count])

    def _run(self, bound: _Bound) -> None:
        for (_, session), io in zip(self._engine.stages, bound.ios, strict=True):
            session.run_with_iobinding(io)

    def _bind(self, count: int) -> _Bound:
        """Bind every stage to the same inputs, to its caches, and to the hidden state that the stage before it writes."""
        ids, positions = np.zeros((1, count), np.int64), np.zeros((1, count), np.int64)
        slot = np.zeros(1, np.int64)
        mask = np.zeros((1, 1, count, self._kv_cache.slots), np.float32)
        shared: dict[str, NDArray[Any]] = {"position_ids": positions, "write_indices": slot, "attn_mask": mask}
        x: NDArray[Any] = ids
        ios, passed = [], []
        for graph, session in self._engine.stages:
            io = session.io_binding()
            for name, array in {graph.inputs[0].name: x, **shared}.items():
                io.bind_input(name, *_place(array))
            for index in graph.caches:
                for part, name in enumerate(("key", "value")):
                    place = _place(self._kv_cache.cache(index)[part])
                    io.bind_input(f"{name}_{index}", *place)
                    io.bind_output(f"{name}_{index}_out", *place)
            infos = graph.results
            results = [np.zeros((1, count, int(info.shape[2])), info.dtype) for info in infos]
            for info, result in zip(infos, results, strict=True):
                io.bind_output(info.name, *_place(result))
            x = results[0]
            ios.append(io)
            passed.append(x)
        assert x.shape[2] == self._engine.manifest.geometry.vocab_size
        topk = [result[0] for result in results[1:]] or [None, None]
        return _Bound(ios, passed, ids, positions, slot, mask[0, 0], StepOutputs(x[0], *topk))


def _place(array: NDArray[Any]) -> tuple[Any, ...]:
    """Where and what an array is, in ONNX Runtime's words."""
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
