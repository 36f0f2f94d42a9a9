"""How much of what was drafted is verified: the nodes that are worth their place in the pass (docs/controllers.md)."""

from collections.abc import Sequence
from math import exp, inf
from typing import Any

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.costs import Curve

FIRST_SIZES = (12, 4, 8, 2, 6, 1, 3, 10)
"""The first rounds measure what node counts cost."""
REFIT_EVERY = 16
SHARPNESS = 1.25
"""Of second choices the one whose score is higher by d is exp(1.25 d) times as likely the verifier's."""
COVERED = (6.5, 3.5)
"""Beta prior of how often the verifier's token is among the other choices where it is not the first."""
CERTAIN = 0.9999


class TreeBudget:
    """Chances of drafted nodes, and how many nodes of a tree to verify: those that maximise sum of values - lambda v(n + 1).

    A node's value is the chance that its whole path is right. The first choice's chance is a :class:`Calibrator`'s posterior
    mean; if it is wrong the verifier's token is among the other choices with probability kappa (a Beta posterior), in shares by
    their scores. Every choice behind a token that came true is judged, verified or not, so nothing has to be explored.
    lambda is the rate reached of late, in tokens per second, v(n) is measured.
    """

    def __init__(self, discount: float = 0.998, prior: CalibrationPrior | None = None) -> None:
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        self.discount = discount
        prior = prior or CalibrationPrior()
        self.accept = Calibrator(prior.accept, prior)
        self.covered, self.missed = COVERED
        self.verify = Curve()
        self._rate = [0.0, 0.0]
        """Tokens and seconds, discounted."""
        self.rounds = 0

    def begin_request(self) -> None:
        """Another request starts."""
        self.accept.begin_request()

    def chances(self, step: DraftStep, scores: Sequence[float]) -> tuple[float, list[float]]:
        """The first choice's calibration score, to be told to :meth:`observe`, and the chance of each choice behind a node that
        is right, in their order: no other is likelier than the first. ``step`` is what the draft shows of the first;
        ``scores`` (log-probabilities, with their noise if there is any) are of all."""
        z = self.accept.score(features(step))
        shift, slope = self.accept.draw((0.0, 0.0))
        first = min(sigmoid(shift + slope * z), CERTAIN)
        weights = [exp(SHARPNESS * (score - scores[1])) for score in scores[1:]]
        rest = (1 - first) * self.covered / (self.covered + self.missed) / sum(weights) if weights else 0.0
        return z, [first, *(min(rest * weight, first) for weight in weights)]

    def size(self, values: Sequence[float]) -> int:
        """How many of the nodes with these values, largest first, to verify; at least one."""
        if self.rounds < len(FIRST_SIZES) or len(self.verify.samples) < 2:
            return min(FIRST_SIZES[self.rounds % len(FIRST_SIZES)], len(values))
        rate, verify = self._rate[0] / self._rate[1], self.verify.seconds
        best, most, gained = 1, -inf, 0.0
        for count, value in enumerate(values, start=1):
            gained += value
            worth = gained - rate * (verify(count) - verify(0))
            if worth > most:
                best, most = count, worth
        return best

    def observe(self, judged: Sequence[tuple[float, int | None]], outcome: RoundOutcome) -> None:
        """Learn from a round, also from one without drafts. ``judged`` are, of each family of choices of which one could have
        come true, the first one's score and which did."""
        self.verify.add(outcome.nodes, outcome.verify_seconds)
        if not outcome.steps:
            return
        for z, choice in judged:
            self.accept.learn(z, choice == 0)
            if choice != 0:
                self.covered = COVERED[0] + (self.covered - COVERED[0]) * self.discount + (choice is not None)
                self.missed = COVERED[1] + (self.missed - COVERED[1]) * self.discount + (choice is None)
        self.accept.advance()
        if self.rounds == len(FIRST_SIZES):  # those rounds were not as one chooses, and slow where sizes were new
            self._rate = [0.0, 0.0]
        spent = max(outcome.draft_seconds + outcome.verify_seconds, 1e-9)
        self._rate = [self._rate[0] * self.discount + outcome.accepted + 1, self._rate[1] * self.discount + spent]
        self.rounds += 1
        if self.rounds == len(FIRST_SIZES) or self.rounds % REFIT_EVERY == 0:
            self.verify.fit(max(self.verify.samples))

    def state(self) -> dict[str, Any]:
        """Everything learned, as JSON values."""
        return {
            "discount": self.discount,
            "accept": self.accept.state(),
            "choices": [self.covered, self.missed],
            "verify": self.verify.state(),
            "rate": list(self._rate),
            "rounds": self.rounds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state()``."""
        self.discount, self.rounds = float(state["discount"]), int(state["rounds"])
        self.accept.restore(state["accept"])
        self.covered, self.missed = map(float, state["choices"])
        self.verify.restore(state["verify"])
        self._rate = [float(value) for value in state["rate"]]
