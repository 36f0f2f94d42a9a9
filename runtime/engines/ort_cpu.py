"""ONNX Runtime on the CPU. Caches and all other inputs and outputs are bound once for each node count, and updated in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import MASKED, SLOTS_PROPERTY, GraphInfo, Manifest
from eesd.runtime.engines.base import NO_OUTPUTS, Call, KVCache, StepOutputs, Work
from eesd.runtime.engines.graph_file import to_session
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.widened import NARROW, Widened, widen, widened_info

HIDDEN = np.float32(MASKED)
CPU_PROVIDERS = ["CPUExecutionProvider"]
ORT_TYPES = {
    "tensor(float)": "float32",
    "tensor(int64)": "int64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}
"""Element types by ONNX Runtime's names."""
INT8_ACTIVATIONS = "4"
"""Accuracy level of MatMulNBits, which rounds activations to int8 in blocks. A difference in the last bit of an activation can
then become a whole int8 step, so it is for kernels that give a token the same bits in every call."""

LARGEST_FOLDED = "65536"
"""Bytes of a constant that ONNX Runtime may compute when it loads a graph. A Transpose of a weight is larger: it becomes part
of the MatMul that packs the weight, where folding would write a copy of the weight first."""


class OrtEngine:
    """A graph of an engine directory, or its stages in order, each in an ONNX Runtime session, in float32.

    Calls run one after another, each over its own cache.

    The threads of a session spin during a call, in which they wait for each other hundreds of times, and stop spinning at its
    end. Draft and verify alternate: a thread pool that went on spinning would take the cores from the other engine's pool.
    """

    prefill_chunk = 256
    chooses = False
    draft_chain = None

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        stages: Sequence[GraphInfo],
        threads: int,
        widened: Widened | None = None,
        int8_activations: bool = True,
    ) -> None:
        """Load the stages.

        Args:
            directory: Engine directory.
            manifest: Its manifest.
            stages: The stages of verify, or the draft graph.
            threads: CPU threads of each session.
            widened: Weights of a 16-bit directory that other engines have widened; this engine adds those that are missing.
            int8_activations: Whether products with quantized weights may round activations to int8, which is faster.

        Raises:
            EESDError: ONNX Runtime cannot load the graphs.
        """
        widened = ({} if widened is None else widened) if manifest.dtype in NARROW else None
        self.manifest = manifest
        self._widened = widened  # the sessions do not keep it alive
        self.stages = [
            (
                widened_info(graph),
                load_session(directory, manifest, graph, threads, CPU_PROVIDERS, widened, int8_activations),
            )
            for graph in stages
        ]
        self._bound: WeakKeyDictionary[HostKVCache, _BoundCalls] = WeakKeyDictionary()
        self._results = ResultMemory()
        self._last: _BoundCall | None = None

    def new_kv_caches(self, count: int = 1) -> Sequence[HostKVCache]:
        return [HostKVCache(self.manifest) for _ in range(count)]

    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        """Do nothing: a call is bound when its node count first occurs."""

    def work(self, calls: Sequence[Call]) -> Work:
        """See :meth:`~eesd.runtime.engines.base.Engine.work`. Attention reads the whole cache."""
        slots = sum(_host(call.kv_cache).slots for call in calls)
        return Work(sum(len(call.tokens) for call in calls), slots / len(calls))

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        """See :meth:`~eesd.runtime.engines.base.Engine.forward`."""
        if len(calls) == 1:
            return [StepOutputs(*self._run(calls[0]))] if calls[0].logits else [self._prefill(calls[0])]
        # The results of all calls are in one memory.
        return [
            StepOutputs(*(result.copy() for result in self._run(call))) if call.logits else self._prefill(call)
            for call in calls
        ]

    def run_again(self) -> None:
        """Repeat the session calls of the last call without the code around them, to time them."""
        assert self._last is not None
        self._run_bound(self._last)

    def _prefill(self, call: Call) -> StepOutputs:
        self._run(call)
        return NO_OUTPUTS

    def _run(self, call: Call) -> list[NDArray[Any]]:
        """Run a call. Returns the last stage's results, [n, ...] each; without logits the last node has some nevertheless."""
        kv_cache, count = _host(call.kv_cache), len(call.tokens)
        if not count:
            raise EESDError("A call of the engine has no tokens.")  # who asks for nothing would ask again for ever
        bound = self._bound_calls(kv_cache).get(count) if call.logits else None
        if bound is None:
            bound = self._bind(kv_cache, count, count if call.logits else 1)
            # Calls larger than a round and those of a prefill have many node counts.
            if call.logits and count <= self.manifest.max_tree_nodes + 1:
                self._bound_calls(kv_cache)[count] = bound
        bound.set_inputs(call)
        self._run_bound(bound)
        self._last = bound
        return [result[0] for result in bound.results]

    def _bound_calls(self, kv_cache: HostKVCache) -> "dict[int, _BoundCall]":
        """The calls that are bound to a cache, by node count: they are kept until it grows."""
        found = self._bound.get(kv_cache)
        if found is None or found.version != kv_cache.version:
            found = self._bound[kv_cache] = _BoundCalls(kv_cache.version, {})
        return found.calls

    def _run_bound(self, bound: "_BoundCall") -> None:
        """Run a call through all stages."""
        for (_, session), io_binding in zip(self.stages, bound.io_bindings, strict=True):
            session.run_with_iobinding(io_binding)

    def _bind(self, kv_cache: HostKVCache, count: int, logit_rows: int) -> "_BoundCall":
        """Bind every stage to the shared inputs, its layer caches, and the hidden state of the previous stage.

        Args:
            kv_cache: The cache that calls update.
            count: Nodes.
            logit_rows: Of these, the last so many get logits; with a draft engine all of them do.
        """
        ids, positions, write_indices = np.zeros((1, count), np.int64), np.zeros((1, count), np.int64), np.zeros(1, np.int64)
        mask = np.zeros((1, 1, count, kv_cache.slots), np.float32)
        rows = np.arange(count - logit_rows, count)
        shared: dict[str, NDArray[Any]] = {
            "position_ids": positions,
            "write_indices": write_indices,
            "attn_mask": mask,
            "logit_rows": rows,
        }
        x: NDArray[Any] = ids
        io_bindings: list[Any] = []
        buffers: list[NDArray[Any]] = [rows, kv_cache.data]
        outputs: list[NDArray[Any]] = []
        for number, (graph, session) in enumerate(self.stages, start=1):
            io_binding = session.io_binding()
            given = {**shared, graph.inputs[0].name: x}
            for info in graph.inputs[: -2 * len(graph.caches)]:
                io_binding.bind_input(info.name, *buffer(given[info.name]))
            for index in graph.caches:
                for kind, cache in zip(("key", "value"), kv_cache.data[index], strict=True):
                    io_binding.bind_input(f"{kind}_{index}", *buffer(cache))
                    io_binding.bind_output(f"{kind}_{index}_out", *buffer(cache))
            outputs = []
            for index, info in enumerate(graph.results):
                shape, last = info.sized(B=1, n=count, R=logit_rows), number == len(self.stages)
                outputs.append(self._results.array(index, shape, info.dtype) if last else np.zeros(shape, info.dtype))
                io_binding.bind_output(info.name, *buffer(outputs[-1]))
            x = outputs[0]
            io_bindings.append(io_binding)
            buffers.append(x)
        return _BoundCall(ids[0], positions[0], write_indices, mask[0, 0], io_bindings, buffers, outputs)


