"""This module learns, while decoding, how the draft's confidence maps to the chance of acceptance.
It also has the default controller, which drafts while the next token is worth its time
(docs/controllers.md).

A *score* z is a fixed weighted sum of a token's features. Offline it predicts the acceptance
sigma(z). Online a Gaussian posterior over (shift a, slope s, request offset b) recalibrates it:
P(accepted) = sigma(a + s z + b). The shift and the slope belong to the model, so they persist. The
offset
belongs to the request: it starts at 0 with its prior width and drifts with the text.
"""

from collections.abc import Callable, Sequence
from math import exp, log, log1p
from typing import ClassVar

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.value import RoundValue

CERTAIN = 0.9999
"""Upper bound of all chances. It is below 1 because a parent must stay likelier than its child."""
STEP = 0.2
NODE = 0.03
RATE = 1.3
"""The constant costs of a draft step and of a verified node (in plain steps), and the constant rate
(in tokens per plain step)."""


def features(step: DraftStep) -> tuple[float, ...]:
    """Return the features [5] of a draft step. They are 1, log(1 + margin), the log-odds of the
    token, depth / 6, and 1 if the token is the first of its round (or 0 if not). All features are
    bounded."""
    p = step.probability
    margin = step.margin
    depth = step.depth
    odds = 8.0
    if p <= 0.05:
        odds = -3.0
    elif p < 0.9996:
        odds = log(p / (1 - p))
    return (
        1.0,
        log1p(min(max(margin, 0.0), 12.0)),
        odds,
        min(depth, 6) / 6,
        float(depth == 1),
    )


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z)) if z > -500 else 0.0


class Calibrator:
    """The posterior over (a, s, b) for one score.

    It is updated by assumed-density filtering. Each label is a logistic likelihood, and one Newton
    step (online Laplace) gives the next Gaussian. Between rounds the variances of a, s and b grow,
    up to the prior's variances.

    If ``shared`` is given, a and s belong to that calibrator, and this calibrator updates them.
    ``b`` is then treated as independent of a and s.
    """

    def __init__(
        self, weights: Sequence[float], prior: CalibrationPrior, shared: "Calibrator | None" = None
    ) -> None:
        self._weights = tuple(weights)
        self._prior = prior
        self._shared = shared is not None
        self._model = [0.0, 1.0, prior.shift**2, 0.0, prior.slope**2]
        if shared is not None:
            self._model = shared._model
        """The means of a and s, and their covariances aa, as and ss."""
        self.begin_request()

    @property
    def mean(self) -> list[float]:
        """The means of a, s and b."""
        return [*self._model[:2], self._offset[0]]

    @property
    def covariance(self) -> list[float]:
        """The covariances aa, as, ab, ss, sb and bb of a, s and b."""
        _, _, aa, as_, ss = self._model
        _, ab, sb, bb = self._offset
        return [aa, as_, ab, ss, sb, bb]

    def score(self, x: Sequence[float]) -> float:
        """Return the score z of a token with the features ``x`` [5]."""
        w = self._weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3] + w[4] * x[4]

    def begin_request(self) -> None:
        """Integrate out the previous request's offset, because the new request's offset is
        unknown."""
        # The mean of b, and the covariances ab, sb and bb.
        self._offset = [0.0, 0.0, 0.0, self._prior.request**2]

    def learn(self, z: float, accepted: bool) -> None:
        """Update the posterior with one label."""
        a, s, aa, as_, ss = self._model
        b, ab, sb, bb = self._offset
        p = sigmoid(a + s * z + b)
        # The covariance times the gradient (1, z, 1).
        ga = aa + as_ * z + ab
        gs = as_ + ss * z + sb
        gb = ab + sb * z + bb
        curvature = p * (1 - p)
        scale = 1 + curvature * (ga + gs * z + gb)
        step = (accepted - p) / scale
        shrink = curvature / scale
        self._model[:] = (
            a + ga * step,
            s + gs * step,
            aa - ga * ga * shrink,
            as_ - ga * gs * shrink,
            ss - gs * gs * shrink,
        )
        self._offset = [
            b + gb * step,
            ab - ga * gb * shrink,
            sb - gs * gb * shrink,
            bb - gb * gb * shrink,
        ]
        if self._shared:
            self._offset[1:3] = 0.0, 0.0

    def advance(self) -> None:
        """Let a, s and b drift because one round has passed. If ``shared`` was given, only b drifts
        here, because a and s belong to the other calibrator."""
        model = self._model
        offset = self._offset
        prior = self._prior
        if not self._shared:
            model[2] = min(model[2] + prior.drift**2, prior.shift**2)
            model[4] = min(model[4] + prior.drift**2 * prior.slope, prior.slope**2)
        offset[3] = min(offset[3] + prior.wander**2, prior.request**2)

    def draw(self, normal: Sequence[float]) -> tuple[float, float]:
        """Draw the intercept a + b and the slope s from the posterior with two standard normal
        numbers. b is set to its mean given ``a`` and ``s``.

        Exploring ``a`` and ``s`` pays because they persist. The offset ``b`` is lost when the
        request ends, so it is not explored.
        """
        a, s, aa, as_, ss = self._model
        b, ab, sb, _ = self._offset
        sd = aa**0.5
        if sd == 0:
            return a + b, s + ss**0.5 * normal[1]
        along = as_ / sd
        with_a = ab / sd
        rest = max(ss - along * along, 0.0) ** 0.5
        with_s = (sb - along * with_a) / rest if rest else 0.0
        intercept = a + b + (sd + with_a) * normal[0] + with_s * normal[1]
        return intercept, s + along * normal[0] + rest * normal[1]


