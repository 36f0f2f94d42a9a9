"""Run the frozen model with this project's operators. The engine writes and reads text with the
checkpoint's weights."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eesd.common.architecture import Model
from eesd.common.errors import EESDError
from eesd.common.manifest import MAX_SLOTS, Manifest, load_manifest
from eesd.common.quantization import DTYPES, Quantizations
from eesd.common.weights import read_graph
from eesd.distill.continuing import TextRows, Writing, texts_of_rows
from eesd.distill.teacher import Targets, storage_dtype, top_tokens
from eesd.export.engine_dir import export, untrained_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.cpu_build import built_for_cpu, find_build
from eesd.runtime.engines.cpu_cache import CpuKVCache
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.operators import make_session

LEAST_SLOTS = 1024
"""Minimum number of slots in an engine (at most the model's number of positions). With this
minimum, the model's prompts and texts can share one engine."""
LAYER = 1
"""Exit layer of the engine's head, which is never run."""
READING = "states.onnx"
"""Name of the graph that also returns hidden states."""


def own_engine(checkpoint: Checkpoint, directory: Path, slots: int) -> tuple[Path, Manifest]:
    """Export the model into a directory, unless an engine of this model with enough slots is there.

    Args:
        checkpoint: The model. Quantized levels, 16-bit weights and 32-bit weights are not changed.
        directory: Directory of this process. An existing engine with fewer slots is replaced.
        slots: Minimum number of slots in the engine.

    Returns:
        The directory that engines open, and the manifest of that directory.
    """
    manifest = _stored(checkpoint, directory)
    if manifest is None or manifest.max_seq_len < slots:
        shutil.rmtree(directory, ignore_errors=True)
        manifest = _export(checkpoint, directory, slots)
    return built_for_cpu(directory, manifest), manifest


def _export(checkpoint: Checkpoint, directory: Path, slots: int) -> Manifest:
    dtype = checkpoint.dtype if checkpoint.dtype in DTYPES else "float32"
    own = checkpoint.own_levels if dtype == "float32" else {}
    quantization = Quantizations(checkpoint.quantization, tensors=own)
    slots = max(slots, min(LEAST_SLOTS, checkpoint.config.max_positions, MAX_SLOTS))
    options = ExportOptions(
        dtype, slots, max_tree_nodes=1, draft_top_k=1, quantization=quantization
    )
    head = untrained_head(checkpoint, LAYER)
    return export(checkpoint, head, options, directory, packed=True)


def _stored(checkpoint: Checkpoint, directory: Path) -> Manifest | None:
    """Return the manifest of the existing engine, or None if it is missing, damaged, or belongs to
    another model."""
    try:
        manifest = load_manifest(directory)
    except EESDError:
        return None
    is_models = manifest.exit_head.base == checkpoint.fingerprint()
    return manifest if is_models and find_build(directory, manifest) else None


class EngineWriter:
    """Writes any number of texts in a call. The engine is exported when there is something to
    write."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, threads: int) -> None:
        """See :func:`own_engine`. ``threads``: CPU threads."""
        self._checkpoint = checkpoint
        self._directory = directory
        self._threads = threads
        self._engine: CpuEngine | None = None

    def texts(self, writing: Writing) -> Iterator[tuple[int, list[int]]]:
        return texts_of_rows(self._rows, writing)

    def _rows(self, count: int, slots: int) -> TextRows:
        if self._engine is None or self._engine.manifest.max_seq_len < slots:
            packed, manifest = own_engine(self._checkpoint, self._directory, slots)
            self._engine = CpuEngine(packed, manifest, manifest.verify, self._threads)
        return _EngineRows(self._engine, count)


class _EngineRows:
    """A KV cache for each row. It is reset when a text begins."""

    most_idle = 0.0

    def __init__(self, engine: CpuEngine, count: int) -> None:
        self._engine = engine
        self._kv_caches = engine.new_kv_caches(count)

    def prefill(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        most = self._engine.prefill_chunk
        for row, text in zip(rows, texts, strict=True):
            for start in range(0, len(text), most):
                piece = text[start : start + most]
                call = Call(
                    self._kv_caches[row],
                    piece,
                    range(start, start + len(piece)),
                    start,
                    logits=False,
                )
                self._engine.forward([call])

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        places = zip(self._kv_caches, tokens, positions, strict=False)
        calls = [Call(kv_cache, (token,), (at,), at) for kv_cache, token, at in places]
        return torch.from_numpy(
            np.stack([outputs.logits[0] for outputs in self._engine.forward(calls)])
        )

    def keep(self, rows: Sequence[int]) -> None:
        self._kv_caches = [self._kv_caches[row] for row in rows]


class EngineTeacher:
    """Reads rows one after another, and returns the same states as drafting does.

    The reader has the signature of a :class:`~eesd.distill.teacher.Teacher`, and returns nearly the
    same results.
    """

    CHUNK = 256
    """Maximum number of tokens in a call."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        layers: Sequence[int],
        top_k: int,
        precision: str,
        slots: int,
        threads: int,
    ) -> None:
        """Export the model and open the engine.

        Args:
            checkpoint: The model.
            directory: Directory of the engine (see :func:`own_engine`).
            layers: Layers whose hidden states are returned, counted from 1.
            top_k: Number of most likely tokens to keep at each position (at most the whole
                vocabulary).
            precision: Type in which the states are returned (``bf16`` or ``float32``).
            slots: Maximum number of tokens in a row.
            threads: CPU threads.
        """
        self.layers = tuple(layers)
        self._dtype = storage_dtype(precision)
        self._top_k = min(top_k, checkpoint.geometry.vocab_size)
        packed, manifest = own_engine(checkpoint, directory, slots)
        [verify] = manifest.verify
        described = Model(manifest.geometry, manifest.exit_head)
        _add_states(packed / verify.file, packed / READING, described, self.layers)
        self._session = make_session(packed / READING, threads, int8_activations=True)
        self._kv_cache = CpuKVCache(manifest)

    def __call__(self, ids: Tensor) -> tuple[dict[int, Tensor], Targets]:
        """Return the hidden states [B, T, hidden] after each of the layers and the targets, given
        token ids [B, T]."""
        parts = [self._read(chunk, start) for row in ids for start, chunk in self._chunks(row)]
        states, top_ids, top_logprobs = zip(*parts, strict=True)
        hidden = {
            layer: torch.cat([part[index] for part in states])
            for index, layer in enumerate(self.layers)
        }
        return (
            {layer: part.view(*ids.shape, -1) for layer, part in hidden.items()},
            Targets(
                torch.cat(top_ids).view(*ids.shape, -1),
                torch.cat(top_logprobs).view(*ids.shape, -1),
            ),
        )

    def _chunks(self, row: Tensor) -> list[tuple[int, Tensor]]:
        """Return the start and the tokens of each chunk of a row."""
        return [
            (self.CHUNK * number, piece)
            for number, piece in enumerate(torch.split(row, self.CHUNK))
        ]

    def _read(self, ids: Tensor, start: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the states [n, hidden] and the most likely tokens [n, K] of a chunk of a row. The
        previous chunks must have been read."""
        count = len(ids)
        slots = np.arange(start, start + count)
        tokens = np.stack(
            [np.full(count, self._kv_cache.address), slots, slots, slots + 1, np.zeros(count)], 1
        ).astype(np.int64)
        paths = np.zeros((count, 1), np.int32)
        given = {
            "input_ids": ids.numpy(),
            "tokens": tokens,
            "paths": paths,
            "logit_rows": np.arange(count),
        }
        logits, *states = map(torch.from_numpy, self._session.run(None, given))
        return [state.to(self._dtype) for state in states], *top_tokens(logits, self._top_k)


def _add_states(graph: Path, output: Path, of: Model, layers: Sequence[int]) -> None:
    """Write a copy of a graph next to the graph's weights. The copy also returns the states after
    some layers of the model."""
    import onnx

    model = read_graph(graph)
    for layer in layers:
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(
                of.layer(layer - 1).output, onnx.TensorProto.FLOAT, [None, None]
            )
        )
    output.write_bytes(model.SerializeToString())
