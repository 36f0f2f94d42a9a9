"""GLM-4.5, 4.6 and 4.7: a partly rotated Llama with experts that are chosen as in DeepSeek-V3, and
norms of queries and keys in some models."""

from eesd.model.experts import scored_experts, scored_tensors
from eesd.model.family import Family, Own, Sizes
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
)
