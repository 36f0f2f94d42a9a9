"""Gemma 2 is Gemma with norms after attention and MLP, with caps, and with a window in every other
layer."""

from collections.abc import Mapping
from typing import Any

from eesd.common.geometry import Geometry
from eesd.model.families.gemma import take_gemma, whole_norms
from eesd.model.family import (
    Family,
    Gguf,
    Own,
    Sizes,
    Tensors,
    as_stored,
    renamed,
    take_kinds,
    take_layer_types,
    take_positive,
)
from eesd.model.fields import Fields

NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def take_parts(fields: Fields, sizes: Sizes, final_cap: float | None) -> dict[str, Any]:
    """Return the parts of the geometry that Gemma 2 and 3 share. ``final_cap`` is the default cap
    of logits."""
    fields.take("hidden_act", None)  # transformers reads only hidden_activation
    if sizes.hidden % fields.integer("num_attention_heads"):
        raise ValueError(
            "num_attention_heads does not divide hidden_size, which transformers refuses"
        )
    return take_gemma(fields, sizes) | {
        "norm_behind": True,
        "attention_scale": take_positive(fields, "query_pre_attn_scalar", 256.0) ** -0.5,
        "logit_cap": take_cap(fields, "final_logit_softcapping", final_cap),
    }


def take_cap(fields: Fields, name: str, default: float | None) -> float:
    """Return a cap. null means no cap."""
    return 0.0 if fields.take(name, default) is None else take_positive(fields, name, default)


def _own(fields: Fields, sizes: Sizes) -> Own:
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes.layers)
        ]
    parts = take_parts(fields, sizes, 30.0) | take_kinds(fields, types)
    return Own(parts | {"attention_cap": take_cap(fields, "attn_logit_softcapping", 50.0)})


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    return whole_norms(renamed(tensors, NAMES), geometry)


GGUF_NAMES = {
    "post_attention_norm": NAMES["post_attention_layernorm"],
    "post_ffw_norm": NAMES["post_feedforward_layernorm"],
}
"""llama.cpp's names of the norms after attention and MLP. llama.cpp stores norm weights with the 1
added."""


def query_scalar(raw: Mapping[str, Any], layers: int) -> int:
    """Return ``query_pre_attn_scalar``. llama.cpp uses the number of ``layers`` to recognize the
    model whose scalar differs from the size of a head."""
    whole: int = raw["hidden_size"] // raw["num_attention_heads"]
    return whole if raw["num_hidden_layers"] == layers else raw["head_dim"]


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    caps = {
        name: own.number(name, default)
        for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    }
    return caps | {
        "sliding_window": own.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": query_scalar(raw, 46),
    }


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    positions=8192,
    kv_heads=4,
    kv_heads_null=False,
    head_dim=256,
    tied=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    own=_own,
    tensors=_tensors,
    gguf=Gguf("gemma2", GGUF_NAMES, fields=_of_gguf, tensors=as_stored),
)
