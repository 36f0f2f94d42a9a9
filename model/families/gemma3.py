"""The text model of Gemma 3 is Gemma 2 without caps, but with norms of queries and keys. Layers
with a window have another rotary base."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.model.families.gemma2 import GEMMA2, GGUF_NAMES, query_scalar, take_parts
from eesd.model.family import (
    LAYER_TYPES,
    Gguf,
    Own,
    Sizes,
    as_stored,
    full_rope,
    local_theta,
    take_kinds,
    take_layer_types,
)
from eesd.model.fields import Fields

GLOBAL_THETA = 1e6
LOCAL_THETA = 10000.0


def _rope_fields(fields: Fields) -> Fields:
    return full_rope(fields, GLOBAL_THETA)


def _own(fields: Fields, sizes: Sizes) -> Own:
    pattern = fields.integer("sliding_window_pattern", 6)
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [LAYER_TYPES[bool((layer + 1) % pattern)] for layer in range(sizes.layers)]
    fields.take("_sliding_window_pattern", None)  # transformers writes it, but does not read it
    fields.take("attn_logit_softcapping", None)  # transformers has the field, but no cap
    kinds = take_kinds(fields, types)
    local = local_theta(fields, fields.number("rope_local_base_freq", LOCAL_THETA), kinds)
    parts = take_parts(fields, sizes, None) | kinds | {"qk_norm": True}
    return Own(parts | local)


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "final_logit_softcapping": own.number("final_logit_softcapping", None, optional=True),
        "sliding_window": own.integer("attention.sliding_window", 4096),
        "rope_local_base_freq": own.number("rope.freq_base_swa", LOCAL_THETA),
        "query_pre_attn_scalar": query_scalar(raw, 62),
    }


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    positions=131072,
    theta=GLOBAL_THETA,
    rope_fields=_rope_fields,
    own=_own,
    gguf=Gguf("gemma3", GGUF_NAMES, fields=_of_gguf, tensors=as_stored),
)
