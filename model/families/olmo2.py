"""OLMo 2 has norms after attention and MLP, and norms of queries and keys over all heads."""

from eesd.common.geometry import Geometry
from eesd.model.family import Family, Own, Sizes, Tensors, attention_biases, renamed
from eesd.model.fields import Fields

NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
OLMO2_PARTS = {"norm_before": False, "norm_behind": True, "qk_norm_joint": True}


def _own(fields: Fields, _: Sizes) -> Own:
    return Own(attention_biases(fields) | OLMO2_PARTS)


def tensors_of_olmo(tensors: Tensors, _: Geometry) -> Tensors:
    """Rename the tensors to the decoder's names."""
    return renamed(tensors, NAMES)


OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", positions=2048, eps=1e-5, own=_own, tensors=tensors_of_olmo
)
