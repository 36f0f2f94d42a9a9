"""Controllers for traces only, which know what no controller can: the ceilings."""

from typing import Any

from eesd.controllers.base import Controller, DraftStep


class Oracle(Controller):
    """Is told before each round how many tokens of its chain will be accepted."""

    def reveal(self, accepted: int) -> None:
        raise NotImplementedError


class Clairvoyant(Oracle):
    """Drafts exactly what will be accepted. For constant acceptance a and flat verify its speed is 1 / (1 - a + c a)."""

    def __init__(self) -> None:
        self._accepted = 0

    def reveal(self, accepted: int) -> None:
        self._accepted = accepted

    def length_ahead(self) -> int:
        return self._accepted

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self._accepted

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
