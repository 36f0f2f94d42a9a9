"""A fixed length."""

from eesd.controllers.base import Controller, DraftStep


class Fixed(Controller):
    """Always draft ``k`` tokens."""

    def __init__(self, k: int = 4, seed: int = 0) -> None:
        if k < 1:
            raise ValueError("k must be at least 1")
        self.k = k

    def begin_round(self, width: int) -> int:
        return self.k

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.k
