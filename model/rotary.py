"""Rotary tables. Frequencies are computed in the order of operations of transformers, so that the tables are the same bits."""

import math

import torch
from torch import Tensor

from eesd.common.geometry import Geometry, RopeScaling


def rotary_tables(geometry: Geometry, length: int) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [length, D/2] in float32, scaled as the geometry says."""
    powers = geometry.rope_theta ** (torch.arange(0, geometry.head_dim, 2, dtype=torch.float32) / geometry.head_dim)
    scaling, attention_factor = geometry.rope_scaling, 1.0
    frequencies = 1.0 / powers
    if scaling is not None:
        attention_factor = scaling.attention_factor
        if scaling.kind == "linear":
            frequencies = frequencies / scaling.factor
        elif scaling.kind == "llama3":
            frequencies = llama3_frequencies(frequencies, scaling)
        else:
            frequencies = _yarn(powers, scaling, geometry)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down the frequencies [D/2] with long waves, leave those with short ones, and blend between."""
    waves, slowed = 2 * math.pi / frequencies, frequencies / scaling.factor
    longest, shortest = (scaling.original_max_position / f for f in (scaling.low_freq_factor, scaling.high_freq_factor))
    turns = scaling.original_max_position / waves
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return torch.where(waves > longest, slowed, torch.where(waves < shortest, frequencies, blended))


def _yarn(powers: Tensor, scaling: RopeScaling, geometry: Geometry) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): blend slowed and original frequencies over a range of dimensions."""
    size, theta = geometry.head_dim, geometry.rope_theta

    def dimension(turns: float) -> float:
        """The dimension whose wave turns this often within the original positions."""
        return (size * math.log(scaling.original_max_position / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # no division by zero
    kept = 1 - torch.clamp((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    slowed = 1.0 / (scaling.factor * powers)
    return slowed * (1 - kept) + 1.0 / powers * kept
