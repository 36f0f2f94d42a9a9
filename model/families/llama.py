"""Llama 2 and 3, CodeLlama, SmolLM2 and many other models, and the model types that transformers
runs with Llama's code."""

from eesd.common.checks import shown
from eesd.model.family import Family, Gguf, Own, Sizes, take_window
from eesd.model.fields import Fields


def take_llama(fields: Fields, sizes: Sizes, biased: bool = False) -> Own:
    """Return the parts of the geometry that Llama's fields determine. ``biased`` is the default for
    biases."""
    biases = (fields.flag(name, biased) for name in ("attention_bias", "mlp_bias"))
    return _llama(fields, sizes, *biases)


def _llama(fields: Fields, sizes: Sizes, bias: bool, mlp_bias: bool) -> Own:
    kinds = fields.take("layer_types", None)
    if kinds is not None and kinds != ["full_attention"] * sizes.layers:
        # Transformers does not support it either.
        raise ValueError(
            f"layer_types is {shown(kinds)}, which is not supported; all layers have full attention"
        )
    # transformers ignores the window of a Llama config in its masks, but its KV cache drops the
    # tokens before the window.
    biases = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}
    return Own(biases, take_window(fields))


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    positions=2048,
    own=take_llama,
    gguf=Gguf(
        "llama", biases={"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}, interleaved=True
    ),
)


def _internlm3(fields: Fields, sizes: Sizes) -> Own:
    """Read InternLM3's two fields with other names. transformers accepts both names."""
    bias = _either(fields, "qkv_bias", "attention_bias")
    mlp_bias = _either(fields, "bias", "mlp_bias")
    if bias != mlp_bias:
        raise ValueError("qkv_bias and bias differ, which transformers does not support either")
    return _llama(fields, sizes, bias, mlp_bias)


def _either(fields: Fields, *names: str) -> bool:
    """Return a flag that has two names."""
    given = {fields.flag(name) for name in names if name in fields.raw}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(names)} are one option, and differ")
    return True in given


def _iquestcoder(fields: Fields, sizes: Sizes) -> Own:
    if fields.take("clip_qkv", None) is not None or fields.flag("use_sliding_window"):
        raise ValueError(
            "clip_qkv and use_sliding_window are not supported, which transformers refuses, too"
        )
    return take_llama(fields, sizes)


INTERNLM3 = Family(
    "internlm3",
    LLAMA.architecture,
    positions=32768,
    kv_heads=2,
    head_dim=128,
    eps=1e-5,
    own=_internlm3,
    published="InternLM3ForCausalLM",
)
IQUESTCODER = Family(
    "iquestcoder",
    LLAMA.architecture,
    positions=131072,
    kv_heads=8,
    head_dim=128,
    eps=1e-5,
    own=_iquestcoder,
    published="IQuestCoderForCausalLM",
)
