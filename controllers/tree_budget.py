"""The tree budget chooses the proposed nodes that are worth their place in the verify pass
(docs/controllers.md)."""

from collections.abc import Sequence
from functools import partial
from math import exp

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.calibration import CERTAIN, Calibrator, features, sigmoid
from eesd.controllers.value import Price, RoundValue, most_valuable

SHARPNESS = 1.25
"""If the score of one of the other candidates is higher by d, the candidate is exp(1.25 d) times as
likely to be the verifier's token."""
COVERED = (6.5, 3.5)
"""The Beta prior of a probability: if the verifier's token is not the first candidate, how likely
it is to be among the other candidates."""
DISCOUNT = 0.998
"""In the posterior, each later label multiplies a label's weight by this factor."""


class TreeBudget:
    """Estimates the chances of candidates, and chooses the number of nodes to verify. This is the n
    that maximises the sum of the n largest values minus lambda v(n + 1).

    A node's value is the chance that its whole path is accepted. The first candidate's chance is a
    :class:`Calibrator`'s posterior mean. If it is wrong, the verifier's token is among the other
    candidates with probability kappa (a Beta posterior), which is divided among them by their
    scores. After an accepted node, the verifier's logits show which candidate is right, even if it
    was not verified. So there is nothing to explore. ``value`` estimates lambda (the recent rate)
    and v(n), the seconds of a pass over n tokens.
    """

    def __init__(
        self, prior: CalibrationPrior | None = None, value: RoundValue | None = None
    ) -> None:
        self.value = value or RoundValue()
        prior = prior or CalibrationPrior()
        self.accept = Calibrator(prior.accept, prior)
        self.covered, self.missed = COVERED

    def begin_request(self) -> None:
        """Begin another request."""
        self.accept.begin_request()

    def chances(self, step: DraftStep, scores: Sequence[float]) -> tuple[float, list[float]]:
        """Return the chances of the candidates after a node, given that the node is accepted.

        Args:
            step: The first candidate as a draft step.
            scores: The log-probability of each candidate, in descending order. With coupled
                sampling, the noise is added.

        Returns:
            The calibration score of the first candidate, which :class:`SiblingLabel` needs, and the
            chance of each candidate. The first candidate has the highest chance.
        """
        z = self.accept.score(features(step))
        shift, slope = self.accept.draw((0.0, 0.0))
        first = min(sigmoid(shift + slope * z), CERTAIN)
        weights = [exp(SHARPNESS * (score - scores[1])) for score in scores[1:]]
        share = (
            (1 - first) * self.covered / (self.covered + self.missed) / sum(weights)
            if weights
            else 0.0
        )
        return z, [first, *(min(share * weight, first) for weight in weights)]

    def size(self, values: Sequence[float], price: Price | None = None) -> int:
        """Number of nodes to verify.

        Args:
            values: The chance of each node, in descending order.
            price: The prices of nodes in a batch. It is None for a request that runs alone. Then
                the costs of this request are used, and at least one node is verified.
        """
        if price is not None:
            return most_valuable(values, price)[0]
        values = values[: self.value.verify.known]
        if not self.value.verify.table:
            return len(values)
        return 1 + most_valuable(values[1:], partial(self.value.prices, 1))[0]

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round."""
        if not outcome.steps:
            return
        for label in outcome.labels:
            self.accept.learn(label.score, label.chosen == 0)
            if label.chosen != 0:
                self.covered = (
                    COVERED[0] + (self.covered - COVERED[0]) * DISCOUNT + (label.chosen is not None)
                )
                self.missed = (
                    COVERED[1] + (self.missed - COVERED[1]) * DISCOUNT + (label.chosen is None)
                )
        self.accept.advance()
