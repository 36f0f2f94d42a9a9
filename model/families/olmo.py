"""OLMo 1 has LayerNorms without weights, and limits queries, keys and values."""

import numpy as np

from eesd.common.weights import FINAL_NORM
from eesd.model.family import Family, Own, Sizes, attention_biases, take_positive
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    parts = attention_biases(fields) | {"centred_norms": True}
    if fields.take("clip_qkv", None) is not None:
        parts["qkv_limit"] = take_positive(fields, "clip_qkv", None)
    ones = np.ones(sizes.hidden, np.float32)
    norms = [
        f"model.layers.{layer}.{norm}.weight"
        for layer in range(sizes.layers)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    return Own(parts, values=dict.fromkeys((*norms, FINAL_NORM), ones))


OLMO = Family("olmo", "OlmoForCausalLM", positions=2048, eps_name="", eps=1e-5, own=_own)
