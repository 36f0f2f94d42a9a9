"""Random small checkpoints of the families that differ from Llama in some parts. transformers
writes them."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.tiny_checkpoints import randomise

VOCABULARY = 61
POSITIONS = 96
ORIGINAL = 40
Options = dict[str, Any]
SMALL: Options = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The sizes of a small model for tests of a family's parts. Each family sets ``intermediate_size``
itself."""


@dataclass(frozen=True)
class FamilyCase:
    """A random config of a model type. The seed determines the weights."""

    model_type: str
    options: Options
    seed: int

    def write(self, directory: Path) -> Path:
        """Write the model with ``save_pretrained``."""
        config = AutoConfig.for_model(self.model_type, **self.options)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        randomise(model, self.seed)
        if self.model_type == "gemma4_text":
            for layer in model.model.layers:
                layer.layer_scalar.fill_(random.Random(self.seed).choice((1.0, 0.75, -0.5)))
                layer.self_attn.q_norm.weight.data *= 0.2  # no other factor scales the scores
        elif "gemma" in self.model_type or "linear" in str(self.options.get("layer_types")):
            for name, parameter in model.named_parameters():  # stores its norms minus 1
                less = name.endswith("norm.weight") and ".linear_attn." not in name
                parameter.data -= float(less)
        shard = random.Random(-self.seed).choice(("1GB", "20KB"))
        dtype = random.Random(self.seed).choice((torch.float32, torch.bfloat16, torch.float16))
        model.to(dtype).save_pretrained(
            directory, max_shard_size="1GB" if self.has_levels else shard
        )
        if self.has_levels:
            with_levels(directory)
        return directory

    @property
    def has_levels(self) -> bool:
        """Whether the experts are stored with MXFP4 levels, which come in blocks of 32."""
        sizes = (self.options[name] for name in ("hidden_size", "intermediate_size"))
        return self.model_type == "gpt_oss" and not any(size % 32 for size in sizes)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def with_levels(directory: Path) -> None:
    """Store the experts of a gpt-oss model as 4-bit levels and exponents, as in the published
    files."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            weight = tensors.pop(name).float().transpose(1, 2)
            blocks = weight.reshape(*weight.shape[:2], -1, 32)
            exponents = (blocks.abs().amax(-1).clamp_min(1e-9) / 6).log2().ceil()
            scaled = blocks / torch.exp2(exponents)[..., None]
            codes = (scaled[..., None] - FP4).abs().argmin(-1)
            tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).byte()
            tensors[f"{name}_scales"] = (exponents + 127).byte()
        save_file(tensors, file, {"format": "pt"})


def family_cases(model_type: str, count: int, seed: int) -> list[FamilyCase]:
    """Returns ``count`` random cases of a family."""
    found = []
    for number in range(count):
        rng = random.Random(f"{model_type}-{seed}-{number}")
        options = _sizes(rng)
        options |= OPTIONS[model_type](rng, options)
        found.append(FamilyCase(model_type, options, seed * 1000 + number))
    return found


def _sizes(rng: random.Random) -> Options:
    heads, kv, size = rng.choice(
        ((4, 4, 8), (4, 2, 8), (4, 1, 8), (2, 2, 16), (3, 1, 12), (1, 1, 32), (6, 3, 6))
    )
    layers = rng.choice((2, 3, 5))
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * size,
        "intermediate_size": rng.choice((40, 37, 64)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": rng.choice((1e-3, 1e-5, 1e-6)),
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": rng.choice((2, [2, 5])),
        "pad_token_id": None,  # transformers masks it in prompts
    }


def _biases(rng: random.Random, *names: str) -> Options:
    return {name: rng.random() < 0.3 for name in names}


def _rope(rng: random.Random) -> Options:
    """Returns the options of a random rotary embedding for families with Llama's scalings."""
    theta = {"rope_theta": rng.choice((500.0, 10000.0, 1e6))}
    scalings: list[Options] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
        {"rope_type": "dynamic", "factor": 2.0},
    ]
    return {"rope_parameters": rng.choice(scalings) | theta}


