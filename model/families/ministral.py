"""Ministral: Mistral with a window in all layers or in some. Ministral 3 is Mistral with yarn. It
is supported up to the position where its queries begin to grow."""

from typing import Any

from eesd.model.families.mistral import refuse_layer_types
from eesd.model.family import Family, Own, Sizes, take_kinds, take_layer_types, take_window
from eesd.model.fields import Fields

POSITIONS = 262144
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Default of ``rope_parameters`` for Ministral 3."""


def _own(fields: Fields, sizes: Sizes) -> Own:
    types = take_layer_types(fields, sizes.layers)
    window = take_window(fields, 4096)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * sizes.layers
    return Own(take_kinds(fields, types))


MINISTRAL = Family("ministral", "MinistralForCausalLM", positions=131072, kv_heads=8, own=_own)


def _take_rope(fields: Fields) -> dict[str, Any]:
    rope = fields.take("rope_scaling", None) or fields.take("rope_parameters", None) or YARN
    if not isinstance(rope, dict):
        raise ValueError("rope_parameters must be an object")
    original = fields.take("original_max_position_embeddings", None)
    return rope | ({} if original is None else {"original_max_position_embeddings": original})


def _rope_fields(fields: Fields) -> Fields:
    """Return the rotary fields that the rotary embedding uses."""
    rope = _take_rope(fields)
    for name in ("llama_4_scaling_beta", "max_position_embeddings"):
        rope.pop(name, None)
    return Fields({"rope_theta": fields.take("rope_theta", 10000.0), "rope_parameters": rope})


def _own_of_3(fields: Fields, _: Sizes) -> Own:
    refuse_layer_types(fields, "Ministral3ForCausalLM")
    rope = Fields(_take_rope(fields))
    positions = fields.integer("max_position_embeddings", POSITIONS)
    # Queries are multiplied by 1 + beta log(1 + floor(position / original)).
    grows = rope.number("llama_4_scaling_beta") != 0
    original = rope.integer("original_max_position_embeddings", positions)
    bounds = [take_window(fields), original if grows else None]
    return Own(positions=min((one for one in bounds if one is not None), default=None))


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    positions=POSITIONS,
    kv_heads=8,
    head_dim=128,
    eps=1e-5,
    ropes=("yarn",),
    rope_fields=_rope_fields,
    own=_own_of_3,
)
