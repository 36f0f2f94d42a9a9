"""Baselines, on recorded traces only: a probability threshold, an entropy threshold, and a bandit over lengths."""

from math import log, sqrt

from eesd.bench.replay.traces import TracedStep
from eesd.controllers import CONTROLLERS, Controller, DraftStep, RoundOutcome
from eesd.controllers.value import RoundValue, is_due


class Threshold(Controller):
    """Keep drafting while the draft gave its last token at least probability ``p`` (as Kangaroo does)."""

    def __init__(self, p: float = 0.6, seed: int = 0) -> None:
        self.p = p

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.probability >= self.p


class AdaEDL(Controller):
    """Stop when an entropy bound on acceptance falls below a threshold (Agrawal et al. 2024, arXiv 2410.18351).

    1 - sqrt(gamma H) is a lower bound on the chance that the token is accepted. Drafting continues while it is at least the
    threshold, which moves by ``step`` after each round, so that the smoothed acceptance approaches ``target``.
    """

    def __init__(self, gamma: float = 0.2, target: float = 0.9, start: float = 0.4, step: float = 0.01, seed: int = 0) -> None:
        self.gamma, self.target, self.step = gamma, target, step
        self.threshold = start
        self.acceptance = target

    def keep_drafting(self, step: DraftStep) -> bool:
        assert isinstance(step, TracedStep)
        return 1 - sqrt(self.gamma * max(step.entropy, 0.0)) >= self.threshold

    def observe(self, outcome: RoundOutcome) -> None:
        if not outcome.depth:
            return
        self.acceptance = 0.5 * self.acceptance + 0.5 * outcome.num_expanded / outcome.depth
        moved = self.threshold + (self.step if self.acceptance <= self.target else -self.step)
        self.threshold = min(max(0.9 * self.threshold + 0.1 * moved, 0.0), 1.0)


class AcceptanceByDepth:
    """How often drafts are accepted at each depth, from rounds whose length did not depend on what was drafted.

    Feedback is one-sided full information: a round of n draft tokens tells for every shorter length how many would have been
    accepted. Tokens behind the first rejection or behind n were not judged and do not count.
    """

    def __init__(self, longest: int, discount: float) -> None:
        self.discount = discount
        self.judged = [0.0] * longest
        self.accepted = [0.0] * longest

    def add(self, length: int, accepted: int) -> None:
        """Note a round of ``length`` draft tokens, of which ``accepted`` were accepted."""
        judged = min(length, accepted + 1)
        for depth in range(len(self.judged)):
            self.judged[depth] = self.judged[depth] * self.discount + (depth < judged)
            self.accepted[depth] = self.accepted[depth] * self.discount + (depth < min(judged, accepted))

    def rates(self, value: RoundValue, width: int = 1, optimism: float = 0.0) -> list[float]:
        """Tokens per second of every fixed length k = 0, 1, ...: (1 + S_1 + ... + S_k) / (draft(k) + verify(k * width)).

        S_j is the product of the acceptances at depths 1 to j: posterior means under Beta(1, 0), so 1 where nothing is known,
        each raised by ``optimism`` standard errors. A level has ``width`` nodes.
        """
        survival, tokens, rates = 1.0, 1.0, [1 / value.seconds(0, 0)]
        for depth, (judged, accepted) in enumerate(zip(self.judged, self.accepted, strict=True)):
            raised = (accepted + 1) / (judged + 1) + optimism * 0.5 / (judged + 1) ** 0.5
            survival *= min(raised, 1.0)
            tokens += survival
            rates.append(tokens / value.seconds(depth + 1, (depth + 1) * width))
        return rates


class UCB(Controller):
    """A bandit over draft lengths (as BanditSpec, Hou et al. 2025), by upper confidence bounds on tokens per second.

    Every round gives feedback on all lengths up to the one drafted (one-sided full information). A length's bound raises the
    acceptance at every depth by ``optimism`` sqrt(log t) standard errors, and takes 1 where nothing is known. ``discount``
    makes old rounds count less.
    """

    def __init__(
        self, longest: int = 12, optimism: float = 0.1, discount: float = 0.998, seed: int = 0, value: RoundValue | None = None
    ) -> None:
        self.longest, self.optimism = longest, optimism
        self.acceptance = AcceptanceByDepth(longest, discount)
        self.value: RoundValue = value or RoundValue()
        self.rounds = 0
        self.length = longest
        """The arm to pull next."""
        self.width = 1

    def begin_round(self, width: int) -> int:
        self.width = width
        return self.length

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.length

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.depth == outcome.steps:  # with a budget the verified depth depends on what was drafted
            self.acceptance.add(outcome.depth, outcome.num_expanded)
        self.rounds += 1
        if not self.value.draft.fitted or len(self.value.verify.samples) < 2:
            self.length = max(self.length // 2, 0 if self.length == 1 else 1)  # two lengths at least are needed to fit costs
            return
        if is_due(self.rounds):
            rates = self.acceptance.rates(self.value, self.width, self.optimism * log(self.rounds + 1) ** 0.5)
            self.length = max(range(len(rates)), key=rates.__getitem__)


REPLAYED = CONTROLLERS | {"adaedl": AdaEDL, "threshold": Threshold, "ucb": UCB}
"""All controllers that a replay knows, by name."""
