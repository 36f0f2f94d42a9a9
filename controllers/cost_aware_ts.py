"""Cost-aware Thompson Sampling: keep drafting while the next token is worth its time (docs/controllers.md derives the rule)."""

from typing import ClassVar

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.costs import AcceptanceByDepth, RoundCosts

FIRST_LENGTHS = (4, 0, 2, 8, 1, 5, 3, 8)
"""Draft lengths of the first rounds. They measure what lengths cost, and give deep positions labels."""
LONGEST = 16
"""Draft steps that the cost table covers."""
HORIZON = 3
"""Tokens that the rule looks ahead: more than one only because v(n) may rise in steps."""
REFIT_EVERY = 16
"""Rounds between two fits of the costs."""
FIRST_RATE_WEIGHT = 20
"""The rate starts as that of the best fixed length, with the weight of this many plain steps."""


class CostAwareTS(Controller):
    """After k draft tokens continue iff some j <= ``HORIZON`` more are worth it: S (m + ... + m^j) >= lambda * their seconds.

    S is the chance that all k are accepted, m that the next one would be, both from :class:`Calibrator` posteriors (one draw
    of each per round; ``draws=0`` takes the means). The seconds are measured, by draft steps and by nodes of the verify pass.
    lambda is the recent rate in tokens per second. ``discount`` makes old rounds count less in it.
    """

    learned: ClassVar = ("accept", "following", "costs", "first_rounds", "rate", "rounds", "random")

    def __init__(self, discount: float = 0.998, draws: int = 1, seed: int = 0, prior: CalibrationPrior | None = None) -> None:
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        if draws not in (0, 1):
            raise ValueError("draws must be 0 or 1")
        self.discount, self.draws = discount, draws
        prior = prior or CalibrationPrior()
        self.accept, self.following = Calibrator(prior.accept, prior), Calibrator(prior.following, prior)
        self.costs = RoundCosts()
        self.first_rounds = AcceptanceByDepth(LONGEST, discount=1.0)
        self.rate = [0.0, 0.0]
        """Tokens and seconds of the rule's rounds, discounted. Zero seconds: still in the first rounds."""
        self.rounds = 0
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.begin_round(1)

    def check_learned(self) -> None:
        if min(*self.rate, self.rounds) < 0:
            raise ValueError("rate and rounds must not be negative")

    def begin_request(self) -> None:
        self.accept.begin_request()
        self.following.begin_request()

    def begin_round(self, width: int) -> int | None:
        self._width = width
        self._scores: list[tuple[float, float]] = []
        self._survival = 1.0
        self._fixed = None if self.rate[1] else FIRST_LENGTHS[self.rounds % len(FIRST_LENGTHS)]
        self._draw: tuple[float, float, float, float] | None = None
        return 0 if self._fixed == 0 else None  # lengths above 0 are asked step by step: every label teaches the calibration

    def keep_drafting(self, step: DraftStep) -> bool:
        if self._draw is None:
            normal = self.random.standard_normal(4).tolist() if self.draws else [0.0] * 4
            self._draw = (*self.accept.draw(normal[:2]), *self.following.draw(normal[2:]))
        x = features(step)
        own, following = self.accept.score(x), self.following.score(x)
        self._scores.append((own, following))
        if self._fixed is not None:
            return step.depth < self._fixed
        shift, slope, next_shift, next_slope = self._draw
        self._survival *= sigmoid(shift + slope * own)
        return self._worth(step.depth, sigmoid(next_shift + next_slope * following))

    def _worth(self, depth: int, m: float) -> bool:
        """Whether some number of further levels brings more tokens than their seconds would bring at the present rate."""
        draft, verify, width = self.costs.draft.seconds, self.costs.verify.seconds, self._width
        reach, tokens, before = self._survival, 0.0, draft(depth) + verify(depth * width)
        for ahead in range(1, HORIZON + 1):
            reach *= m
            tokens += reach
            if tokens * self.rate[1] >= self.rate[0] * (draft(depth + ahead) + verify((depth + ahead) * width) - before):
                return True
        return False

    def observe(self, outcome: RoundOutcome) -> None:
        depth, accepted = outcome.depth, outcome.num_expanded
        self.costs.add(outcome)
        for level, (own, following) in enumerate(self._scores[: accepted + 1], start=1):
            if level <= depth:
                self.accept.learn(own, level <= accepted)
            if level <= accepted and level < depth:
                self.following.learn(following, level < accepted)
        self.accept.advance()
        self.following.advance()
        self.rounds += 1
        if self._fixed is not None:
            if depth == outcome.steps > 0:  # with a budget the verified depth depends on what was drafted
                self.first_rounds.add(depth, accepted)
            if self.rounds >= len(FIRST_LENGTHS) and self.costs.known:
                self._fit_costs()
                self._start_rule()
            return
        spent = outcome.draft_seconds + outcome.verify_seconds
        self.rate = [self.rate[0] * self.discount + outcome.accepted + 1, self.rate[1] * self.discount + spent]
        if self.rounds % REFIT_EVERY == 0:
            self._fit_costs()

    def _fit_costs(self) -> None:
        self.costs.fit(LONGEST, LONGEST * self._width)

    def _start_rule(self) -> None:
        """Start the rate as if the best fixed length had run for a few rounds."""
        seconds = FIRST_RATE_WEIGHT * self.costs.verify.seconds(0)
        self.rate = [max(self.first_rounds.rates(self.costs, self._width)) * seconds, seconds]
