"""DeepSeek V2 and V3, GLM-4.7-Flash, Youtu-LLM and MiniCPM3 have latent attention.

The rows of a head in ``kv_b_proj`` are split into a part for the key and a part for the value. The
part for the key is transposed, because it multiplies queries.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import frexp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.geometry import Experts, Geometry, Latent
from eesd.common.weights import FINAL_NORM
from eesd.model.experts import (
    GGUF_SCORED,
    SIGMOID,
    SOFTMAX,
    apart,
    gguf_scored,
    scored_experts,
    scored_tensors,
    take_experts,
)
from eesd.model.family import (
    ChangedTensor,
    Family,
    Gguf,
    Own,
    Sizes,
    StoredTensor,
    Tensors,
    attention_biases,
    below_each_other,
    reordered,
    rows_of,
    take_layer_types,
    take_positive,
)
from eesd.model.fields import Fields

HEAD = "qk_rope_head_dim"
"""The field with the number of rotated values of a head."""
NO_EFFECT = (
    *("aux_loss_alpha", "ep_size", "moe_layer_freq", "num_mtp_layers", "num_nextn_predict_layers"),
    *("qk_head_dim", "router_aux_loss_coef", "output_router_logits", "scoring_func", "seq_aux"),
)
"""Fields of published configs that transformers ignores."""


LATENT = Latent(1536, 512, 128, 64, 128)
EXPERTS = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
GLM_EXPERTS = EXPERTS | {
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
}
"""Defaults of DeepSeek-V3 and GLM-4.7-Flash."""


def take_latent(fields: Fields, default: Latent) -> dict[str, Any]:
    """Return the parts of the geometry for latent attention. ``default`` has the defaults of its
    sizes."""
    heads = fields.integer("num_attention_heads")
    if (fields.raw.get("num_key_value_heads") or heads) != heads:
        raise ValueError("num_key_value_heads must equal num_attention_heads in latent attention")
    latent = Latent(
        fields.integer("q_lora_rank", default.query_rank, optional=True) or 0,
        fields.integer("kv_lora_rank", default.rank),
        fields.integer("qk_nope_head_dim", default.plain),
        fields.integer(HEAD, default.rotary),
        fields.integer("v_head_dim", default.value),
    )
    if fields.take("head_dim", latent.rotary) not in (latent.rotary, None):
        raise ValueError(f"head_dim must equal {HEAD}, as in all published models")
    fields.taken |= {*NO_EFFECT}
    return attention_biases(fields) | {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.half,
        "attention_scale": (latent.plain + latent.rotary) ** -0.5 * _sharpened(fields),
    }


def _sharpened(fields: Fields) -> float:
    """Return the factor of scores for long texts. It is the square of yarn's factor for
    ``mscale_all_dim``."""
    given = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}
    rope = Fields(given)
    kind = rope.take("rope_type", rope.take("type", "default"))
    by: float | None = rope.number("mscale_all_dim", None, optional=True)
    if kind == "default" or not by:
        return 1.0
    longer = log(max(take_positive(rope, "factor", None), 1.0))
    return float(0.1 * by * longer + 1.0) ** 2


def _own(fields: Fields, _: Sizes, default: Latent) -> Own:
    if not fields.flag("rope_interleave", True):
        raise ValueError("rope_interleave must be true, as in all published models")
    return Own(take_latent(fields, default))


def _own_v3(fields: Fields, sizes: Sizes) -> Own:
    own = _own(fields, sizes, LATENT)
    return own._replace(parts={**own.parts, **scored_experts(fields, sizes.layers, EXPERTS)})


def _own_v2(fields: Fields, sizes: Sizes) -> Own:
    """Shares are never divided by their sum, even if ``norm_topk_prob`` is true."""
    parts = take_latent(fields, LATENT) | {"mlp_bias": fields.flag("mlp_bias")}
    if fields.raw.get("norm_topk_prob") is False:
        fields.taken.add("norm_topk_prob")
    method = fields.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"topk_method is {shown(method)}, and must be greedy or group_limited_greedy"
        )
    count, used = take_experts(fields, 64, ..., names=("n_routed_experts", "num_experts"))
    size = fields.integer("moe_intermediate_size", 1407)
    shared = size * fields.integer("n_shared_experts", 2, least=0)
    dense = range(min(sizes.layers, fields.integer("first_k_dense_replace", 0, least=0)))
    groups = fields.integer("n_group", None, optional=True)
    used_groups = fields.integer("topk_group", None, optional=True)
    if method == "greedy":
        groups = used_groups = 1
    scale = fields.number("routed_scaling_factor", 1.0)
    experts = Experts(count, used, size, False, tuple(dense), shared, scale=scale)
    if len(dense) < sizes.layers:
        parts["experts"] = replace(experts, groups=groups or 0, used_groups=used_groups or 0)
    return Own(parts)


def _own_glm(fields: Fields, sizes: Sizes) -> Own:
    """``first_k_dense_replace`` of published configs has no effect."""
    own = _own(fields, sizes, Latent(768, 512, 192, 64, 256))
    types = take_layer_types(fields, sizes.layers, ("dense", "sparse"), "mlp_layer_types")
    if types is None:
        types = ["dense", *["sparse"] * (sizes.layers - 1)]
    fields.taken.add("first_k_dense_replace")
    dense = [layer for layer, kind in enumerate(types) if kind == "dense"]
    experts = scored_experts(fields, sizes.layers, GLM_EXPERTS, dense)
    return own._replace(parts={**own.parts, **experts})


def _own_minicpm3(fields: Fields, sizes: Sizes) -> Own:
    """The factors are merged as Granite's are."""
    heads = fields.integer("num_attention_heads")
    parts = take_latent(fields, Latent(768, 256, 64, 32, sizes.hidden // heads))
    depth = fields.number("scale_depth", 1.4, optional=True)
    base = fields.integer("dim_model_base", 256, optional=True) or sizes.hidden
    residual = 1.0 if depth is None else depth / sizes.layers**0.5
    logits = sizes.hidden / base
    parts |= {
        "embedding_scale": take_positive(fields, "scale_emb", 12) / residual,
        "rms_norm_eps": sizes.eps / residual**2,
        "wide_norms": frexp(logits)[0] != 0.5,
    }
    return Own(parts, divided={FINAL_NORM: logits})


def latent_tensors(tensors: Tensors, geometry: Geometry, interleaved: bool = True) -> Tensors:
    """Return the tensors with the decoder's names. The rows of queries and keys are in the
    decoder's order."""
    latent = geometry.latent
    assert latent is not None
    turned = np.arange(latent.rotary)
    if interleaved:
        turned = turned.reshape(-1, 2).T.reshape(-1)
    rows = np.arange(geometry.num_heads * (latent.plain + latent.rotary))
    apart = rows.reshape(geometry.num_heads, -1)
    queries = (apart[:, : latent.plain], apart[:, latent.plain :][:, turned])
    query = np.concatenate([part.reshape(-1) for part in queries])
    key = np.concatenate([np.arange(latent.rank), latent.rank + turned])
    found: Tensors = {}
    for name, tensor in tensors.items():
        before, _, within = name.partition(".self_attn.")
        module, _, kind = within.rpartition(".")
        prefix = f"{before}.self_attn."
        if module in ("q_proj", "q_b_proj"):
            found[name] = _in_order(tensor, query)
        elif module == "kv_a_proj_with_mqa":
            found[f"{prefix}kv_a_proj.{kind}"] = _in_order(tensor, key)
        elif module == "kv_b_proj":
            found |= _by_heads(prefix, tensor, geometry.num_heads, latent)
        else:
            found[name] = tensor
    return found


def _in_order(tensor: StoredTensor, order: NDArray[np.int64]) -> StoredTensor:
    """Return the rows in this order. A tensor of another size is refused later."""
    fits = tensor.shape[:1] == (len(order),)
    return reordered(tensor, order) if fits else tensor


def _by_heads(prefix: str, tensor: StoredTensor, heads: int, latent: Latent) -> Tensors:
    """Return the weights of each head from ``kv_b_proj``."""
    rows = latent.plain + latent.value
    if tensor.shape != (heads * rows, latent.rank):
        return {f"{prefix}kv_b_proj.weight": tensor}  # the heads' weights are reported missing
    found: Tensors = {}
    for head in range(heads):
        middle = head * rows + latent.plain
        inward = rows_of(tensor, head * rows, middle)
        shape = (latent.rank, latent.plain)
        found[f"{prefix}heads.{head}.k_b_proj.weight"] = ChangedTensor(inward, np.transpose, shape)
        outward = rows_of(tensor, middle, middle + latent.value)
        found[f"{prefix}heads.{head}.v_b_proj.weight"] = outward
    return found


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    return latent_tensors(scored_tensors(tensors, geometry), geometry)


def gguf_latent(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention. Old files, which have ``kv_b_proj``, give the sizes of
    heads without ``_mla``."""
    rotary = own.integer("rope.dimension_count")
    sizes = [
        own.integer(f"attention.{part}_length_mla", own.integer(f"attention.{part}_length"))
        for part in ("key", "value")
    ]
    return {
        "num_key_value_heads": raw["num_attention_heads"],
        "q_lora_rank": own.integer("attention.q_lora_rank", None, optional=True),
        "kv_lora_rank": own.integer("attention.kv_lora_rank"),
        HEAD: rotary,
        "qk_nope_head_dim": sizes[0] - rotary,
        "v_head_dim": sizes[1],
    }


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields. All models have one architecture, and their scores tell them apart."""
    found = gguf_latent(own, raw)
    by = own.number("rope.scaling.yarn_log_multiplier", 0.0)
    if by and raw["rope_scaling"]:
        scale = 10 * by  # llama.cpp takes mscale to be the same number
        found["rope_scaling"] = raw["rope_scaling"] | {"mscale": scale, "mscale_all_dim": scale}
    kind = own.integer("expert_gating_func", 0, least=0)
    if not own.raw.get("expert_count"):
        own.taken |= {"expert_count", "expert_feed_forward_length", "expert_shared_count"}
        own.taken.add("leading_dense_block_count")
        return found | {"model_type": YOUTU.model_type}
    found |= gguf_scored(own)
    if kind == SIGMOID or (kind == 0 and _is_glm(raw)):
        return found | {"model_type": DEEPSEEK_V3.model_type}
    if kind not in (0, SOFTMAX) or found["norm_topk_prob"]:
        raise ValueError("expert_gating_func must be 1 or 2, and 2 with expert_weights_norm")
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    return found | {"model_type": DEEPSEEK_V2.model_type, "topk_method": method}


def _is_glm(raw: Mapping[str, Any]) -> bool:
    """Whether a file is GLM-4.7-Flash, which does not name the scores of its experts. llama.cpp
    goes by the same numbers."""
    return raw["num_hidden_layers"] in (47, 48) and raw["vocab_size"] == 154880


def _of_gguf_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the decoder's tensors. New files have a matrix for each head."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix("_b.weight")
        if module == name or len(tensor.shape) != 3:
            found[name] = tensor
            continue
        before, _, part = module.rpartition(".")
        whole = below_each_other(tensor)
        rows = tensor.shape[1]
        for head in range(tensor.shape[0]):
            own = rows_of(whole, head * rows, (head + 1) * rows)
            found[f"{before}.heads.{head}.{part}_b_proj.weight"] = own
    return latent_tensors(apart(found, geometry), geometry)


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    positions=4096,
    kv_heads=128,
    head_name=HEAD,
    head_dim=64,
    inner=18432,
    own=_own_v3,
    tensors=_tensors,
    gguf=Gguf(
        "deepseek2",
        GGUF_SCORED
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b",
            "attn_v_b": "self_attn.v_b",
        },
        fields=_of_gguf,
        tensors=_of_gguf_tensors,
        latent=True,
    ),
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    positions=2048,
    kv_heads=None,
    inner=11008,
    own=_own_v2,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    positions=202752,
    kv_heads=20,
    kv_heads_null=False,
    eps=1e-5,
    inner=10240,
    own=_own_glm,
)
YOUTU = replace(
    DEEPSEEK_V3,
    model_type="youtu",
    architecture="YoutuForCausalLM",
    positions=131072,
    kv_heads=16,
    tied=True,
    inner=6144,
    own=partial(_own, default=LATENT),
    tensors=latent_tensors,
)
MINICPM3 = Family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    positions=32768,
    kv_heads=40,
    head_name=HEAD,
    head_dim=32,
    eps=1e-5,
    tied=True,
    inner=6400,
    own=_own_minicpm3,
    tensors=partial(latent_tensors, interleaved=False),
)
