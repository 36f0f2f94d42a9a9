"""The rotary embedding of GLM-4 pairs neighbouring values and covers half of each head. Gate and up
are one tensor. GLM-4-0414 also has norms after attention and MLP."""

from dataclasses import replace

from eesd.model.family import Family, Own, Sizes, gate_and_up
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    return Own({"qkv_bias": fields.flag("attention_bias", True)})


def _own_of_0414(fields: Fields, sizes: Sizes) -> Own:
    return Own({**_own(fields, sizes).parts, "norm_behind": True})


GLM = Family(
    "glm",
    "GlmForCausalLM",
    positions=131072,
    kv_heads=2,
    kv_heads_null=False,
    head_dim=128,
    eps=1.5625e-7,
    partial_rotary=0.5,
    interleaved=True,
    own=_own,
    tensors=gate_and_up,
)
GLM4 = replace(GLM, model_type="glm4", architecture="Glm4ForCausalLM", own=_own_of_0414)
