"""Controllers decide when to stop drafting. They see draft steps and round outcomes, not engines.

Users write them as ``beta-ts``, ``fixed:k=4`` or ``beta-ts:alpha=2,beta=1,discount=0.9``.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, Fixed, RoundOutcome, SiblingLabel, TextStep
from eesd.controllers.calibration import CostAwareTS
from eesd.controllers.thompson import BetaTS, CalibrationTS
from eesd.controllers.value import RoundValue

__all__ = [
    "CONTROLLERS",
    "Controller",
    "DraftStep",
    "RoundOutcome",
    "SiblingLabel",
    "TextStep",
    "make_controller",
]

CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "beta-ts": BetaTS,
    "calibration-ts": CalibrationTS,
    "cost-aware-ts": CostAwareTS,
    "fixed": Fixed,
}


def make_controller(
    spec: str,
    seed: int = 0,
    prior: CalibrationPrior | None = None,
    value: RoundValue | None = None,
    kinds: Mapping[str, Callable[..., Controller]] = CONTROLLERS,
) -> Controller:
    """Make a controller.

    Args:
        spec: ``name`` or ``name:key=value,...``.
        seed: Seed of its random generator.
        prior: Calibration prior of the exit head, which the controllers that calibrate use. If it
            is None, they use the default prior.
        value: The costs and the worth of rounds, if they are shared with other rules. It is None if
            they are not shared.
        kinds: The controllers to choose from, by name.

    Raises:
        EESDError: The name or an option is unknown, or a value is invalid.
    """
    name, colon, rest = spec.partition(":")
    if name not in kinds:
        raise EESDError(
            f"There is no controller {name[:80]!r}; there are {', '.join(sorted(kinds))}."
        )
    kind = kinds[name]
    found = inspect.signature(kind).parameters
    parameters = {k: v for k, v in found.items() if k not in ("seed", "prior", "value")}
    given: dict[str, Any] = {k: v for k, v in (("prior", prior), ("value", value)) if k in found}
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        key, _, text = item.partition("=")
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise EESDError(f"The controller {name} has no option {key[:40]!r}; it has {known}.")
        if key in options:
            raise EESDError(
                f"The controller {spec[:80]!r} has the option {key} twice; give it once."
            )
        try:
            options[key] = type(parameters[key].default)(text)
        except ValueError:
            raise EESDError(
                f"The option {key}={text[:40]} of the controller {name} is not a number."
            ) from None
    try:
        return kind(**options, **given, seed=seed)
    except ValueError as error:
        raise EESDError(f"The controller {spec[:80]!r} cannot be made: {error}.") from None
