"""Qwen3-Next has the gated delta rule in most layers, and attention with a gate in the other
layers. It has experts, and a gated expert that every token uses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from eesd.common.architecture import DELTA_BIAS, DELTA_DECAY
from eesd.common.checks import shown
from eesd.common.geometry import DELTA, FULL, MOST_TAPS, DeltaRule, Experts, Geometry
from eesd.model.experts import GGUF_NAMES, apart, take_experts
from eesd.model.families.gemma import whole_norms
from eesd.model.families.qwen2_moe import GGUF_SHARED, gguf_sizes, gguf_tensors
from eesd.model.families.qwen3_moe import dense_layers
from eesd.model.family import (
    ChangedTensor,
    Family,
    Gguf,
    Own,
    Sizes,
    StoredTensor,
    Tensors,
    attention_biases,
    renamed,
    reordered,
    take_layer_types,
)
from eesd.model.fields import Fields
from eesd.model.gguf_file import GgufTensor
from eesd.model.safetensors_file import CheckpointTensor

KINDS = {"linear_attention": DELTA, "full_attention": FULL}
"""Kinds of layers by their names in transformers."""
RULE = "linear_attn."
NAMES = {f"{RULE}in_proj_{part}": f"{RULE}in_{part}_proj" for part in ("qkv", "z", "b", "a")}
"""Projections that Qwen3.5 stores one by one."""
GGUF_RULE = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": f"{RULE}in_proj_qkv",
    "attn_gate": f"{RULE}in_proj_z",
    "ssm_in": f"{RULE}in_proj_qkvz",
    "ssm_ba": f"{RULE}in_proj_ba",
    "ssm_beta": f"{RULE}in_proj_b",
    "ssm_alpha": f"{RULE}in_proj_a",
    "ssm_conv1d": f"{RULE}conv1d",
    "ssm_norm": f"{RULE}norm",
    "ssm_out": f"{RULE}out_proj",
    "ssm_dt.bias": f"{RULE}dt_bias",
    "ssm_a": f"{RULE}A_log",
}
"""llama.cpp's names in layers with the gated delta rule. ``ssm_in`` is in old files."""


def take_delta(fields: Fields, sizes: Sizes) -> dict[str, Any]:
    """Return the parts of the geometry for both kinds of layers."""
    if fields.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(
            f"hidden_act is {shown(fields.raw['hidden_act'])}, and must be silu, which is also "
            "the activation of the convolutions"
        )
    interval = fields.integer("full_attention_interval", 4)
    types = take_layer_types(fields, sizes.layers, KINDS)
    if types is None:
        names = [*KINDS]
        types = [names[(layer + 1) % interval == 0] for layer in range(sizes.layers)]
    rule = DeltaRule(
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", 4, most=MOST_TAPS),
    )
    kinds = tuple(KINDS[one] for one in types)
    return attention_biases(fields) | {
        "qk_norm": True,
        "wide_norms": True,
        "attention_gate": True,
        "layer_kinds": kinds,
        "delta": rule if DELTA in kinds else None,
    }


def _own(fields: Fields, sizes: Sizes) -> Own:
    parts = take_delta(fields, sizes)
    count, used = take_experts(fields, 512, 10, least=0)
    size = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    normed = fields.flag("norm_topk_prob", True)
    dense = dense_layers(fields, sizes.layers)
    if count and len(dense) < sizes.layers:
        parts["experts"] = Experts(count, used, size, normed, dense, shared, shared_gate=True)
    return Own(parts)