def _phi3(rng: random.Random, sizes: Options) -> Options:
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    part = rng.choice([part for part in (1.0, 0.75, 0.5) if int(size * part) % 2 == 0])
    rope: Options = {
        "rope_type": "default",
        "partial_rotary_factor": part,
        "rope_theta": rng.choice((10000.0, 500.0)),
    }
    options: Options = {"sliding_window": rng.choice((None, None, 50))}
    if rng.random() < 0.5:
        factors = [[1.0 + rng.random() for _ in range(int(size * part) // 2)] for _ in range(2)]
        rope |= {
            "rope_type": "longrope",
            "short_factor": factors[0],
            "long_factor": [4 * one for one in factors[1]],
        }
        options["original_max_position_embeddings"] = ORIGINAL
    return options | {"rope_parameters": rope}


def _granite(rng: random.Random, _: Options) -> Options:
    return (
        _rope(rng)
        | _biases(rng, "attention_bias", "mlp_bias")
        | {
            "embedding_multiplier": rng.choice((1.0, 12.0, 0.3)),
            "attention_multiplier": rng.choice((1.0, 0.0625, 0.3)),
            "residual_multiplier": rng.choice((1.0, 0.22, 0.5)),
            "logits_scaling": rng.choice((1.0, 8.0, 3.0)),
        }
    )


def _smollm3(rng: random.Random, sizes: Options) -> Options:
    layers = sizes["num_hidden_layers"]
    rotates = rng.choice((None, [rng.randrange(2) for _ in range(layers)], [1] * layers))
    window = rng.choice((None, None, 30))
    return (
        _rope(rng)
        | _biases(rng, "attention_bias", "mlp_bias")
        | {
            "no_rope_layers": rotates,
            "no_rope_layer_interval": rng.choice((2, 3, 4)),
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
    )


def _olmo2(rng: random.Random, _: Options) -> Options:
    return _rope(rng) | _biases(rng, "attention_bias")


def _kinds(rng: random.Random, sizes: Options) -> list[str]:
    return [
        rng.choice(("full_attention", "sliding_attention"))
        for _ in range(sizes["num_hidden_layers"])
    ]


def _olmo3(rng: random.Random, sizes: Options) -> Options:
    kinds = _kinds(rng, sizes)
    full = _rope(rng)["rope_parameters"]
    ropes = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice((500.0, 5e5))},
    }
    window = {"sliding_window": rng.choice((9, 30)), "layer_types": rng.choice((None, kinds))}
    return {"rope_parameters": rng.choice((ropes, None))} | window | _biases(rng, "attention_bias")


def _gemma(rng: random.Random, sizes: Options) -> Options:
    kinds = _kinds(rng, sizes)
    return _biases(rng, "attention_bias") | {
        "head_dim": rng.choice((8, 16)),
        "query_pre_attn_scalar": rng.choice((8, 16, 50)),
        "sliding_window": rng.choice((9, 30, 200)),
        "layer_types": rng.choice((None, kinds)),
        "final_logit_softcapping": rng.choice((None, 2.0, 30.0)),
        "attn_logit_softcapping": rng.choice((None, 2.0, 50.0)),
    }


def _gemma2(rng: random.Random, sizes: Options) -> Options:
    return _rope(rng) | _gemma(rng, sizes)


def _gemma3(rng: random.Random, sizes: Options) -> Options:
    full = rng.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}))
    thetas = rng.choice(((1e6, 10000.0), (500.0, 100.0)))
    ropes = {
        "full_attention": full | {"rope_theta": thetas[0]},
        "sliding_attention": {"rope_type": "default", "rope_theta": thetas[1]},
    }
    return {"rope_parameters": ropes} | _gemma(rng, sizes)


