"""Tiny random Hugging Face checkpoints, one for each kind of supported model."""

import json
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from eesd.model.checkpoint import Checkpoint
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.loading import load_decoder

GEOMETRY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # far from every default, so that ignoring it changes the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """A model type of transformers, and the options that differ from :data:`GEOMETRY`."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard_size: str | None = None


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # A short text exceeds the original positions, and the fastest rotary frequency stays unscaled.
    "original_max_position_embeddings": 64,
}

FAMILIES = {
    family.name: family
    for family in (
        Family("llama2", "llama", {"num_key_value_heads": 4}, dtype=torch.float16),
        Family(
            "llama3",
            "llama",
            {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
            dtype=torch.bfloat16,
        ),
        Family("llama-linear", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        Family("codellama", "llama", {"rope_theta": 1e6, "vocab_size": 128}, shard_size="100KB"),
        Family("llama-tied", "llama", {"tie_word_embeddings": True}),
        Family("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
        Family("llama-head-dim", "llama", {"head_dim": 24, "num_hidden_layers": 4}),
        Family("mistral", "mistral", {"sliding_window": None, "num_key_value_heads": 1}),
        Family("mistral-window", "mistral", {"sliding_window": 32}),
        Family("qwen2", "qwen2", {"rope_theta": 1e6}),
        Family(
            "qwen2.5-tied",
            "qwen2",
            {"rope_theta": 1e6, "tie_word_embeddings": True, "num_hidden_layers": 4},
        ),
        Family("qwen3", "qwen3", {"rope_theta": 1e6, "head_dim": 32, "tie_word_embeddings": True}),
        Family(
            "lfm2",
            "lfm2",
            {
                "layer_types": ["conv", "full_attention", "conv", "full_attention"],
                "num_hidden_layers": 4,
                "num_key_value_heads": 1,
                "block_auto_adjust_ff_dim": False,
                "norm_eps": 1e-3,
            },
        ),
        Family(
            "gemma4",
            "gemma4_text",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 1,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "global_head_dim": 32,
                "sliding_window": 32,
                "vocab_size_per_layer_input": 97,
                "hidden_size_per_layer_input": 12,
                "use_double_wide_mlp": True,
                "tie_word_embeddings": True,
            },
        ),
        Family("qwen3-bias", "qwen3", {"head_dim": 16, "attention_bias": True}),
    )
}


def build(family: Family, directory: Path, seed: int = 0) -> Path:
    """Write a checkpoint of the family with random weights. The same seed gives the same
    weights."""
    config = AutoConfig.for_model(family.model_type, **(GEOMETRY | family.options))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomise(model, seed)
    extra = {"max_shard_size": family.shard_size} if family.shard_size else {}
    model.to(family.dtype).save_pretrained(directory, **extra)
    return directory


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Set all parameters and stored biases to random values. If the norm weights were one and the
    biases zero, a test could not detect whether they are applied."""
    generator = torch.Generator().manual_seed(seed)
    biases = ((name, one) for name, one in model.named_buffers() if name.endswith("bias"))
    for name, parameter in (*model.named_parameters(), *biases):
        if parameter.dim() == 1:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        else:
            parameter.normal_(0.0, 1.5 / sqrt(parameter.shape[-1]), generator=generator)


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file. A key that is set to ``...`` is removed."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


@torch.no_grad()
def decoder_logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits [1, T, V] that this project's decoder computes for token ids [1, T]."""
    geometry = checkpoint.geometry
    count = ids.shape[1]
    caches = empty_caches(geometry, 1, count)
    inputs = causal_inputs(geometry, 1, count, count)
    logits: torch.Tensor = load_decoder(checkpoint)(ids, inputs, caches)[0]
    return logits
