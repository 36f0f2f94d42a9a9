"""Seed-OSS is Llama with biases of q, k and v, and with an explicit head size."""

from eesd.model.family import Family, Gguf, Own, Sizes
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    fields.taken.add("residual_dropout")  # only in training
    return Own(
        {
            "qkv_bias": fields.flag("attention_bias", True),
            "output_bias": fields.flag("attention_out_bias"),
            "mlp_bias": fields.flag("mlp_bias"),
        }
    )


SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    positions=524288,
    kv_heads=8,
    head_dim=128,
    own=_own,
    gguf=Gguf(
        "seed_oss",
        {"post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output"},
    ),
)
