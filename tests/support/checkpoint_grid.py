"""Random checkpoints that cover the variations of configs and weight files of the supported
families."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eesd.model.families import FAMILIES

LAYERS = 3
HIDDEN = 32
INNER = 40
VOCABULARY = 61
POSITIONS = 96
ORIGINAL = 24
"""The number of original positions in configurations with scaling. The texts of the tests are
longer."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LONG_FACTORS = [1.0 + i for i in range(8)]

ROPES: dict[str, dict[str, Any]] = {
    "none": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-type": {"type": "linear", "factor": 2},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3-positions": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-type": {"type": "yarn", "factor": 4, "original_max_position_embeddings": ORIGINAL},
    "yarn-positions": {"rope_type": "yarn", "factor": 2.5},
    "yarn-ratio": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn-exact": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "truncate": False,
    },
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.7,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": LONG_FACTORS,
        "long_factor": LONG_FACTORS,
        "original_max_position_embeddings": ORIGINAL,
    },
}
ROPE_PLACES = ("rope_parameters", "rope_scaling", "both", "conflict")
TIES = ("no", "no", "tied", "tied-stored", "tied-different", "tied-head-only")
FLAGS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "sliding_window": (None, 5, 16),
    "use_sliding_window": (False, True),
    "max_window_layers": (0, 2, 3),
    "hidden_act": ("silu", "swish", "gelu"),
    "pretraining_tp": (1, 2),
    "attention_dropout": (0.0, 0.5),
    "partial_rotary_factor": (0.5, 1.0),
    "original_max_position_embeddings": (ORIGINAL, 48),
    "initializer_range": (0.02,),
    "rope_interleaved": (True,),
    "logit_scale": (0.5,),
    "attention_chunk_size": (8, None),
    "layer_types": (["full_attention"] * LAYERS, ["sliding_attention"] * LAYERS),
    "text_config": ({"hidden_size": 8},),
    "per_layer_config": ({"0": {"head_dim": 8}},),
    "quantization_config": ({"quant_method": "gptq", "bits": 4},),
    "torch_dtype": ("float32",),
    "architectures": (None, ["LlamaForCausalLM"], ["GPT2LMHeadModel"]),
}
FILES = ("one", "sharded", "one-and-other-shards")


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        family: The ``model_type``.
        config: The ``config.json``.
        dtype: Type of the weights.
        tie: How the embeddings and the LM head are stored (one of :data:`TIES`).
        files: How the weights are stored (one of :data:`FILES`).
        odd_tensors: Whether there are tensors unknown to the architecture, including an integer
            tensor.
        seed: Seed of the weights.
    """

    family: str
    config: dict[str, Any]
    dtype: torch.dtype
    tie: str
    files: str
    odd_tensors: bool
    seed: int
    described: str = field(compare=False)

    def write(self, directory: Path) -> Path:
        """Write the checkpoint. The files depend only on the case."""
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        tensors = {
            name: value.to(self.dtype).contiguous() for name, value in self._tensors().items()
        }
        if self.odd_tensors:
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
            tensors["model.position_ids"] = torch.arange(8)
        if self.files == "one":
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})
            return directory
        names = sorted(tensors)
        shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
        for file, part in shards.items():
            # The shards have other values, so a reader of the shards would get another model.
            changed = 1.25 if self.files != "sharded" else 1.0
            save_file(
                {name: _scaled(tensors[name], changed) for name in part},
                directory / file,
                {"format": "pt"},
            )
        index = {
            "metadata": {},
            "weight_map": {name: file for file, part in shards.items() for name in part},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        if self.files != "sharded":
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory

    def _tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, generator=generator) * 1.5 / sqrt(inputs)

        def vector(size: int, mean: float) -> Tensor:
            return mean + 0.3 * torch.randn(size, generator=generator)

        config = self.config
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or HIDDEN // config["num_attention_heads"]
        kv = config.get("num_key_value_heads") or heads
        tensors = {
            "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
            "model.norm.weight": vector(HIDDEN, 1),
        }
        shapes = {
            "self_attn.q_proj": (heads * size, HIDDEN),
            "self_attn.k_proj": (kv * size, HIDDEN),
            "self_attn.v_proj": (kv * size, HIDDEN),
            "self_attn.o_proj": (HIDDEN, heads * size),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for layer in range(LAYERS):
            for name, (outputs, inputs) in shapes.items():
                tensors[f"model.layers.{layer}.{name}.weight"] = matrix(outputs, inputs)
                if self._has_bias(name) or self.odd_tensors:
                    tensors[f"model.layers.{layer}.{name}.bias"] = vector(outputs, 0)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = vector(HIDDEN, 1)
            if self.family == "qwen3" or self.odd_tensors:
                for name in ("q_norm", "k_norm"):
                    tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = vector(size, 1)
        return tensors | self._head(
            tensors["model.embed_tokens.weight"], matrix(VOCABULARY, HIDDEN), tensors
        )

    def _head(self, table: Tensor, other: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.tie == "tied":
            return {}
        if self.tie == "tied-head-only":
            del tensors["model.embed_tokens.weight"]
        return {"lm_head.weight": other if self.tie in ("no", "tied-different") else table.clone()}

    def _has_bias(self, name: str) -> bool:
        if name.startswith("mlp."):
            return self.family == "llama" and bool(self.config.get("mlp_bias"))
        if self.family == "qwen2":
            return not name.endswith("o_proj")
        return self.family in ("llama", "qwen3") and bool(self.config.get("attention_bias"))


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return (
        tensor
        if factor == 1 or not tensor.is_floating_point()
        else (tensor * factor).to(tensor.dtype)
    )


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yields ``count`` random cases. Each case has only a few variations, so that most cases can be
    exported."""
    for number in range(count):
        yield _case(random.Random(f"{seed}-{number}"), number)


