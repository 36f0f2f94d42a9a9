"""GLM-4.5, 4.6 and 4.7 are Llama with partly rotated heads and with experts that are chosen as in
DeepSeek-V3. Some models have norms of queries and keys. Solar Open has experts in all layers, and
neither partial rotation nor these norms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.model.experts import (
    GGUF_SCORED,
    apart,
    experts_of_all_layers,
    gguf_sigmoid,
    scored_experts,
    scored_tensors,
)
from eesd.model.family import Family, Gguf, GgufFields, Own, Sizes
from eesd.model.fields import Fields

DEFAULTS = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def _own(fields: Fields, sizes: Sizes) -> Own:
    fields.taken |= {"num_nextn_predict_layers", "num_mtp_layers"}  # drafters, stored as layers
    parts = {"qkv_bias": fields.flag("attention_bias"), "qk_norm": fields.flag("use_qk_norm")}
    return Own(parts | scored_experts(fields, sizes.layers, DEFAULTS))


def _of_gguf(own: GgufFields, _: Mapping[str, Any]) -> dict[str, Any]:
    return gguf_sigmoid(own) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in own.tensors}


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    positions=131072,
    kv_heads=8,
    kv_heads_null=False,
    eps=1e-5,
    partial_rotary=0.5,
    own=_own,
    tensors=scored_tensors,
    gguf=Gguf(
        "glm4moe",
        GGUF_SCORED | {"post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q"},
        fields=_of_gguf,
        tensors=apart,
    ),
)


def _own_of_solar(fields: Fields, sizes: Sizes) -> Own:
    fields.taken |= {"first_k_dense_replace", "use_qk_norm", "intermediate_size"}  # no effect
    made = scored_experts(fields, sizes.layers, DEFAULTS | {"moe_intermediate_size": 1280}, ())
    experts = made["experts"]
    assert experts is not None
    parts = experts_of_all_layers(experts, experts.shared)
    return Own(parts | {"qkv_bias": fields.flag("attention_bias")})


SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    head_dim=128,
    theta=1e6,
    partial_rotary=1.0,
    inner=1,
    own=_own_of_solar,
    gguf=None,
)
