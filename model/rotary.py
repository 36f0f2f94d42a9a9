"""Rotary tables. Frequencies are computed in the order of operations of transformers, so that the
tables are the same bits."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from eesd.common.geometry import Geometry, RopeScaling


def rotary_tables(geometry: Geometry, length: int) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [length, D/2] in float32, scaled as the geometry says; with a local base
    [length, D].

    Values of a head that are not rotated have the angle 0.
    """
    frequencies, factor = _frequencies(geometry)
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    cos, sin = (positions * frequencies).cos() * factor, (positions * frequencies).sin() * factor
    still = geometry.head_dim // 2 - len(frequencies)
    cos, sin = pad(cos, (0, still), value=1.0), pad(sin, (0, still))
    if geometry.local_theta:
        local = rotary_tables(
            replace(geometry, rope_theta=geometry.local_theta, rope_scaling=None, local_theta=0.0),
            length,
        )
        return torch.cat((cos, local[0]), 1), torch.cat((sin, local[1]), 1)
    return cos, sin


def _frequencies(geometry: Geometry) -> tuple[Tensor, float]:
    """The frequencies of the pairs of values that are rotated, and the factor of cos and sin."""
    size = 2 * geometry.rotated or geometry.head_dim
    powers = geometry.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaling, attention_factor = geometry.rope_scaling, 1.0
    frequencies = 1.0 / powers
    if scaling is not None:
        attention_factor = scaling.attention_factor
        if scaling.kind == "linear":
            frequencies = frequencies / scaling.factor
        elif scaling.kind == "llama3":
            frequencies = llama3_frequencies(frequencies, scaling)
        elif scaling.kind == "longrope":
            frequencies = 1.0 / (torch.tensor(scaling.divisors, dtype=torch.float32) * powers)
        else:
            frequencies = _yarn(powers, scaling, size, geometry.rope_theta)
    return frequencies, attention_factor


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow down the frequencies [D/2] with long waves, leave those with short ones, and blend
    between."""
    waves, slowed = 2 * math.pi / frequencies, frequencies / scaling.factor
    longest, shortest = (
        scaling.original_max_position / f
        for f in (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    turns = scaling.original_max_position / waves
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return torch.where(waves > longest, slowed, torch.where(waves < shortest, frequencies, blended))


def _yarn(powers: Tensor, scaling: RopeScaling, size: int, theta: float) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): blend slowed and original frequencies over a range
    of dimensions."""

    def dimension(turns: float) -> float:
        """The dimension whose wave turns this often within the original positions."""
        return (size * math.log(scaling.original_max_position / (turns * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # no division by zero
    kept = 1 - torch.clamp(
        (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low), 0, 1
    )
    slowed = 1.0 / (scaling.factor * powers)
    return slowed * (1 - kept) + 1.0 / powers * kept
