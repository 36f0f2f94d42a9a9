"""ONNX Runtime on the CPU. Caches and all other inputs and outputs are bound once for each node count, and updated in place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.errors import EESDError
from eesd.common.manifest import MASKED, SLOTS_PROPERTY, GraphInfo, Manifest
from eesd.runtime.engines.base import Call, JointEngine, KVCache, Rows, RowsBinding, StepOutputs
from eesd.runtime.engines.graph_file import read_graph, to_session
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.rows import HostRows
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
INT8_ACTIVATIONS, FLOAT32_ACTIVATIONS = "4", "1"
"""Accuracy levels of MatMulNBits. Level 4 rounds activations to int8 in blocks. A difference in the last bit of an activation
can then become a whole int8 step, so it is for kernels that give a token the same bits in every call."""

LARGEST_FOLDED = "65536"
"""Bytes of a constant that ONNX Runtime may compute when it loads a graph. A Transpose of a weight is larger: it becomes part
of the MatMul that packs the weight, where folding would write a copy of the weight first."""


class OrtEngine:
    """A graph of an engine directory, or its stages in order, each in an ONNX Runtime session, in float32.

    The threads of a session spin during a call, in which they wait for each other hundreds of times, and stop spinning at its
    end. Draft and verify alternate: a thread pool that went on spinning would take the cores from the other engine's pool.
    """

    prefill_chunk = 256

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
        self._load = partial(
            load_session,
            directory,
            manifest,
            threads=threads,
            providers=CPU_PROVIDERS,
            widened=widened,
            int8_activations=int8_activations,
        )
        self.stages = [(widened_info(graph), self._load(graph=graph)) for graph in stages]

    def new_kv_cache(self) -> HostKVCache:
        return HostKVCache(self.manifest)

    def bind(self, kv_cache: KVCache) -> "OrtBinding":
        assert isinstance(kv_cache, HostKVCache)
        return OrtBinding(self, kv_cache)

    def new_rows(self, most: int) -> HostRows:
        return HostRows(self.manifest, most)

    def bind_rows(self, rows: Rows) -> RowsBinding:
        from eesd.runtime.engines.ort_rows import OrtRowsBinding

        assert isinstance(rows, HostRows)
        return OrtRowsBinding(self, rows)

    def join(self, parts: int, memory: int) -> JointEngine | None:
        """See :class:`~eesd.runtime.engines.base.JoiningEngine`."""
        wide = replace(self.manifest, dtype="float32")
        if sum(wide.weight_bytes(graph) for graph, _ in self.stages) > memory:
            return None
        from eesd.runtime.engines.ort_joint import OrtJointEngine

        return OrtJointEngine(self.manifest, [(graph, self._load(graph=graph, parts=parts)) for graph, _ in self.stages], parts)

    def run(self, call: "BoundCall") -> None:
        """Run a call through all stages."""
        for (_, session), io_binding in zip(self.stages, call.io_bindings, strict=True):
            session.run_with_iobinding(io_binding)

    def bind_call(
        self, layer: Callable[[int], NDArray[Any]], count: int, logit_rows: int, results: "ResultMemory | None" = None
    ) -> "BoundCall":
        """Bind every stage to the shared inputs, its layer caches, and the hidden state of the previous stage.

        Args:
            layer: Keys and values of a layer, [2, B, KV, S, D]: the memory that calls update.
            count: Nodes of each sequence.
            logit_rows: Of these, the last so many get logits; with a draft engine all of them do.
            results: Memory for the last stage's results, which several calls may share; None: the call's own.
        """
        batch, slots = layer(self.stages[0][0].caches[0]).shape[1:4:2]
        ids, positions = np.zeros((batch, count), np.int64), np.zeros((batch, count), np.int64)
        write_indices = np.zeros(batch, np.int64)
        mask = np.zeros((batch, 1, count, slots), np.float32)
        rows = np.arange(count - logit_rows, count)
        shared: dict[str, NDArray[Any]] = {
            "position_ids": positions,
            "write_indices": write_indices,
            "attn_mask": mask,
            "logit_rows": rows,
        }
        x: NDArray[Any] = ids
        io_bindings: list[Any] = []
        buffers: list[NDArray[Any]] = [rows]
        for number, (graph, session) in enumerate(self.stages, start=1):
            io_binding = session.io_binding()
            given = {**shared, graph.inputs[0].name: x}
            for info in graph.inputs[: -2 * len(graph.caches)]:
                io_binding.bind_input(info.name, *buffer(given[info.name]))
            bind_caches(io_binding, graph, layer)
            sizes = [(info.sized(B=batch, n=count, R=logit_rows), info.dtype) for info in graph.results]
            if results is not None and number == len(self.stages):
                outputs = [results.array(i, shape, dtype) for i, (shape, dtype) in enumerate(sizes)]
            else:
                outputs = [np.zeros(shape, dtype) for shape, dtype in sizes]
            for info, output in zip(graph.results, outputs, strict=True):
                io_binding.bind_output(info.name, *buffer(output))
            x = outputs[0]
            io_bindings.append(io_binding)
            buffers.append(x)
        return BoundCall(ids, positions, write_indices, mask[:, 0], io_bindings, buffers, outputs)


def bind_caches(io_binding: Any, graph: GraphInfo, layer: Callable[[int], NDArray[Any]], suffix: str = "") -> None:
    """Bind the caches of a graph, or of a part of it, whose names have a ``suffix``; see :meth:`OrtEngine.bind_call`."""
    for index in graph.caches:
        for kind, cache in zip(("key", "value"), layer(index), strict=True):
            io_binding.bind_input(f"{kind}_{index}{suffix}", *buffer(cache))
            io_binding.bind_output(f"{kind}_{index}_out{suffix}", *buffer(cache))


def load_session(
    directory: Path,
    manifest: Manifest,
    graph: GraphInfo,
    threads: int,
    providers: Sequence[Any],
    widened: Widened | None = None,
    int8_activations: bool = True,
    parts: int = 0,
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
        parts: To run sequences in so many memories in one call, see :func:`~eesd.runtime.engines.joint_graph.join`; 0: in one.

    Raises:
        EESDError: The graph cannot be loaded, or has other inputs and outputs than the manifest says. Buffers are bound by what
            the manifest says.
    """
    path = directory / graph.file
    options = _options(manifest, graph, threads, int8_activations)
    options.enable_mem_pattern = not parts  # joint calls have too many shapes to plan the memory of each
    model = _model(path, options, threads, widened, parts)
    try:
        session = ort.InferenceSession(model, options, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        reason = str(error).splitlines()[0][:200]
        raise EESDError(f"ONNX Runtime cannot load {path} ({reason}); export again.") from None
    graph = graph if widened is None else widened_info(graph)
    found = [(t.name, tuple(t.shape), ORT_TYPES.get(t.type)) for t in (*session.get_inputs(), *session.get_outputs())]
    if not parts and found != [(t.name, t.shape, t.dtype) for t in (*graph.inputs, *graph.outputs)]:
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
    level = INT8_ACTIVATIONS if int8_activations else FLOAT32_ACTIVATIONS
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", level)
    used = {weight.quantization for weight in manifest.weights_of(graph).values()} - {None}
    fused = {one for one in used if one is not None and not one.minimums}  # MatMulNBits has no minimums
    unfused = bool(manifest.quantization.tensors) or (bool(used) and not fused)
    if unfused or (not int8_activations and any(one.weights == "int8" for one in fused)):
        # With float32 activations, MatMulNBits is fast for 4 bits only. Without it, weights become float32 at load time.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    else:
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", LARGEST_FOLDED)
    return options


def _model(path: Path, options: ort.SessionOptions, threads: int, widened: Widened | None, parts: int) -> str | bytes:
    """A graph as a session takes it: its file, or what was made of it in memory."""
    if widened is None and not parts:
        return str(path)
    model = read_graph(path) if widened is None else widen(path, options, widened, threads)
    if parts:
        from eesd.runtime.engines.joint_graph import join

        join(model, parts)
    return to_session(model, path, options)


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
class CallInputs:
    """The inputs of B sequences of n nodes each.

    Attributes:
        input_ids, position_ids: [B, n].
        write_indices: [B].
        mask: Additive attention mask [B, n, S].
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    write_indices: NDArray[np.int64]
    mask: NDArray[np.float32]

    def set_row(self, row: int, call: Call, slots: NDArray[np.int64]) -> None:
        """Write the inputs of a sequence. If it has fewer nodes than others, what is behind them only fills the call.

        Args:
            row: The sequence.
            call: Its nodes.
            slots: 0 to S - 1.
        """
        count = len(call.tokens)
        self.input_ids[row, :count], self.input_ids[row, count:] = call.tokens, 0
        self.position_ids[row, :count], self.position_ids[row, count:] = call.positions, call.positions[-1]
        self.write_indices[row] = call.slot
        set_mask(self.mask[row], call, slots)


def set_mask(mask: NDArray[np.float32], call: Call, slots: NDArray[np.int64]) -> None:
    """Write the additive mask [n, S] of a sequence; ``slots`` are 0 to S - 1. n may be more than the nodes of the call."""
    _, _, slot, context_len, tree_mask = call
    if tree_mask is None:
        np.multiply(slots > np.arange(slot, slot + len(mask))[:, None], HIDDEN, out=mask)
    else:
        mask.fill(HIDDEN)
        mask[:, :context_len] = 0
        nodes = len(tree_mask)
        mask[:nodes, context_len : context_len + tree_mask.shape[1]] = np.where(tree_mask, np.float32(0), HIDDEN)


@dataclass
class BoundCall(CallInputs):
    """The buffers of a call of B sequences and n nodes each, R of them with logits, and the I/O bindings that point at them.

    Attributes:
        io_bindings: One for each stage.
        buffers: The other buffers, because an I/O binding does not keep its buffers alive: hidden states, which the next stage
            reads in place, the logits, and which nodes get them.
        results: The last stage's outputs: logits [B, R, V], and of a draft engine the top tokens and log-probabilities.
    """

    io_bindings: list[Any]
    buffers: list[NDArray[Any]]
    results: list[NDArray[Any]]

    def outputs(self, row: int, count: int | None = None) -> StepOutputs:
        """Views of a sequence's outputs, of the first ``count`` nodes; None: of all."""
        return StepOutputs(*(result[row, :count] for result in self.results))


class OrtBinding:
    """An :class:`OrtEngine` bound to one KV cache.

    A call is bound when its node count first occurs and kept until the KV cache grows. Calls larger than a round and those of a
    prefill are not kept: they have many node counts.
    """

    def __init__(self, engine: OrtEngine, kv_cache: HostKVCache) -> None:
        self._engine = engine
        self._kv_cache = kv_cache
        self._version = kv_cache.version
        self._calls: dict[int, BoundCall] = {}
        self._slots = np.arange(kv_cache.slots)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        context_len: int = 0,
        tree_mask: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        self._drop_stale()
        count = len(tokens)
        call = self._calls.get(count)
        if call is None:
            call = self._engine.bind_call(self._kv_cache.layer, count, count)
            if count <= self._engine.manifest.max_tree_nodes + 1:
                self._calls[count] = call
        call.set_row(0, Call(tokens, positions, slot, context_len, tree_mask), self._slots)
        self._engine.run(call)
        return call.outputs(0)

    def prefill(self, tokens: Sequence[int], slot: int) -> None:
        self._drop_stale()
        call = self._engine.bind_call(self._kv_cache.layer, len(tokens), 1)
        call.set_row(0, Call(tokens, range(slot, slot + len(tokens)), slot), self._slots)
        self._engine.run(call)

    def _drop_stale(self) -> None:
        """Drop the calls that are bound to memory that the KV cache no longer uses."""
        if self._version != self._kv_cache.version:
            self._version = self._kv_cache.version
            self._calls.clear()
            self._slots = np.arange(self._kv_cache.slots)

    def run_again(self, count: int) -> None:
        """Repeat the session calls of the last ``forward`` over ``count`` nodes without the code around them, to time them."""
        self._engine.run(self._calls[count])


def buffer(array: NDArray[Any]) -> tuple[Any, ...]:
    """The arguments that ``bind_input`` and ``bind_output`` take for an array."""
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
