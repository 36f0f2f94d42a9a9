"""Cohere and Cohere 2 have LayerNorms without biases, and parallel attention and MLP. The
rotary embedding pairs neighbouring values. Cohere 2 has a window in most layers. Its other layers
have no rotary embedding."""

from collections.abc import Mapping
from dataclasses import replace
from math import frexp
from typing import Any

from eesd.common.geometry import SLIDING, UNROTATED
from eesd.common.weights import FINAL_NORM
from eesd.model.family import (
    LAYER_NORM_EPS,
    LAYER_TYPES,
    Family,
    Gguf,
    Own,
    Sizes,
    attention_biases,
    take_kinds,
    take_layer_types,
    take_positive,
)
from eesd.model.fields import Fields

NO_EFFECT = (
    *("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"),
    *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
    *("use_parallel_embedding", "_sliding_window_pattern"),
)
"""Fields of published configs that transformers ignores."""


def _own(fields: Fields, _: Sizes) -> Own:
    """Return the parts of the geometry that both families share. The final norm includes the factor
    of the logits."""
    if fields.take("use_qk_norm", None):
        raise ValueError("use_qk_norm is not supported; its norms differ between heads")
    fields.taken |= {*NO_EFFECT}
    scale = take_positive(fields, "logit_scale", 0.0625)
    parts = attention_biases(fields) | {
        "centred_norms": True,
        "parallel": True,
        "wide_norms": frexp(scale)[0] != 0.5,
    }
    return Own(parts, divided={FINAL_NORM: 1 / scale})


def _own_of_2(fields: Fields, sizes: Sizes) -> Own:
    own = _own(fields, sizes)
    pattern = fields.integer("sliding_window_pattern", 4)
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [LAYER_TYPES[bool((layer + 1) % pattern)] for layer in range(sizes.layers)]
    window = take_kinds(fields, types).get("window", 0)
    kinds = tuple(SLIDING if one == "sliding_attention" else UNROTATED for one in types)
    return own._replace(parts={**own.parts, "layer_kinds": kinds, "window": window})


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": own.number("logit_scale")}


def _of_gguf_2(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    window = own.integer("attention.sliding_window")
    pattern = own.integer("attention.sliding_window_pattern", 4)
    return _of_gguf(own, raw) | {"sliding_window": window, "sliding_window_pattern": pattern}


COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    positions=8192,
    eps_name="layer_norm_eps",
    eps=1e-5,
    tied=True,
    interleaved=True,
    own=_own,
    gguf=Gguf("command-r", fields=_of_gguf, eps=LAYER_NORM_EPS, interleaved=True),
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    own=_own_of_2,
    gguf=Gguf("cohere2", fields=_of_gguf_2, eps=LAYER_NORM_EPS, interleaved=True),
)
