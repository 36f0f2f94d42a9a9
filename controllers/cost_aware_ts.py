"""Cost-aware Thompson Sampling: draft on while the next token is worth its time (docs/controllers.md derives the rule)."""

from typing import Any

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.costs import Lengths, RoundCosts

FIRST_LENGTHS = (4, 0, 2, 8, 1, 5, 3, 8)
"""The first rounds measure what lengths cost, and give deep positions labels."""
REFERENCE_EVERY = 64
"""Of so many rounds one has a fixed length, to know what the best fixed length would do."""
LONGEST = 16
HORIZON = 3
"""Tokens that the rule looks ahead: beyond one only because v(n) may rise in steps."""
REFIT_EVERY = 16
FIRST_REST, LONGEST_REST = 32, 1024
SURE, DEVIATION = 1.5, 0.8
"""A fixed length is taken when it is so many standard errors better; a round's tokens deviate by that much of their mean."""
FIRST_ROUNDS_WEIGH = 20
"""The rate begins at that of the best fixed length, with so many plain steps' weight."""


class CostAwareTS(Controller):
    """After k drafted tokens goes on iff some j <= ``HORIZON`` more are worth it: S (m + ... + m^j) >= lambda * their seconds.

    S is the chance that all k are accepted, m that the next would be, both from :class:`Calibrator` posteriors (a draw of
    each per round; ``draws=0`` takes the means); the seconds are measured, by draft steps and by node count of verify;
    lambda is the rate reached of late, in tokens per second. ``discount`` forgets the rate and the fixed lengths' statistics.

    Now and then a round has a fixed length. From those the rate of every fixed length is known, plain decoding included,
    and while one is clearly better than the rule, it is used.
    """

    def __init__(self, discount: float = 0.998, draws: int = 1, seed: int = 0, prior: CalibrationPrior | None = None) -> None:
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        if draws not in (0, 1):
            raise ValueError("draws must be 0 or 1")
        self.discount, self.draws = discount, draws
        prior = prior or CalibrationPrior()
        self.accept, self.following = Calibrator(prior.accept, prior), Calibrator(prior.following, prior)
        self.costs = RoundCosts()
        self.lengths = Lengths(LONGEST, discount=0.995)
        self._rate = [0.0, 0.0]
        """Tokens and seconds of the rule's rounds, discounted."""
        self._lambda = 0.0
        self._rounds = self._rest_left = self._best_length = 0
        self._width = 1
        """Nodes of a level that are drafted on."""
        self._next_rest = FIRST_REST
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._drawn = (0.0, 1.0, 0.0, 1.0)
        self._begin_round()

    def _begin_round(self) -> None:
        self._scores: list[tuple[float, float]] = []
        self._survival = 1.0
        self._fixed = self._fixed_length()

    def _fixed_length(self) -> int | None:
        """The next round's length if it does not depend on what is drafted: in the first rounds, in every
        ``REFERENCE_EVERY``-th, and while a fixed length is better than the rule."""
        if not self._lambda:
            return FIRST_LENGTHS[self._rounds % len(FIRST_LENGTHS)]
        if self._rounds % REFERENCE_EVERY == 0:
            return min(self._best_length + 3, LONGEST)
        return self._best_length if self._rest_left else None

    def begin_request(self) -> None:
        self.accept.begin_request()
        self.following.begin_request()

    def length_ahead(self) -> int | None:
        return 0 if self._fixed == 0 else None  # longer ones are asked step by step, since every label teaches the calibration

    def keep_drafting(self, step: DraftStep) -> bool:
        if step.depth == 1:
            self._scores.clear()  # of a round that was cancelled
            self._survival = 1.0
            normal = self._random.standard_normal(4).tolist() if self.draws else [0.0] * 4
            self._drawn = (*self.accept.draw(normal[:2]), *self.following.draw(normal[2:]))
        self._width = step.nodes // step.depth
        x = features(step)
        own, following = self.accept.score(x), self.following.score(x)
        self._scores.append((own, following))
        if self._fixed is not None:
            return step.depth < self._fixed
        shift, slope, next_shift, next_slope = self._drawn
        self._survival *= sigmoid(shift + slope * own)
        return self._worth(step.depth, sigmoid(next_shift + next_slope * following))

    def _worth(self, depth: int, m: float) -> bool:
        """Whether some number of further levels, as wide as before, brings more tokens than its seconds bring elsewhere."""
        draft, verify, width = self.costs.draft.seconds, self.costs.verify.seconds, self._width
        reach, tokens, before = self._survival, 0.0, draft(depth) + verify(depth * width)
        for ahead in range(1, HORIZON + 1):
            reach *= m
            tokens += reach
            if tokens >= self._lambda * (draft(depth + ahead) + verify((depth + ahead) * width) - before):
                return True
        return False

    def observe(self, outcome: RoundOutcome) -> None:
        drafted, right = outcome.drafted, outcome.followed
        self.costs.add(outcome.steps, outcome.draft_seconds, outcome.nodes, outcome.verify_seconds)
        for depth, (own, following) in enumerate(self._scores[: right + 1], start=1):
            if depth <= drafted:
                self.accept.learn(own, depth <= right)
            if depth <= right and depth < drafted:
                self.following.learn(following, depth < right)
        self.accept.advance()
        self.following.advance()
        if self._fixed is not None and drafted == outcome.steps > 0:  # a budget leaves levels out by what was drafted
            self.lengths.add(drafted, right)
        elif self._fixed is None:
            tokens, seconds = self._rate
            spent = outcome.draft_seconds + outcome.verify_seconds
            self._rate = [tokens * self.discount + outcome.accepted + 1, seconds * self.discount + spent]
            self._lambda = self._rate[0] / max(self._rate[1], 1e-9)
        self._rounds += 1
        self._rest_left = max(self._rest_left - 1, 0)
        due = self._rounds % REFIT_EVERY == 0 if self._lambda else self._rounds >= len(FIRST_LENGTHS)
        if due and self.costs.known:
            self._compare()
        self._begin_round()

    def _compare(self) -> None:
        """Fit the costs; take the best fixed length for a while if it is clearly better than the rule."""
        self.costs.fit(LONGEST, LONGEST * self._width)
        rates = self.lengths.rates(self.costs, self._width)
        best = max(range(len(rates)), key=rates.__getitem__)
        self._best_length = best
        if not self._lambda:  # the rule begins as if it had been as good for a few rounds
            self._rate = [
                rates[best] * FIRST_ROUNDS_WEIGH * self.costs.verify.seconds(0),
                FIRST_ROUNDS_WEIGH * self.costs.verify.seconds(0),
            ]
            self._lambda = rates[best]
        elif not self._rest_left:
            doubt = SURE * DEVIATION / max(self.lengths.judged[0], 1.0) ** 0.5
            if rates[best] > self._lambda * (1 + doubt):
                self._rest_left = self._next_rest
                self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            else:
                self._next_rest = max(self._next_rest // 2, FIRST_REST)

    def state(self) -> dict[str, Any]:
        return {
            "discount": self.discount,
            "draws": self.draws,
            "accept": self.accept.state(),
            "following": self.following.state(),
            "costs": self.costs.state(),
            "lengths": self.lengths.state(),
            "rate": list(self._rate),
            "lambda": self._lambda,
            "rounds": self._rounds,
            "rest": [self._rest_left, self._next_rest, self._best_length],
            "width": self._width,
            "random": self._random.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.discount, self.draws = float(state["discount"]), int(state["draws"])
        self.accept.restore(state["accept"])
        self.following.restore(state["following"])
        self.costs.restore(state["costs"])
        self.lengths.restore(state["lengths"])
        self._rate = [float(value) for value in state["rate"]]
        self._lambda, self._rounds = float(state["lambda"]), int(state["rounds"])
        self._rest_left, self._next_rest, self._best_length = map(int, state["rest"])
        self._width = int(state["width"])
        self._random.bit_generator.state = state["random"]
        self._begin_round()
