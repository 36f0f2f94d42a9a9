"""Arcee is Llama with an MLP without a gate. The MLP squares positive values."""

from eesd.model.families.llama import take_llama
from eesd.model.family import Family, Gguf, Own, Sizes
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    own = take_llama(fields, sizes)
    return own._replace(parts={**own.parts, "gated": False})


ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    positions=4096,
    eps=1e-5,
    activation=("hidden_act", "relu2"),
    activation_names={"relu2": "relu2"},
    own=_own,
    gguf=Gguf("arcee", biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"}, interleaved=True),
)