def _gemma4(rng: random.Random, sizes: Options) -> Options:
    """Returns the options of one of four kinds. The first kind has per-layer inputs and shared
    caches, the second is dense and its values equal its keys, and the third has experts next to the
    MLP. These three are published. The fourth kind combines options that no published model
    combines."""
    layers = rng.choice((3, 5, 7))
    heads = sizes["num_attention_heads"]
    kind = rng.choice(("inputs", "dense", "experts", "any"))
    types = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    full = {"rope_type": "proportional", "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0))}
    ropes = {
        "full_attention": rng.choice((full, full, {"rope_type": "default"}))
        | {"rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    own: Options = {
        "num_hidden_layers": layers,
        "layer_types": rng.choice((types, None)),
        "sliding_window": rng.choice((5, 9, 50)),
        "head_dim": rng.choice((6, 8, 16)),
        "global_head_dim": rng.choice((8, 12, 16, 24)),
        "rope_parameters": rng.choice((ropes, ropes, None)),
        "attention_bias": kind == "any" and rng.random() < 0.5,
        "final_logit_softcapping": rng.choice((None, 2.0, 30.0)),
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": rng.choice((4, 12)) if kind in ("inputs", "any") else 0,
        "use_double_wide_mlp": rng.random() < 0.5,
        "attention_k_eq_v": kind in ("dense", "experts") or rng.random() < 0.3,
        "num_global_key_value_heads": rng.choice([one for one in (1, heads, None) if one]),
    }
    if kind in ("inputs", "any"):
        own |= {"layer_types": ["sliding_attention", "full_attention", *types[2:]]}
        own |= {"num_kv_shared_layers": rng.choice((0, 1, layers - 2))}
    if kind in ("experts", "any"):
        count, used = _experts(rng)
        own |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": used}
        own |= {"moe_intermediate_size": rng.choice((8, 13, 32))}
    return own


def _experts(rng: random.Random) -> tuple[int, int]:
    """Returns the number of experts in a layer, and the number of experts that a token uses."""
    return rng.choice(((3, 2), (4, 1), (5, 5), (6, 2), (17, 3)))


def _mixtral(rng: random.Random, _: Options) -> Options:
    count, used = _experts(rng)
    own = {"sliding_window": rng.choice((None, 50)), "head_dim": rng.choice((6, 16))}
    return _rope(rng) | own | {"num_local_experts": count, "num_experts_per_tok": used}


def _qwen3_moe(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    layers = sizes["num_hidden_layers"]
    window = rng.choice((None, 50))
    return (
        _rope(rng)
        | _biases(rng, "attention_bias", "norm_topk_prob")
        | {
            "num_local_experts": rng.choice((count, count, 0)),
            "num_experts_per_tok": used,
            "moe_intermediate_size": rng.choice((8, 13, 32)),
            "decoder_sparse_step": rng.choice((1, 1, 2)),
            "mlp_only_layers": rng.choice((None, [], [0], [layers - 1, 7])),
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "head_dim": rng.choice((6, 16)),
        }
    )


def _hunyuan(rng: random.Random, sizes: Options) -> Options:
    larger = {
        "rope_type": "dynamic",
        "alpha": rng.choice((2.0, 1000.0)),
        "factor": 1.0,
        "beta_fast": 32,
        "rope_theta": 500.0,
    }
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    rope = {"rope_parameters": larger} if rng.random() < 0.5 else _rope(rng)
    return rope | _biases(rng, "attention_bias") | {"head_dim": rng.choice((size, 16))}


def _as_llama(rng: random.Random, sizes: Options) -> Options:
    bias = rng.random() < 0.5
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    return _rope(rng) | {"attention_bias": bias, "mlp_bias": bias, "head_dim": size}


def _lfm2(rng: random.Random, sizes: Options) -> Options:
    layers = sizes["num_hidden_layers"]
    attends = sorted(rng.sample(range(layers), rng.randint(2, layers)))
    types = ["full_attention" if layer in attends else "conv" for layer in range(layers)]
    said = rng.choice(({"layer_types": types}, {"full_attn_idxs": attends}))
    return (
        _rope(rng)
        | said
        | {
            "conv_L_cache": rng.choice((3, 3, 1, 2, 4)),
            "norm_eps": rng.choice((1e-3, 1e-5)),
            "block_auto_adjust_ff_dim": rng.random() < 0.5,
            "block_ffn_dim_multiplier": rng.choice((1.0, 1.3)),
            "block_multiple_of": rng.choice((1, 16)),
        }
    )


def _gemma1(rng: random.Random, _: Options) -> Options:
    activation = rng.choice(("gelu", "gelu_pytorch_tanh", "silu"))
    own = {"hidden_act": activation, "head_dim": rng.choice((8, 16))}
    return _rope(rng) | _biases(rng, "attention_bias") | own


def _seed_oss(rng: random.Random, _: Options) -> Options:
    biases = _biases(rng, "attention_bias", "attention_out_bias", "mlp_bias")
    return _rope(rng) | biases | {"head_dim": rng.choice((8, 16)), "residual_dropout": 0.1}


def _exaone4(rng: random.Random, sizes: Options) -> Options:
    window = rng.choice((None, 9, 30))
    full = ["full_attention"] * sizes["num_hidden_layers"]
    types = full if window is None else rng.choice((None, full, _kinds(rng, sizes)))
    own = {"sliding_window": window, "sliding_window_pattern": rng.choice((2, 3, 4))}
    return _rope(rng) | own | {"layer_types": types, "head_dim": rng.choice((8, 16))}


def _olmoe(rng: random.Random, _: Options) -> Options:
    count, used = _experts(rng)
    own = {"num_experts": count, "num_experts_per_tok": used}
    return _rope(rng) | _biases(rng, "attention_bias", "norm_topk_prob") | own


def _ernie4_5(rng: random.Random, _: Options) -> Options:
    return _rope(rng) | _biases(rng, "use_bias") | {"head_dim": rng.choice((8, 16))}


def _glm(rng: random.Random, _: Options) -> Options:
    rope = _rope(rng)["rope_parameters"]
    rope |= rng.choice(({}, {"partial_rotary_factor": rng.choice((0.75, 1.0))}))
    own = {"head_dim": rng.choice((8, 16))}
    return {"rope_parameters": rope} | _biases(rng, "attention_bias") | own


def _state_space(rng: random.Random, inner: int) -> Options:
    """Returns options of a state space with this number of columns of values."""
    heads = rng.choice([one for one in (1, 2, 4, 6) if inner % one == 0])
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": rng.choice(("auto", inner // heads)),
        "mamba_n_groups": rng.choice([one for one in (1, 2) if heads % one == 0]),
        "mamba_d_state": rng.choice((5, 16, 20)),
        "mamba_d_conv": rng.choice((2, 3, 4)),
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_chunk_size": rng.choice((8, 256)),
    }


def _granite_hybrid(rng: random.Random, sizes: Options) -> Options:
    layers = sizes["num_hidden_layers"]
    expand = rng.choice((1, 2))
    count, used = rng.choice(((0, 2), _experts(rng)))
    dense = ["full_attention"] * layers
    mixed = [rng.choice(("linear_attention", "full_attention")) for _ in range(layers - 1)]
    own = {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "layer_types": rng.choice((dense, [*mixed, "full_attention"], [*mixed, "full_attention"])),
        "shared_intermediate_size": rng.choice((24, 37)),
        "position_embedding_type": rng.choice(("rope", "nope", None)),
        "mamba_expand": expand,
    } | _state_space(rng, expand * sizes["hidden_size"])
    return {key: one for key, one in _granite(rng, sizes).items() if key != "mlp_bias"} | own


def _falcon_h1(rng: random.Random, _: Options) -> Options:
    inner = rng.choice((24, 32, 60))

    def some(count: int) -> list[float]:
        return [rng.choice((1.0, 0.5, 1.4142135, 0.23)) for _ in range(count)]

    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return (
        _rope(rng)
        | _state_space(rng, inner)
        | {
            "head_dim": rng.choice((8, 16)),
            "mamba_d_ssm": inner,
            "mamba_rms_norm": rng.random() < 0.5,
            "mamba_norm_before_gate": False,
            "ssm_multipliers": some(5),
            "mlp_multipliers": some(2),
        }
        | {f"{name}_multiplier": some(1)[0] for name in names}
    )


def _ministral(rng: random.Random, sizes: Options) -> Options:
    kinds = rng.choice((None, _kinds(rng, sizes)))
    own = {"sliding_window": rng.choice((9, 30)), "head_dim": rng.choice((8, 16))}
    return _rope(rng) | own | {"layer_types": kinds}


def _ministral3(rng: random.Random, _: Options) -> Options:
    rope = {
        "rope_type": "yarn",
        "rope_theta": rng.choice((500.0, 1e6)),
        "factor": 4.0,
        "original_max_position_embeddings": rng.choice((24, ORIGINAL)),
        "llama_4_scaling_beta": rng.choice((0.0, 0.1, 1.0)),
    }
    rope |= rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": rng.choice((1.0, 0.5))}))
    own = {"sliding_window": rng.choice((None, 30)), "head_dim": rng.choice((8, 16))}
    return {"rope_parameters": rope} | own


def _arcee(rng: random.Random, sizes: Options) -> Options:
    own = {"hidden_act": rng.choice(("relu2", "gelu_pytorch_tanh"))}
    return _as_llama(rng, sizes) | own | _biases(rng, "attention_bias", "mlp_bias")


def _apertus(rng: random.Random, _: Options) -> Options:
    own = {"hidden_act": rng.choice(("xielu", "xielu", "relu2"))}
    return rng.choice((_rope(rng), {})) | _biases(rng, "attention_bias") | own


def _layer_norms(rng: random.Random, name: str) -> Options:
    return _rope(rng) | {name: rng.choice((1e-3, 1e-5))}


def _cohere(rng: random.Random, _: Options) -> Options:
    own = {"logit_scale": rng.choice((0.0625, 0.25, 0.3, 1.0))}
    return _layer_norms(rng, "layer_norm_eps") | own | _biases(rng, "attention_bias")


def _cohere2(rng: random.Random, sizes: Options) -> Options:
    own: Options = {"sliding_window": rng.choice((9, 30)), "layer_types": _kinds(rng, sizes)}
    if rng.random() < 0.5:
        own |= {"layer_types": None, "sliding_window_pattern": rng.choice((2, 3, 4))}
    return _cohere(rng, sizes) | own


def _stablelm(rng: random.Random, sizes: Options) -> Options:
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    parts = [part for part in (1.0, 0.5, 0.25) if size * part in (4, 6, 8, 12, 16, 32)]
    rope = _layer_norms(rng, "layer_norm_eps")
    rope["rope_parameters"]["partial_rotary_factor"] = rng.choice(parts)
    return rope | _biases(rng, "use_qkv_bias") | {"use_parallel_residual": rng.random() < 0.5}


def _nemotron(rng: random.Random, sizes: Options) -> Options:
    own = _layer_norms(rng, "norm_eps") | {"head_dim": rng.choice((8, 16))}
    own["rope_parameters"] |= rng.choice(({}, {"partial_rotary_factor": rng.choice((0.75, 1.0))}))
    return own | {"hidden_act": _arcee(rng, sizes)["hidden_act"]} | _llama_biases(rng)


def _llama_biases(rng: random.Random) -> Options:
    return _biases(rng, "attention_bias", "mlp_bias")


def _jais2(rng: random.Random, sizes: Options) -> Options:
    own = {key: one for key, one in sizes.items() if key != "rms_norm_eps"}
    sizes.clear()
    return own | _layer_norms(rng, "layer_norm_eps") | _llama_biases(rng)


def _starcoder2(rng: random.Random, _: Options) -> Options:
    own = {"sliding_window": rng.choice((None, 50)), "use_bias": rng.random() < 0.7}
    return _layer_norms(rng, "norm_epsilon") | own


def _cwm(rng: random.Random, sizes: Options) -> Options:
    own = {"sliding_window": rng.choice((9, 30)), "head_dim": rng.choice((8, 16))}
    kinds = {"layer_types": rng.choice((None, _kinds(rng, sizes)))}
    return rng.choice((_rope(rng), {})) | own | kinds | _biases(rng, "mlp_bias")


def _qwen2_moe(rng: random.Random, sizes: Options) -> Options:
    own = _qwen3_moe(rng, sizes) | {"qkv_bias": rng.random() < 0.5}
    for name in ("attention_bias", "head_dim"):
        del own[name]
    own["num_experts"] = own.pop("num_local_experts")
    return own | {"shared_expert_intermediate_size": rng.choice((8, 13, 48))}


def _qwen3_5(rng: random.Random, sizes: Options) -> Options:
    layers = sizes["num_hidden_layers"]
    attends = rng.sample(range(layers), rng.randint(2, max(2, layers - 1)))
    kinds = [f"{'full' if one in attends else 'linear'}_attention" for one in range(layers)]
    keys, values = rng.choice(((1, 1), (2, 2), (1, 3), (2, 4), (3, 3)))
    size = rng.choice((8, 16))
    part = rng.choice((1.0, 0.25, 0.5))
    rope = rng.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}))
    return _biases(rng, "attention_bias") | {
        "rope_parameters": rope | {"rope_theta": 1e4, "partial_rotary_factor": part},
        "head_dim": size,
        "layer_types": kinds,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": rng.choice((8, 12, 5)),
        "linear_value_head_dim": rng.choice((8, 20, 7)),
        "linear_conv_kernel_dim": rng.choice((4, 4, 1, 2, 3)),
    }


