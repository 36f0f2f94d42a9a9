"""Controllers by name: ``beta-ts``, ``fixed:k=4``, ``beta-ts:alpha=2,beta=1,discount=0.9``."""

import inspect
from collections.abc import Callable
from typing import Any

from eesd.controllers.base import Controller
from eesd.controllers.baselines import Fixed, Threshold
from eesd.controllers.beta_ts import BetaTS
from eesd.runtime.errors import EESDError

CONTROLLERS: dict[str, Callable[..., Controller]] = {"beta-ts": BetaTS, "fixed": Fixed, "threshold": Threshold}


def make_controller(spec: str, seed: int = 0) -> Controller:
    """A controller from ``name`` or ``name:key=value,...``; :class:`EESDError` names what is not known."""
    name, _, rest = spec.partition(":")
    if name not in CONTROLLERS:
        raise EESDError(f"There is no controller {name!r}; there are {', '.join(sorted(CONTROLLERS))}.")
    kind = CONTROLLERS[name]
    parameters = {k: v for k, v in inspect.signature(kind).parameters.items() if k != "seed"}
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in parameters:
            raise EESDError(f"The controller {name} has no option {key!r}; it has {', '.join(parameters)}.")
        try:
            options[key] = type(parameters[key].default)(value)
        except ValueError:
            raise EESDError(f"The option {key}={value} of the controller {name} is not a number.") from None
    try:
        return kind(**options, seed=seed)
    except ValueError as error:
        raise EESDError(f"The controller {spec!r} cannot be made: {error}.") from None
