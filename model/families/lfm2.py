"""LFM2 has short convolutions in most layers. The other layers have attention with norms of queries
and keys. Mixtures choose experts by sigmoids and biases."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.common.architecture import CHOICE_BIAS, ROUTER
from eesd.common.checks import shown
from eesd.common.geometry import CONVOLUTION, FULL, MOST_TAPS, Experts, Geometry
from eesd.common.weights import FINAL_NORM
from eesd.model.experts import GGUF_SCORED, apart, check_sigmoid, gguf_counts, take_experts
from eesd.model.family import (
    Family,
    Gguf,
    GgufFields,
    Own,
    Sizes,
    Tensors,
    renamed,
    take_layer_types,
)
from eesd.model.fields import Fields
from eesd.model.safetensors_file import CheckpointTensor

INNER = 12288
"""Default of ``intermediate_size``."""
NO_EFFECT = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
    *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
    *("conv_use_xavier_init", "num_heads", "use_pos_enc"),
)
"""Fields of published configs that transformers ignores."""
KINDS = {"conv": CONVOLUTION, "full_attention": FULL}
"""Kinds of layers by their names in transformers."""
NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def _kinds(fields: Fields, layers: int) -> dict[str, tuple[str, ...]]:
    """Return the part of the geometry for the kinds of layers."""
    types = take_layer_types(fields, layers, KINDS)
    attends = fields.take("full_attn_idxs", None)
    if types is None and attends is not None:
        if not isinstance(attends, list) or not all(type(one) is int for one in attends):
            raise ValueError(
                f"full_attn_idxs is {shown(attends)}, and must be a list of numbers of layers"
            )
        types = ["full_attention" if one in attends else "conv" for one in range(layers)]
    kinds = tuple(KINDS[one] for one in types or [])
    return {"layer_kinds": kinds} if CONVOLUTION in kinds else {}


def _intermediate(fields: Fields) -> int:
    """Return the intermediate size. It may be two thirds of the config's value, rounded up."""
    size: int = fields.integer("block_ff_dim", fields.integer("intermediate_size", INNER))
    factor = fields.number("block_ffn_dim_multiplier", 1.0, optional=True)
    step: int = fields.integer("block_multiple_of", 256)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // step) * step


def _own(fields: Fields, sizes: Sizes) -> Own:
    fields.taken |= {*NO_EFFECT}
    return Own(_parts(fields, sizes) | {"intermediate_size": _intermediate(fields)})


def _own_mixed(fields: Fields, sizes: Sizes) -> Own:
    count, used = take_experts(fields, 32, 4)
    dense = range(min(sizes.layers, fields.integer("num_dense_layers", 2, least=0)))
    experts = Experts(
        count,
        used,
        fields.integer("moe_intermediate_size", 1792),
        fields.flag("norm_topk_prob", True),
        tuple(dense),
        scores="sigmoid",
        choice_bias=fields.flag("use_expert_bias", True),
        norm_eps=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return Own(_parts(fields, sizes) | {"experts": experts if len(dense) < sizes.layers else None})


def _parts(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Return the parts of the geometry that dense models and mixtures share."""
    if fields.flag("conv_bias"):
        raise ValueError("convolutions with biases (conv_bias) are not supported")
    kinds = _kinds(fields, sizes.layers)
    taps = fields.integer("conv_L_cache", 3, most=MOST_TAPS)
    tied = fields.flag("tie_word_embeddings", True)
    parts = {
        "tied_embeddings": fields.flag("tie_embedding", tied),
        "qk_norm": True,
        "taps": taps if kinds else 0,
    }
    return parts | kinds


def _tensors(tensors: Tensors, _: Geometry) -> Tensors:
    own = {
        name.replace("model.embedding_norm.", "model.norm."): one for name, one in tensors.items()
    }
    return renamed(own, NAMES)


def _tensors_mixed(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors with the decoder's names. The parts of an expert have the same names as
    the parts of an MLP."""
    found: Tensors = {}
    for name, tensor in _tensors(tensors, geometry).items():
        name = name.replace(".feed_forward.expert_bias", f".{CHOICE_BIAS}.weight")
        name = name.replace(".feed_forward.gate.", f".{ROUTER}.")
        if ".feed_forward.experts." in name:
            name = name.replace(".feed_forward.", ".mlp.")
            for part in ("w1", "w2", "w3"):
                whole = NAMES[f"feed_forward.{part}"].removeprefix("mlp")
                name = name.replace(f".{part}.", f"{whole}.")
        found[name] = tensor
    return apart(found, geometry)


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a GGUF file. llama.cpp's converter writes the adjusted intermediate
    size."""
    heads = own.take("attention.head_count_kv")
    found = {
        "conv_L_cache": own.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if isinstance(heads, list):
        found["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    return found


def _of_gguf_mixed(own: GgufFields, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _of_gguf(own, raw)
    del found["block_auto_adjust_ff_dim"]
    check_sigmoid(own.integer("expert_gating_func"))
    return found | {
        **gguf_counts(own, expert_feed_forward_length="moe_intermediate_size"),
        "num_dense_layers": own.integer("leading_dense_block_count", 0, least=0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in own.tensors),
    }


def _of_gguf_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Rename the tensors to the decoder's names. The file leaves out a dimension of
    convolutions."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"blk\.(\d+)\.shortconv\.(\w+)\.weight", name, re.ASCII)
        if name == "token_embd_norm.weight":
            name = FINAL_NORM
        elif part:
            name = f"model.layers.{int(part[1])}.conv.{part[2]}.weight"
        if part and part[2] == "conv" and isinstance(tensor, CheckpointTensor):
            tensor = replace(tensor, shape=(*tensor.shape[:1], 1, *tensor.shape[1:]))
        found[name] = tensor
    return apart(found, geometry)


LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    positions=128000,
    kv_heads=8,
    theta=1e6,
    eps_name="norm_eps",
    eps=1e-5,
    tied=True,
    inner=INNER,
    activation=("", "silu"),
    own=_own,
    tensors=_tensors,
    gguf=Gguf("lfm2", fields=_of_gguf, tensors=_of_gguf_tensors, heads_by_layer=1),
)
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    inner=7168,
    own=_own_mixed,
    tensors=_tensors_mixed,
    gguf=Gguf(
        "lfm2moe",
        GGUF_SCORED,
        fields=_of_gguf_mixed,
        tensors=_of_gguf_tensors,
        heads_by_layer=1,
    ),
)