def _case(rng: random.Random, seed: int) -> Case:
    family = rng.choice(("llama", "mistral", "qwen2", "qwen3"))
    tie = rng.choice(TIES)
    heads, kv, size = rng.choice(
        ((4, 4, None), (4, 2, None), (4, 1, None), (2, 2, 16), (4, 2, 12), (4, 2, 8), (1, 1, None))
    )
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": rng.choice((1e-3, 1e-5, 1e-6)),
        "tie_word_embeddings": tie != "no",
        "bos_token_id": 1,
        "eos_token_id": rng.choice((2, [2, 5], None)),
    }
    if size is not None or family == "qwen3":
        config["head_dim"] = size or HIDDEN // heads
    if kv == heads and rng.random() < 0.3:
        config["num_key_value_heads"] = None
    if family == "mistral":
        config["sliding_window"] = rng.choice((None, None, 16))
    rope = rng.choice(list(ROPES))
    place = rng.choice(ROPE_PLACES)
    config |= _rope(rng, rope, place)
    flags = rng.sample(list(FLAGS), rng.choice((0, 0, 1, 2, 3)))
    config |= {name: rng.choice(FLAGS[name]) for name in flags}
    files = rng.choice(FILES)
    odd = rng.random() < 0.2
    described = (
        f"{seed}: {family} {heads}/{kv}/{size} rope={rope}@{place} tie={tie} {files} odd={odd} "
        f"{sorted(flags)}"
    )
    return Case(family, config, rng.choice(DTYPES), tie, files, odd, seed, described)


def _rope(rng: random.Random, name: str, place: str) -> dict[str, Any]:
    rope = ROPES[name]
    theta = rng.choice((None, 500.0, 1e6))
    values = rope | ({"rope_theta": theta} if theta and rng.random() < 0.5 else {})
    top = {"rope_theta": theta} if theta and "rope_theta" not in values else {}
    if place == "conflict":
        other = ROPES[rng.choice(("linear", "yarn", "llama3"))] | {"rope_theta": 777.0}
        return top | {"rope_parameters": other, "rope_scaling": values}
    return top | dict.fromkeys(
        ("rope_parameters", "rope_scaling") if place == "both" else (place,), values
    )
