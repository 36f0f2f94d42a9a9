"""gpt-oss has attention with sinks and biases, a window in every other layer, and experts with
biases and a clamped gate. The published weights of experts are MXFP4."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.architecture import CLAMP, CLAMPED_SLOPE, ROUTER, SINKS
from eesd.common.geometry import Experts, Geometry
from eesd.model.arrays import Array
from eesd.model.experts import GGUF_NAMES, apart, experts_of_all_layers, gguf_counts, take_experts
from eesd.model.family import (
    LAYER_TYPES,
    ChangedTensor,
    Family,
    Gguf,
    Own,
    Sizes,
    StoredTensor,
    Tensors,
    renamed,
    reordered,
    rope_or,
    rows_of,
    take_kinds,
    take_layer_types,
)
from eesd.model.fields import Fields
from eesd.model.safetensors_file import CheckpointTensor

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default of ``rope_parameters``."""
WINDOW = 128
EXPERTS = ".mlp.experts."
PARTS = ("gate_proj", "up_proj")
"""The modules whose rows alternate in ``gate_up_proj``."""


def _rope_fields(fields: Fields) -> Fields:
    fields.taken.add("initial_context_length")  # the same as the original positions
    return rope_or(fields, ROPE)


def _own(fields: Fields, sizes: Sizes) -> Own:
    types = take_layer_types(fields, sizes.layers)
    if types is None:
        types = [LAYER_TYPES[layer % 2 == 0] for layer in range(sizes.layers)]
    for name, only in {"swiglu_alpha": CLAMPED_SLOPE, "swiglu_limit": CLAMP}.items():
        if fields.number(name, only) != only:
            raise ValueError(f"{name} must be {only}, as in all published models")
    count, used = take_experts(fields, 128, 4)
    fields.taken.add("experts_per_token")  # another name of this field in published configs
    size = fields.integer("intermediate_size", 2880)
    bias = fields.flag("attention_bias", True)
    parts = {
        "qkv_bias": bias,
        "output_bias": bias,
        "sinks": True,
        "activation": "clamped",
        "wide_norms": True,
    }
    experts = Experts(count, used, size, normed=True, bias=True)
    return Own(parts | experts_of_all_layers(experts) | take_kinds(fields, types, WINDOW))


def _tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Split the tensors of experts, and rename the router."""
    found: Tensors = {}
    for name, tensor in renamed(tensors, {"mlp.router": ROUTER}).items():
        if name.endswith(f".{SINKS}"):
            found[f"{name}.weight"] = tensor
        elif EXPERTS in name:
            found |= _experts(name, tensor, geometry)
        else:
            found[name] = tensor
    return found


def _experts(name: str, tensor: StoredTensor, geometry: Geometry) -> Tensors:
    """Return the decoder's tensors for a stored tensor, which is an expert's tensor with MXFP4
    levels or a tensor of all experts."""
    before, _, module = name.partition(EXPERTS)
    levels = re.fullmatch(r"(\d+)\.(gate_up_proj|down_proj)\.weight", module, re.ASCII)
    if levels:
        prefix = f"{before}{EXPERTS}{levels[1]}."
        if levels[2] == "down_proj":
            return {f"{prefix}down_proj.weight": tensor}
        rows = np.arange(tensor.shape[0])
        return {
            f"{prefix}{part}.weight": reordered(tensor, rows[start::2])
            for start, part in enumerate(PARTS)
        }
    experts = geometry.experts
    assert experts is not None
    kind = "bias" if module.endswith("_bias") else "weight"
    module = module.removesuffix("_bias")
    shapes = {"gate_up_proj": (geometry.hidden_size, 2 * experts.size)}
    shapes["down_proj"] = (experts.size, geometry.hidden_size)
    if module not in shapes:
        return {name: tensor}
    shape = shapes[module] if kind == "weight" else shapes[module][1:]
    if tensor.shape != (experts.count, *shape):
        return {name: tensor}
    parts = PARTS if module == "gate_up_proj" else ("down_proj",)
    assert isinstance(tensor, CheckpointTensor)
    flat = replace(tensor, shape=(prod(tensor.shape[:-1]), tensor.shape[-1]))
    height = flat.shape[0] // experts.count
    found: Tensors = {}
    for expert in range(experts.count):
        own = rows_of(flat, expert * height, (expert + 1) * height)
        for start, part in enumerate(parts):
            columns = np.arange(start, shape[-1], len(parts))
            made = (len(columns), *shape[:-1])
            found[f"{before}{EXPERTS}{expert}.{part}.{kind}"] = ChangedTensor(
                own, partial(_columns, columns), made
            )
    return found


def _columns(columns: NDArray[np.int64], values: Array) -> Array:
    """Return some columns of a weight [in, out] as rows, or some values of a bias [1, out]."""
    chosen: Array = values[:, columns]
    return np.ascontiguousarray(chosen.T) if len(values) > 1 else chosen.reshape(-1)


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    counts = gguf_counts(own, expert_feed_forward_length="intermediate_size")
    window = own.integer("attention.sliding_window", WINDOW)
    # Without a scaling in the file, frequencies are not scaled.
    rope = raw["rope_scaling"] or {"rope_type": "default"}
    return counts | {"sliding_window": window, "rope_scaling": rope}


def _of_gguf_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Split each tensor of all experts into a tensor for each expert. llama.cpp stores gate and up
    separately."""
    found: Tensors = {}
    for name, tensor in apart(tensors, geometry).items():
        before, is_of_all, module = name.partition(EXPERTS)
        count = geometry.experts.count if geometry.experts else 0
        if not is_of_all or module[:1].isdigit() or tensor.shape[:1] != (count,):
            found[name] = tensor
            continue
        for expert in range(count):
            row = rows_of(tensor, expert, expert + 1)
            own = f"{before}{EXPERTS}{expert}.{module}"
            found[own] = ChangedTensor(row, np.ravel, tensor.shape[1:])
    return found


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    positions=131072,
    kv_heads=8,
    head_dim=64,
    theta=150000.0,
    eps=1e-5,
    inner=2880,
    rope_fields=_rope_fields,
    own=_own,
    tensors=_tensors,
    gguf=Gguf(
        "gpt-oss",
        GGUF_NAMES | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": SINKS},
        biases={"attention_bias": "attn_q"},
        fields=_of_gguf,
        tensors=_of_gguf_tensors,
    ),
)
