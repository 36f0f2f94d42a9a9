"""The model's own text from the CPU engine: weights as the checkpoint has them, and any number of texts in a call."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from eesd.distill.continuing import Logits, TextRows, Writing, texts_of_rows
from eesd.distill.own_engine import own_engine
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.cpu_engine import CpuEngine


class EngineWriter:
    """Writes with the engine in a directory, which is exported when there is something to write."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, threads: int) -> None:
        """See :func:`~eesd.distill.own_engine.own_engine`. ``threads``: CPU threads."""
        self._checkpoint, self._directory, self._threads = checkpoint, directory, threads
        self._engine: CpuEngine | None = None

    def texts(self, writing: Writing) -> Iterator[tuple[int, list[int]]]:
        return texts_of_rows(self._rows, writing)

    def _rows(self, count: int, slots: int) -> TextRows:
        if self._engine is None or self._engine.manifest.max_seq_len < slots:
            packed, manifest = own_engine(self._checkpoint, self._directory, slots)
            self._engine = CpuEngine(packed, manifest, manifest.verify, self._threads)
        return _EngineRows(self._engine, count)


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
