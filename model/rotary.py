"""Rotary tables. Frequencies are computed in float32, in the same order of operations as in
transformers.

Powers, cosines and sines are the float32 numbers nearest to the exact values. torch's results, and
so transformers' tables, are sometimes off by one unit in the last place.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eesd.common.geometry import FULL, SLIDING, Geometry, RopeScaling

Floats = NDArray[np.float32]


@np.errstate(all="ignore")  # the base can be any number
def rotary_tables(geometry: Geometry, length: int) -> tuple[Floats, Floats]:
    """Compute cos and sin (float32) with the geometry's scaling. The tables are [length, D/2]. If
    sliding layers have a local base, they are [length, D]. The columns of full layers come first,
    then those of sliding layers.

    Values of a head that are not rotated have the angle 0.
    """
    full = geometry.of_kind(FULL)
    rates, factor = _scaled_frequencies(full)
    angles = np.zeros((length, full.rotary_dim // 2), np.float32)
    np.multiply(np.arange(length, dtype=np.float32)[:, None], rates, out=angles[:, : len(rates)])
    cos = np.empty_like(angles)
    sin = np.empty_like(angles)
    for function, table in ((np.cos, cos), (np.sin, sin)):
        function(angles, out=table, dtype=np.float64, casting="same_kind")
        table[:, : len(rates)] *= factor
    if geometry.local_theta:
        own = geometry.of_kind(SLIDING)
        local = rotary_tables(
            replace(own, rope_theta=geometry.local_theta, rope_scaling=None, local_theta=0.0),
            length,
        )
        return np.concatenate((cos, local[0]), 1), np.concatenate((sin, local[1]), 1)
    return cos, sin


def frequencies(theta: float, size: int) -> Floats:
    """Return the frequencies [size/2] of a rotary embedding of ``size`` values without scaling."""
    return np.reciprocal(_powers(theta, size))


def _powers(theta: float, size: int) -> Floats:
    """Return powers [size/2] of the base. As in torch, the base is rounded to float32 first."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / size
    powers: Floats = np.power(np.float32(theta), exponents, dtype=np.float64).astype(np.float32)
    return powers


def _scaled_frequencies(geometry: Geometry) -> tuple[Floats, float]:
    """Return the frequencies of the rotated pairs of values and the factor of cos and sin."""
    size = 2 * geometry.rotated or geometry.rotary_dim
    scaling = geometry.rope_scaling
    found = frequencies(geometry.rope_theta, size)
    if scaling is None:
        return found, 1.0
    if scaling.kind == "proportional":
        found = frequencies(geometry.rope_theta, geometry.head_dim)[: size // 2] / scaling.factor
    elif scaling.kind == "linear":
        found = found / scaling.factor
    elif scaling.kind == "llama3":
        found = llama3_frequencies(found, scaling)
    elif scaling.kind == "longrope":
        found = np.reciprocal(
            np.array(scaling.divisors, np.float32) * _powers(geometry.rope_theta, size)
        )
    else:
        found = _yarn(_powers(geometry.rope_theta, size), scaling, size, geometry.rope_theta)
    return found, scaling.attention_factor


def llama3_frequencies(frequencies: Floats, scaling: RopeScaling) -> Floats:
    """Lower the frequencies [D/2] of long waves, keep the frequencies of short waves, and blend
    them in between.

    In torch, a number divided by a tensor is the number times the rounded reciprocal.
    """
    waves = 2 * math.pi * np.reciprocal(frequencies)
    slowed = frequencies / scaling.factor
    longest, shortest = (
        scaling.original_max_position / f
        for f in (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    turns = scaling.original_max_position * np.reciprocal(waves)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    found: Floats = np.where(
        waves > longest, slowed, np.where(waves < shortest, frequencies, blended)
    )
    return found


def _yarn(powers: Floats, scaling: RopeScaling, size: int, theta: float) -> Floats:
    """Blend slowed and original frequencies in a range of dimensions (YaRN, Peng et al. 2023, arXiv
    2309.00071)."""

    def dimension(turns: float) -> float:
        """Return the dimension whose angle makes this number of turns within the original
        positions."""
        return (size * math.log(scaling.original_max_position / (turns * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    kept = 1 - np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    slowed = np.reciprocal(scaling.factor * powers)
    blended: Floats = slowed * (1 - kept) + np.reciprocal(powers) * kept
    return blended
