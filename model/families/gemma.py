"""Gemma has GeGLU, scaled embeddings, and norms whose stored weights are smaller by 1."""

from typing import Any

from eesd.common.geometry import Geometry
from eesd.model.arrays import Array
from eesd.model.family import (
    ChangedTensor,
    Family,
    Gguf,
    Own,
    Sizes,
    Tensors,
    as_stored,
    attention_biases,
)
from eesd.model.fields import Fields


def take_gemma(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Return the parts of the geometry that all versions of Gemma share."""
    if fields.take("use_bidirectional_attention", None):
        raise ValueError(
            "use_bidirectional_attention is not supported; a token must see only those before it"
        )
    return attention_biases(fields) | {
        "wide_norms": True,
        "embedding_scale": sizes.hidden**0.5,
    }


def _own(fields: Fields, sizes: Sizes) -> Own:
    return Own(take_gemma(fields, sizes))


def whole_norms(tensors: Tensors, _: Geometry) -> Tensors:
    """Return the tensors, with 1 added to the weights of norms."""
    return {
        name: ChangedTensor(tensor, _plus_one) if name.endswith("norm.weight") else tensor
        for name, tensor in tensors.items()
    }


def _plus_one(weight: Array) -> Array:
    return weight + 1


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    positions=8192,
    kv_heads=16,
    kv_heads_null=False,
    head_dim=256,
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    activation_names={"gelu": "gelu_tanh"},  # the name in the first configs
    own=_own,
    tensors=whole_norms,
    gguf=Gguf("gemma", tensors=as_stored),
)
