"""Phi-1, Phi-1.5 and Phi-2 have LayerNorms, parallel attention and MLP, an MLP without a
gate, partly rotated heads, and biases everywhere (even of the logits)."""

from eesd.common.architecture import LOGIT_BIAS
from eesd.common.geometry import Geometry
from eesd.model.family import Family, Own, Sizes, Tensors, renamed
from eesd.model.fields import Fields

NAMES = {
    "self_attn.dense": "self_attn.o_proj",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
WHOLE_NAMES = {"model.final_layernorm.": "model.norm.", "lm_head.bias": f"{LOGIT_BIAS}.weight"}
PARTS = dict.fromkeys(
    (
        *("centred_norms", "norm_bias", "parallel"),
        *("qkv_bias", "output_bias", "mlp_bias", "logit_bias"),
    ),
    True,
)


def _own(fields: Fields, _: Sizes) -> Own:
    if fields.flag("qk_layernorm"):
        raise ValueError("qk_layernorm is not supported; its norms subtract the mean")
    return Own(PARTS | {"gated": False})


def _tensors(tensors: Tensors, _: Geometry) -> Tensors:
    found: Tensors = {}
    for name, tensor in renamed(tensors, NAMES).items():
        for old, new in WHOLE_NAMES.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


PHI = Family(
    "phi",
    "PhiForCausalLM",
    positions=2048,
    eps_name="layer_norm_eps",
    eps=1e-5,
    activation=("hidden_act", "gelu_new"),
    activation_names={"gelu_new": "gelu_tanh"},
    partial_rotary=0.5,
    own=_own,
    tensors=_tensors,
)
