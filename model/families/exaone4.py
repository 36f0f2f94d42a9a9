"""EXAONE 4 has norms after attention and MLP, and norms of queries and keys. If some layers have a
window, the other layers have no rotary embedding. K-EXAONE has norms before attention and MLP, and
experts that are chosen as in DeepSeek-V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.common.checks import shown
from eesd.common.geometry import SLIDING, UNROTATED
from eesd.model.experts import GGUF_SCORED, apart, gguf_sigmoid, scored_experts, scored_tensors
from eesd.model.families.olmo2 import tensors_of_olmo
from eesd.model.family import LAYER_TYPES, Family, Gguf, Own, Sizes, take_layer_types, take_window
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    window = take_window(fields, 4096)
    types = take_layer_types(fields, sizes.layers)
    fields.taken.add("sliding_window_pattern")
    parts = {"norm_before": False, "norm_behind": True, "qk_norm": True}
    if window is None:
        if "sliding_attention" in (types or ()):
            raise ValueError("layer_types has sliding_attention, but there is no sliding window")
        return Own(parts)
    if types is None:  # transformers never reads a pattern of letters
        pattern = fields.integer("sliding_window_pattern", 4)
        types = [LAYER_TYPES[bool((layer + 1) % pattern)] for layer in range(sizes.layers)]
    kinds = tuple(SLIDING if one == "sliding_attention" else UNROTATED for one in types)
    return Own(parts | {"layer_kinds": kinds, "window": window if SLIDING in kinds else 0})


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    positions=2048,
    kv_heads=32,
    kv_heads_null=False,
    eps=1e-5,
    own=_own,
    tensors=tensors_of_olmo,
)
DEFAULTS = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def _own_mixed(fields: Fields, sizes: Sizes) -> Own:
    fields.taken |= {"scoring_func", "topk_method", "num_nextn_predict_layers"}  # no effect
    kinds = fields.take("mlp_layer_types", None)
    dense = None
    if kinds is not None:
        fields.taken.add("first_k_dense_replace")
        if not isinstance(kinds, list) or not {*map(str, kinds)} <= {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types is {shown(kinds)}, and must list dense and sparse")
        dense = [layer for layer, kind in enumerate(kinds[: sizes.layers]) if kind == "dense"]
    own = _own(fields, sizes)
    before = {"norm_before": True, "norm_behind": False}
    parts = {**own.parts, **before, **scored_experts(fields, sizes.layers, DEFAULTS, dense)}
    return own._replace(parts=parts)


def _of_gguf_mixed(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    own.taken.add("expert_shared_feed_forward_length")  # follows from the number of experts
    slides = own.take("attention.sliding_window_pattern")
    layers = raw["num_hidden_layers"]
    if not isinstance(slides, list) or len(slides) < layers:
        raise ValueError("attention.sliding_window_pattern must have an entry for each layer")
    return gguf_sigmoid(own, "num_experts", shared="num_shared_experts") | {
        "sliding_window": own.integer("attention.sliding_window"),
        "layer_types": [LAYER_TYPES[bool(one)] for one in slides[:layers]],
    }


EXAONE_MOE = replace(
    EXAONE4,
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    own=_own_mixed,
    tensors=scored_tensors,
    gguf=Gguf("exaone-moe", GGUF_SCORED, fields=_of_gguf_mixed, tensors=apart),
)
