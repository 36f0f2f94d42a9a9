"""Controllers that do not learn: the baselines."""

from typing import Any

from eesd.controllers.base import DraftStep, RoundOutcome


class Fixed:
    """Always draft ``k`` tokens."""

    needs_entropy = False

    def __init__(self, k: int = 4, seed: int = 0) -> None:
        if k < 1:
            raise ValueError("k must be at least 1")
        self.k = k

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.k

    def length_ahead(self) -> int | None:
        return self.k

    def observe(self, outcome: RoundOutcome) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"k": self.k}

    def restore(self, state: dict[str, Any]) -> None:
        self.k = int(state["k"])


class Threshold:
    """Draft on while the draft gave its last token at least probability ``p`` (as Kangaroo does)."""

    needs_entropy = False

    def __init__(self, p: float = 0.6, seed: int = 0) -> None:
        if not 0 <= p <= 1:
            raise ValueError("p must be between 0 and 1")
        self.p = p

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.probability >= self.p

    def length_ahead(self) -> int | None:
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"p": self.p}

    def restore(self, state: dict[str, Any]) -> None:
        self.p = float(state["p"])