def delta_tensors(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors with the decoder's names, and add 1 to the weights of norms."""
    found = _named(tensors, geometry)
    norms = {name: one for name, one in found.items() if f".{RULE}" not in name}
    return found | whole_norms(norms, geometry)


def _named(tensors: Tensors, geometry: Geometry) -> Tensors:
    """Return the tensors with the decoder's names. The gates of attention are separate from the
    queries."""
    found: Tensors = {}
    for name, tensor in apart(renamed(tensors, NAMES), geometry).items():
        before, _, kind = name.partition("self_attn.q_proj.")
        if kind:
            parts = {part: [geometry.head_dim] for part in ("q_proj", "q_gate_proj")}
            found |= _split_heads(f"{before}self_attn.", kind, tensor, parts, geometry.num_heads)
        else:
            found |= _of_rule(name, tensor, geometry)
    return found


def _of_rule(name: str, tensor: StoredTensor, geometry: Geometry) -> Tensors:
    """Return the decoder's tensors for a stored tensor, which may belong to the delta rule."""
    rule = geometry.delta
    before, _, module = name.partition(RULE)
    named = {"A_log": DELTA_DECAY, "dt_bias": DELTA_BIAS}.get(module)
    if named:
        return {f"{before}{named}.weight": tensor}
    if rule is None or module not in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
        return {name: tensor}
    group = rule.value_heads // rule.key_heads
    values = group * rule.value_dim
    parts = {"in_b_proj": [group], "in_a_proj": [group]}
    if module == "in_proj_qkvz.weight":
        parts = {"in_qkv_proj": [rule.key_dim, rule.key_dim, values], "in_z_proj": [values]}
    return _split_heads(f"{before}{RULE}", "weight", tensor, parts, rule.key_heads)


def _split_heads(
    prefix: str,
    kind: str,
    tensor: StoredTensor,
    parts: Mapping[str, Sequence[int]],
    heads: int,
) -> Tensors:
    """Split a tensor whose rows have all parts of the first head, then all parts of the next head.

    Args:
        prefix: Prefix of the modules' names.
        kind: ``weight`` or ``bias``.
        tensor: The tensor.
        parts: The numbers of rows in a head that belong to each module. If a module has two such
            parts, it consists of the first part of all heads, followed by the second part of all
            heads.
        heads: Number of heads.
    """
    rows = [count for counts in parts.values() for count in counts]
    if not tensor.shape or tensor.shape[0] != heads * sum(rows):
        return {f"{prefix}{next(iter(parts))}.{kind}": tensor}  # later refused for its shape
    order = np.arange(tensor.shape[0]).reshape(heads, -1)
    pieces = iter(np.split(order, np.cumsum(rows)[:-1], axis=1))
    found: Tensors = {}
    for module, counts in parts.items():
        own = np.concatenate([next(pieces).reshape(-1) for _ in counts])
        found[f"{prefix}{module}.{kind}"] = reordered(tensor, own)
    return found


def gguf_delta(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for both kinds of layers."""
    heads = own.integer("ssm.time_step_rank")
    found = {
        "linear_num_key_heads": own.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": own.integer("ssm.state_size"),
        "linear_value_head_dim": own.integer("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": own.integer("ssm.conv_kernel"),
        "full_attention_interval": own.integer("full_attention_interval", 4),
    }
    recurrent = own.take("attention.recurrent_layers", None)
    if isinstance(recurrent, list):
        names = {True: "linear_attention", False: "full_attention"}
        found["layer_types"] = [names.get(one) for one in recurrent[: raw["num_hidden_layers"]]]
    return found


def _of_gguf(own: Fields, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields. llama.cpp always divides the shares of experts by their sum."""
    return gguf_delta(own, raw) | gguf_sizes(own, raw) | {"norm_topk_prob": True}


def gguf_delta_tensors(tensors: Tensors, geometry: Geometry, tiled: bool = True) -> Tensors:
    """Return the decoder's tensors. A file has the negative rates of decay instead of their
    logarithms, and leaves out a dimension of convolutions.

    If ``tiled``, the first value heads of all key heads come first, then the second ones.
    """
    found: Tensors = {}
    for name, tensor in gguf_tensors(tensors, geometry).items():
        module = name.partition(RULE)[2].removesuffix(".weight")
        if module == "conv1d" and isinstance(tensor, CheckpointTensor):
            tensor = replace(tensor, shape=(*tensor.shape[:1], 1, *tensor.shape[1:]))
        if tiled and geometry.delta:
            tensor = _untiled(module, tensor, geometry.delta)
        if module == "A_log":
            tensor = ChangedTensor(tensor, lambda rates: np.log(-rates))
        found[name] = tensor
    return _named(found, geometry)


def _untiled(module: str, tensor: StoredTensor, rule: DeltaRule) -> StoredTensor:
    """Return a tensor of the delta rule with the value heads of each key head next to each
    other."""
    heads = np.arange(rule.value_heads).reshape(-1, rule.key_heads).T.reshape(-1)
    values = (heads[:, None] * rule.value_dim + np.arange(rule.value_dim)).reshape(-1)
    keys = 2 * rule.key_heads * rule.key_dim
    mixed = np.concatenate((np.arange(keys), keys + values))
    rows = dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), heads)
    rows |= {"in_proj_qkv": mixed, "conv1d": mixed, "in_proj_z": values}
    if module == "out_proj" and tensor.shape[1:] == (len(values),):
        if isinstance(tensor, CheckpointTensor):
            tensor = GgufTensor(tensor)
        assert isinstance(tensor, GgufTensor)
        return tensor.with_columns(values)
    fits = module in rows and tensor.shape[:1] == (len(rows[module]),)
    return reordered(tensor, rows[module]) if fits else tensor


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    positions=32768,
    kv_heads=2,
    kv_heads_null=False,
    head_dim=256,
    inner=5632,
    partial_rotary=0.25,
    own=_own,
    tensors=delta_tensors,
    gguf=Gguf(
        "qwen3next",
        GGUF_NAMES | GGUF_SHARED | GGUF_RULE,
        fields=_of_gguf,
        tensors=partial(gguf_delta_tensors, tiled=False),
        optional=("feed_forward_length",),
    ),
)
