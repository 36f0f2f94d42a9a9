"""The model's own text from the CPU engine: weights as the checkpoint has them, and any number of texts in a call."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.manifest import MAX_SLOTS, Manifest
from eesd.common.manifest_reader import load_manifest
from eesd.common.weights import DTYPES, Quantizations
from eesd.distill.continuing import Logits, TextRows
from eesd.export.engine_dir import export, untrained_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.packed import packed_directory

LEAST_SLOTS = 1024
"""Slots of an engine, at least, if the model has so many positions: own prompts and own text then share it."""
LAYER = 1
"""The exit layer of its head, which nothing runs."""


class EngineWriter:
    """Writes with the engine in a directory, which is exported when there is something to write."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, threads: int) -> None:
        """
        Args:
            checkpoint: The model. Levels of a quantized one stay as they are, and so do weights of 16 and 32 bits.
            directory: The engine directory. One of this model that an earlier run left is used; anything else is replaced.
            threads: CPU threads.
        """
        self._checkpoint, self._directory, self._threads = checkpoint, directory, threads
        self._engine: CpuEngine | None = None

    def rows(self, count: int, slots: int) -> TextRows:
        if self._engine is None or self._engine.manifest.max_seq_len < slots:
            self._engine = self._open(slots)
        return _EngineRows(self._engine, count)

    def _open(self, slots: int) -> CpuEngine:
        manifest = self._stored()
        if manifest is None or manifest.max_seq_len < slots:
            shutil.rmtree(self._directory, ignore_errors=True)
            positions = min(self._checkpoint.config.max_positions, MAX_SLOTS)
            manifest = self._export(max(slots, min(LEAST_SLOTS, positions)))
        return CpuEngine(packed_directory(self._directory, manifest), manifest, manifest.verify, self._threads)

    def _stored(self) -> Manifest | None:
        """The manifest of the engine that is there; None if there is none of this model, or a damaged one."""
        try:
            manifest = load_manifest(self._directory)
        except EESDError:
            return None
        return manifest if manifest.exit_head.base == self._checkpoint.fingerprint() else None

    def _export(self, slots: int) -> Manifest:
        dtype = self._checkpoint.dtype if self._checkpoint.dtype in DTYPES else "float32"
        own = self._checkpoint.own_levels if dtype == "float32" else {}
        quantization = Quantizations(self._checkpoint.quantization, tensors=own)
        options = ExportOptions(dtype, slots, max_tree_nodes=1, draft_top_k=1, quantization=quantization)
        return export(self._checkpoint, untrained_head(self._checkpoint, LAYER), options, self._directory)


class _EngineRows:
    """A KV cache for each row, which starts anew where a text begins."""

    most_idle = 0.0

    def __init__(self, engine: CpuEngine, count: int) -> None:
        self._engine = engine
        self._kv_caches = engine.new_kv_caches(count)

    def prefill(self, first: int, texts: Sequence[Sequence[int]]) -> None:
        most = self._engine.prefill_chunk
        for kv_cache, text in zip(self._kv_caches[first:], texts, strict=False):
            for start in range(0, len(text), most):
                piece = text[start : start + most]
                self._engine.forward([Call(kv_cache, piece, range(start, start + len(piece)), start, logits=False)])

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Sequence[Logits]:
        places = zip(self._kv_caches, tokens, positions, strict=False)
        calls = [Call(kv_cache, (token,), (at,), at) for kv_cache, token, at in places]
        return [outputs.logits[0] for outputs in self._engine.forward(calls)]

    def keep(self, rows: Sequence[int]) -> None:
        self._kv_caches = [self._kv_caches[row] for row in rows]
