"""OLMo 3: OLMo 2 with a window in three of four layers. The rotary embedding of these layers is
never scaled."""

from eesd.model.families.olmo2 import OLMO2_PARTS, tensors_of_olmo
from eesd.model.family import (
    LAYER_TYPES,
    Family,
    Own,
    Sizes,
    attention_biases,
    full_rope,
    local_theta,
    take_kinds,
    take_layer_types,
)
from eesd.model.fields import Fields

THETA = 500000.0


def _rope_fields(fields: Fields) -> Fields:
    return full_rope(fields, THETA)


def _own(fields: Fields, sizes: Sizes) -> Own:
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [LAYER_TYPES[bool((layer + 1) % 4)] for layer in range(sizes.layers)]
    kinds = take_kinds(fields, types)
    return Own(attention_biases(fields) | OLMO2_PARTS | kinds | local_theta(fields, THETA, kinds))


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    positions=2048,
    eps=1e-5,
    theta=THETA,
    rope_fields=_rope_fields,
    own=_own,
    tensors=tensors_of_olmo,
)
