"""Hidden states in 8 bits, as a cache of targets stores them: a level for each number, and a scale for each block of 32."""

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 32
SCALES = ".scales"
"""Suffix that turns the name of states into the name of their scales."""


def pack_states(name: str, states: Tensor) -> dict[str, Tensor]:
    """Levels, int8 [..., hidden], and scales, float16 [..., hidden / 32], by their names, for states [..., hidden].

    A hidden size that is no multiple of 32 has one scale. Numbers are off by at most 1/254 of the largest one in their block.
    """
    blocks = states.float().view(*states.shape[:-1], -1, _block(states.shape[-1]))
    scales = (blocks.abs().amax(-1) / 127).clamp_max(torch.finfo(torch.float16).max).half()
    levels = (blocks / scales.float().clamp_min(1e-8)[..., None]).round().clamp(-127, 127)
    return {name: levels.to(torch.int8).flatten(-2), name + SCALES: scales}


def unpack_states(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """States [..., hidden], bfloat16, from what :func:`pack_states` made."""
    levels, scales = stored[name], stored[name + SCALES]
    blocks = levels.view(*scales.shape, -1) * scales.float()[..., None]
    return blocks.bfloat16().flatten(-2)


def _block(hidden: int) -> int:
    return BLOCK if hidden % BLOCK == 0 else hidden
