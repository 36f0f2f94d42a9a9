"""Open checkpoints. A checkpoint has a configuration and tensors, each of which is read only on
demand."""

import hashlib
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np

from eesd.common.checks import is_file_name
from eesd.common.draft_vocab import Ids, are_draft_vocab
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.json_input import read_json_object
from eesd.common.quantization import LM_HEAD, MXFP4, Quantization, is_linear
from eesd.common.weights import (
    DRAFT_VOCAB,
    EMBEDDINGS,
    exit_head_shapes,
    layer_shapes,
    lm_head_name,
    model_shapes,
)
from eesd.model.arrays import Array, equal
from eesd.model.config import REMEDY, ModelConfig, load_config, parse_config
from eesd.model.exit_head_file import WEIGHTS_FILE
from eesd.model.experts import check_routers
from eesd.model.family import ConfigTensor, Tensors, divided, halves_apart
from eesd.model.fields import Fields
from eesd.model.gguf_file import GgufTensor, read_gguf
from eesd.model.gguf_model import config_fields, drafter_blocks, model_tensors
from eesd.model.initial_head import check_exit
from eesd.model.packed import PackedTensor, packed_tensors
from eesd.model.safetensors_file import CheckpointTensor, read_header
from eesd.model.text_part import text_tensors


class Checkpoint:
    """A Hugging Face model directory with safetensors weights (in one file or in shards), or a GGUF
    file.

    Opening it reads ``config.json`` and the headers of the weight files, and checks the shapes.

    Args:
        path: The model directory or the GGUF file.

    Attributes:
        path: The model directory or the GGUF file.
        config: Configuration of the whole checkpoint.
        geometry: Geometry of the layers in use. These are all layers, or the layers that
            :meth:`first_layers` kept.
        tensors: Every tensor of the weight files, by name.

    Raises:
        EESDError: The checkpoint is incomplete, damaged or not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config, stored = _open_file(path) if path.is_file() else _open_directory(path)
        geometry = config.geometry
        self.tensors = _decoder_tensors(config, stored, path.is_file())
        if geometry.tied_embeddings:
            geometry = replace(geometry, tied_embeddings=self._tie())
        self._check_shapes(geometry)
        check_routers(path, self.tensors, geometry)
        self.config = replace(
            config, geometry=geometry, notices=(*config.notices, *self._notices(geometry))
        )
        self.geometry = geometry

    def _tie(self) -> bool:
        """Whether the embeddings and the LM head are one tensor according to the config. If only
        one of the two tensors is stored, it is used in both places.

        If two different tensors are stored, the config is wrong. Both tensors are then used, as in
        transformers.
        """
        table = self.tensors.get(EMBEDDINGS)
        head = self.tensors.get(LM_HEAD)
        if table is None and head is not None:
            self.tensors[EMBEDDINGS] = head
        if table is None or head is None:
            return True
        return equal(table.read(), head.read())

    def _check_shapes(self, geometry: Geometry) -> None:
        for name, shape in model_shapes(geometry).items():
            tensor = self.tensors.get(name)
            if tensor is None:
                raise EESDError(
                    f"The checkpoint {self.path} has no tensor {name}; it is incomplete, "
                    "fetch it again."
                )
            if tensor.shape != shape:
                source = "its metadata" if self.path.is_file() else "config.json"
                raise EESDError(
                    f"The tensor {name} of {self.path} has shape {list(tensor.shape)}, but "
                    f"{source} requires {list(shape)}; "
                    "weights and config belong to different models."
                )
            _ = tensor.dtype  # raises for unreadable types

    def _notices(self, geometry: Geometry) -> list[str]:
        """Return a sentence about the tensors that the architecture does not use, if there are
        any."""
        unused = sorted(self.tensors.keys() - model_shapes(geometry).keys())
        if any(isinstance(tensor, PackedTensor) for tensor in self.tensors.values()):
            biases = {name: self.tensors[name] for name in unused if name.endswith("_proj.bias")}
            _check_biases(
                tensor for tensor in biases.values() if isinstance(tensor, CheckpointTensor)
            )
            unused = [name for name in unused if name not in biases]
        unused = [
            name for name in unused if name != LM_HEAD and not name.endswith("rotary_emb.inv_freq")
        ]
        if not unused:
            return []
        names = ", ".join(unused[:3])
        if len(unused) > 3:
            names += f" and {len(unused) - 3} more"
        if self.path.is_file():  # llama.cpp may use them
            raise EESDError(
                f"{self.path} has the tensors {names}, which are not supported for "
                f"{geometry.architecture}."
            )
        return [f"{geometry.architecture} has no tensors {names}; ignored, as transformers does."]

    @property
    def dtype(self) -> str:
        """Element type of the checkpoint, such as ``bfloat16``. If the config does not have it, it
        is the type of the embeddings."""
        return self.config.dtype or self.tensors[EMBEDDINGS].dtype

    @property
    def quantization(self) -> Quantization | None:
        """The quantization that keeps the levels of the layers' linear weights, or None if these
        weights have no levels.

        It is also None if only some of these weights have levels, or if engines do not support the
        levels. All weights are then dequantized when they are read.
        """
        if self.config.packing is None:
            return None
        shapes = layer_shapes(self.geometry, range(self.geometry.num_layers))
        linear = {name: shape[1] for name, shape in shapes.items() if is_linear(name)}
        found = self.config.packing.quantization(set(linear.values()))
        stored = [self.tensors[name] for name in linear]
        keeps = found is not None and all(
            isinstance(one, PackedTensor) and one.fits(found) for one in stored
        )
        return found if keeps else None

    @property
    def own_levels(self) -> dict[str, Quantization]:
        """The quantizations that keep the levels of single tensors, by the names of these tensors.
        Such tensors are in GGUF files, or are experts in MXFP4.

        The embedding table gets 8-bit levels, because ONNX Runtime cannot gather rows of other
        levels.
        """
        tensors = {name: self.tensors[name] for name in model_shapes(self.geometry)}
        own = {
            name: tensor.quantization
            for name, tensor in tensors.items()
            if isinstance(tensor, GgufTensor | PackedTensor)
            if is_linear(name) or name == EMBEDDINGS
        }
        kept = {name: one for name, one in own.items() if one is not None}
        if not kept.get(EMBEDDINGS, MXFP4).integers:  # levels that 8-bit integers cannot hold
            kept.pop(EMBEDDINGS, None)
        return {
            name: replace(one, weights="int8") if name == EMBEDDINGS else one
            for name, one in kept.items()
        }

    def first_layers(self, count: int) -> "Checkpoint":
        """Return the same checkpoint reduced to its first ``count`` layers, for a trial export.

        The fingerprint is still the whole model's, so exit heads that were trained for the model
        fit.

        Raises:
            EESDError: ``count`` is not between 2 and the number of layers.
        """
        most = self.geometry.num_layers
        if not 2 <= count <= most:
            raise EESDError(
                f"--layers must be between 2 and {most} for this {most}-layer model; {count} "
                "was given."
            )
        reduced = copy(self)
        reduced.geometry = replace(self.geometry, num_layers=count)
        return reduced

    def fingerprint(self) -> str:
        """Return the SHA-256 of the name, the shape, the type and the first kilobyte of every
        tensor. It does not depend on the sharding."""
        digest = hashlib.sha256()
        for name in sorted(model_shapes(self.config.geometry)):
            tensor = self.tensors[name]
            # Stored heads have fingerprints of exactly this text.
            digest.update(f"{name} {tensor.shape} torch.{tensor.dtype}".encode())
            digest.update(tensor.head())
        return digest.hexdigest()

    def lm_head(self) -> Array:
        """Read the LM head's weight [V, hidden] in its stored type."""
        return self.tensors[lm_head_name(self.geometry)].read()


