"""Hunyuan, dense: norms of queries and keys after the rotary embedding, whose base can be larger
than the config's."""

from eesd.common.geometry import Geometry
from eesd.model.family import Family, Own, Sizes, Tensors, attention_biases, renamed, take_positive
from eesd.model.fields import Fields

THETA = 10000.0


def _rope_fields(fields: Fields) -> Fields:
    """The rotary fields. The rope type ``dynamic`` with an ``alpha`` means a larger base, which
    does not depend on the text."""
    rope = fields.take("rope_scaling", None) or fields.take("rope_parameters", None)
    own = Fields(rope if isinstance(rope, dict) else {})
    if own.take("rope_type", own.take("type", None)) != "dynamic" or not own.take("alpha", None):
        return fields
    theta = own.number("rope_theta", fields.take("rope_theta", THETA))
    size = fields.integer("head_dim", least=4)
    return Fields({"rope_theta": theta * take_positive(own, "alpha", None) ** (size / (size - 2))})


def _own(fields: Fields, _: Sizes) -> Own:
    fields.taken.add("eod_token_id")  # no decoder uses it
    return Own(attention_biases(fields) | {"qk_norm": True, "qk_norm_rotated": True})


def _tensors(tensors: Tensors, _: Geometry) -> Tensors:
    names = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    return renamed(tensors, {f"self_attn.{old}": f"self_attn.{new}" for old, new in names.items()})


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    positions=2048,
    theta=THETA,
    eps=1e-5,
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
)
