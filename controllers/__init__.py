"""When to stop drafting: controllers that see draft steps and round outcomes, and know nothing of engines."""

from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.registry import CONTROLLERS, make_controller

__all__ = ["CONTROLLERS", "Controller", "DraftStep", "RoundOutcome", "make_controller"]
