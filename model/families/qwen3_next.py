"""Qwen3-Next has the gated delta rule in most layers, and attention with a gate in the other
layers. It has experts, and a gated expert that every token uses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eesd.common.architecture import DELTA_BIAS, DELTA_DECAY
from eesd.common.checks import shown
from eesd.common.geometry import DELTA, FULL, MOST_TAPS, DeltaRule, Experts, Geometry
from eesd.model.experts import apart, take_experts
from eesd.model.families.gemma import whole_norms
from eesd.model.families.qwen3_moe import dense_layers
from eesd.model.family import (
    Family,
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

KINDS = {"linear_attention": DELTA, "full_attention": FULL}
"""Kinds of layers by their names in transformers."""
RULE = "linear_attn."
NAMES = {f"{RULE}in_proj_{part}": f"{RULE}in_{part}_proj" for part in ("qkv", "z", "b", "a")}
"""Projections that Qwen3.5 stores one by one."""


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
    """Return the tensors with the decoder's names. The gates of attention are separate from the
    queries, and 1 is added to the weights of norms."""
    found: Tensors = {}
    for name, tensor in apart(renamed(tensors, NAMES), geometry).items():
        before, _, kind = name.partition("self_attn.q_proj.")
        if kind:
            parts = {part: [geometry.head_dim] for part in ("q_proj", "q_gate_proj")}
            found |= _split_heads(f"{before}self_attn.", kind, tensor, parts, geometry.num_heads)
        else:
            found |= _of_rule(name, tensor, geometry)
    norms = {name: one for name, one in found.items() if f".{RULE}" not in name}
    return found | whole_norms(norms, geometry)


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
)
