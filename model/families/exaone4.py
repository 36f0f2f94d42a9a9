"""EXAONE 4: norms after attention and MLP, and of queries and keys. If some layers have a window,
the other layers have no rotary embedding."""

from eesd.common.geometry import SLIDING, UNROTATED
from eesd.model.families.olmo2 import tensors_of_olmo
from eesd.model.family import LAYER_TYPES, Family, Own, Sizes, take_layer_types, take_window
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
