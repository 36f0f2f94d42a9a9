"""Qwen2 and Qwen2.5 have biases of q, k and v, and a window that is rarely enabled."""

from eesd.model.family import Family, Gguf, Own, Sizes, take_layer_types
from eesd.model.fields import Fields


def take_switched_window(fields: Fields, layers: int, first: int = 28) -> int | None:
    """Return the window of Qwen's models, if any layer has a window. Up to this length, sliding
    attention equals full attention."""
    window: int | None = fields.integer("sliding_window", 4096, optional=True, least=0)
    if not fields.flag("use_sliding_window"):
        window = None
    first = fields.integer("max_window_layers", first, least=0)
    types = take_layer_types(fields, layers)
    if types is None:
        types = [
            "full_attention" if window is None or index < first else "sliding_attention"
            for index in range(layers)
        ]
    if "sliding_attention" not in types:
        return None
    if not window:
        raise ValueError("layer_types has sliding_attention, but there is no sliding window")
    return window


def _own(fields: Fields, sizes: Sizes) -> Own:
    return Own({"qkv_bias": True}, take_switched_window(fields, sizes.layers))


QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", positions=32768, kv_heads=32, own=_own, gguf=Gguf("qwen2")
)
