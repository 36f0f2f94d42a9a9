"""Qwen3-MoE: Qwen3 with a mixture of experts in all layers, or in some."""

from collections.abc import Mapping
from typing import Any

from eesd.common.checks import shown
from eesd.common.geometry import Experts
from eesd.model.experts import GGUF_NAMES, apart, gguf_counts, take_experts
from eesd.model.family import Family, Gguf, Own, Sizes, attention_biases
from eesd.model.fields import Fields


def _own(fields: Fields, sizes: Sizes) -> Own:
    kinds = fields.take("layer_types", None)
    if kinds is not None and kinds != ["full_attention"] * sizes.layers:
        raise ValueError(
            f"layer_types is {shown(kinds)}, which is not supported for Qwen3MoeForCausalLM"
        )
    window: int | None = fields.integer("sliding_window", 4096, optional=True)
    parts = attention_biases(fields) | {"qk_norm": True}
    count, used = take_experts(fields, 128, 8, least=0)
    size = fields.integer("moe_intermediate_size", 768)
    normed = fields.flag("norm_topk_prob")
    dense = dense_layers(fields, sizes.layers)
    if count and len(dense) < sizes.layers:
        parts["experts"] = Experts(count, used, size, normed, dense)
    return Own(parts, window if fields.flag("use_sliding_window") else None)


def dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without experts."""
    listed = fields.take("mlp_only_layers", None)
    step = fields.integer("decoder_sparse_step", 1)
    if listed is not None and not (
        isinstance(listed, list) and all(type(layer) is int for layer in listed)
    ):
        raise ValueError(f"mlp_only_layers is {shown(listed)}, and must be a list of layers")
    return tuple(layer for layer in range(layers) if layer in (listed or ()) or (layer + 1) % step)


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    counts = gguf_counts(own, expert_feed_forward_length="moe_intermediate_size")
    return counts | {"norm_topk_prob": True}  # as llama.cpp does


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    positions=32768,
    kv_heads=4,
    kv_heads_null=False,
    own=_own,
    tensors=apart,
    gguf=Gguf("qwen3moe", GGUF_NAMES, fields=_of_gguf),
)
