"""The frozen model is the teacher. This module computes its hidden states and top-k targets for
each batch, or caches them on disk."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from eesd.common.architecture import base_layers
from eesd.common.errors import EESDError
from eesd.common.geometry import Geometry
from eesd.common.json_input import read_json_object
from eesd.distill.data import Rows, shard_name
from eesd.distill.options import first_difference
from eesd.distill.stored import damaged, saved_whole
from eesd.model.decoder import Decoder
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.torch_ops import KV, Inputs, capped

LOGITS_PER_CHUNK = 1 << 25
"""Number of logits in memory at a time (128 MiB in float32)."""
DEVICE_CHUNKS = 8
"""On a GPU, the number of logits in memory is larger by this factor, so that there are fewer and
larger kernels."""
TOP_BLOCK = 64
"""Number of logits in a block. The maxima of blocks are found first, so that a GPU need not search
all logits for the k largest."""
SHARD_ROWS = 32
"""Rows in a shard of the target cache."""


@dataclass(frozen=True)
class Targets:
    """The teacher's predictions for a batch of rows [B, T].

    Attributes:
        top_ids: The most likely tokens ([B, T, K], int32), best first.
        top_logprobs: The log-probabilities of these tokens in the whole distribution ([B, T, K],
            float16).
    """

    top_ids: Tensor
    top_logprobs: Tensor


TeacherCall = Callable[[Tensor], tuple[dict[int, Tensor], Targets]]
"""A :class:`Teacher`, or an engine with the same signature."""


@dataclass(frozen=True)
class Batch:
    """Rows [B, T] with all inputs of a training step.

    Attributes:
        hidden: Hidden states [B, T, hidden] after the exit layer, followed by those after each deep
            layer of the head.
        targets: The teacher's predictions.
        mask: A mask [B, T], which is 1 for positions that have a next token and 0 for the other
            positions.
    """

    hidden: Sequence[Tensor]
    targets: Targets
    mask: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Copy all tensors to a device."""
        targets = self.targets
        return Batch(
            [on_device(states, device) for states in self.hidden],
            Targets(
                on_device(targets.top_ids, device),
                on_device(targets.top_logprobs, device),
            ),
            on_device(self.mask, device),
        )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Copies to a GPU use pinned memory, so that nothing waits for
    earlier work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def chunk_rows(columns: int, device: torch.device) -> int:
    """Return the number of rows of logits in memory at a time."""
    return max(1, LOGITS_PER_CHUNK * (1 if device.type == "cpu" else DEVICE_CHUNKS) // columns)


def storage_dtype(precision: str) -> torch.dtype:
    """Element type of KV caches and of stored hidden states."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """Run matrix products in bfloat16 if the precision is ``bf16``."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        yield


def full_sequence_inputs(
    geometry: Geometry,
    batch: int,
    tokens: int,
    caches: int,
    dtype: torch.dtype,
    device: torch.device,
    whole: bool | None = None,
) -> tuple[Inputs, list[KV]]:
    """Prepare one causal pass over whole sequences.

    Args:
        geometry: Shape of the model.
        batch: Number of sequences.
        tokens: Number of tokens in a sequence, which is also the number of slots.
        caches: Number of KV caches.
        dtype: Type of the KV caches, the rotary tables and the mask.
        device: Device of all tensors.
        whole: Whether the pass needs no caches and no mask. If so, they are empty. The default is
            true on all devices except CPUs.

    Returns:
        The inputs of the blocks, and the empty KV caches.
    """
    whole = device.type != "cpu" if whole is None else whole
    with torch.device(device):
        inputs = causal_inputs(geometry, batch, tokens, tokens)
        empty = [
            (k.to(dtype), v.to(dtype))
            for k, v in empty_caches(geometry, batch, 0 if whole else tokens, caches)
        ]
    if whole:
        inputs.attn_mask = inputs.attn_mask[..., :0, :0]
        inputs.whole = True
    inputs.cos, inputs.sin, inputs.attn_mask = (
        t.to(dtype) for t in (inputs.cos, inputs.sin, inputs.attn_mask)
    )
    return inputs, empty


class Teacher(nn.Module):
    """The frozen model as a module from token ids [B, T] to hidden states and targets.

    All layers share the caches of one layer, because in a pass over whole sequences, a layer reads
    only what it has just written. If a model's layers read the caches of other layers, each layer
    has separate caches.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[int], top_k: int, precision: str) -> None:
        """Wrap a model.

        Args:
            decoder: The frozen model.
            layers: Exit layers whose hidden states are returned, counted from 1.
            top_k: Number of most likely tokens to keep at each position, at most the whole
                vocabulary.
            precision: ``bf16`` or ``float32``.
        """
        super().__init__()
        self.decoder = decoder
        self.layers = tuple(layers)
        self.precision = precision
        self.top_k = min(top_k, decoder.geometry.vocab_size)

    # This does not use inference_mode, because inference tensors cannot take part in the student's
    # backward pass.
    @torch.no_grad()
    def forward(self, ids: Tensor) -> tuple[dict[int, Tensor], Targets]:
        """Return the hidden states [B, T, hidden] after each exit layer and the targets."""
        geometry = self.decoder.geometry
        dtype = storage_dtype(self.precision)
        most = max(len(geometry.caches_of(layer)) for layer in range(geometry.num_layers))
        if geometry.shared_from:
            most = geometry.num_caches
        inputs, caches = full_sequence_inputs(
            geometry, ids.shape[0], ids.shape[1], most, dtype, ids.device
        )
        o = self.decoder.operations(inputs, caches * geometry.num_caches)
        hidden = {}
        with autocast(self.precision, ids.device):
            for index, x in base_layers(o, o.model, ids, range(geometry.num_layers)):
                if index in self.layers:
                    hidden[index] = x.to(dtype)
            x = o.norm(x, o.model.final_norm)
        # This is outside the autocast, because rounded logits would change the label if two tokens
        # are almost equally likely.
        flat = x.flatten(0, 1)
        rows = chunk_rows(geometry.vocab_size, ids.device)
        top = [self._top_tokens(chunk) for chunk in flat.chunk(-(-len(flat) // rows))]
        top_ids, top_logprobs = (
            torch.cat(part).view(*ids.shape, -1) for part in zip(*top, strict=True)
        )
        return hidden, Targets(top_ids, top_logprobs)

    def _top_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids and log-probabilities [n, K], given inputs of the LM head
        [n, hidden]."""
        logits = wide_logits(x, self.decoder.lm_head.weight, self.decoder.biases_of_logits)
        return top_tokens(capped(logits, self.decoder.geometry.logit_cap), self.top_k)


def wide_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits ([n, V], float32) for inputs [n, hidden] of the LM head, plus the bias if there
    is one. A GPU never rounds the sums to the type of the weight."""
    x = x.to(weight.dtype)
    if x.device.type == "cuda" and x.dtype != torch.float32:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
    else:
        logits = linear(x, weight).float()
    return logits if bias is None else logits + bias


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids (int32) and the log-probabilities (float16) of the most likely tokens, given
    logits [n, V]. Both results are [n, count], and the best token comes first."""
    values, ids = logits.topk(count) if logits.device.type == "cpu" else largest(logits, count)
    return ids.int(), (values - logits.logsumexp(-1, keepdim=True)).half()


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the result of ``topk`` for logits [n, V]. Only the blocks with the largest maxima are
    searched, because no other block can have any of these tokens."""
    if logits.shape[1] % TOP_BLOCK or logits.shape[1] // TOP_BLOCK <= count:
        return logits.topk(count)
    blocks = logits.view(len(logits), -1, TOP_BLOCK)
    chosen = blocks.amax(-1).topk(count).indices
    values, within = (
        blocks.gather(1, chosen[..., None].expand(-1, -1, TOP_BLOCK)).flatten(1).topk(count)
    )
    return values, chosen.gather(1, within // TOP_BLOCK) * TOP_BLOCK + within % TOP_BLOCK


class TargetSource(Protocol):
    """Returns batches for row indices, with targets and with the states after the given layers."""

    def batch(self, indices: NDArray[np.int64], layers: Sequence[int]) -> Batch: ...


class OnlineTargets:
    """Runs the teacher on each batch."""

    def __init__(self, rows: Rows, teacher: TeacherCall, device: torch.device) -> None:
        self.rows = rows
        self.teacher = teacher
        self.device = device

    def batch(self, indices: NDArray[np.int64], layers: Sequence[int]) -> Batch:
        ids = on_device(
            torch.from_numpy(self.rows.tokens[indices, :-1].astype(np.int64)), self.device
        )
        hidden, targets = self.teacher(ids)
        return Batch([hidden[layer] for layer in layers], targets, _mask(self.rows, indices)).to(
            self.device
        )


class TargetCache:
    """A directory with the hidden states and targets of all rows. It has safetensors shards of 32
    rows.

    A complete cache replaces the teacher. If rows are appended, only their targets are computed.
    Shards contain ``hidden.<layer>``, ``top_ids`` and ``top_logprobs``.
    """

    def __init__(
        self,
        directory: Path,
        rows: Rows,
        base: str,
        layers: Sequence[int],
        top_k: int,
        precision: str,
    ) -> None:
        """Open a cache, or create one without shards.

        Args:
            directory: Directory of the cache.
            rows: The rows to cache.
            base: Fingerprint of the model.
            layers: Exit layers whose hidden states are needed. A cache of more layers can also be
                used.
            top_k: Number of most likely tokens that are cached for each position.
            precision: ``bf16`` or ``float32``.

        Raises:
            EESDError: The directory has a cache for other data or options.
        """
        self.directory = directory
        self.rows = rows
        self.meta: dict[str, Any] = {
            "base": base,
            "layers": sorted(layers),
            "top_k": top_k,
            "precision": precision,
            "rows": len(rows),
            "length": rows.tokens.shape[1] - 1,
            "data": rows.digest(),
        }
        self._open_shards: dict[int, Any] = {}
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "cache.json"
        if path.exists():
            stored = read_json_object(
                path, f"delete {directory}, or give another --offline directory"
            )
            self._check(stored)
            if stored["rows"] == len(rows):
                return
        with saved_whole(path) as temporary:
            temporary.write_text(json.dumps(self.meta, indent=2) + "\n")

    def _check(self, stored: dict[str, Any]) -> None:
        """Check that a cache has the targets of these rows or of the first of these rows. Use the
        layers of the cache."""
        kept = stored.get("layers")
        count = stored.get("rows")
        if isinstance(kept, list) and all(layer in kept for layer in self.meta["layers"]):
            self.meta["layers"] = kept
        expected = dict(self.meta)
        if type(count) is int and count < len(self.rows):
            expected |= {"rows": count, "data": self.rows.digest(count)}
        changed = first_difference(stored, expected)
        if changed:
            raise EESDError(
                f"The cache {self.directory} was made with other data or options ({changed}); "
                "give another --offline directory."
            )

    @property
    def layers(self) -> list[int]:
        """Exit layers whose hidden states are cached."""
        return list(self.meta["layers"])

    def missing_shards(self, count: int) -> list[int]:
        """Return the numbers of the missing shards of the first ``count`` rows. A shard is missing
        if it does not exist yet, or if it has fewer rows than it should have now."""
        missing = []
        for number in range(-(-count // SHARD_ROWS)):
            path = self.directory / shard_name(number)
            if not path.exists() or _stored_rows(path) < self._rows_in(number):
                missing.append(number)
        return missing

    def _rows_in(self, number: int) -> int:
        """Return the number of rows in a shard."""
        return min(SHARD_ROWS, len(self.rows) - number * SHARD_ROWS)

    def _row_bytes(self, hidden_size: int) -> int:
        """Return the number of bytes that the states, ids and log-probabilities of a row have on
        disk."""
        states = (
            hidden_size * len(self.meta["layers"]) * storage_dtype(self.meta["precision"]).itemsize
        )
        return int(self.meta["length"] * (states + 6 * self.meta["top_k"]))

    def fill(
        self,
        teacher: TeacherCall,
        device: torch.device,
        missing: Sequence[int],
        hidden_size: int,
        batch: int,
        advance: Callable[[int], None],
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Compute this process's part of the missing shards.

        Args:
            teacher: Computes hidden states and targets.
            device: Device of the teacher.
            missing: Numbers of the missing shards, from :meth:`missing_shards`.
            hidden_size: Width of a hidden state.
            batch: Rows in a pass of the teacher.
            advance: Called with the number of rows of each pass.
            process: Number of this process.
            processes: Number of processes that call this method.

        Raises:
            EESDError: The disk is too small.
        """
        needed = len(missing) * SHARD_ROWS * self._row_bytes(hidden_size)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise EESDError(
                f"The cache {self.directory} needs {needed / 1e9:.1f} GB more, but the disk "
                f"has {free / 1e9:.1f} GB free; "
                "give another directory, fewer rows, or a smaller --top-k."
            )
        for number in missing:
            # Shards are split by number and not by index, because processes may see different lists
            # of missing shards.
            if number % processes != process:
                continue
            tokens = torch.from_numpy(
                self.rows.tokens[number * SHARD_ROWS : (number + 1) * SHARD_ROWS, :-1].astype(
                    np.int64
                )
            )
            parts = []
            for ids in torch.split(tokens, batch):
                parts.append(_cached_tensors(*teacher(ids.to(device))))
                advance(len(ids))
            shard = {
                name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]
            }
            path = self.directory / shard_name(number)
            with saved_whole(path) as temporary:
                save_file(shard, temporary)

    def batch(self, indices: NDArray[np.int64], layers: Sequence[int]) -> Batch:
        targets = Targets(self._read("top_ids", indices), self._read("top_logprobs", indices))
        hidden = [self._read(f"hidden.{layer}", indices) for layer in layers]
        return Batch(hidden, targets, _mask(self.rows, indices))

    def _read(self, name: str, indices: NDArray[np.int64]) -> Tensor:
        return torch.cat(
            [
                self._shard(int(i) // SHARD_ROWS).get_slice(name)[int(i) % SHARD_ROWS][None]
                for i in indices
            ]
        )

    def _shard(self, number: int) -> Any:
        if number not in self._open_shards:
            path = self.directory / shard_name(number)
            try:
                shard: Any = safe_open(path, framework="pt")
                names = [
                    *(f"hidden.{layer}" for layer in self.meta["layers"]),
                    "top_ids",
                    "top_logprobs",
                ]
                shapes = {name: tuple(shard.get_slice(name).get_shape()[:2]) for name in names}
            except (SafetensorError, OSError):
                raise damaged(path) from None
            if set(shapes.values()) != {(self._rows_in(number), self.meta["length"])}:
                raise damaged(path)
            self._open_shards[number] = shard
        return self._open_shards[number]


def _stored_rows(path: Path) -> int:
    """Return the number of rows in a shard that an earlier run wrote."""
    try:
        with safe_open(path, framework="pt") as shard:
            return int(shard.get_slice("top_ids").get_shape()[0])
    except (SafetensorError, OSError, IndexError):
        raise damaged(path) from None


def _mask(rows: Rows, indices: NDArray[np.int64]) -> Tensor:
    """Return a mask [B, T], which is 1 for positions of these rows that have a next token and 0 for
    the other positions."""
    length = rows.tokens.shape[1] - 1
    return (torch.arange(length) < torch.from_numpy(rows.lengths[indices] - 1)[:, None]).float()


def _cached_tensors(hidden: dict[int, Tensor], targets: Targets) -> dict[str, Tensor]:
    """Return the rows of a pass by their names in a shard."""
    states = {f"hidden.{layer}": states for layer, states in hidden.items()}
    tensors = states | {"top_ids": targets.top_ids, "top_logprobs": targets.top_logprobs}
    return {name: tensor.cpu() for name, tensor in tensors.items()}
