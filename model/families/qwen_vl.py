"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. A token has positions in time, height and
width. In a text, the three positions are equal, so the rotary embedding is the usual one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from eesd.common.geometry import Experts, Geometry
from eesd.model.arrays import Array
from eesd.model.experts import GGUF_NAMES, apart, gguf_counts, take_experts
from eesd.model.families.qwen2 import QWEN2, take_switched_window
from eesd.model.families.qwen3 import QWEN3
from eesd.model.families.qwen3_5 import rope_of_text
from eesd.model.families.qwen3_moe import dense_layers
from eesd.model.family import (
    ChangedTensor,
    Gguf,
    Own,
    Sizes,
    Tensors,
    attention_biases,
    rows_of,
)
from eesd.model.fields import Fields
from eesd.model.safetensors_file import CheckpointTensor

ROPES = ("default", "linear", "yarn", "dynamic")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parts of the tensors that hold all experts of a layer."""


def _own_of_2(fields: Fields, sizes: Sizes) -> Own:
    return Own({"qkv_bias": True}, take_switched_window(fields, sizes.layers, first=80))


def _own_of_3(fields: Fields, _: Sizes) -> Own:
    return Own(attention_biases(fields) | {"qk_norm": True})


def _own_mixed(fields: Fields, sizes: Sizes) -> Own:
    fields.taken.add("norm_topk_prob")  # no effect: always normed
    count, used = take_experts(fields, 60, 4)
    size = fields.integer("moe_intermediate_size", 1408)
    dense = dense_layers(fields, sizes.layers)
    experts = Experts(count, used, size, normed=True, dense_layers=dense)
    own: Mapping[str, Experts | None] = {"experts": experts if len(dense) < sizes.layers else None}
    return Own({**_own_of_3(fields, sizes).parts, **own})


def _of_gguf(own: Fields, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return no fields. The sections of the rotary embedding and the number of layers that read
    image features have no effect on a text."""
    own.taken |= {"rope.dimension_sections", "n_deepstack_layers"}
    return {}


def _of_gguf_mixed(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    return _of_gguf(own, raw) | gguf_counts(own, expert_feed_forward_length="moe_intermediate_size")


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Split the tensors of all experts. Published files have them as [experts, in, out].
    transformers reads a tensor as [experts, out, in] if it has that shape."""
    experts = geometry.experts
    if experts is None:
        return tensors
    widths = {"gate_up_proj": 2 * experts.size, "down_proj": geometry.hidden_size}
    found: Tensors = {}
    for name, tensor in tensors.items():
        before, _, module = name.rpartition(".mlp.experts.")
        width = widths.get(module, 0)
        if (
            not isinstance(tensor, CheckpointTensor)
            or len(tensor.shape) != 3
            or tensor.shape[::2] != (experts.count, width)
            or tensor.shape[1] == width
        ):
            found[name] = tensor
            continue
        height = tensor.shape[1]
        flat = replace(tensor, shape=(prod(tensor.shape[:2]), width))
        columns = np.split(np.arange(width), len(PARTS[module]))
        for expert in range(experts.count):
            own = rows_of(flat, expert * height, (expert + 1) * height)
            for part, chosen in zip(PARTS[module], columns, strict=True):
                turned = partial(_turned, chosen)
                found[f"{before}.mlp.experts.{expert}.{part}.weight"] = ChangedTensor(
                    own, turned, (len(chosen), height)
                )
    return apart(found, geometry)


def _turned(columns: "np.ndarray[tuple[int], np.dtype[np.int64]]", values: Array) -> Array:
    """Return some columns of a weight [in, out] as rows."""
    return np.ascontiguousarray(values[:, columns].T)


QWEN2_VL = replace(
    QWEN2,
    model_type="qwen2_vl_text",
    architecture="Qwen2VLTextModel",
    kv_heads=8,
    theta=1e6,
    eps=1e-5,
    ropes=(*ROPES, "mrope"),
    rope_names={"mrope": "default"},
    rope_fields=rope_of_text,
    own=_own_of_2,
    gguf=Gguf("qwen2vl", fields=_of_gguf),
)
QWEN2_5_VL = replace(
    QWEN2_VL, gguf=None, model_type="qwen2_5_vl_text", architecture="Qwen2_5_VLTextModel"
)
QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl_text",
    architecture="Qwen3VLTextModel",
    positions=128000,
    theta=500000.0,
    ropes=ROPES,
    rope_fields=rope_of_text,
    own=_own_of_3,
    gguf=Gguf("qwen3vl", biases={"attention_bias": "attn_q"}, fields=_of_gguf),
)
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeTextModel",
    kv_heads=16,
    head_dim=None,
    own=_own_mixed,
    tensors=_tensors,
    gguf=Gguf("qwen3vlmoe", GGUF_NAMES, fields=_of_gguf_mixed, tensors=apart),
)
