"""The text model of Gemma 4. Full layers and sliding layers have heads of different sizes, and
values are normalized. Some models have layer inputs made from the tokens, layers that read the keys
and values of earlier layers, values equal to keys, or a mixture of experts next to the MLP."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

from eesd.common.architecture import (
    EXPERT_SCALES,
    EXPERTS_NORM,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUTS,
    LAYER_SCALE,
    MIXED_NORM,
    MLP_NORM,
    ROUTER,
    ROUTER_NORM,
)
from eesd.common.checks import shown
from eesd.common.geometry import FULL, Experts, Geometry, RopeScaling
from eesd.model.experts import GGUF_NAMES as GGUF_EXPERTS
from eesd.model.experts import apart, gguf_counts
from eesd.model.families.gemma2 import GEMMA2, GGUF_NAMES, NAMES, take_cap
from eesd.model.family import (
    LAYER_TYPES,
    Gguf,
    GgufFields,
    Own,
    Sizes,
    Tensors,
    attention_biases,
    local_theta,
    renamed,
    ropes_by_kind,
    take_kinds,
    take_layer_types,
    take_positive,
)
from eesd.model.fields import Fields

FULL_THETA = 1e6
LOCAL_THETA = 10000.0
_ROTATED = "rope.dimension_count_swa"
WHOLE_NAMES = {
    "embed_tokens_per_layer": INPUTS,
    "per_layer_model_projection": INPUT_PROJECTION,
    "per_layer_projection_norm": INPUT_NORM,
}
"""Modules outside of blocks."""
BLOCK_NAMES = NAMES | {
    "per_layer_input_gate": "input_gate_proj",
    "per_layer_projection": "input_out_proj",
    "post_per_layer_input_norm": "input_norm",
    "post_feedforward_layernorm_1": MLP_NORM,
    "pre_feedforward_layernorm_2": EXPERTS_NORM,
    "post_feedforward_layernorm_2": MIXED_NORM,
    "router.proj": ROUTER,
    "experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "experts.down_proj": "mlp.experts.down_proj",
}
VECTORS = {
    "layer_scalar": LAYER_SCALE,
    "router.scale": ROUTER_NORM,
    "router.per_expert_scale": EXPERT_SCALES,
    "experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "experts.down_proj": "mlp.experts.down_proj",
}
"""Tensors of blocks whose names do not end in ``.weight``."""


GGUF_PARTS = {
    "per_layer_token_embd.weight": f"{INPUTS}.weight",
    "per_layer_model_proj.weight": f"{INPUT_PROJECTION}.weight",
    "per_layer_proj_norm.weight": f"{INPUT_NORM}.weight",
    "inp_gate": "input_gate_proj",
    "proj": "input_out_proj",
    "post_norm": "input_norm",
    "layer_output_scale": LAYER_SCALE,
    "post_ffw_norm_1": MLP_NORM,
    "pre_ffw_norm_2": EXPERTS_NORM,
    "post_ffw_norm_2": MIXED_NORM,
    "ffn_gate_inp": ROUTER,
    "ffn_gate_inp.scale": f"{ROUTER_NORM}.weight",
    "ffn_down_exps.scale": f"{EXPERT_SCALES}.weight",
}
"""llama.cpp's names."""


class _Heads(NamedTuple):
    """The number of KV heads and the size of a head in a kind of layer."""

    kv_heads: int
    size: int


def _rope_fields(_: Fields) -> Fields:
    return Fields({})  # each kind of layer has different fields


def _types(fields: Fields, layers: int) -> list[str]:
    """Return the types of the layers. As in transformers, the last layer is always a full layer."""
    types = take_layer_types(fields, layers)
    if types is None:
        types = [LAYER_TYPES[bool((layer + 1) % 6)] for layer in range(layers)]
    return [*types[:-1], "full_attention"]


