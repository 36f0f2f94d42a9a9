"""Cost-aware Thompson Sampling: keep drafting while the next token is worth its time
(docs/controllers.md derives the rule)."""

from typing import ClassVar

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.calibration import CalibratedDraft, Calibrator
from eesd.controllers.value import RoundValue

STEP = 0.2
NODE = 0.03
RATE = 1.3
"""Constant costs: those of a draft step and of a verified node, in plain steps, and the rate in
tokens per plain step."""


class CostAwareTS(CalibratedDraft):
    """After k draft tokens, continue if and only if j more are worth their time for some j <=
    ``HORIZON``: S (m + ... + m^j) >= lambda * their seconds.

    S is the chance that all k are accepted, and m the chance that the next one would be, both from
    :class:`Calibrator` posteriors (one draw of each per round). ``value`` measures the seconds, by
    draft steps and by nodes of the verify pass, and lambda, the recent rate in tokens per second.

    The first two rounds are a plain round and one with a single drafted token, to measure both
    costs; then the rule decides.
    """

    steps_at_once: ClassVar = 2

    def __init__(
        self, seed: int = 0, prior: CalibrationPrior | None = None, value: RoundValue | None = None
    ) -> None:
        self.value: RoundValue = value or RoundValue()
        self.random = np.random.Generator(np.random.PCG64(seed))
        prior = prior or CalibrationPrior()
        calibrators = Calibrator(prior.accept, prior), Calibrator(prior.following, prior)
        super().__init__(*calibrators, lambda: self.random.standard_normal(4).tolist())

    def begin_round(self, width: int) -> int | None:
        super().begin_round(width)
        self._width = width
        self._fixed = None if self.value.draft.fitted else int(self.value.verify.fitted)
        # Decide step by step: every label teaches the calibration.
        return 0 if self._fixed == 0 else None

    def keep_drafting(self, step: DraftStep) -> bool:
        self.add(step)
        if self._fixed is not None:
            return step.depth < self._fixed
        return self.value.pays(self.reach, self.next, step.depth, self._width)

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.steps:
            self.learn(outcome.depth, outcome.num_expanded)


class RejectionTS(CostAwareTS):
    """:class:`CostAwareTS` with constant costs, for one request with rejection sampling, where
    tokens depend on draft lengths.

    The lengths depend on the draft, the seed and the accepted tokens, but not on the clock or other
    requests. So a seed gives one text.
    """

    steps_at_once: ClassVar = 1  # the same alone and in a batch

    def __init__(self, seed: int, prior: CalibrationPrior | None) -> None:
        value = RoundValue()
        value.draft.add(1, STEP)
        value.verify.add(0, 1.0)
        value.verify.add(1, 1.0 + NODE)
        value.draft.fit()
        value.verify.fit()
        value.brought = [RATE, 1.0]
        super().__init__(seed, prior, value)

    def begin_request(self) -> None:
        """Do nothing: the controller serves one request, which may later be alone in a batch."""
