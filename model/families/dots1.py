"""dots.llm1 is Qwen3 with experts that are chosen as in DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from eesd.model.experts import GGUF_SCORED, apart, gguf_sigmoid, scored_experts, scored_tensors
from eesd.model.family import (
    LAYER_TYPES,
    Family,
    Gguf,
    Own,
    Sizes,
    attention_biases,
    take_kinds,
    take_layer_types,
)
from eesd.model.fields import Fields

DEFAULTS = {
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


def _own(fields: Fields, sizes: Sizes) -> Own:
    fields.taken.add("scoring_func")  # no effect: always sigmoid
    window = fields.integer("sliding_window", 4096, optional=True)
    first = fields.integer("max_window_layers", 62, optional=True, least=0)
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [
            LAYER_TYPES[window is not None and layer >= first] for layer in range(sizes.layers)
        ]
    parts = attention_biases(fields) | {"qk_norm": True} | take_kinds(fields, types)
    return Own(parts | scored_experts(fields, sizes.layers, DEFAULTS))


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    return gguf_sigmoid(own) | {"sliding_window": None}


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    positions=2048,
    kv_heads=32,
    own=_own,
    tensors=scored_tensors,
    gguf=Gguf("dots1", GGUF_SCORED, fields=_of_gguf, tensors=apart),
)
