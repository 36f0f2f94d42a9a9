"""Thompson Sampling that calibrates the draft's own confidence (the paper's second controller; docs/controllers.md)."""

from typing import ClassVar

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid


class CalibrationTS(Controller):
    """Like ``beta-ts``, with one theta for each token: P(accepted | the draft's confidence), under a calibration drawn from
    its posterior. Draft another token with probability theta.

    ``confidence=0`` hides the draft's confidence: one theta for all tokens, as in ``beta-ts``.
    """

    learned: ClassVar = ("accept", "random")

    def __init__(self, confidence: int = 1, seed: int = 0, prior: CalibrationPrior | None = None) -> None:
        if confidence not in (0, 1):
            raise ValueError("confidence must be 0 or 1")
        self.confidence = confidence
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
        score = self.accept.score(features(step)) if self.confidence else 0.0
        self._scores.append(score)
        shift, slope = self.accept.draw(self.random.standard_normal(2).tolist())
        return bool(self.random.random() < sigmoid(shift + slope * score))

    def observe(self, outcome: RoundOutcome) -> None:
        if not outcome.steps:
            return
        for depth, score in enumerate(self._scores[: min(outcome.num_expanded + 1, outcome.depth)], start=1):
            self.accept.learn(score, depth <= outcome.num_expanded)
        self.accept.advance()
