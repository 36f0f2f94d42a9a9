"""ERNIE 4.5 (dense): the rotary embedding pairs neighbouring values of a head. One field switches
all biases on or off."""

from eesd.model.family import Family, Own, Sizes
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    return Own(dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), fields.flag("use_bias")))


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    positions=131072,
    kv_heads=2,
    head_dim=128,
    theta=500000.0,
    eps=1e-5,
    tied=True,
    interleaved=True,
    own=_own,
)
