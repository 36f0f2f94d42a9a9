"""Thompson Sampling that calibrates the draft's own confidence (the paper's second controller; docs/controllers.md)."""

from typing import Any

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid


class CalibrationTS(Controller):
    """As ``beta-ts``, with a theta of each token's own: theta = P(accepted | what the draft shows) under a draw of the
    calibration from its posterior; drafts another token with probability theta.

    ``confidence=0`` hides what the draft shows: one theta for all tokens, as ``beta-ts`` has.
    """

    def __init__(self, confidence: int = 1, seed: int = 0, prior: CalibrationPrior | None = None) -> None:
        if confidence not in (0, 1):
            raise ValueError("confidence must be 0 or 1")
        self.confidence = confidence
        prior = prior or CalibrationPrior()
        self.accept = Calibrator(prior.accept, prior)
        self._scores: list[float] = []
        self._random = np.random.Generator(np.random.PCG64(seed))

    def begin_request(self) -> None:
        self.accept.begin_request()

    def keep_drafting(self, step: DraftStep) -> bool:
        if step.depth == 1:
            self._scores.clear()  # of a round that was cancelled
        score = self.accept.score(features(step)) if self.confidence else 0.0
        self._scores.append(score)
        shift, slope = self.accept.draw(self._random.standard_normal(2).tolist())
        return bool(self._random.random() < sigmoid(shift + slope * score))

    def observe(self, outcome: RoundOutcome) -> None:
        for depth, score in enumerate(self._scores[: min(outcome.followed + 1, outcome.drafted)], start=1):
            self.accept.learn(score, depth <= outcome.followed)
        self.accept.advance()
        self._scores.clear()

    def state(self) -> dict[str, Any]:
        return {"confidence": self.confidence, "accept": self.accept.state(), "random": self._random.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        self.confidence = int(state["confidence"])
        self.accept.restore(state["accept"])
        self._random.bit_generator.state = state["random"]
        self._scores.clear()