def _open_directory(directory: Path) -> tuple[ModelConfig, Tensors]:
    """Return the configuration and the tensors of a Hugging Face model directory."""
    if not directory.is_dir():
        raise EESDError(
            f"{directory} is not a directory; give a Hugging Face model directory or a GGUF file."
        )
    config = load_config(directory)
    stored = stored_tensors(directory)
    if config.whole:
        stored = text_tensors(stored)
    if config.packing is None:
        return config, dict(stored)
    return config, dict(packed_tensors(stored, config.packing))


def _open_file(path: Path) -> tuple[ModelConfig, Tensors]:
    """Return the configuration and the tensors of a GGUF file."""
    file = read_gguf(path)
    fields = config_fields(file)
    config = parse_config(Fields(fields), path)
    if drafter_blocks(file, fields):
        notice = "the blocks of the model's own drafter (nextn_predict_layers) are left out."
        config = replace(config, notices=(*config.notices, f"{path.name}: {notice}"))
    return config, dict(model_tensors(file, fields))


def _decoder_tensors(config: ModelConfig, stored: Tensors, is_gguf: bool) -> Tensors:
    """Return the tensors with the names, shapes and values that the decoder expects."""
    family = config.family
    geometry = config.geometry
    make = family.tensors
    interleaved = family.interleaved
    if is_gguf and family.gguf is not None:
        make = family.gguf.tensors or make
        interleaved = family.gguf.interleaved
    made = divided(halves_apart(make(stored, geometry), geometry, interleaved), config.divided)
    return made | {name: ConfigTensor(name, values) for name, values in config.values.items()}


