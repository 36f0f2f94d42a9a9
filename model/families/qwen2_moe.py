"""Qwen2-MoE: Qwen2 with experts in some layers, and a gated expert that every token uses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eesd.common.architecture import SHARED
from eesd.common.geometry import Experts, Geometry
from eesd.model.experts import GGUF_NAMES, apart, gguf_counts, take_experts
from eesd.model.families.qwen3_moe import dense_layers
from eesd.model.family import Family, Gguf, Own, Sizes, Tensors, take_layer_types
from eesd.model.fields import Fields
from eesd.model.safetensors_file import CheckpointTensor

GGUF_SHARED = {"ffn_gate_inp_shexp": f"{SHARED}_gate"} | {
    f"ffn_{part}_shexp": f"{SHARED}.{part}_proj" for part in ("gate", "up", "down")
}
"""llama.cpp's names of the shared expert."""


def _window(fields: Fields, layers: int) -> int | None:
    """Return the window, if any layer has a window. Up to this length, sliding attention equals
    full attention."""
    window: int | None = fields.integer("sliding_window", 4096, optional=True, least=0)
    slides = fields.flag("use_sliding_window")
    first = fields.integer("max_window_layers", 28, least=0)
    types = take_layer_types(fields, layers)
    if types is None:
        types = ["sliding_attention"] if slides and first else []
    if "sliding_attention" not in types:
        return None
    if not window or not slides:
        raise ValueError("layer_types has sliding_attention, but there is no sliding window")
    return window


def _own(fields: Fields, sizes: Sizes) -> Own:
    parts: dict[str, Any] = {"qkv_bias": fields.flag("qkv_bias", True)}
    count, used = take_experts(fields, 60, 4, least=0)
    size = fields.integer("moe_intermediate_size", 1408)
    shared = fields.integer("shared_expert_intermediate_size", 5632)
    normed = fields.flag("norm_topk_prob")
    dense = dense_layers(fields, sizes.layers)
    if count and len(dense) < sizes.layers:
        parts["experts"] = Experts(count, used, size, normed, dense, shared, shared_gate=True)
    return Own(parts, _window(fields, sizes.layers))


def gguf_sizes(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and the sizes of experts."""
    sizes = {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    return gguf_counts(own, **sizes)


def gguf_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors, with separate tensors for each expert. A file may store the gate of the
    shared expert without its dimension of 1."""
    found = apart(tensors, geometry)
    for name, tensor in found.items():
        whole = (1, geometry.hidden_size)
        if isinstance(tensor, CheckpointTensor) and name.endswith(f"{SHARED}_gate.weight"):
            found[name] = replace(tensor, shape=whole if len(tensor.shape) == 1 else tensor.shape)
    return found


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    positions=32768,
    kv_heads=16,
    inner=5632,
    own=_own,
    tensors=apart,
    gguf=Gguf("qwen2moe", GGUF_NAMES | GGUF_SHARED, fields=gguf_sizes, tensors=gguf_tensors),
)
