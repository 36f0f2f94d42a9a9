"""ONNX Runtime on the CPU: caches bound in place, everything else in buffers that are bound once for each node count."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.export.manifest import GraphInfo, Manifest
from eesd.runtime.engine import Outputs, Slab
from eesd.runtime.errors import EESDError
from eesd.runtime.slab import KVSlab

TYPES = {"tensor(float)": "float32", "tensor(int64)": "int64"}
MASKED = np.float32(-30000.0)  # the same as in training and export: its softmax weight is exactly zero


class OrtEngine:
    """One graph of an engine directory in an ONNX Runtime session.

    Its threads spin within a call, where they wait for one another hundreds of times, and stop at its end: draft and verify
    alternate, and a pool that goes on spinning takes the cores from the other's.
    """

    def __init__(self, directory: Path, manifest: Manifest, graph: GraphInfo, threads: int) -> None:
        if manifest.dtype != "float32":
            raise EESDError(
                f"{directory} holds {manifest.dtype} engines, ONNX Runtime on the CPU runs float32: "
                "export with --dtype float32, or run them as they are with --backend torch."
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self.session = ort.InferenceSession(str(directory / graph.file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions share no base class
            reason = str(error).splitlines()[0][:200]
            raise EESDError(f"ONNX Runtime cannot load {directory / graph.file} ({reason}); export again.") from None
        self._check_tensors(directory, graph)
        self.manifest = manifest
        self.graph = graph

    def _check_tensors(self, directory: Path, graph: GraphInfo) -> None:
        """The graph must have the tensors that the manifest says: buffers are bound by what the manifest says."""
        found = [(t.name, tuple(t.shape), TYPES.get(t.type)) for t in (*self.session.get_inputs(), *self.session.get_outputs())]
        if found != [(t.name, t.shape, t.dtype) for t in (*graph.inputs, *graph.outputs)]:
            raise EESDError(f"{directory / graph.file} is not the graph that the manifest describes; export again.")

    def new_slab(self) -> KVSlab:
        return KVSlab(self.manifest)

    def bind(self, slab: Slab) -> "OrtBinding":
        assert isinstance(slab, KVSlab)
        return OrtBinding(self, slab)


@dataclass
class _Bound:
    """The buffers for one node count, and the binding that points at them and at the slab."""

    io: Any
    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    write_indices: NDArray[np.int64]
    mask: NDArray[np.float32]
    outputs: Outputs


class OrtBinding:
    """An :class:`OrtEngine` on one slab.

    Buffers are bound when a node count first occurs and kept until the slab grows; those of prefill chunks, whose counts
    are many and whose logits are large, are not kept.
    """

    def __init__(self, engine: OrtEngine, slab: KVSlab) -> None:
        self._engine = engine
        self._slab = slab
        self._generation = slab.generation
        self._bound: dict[int, _Bound] = {}
        self._slots = np.arange(slab.slots)

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int = 0,
        visible: NDArray[np.bool_] | None = None,
    ) -> Outputs:
        if self._generation != self._slab.generation:
            self._generation = self._slab.generation
            self._bound.clear()
            self._slots = np.arange(self._slab.slots)
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
            bound.mask[:, base : base + visible.shape[1]] = np.where(visible, np.float32(0), MASKED)
        self._engine.session.run_with_iobinding(bound.io)
        return bound.outputs

    def _bind(self, count: int) -> _Bound:
        manifest, graph = self._engine.manifest, self._engine.graph
        ids, positions = np.zeros((1, count), np.int64), np.zeros((1, count), np.int64)
        slot = np.zeros(1, np.int64)
        mask = np.zeros((1, 1, count, self._slab.slots), np.float32)
        io = self._engine.session.io_binding()
        for name, array in (
            ("input_ids", ids),
            ("position_ids", positions),
            ("write_indices", slot),
            ("attn_mask", mask),
        ):
            io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for index in graph.caches:
            for part, name in enumerate(("key", "value")):
                cache = self._slab.data[index, part]
                place = ("cpu", 0, np.float32, cache.shape, cache.ctypes.data)
                io.bind_input(f"{name}_{index}", *place)
                io.bind_output(f"{name}_{index}_out", *place)
        results: list[NDArray[Any]] = []
        for info in graph.outputs[: len(graph.outputs) - 2 * len(graph.caches)]:
            result = np.zeros((1, count, int(info.shape[2])), info.dtype)
            io.bind_output(info.name, "cpu", 0, result.dtype.type, result.shape, result.ctypes.data)
            results.append(result[0])
        assert results[0].shape == (count, manifest.vocab_size)
        ids_out, logprobs = results[1:] if len(results) == 3 else (None, None)
        return _Bound(io, ids, positions, slot, mask[0, 0], Outputs(results[0], ids_out, logprobs))