def _check_biases(biases: Iterable[CheckpointTensor]) -> None:
    """Check that biases unknown to the architecture are zero. Some quantizers store them for every
    layer."""
    for bias in biases:
        if bias.read().any():
            raise EESDError(
                f"{bias.path}: the architecture has no {bias.name}, and it is not zero; it is "
                "not supported."
            )


def stored_tensors(directory: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors in a directory's safetensors files. If several files have the same tensor,
    the index says which file to use.

    Raises:
        EESDError: A file is missing, damaged or in another format, or the index does not decide
            between two tensors.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():  # wins over an index, as in transformers
        return read_header(directory / "model.safetensors")
    if not index.is_file():
        raise EESDError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "only safetensors checkpoints are supported."
        )
    shards = read_json_object(index, REMEDY).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise EESDError(
            f"{index} is damaged: it has no weight_map of file names; fetch the file again."
        )
    if not all(is_file_name(shard) for shard in shards.values()):
        raise EESDError(f"{index} names a file outside of its directory; fetch the file again.")
    stored: dict[str, CheckpointTensor] = {}
    for shard in sorted(set(shards.values())):
        for name, tensor in read_header(directory / shard).items():
            if name in stored and shards.get(name) not in (stored[name].path.name, shard):
                raise EESDError(
                    f"{index} does not say which file's {name} counts, and two have one; "
                    "fetch the files again."
                )
            if name not in stored or shards[name] == shard:
                stored[name] = tensor
    return stored


def exit_head_tensors(
    geometry: Geometry, exit_config: ExitConfig, directory: Path
) -> dict[str, CheckpointTensor]:
    """Find the weights of a stored exit head, and check their shapes.

    Args:
        geometry: Geometry of the base model.
        exit_config: Configuration of the head.
        directory: Directory of the head.

    Raises:
        EESDError: A tensor is missing or has another shape, or the model cannot have such a head.
    """
    check_exit(geometry, exit_config)
    stored = read_header(directory / WEIGHTS_FILE)
    shapes = exit_head_shapes(geometry, exit_config)
    for name, shape in shapes.items():
        if name not in stored or stored[name].shape != shape:
            raise EESDError(
                f"The exit head in {directory} has no tensor {name} of shape {list(shape)}; "
                "it is damaged."
            )
    return {name: stored[name] for name in shapes if name != DRAFT_VOCAB}


def stored_draft_vocab(geometry: Geometry, exit_config: ExitConfig, directory: Path) -> Ids:
    """Read the ids of a stored head's draft vocabulary [Vd], int64, ascending. Raises EESDError for
    any other content."""
    tensor = read_header(directory / WEIGHTS_FILE)[DRAFT_VOCAB]
    fits = tensor.stored == "I32" and tensor.nbytes == 4 * exit_config.draft_vocab
    ids = tensor.read_bytes().view(np.int32) if fits else np.zeros(2, np.int32)
    if not are_draft_vocab(ids, geometry.vocab_size):
        raise EESDError(
            f"The exit head in {directory} has a damaged {DRAFT_VOCAB}; train it again."
        )
    return ids.astype(np.int64)
