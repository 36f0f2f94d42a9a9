"""Read the base, the scaling and the number of positions of the rotary embedding from a
``config.json``.

transformers 5 stores ``rope_parameters``, and transformers 4 stores ``rope_theta`` and
``rope_scaling``. If both versions' fields exist, ``rope_scaling`` wins, and ``rope_parameters`` is
ignored completely, including its theta.
"""

import math
from dataclasses import dataclass
from typing import Any

from eesd.common.checks import shown
from eesd.common.geometry import LARGEST_SIZE, RopeScaling
from eesd.model.family import Family
from eesd.model.fields import Fields


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model.

    Attributes:
        theta: Base of the frequencies.
        scaling: Scaling of the frequencies, or None.
        positions: Number of positions that the model supports with constant frequencies. The
            frequencies must be constant, because keys in the KV cache must stay valid when a text
            grows.
        rotated: Number of pairs of a head's values that are rotated, or 0 for all.
        notices: Sentences about values that are ignored.
    """

    theta: float
    scaling: RopeScaling | None
    positions: int
    rotated: int
    notices: tuple[str, ...]


def read_rope(fields: Fields, positions: int, head_dim: int, family: Family) -> Rope:
    """Read the rotary embedding.

    Args:
        fields: The fields of ``config.json``.
        positions: ``max_position_embeddings``.
        head_dim: Values of a head.
        family: The model's family.

    Raises:
        ValueError: A value has the wrong type or is out of range, or the scaling is not supported.
    """
    chosen, notices = _choose(fields)
    theta = fields.take("rope_theta", family.theta)
    own = Fields({"rope_theta": theta} | chosen)
    theta = own.number("rope_theta")
    kind = own.take("rope_type", own.take("type", "default"))
    if kind not in family.ropes:
        raise ValueError(
            f"the rope scaling {shown(kind)} is not supported for {family.architecture}; "
            "supported are "
            f"{', '.join(family.ropes)}"
        )
    kind = family.rope_names.get(kind, kind)
    rotated = _rotated(own, fields, head_dim, family)
    original = fields.take("original_max_position_embeddings", family.original_positions)
    if original is not None:  # as in transformers, it overrides the value in the rope fields
        own = Fields({**own.raw, "original_max_position_embeddings": original})
    scaling = _scaling(own, kind, theta, positions, rotated or head_dim // 2)
    own.taken |= {
        "rope_theta",
        "rope_type",
        "type",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
    if own.left:
        ignored = ", ".join(shown(name) for name in own.left[:8])
        notices += (
            f"config.json: the rope type {kind} has no {ignored}; ignored, as transformers does.",
        )
    if kind == "yarn" and scaling is not None:
        positions = max(positions, int(scaling.factor * scaling.original_max_position))
    if kind in ("dynamic", "longrope"):
        short = positions if scaling is None else min(positions, scaling.original_max_position)
        notices += (
            (
                f"config.json: {kind} has other frequencies for more than {short} tokens, so "
                "longer texts are refused."
            ),
        )
        positions = short
    return Rope(theta, scaling, positions, rotated, notices)


def _rotated(own: Fields, fields: Fields, head_dim: int, family: Family) -> int:
    """Return the number of pairs of a head's values that are rotated, or 0 for all."""
    part = own.number(
        "partial_rotary_factor",
        fields.take("partial_rotary_factor", family.partial_rotary or 1.0),
        optional=True,
    )
    if part in (None, 1.0):
        return 0
    if family.partial_rotary is None:
        raise ValueError(
            f"partial rotary embeddings are not supported for {family.architecture}; the "
            "whole head is rotated"
        )
    size = int(head_dim * part)
    if not 0 < size <= head_dim or size % 2:
        raise ValueError(
            f"partial_rotary_factor is {part}: {size} of {head_dim} values cannot be rotated "
            "in pairs"
        )
    return size // 2


