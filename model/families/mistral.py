"""Mistral: Llama with a window in all layers, which has no effect on texts shorter than the window.
llama.cpp calls it llama."""

from eesd.common.checks import shown
from eesd.model.family import Family, Own, Sizes, take_window
from eesd.model.fields import Fields


def refuse_layer_types(fields: Fields, architecture: str) -> None:
    """Refuse ``layer_types``, which transformers does not support either."""
    kinds = fields.take("layer_types", None)
    if kinds is not None:
        raise ValueError(
            f"layer_types is {shown(kinds)}, which is not supported for {architecture}"
        )


def _own(fields: Fields, _: Sizes) -> Own:
    refuse_layer_types(fields, "MistralForCausalLM")
    return Own(positions=take_window(fields, 4096))


MISTRAL = Family(
    "mistral", "MistralForCausalLM", positions=131072, kv_heads=8, kv_heads_null=False, own=_own
)
