"""Phi-3 and Phi-4 have fused projections, and separate frequencies for short and long texts. Some
models rotate only a part of each head."""

from collections.abc import Mapping
from typing import Any

from eesd.common.geometry import Geometry
from eesd.model.family import Family, Gguf, Own, Sizes, Tensors, gate_and_up, split, take_window
from eesd.model.fields import Fields


def _own(fields: Fields, _: Sizes) -> Own:
    return Own(positions=take_window(fields))


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    heads = {"q": geometry.num_heads, "k": geometry.num_kv_heads, "v": geometry.num_kv_heads}
    qkv = {f"{part}_proj": count * geometry.head_dim for part, count in heads.items()}
    return gate_and_up(split(tensors, "qkv_proj", qkv), geometry)


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": own.integer("attention.sliding_window", None, optional=True, least=0)
        or None
    }


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    positions=4096,
    eps=1e-5,
    ropes=("default", "longrope", "su", "yarn"),
    rope_names={"su": "longrope", "yarn": "longrope"},
    original_positions=4096,
    partial_rotary=1.0,
    own=_own,
    tensors=_tensors,
    gguf=Gguf(
        "phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, fields=_of_gguf
    ),
)
