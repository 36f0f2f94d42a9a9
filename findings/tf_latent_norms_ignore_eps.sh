#!/usr/bin/env bash
# transformers 5.23.0 (with torch 2.13.0): two norms of latent attention do not use `rms_norm_eps`.
#
# Behaviour: in DeepseekV2, DeepseekV3, Glm4MoeLite, Youtu and MiniCPM3, the norms of compressed
# queries and of compressed keys and values (`q_a_layernorm`, `kv_a_layernorm`) always add 1e-6. All
# other norms of the same model add `rms_norm_eps` of config.json, which is 1e-5 for GLM-4.7-Flash and
# MiniCPM3. Other engines, such as vLLM, use `rms_norm_eps` in these two norms, too, so their logits
# differ from transformers' for the same checkpoint.
#
# Output seen with rms_norm_eps 0.001, a line for each class, such as
#   deepseek_v3 input_layernorm 0.001, q_a_layernorm 1e-06, kv_a_layernorm 1e-06, norm 0.001
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
"$place/venv/bin/python" - <<'PYTHON'
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": None,
    "rms_norm_eps": 1e-3,
}
groups = {"n_group": 1, "topk_group": 1}
for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"):
    own = {} if kind in ("youtu", "minicpm3") else groups
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | own)).model
    layer = model.layers[0]
    norms = {
        "input_layernorm": layer.input_layernorm,
        "q_a_layernorm": layer.self_attn.q_a_layernorm,
        "kv_a_layernorm": layer.self_attn.kv_a_layernorm,
        "norm": model.norm,
    }
    found = {name: norm.variance_epsilon for name, norm in norms.items()}
    print(kind, ", ".join(f"{name} {eps}" for name, eps in found.items()))
    assert [*found.values()] == [1e-3, 1e-6, 1e-6, 1e-3], "the behaviour changed"
PYTHON
