"""Qwen3 has norms of queries and keys, and an explicit head size."""

from eesd.model.families.qwen2 import take_switched_window
from eesd.model.family import Family, Gguf, Own, Sizes, attention_biases
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    return Own(
        attention_biases(fields) | {"qk_norm": True}, take_switched_window(fields, sizes.layers)
    )


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    positions=32768,
    kv_heads=32,
    head_dim=128,
    own=_own,
    gguf=Gguf("qwen3", biases={"attention_bias": "attn_q"}),
)
