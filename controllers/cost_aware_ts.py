"""Cost-aware Thompson Sampling: keep drafting while the next token is worth its time (docs/controllers.md derives the rule)."""

from typing import ClassVar

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.costs import RoundCosts

LONGEST = 16
"""Draft steps that the cost table covers."""
HORIZON = 3
"""Tokens that the rule looks ahead: more than one only because v(n) may rise in steps."""
REFIT_EVERY = 8
"""Rounds between two fits of the costs; each of the first ones is fitted."""
FIRST_RATE_WEIGHT = 5.0
"""The rate starts as that of plain decoding, with the weight of this many plain steps."""


class CostAwareTS(Controller):
    """After k draft tokens continue iff some j <= ``HORIZON`` more are worth it: S (m + ... + m^j) >= lambda * their seconds.

    S is the chance that all k are accepted, m that the next one would be, both from :class:`Calibrator` posteriors (one draw
    of each per round; ``draws=0`` takes the means). The seconds are measured, by draft steps and by nodes of the verify pass.
    lambda is the recent rate in tokens per second. ``discount`` makes old rounds count less in it.

    The first rounds are a plain one and a draft of one token, to learn what both cost; then the rule decides.
    """

    learned: ClassVar = ("accept", "following", "costs", "rate", "rounds", "random")

    def __init__(self, discount: float = 0.998, draws: int = 1, seed: int = 0, prior: CalibrationPrior | None = None) -> None:
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        if draws not in (0, 1):
            raise ValueError("draws must be 0 or 1")
        self.discount, self.draws = discount, draws
        prior = prior or CalibrationPrior()
        self.accept, self.following = Calibrator(prior.accept, prior), Calibrator(prior.following, prior)
        self.costs = RoundCosts()
        self.rate = [0.0, 0.0]
        """Tokens and seconds of the rule's rounds, discounted. Zero seconds: costs are not known yet."""
        self.rounds = 0
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.begin_round(1)

    def check_learned(self) -> None:
        if min(*self.rate, self.rounds) < 0:
            raise ValueError("rate and rounds must not be negative")
        if self.rate[1] and not (self.costs.draft.fitted and self.costs.verify.fitted):
            raise ValueError("a rate needs tables of costs")

    def begin_request(self) -> None:
        self.accept.begin_request()
        self.following.begin_request()

    def begin_round(self, width: int) -> int | None:
        self._width = width
        self._scores: list[tuple[float, float]] = []
        self._survival = 1.0
        self._fixed = None if self.rate[1] else int(0 in self.costs.verify.samples)
        self._draw: tuple[float, float, float, float] | None = None
        return 0 if self._fixed == 0 else None  # a draft is asked step by step: every label teaches the calibration

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

    def expected_tokens(self, outcome: RoundOutcome) -> float:
        """1 and the chances of the verified levels, each that of the levels before it and its own."""
        if not outcome.steps or len(self._scores) < outcome.depth:  # at the end of a text the last level is not asked about
            return outcome.accepted + 1
        shift, slope = self.accept.draw((0.0, 0.0))
        tokens = survival = 1.0
        for own, _ in self._scores[: outcome.depth]:
            survival *= sigmoid(shift + slope * own)
            tokens += survival
        return tokens

    def observe(self, outcome: RoundOutcome) -> None:
        self.costs.add(outcome)
        if not outcome.steps:
            return
        depth, accepted = outcome.depth, outcome.num_expanded
        for level, (own, following) in enumerate(self._scores[: accepted + 1], start=1):
            if level <= depth:
                self.accept.learn(own, level <= accepted)
            if level <= accepted and level < depth:
                self.following.learn(following, level < accepted)
        self.accept.advance()
        self.following.advance()
        self.rounds += 1
        if self.rounds < REFIT_EVERY or self.rounds % REFIT_EVERY == 0:
            self.costs.fit(LONGEST, LONGEST * self._width)
        if not self.rate[1]:
            if 0 in self.costs.verify.samples:
                self.rate = [FIRST_RATE_WEIGHT, FIRST_RATE_WEIGHT * self.costs.verify.samples[0][1]]
            return
        spent = self.costs.draft.seconds(outcome.steps) + self.costs.verify.seconds(outcome.nodes)  # stalls hardly count
        discount = min(self.discount, 1 - 1 / (self.rounds + FIRST_RATE_WEIGHT))  # the first rounds are soon forgotten
        self.rate = [self.rate[0] * discount + outcome.accepted + 1, self.rate[1] * discount + spent]