def _choose(fields: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``rope_scaling``, or ``rope_parameters`` if there is no ``rope_scaling``. If both
    exist, also return a sentence about it."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.take(name, None)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} is {shown(value)}, and must be an object")
        nested = next((key for key, item in (value or {}).items() if isinstance(item, dict)), None)
        if nested is not None:
            raise ValueError(
                f"{name} differs between kinds of layers ({nested!r}), which is not supported"
            )
        found[name] = value or {}
    scaling = found["rope_scaling"]
    parameters = found["rope_parameters"]
    if scaling and parameters and scaling != parameters:
        return scaling, (
            "config.json has rope_scaling, so rope_parameters is ignored, as transformers does.",
        )
    return scaling or parameters, ()


def _scaling(
    own: Fields, kind: str, theta: float, positions: int, pairs: int
) -> RopeScaling | None:
    """Return the scaling of the frequencies, given the fields of the rotary embedding."""
    if kind == "default":
        return None
    if kind == "dynamic":
        _positive(own, "factor")
        return None
    if kind == "linear":
        return RopeScaling("linear", _positive(own, "factor"))
    original = own.integer("original_max_position_embeddings", positions, most=LARGEST_SIZE)
    if kind == "longrope":
        return _longrope(own, original, positions, pairs)
    if kind == "llama3":
        low = _positive(own, "low_freq_factor")
        high = _positive(own, "high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor is {low}, and must be below high_freq_factor {high}")
        return RopeScaling("llama3", _positive(own, "factor"), original, low, high)
    if theta <= 1:
        raise ValueError(f"rope_theta is {theta}, and must be above 1 for yarn")
    own.take("factor")  # required, but may be null
    factor = positions / original if own.raw["factor"] is None else _positive(own, "factor")
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_positive(own, "beta_fast", 32.0),
        beta_slow=_positive(own, "beta_slow", 1.0),
        attention_factor=_attention_factor(own, factor),
        truncate=own.flag("truncate", True),
    )


def _longrope(own: Fields, original: int, positions: int, pairs: int) -> RopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753) for texts of up to the original positions."""
    divisors = {}
    for name in ("short_factor", "long_factor"):
        divisors[name] = own.take(name)
        if not isinstance(divisors[name], list) or len(divisors[name]) != pairs:
            raise ValueError(
                f"{name} must be a list of {pairs} numbers, one for each pair of values that "
                "is rotated"
            )
    short = tuple(
        _positive(Fields({"short_factor": one}), "short_factor") for one in divisors["short_factor"]
    )
    factor = own.number("factor", None, optional=True)
    factor = positions / original if factor is None else factor
    if original < 2:
        raise ValueError(
            f"original_max_position_embeddings is {original}, and must be at least 2 for longrope"
        )
    given = own.number("attention_factor", None, optional=True)
    if given is None:
        given = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    return RopeScaling("longrope", factor, original, attention_factor=given, divisors=short)


def _positive(own: Fields, name: str, default: float | None = None) -> float:
    """Return a number in a plausible range. 0 and null stand for the default, if there is a
    default."""
    has_default = default is not None
    value: float | None = own.number(name, None if has_default else ..., optional=has_default)
    if default is not None and not value:
        return default
    if value is None or not 1e-6 <= value <= 1e6:
        raise ValueError(f"{name} is {value}, and must be above 0, from 1e-6 to 1e6")
    return value


def _attention_factor(own: Fields, factor: float) -> float:
    """Return the factor of cos and sin for yarn (Peng et al. 2023, arXiv 2309.00071). It is
    computed if the config does not have it."""
    given: float | None = own.number("attention_factor", None, optional=True)
    scale, scale_all = (
        own.number(name, None, optional=True) for name in ("mscale", "mscale_all_dim")
    )
    if given is not None:
        return given

    def scaled(by: float) -> float:
        return 0.1 * by * math.log(max(factor, 1.0)) + 1.0

    return scaled(scale) / scaled(scale_all) if scale and scale_all else scaled(1)