def _full_heads(fields: Fields, types: list[str], sliding: _Heads) -> _Heads:
    """Return the heads of full layers. transformers stores for each layer how its heads differ."""
    by_layer = fields.take("per_layer_config", None)
    size = fields.integer("global_head_dim", 512)
    count = fields.integer("num_global_key_value_heads", None, optional=True)
    if not fields.flag("attention_k_eq_v") or count is None:
        count = sliding.kv_heads
    if by_layer is None:
        return _Heads(count, size)
    if by_layer == {}:
        return sliding
    full = [str(layer) for layer, kind in enumerate(types) if kind == "full_attention"]
    found = [by_layer.get(layer) for layer in full] if isinstance(by_layer, dict) else [None]
    own = found[0]
    known = ("head_dim", "num_key_value_heads")
    if (
        not isinstance(own, dict)
        or any(other != own for other in found)
        or not {*own} <= {*known}
        or {*by_layer} != {*full}
    ):
        raise ValueError(
            f"per_layer_config is {shown(by_layer)}, and must give the same "
            f"{' and '.join(known)} for each layer with full attention"
        )
    heads = Fields(own)
    count = heads.integer("num_key_value_heads", sliding.kv_heads)
    return _Heads(count, heads.integer("head_dim", sliding.size))


def _caches(sliding: _Heads, full: _Heads) -> dict[str, Any]:
    """Return the sizes of the caches and the sizes of the heads of each kind of layer."""
    size = gcd(sliding.size, full.size)
    most = max(sliding.kv_heads * sliding.size, full.kv_heads * full.size)
    return {
        "num_kv_heads": -(-most // size),
        "head_dim": size,
        "full_heads": tuple(full),
        "sliding_heads": tuple(sliding),
    }


def _full_rope(fields: Fields, size: int) -> dict[str, Any]:
    """Return the rotary embedding of full layers. Their heads have ``size`` values."""
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    given = fields.take("rope_parameters", None)
    own = Fields(
        {"rope_theta": FULL_THETA} | (ropes_by_kind(fields)["full_attention"] if given else default)
    )
    kind = own.take("rope_type", "default")
    parts: dict[str, Any] = {"rope_theta": own.number("rope_theta")}
    if kind == "default":
        return parts
    if kind != "proportional":
        raise ValueError(
            f"the rope scaling {shown(kind)} of layers with full attention is not supported; "
            "supported are default and proportional"
        )
    pairs = int(own.number("partial_rotary_factor", 1.0) * size // 2)
    if not 0 < pairs <= size // 2:
        raise ValueError("partial_rotary_factor leaves no pair of values to rotate, or too many")
    scaling = RopeScaling("proportional", take_positive(own, "factor", 1.0))
    return parts | {"rotated": pairs % (size // 2), "rope_scaling": scaling}


def _shared(fields: Fields, kinds: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the parts of the geometry for layers that read the keys and values of other layers."""
    count = fields.integer("num_kv_shared_layers", 0, optional=True, least=0)
    doubles = fields.flag("use_double_wide_mlp")
    if not count:
        return {}
    if count >= layers:
        raise ValueError(f"num_kv_shared_layers is {count}, and must be below {layers}")
    size = 2 * fields.integer("intermediate_size") if doubles else 0
    own = {"shared_from": layers - count, "shared_size": size}
    return own if kinds else own | {"layer_kinds": (FULL,) * layers}


def _experts(fields: Fields) -> dict[str, Any]:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    fields.taken |= {*names}
    if not fields.flag("enable_moe_block"):
        return {}
    count, used, size = (fields.integer(name) for name in names)
    return {"experts": Experts(count, used, size, normed=True, beside=True)}


def _inputs(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    size = fields.integer("hidden_size_per_layer_input", 256, optional=True, least=0)
    rows = fields.take("vocab_size_per_layer_input", 262144)
    if not size:
        return {}
    if rows != fields.integer("vocab_size"):
        raise ValueError("vocab_size_per_layer_input must equal vocab_size, as in all models")
    return {"input_size": size, "input_layers": sizes.layers}


def _own(fields: Fields, sizes: Sizes) -> Own:
    if fields.take("use_bidirectional_attention", None) not in (None, "vision"):
        raise ValueError(
            "use_bidirectional_attention is not supported; a token must see only those before it"
        )
    if fields.take("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ValueError("hidden_activation must be gelu_pytorch_tanh, as in all published models")
    types = _types(fields, sizes.layers)
    kinds = take_kinds(fields, types, 512)
    sliding = _Heads(fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256))
    full = _full_heads(fields, types, sliding)
    heads = {"num_kv_heads": full.kv_heads, "head_dim": full.size}
    if kinds:
        heads = _caches(sliding, full)
    parts = attention_biases(fields) | {
        "wide_norms": True,
        "embedding_scale": sizes.hidden**0.5,
        "norm_behind": True,
        "qk_norm": True,
        "value_norm": True,
        "layer_scale": True,
        "attention_scale": 1.0,
        "keys_as_values": fields.flag("attention_k_eq_v"),
        "logit_cap": take_cap(fields, "final_logit_softcapping", None),
    }
    parts |= kinds | heads | _full_rope(fields, full.size)
    parts |= local_theta(fields, LOCAL_THETA, kinds) | _experts(fields)
    parts |= _shared(fields, kinds, sizes.layers) | _inputs(fields, sizes)
    divided = {f"{INPUT_NORM}.weight": 2**0.5}
    if "experts" in parts:
        for layer in range(sizes.layers):
            divided[f"model.layers.{layer}.{ROUTER_NORM}.weight"] = sizes.hidden**0.5
    return Own(parts, divided=divided)


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors with the names and shapes of the decoder."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removeprefix("model.").removesuffix(".weight")
        layer, _, within = name.removeprefix("model.layers.").partition(".")
        if module in WHOLE_NAMES:
            name = f"{WHOLE_NAMES[module]}.weight"
        elif within in VECTORS:
            name = f"model.layers.{layer}.{VECTORS[within]}.weight"
        found[name] = tensor
    return apart(renamed(found, BLOCK_NAMES), geometry)


def _of_gguf(own: GgufFields, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields. Files list some sizes by layer, and lack the values that equal keys."""
    layers = raw["num_hidden_layers"]
    slides = own.take("attention.sliding_window_pattern")
    size = own.integer("attention.key_length_swa")
    same = [own.integer(key, size) for key in ("attention.value_length_swa", _ROTATED)]
    if not isinstance(slides, list) or len(slides) != layers or same != [size, size]:
        raise ValueError(
            "attention.sliding_window_pattern must have an entry for each layer, and the keys and "
            f"values of layers with a window must have {_ROTATED} values"
        )
    heads = own.take("attention.head_count_kv")
    counts = dict(zip(slides, heads, strict=True)) if isinstance(heads, list) else {}
    shared = own.integer("attention.shared_kv_layers", 0, least=0)
    mixed = bool(own.integer("expert_count", 0, least=0))
    found = {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": raw["rope_theta"]} | (raw["rope_scaling"] or {}),
            "sliding_attention": {"rope_theta": own.number("rope.freq_base_swa", LOCAL_THETA)},
        },
        "layer_types": [LAYER_TYPES[bool(one)] for one in slides],
        "sliding_window": own.integer("attention.sliding_window"),
        "head_dim": size,
        "global_head_dim": raw["head_dim"],
        "num_key_value_heads": counts.get(True, raw["num_key_value_heads"]),
        "num_global_key_value_heads": counts.get(False, raw["num_key_value_heads"]),
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_k.weight" in own.tensors
            and f"blk.{layer}.attn_v.weight" not in own.tensors
            for layer in range(layers)
        ),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": own.integer("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": raw["vocab_size"],
        "final_logit_softcapping": own.number("final_logit_softcapping", 30.0),  # as in llama.cpp
        "enable_moe_block": mixed,
    }
    widths = own.take("feed_forward_length")
    if isinstance(widths, list):
        width = Fields({"feed_forward_length": widths[0]}).integer("feed_forward_length")
        if widths != [width] * (layers - shared) + [2 * width] * shared:
            raise ValueError("feed_forward_length must double where layers share keys and values")
        found |= {"intermediate_size": width, "use_double_wide_mlp": True}
    if mixed:
        counted = gguf_counts(own, expert_feed_forward_length="moe_intermediate_size")
        found |= counted | {"top_k_experts": counted["num_experts_per_tok"]}
    return found


GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    positions=131072,
    theta=FULL_THETA,
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
    gguf=Gguf(
        "gemma4",
        GGUF_NAMES | GGUF_EXPERTS | GGUF_PARTS,
        fields=_of_gguf,
        tensors=apart,
        heads_by_layer=2,
        optional=("feed_forward_length",),
    ),
    by_layer=True,
)
