"""Dense models of Hunyuan have norms of queries and keys after the rotary embedding. The base of
the rotary embedding can be larger than the config's. Mixtures also have an expert that every token
uses."""

from dataclasses import replace
from typing import Any

from eesd.common.architecture import ROUTER, SHARED
from eesd.common.checks import shown
from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import apart, experts_of_all_layers
from eesd.model.family import Family, Own, Sizes, Tensors, attention_biases, renamed, take_positive
from eesd.model.fields import Fields

THETA = 10000.0


def _rope_fields(fields: Fields) -> Fields:
    """Return the rotary fields. The rope type ``dynamic`` with an ``alpha`` means a larger base,
    which does not depend on the text."""
    rope = fields.take("rope_scaling", None) or fields.take("rope_parameters", None)
    own = Fields(rope if isinstance(rope, dict) else {})
    if own.take("rope_type", own.take("type", None)) != "dynamic" or not own.take("alpha", None):
        return fields
    theta = own.number("rope_theta", fields.take("rope_theta", THETA))
    size = fields.integer("head_dim", least=4)
    return Fields({"rope_theta": theta * take_positive(own, "alpha", None) ** (size / (size - 2))})


def _own(fields: Fields, _: Sizes) -> Own:
    fields.taken.add("eod_token_id")  # no decoder uses it
    return Own(attention_biases(fields) | {"qk_norm": True, "qk_norm_rotated": True})


def _tensors(tensors: Tensors, _: Geometry) -> Tensors:
    names = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    return renamed(tensors, {f"self_attn.{old}": f"self_attn.{new}" for old, new in names.items()})


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    positions=2048,
    theta=THETA,
    eps=1e-5,
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
)
NO_EFFECT = (
    *("capacity_factor", "cla_share_factor", "im_end_id", "im_newline_id", "im_start_id"),
    *("mask_init_id", "moe_drop_tokens", "moe_intermediate_size", "moe_layer_num_skipped"),
    *("moe_random_routing_dropped_token", "norm_type", "num_media_embeds", "num_shared_expert"),
    *("org_vocab_size", "pool_type", "position_embedding_xdrope", "sep_token_id"),
    *("text_end_id", "text_start_id", "use_cla", "use_mixed_mlp_moe", "use_qk_norm"),
    *("use_rotary_pos_emb", "video_end_id", "video_start_id", "routed_scaling_factor"),
)
"""Fields of published mixtures that transformers ignores."""
SHARED_NAMES = {
    f"mlp.shared_mlp.{part}": f"{SHARED}.{part}" for part in ("gate_proj", "up_proj", "down_proj")
}


def _number(fields: Fields, name: str) -> Any:
    """Return a number that some configs list for each layer."""
    given = fields.take(name, 1)
    own = given
    if isinstance(given, list) and given and given == given[:1] * len(given):
        own = given[0]
    if isinstance(own, list):
        raise ValueError(f"{name} is {shown(given)}, and must be the same in all layers")
    return Fields({name: own}).integer(name)


def _own_mixed(fields: Fields, sizes: Sizes) -> Own:
    fields.taken |= {*NO_EFFECT, "output_router_logits"}
    size = fields.integer("intermediate_size")
    used = _number(fields, "moe_topk")
    experts = Experts(_number(fields, "num_experts"), used, size, normed=True, shared=size)
    own = _own(fields, sizes)
    return own._replace(parts={**own.parts, **experts_of_all_layers(experts, size)})


def _tensors_mixed(tensors: Tensors, geometry: Geometry) -> Tensors:
    own = _tensors(tensors, geometry)
    return apart(renamed(own, SHARED_NAMES | {"mlp.gate.wg": ROUTER}), geometry)


HUNYUAN_MOE = replace(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    own=_own_mixed,
    tensors=_tensors_mixed,
)
