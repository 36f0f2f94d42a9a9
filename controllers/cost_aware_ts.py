"""Cost-aware Thompson Sampling: keep drafting while the next token is worth its time
(docs/controllers.md derives the rule)."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.value import RoundValue, pays

STEP = 0.2
NODE = 0.03
RATE = 1.3
"""Costs that do not follow the clock: a draft step and a verified node in plain steps, and tokens a
plain step."""


class CalibratedDraft(Controller):
    """What the calibrations say of a draft: one of each drafted token, and one of the token after
    it.

    Attributes:
        accept, following: The two calibrations.
        reach: The chance that all that was drafted is accepted.
        next: The chance that the next token is, too.
    """

    def __init__(
        self, accept: Calibrator, following: Calibrator, random: Callable[[], Sequence[float]]
    ) -> None:
        """``random`` gives four standard normal numbers, for the draws of a round."""
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
        """Note a draft step."""
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
        """Learn from a round that verified ``depth`` levels, of which ``accepted`` were accepted.
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


class CostAwareTS(CalibratedDraft):
    """After k draft tokens continue iff some j <= ``HORIZON`` more are worth it: S (m + ... + m^j)
    >= lambda * their seconds.

    S is the chance that all k are accepted, m that the next one would be, both from
    :class:`Calibrator` posteriors (one draw of each per round). The seconds are measured, by draft
    steps and by nodes of the verify pass. lambda is the recent rate in tokens per second. Both are
    those of ``value``.

    The first rounds are a plain one and a draft of one token, to learn what both cost; then the
    rule decides.
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
        # A draft is asked step by step: every label teaches the calibration.
        return 0 if self._fixed == 0 else None

    def keep_drafting(self, step: DraftStep) -> bool:
        self.add(step)
        return (
            step.depth < self._fixed if self._fixed is not None else self._is_worth_it(step.depth)
        )

    def _is_worth_it(self, depth: int) -> bool:
        """Whether some number of further levels brings more tokens than their seconds would bring
        at the present rate."""
        return pays(
            self.reach, self.next, self.value.price(depth, depth * self._width, (1, self._width))
        )

    def expected_tokens(self, depth: int) -> float | None:
        """1, and the chances of the verified tokens: each that of the tokens before it and its
        own."""
        if len(self._scores) < depth:  # at the end of a text the last level is not asked about
            return None
        shift, slope = self.accept.draw((0.0, 0.0))
        tokens = survival = 1.0
        for own, _ in self._scores[:depth]:
            survival *= sigmoid(shift + slope * own)
            tokens += survival
        return tokens

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.steps:
            self.learn(outcome.depth, outcome.num_expanded)


class RejectionTS(CostAwareTS):
    """The same with constant costs, for one request with rejection sampling, whose tokens depend on
    the draft lengths.

    The lengths follow the draft, the seed and what verify accepted, and neither the clock nor other
    requests. So a seed gives one text.
    """

    steps_at_once: ClassVar = 1  # alone and in a batch, a device asks after each step

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
        """Do nothing: it has one request, which may become alone in a batch later."""
