"""Where batches come from: the teacher itself, or a cache of all that it says of the rows."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.distill.data import Rows
from eesd.distill.generate import shard_name
from eesd.distill.options import difference
from eesd.distill.student import Batch
from eesd.distill.teacher import Targets, element_type

SHARD_ROWS = 256

TeacherCall = Callable[[Tensor], tuple[dict[int, Tensor], Targets]]


class Source(Protocol):
    """Batches by row numbers, for the head after one exit layer."""

    def batch(self, numbers: NDArray[np.int64], layer: int) -> Batch: ...


def _text_of(rows: Rows, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The next tokens [B, T] of these rows and the mask of the positions that have one."""
    text = torch.from_numpy(rows.tokens[numbers, 1:].astype(np.int64))
    mask = torch.arange(text.shape[1]) < torch.from_numpy(rows.lengths[numbers] - 1)[:, None]
    return text, mask.float()


class Online:
    """The teacher runs on every batch."""

    def __init__(self, rows: Rows, teacher: TeacherCall, device: torch.device) -> None:
        self.rows, self.teacher, self.device = rows, teacher, device

    def batch(self, numbers: NDArray[np.int64], layer: int) -> Batch:
        ids = torch.from_numpy(self.rows.tokens[numbers, :-1].astype(np.int64)).to(self.device)
        hidden, targets = self.teacher(ids)
        return Batch(hidden[layer], targets, *_text_of(self.rows, numbers)).to(self.device)


class Cache:
    """A directory of shards of 256 rows with the hidden states after each layer, the teacher's top tokens, and, for the
    regression of hidden states, what its LM head got. With all shards there, training needs no teacher."""

    def __init__(self, directory: Path, rows: Rows, meta: dict[str, Any]) -> None:
        """``meta`` says what the cache is of (model, layers, data, sizes); another cache in the directory is refused."""
        self.directory, self.rows, self.device = directory, rows, torch.device("cpu")
        self.meta = meta | {"rows": len(rows), "length": rows.tokens.shape[1] - 1, "data": rows.digest()}
        self._open: dict[int, Any] = {}
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "cache.json"
        if path.exists():
            changed = difference(json.loads(path.read_text()), self.meta)
            if changed:
                raise EESDError(f"The cache {directory} is of other data or options ({changed}); give another directory.")
        else:
            with written_whole(path) as temporary:
                temporary.write_text(json.dumps(self.meta, indent=2) + "\n")

    def missing(self) -> list[int]:
        """The shards that are still to be made."""
        count = -(-len(self.rows) // SHARD_ROWS)
        return [number for number in range(count) if not (self.directory / shard_name(number)).exists()]

    def row_bytes(self, hidden_size: int) -> int:
        """What a row takes on disk."""
        states = len(self.meta["layers"]) + bool(self.meta["final"])
        state_bytes = element_type(self.meta["precision"]).itemsize * hidden_size * states
        return int(self.meta["length"]) * (state_bytes + 6 * int(self.meta["top_k"]))

    def fill(
        self,
        teacher: TeacherCall,
        device: torch.device,
        hidden_size: int,
        batch: int,
        advance: Callable[[int], None],
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Make the missing shards; ``advance`` is told the rows that each brought."""
        missing = self.missing()
        needed, free = len(missing) * SHARD_ROWS * self.row_bytes(hidden_size), shutil.disk_usage(self.directory).free
        if needed > free:
            raise EESDError(
                f"The cache {self.directory} needs {needed / 1e9:.1f} GB more and the disk has {free / 1e9:.1f} GB free; "
                "give another directory, fewer rows, or a smaller --top-k."
            )
        for number in missing[process::processes]:
            tokens = torch.from_numpy(self.rows.tokens[number * SHARD_ROWS : (number + 1) * SHARD_ROWS, :-1].astype(np.int64))
            parts = [_flat(*teacher(_padded(ids, batch).to(device)), len(ids)) for ids in torch.split(tokens, batch)]
            shard = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
            with written_whole(self.directory / shard_name(number)) as temporary:
                save_file(shard, temporary)
            advance(len(tokens))

    def _rows_of(self, name: str, numbers: NDArray[np.int64]) -> Tensor:
        return torch.cat([self._shard(int(n) // SHARD_ROWS).get_slice(name)[int(n) % SHARD_ROWS][None] for n in numbers])

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            path = self.directory / shard_name(number)
            try:
                self._open[number] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise EESDError(f"{path} cannot be read ({error}); delete it, and the next run makes it again.") from None
        return self._open[number]

    def batch(self, numbers: NDArray[np.int64], layer: int) -> Batch:
        final = self._rows_of("final", numbers) if self.meta["final"] else None
        targets = Targets(self._rows_of("top_ids", numbers), self._rows_of("top_logprobs", numbers), final)
        return Batch(self._rows_of(f"hidden.{layer}", numbers), targets, *_text_of(self.rows, numbers)).to(self.device)


def _padded(ids: Tensor, batch: int) -> Tensor:
    """Always the same shape, or a compiled teacher would be compiled once more for the last rows."""
    return torch.nn.functional.pad(ids, (0, 0, 0, batch - len(ids)))


def _flat(hidden: dict[int, Tensor], targets: Targets, count: int) -> dict[str, Tensor]:
    state = {f"hidden.{layer}": states for layer, states in hidden.items()}
    state |= {"top_ids": targets.top_ids, "top_logprobs": targets.top_logprobs}
    if targets.final is not None:
        state["final"] = targets.final
    return {name: tensor[:count].cpu() for name, tensor in state.items()}


def cache_meta(base: str, layers: Sequence[int], top_k: int, precision: str, final: bool) -> dict[str, Any]:
    return {"base": base, "layers": sorted(layers), "top_k": top_k, "precision": precision, "final": final}
