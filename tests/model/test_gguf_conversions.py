"""Tests of GGUF files whose tensors differ from those of transformers. The files are written from
random models of transformers as llama.cpp's converter writes them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command import export_engine
from support.gguf_converter import Changed, Conversion, convert, random_model, unchanged
from support.gguf_files import VOCABULARY
from support.tiny_checkpoints import decoder_logits
from support.without_operators import float32_activations

import eesd
from eesd.model.checkpoint import Checkpoint

PROMPT = [0, 40, 77, 5, 210, 99, 33, 140, 7, 61]


def in_groups(rows: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """Return the rows with the first head of each group first, then the second head of each
    group."""
    return rows.reshape(groups, -1, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def delta_rule(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    """Qwen3.5: The value heads of a key head are not next to each other."""
    _, _, module = name.partition("linear_attn.")
    keys = config.linear_num_key_heads
    size = config.linear_value_head_dim
    if not module:
        return whole_norms(name, tensor, config)
    if module.startswith(("in_proj_qkv.", "conv1d.")):
        before = 2 * keys * config.linear_key_head_dim
        first, values = torch.tensor_split(tensor.squeeze(1), [before])
        tensor = torch.cat((first, in_groups(values, keys, size)))
    elif module.startswith("in_proj_z."):
        tensor = in_groups(tensor, keys, size)
    elif module.startswith("out_proj."):
        tensor = in_groups(tensor.T, keys, size).T
    elif module != "norm.weight":
        tensor = in_groups(tensor, keys, 1)
    return whole_norms(name, tensor, config)


def whole_norms(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    """Qwen3-Next: Norms have the 1 that the model adds, and decay is stored as a negative rate."""
    before, _, module = name.partition("linear_attn.")
    if module == "A_log":
        return {name: -tensor.exp()}
    if module == "dt_bias":
        return {f"{before}linear_attn.dt_proj.bias": tensor}
    if module == "conv1d.weight":
        return {name: tensor.squeeze(1)}
    if module == "in_proj_qkvz.weight":
        heads = config.linear_num_key_heads
        values = config.linear_num_value_heads // heads * config.linear_value_head_dim
        rows = tensor.reshape(heads, -1, tensor.shape[1])
        ends = np.cumsum([config.linear_key_head_dim] * 2 + [values]).tolist()
        parts = torch.tensor_split(rows, ends, 1)
        *joint, gates = (part.reshape(-1, tensor.shape[1]) for part in parts)
        prefix = f"{before}linear_attn.in_proj"
        return {f"{prefix}_qkv.weight": torch.cat(joint), f"{prefix}_z.weight": gates}
    if not module and name.endswith("norm.weight"):
        return {name: tensor + 1}
    return unchanged(name, tensor, config)


def gemma4(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    """Gemma 4: All names end in ``.weight``, and the parts of experts stay joined."""
    if name.endswith((".layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        return {f"{name}.weight": tensor}
    return unchanged(name, tensor, config)


def by_head(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    """DeepSeek: The weights of keys and values are apart, and those of keys are transposed."""
    if not name.endswith("kv_b_proj.weight"):
        return unchanged(name, tensor, config)
    heads = tensor.reshape(config.num_attention_heads, -1, tensor.shape[1])
    keys, values = torch.tensor_split(heads, [config.qk_nope_head_dim], 1)
    before = name.removesuffix("kv_b_proj.weight")
    return {f"{before}k_b_proj.weight": keys.transpose(1, 2), f"{before}v_b_proj.weight": values}


def convolving(name: str, tensor: torch.Tensor, config: Any) -> Changed:
    """LFM2: Convolutions lack a dimension."""
    if name.endswith("conv.conv.weight"):
        return {name: tensor.squeeze(1)}
    return unchanged(name, tensor, config)


SIZES: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 28}
RULE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
    },
}
OF_RULE: dict[str, Any] = {
    "rope.dimension_count": 6,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 72,
    "full_attention_interval": 4,
    "attention.recurrent_layers": [True, False, True],
}
IMAGES: dict[str, Any] = {"rope.dimension_sections": [1, 1, 1, 0]}
OF_SHARED: dict[str, Any] = {"expert_shared_feed_forward_length": 28}
NEXT = Conversion(
    "qwen3next",
    "qwen3_next",
    SIZES | RULE | EXPERTS | SHARED | {"mlp_only_layers": [], "decoder_sparse_step": 1},
    OF_RULE | OF_SHARED,
    whole_norms,
    smaller=1.0,
)
QWEN35 = Conversion(
    "qwen35", "qwen3_5_text", SIZES | RULE, OF_RULE | IMAGES, delta_rule, smaller=1.0
)
QWEN35_MOE = replace(
    QWEN35,
    architecture="qwen35moe",
    model_type="qwen3_5_moe_text",
    options=SIZES | RULE | EXPERTS | SHARED,
    metadata=OF_RULE | OF_SHARED | IMAGES,
)


LATER: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
    "rms_norm_eps": 1e-3,
    "final_logit_softcapping": 9.0,
    "vocab_size_per_layer_input": len(VOCABULARY),
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 5000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
OF_LATER: dict[str, Any] = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 8,
    "rope.freq_base": 5000.0,
    "rope.freq_base_swa": 100.0,
    "attention.sliding_window": 5,
    "attention.sliding_window_pattern": [True, False, False],
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 9.0,
}
INPUTS = Conversion(
    "gemma4",
    "gemma4_text",
    SIZES
    | LATER
    | {
        "hidden_size_per_layer_input": 4,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
    },
    OF_LATER
    | {
        "embedding_length_per_layer_input": 4,
        "attention.shared_kv_layers": 1,
        "feed_forward_length": [44, 44, 88],
    },
    gemma4,
    extra={"rope_freqs.weight": torch.tensor([1.0, 1.0, *[1e30] * 6])},
    names={
        ".router.scale": "blk.{layer}.ffn_gate_inp.scale",
        ".router.per_expert_scale": "blk.{layer}.ffn_down_exps.scale",
    },
)
MIXED = replace(
    INPUTS,
    options=SIZES
    | LATER
    | {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    metadata=OF_LATER
    | {
        "attention.head_count_kv": [2, 1, 1],
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 20,
    },
)


SCORED: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
OF_SCORED: dict[str, Any] = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_group_count": 3,
    "expert_group_used_count": 2,
    "expert_shared_count": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}
DEEPSEEK = Conversion(
    "deepseek2",
    "deepseek_v3",
    SIZES
    | SCORED
    | {
        "head_dim": 8,
        "num_key_value_heads": 3,
        "q_lora_rank": 10,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    OF_SCORED
    | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 10,
        "attention.kv_lora_rank": 14,
        "attention.key_length": 22,
        "attention.value_length": 14,
        "attention.key_length_mla": 14,
        "attention.value_length_mla": 5,
        "rope.dimension_count": 8,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 24,
        "rope.scaling.yarn_log_multiplier": 0.07,
    },
    by_head,
    names={"e_score_correction_bias": "blk.{layer}.exp_probs_b.bias"},
)
OF_OLD: dict[str, Any] = {
    "attention.head_count_kv": 3,
    "attention.key_length": 14,
    "attention.value_length": 5,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}
"""Metadata of DeepSeek's old files, which have the weights of keys and values together."""
SOFTMAX: dict[str, Any] = {
    "expert_gating_func": None,
    "expert_weights_norm": None,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}


PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
NAMED = {"e_score_correction_bias": "blk.{layer}.exp_probs_b.bias"}
HALF: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
    }
}
GLM = Conversion(
    "glm4moe",
    "glm4_moe",
    SIZES | SCORED | HALF | {"use_qk_norm": True, "attention_bias": True},
    OF_SCORED | {"rope.dimension_count": 6},
    names=NAMED,
)
MINIMAX = Conversion(
    "minimax-m2",
    "minimax_m2",
    SIZES | HALF | {"num_local_experts": 5, "num_experts_per_tok": 2},
    {
        "rope.dimension_count": 6,
        "expert_count": 5,
        "expert_gating_func": 2,
        "expert_feed_forward_length": 44,
    },
    names=NAMED
    | {"mlp.gate.weight": "blk.{layer}.ffn_gate_inp.weight"}
    | {
        f"experts.{part}_proj": f"blk.{{layer}}.ffn_{part}_exps.weight"
        for part in ("gate", "up", "down")
    },
)
DOTS = Conversion("dots1", "dots1", SIZES | SCORED | PLAIN, OF_SCORED, names=NAMED)
EXAONE = Conversion(
    "exaone-moe",
    "exaone_moe",
    SIZES
    | SCORED
    | PLAIN
    | {
        "num_experts": 6,
        "num_shared_experts": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    OF_SCORED
    | {
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": [True, False, True],
        "expert_shared_feed_forward_length": 40,
        "rope.scaling.type": "none",
    },
    names=NAMED,
)


CONVOLVING = Conversion(
    "lfm2moe",
    "lfm2_moe",
    SIZES
    | PLAIN
    | {
        "norm_eps": 1e-3,
        "num_local_experts": 5,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    {
        "attention.head_count_kv": [0, 1, 0],
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "shortconv.l_cache": 3,
        "vocab_size": len(VOCABULARY),
    },
    convolving,
    names={
        "embedding_norm.weight": "token_embd_norm.weight",
        "feed_forward.expert_bias": "blk.{layer}.exp_probs_b.bias",
        "experts.gate_proj": "blk.{layer}.ffn_gate_exps.weight",
        "experts.up_proj": "blk.{layer}.ffn_up_exps.weight",
        "experts.down_proj": "blk.{layer}.ffn_down_exps.weight",
    },
)
ERNIE = Conversion(
    "ernie4_5-moe",
    "ernie4_5_moe",
    SIZES
    | PLAIN
    | {
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    {
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 40,
        "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1,
    },
    names=NAMED,
)


def with_drafter(conversion: Conversion, *lists: str) -> Conversion:
    """Return the model with one more block, which belongs to its drafter. ``lists`` are keys with a
    value for each block."""
    more = {key: [*conversion.metadata[key], False] for key in lists}
    names = ("attn_norm", "nextn.eh_proj")
    return replace(
        conversion,
        metadata={**conversion.metadata, **more, "block_count": 4, "nextn_predict_layers": 1},
        extra={f"blk.3.{name}.weight": torch.ones(2, 3) for name in names},
    )


CONVERSIONS: Mapping[str, Conversion] = {
    "qwen3next": NEXT,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "gemma4, inputs of layers": INPUTS,
    "gemma4, experts": MIXED,
    "glm4moe": GLM,
    "minimax-m2": MINIMAX,
    "dots1": replace(DOTS, options={**DOTS.options, "max_window_layers": 3}),
    "exaone-moe": EXAONE,
    "lfm2moe": CONVOLVING,
    "ernie4_5-moe": ERNIE,
    "ernie4_5": replace(
        ERNIE,
        architecture="ernie4_5",
        model_type="ernie4_5",
        options=SIZES | PLAIN | {"use_bias": True},
        metadata={},
    ),
    "deepseek2": DEEPSEEK,
    "deepseek2, old": replace(DEEPSEEK, metadata={**DEEPSEEK.metadata, **OF_OLD}, change=unchanged),
    "deepseek2, shares": replace(
        DEEPSEEK,
        model_type="deepseek_v2",
        options={**DEEPSEEK.options, "topk_method": "greedy", "norm_topk_prob": False},
        metadata={**DEEPSEEK.metadata, **SOFTMAX},
    ),
    "deepseek2, GLM-4.7-Flash, with a drafter": with_drafter(
        replace(
            DEEPSEEK,
            model_type="glm4_moe_lite",
            options={**DEEPSEEK.options, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        )
    ),
    "deepseek2, dense": replace(
        DEEPSEEK,
        model_type="youtu",
        metadata={
            **{key: one for key, one in DEEPSEEK.metadata.items() if "expert" not in key},
            "expert_feed_forward_length": 44,
            "expert_shared_count": 0,
            "expert_used_count": None,
        },
    ),
    "qwen35moe, with a drafter": with_drafter(QWEN35_MOE, "attention.recurrent_layers"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_file_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(CONVERSIONS[name])
    path = convert(tmp_path / "model.gguf", CONVERSIONS[name], model)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = model(ids).logits
    checkpoint = Checkpoint(path)
    assert ("drafter" in " ".join(checkpoint.config.notices)) == ("drafter" in name)
    found = decoder_logits(checkpoint, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


BLOCKS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 128,
    "num_attention_heads": 2,
}
"""Sizes of whole blocks of 256."""
LEVELS = {
    "qwen35": (
        replace(
            QWEN35,
            options={**QWEN35.options, **BLOCKS, "linear_value_head_dim": 128},
            metadata={**QWEN35.metadata, "ssm.inner_size": 768, "rope.dimension_count": 64},
        ),
        {"ssm_out": "Q4_K", "ffn_down": "Q6_K", "attn_": "Q8_0", "ffn_": "Q8_0"},
    ),
    "deepseek2": (
        replace(
            DEEPSEEK,
            options={
                **DEEPSEEK.options,
                "hidden_size": 64,
                "intermediate_size": 64,
                "moe_intermediate_size": 32,
                "kv_lora_rank": 32,
                "q_lora_rank": 32,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
            },
            metadata={
                **DEEPSEEK.metadata,
                "attention.q_lora_rank": 32,
                "attention.kv_lora_rank": 32,
                "attention.key_length_mla": 40,
                "attention.value_length_mla": 32,
            },
        ),
        {"ffn_gate_inp": "F32", "attn_k_b": "Q8_0", "attn_": "Q4_0", "ffn_": "Q4_1"},
    ),
    "gemma4": (
        replace(
            INPUTS,
            options={
                **INPUTS.options,
                "hidden_size": 64,
                "intermediate_size": 64,
                "hidden_size_per_layer_input": 32,
                "tie_word_embeddings": False,
            },
            metadata={
                **INPUTS.metadata,
                "embedding_length_per_layer_input": 32,
                "feed_forward_length": [64, 64, 128],
            },
        ),
        {"attn_": "Q4_0", "ffn_": "Q4_1", "proj": "Q8_0", "inp_gate": "Q8_0", "per_layer": "Q8_0"},
    ),
}


@pytest.mark.parametrize("name", LEVELS)
def test_an_export_of_levels_generates_the_tokens_of_the_decoder(tmp_path: Path, name: str) -> None:
    conversion, types = LEVELS[name]
    path = convert(tmp_path / "model.gguf", conversion, random_model(conversion), types)
    checkpoint = Checkpoint(path)
    assert len({*checkpoint.own_levels.values()}) == len({*types.values()} - {"F32"})
    options = ("--max-seq-len", 64, "--max-tree-nodes", 4)
    plans = export_engine(path, tmp_path / "plans", *options)
    engines = eesd.load(plans, activations=float32_activations("ort"))
    found = engines.generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    tokens = list(PROMPT)
    for _ in found:
        logits = decoder_logits(checkpoint, torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    assert found == tokens[len(PROMPT) :]
    assert len({*found}) > 5, "a constant text would compare little"
