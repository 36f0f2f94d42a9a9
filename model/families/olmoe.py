"""OLMoE has experts in all layers, and norms of queries and keys over all heads. In FlexOlmo, the
norms follow attention and experts."""

from dataclasses import replace

from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import apart, experts_of_all_layers, take_experts
from eesd.model.families.mistral import refuse_layer_types
from eesd.model.families.olmo2 import OLMO2_PARTS, tensors_of_olmo
from eesd.model.family import Family, Own, Sizes, Tensors, attention_biases, take_window
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    refuse_layer_types(fields, "OlmoeForCausalLM")
    if fields.take("clip_qkv", None) is not None:
        raise ValueError("clip_qkv is not supported; it must be null")
    size = fields.integer("intermediate_size")
    count, used = take_experts(fields, 64, 8)
    experts = Experts(count, used, size, fields.flag("norm_topk_prob"))
    parts = experts_of_all_layers(experts) | {"qk_norm_joint": True}
    # transformers ignores the window in its masks, but its KV cache drops the tokens before the
    # window.
    return Own(attention_biases(fields) | parts, take_window(fields))


OLMOE = Family("olmoe", "OlmoeForCausalLM", positions=4096, eps=1e-5, own=_own, tensors=apart)


def _own_of_flex(fields: Fields, _: Sizes) -> Own:
    size = fields.integer("intermediate_size")
    count, used = take_experts(fields, 7, 5)
    experts = Experts(count, used, size, fields.flag("norm_topk_prob"))
    return Own(attention_biases(fields) | experts_of_all_layers(experts) | OLMO2_PARTS)


def _tensors_of_flex(tensors: Tensors, geometry: Geometry) -> Tensors:
    return apart(tensors_of_olmo(tensors, geometry), geometry)


FLEX_OLMO = replace(
    OLMOE,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    theta=500000.0,
    eps=1e-6,
    own=_own_of_flex,
    tensors=_tensors_of_flex,
)
