"""Some layers of SmolLM3 (usually every fourth layer) have no rotary embedding."""

from eesd.common.checks import shown
from eesd.common.geometry import FULL, UNROTATED
from eesd.model.family import Family, Own, Sizes, attention_biases, take_layer_types, take_window
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    rotates = fields.take("no_rope_layers", None)
    interval = fields.integer("no_rope_layer_interval", 4)
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(sizes.layers)]
    if (
        not isinstance(rotates, list)
        or len(rotates) < sizes.layers
        or not all(one in (0, 1) for one in rotates)
    ):
        raise ValueError(
            f"no_rope_layers is {shown(rotates)}, and must be a list with 1 or 0 for each of "
            f"{sizes.layers} layers"
        )
    kinds = tuple(FULL if one else UNROTATED for one in rotates[: sizes.layers])
    window = take_window(fields)
    types = take_layer_types(fields, sizes.layers)
    slides = fields.flag("use_sliding_window") and window is not None and UNROTATED in kinds
    if types is not None:
        slides = "sliding_attention" in types
    if slides and window is None:
        raise ValueError("layer_types has sliding_attention, but there is no sliding window")
    parts = attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias")}
    return Own(
        parts | ({"layer_kinds": kinds} if UNROTATED in kinds else {}), window if slides else None
    )


SMOLLM3 = Family(
    "smollm3", "SmolLM3ForCausalLM", positions=32768, kv_heads=4, theta=2e6, tied=True, own=_own
)