def load_session(
    directory: Path,
    manifest: Manifest,
    graph: GraphInfo,
    threads: int,
    providers: Sequence[Any],
    widened: Widened | None = None,
    int8_activations: bool = True,
) -> Any:
    """Load a graph into an ONNX Runtime session.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        graph: The graph.
        threads: CPU threads of the session.
        providers: Execution providers.
        widened: To widen the graph to float32: widened weights, see :func:`~eesd.runtime.engines.widened.widen`.
        int8_activations: See :class:`OrtEngine`.

    Raises:
        EESDError: The graph cannot be loaded, or has other inputs and outputs than the manifest says. Buffers are bound by what
            the manifest says.
    """
    path = directory / graph.file
    options = _options(manifest, graph, threads, int8_activations)
    model = str(path) if widened is None else to_session(widen(path, options, widened, threads), path, options)
    try:
        session = ort.InferenceSession(model, options, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        reason = str(error).splitlines()[0][:200]
        raise EESDError(f"ONNX Runtime cannot load {path} ({reason}); export again.") from None
    graph = graph if widened is None else widened_info(graph)
    found = [(t.name, tuple(t.shape), ORT_TYPES.get(t.type)) for t in (*session.get_inputs(), *session.get_outputs())]
    if found != [(t.name, t.shape, t.dtype) for t in (*graph.inputs, *graph.outputs)]:
        raise EESDError(f"{path} is not the graph that the manifest describes; export again.")
    slots = session.get_modelmeta().custom_metadata_map.get(SLOTS_PROPERTY)
    if slots != str(manifest.max_seq_len):
        raise EESDError(f"{path} is for {slots} slots, and the manifest says {manifest.max_seq_len}; export again.")
    return session


def _options(manifest: Manifest, graph: GraphInfo, threads: int, int8_activations: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what it logs below that, it also raises
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    used = {weight.quantization for weight in manifest.weights_of(graph).values()} - {None}
    fused = any(one is not None and not one.minimums for one in used)  # MatMulNBits has no minimums
    if int8_activations and not manifest.quantization.tensors and (fused or not used):
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", INT8_ACTIVATIONS)
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", LARGEST_FOLDED)
    else:  # weights become float32 at load time: MatMulNBits rounds by the number of rows on some processors, at every level
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


class ResultMemory:
    """Memory that the results of several calls share: those of a call are valid until the next one."""

    def __init__(self) -> None:
        self._memory: dict[int, NDArray[np.uint8]] = {}

    def array(self, index: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """An array for the result with this index. A larger one takes other memory; those given out before stay valid."""
        size = prod(shape) * np.dtype(dtype).itemsize
        if index not in self._memory or len(self._memory[index]) < size:
            self._memory[index] = np.zeros(size, np.uint8)
        return self._memory[index][:size].view(dtype).reshape(shape)


@dataclass
class _BoundCall:
    """The buffers of a call of n nodes, R of them with logits, and the I/O bindings that point at them.

    Attributes:
        input_ids, position_ids: [n].
        write_indices: [1].
        mask: Additive attention mask [n, S].
        io_bindings: One for each stage.
        buffers: The other buffers, because an I/O binding does not keep its buffers alive: hidden states, which the next stage
            reads in place, the cache, and which nodes get logits.
        results: The last stage's outputs: logits [1, R, V], and of a draft engine the top tokens and log-probabilities.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    write_indices: NDArray[np.int64]
    mask: NDArray[np.float32]
    io_bindings: list[Any]
    buffers: list[NDArray[Any]]
    results: list[NDArray[Any]]

    def __post_init__(self) -> None:
        self._slots = np.arange(self.mask.shape[1])

    def set_inputs(self, call: Call) -> None:
        self.input_ids[:], self.position_ids[:], self.write_indices[0] = call.tokens, call.positions, call.slot
        if call.tree_mask is None:
            behind = self._slots > np.arange(call.slot, call.slot + len(call.tokens))[:, None]
            np.multiply(behind, HIDDEN, out=self.mask)
            return
        self.mask.fill(HIDDEN)
        self.mask[:, : call.context_len] = 0
        seen = self.mask[:, call.context_len : call.context_len + call.tree_mask.shape[1]]
        seen[:] = np.where(call.tree_mask, np.float32(0), HIDDEN)


@dataclass(frozen=True)
class _BoundCalls:
    """Calls by node count that are bound to a cache in its present version."""

    version: int
    calls: dict[int, _BoundCall]


def _host(kv_cache: KVCache) -> HostKVCache:
    assert isinstance(kv_cache, HostKVCache)
    return kv_cache


def buffer(array: NDArray[Any]) -> tuple[Any, ...]:
    """The arguments that ``bind_input`` and ``bind_output`` take for an array."""
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
