"""Making the inputs of a pass: rotary tables, a causal mask, empty caches."""

import math

import torch
from torch import Tensor

from eesd.common.geometry import Geometry
from eesd.common.manifest import MASKED
from eesd.model.decoder import KV, Inputs


def rotary_tables(geometry: Geometry, length: int) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [length, D/2] in float32, with the geometry's scaling of the frequencies."""
    exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.float32) / geometry.head_dim
    frequencies = 1.0 / geometry.rope_theta**exponents
    scaling = geometry.rope_scaling
    if scaling is not None:
        slowed = frequencies / scaling.factor
        if scaling.kind == "linear":
            frequencies = slowed
        else:
            turns = scaling.original_max_position * frequencies / (2 * math.pi)
            blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            blend = blend.clamp(0, 1)
            frequencies = (1 - blend) * slowed + blend * frequencies
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def causal_inputs(geometry: Geometry, batch: int, tokens: int, slots: int, start: int = 0) -> Inputs:
    """Inputs for consecutive tokens, each of which sees itself and all earlier slots (float32).

    Args:
        geometry: Geometry of the model.
        batch: B.
        tokens: n.
        slots: S, the length of the caches.
        start: Slot and position of the first token.
    """
    cos, sin = rotary_tables(geometry, slots)
    position = torch.arange(start, start + tokens)
    hidden = torch.arange(slots)[None, :] > position[:, None]
    mask = torch.zeros(tokens, slots).masked_fill(hidden, MASKED)
    return Inputs(cos, sin, position.expand(batch, -1), torch.full((batch,), start), mask.expand(batch, 1, tokens, slots))


def empty_caches(geometry: Geometry, batch: int, slots: int, layers: int) -> list[KV]:
    """Create caches filled with zeros, for ``layers`` layers."""
    shape = (batch, geometry.num_kv_heads, slots, geometry.head_dim)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]
