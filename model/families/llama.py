"""Llama 2 and 3, CodeLlama, SmolLM2, and many others."""

from eesd.common.checks import shown
from eesd.model.family import Family, Gguf, Own, Sizes, attention_biases, take_window
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    kinds = fields.take("layer_types", None)
    if kinds is not None and kinds != ["full_attention"] * sizes.layers:
        # Transformers does not support it either.
        raise ValueError(
            f"layer_types is {shown(kinds)}, which is not supported for LlamaForCausalLM"
        )
    # The window of a Llama config is in no mask of transformers, but its KV cache forgets what lies
    # before it.
    return Own(
        attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias")}, take_window(fields)
    )


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    positions=2048,
    own=_own,
    gguf=Gguf(
        "llama", biases={"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}, interleaved=True
    ),
)