class CalibratedDraft(Controller):
    """Estimates a draft's chances with two calibrations. One is for each drafted token, and the
    other is for the token after it.

    Attributes:
        accept: Calibration of drafted tokens. Set by the constructor.
        following: Calibration of the tokens after drafted tokens. Set by the constructor.
        reach: Chance that all drafted tokens are accepted. Set by :meth:`add`.
        next: Chance that the next token is then accepted. Set by :meth:`add`.
    """

    def __init__(
        self, accept: Calibrator, following: Calibrator, random: Callable[[], Sequence[float]]
    ) -> None:
        """``random`` is a function that returns four standard normal numbers for the draws of a
        round."""
        self.accept = accept
        self.following = following
        self._random = random
        self.begin_round(1)

    def begin_request(self) -> None:
        self.accept.begin_request()
        self.following.begin_request()

    def begin_round(self, width: int) -> int | None:
        self.reach = self.next = 1.0
        self._scores: list[tuple[float, float]] = []
        self._draw: tuple[float, float, float, float] | None = None
        return None

    def add(self, step: DraftStep) -> None:
        """Record a draft step."""
        if self._draw is None:
            normal = self._random()
            self._draw = (*self.accept.draw(normal[:2]), *self.following.draw(normal[2:]))
        x = features(step)
        own = self.accept.score(x)
        following = self.following.score(x)
        self._scores.append((own, following))
        shift, slope, next_shift, next_slope = self._draw
        self.reach *= sigmoid(shift + slope * own)
        self.next = sigmoid(next_shift + next_slope * following)

    def learn(self, depth: int, accepted: int) -> list[bool]:
        """Learn from a round that verified ``depth`` levels and accepted ``accepted`` of them.
        Returns the labels."""
        labels = []
        for level, (own, following) in enumerate(self._scores[: min(accepted + 1, depth)], start=1):
            labels.append(level <= accepted)
            self.accept.learn(own, level <= accepted)
            if level <= accepted and level < depth:
                self.following.learn(following, level < accepted)
        self.accept.advance()
        self.following.advance()
        return labels

    def expected_tokens(self, depth: int) -> float | None:
        """Return the expected number of committed tokens. This is 1 plus a sum over the verified
        tokens. The term of a token is the chance that it and all tokens before it are accepted."""
        if len(self._scores) < depth:  # at the end of a text the last level has no score
            return None
        shift, slope = self.accept.draw((0.0, 0.0))
        tokens = survival = 1.0
        for own, _ in self._scores[:depth]:
            survival *= sigmoid(shift + slope * own)
            tokens += survival
        return tokens


class CostAwareTS(CalibratedDraft):
    """After k draft tokens, continue if and only if j more are worth their time for some j <=
    ``HORIZON``: S (m + ... + m^j) >= lambda * their seconds.

    S is the chance that all k tokens are accepted, and m is the chance that the next token would be
    accepted. Both come from posteriors of :class:`Calibrator` (one draw from each per round).
    ``value`` measures the seconds of draft steps and of the nodes of the verify pass. It also
    measures lambda, which is the recent rate in tokens per second.

    The first two rounds are a plain round and a round with a single drafted token, so that both
    costs are measured. Then the rule decides.
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
        self._fixed = None if self.value.draft.table else int(bool(self.value.verify.table))
        # Decide step by step, because the calibration learns from every label.
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
    """:class:`CostAwareTS` with constant costs. It is used for one request with rejection sampling,
    where tokens depend on draft lengths.

    The lengths depend on the draft, the seed and the accepted tokens, but not on the clock or other
    requests. So a seed gives one text.
    """

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
        """Do nothing, because the controller serves one request. This request may later be alone in
        a batch."""
