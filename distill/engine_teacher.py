"""The frozen model as the teacher, read by the CPU engine: drafting will see the same states."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eesd.distill.own_engine import own_engine
from eesd.distill.teacher import Targets, storage_dtype, top_tokens
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.cpu_cache import CpuKVCache
from eesd.runtime.engines.operators import make_session

GRAPH = "states.onnx"


class EngineTeacher:
    """Reads rows one after another. It is called as :class:`~eesd.distill.teacher.Teacher` is, and gives the same, nearly."""

    CHUNK = 256
    """Tokens of a call."""

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
        """Export the model, and open it.

        Args:
            checkpoint: The model.
            directory: Directory of the engine; see :func:`~eesd.distill.own_engine.own_engine`.
            layers: Layers whose hidden states are returned, counted from 1.
            top_k: Tokens of the distribution to keep, at most the whole vocabulary.
            precision: ``bf16`` or ``float32``, in which the states are returned.
            slots: Most tokens of a row.
            threads: CPU threads.
        """
        self.layers, self._dtype = tuple(layers), storage_dtype(precision)
        self._top_k = min(top_k, checkpoint.geometry.vocab_size)
        packed, manifest = own_engine(checkpoint, directory, slots)
        [verify] = manifest.verify
        _add_states(packed / verify.file, packed / GRAPH, self.layers)
        self._session = make_session(packed / GRAPH, threads, int8_activations=True)
        self._kv_cache = CpuKVCache(manifest)

    def __call__(self, ids: Tensor) -> tuple[dict[int, Tensor], Targets]:
        """Hidden states [B, T, hidden] after each of the layers, and the targets, for token ids [B, T]."""
        parts = [self._read(chunk, start) for row in ids for start, chunk in self._chunks(row)]
        states, top_ids, top_logprobs = zip(*parts, strict=True)
        hidden = {layer: torch.cat([part[index] for part in states]) for index, layer in enumerate(self.layers)}
        return (
            {layer: part.view(*ids.shape, -1) for layer, part in hidden.items()},
            Targets(torch.cat(top_ids).view(*ids.shape, -1), torch.cat(top_logprobs).view(*ids.shape, -1)),
        )

    def _chunks(self, row: Tensor) -> list[tuple[int, Tensor]]:
        """The pieces of a row, and where they begin."""
        return [(self.CHUNK * number, piece) for number, piece in enumerate(torch.split(row, self.CHUNK))]

    def _read(self, ids: Tensor, start: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """States [n, hidden] and the most likely tokens [n, K] of a chunk of a row, whose beginning was read before."""
        count = len(ids)
        slots = np.arange(start, start + count)
        tokens = np.stack([np.full(count, self._kv_cache.address), slots, slots, slots + 1, np.zeros(count)], 1).astype(
            np.int64
        )
        paths = np.zeros((count, 1), np.int32)
        given = {"input_ids": ids.numpy(), "tokens": tokens, "paths": paths, "logit_rows": np.arange(count)}
        logits, *states = map(torch.from_numpy, self._session.run(None, given))
        return [state.to(self._dtype) for state in states], *top_tokens(logits, self._top_k)


def _add_states(graph: Path, output: Path, layers: Sequence[int]) -> None:
    """Write a graph beside its weights that also returns the states after some layers."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    for layer in layers:
        name = f"model.layers.{layer - 1}.out"
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, None]))
    output.write_bytes(model.SerializeToString())
