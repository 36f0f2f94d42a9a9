"""Phi-3 and Phi-4: fused projections, of whose heads a part can stay unrotated, and frequencies for short and long texts."""

from eesd.common.geometry import Geometry
from eesd.common.json_input import Fields
from eesd.model.family import Family, Own, Sizes, Tensors, split, take_window


def _own(fields: Fields, _: Sizes) -> Own:
    return Own(positions=take_window(fields))


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    heads = {"q": geometry.num_heads, "k": geometry.num_kv_heads, "v": geometry.num_kv_heads}
    qkv = {f"{part}_proj": count * geometry.head_dim for part, count in heads.items()}
    tensors = split(tensors, "qkv_proj", qkv)
    return split(tensors, "gate_up_proj", dict.fromkeys(("gate_proj", "up_proj"), geometry.intermediate_size))


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    positions=4096,
    eps=1e-5,
    ropes=("default", "longrope", "su", "yarn"),
    rope_names={"su": "longrope", "yarn": "longrope"},
    original_positions=4096,
    partial_rotary=True,
    own=_own,
    tensors=_tensors,
)
