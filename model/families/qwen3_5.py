"""Qwen3.5, text: Qwen3-Next with projections that are stored one by one. Models are dense, or have
experts in all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.common.geometry import Experts
from eesd.model.experts import GGUF_NAMES, experts_of_all_layers, take_experts
from eesd.model.families.qwen2_moe import GGUF_SHARED, gguf_sizes
from eesd.model.families.qwen3_next import (
    GGUF_RULE,
    QWEN3_NEXT,
    gguf_delta,
    gguf_delta_tensors,
    take_delta,
)
from eesd.model.family import Gguf, Own, Sizes
from eesd.model.fields import Fields


def rope_of_text(fields: Fields) -> Fields:
    """Return the rotary fields without the fields for images. In a text, all parts of a position
    are equal."""
    found = dict(fields.raw)
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.take(name, None)
        if isinstance(given, dict):
            found[name] = {key: one for key, one in given.items() if not key.startswith("mrope_")}
    return fields.changed(found)


def _own(fields: Fields, sizes: Sizes) -> Own:
    return Own(take_delta(fields, sizes))


def _own_mixed(fields: Fields, sizes: Sizes) -> Own:
    count, used = take_experts(fields, 256, 8)
    size = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    experts = Experts(count, used, size, normed=True, shared=shared, shared_gate=True)
    return Own(take_delta(fields, sizes) | experts_of_all_layers(experts))


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    own.taken.add("rope.dimension_sections")  # for images
    return gguf_delta(own, raw)


def _of_gguf_mixed(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    return _of_gguf(own, raw) | gguf_sizes(own, raw)


QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    kv_heads=4,
    inner=12288,
    rope_fields=rope_of_text,
    own=_own,
    gguf=Gguf("qwen35", GGUF_RULE, fields=_of_gguf, tensors=gguf_delta_tensors),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    kv_heads=2,
    own=_own_mixed,
    gguf=Gguf(
        "qwen35moe",
        GGUF_NAMES | GGUF_SHARED | GGUF_RULE,
        fields=_of_gguf_mixed,
        tensors=gguf_delta_tensors,
        optional=("feed_forward_length",),
    ),
)
