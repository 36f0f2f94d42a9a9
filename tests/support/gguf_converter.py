"""Writes transformers' random models as GGUF files. Names come from the ``gguf`` library, and a
:class:`Conversion` says what llama.cpp's converter changes in the tensors of an architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.gguf_files import TOKENIZER, VOCABULARY, add_metadata, finish, stored
from support.tiny_checkpoints import randomise

Changed = Mapping[str, torch.Tensor]
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata and the fields of a config that they are written from."""


def unchanged(name: str, tensor: torch.Tensor, _: Any) -> Changed:
    """Return the tensor as it is, except for experts, which files have in three tensors."""
    if not name.endswith(".experts.gate_up_proj"):
        return {name: tensor}
    before = name.removesuffix("gate_up_proj")
    gate, up = tensor.chunk(2, 1)
    return {f"{before}gate_proj": gate, f"{before}up_proj": up}


@dataclass(frozen=True)
class Conversion:
    """A random model and its file.

    Attributes:
        architecture: ``general.architecture``.
        model_type: The model type in transformers.
        options: The config.
        metadata: Keys of the architecture that are not written from the config. A key is left out
            if its value is None.
        change: Returns the tensors that are written for a tensor of the model, by names in
            transformers.
        smaller: Subtracted from the weights of most norms, because the model adds it.
        extra: Tensors that the file has in addition, by their names in the file.
        names: Names in a file that the library does not map, by endings of names in transformers.
    """

    architecture: str
    model_type: str
    options: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[str, torch.Tensor, Any], Changed] = unchanged
    smaller: float = 0.0
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def random_model(conversion: Conversion, seed: int = 0) -> Any:
    """Return a model of transformers."""
    config = AutoConfig.for_model(
        conversion.model_type, **{"vocab_size": len(VOCABULARY)} | dict(conversion.options)
    )
    model: Any = AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # type: ignore[no-untyped-call]
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") and ".linear_attn." not in name:
            parameter.data -= conversion.smaller
    return model.eval()


def convert(
    path: Path, conversion: Conversion, model: Any, types: Mapping[str, str] | None = None
) -> Path:
    """Write a model to a file. ``types`` has types of matrices by parts of their names in the file.
    Such matrices have other random values than the model's."""
    config = model.config
    sizes = {key: conversion.options.get(name) for key, name in _SIZES.items()}
    rope = conversion.options.get("rope_parameters", {})
    own = sizes | {"rope.freq_base": rope.get("rope_theta")} | dict(conversion.metadata)
    metadata = {f"{conversion.architecture}.{key}": value for key, value in own.items()}
    writer = gguf.GGUFWriter(path, conversion.architecture)
    add_metadata(writer, metadata | TOKENIZER)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    tensors = dict(conversion.extra)
    for name, tensor in state.items():
        for changed, values in conversion.change(name, tensor, config).items():
            tensors[_name(conversion, changed, config.num_hidden_layers)] = values
    for name, values in tensors.items():
        _add(writer, name, values, types or {})
    finish(writer)
    return path


def _name(conversion: Conversion, name: str, layers: int) -> str:
    """Return the name of a tensor in the file."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    for ending, own in conversion.names.items():
        if name.endswith(ending):
            return own.format(layer=layer)
    [architecture] = (
        key for key, one in gguf.MODEL_ARCH_NAMES.items() if one == conversion.architecture
    )
    found = gguf.get_tensor_name_map(architecture, layers).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found if found.endswith((".weight", ".bias", "ssm_a")) else f"{found}.weight"


def _add(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, types: Mapping[str, str]
) -> None:
    values = tensor.float().contiguous().numpy()
    raw = None
    kind = next((types[part] for part in types if part in name), None)
    if kind and values.ndim > 1:
        values, raw = stored(np.random.default_rng(len(name)), name, values.shape, kind)
    writer.add_tensor(name, values, raw_dtype=raw)
