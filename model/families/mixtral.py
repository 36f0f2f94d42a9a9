"""Mixtral: Mistral with a mixture of experts in each layer. Its ``intermediate_size`` is the size
of an expert. llama.cpp calls it llama."""

import re
from collections.abc import Mapping
from typing import Any

from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import GGUF_NAMES, apart, experts_of_all_layers, gguf_counts, take_experts
from eesd.model.families.mistral import refuse_layer_types
from eesd.model.family import Family, Gguf, Own, Sizes, Tensors, take_window
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    refuse_layer_types(fields, "MixtralForCausalLM")
    size = fields.integer("intermediate_size")
    count, used = take_experts(fields, 8, 2)
    fields.taken.add("router_jitter_noise")  # only in training
    experts = Experts(count, used, size, normed=True)
    return Own(experts_of_all_layers(experts), take_window(fields))


def renamed_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with the decoder's names for the router and the experts."""
    names = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    return apart(renamed_experts(tensors), geometry)


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    return gguf_counts(own)


def _of_old_gguf(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Convert the tensors. Files from before March 2024, which have a tensor for each expert, are
    converted, too."""
    old = r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight"
    new = r"model.layers.\1.mlp.experts.\3.\2_proj.weight"
    return apart(
        {re.sub(f"^{old}$", new, name, flags=re.ASCII): tensor for name, tensor in tensors.items()},
        geometry,
    )


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    positions=131072,
    kv_heads=8,
    theta=1e6,
    eps=1e-5,
    own=_own,
    tensors=_tensors,
    gguf=Gguf(
        "llama",
        GGUF_NAMES,
        fields=_of_gguf,
        interleaved=True,
        tensors=_of_old_gguf,
        key="expert_count",
    ),
)
