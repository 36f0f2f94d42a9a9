"""StableLM has LayerNorms, and rotates a quarter of each head. In some models, attention and MLP
are parallel."""

from collections.abc import Mapping
from typing import Any

from eesd.model.family import LAYER_NORM_EPS, Family, Gguf, Own, Sizes
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    if fields.flag("qk_layernorm"):
        raise ValueError("qk_layernorm is not supported; its norms differ between heads")
    fields.taken |= {"hidden_dropout", "norm_eps", "rope_pct"}  # without effect in transformers
    parts = {
        "centred_norms": True,
        "norm_bias": True,
        "parallel": fields.flag("use_parallel_residual"),
        "qkv_bias": fields.flag("use_qkv_bias"),
    }
    return Own(parts)


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": own.flag("use_parallel_residual", True)}


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    positions=4096,
    kv_heads=32,
    kv_heads_null=False,
    eps_name="layer_norm_eps",
    eps=1e-5,
    partial_rotary=0.25,
    own=_own,
    gguf=Gguf("stablelm", biases={"use_qkv_bias": "attn_q"}, fields=_of_gguf, eps=LAYER_NORM_EPS),
)
