"""Controllers that do not learn: the baselines."""

from math import log, sqrt
from typing import Any

from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.costs import Lengths, RoundCosts


class Fixed(Controller):
    """Always draft ``k`` tokens."""

    def __init__(self, k: int = 4, seed: int = 0) -> None:
        if k < 1:
            raise ValueError("k must be at least 1")
        self.k = k

    def length_ahead(self) -> int:
        return self.k

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.k

    def state(self) -> dict[str, Any]:
        return {"k": self.k}

    def restore(self, state: dict[str, Any]) -> None:
        self.k = int(state["k"])


class Threshold(Controller):
    """Draft on while the draft gave its last token at least probability ``p`` (as Kangaroo does)."""

    def __init__(self, p: float = 0.6, seed: int = 0) -> None:
        if not 0 <= p <= 1:
            raise ValueError("p must be between 0 and 1")
        self.p = p

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.probability >= self.p

    def state(self) -> dict[str, Any]:
        return {"p": self.p}

    def restore(self, state: dict[str, Any]) -> None:
        self.p = float(state["p"])


class AdaEDL(Controller):
    """Stop where an entropy bound on acceptance falls below a threshold (Agrawal et al. 2024, arXiv 2410.18351).

    1 - sqrt(gamma H) bounds from below how likely the token is accepted; drafting goes on while it is at least the
    threshold, which moves by ``step`` after each round, so that the acceptance (smoothed) comes near ``target``.
    """

    needs_entropy = True

    def __init__(self, gamma: float = 0.2, target: float = 0.9, start: float = 0.4, step: float = 0.01, seed: int = 0) -> None:
        if not 0 < gamma < 1e6:
            raise ValueError("gamma must be above 0 and finite")
        if not (0 <= target <= 1 and 0 <= start <= 1 and 0 <= step <= 1):
            raise ValueError("target, start and step must be between 0 and 1")
        self.gamma, self.target, self.step = gamma, target, step
        self.threshold = start
        self.acceptance = target

    def keep_drafting(self, step: DraftStep) -> bool:
        return 1 - sqrt(self.gamma * max(step.entropy or 0.0, 0.0)) >= self.threshold

    def observe(self, outcome: RoundOutcome) -> None:
        if not outcome.drafted:
            return
        self.acceptance = 0.5 * self.acceptance + 0.5 * outcome.followed / outcome.drafted
        moved = self.threshold + (self.step if self.acceptance <= self.target else -self.step)
        self.threshold = min(max(0.9 * self.threshold + 0.1 * moved, 0.0), 1.0)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gamma", "target", "step", "threshold", "acceptance")}

    def restore(self, state: dict[str, Any]) -> None:
        for name in self.state():
            setattr(self, name, float(state[name]))


class UCB(Controller):
    """A bandit over draft lengths (as BanditSpec, Hou et al. 2025), by upper confidence bounds on tokens per second.

    Every round tells all lengths up to the one drafted (one-sided full information). A length's bound takes the acceptance
    at every depth ``optimism`` sqrt(log t) standard errors up, 1 where nothing is known; ``discount`` forgets.
    """

    def __init__(self, longest: int = 12, optimism: float = 0.1, discount: float = 0.998, seed: int = 0) -> None:
        if not 1 <= longest <= 64:
            raise ValueError("longest must be between 1 and 64")
        if not 0 <= optimism < 1e3:
            raise ValueError("optimism must be 0 or above, and finite")
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        self.optimism = optimism
        self.lengths, self.costs = Lengths(longest, discount), RoundCosts()
        self.rounds = 0
        self.arm = longest
        self.width = 1
        """Nodes of a level."""

    def length_ahead(self) -> int:
        return self.arm

    def keep_drafting(self, step: DraftStep) -> bool:
        self.width = step.nodes // step.depth
        return step.depth < self.arm

    def observe(self, outcome: RoundOutcome) -> None:
        drafted, longest = outcome.drafted, len(self.lengths.judged)
        self.costs.add(outcome.steps, outcome.draft_seconds, outcome.nodes, outcome.verify_seconds)
        if drafted == outcome.steps:  # a budget leaves levels out by what was drafted
            self.lengths.add(drafted, outcome.followed)
        self.rounds += 1
        if not self.costs.known:
            self.arm = max(self.arm // 2, 0 if self.arm == 1 else 1)  # two lengths at least, to know what one costs
            return
        if self.rounds < 16 or self.rounds % 8 == 0:
            self.costs.fit(longest, longest * self.width)
            rates = self.lengths.rates(self.costs, self.width, self.optimism * log(self.rounds + 1) ** 0.5)
            self.arm = max(range(len(rates)), key=rates.__getitem__)

    def state(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("optimism", "rounds", "arm", "width")}
        return own | {"discount": self.lengths.discount, "lengths": self.lengths.state(), "costs": self.costs.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.optimism, self.rounds = float(state["optimism"]), int(state["rounds"])
        self.arm, self.width = int(state["arm"]), int(state["width"])
        self.lengths.discount = float(state["discount"])
        self.lengths.restore(state["lengths"])
        self.costs.restore(state["costs"])
