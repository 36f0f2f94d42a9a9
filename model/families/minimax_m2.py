"""MiniMax-M2 has partly rotated heads, norms of queries and keys over all heads, and experts in all
layers. The experts are chosen as in DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import (
    GGUF_SCORED,
    apart,
    check_sigmoid,
    experts_of_all_layers,
    gguf_counts,
    scored_tensors,
    take_experts,
)
from eesd.model.families.mixtral import renamed_experts
from eesd.model.family import Family, Gguf, Own, Sizes, Tensors
from eesd.model.fields import Fields

NO_EFFECT = (
    *("attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta"),
    *("layernorm_mlp_beta", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules"),
    *("qk_norm_type", "scoring_func", "shared_intermediate_size", "shared_moe_mode", "use_mtp"),
    *("use_qk_norm", "use_routing_bias", "router_jitter_noise", "sliding_window"),
)
"""Fields of published configs that transformers ignores."""


def _rope_fields(fields: Fields) -> Fields:
    """Return the rotary fields. ``rotary_dim`` of published configs becomes a share of the head."""
    rotated = fields.integer("rotary_dim", None, optional=True)
    if rotated is None:
        return fields
    part = rotated / fields.integer("head_dim", 128)
    return fields.changed({"partial_rotary_factor": part, **fields.raw})


def _own(fields: Fields, _: Sizes) -> Own:
    fields.taken |= {*NO_EFFECT}
    size = fields.integer("intermediate_size", 1536)
    count, used = take_experts(fields, 256, 8)
    experts = Experts(count, used, size, normed=True, scores="sigmoid", choice_bias=True)
    return Own(experts_of_all_layers(experts) | {"qk_norm_joint": True})


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    return scored_tensors(renamed_experts(tensors), geometry)


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    check_sigmoid(own.integer("expert_gating_func"))
    return gguf_counts(own, expert_feed_forward_length="intermediate_size")


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    positions=196608,
    kv_heads=8,
    kv_heads_null=False,
    head_dim=128,
    theta=5e6,
    inner=1536,
    partial_rotary=1.0,
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
    gguf=Gguf("minimax-m2", GGUF_SCORED, fields=_of_gguf, tensors=apart),
)
