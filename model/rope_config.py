"""Read the rotary embedding of a ``config.json``: base, scaling, and for how many positions it is meant.

transformers 5 stores ``rope_parameters``, transformers 4 ``rope_theta`` and ``rope_scaling``. Where both are given,
``rope_scaling`` wins and nothing of ``rope_parameters`` is used, not even its theta.
"""

import math
from dataclasses import dataclass
from typing import Any

from eesd.common.checks import shown
from eesd.common.geometry import LARGEST_SIZE, RopeScaling
from eesd.common.json_input import Fields

SUPPORTED = ("default", "linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the length of the text, so that tokens in the KV cache stay valid."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a model.

    Attributes:
        theta: Base of the frequencies.
        scaling: Scaling of the frequencies, or None.
        positions: Number of positions that it is meant for.
        notices: Sentences about values that are ignored.
    """

    theta: float
    scaling: RopeScaling | None
    positions: int
    notices: tuple[str, ...]


def read_rope(fields: Fields, positions: int) -> Rope:
    """Read the rotary embedding.

    Args:
        fields: The fields of ``config.json``.
        positions: ``max_position_embeddings``.

    Raises:
        ValueError: A value has another type or is out of range, or the scaling is not supported.
    """
    chosen, notices = _choose(fields)
    theta = fields.take("rope_theta", 10000.0)
    own = Fields({"rope_theta": theta} | chosen)
    theta = own.number("rope_theta")
    kind = own.take("rope_type", own.take("type", "default"))
    if kind not in SUPPORTED:
        raise ValueError(
            f"the rope scaling {shown(kind)} is not supported, because its frequencies depend on the length of the text or "
            f"are unknown; supported are {', '.join(SUPPORTED)}"
        )
    rotated = own.number("partial_rotary_factor", fields.take("partial_rotary_factor", 1.0), optional=True)
    if rotated not in (None, 1.0):
        raise ValueError("partial rotary embeddings are not supported; the whole head must be rotated")
    original = fields.take("original_max_position_embeddings", None)
    if original is not None:  # outside of the rope's own values it wins, as in transformers
        own = Fields({**own.raw, "original_max_position_embeddings": original})
    scaling = _scaling(own, kind, theta, positions)
    own.taken |= {"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"}
    if own.left:
        ignored = ", ".join(shown(name) for name in own.left[:8])
        notices += (f"config.json: the rope type {kind} has no {ignored}; ignored, as transformers does.",)
    if kind == "yarn" and scaling is not None:
        positions = max(positions, int(scaling.factor * scaling.original_max_position))
    return Rope(theta, scaling, positions, notices)


def _choose(fields: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``rope_scaling`` if there is one, else ``rope_parameters``; and a sentence if there are both."""
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.take(name, None)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} is {shown(value)}, and must be an object")
        nested = next((key for key, item in (value or {}).items() if isinstance(item, dict)), None)
        if nested is not None:
            raise ValueError(f"{name} differs between kinds of layers ({nested!r}), which is not supported")
        found[name] = value or {}
    scaling, parameters = found["rope_scaling"], found["rope_parameters"]
    if scaling and parameters and scaling != parameters:
        return scaling, ("config.json has rope_scaling, so rope_parameters is ignored, as transformers does.",)
    return scaling or parameters, ()


def _scaling(own: Fields, kind: str, theta: float, positions: int) -> RopeScaling | None:
    """The scaling of the frequencies, from the values of the rope."""
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", _positive(own, "factor"))
    original = own.integer("original_max_position_embeddings", positions, most=LARGEST_SIZE)
    if kind == "llama3":
        low, high = _positive(own, "low_freq_factor"), _positive(own, "high_freq_factor")
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


def _positive(own: Fields, name: str, default: float | None = None) -> float:
    """A number of a size that makes sense. 0 and null mean the default, if there is one."""
    value: float | None = own.number(name, ... if default is None else None, optional=default is not None)
    if default is not None and not value:
        return default
    if value is None or not 1e-6 <= value <= 1e6:
        raise ValueError(f"{name} is {value}, and must be above 0, from 1e-6 to 1e6")
    return value


def _attention_factor(own: Fields, factor: float) -> float:
    """The factor of cos and sin for yarn (Peng et al. 2023, arXiv 2309.00071), if the config does not give it."""
    given: float | None = own.number("attention_factor", None, optional=True)
    scale, scale_all = (own.number(name, None, optional=True) for name in ("mscale", "mscale_all_dim"))
    if given is not None:
        return given

    def scaled(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return scaled(scale) / scaled(scale_all) if scale and scale_all else scaled(1)
