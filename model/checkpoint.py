"""Reading safetensors checkpoints tensor by tensor, with plain file reads: no tensor is in memory before it is asked for."""

import hashlib
import json
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry
from eesd.model import exit_head
from eesd.model.config import load_config, read_json
from eesd.model.decoder import Decoder
from eesd.model.exit_head import ExitHead

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
MAX_HEADER = 100_000_000
"""The format's own limit; a longer header means that the first bytes are of some other format."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``path``."""

    path: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = bytearray(self.nbytes)
            if file.readinto(data) != self.nbytes:
                raise EESDError(f"{self.path} is truncated; fetch the file again.")
        return torch.frombuffer(data, dtype=self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, from its header (8 bytes of length, then JSON); sizes are checked."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise EESDError(f"{path} is missing; the checkpoint is incomplete, fetch it again.") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            what = "truncated" if length <= MAX_HEADER else "not a safetensors file"
            raise EESDError(f"{path} is {what}; fetch the file again (only safetensors checkpoints are read).")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise EESDError(f"{path} is not a safetensors file; only safetensors checkpoints are read.") from None
    try:
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return {name: _stored(path, 8 + length, size, name, entry) for name, entry in entries}
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise EESDError(f"{path} is damaged: its header makes no sense; fetch the file again.") from None


def _stored(path: Path, base: int, size: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise EESDError(
            f"{path}: the tensor {name} is stored as {entry['dtype']}; supported are {', '.join(DTYPES)} "
            "(give the unquantized checkpoint)."
        )
    start, end = (int(offset) for offset in entry["data_offsets"])
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
    if base + end > size:
        raise EESDError(f"{path} is truncated: the tensor {name} ends past the end of the file; fetch it again.")
    if start < 0 or end - start != prod(shape) * dtype.itemsize:
        raise EESDError(f"{path} is damaged: the tensor {name} has the wrong number of bytes; fetch it again.")
    return StoredTensor(path, base + start, end - start, shape, dtype)


class Checkpoint:
    """A Hugging Face model directory: its geometry, its tensors (one file or shards), its fingerprint."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise EESDError(f"{directory} is not a directory; give a Hugging Face model directory.")
        self.directory = directory
        self.config = load_config(directory)
        self.geometry = self.config.geometry
        self.tensors: dict[str, StoredTensor] = {}
        self._fingerprint = ""
        for path in _weight_files(directory):
            self.tensors.update(read_header(path))
        self._check_shapes()

    def _check_shapes(self) -> None:
        for name, shape in expected_shapes(self.geometry).items():
            stored = self.tensors.get(name)
            if stored is None:
                raise EESDError(f"The checkpoint {self.directory} has no tensor {name}; it is incomplete, fetch it again.")
            if stored.shape != shape:
                raise EESDError(
                    f"The tensor {name} of {self.directory} has shape {list(stored.shape)} where config.json "
                    f"asks for {list(shape)}; weights and config are of different models."
                )

    def first_layers(self, count: int) -> "Checkpoint":
        """The same checkpoint with only its first ``count`` layers, for a trial. Its fingerprint is still the whole model's."""
        most = self.geometry.num_layers
        if not 1 <= count <= most:
            raise EESDError(f"--layers must be between 1 and {most} for this {most}-layer model; {count} was given.")
        shorter = copy(self)
        shorter._fingerprint = self.fingerprint()
        shorter.geometry = replace(self.geometry, num_layers=count)
        shorter.config = replace(self.config, geometry=shorter.geometry)
        names = expected_shapes(shorter.geometry)
        shorter.tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
        return shorter

    def fingerprint(self) -> str:
        """SHA-256 over every tensor's name, shape, type and first kilobyte; the same however the model is sharded."""
        if self._fingerprint:
            return self._fingerprint
        digest = hashlib.sha256()
        for name in sorted(expected_shapes(self.geometry)):
            stored = self.tensors[name]
            digest.update(f"{name} {stored.shape} {stored.dtype}".encode())
            with stored.path.open("rb") as file:
                file.seek(stored.offset)
                digest.update(file.read(min(1024, stored.nbytes)))
        self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """The whole base model in memory, frozen."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # made in its type: in float32 first, a large model would not fit
        try:
            model = Decoder(self.geometry).requires_grad_(False).eval()
        finally:
            torch.set_default_dtype(default)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.tensors[name].read())
        return model

    def initial_head(self, exit_config: ExitConfig) -> ExitHead:
        """A head that starts from the base model's last layers; only their tensors are read."""
        exit_head.check_exit(self.geometry, exit_config.layer, exit_config.blocks)
        head = ExitHead(self.geometry, exit_config)
        names = exit_head.initial_names(self.geometry, exit_config)
        head.load_state_dict({name: self.tensors[base].read().float() for name, base in names.items()})
        return head

    def lm_head(self) -> Tensor:
        """The LM head's weight [V, hidden] in the stored type."""
        return self.tensors["model.embed_tokens.weight" if self.geometry.tied_embeddings else "lm_head.weight"].read()

    def exit_head(self, directory: Path) -> ExitHead:
        """A stored exit head for this model, float32."""
        exit_config = exit_head.read_exit_config(directory, self.fingerprint())
        stored = exit_tensors(self.geometry, exit_config, directory)
        head = ExitHead(self.geometry, exit_config)
        head.load_state_dict({name: tensor.read().float() for name, tensor in stored.items()})
        return head.eval()


def _weight_files(directory: Path) -> Iterator[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise EESDError(f"{index} is damaged: it has no weight_map of file names; fetch the file again.")
        yield from (directory / shard for shard in sorted(set(shards.values())))
    elif (directory / "model.safetensors").exists():
        yield directory / "model.safetensors"
    else:
        raise EESDError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "only safetensors checkpoints are read."
        )


def expected_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this geometry must have."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(geometry).named_parameters()}


def exit_tensors(geometry: Geometry, exit_config: ExitConfig, directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a stored exit head, each checked against the head's geometry."""
    exit_head.check_exit(geometry, exit_config.layer, exit_config.blocks)
    stored = read_header(directory / exit_head.WEIGHTS)
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in ExitHead(geometry, exit_config).named_parameters()}
    for name, shape in wanted.items():
        if name not in stored or stored[name].shape != shape:
            raise EESDError(f"The exit head in {directory} has no tensor {name} of shape {list(shape)}; it is damaged.")
    return {name: stored[name] for name in wanted}
