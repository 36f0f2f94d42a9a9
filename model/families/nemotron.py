"""Nemotron (Minitron, Nemotron-4) and Jais 2 have LayerNorms and an MLP without a gate. The MLP
squares positive values. Nemotron stores the weights of norms minus 1, and rotates half of each
head."""

from eesd.model.families.gemma import whole_norms
from eesd.model.families.llama import take_llama
from eesd.model.family import LAYER_NORM_EPS, Family, Gguf, Own, Sizes, as_stored
from eesd.model.fields import Fields

PARTS = {"centred_norms": True, "norm_bias": True, "gated": False}


def _own(fields: Fields, sizes: Sizes) -> Own:
    own = take_llama(fields, sizes)
    return own._replace(parts={**own.parts, **PARTS, "wide_norms": True})


def _own_of_jais2(fields: Fields, sizes: Sizes) -> Own:
    own = take_llama(fields, sizes, biased=True)
    return own._replace(parts={**own.parts, **PARTS})


NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    positions=4096,
    eps_name="norm_eps",
    eps=1e-5,
    partial_rotary=0.5,
    activation=("hidden_act", "relu2"),
    activation_names={"relu2": "relu2"},
    own=_own,
    tensors=whole_norms,
    gguf=Gguf(
        "nemotron",
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        eps=LAYER_NORM_EPS,
        tensors=as_stored,
    ),
)
JAIS2 = Family(
    "jais2",
    "Jais2ForCausalLM",
    positions=8192,
    eps_name="layer_norm_eps",
    eps=1e-5,
    activation=("hidden_act", "relu2"),
    activation_names={"relu2": "relu2"},
    own=_own_of_jais2,
    gguf=Gguf(
        "jais2",
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        eps=LAYER_NORM_EPS,
    ),
)