def _qwen3_5_moe(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    del sizes["intermediate_size"]
    return _qwen3_5(rng, sizes) | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": rng.choice((8, 13, 32)),
        "shared_expert_intermediate_size": rng.choice((8, 13, 48)),
    }


def _qwen3_next(rng: random.Random, sizes: Options) -> Options:
    mixed = _qwen2_moe(rng, sizes) | _biases(rng, "norm_topk_prob")
    for name in ("qkv_bias", "use_sliding_window", "sliding_window"):
        del mixed[name]
    return mixed | _qwen3_5(rng, sizes)


def _granite_moe(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    own = {key: one for key, one in _granite(rng, sizes).items() if key != "mlp_bias"}
    return own | {"num_local_experts": count, "num_experts_per_tok": used}


def _granite_moe_shared(rng: random.Random, sizes: Options) -> Options:
    return _granite_moe(rng, sizes) | {"shared_intermediate_size": rng.choice((0, 24, 37))}


def _gpt_oss(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "rope_theta": 150000.0,
        "truncate": rng.random() < 0.5,
    }
    rope = rng.choice(({}, _rope(rng), {"rope_parameters": yarn}))
    own = {"sliding_window": rng.choice((9, 30)), "head_dim": rng.choice((8, 16))}
    kinds = {"layer_types": rng.choice((None, _kinds(rng, sizes)))}
    own |= {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": rng.choice((32, 64, sizes["intermediate_size"])),
    }
    return rope | own | kinds | {"attention_bias": rng.random() < 0.7}


def _scored(rng: random.Random, sizes: Options) -> Options:
    """Returns options for experts like those of DeepSeek-V3."""
    count, used, groups, top = rng.choice(
        ((3, 2, 1, 1), (17, 3, 1, 1), (4, 1, 2, 1), (8, 3, 4, 2), (12, 5, 3, 2))
    )
    return _biases(rng, "attention_bias", "norm_topk_prob") | {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_group": groups,
        "topk_group": top,
        "moe_intermediate_size": rng.choice((8, 13, 32)),
        "n_shared_experts": rng.choice((1, 2)),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "first_k_dense_replace": rng.randrange(sizes["num_hidden_layers"]),
    }


def _glm4_moe(rng: random.Random, sizes: Options) -> Options:
    size = rng.choice((8, 16))
    own = _rope(rng) | _biases(rng, "use_qk_norm") | {"head_dim": size}
    # With two rotated values, transformers' dynamic scaling divides by zero.
    own["rope_parameters"] |= {"partial_rotary_factor": rng.choice((0.5, 1.0, 4 / own["head_dim"]))}
    return own | _scored(rng, sizes)


def _solar_open(rng: random.Random, sizes: Options) -> Options:
    own = _scored(rng, sizes)
    del own["first_k_dense_replace"], sizes["intermediate_size"]
    return _rope(rng) | own | {"head_dim": rng.choice((8, 16))}


def _dots1(rng: random.Random, sizes: Options) -> Options:
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    own = {"sliding_window": rng.choice((None, 9, 30)), "head_dim": size}
    own |= {"max_window_layers": rng.choice((0, 1, 9))}
    return _rope(rng) | own | _scored(rng, sizes)


def _minimax_m2(rng: random.Random, sizes: Options) -> Options:
    own = _mixtral(rng, sizes) | {"head_dim": rng.choice((8, 16))}
    del own["sliding_window"]
    # With two rotated values, transformers' dynamic scaling divides by zero.
    own["rope_parameters"] |= {"partial_rotary_factor": rng.choice((0.5, 1.0, 4 / own["head_dim"]))}
    return own


def _ernie4_5_moe(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    layers = sizes["num_hidden_layers"]
    return _rope(rng) | {
        "head_dim": rng.choice((8, 16)),
        "moe_num_experts": count,
        "moe_k": used,
        "moe_intermediate_size": rng.choice((8, 13, 32)),
        "moe_num_shared_experts": rng.choice((0, 1, 2)),
        "moe_layer_start_index": rng.choice((0, 1)),
        "moe_layer_end_index": rng.choice((-1, layers - 1, layers - 2)),
        "moe_layer_interval": rng.choice((1, 1, 2)),
    }


def _lfm2_moe(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    kept = ("rope_parameters", "layer_types", "conv_L_cache", "norm_eps")
    own = {key: one for key, one in _lfm2(rng, sizes).items() if key in kept}
    kinds = ["conv", "full_attention", "full_attention", "conv", "conv"]
    own |= {"layer_types": own.get("layer_types", kinds[: sizes["num_hidden_layers"]])}
    return (
        own
        | _biases(rng, "norm_topk_prob", "use_expert_bias")
        | {
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": rng.choice((8, 13, 32)),
            "num_dense_layers": rng.choice((0, 1)),
            "routed_scaling_factor": rng.choice((1.0, 2.5)),
        }
    )


def _exaone_moe(rng: random.Random, sizes: Options) -> Options:
    own = _exaone4(rng, sizes) | _scored(rng, sizes)
    own["num_experts"] = own.pop("n_routed_experts")
    own["num_shared_experts"] = own.pop("n_shared_experts")
    del own["attention_bias"]
    return own | {"sliding_window": own["sliding_window"] or 50}


def _hunyuan_moe(rng: random.Random, sizes: Options) -> Options:
    count, used = _experts(rng)
    topk = rng.choice((used, [used] * sizes["num_hidden_layers"]))
    return _hunyuan(rng, sizes) | {"num_experts": count, "moe_topk": topk}


def _latent(rng: random.Random, sizes: Options) -> Options:
    """Returns the sizes of latent attention, and yarn options with DeepSeek's factors."""
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = heads
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    scales = rng.choice(({}, {"mscale": 1.0, "mscale_all_dim": rng.choice((1.0, 0.7))}))
    longer = {"rope_parameters": yarn | scales | {"rope_theta": 500.0}}
    return rng.choice((_rope(rng), longer, longer)) | {
        "q_lora_rank": rng.choice((None, 12, 31)),
        "kv_lora_rank": rng.choice((8, 21, 40)),
        "qk_nope_head_dim": rng.choice((8, 5, 16)),
        "qk_rope_head_dim": rng.choice((4, 6, 8)),
        "v_head_dim": rng.choice((8, 11, 16)),
    }


def _deepseek_v3(rng: random.Random, sizes: Options) -> Options:
    return _latent(rng, sizes) | _scored(rng, sizes)


def _deepseek_v2(rng: random.Random, sizes: Options) -> Options:
    """transformers cannot run odd sizes."""
    own = _deepseek_v3(rng, sizes)
    own |= {"kv_lora_rank": rng.choice((8, 20, 40)), "qk_nope_head_dim": rng.choice((8, 6, 16))}
    kinds = ("greedy", "group_limited_greedy")
    return own | {"norm_topk_prob": False, "topk_method": rng.choice(kinds)}


def _glm4_moe_lite(rng: random.Random, sizes: Options) -> Options:
    own = _deepseek_v3(rng, sizes)
    layers = sizes["num_hidden_layers"]
    dense = own.pop("first_k_dense_replace")
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    return own | {"mlp_layer_types": rng.choice((None, kinds, kinds[::-1]))}


def _youtu(rng: random.Random, sizes: Options) -> Options:
    return _latent(rng, sizes) | _biases(rng, "attention_bias")


def _minicpm3(rng: random.Random, sizes: Options) -> Options:
    return _youtu(rng, sizes) | {
        "scale_emb": rng.choice((12, 1)),
        "scale_depth": rng.choice((1.4, None)),
        "dim_model_base": rng.choice((sizes["hidden_size"] // 2, 10, None)),
    }


def _phi(rng: random.Random, sizes: Options) -> Options:
    rope = _layer_norms(rng, "layer_norm_eps")
    rope["rope_parameters"]["partial_rotary_factor"] = rng.choice((1.0, 0.5))
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    if size % 4:
        rope["rope_parameters"]["partial_rotary_factor"] = 1.0
    return rope | {"hidden_act": rng.choice(("gelu_new", "gelu_pytorch_tanh"))}


def _phimoe(rng: random.Random, sizes: Options) -> Options:
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    own = _biases(rng, "attention_bias", "lm_head_bias")
    rope: Options = {"rope_type": "default", "rope_theta": 500.0}
    if rng.random() < 0.5:
        factors = [1.0 + rng.random() for _ in range(size // 2)]
        rope |= {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": [4 * one for one in factors],
            "short_mscale": 1.2,
            "long_mscale": 1.3,
            "original_max_position_embeddings": ORIGINAL,
        }
    return own | {
        "rope_parameters": rope,
        "num_local_experts": rng.choice((3, 6, 17)),
        "router_jitter_noise": rng.choice((0.01, 0.3)),
        "sliding_window": rng.choice((None, 50)),
    }


def _olmo(rng: random.Random, sizes: Options) -> Options:
    del sizes["rms_norm_eps"]
    return _rope(rng) | _biases(rng, "attention_bias") | {"clip_qkv": rng.choice((None, 0.5, 3.0))}


OPTIONS: dict[str, Callable[[random.Random, Options], Options]] = {
    "phi3": _phi3,
    "granite": _granite,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "hunyuan_v1_dense": _hunyuan,
    "internlm3": _as_llama,
    "iquestcoder": _as_llama,
    "lfm2": _lfm2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma1,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "olmoe": _olmoe,
    "ernie4_5": _ernie4_5,
    "glm": _glm,
    "glm4": _glm,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "arcee": _arcee,
    "apertus": _apertus,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "jais2": _jais2,
    "starcoder2": _starcoder2,
    "cwm": _cwm,
    "vaultgemma": _gemma2,
    "qwen2_moe": _qwen2_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "granitemoe": _granite_moe,
    "granitemoeshared": _granite_moe_shared,
    "gpt_oss": _gpt_oss,
    "phi": _phi,
    "olmo": _olmo,
    "phimoe": _phimoe,
    "glm4_moe": _glm4_moe,
    "solar_open": _solar_open,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "lfm2_moe": _lfm2_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _olmoe,
    "hunyuan_v1_moe": _hunyuan_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "youtu": _youtu,
    "minicpm3": _minicpm3,
}
"""The functions that choose random options for each family, by ``model_type``."""
