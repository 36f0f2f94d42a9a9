"""Read state spaces (Mamba-2, arXiv 2405.21060) in checkpoints. Several families share their fields
and tensors."""

from math import inf
from typing import Any

import numpy as np

from eesd.common.architecture import (
    DELTA_BIAS,
    DELTA_DECAY,
    DELTA_NORM,
    DELTA_SKIP,
    DELTA_TAPS,
    DELTA_TAPS_BIAS,
)
from eesd.common.checks import shown
from eesd.common.geometry import MOST_TAPS, DeltaRule
from eesd.model.family import StoredTensor, Tensors, reordered
from eesd.model.fields import Fields

ENDLESS = [[0, inf], [0, {"__float__": "Infinity"}]]
"""Limits without effect, with infinity as a number and as transformers 5 writes it."""
NAMES = {
    "A_log": f"{DELTA_DECAY}.weight",
    "dt_bias": f"{DELTA_BIAS}.weight",
    "D": f"{DELTA_SKIP}.weight",
    "norm.weight": f"{DELTA_NORM}.weight",
    "out_proj.weight": "linear_attn.out_proj.weight",
}
"""The decoder's names of tensors that are stored as they are."""


def take_space(fields: Fields, inner: int, eps: float) -> DeltaRule:
    """Return the sizes from fields with the prefix ``mamba_``.

    Args:
        fields: The fields of the config.
        inner: Number of columns of all values.
        eps: Epsilon of the norm, or 0 if there is no norm.
    """
    fields.taken |= {"mamba_chunk_size", "mamba_expand"}
    if fields.flag("mamba_proj_bias"):
        raise ValueError("projections of Mamba with biases (mamba_proj_bias) are not supported")
    check_limit(fields)
    heads = fields.integer("mamba_n_heads", 128)
    size = fields.take("mamba_d_head", "auto")
    if inner % heads or size not in ("auto", inner // heads):
        raise ValueError(
            f"{heads} heads of Mamba of {shown(size)} values do not make {inner} columns"
        )
    return DeltaRule(
        fields.integer("mamba_n_groups", 1),
        heads,
        fields.integer("mamba_d_state", 256),
        inner // heads,
        fields.integer("mamba_d_conv", 4, least=2, most=MOST_TAPS),
        space=True,
        conv_bias=fields.flag("mamba_conv_bias", True),
        norm_eps=eps,
    )


def check_limit(fields: Fields) -> None:
    """Raise ValueError if steps are limited. transformers limits them only in prompts."""
    limit: Any = fields.take("time_step_limit", None)
    if limit is not None and limit not in ENDLESS:
        raise ValueError(f"time_step_limit is {shown(limit)}; only 0 to infinity is supported")


def space_tensors(tensors: Tensors, rule: DeltaRule | None, module: str) -> Tensors:
    """Return the tensors with the decoder's names. Queries and keys come before the values.

    Args:
        tensors: The tensors of a checkpoint.
        rule: The sizes.
        module: Name of the state space within a block.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        before, there, part = name.partition(f".{module}.")
        own = _parts(part, tensor, rule) if there and rule else {}
        if own:
            found |= {f"{before}.{new}": one for new, one in own.items()}
        else:
            found[name] = tensor
    return found


def _parts(part: str, tensor: StoredTensor, rule: DeltaRule) -> Tensors:
    """Return the decoder's tensors for one tensor of a state space."""
    if part in NAMES:
        return {NAMES[part]: tensor}
    # Stored are the values, keys and queries.
    values, keys, queries = np.split(np.arange(rule.mixed), [rule.values, rule.values + rule.keys])
    mixed = np.concatenate((queries, keys, values))
    rows = tensor.shape[0] if tensor.shape else 0
    convolution = {"conv1d.weight": DELTA_TAPS, "conv1d.bias": DELTA_TAPS_BIAS}
    if part in convolution:
        own = reordered(tensor, mixed) if rows == rule.mixed else tensor
        return {f"{convolution[part]}.weight": own}
    if part != "in_proj.weight":
        return {}
    if rows != sum(rule.inputs.values()):
        return {"linear_attn.in_qkv_proj.weight": tensor}  # later refused for its shape
    order = {
        "qkv": rule.values + mixed,
        "z": np.arange(rule.values),
        "a": np.arange(rule.values + rule.mixed, rows),
    }
    return {f"linear_attn.in_{one}_proj.weight": reordered(tensor, at) for one, at in order.items()}
