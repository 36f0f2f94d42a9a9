"""Falcon-H1 has attention and a state space (Mamba-2) next to each other in each layer. Factors
multiply the inputs and outputs of most parts.

* ``attention_in_multiplier`` and ``key_multiplier`` become part of the scale of attention and of
  the factor of its output.
* ``lm_head_multiplier`` multiplies the final norm's weight.
* Other factors stay factors, because products with weights would be rounded.
"""

from math import frexp
from typing import Any

import numpy as np

from eesd.common.architecture import (
    ATTENTION_OUTPUT,
    GATE_FACTORS,
    SPACE_INPUTS,
    SPACE_OUTPUT,
    UP_FACTORS,
)
from eesd.common.checks import shown
from eesd.common.geometry import BESIDE, DeltaRule, Geometry
from eesd.common.weights import FINAL_NORM
from eesd.model.arrays import Array
from eesd.model.family import Family, Own, Sizes, Tensors, renamed, take_positive
from eesd.model.fields import Fields
from eesd.model.state_space import space_tensors, take_space

NO_EFFECT = (
    *("attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep"),
    *("layer_types", "layers_block_type"),
)
"""Fields of published configs that transformers ignores."""
NAMES = {
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}


def _multipliers(fields: Fields, name: str, count: int) -> list[float]:
    found = fields.take(name, None)
    if found is None:
        return [1.0] * count
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"{name} is {shown(found)}, and must be a list of {count} numbers")
    return [take_positive(Fields({name: one}), name, None) for one in found]


def _own(fields: Fields, sizes: Sizes) -> Own:
    fields.taken |= {*NO_EFFECT}
    for name in ("attention_bias", "mlp_bias", "projectors_bias"):
        if fields.flag(name):
            raise ValueError(f"biases ({name}) are not supported")
    normed = fields.flag("mamba_rms_norm")
    if fields.flag("mamba_norm_before_gate", True) and normed:
        raise ValueError(
            "a norm before the gate of Mamba (mamba_norm_before_gate) is not supported"
        )
    inner = fields.integer("mamba_d_ssm", 1024, optional=True)
    if inner is None:
        inner = fields.integer("mamba_expand", 2) * sizes.hidden
    rule = take_space(fields, inner, sizes.eps if normed else 0.0)
    into, out, key, logits, embeddings = (
        take_positive(fields, f"{name}_multiplier", 1.0)
        for name in ("attention_in", "attention_out", "key", "lm_head", "embedding")
    )
    heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", sizes.hidden // heads)
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    values = {
        SPACE_INPUTS: _of_inputs(fields, rule),
        SPACE_OUTPUT: take_positive(fields, "ssm_out_multiplier", 1.0),
        ATTENTION_OUTPUT: into * out,
        GATE_FACTORS: gate,
        UP_FACTORS: down,
    }
    parts: dict[str, Any] = {
        "layer_kinds": (BESIDE,) * sizes.layers,
        "delta": rule,
        "factors": True,
        "attention_scale": into**2 * key * head_dim**-0.5,
        "embedding_scale": embeddings,
        "wide_norms": frexp(logits)[0] != 0.5,
    }
    made: dict[str, Array] = {
        f"model.layers.{layer}.{name}.weight": np.array(value, np.float32).reshape(-1)
        for name, value in values.items()
        for layer in range(sizes.layers)
    }
    return Own(parts, divided={FINAL_NORM: 1 / logits}, values=made)


def _of_inputs(fields: Fields, rule: DeltaRule) -> Array:
    """Return the factors of a state space's inputs in the decoder's order."""
    into = take_positive(fields, "ssm_in_multiplier", 1.0)
    gate, value, key, query, step = _multipliers(fields, "ssm_multipliers", 5)
    counts = (rule.keys, rule.keys, rule.values, rule.values, rule.value_heads)
    return np.repeat(np.array([query, key, value, gate, step]) * into, counts)


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    own = {
        name.replace("model.final_layernorm.", "model.norm."): one for name, one in tensors.items()
    }
    return renamed(space_tensors(own, geometry.delta, "mamba"), NAMES)


FALCON_H1 = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    positions=8192,
    kv_heads=8,
    eps=1e-5,
    inner=14336,
    own=_own,
    tensors=_tensors,
)
