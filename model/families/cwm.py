"""Code World Model is Llama 3 with a window in three of four layers."""

from eesd.model.family import (
    LAYER_TYPES,
    Family,
    Own,
    Sizes,
    rope_or,
    take_kinds,
    take_layer_types,
)
from eesd.model.fields import Fields

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Default of ``rope_parameters``."""


def _rope_fields(fields: Fields) -> Fields:
    return rope_or(fields, ROPE)


def _own(fields: Fields, sizes: Sizes) -> Own:
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [LAYER_TYPES[layer % 4 > 0] for layer in range(sizes.layers)]
    kinds = take_kinds(fields, types, window=8192)
    return Own({**kinds, "mlp_bias": fields.flag("mlp_bias")})


CWM = Family(
    "cwm",
    "CwmForCausalLM",
    positions=131072,
    kv_heads=8,
    head_dim=128,
    theta=1e6,
    eps=1e-5,
    rope_fields=_rope_fields,
    own=_own,
)
