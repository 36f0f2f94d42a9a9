"""StarCoder 2 has LayerNorms, biases, and an MLP without a gate."""

from eesd.common.geometry import Geometry
from eesd.model.family import (
    LAYER_NORM_EPS,
    Family,
    Gguf,
    Own,
    Sizes,
    Tensors,
    renamed,
    take_window,
)
from eesd.model.fields import Fields

NAMES = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}


def _own(fields: Fields, _: Sizes) -> Own:
    fields.taken |= {"embedding_dropout", "residual_dropout"}  # only in training
    biases = ("qkv_bias", "output_bias", "mlp_bias")
    parts = {"centred_norms": True, "norm_bias": True, "gated": False}
    return Own(parts | dict.fromkeys(biases, fields.flag("use_bias", True)), take_window(fields))


def _tensors(tensors: Tensors, _: Geometry) -> Tensors:
    return renamed(tensors, NAMES)


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    positions=4096,
    kv_heads=2,
    kv_heads_null=False,
    eps_name="norm_epsilon",
    eps=1e-5,
    tied=True,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    own=_own,
    tensors=_tensors,
    gguf=Gguf("starcoder2", biases={"use_bias": "attn_q"}, eps=LAYER_NORM_EPS),
)
