"""The paper's Thompson Sampling (Liu et al. 2024, section 3.3; docs/controllers.md).

The controllers sample one acceptance probability, or a calibration of the draft's confidence.
"""

from math import inf

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid


class BetaTS(Controller):
    """After each drafted token, draw theta ~ Beta(alpha, beta), and draft another token with
    probability theta.

    After verification, alpha grows by the number of accepted tokens, and beta by 1 if a token was
    rejected. Tokens after the first rejection were never judged and do not count. Each round
    multiplies both counts by ``discount``, so that only about the last 1 / (1 - discount) rounds
    count. This is useful because acceptance differs from text to text. The paper's rule has no
    discount (its ``discount`` is 1).
    """

    def __init__(
        self, alpha: float = 2.0, beta: float = 1.0, discount: float = 0.9, seed: int = 0
    ) -> None:
        if not (0 < alpha < inf and 0 < beta < inf):
            raise ValueError("alpha and beta must be above 0 and finite")
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        self.prior = (alpha, beta)
        self.accepted = 0.0
        self.rejected = 0.0
        self.discount = discount
        self.random = np.random.Generator(np.random.PCG64(seed))

    def keep_drafting(self, step: DraftStep) -> bool:
        theta = self.random.beta(self.prior[0] + self.accepted, self.prior[1] + self.rejected)
        return bool(self.random.random() < theta)

    def observe(self, outcome: RoundOutcome) -> None:
        if not outcome.steps:
            return
        self.accepted = self.accepted * self.discount + outcome.num_expanded
        self.rejected = self.rejected * self.discount + (outcome.num_expanded < outcome.depth)


class CalibrationTS(Controller):
    """Like ``beta-ts``, but each token has a separate theta. It is P(accepted | the draft's
    confidence) under a calibration that is drawn from its posterior.
    """

    def __init__(self, seed: int = 0, prior: CalibrationPrior | None = None) -> None:
        prior = prior or CalibrationPrior()
        self.accept = Calibrator(prior.accept, prior)
        self.random = np.random.Generator(np.random.PCG64(seed))
        self._scores: list[float] = []
        """Calibration scores of this round's tokens."""

    def begin_request(self) -> None:
        self.accept.begin_request()

    def begin_round(self, width: int) -> None:
        self._scores = []

    def keep_drafting(self, step: DraftStep) -> bool:
        score = self.accept.score(features(step))
        self._scores.append(score)
        shift, slope = self.accept.draw(self.random.standard_normal(2).tolist())
        return bool(self.random.random() < sigmoid(shift + slope * score))

    def observe(self, outcome: RoundOutcome) -> None:
        if not outcome.steps:
            return
        for depth, score in enumerate(
            self._scores[: min(outcome.num_expanded + 1, outcome.depth)], start=1
        ):
            self.accept.learn(score, depth <= outcome.num_expanded)
        self.accept.advance()
