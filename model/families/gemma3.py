"""Gemma 3, text: as Gemma 2 without caps, with norms of queries and keys, and a rotary base of layers with a window."""

from typing import Any

from eesd.common.checks import shown
from eesd.common.json_input import Fields
from eesd.model.families.gemma2 import take_parts, tensors_of_gemma
from eesd.model.family import Family, Own, Sizes, take_kinds, take_layer_types

GLOBAL_THETA, LOCAL_THETA = 1e6, 10000.0
KINDS = ("full_attention", "sliding_attention")


def _ropes(fields: Fields) -> dict[str, dict[str, Any]]:
    """``rope_parameters`` of each kind of layers. Those of old configs stand beside each other, and are for full attention."""
    found = fields.take("rope_parameters", None)
    if found is not None and not (isinstance(found, dict) and all(isinstance(one, dict | None) for one in found.values())):
        raise ValueError(f"rope_parameters is {shown(found)}, and must have an object for each kind of layers")
    other = next((name for name in found or {} if name not in KINDS), None)
    if other is not None:
        raise ValueError(f"rope_parameters has {shown(other)}, and must have {' and '.join(KINDS)}")
    return {kind: (found or {}).get(kind) or {} for kind in KINDS}


def _rope_fields(fields: Fields) -> Fields:
    full, scaling = _ropes(fields)["full_attention"], fields.take("rope_scaling", None)
    if not isinstance(scaling, dict | None):
        raise ValueError(f"rope_scaling is {shown(scaling)}, and must be an object")
    theta = fields.take("rope_theta", GLOBAL_THETA)
    return Fields({"rope_theta": theta, "rope_parameters": {"rope_theta": theta} | full | (scaling or {})})


def _own(fields: Fields, sizes: Sizes) -> Own:
    pattern, types = fields.integer("sliding_window_pattern", 6), take_layer_types(fields, sizes.layers)
    if types is None:
        types = [KINDS[bool((layer + 1) % pattern)] for layer in range(sizes.layers)]
    fields.take("_sliding_window_pattern", None)  # which transformers writes, but does not read
    fields.take("attn_logit_softcapping", None)  # transformers has the field, and no cap
    kinds = take_kinds(fields, types)
    local = Fields({"rope_theta": fields.number("rope_local_base_freq", LOCAL_THETA)} | _ropes(fields)["sliding_attention"])
    kind = local.take("rope_type", local.take("type", "default"))
    if kinds and kind != "default":
        raise ValueError(f"the rope scaling {shown(kind)} of layers with a window is not supported; supported is default")
    parts = take_parts(fields, sizes, None) | kinds | {"qk_norm": True}
    return Own(parts | ({"local_theta": local.number("rope_theta")} if kinds else {}))


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    positions=131072,
    kv_heads=4,
    kv_heads_null=False,
    head_dim=256,
    theta=GLOBAL_THETA,
    tied=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    rope_fields=_rope_fields,
    own=_own,
    tensors=tensors_of_gemma,
)
