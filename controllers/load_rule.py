"""How far a batch drafts: what another node of every row is worth, against what it costs the whole batch.

All rows of a batch run in one call, and all take as many nodes as the longest, so the length is the batch's. With few rows a
node costs little, because reading the weights decides; with many rows each node costs its computation, and drafting fades. On a
GPU calls have more rows and nodes than the rule asks for, and it counts with what is computed.
docs/controllers.md derives the rule.
"""

from collections.abc import Callable, Sequence
from math import erf, exp, pi, sqrt

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.controllers.call_costs import CallCosts
from eesd.controllers.text_rule import PRIOR as TEXT_PRIOR
from eesd.controllers.text_rule import TextRule, TextStep
from eesd.controllers.value import HORIZON, most_valuable, pays

LONGEST = 16
"""Levels that are counted."""
FIRST_CHANCE, FIRST_LABELS = 0.5, 4.0
"""Acceptance that is assumed at first, and the labels that it weighs as much as."""
MEMORY = 256.0
"""Labels that make a depth's acceptance."""
FADING, FADED = 0.998, 16.0
"""Share of its labels that a depth keeps over a round in which nothing is drafted: what was learned long ago is in doubt, so a
draft is tried again now and then. It keeps at least so many, or trying would cost too much."""
ROW_MEMORY = 16.0
"""Rounds that make a row's own acceptance of first tokens."""
SPREAD = 0.6
"""Share of a first token's variance that the draft's confidence tells."""
RATE_DISCOUNT, RATE_WEIGHT = 0.98, 5.0
"""Weight of a round in the rate for each later one; rounds that the first estimate weighs as much as."""

Size = Callable[[int, int], tuple[int, float]]
"""Given the rows of a call and the nodes of each: what the engine computes, which may fill up both."""
LEAST_VALUE = 0.1
"""Chance of a token of the text, and all before it, below which it is not proposed to the batch."""
LONGEST_COPY = 16
"""Tokens of the text that one round verifies at most."""


class LoadRule:
    """Shared by all rows: costs of calls, acceptance, and the rate in tokens per second by number of rows."""

    def __init__(self, prior: CalibrationPrior | None = None, fixed: int | None = None) -> None:
        """Begin with the prior of the exit head. With ``fixed``, each round drafts this number of levels."""
        self._fixed = fixed
        self.prior = prior or CalibrationPrior()
        self.draft, self.verify = CallCosts(), CallCosts()
        self.draft_size: Size = _as_asked
        self.verify_size: Size = _as_asked
        self.accept, self.following = Calibrator(self.prior.accept, self.prior), Calibrator(self.prior.following, self.prior)
        self.text = Calibrator(TEXT_PRIOR.accept, TEXT_PRIOR)
        """Chances of what texts propose; see :class:`RowTextRule`."""
        self.judged = [FIRST_LABELS] * LONGEST
        self.accepted = [FIRST_LABELS * FIRST_CHANCE] * LONGEST
        self.random = np.random.Generator(np.random.PCG64(0))
        self._rates: dict[int, list[float]] = {}
        self.normals = [0.0] * 4
        """This round's random numbers, the same for all rows: those of many rows would cancel out, and explore nothing."""

    def begin_round(self) -> None:
        """Begin a round of all rows: what is known drifts, and random numbers are drawn."""
        self.accept.advance()
        self.following.advance()
        self.normals = self.random.standard_normal(4).tolist()

    def chance(self, depth: int) -> float:
        """The share of drafted tokens at a depth that were accepted, if all before were."""
        return self.accepted[depth - 1] / self.judged[depth - 1] if depth <= LONGEST else 0.0

    def first_chance(self) -> float:
        """A draw from what is known of the acceptance of first tokens: the less was seen lately, the more it varies."""
        judged, accepted = self.judged[0], self.accepted[0]
        return float(self.random.beta(accepted + 0.5, judged - accepted + 0.5))

    def count(self, level: int, accepted: bool) -> None:
        """Count a drafted token that was judged."""
        if level <= LONGEST:
            self.judged[level - 1] = self.judged[level - 1] * (1 - 1 / MEMORY) + 1
            self.accepted[level - 1] = self.accepted[level - 1] * (1 - 1 / MEMORY) + accepted

    def fade(self) -> None:
        """Note a round that drafted nothing."""
        for depth in range(LONGEST):
            if self.judged[depth] > FADED:
                self.judged[depth] *= FADING
                self.accepted[depth] *= FADING

    def rate(self, rows: int, slots: float) -> float:
        """Tokens per second of all rows together, as lately; at first what plain decoding brings. 0 with fixed levels."""
        if self._fixed is not None:
            return 0.0
        tokens, seconds = self._rates.get(rows) or self._first_rate(rows, slots)
        return tokens / seconds

    def _first_rate(self, rows: int, slots: float) -> list[float]:
        return [RATE_WEIGHT * rows, RATE_WEIGHT * self._verifying(rows, 0, slots)]

    def add_round(self, rows: int, slots: float, tokens: int, seconds: float) -> None:
        """Note what a round of this many rows brought, and its seconds."""
        known = self._rates.get(rows) or self._first_rate(rows, slots)
        discount = RATE_DISCOUNT ** min(rows, 8)
        self._rates[rows] = [known[0] * discount + tokens, known[1] * discount + seconds]

    def begins(self, firsts: Sequence[float], rows: int, slots: float, certain: Sequence[float] = ()) -> bool:
        """Whether a first draft step is worth its time, before it is known how sure the draft is.

        Args:
            firsts: For each row that would draft, the chance that its first token is accepted.
            rows: Rows of the verify pass.
            slots: Of each row.
            certain: What other rows, which draft from their text, expect of levels 1, 2, ... together.
        """
        if self._fixed is not None:
            return self._fixed > 0
        rate, draft = self.rate(rows, slots), self._drafting(len(firsts), slots)
        before, ahead = self._verifying(rows, 0, slots), 0.0
        drawn = self.first_chance() / self.chance(1)
        firsts = [min(chance * drawn, 1.0) for chance in firsts]
        deviation = sqrt(SPREAD * sum(chance * (1 - chance) for chance in firsts))
        mean, reach = 0.0, sum(firsts)
        for level in range(1, HORIZON + 1):
            mean += reach
            ahead += certain[level - 1] if level <= len(certain) else 0.0
            cost = rate * (self._verifying(rows, level, slots) - before + (level - 1) * draft)
            if _expected_excess(mean + ahead - cost, deviation * level) - max(ahead - cost, 0.0) >= rate * draft:
                return True
            reach *= self.chance(level + 1)
        return False

    def goes_on(
        self, reaches: Sequence[tuple[float, float]], depth: int, rows: int, slots: float, certain: Sequence[float]
    ) -> bool:
        """Whether some further levels are worth their seconds at the present rate (:func:`~eesd.controllers.value.pays`).

        Args:
            reaches: Of each row that would draft on.
            depth: Levels that are drafted.
            rows: Rows of the verify pass.
            slots: Of each row.
            certain: What rows that draft from their text expect of the levels after ``depth``, together.
        """
        if self._fixed is not None:
            return depth < self._fixed
        rate, draft = self.rate(rows, slots), self._drafting(len(reaches), slots)
        before = self._verifying(rows, depth, slots)
        return pays(
            reaches, lambda ahead: rate * (self._verifying(rows, depth + ahead, slots) - before + ahead * draft), certain
        )

    def levels(self, values: Sequence[float], rows: int, slots: float) -> int:
        """How many levels to verify, of those whose expected tokens, of all rows together, are ``values``."""
        if self._fixed is not None:
            return min(len(values), self._fixed)
        rate, plain = self.rate(rows, slots), self._verifying(rows, 0, slots)
        return most_valuable(values, lambda count: rate * (self._verifying(rows, count, slots) - plain))[0]

    def price(self, rows: int, slots: float) -> Callable[[int], float]:
        """A function that gives the price of n nodes of one row, in tokens, if each of ``rows`` verifies n."""
        rate, plain = self.rate(rows, slots) / rows, self._verifying(rows, 0, slots)
        return lambda nodes: rate * (self._verifying(rows, nodes, slots) - plain)

    def plain_seconds(self, rows: int, slots: float) -> float:
        """Seconds of a verify pass of rows that drafted nothing."""
        return self._verifying(rows, 0, slots)

    def _verifying(self, rows: int, levels: int, slots: float) -> float:
        """Seconds of a verify pass over the root and so many drafted nodes of each row."""
        return self.verify.seconds(*self.verify_size(rows, 1 + levels), slots)

    def _drafting(self, rows: int, slots: float) -> float:
        """Seconds of a draft step of so many rows."""
        return self.draft.seconds(*self.draft_size(rows, 1), slots)

    def step_cost(self, rows: int, slots: float) -> float:
        """Tokens that a row must expect of a level, so that its part of the draft step pays."""
        if rows == 1:
            return 0.0
        return self.rate(rows, slots) * (self._drafting(rows, slots) - self._drafting(1, slots)) / (rows - 1)


class RowController(Controller):
    """What one row tells the batch: how likely its draft is accepted.

    Attributes:
        reach: The chance that all it has drafted is accepted.
        following: The chance that the next token is, too.
        values: For each drafted level, the chance that it and all before it are accepted.
        first: The chance that the first token of a draft is accepted, from this row's rounds.
    """

    def __init__(self, rule: LoadRule) -> None:
        self._rule = rule
        prior = rule.prior
        self.accept = Calibrator(prior.accept, prior, rule.accept)
        self.follow = Calibrator(prior.following, prior, rule.following)
        self.first = rule.chance(1)
        self._labels = 0.0
        self.least = 0.0
        """A level whose chance is less is not worth this row's draft step."""
        self.begin_round(1)

    def begin_round(self, width: int) -> int | None:
        self.reach, self.following, self.values = 1.0, self.first, list[float]()
        self._scores: list[tuple[float, float]] = []
        self._draw: tuple[float, float, float, float] | None = None
        return None

    def keep_drafting(self, step: DraftStep) -> bool:
        if self._draw is None:
            normal = self._rule.normals
            self._draw = (*self.accept.draw(normal[:2]), *self.follow.draw(normal[2:]))
        x = features(step)
        own, following = self.accept.score(x), self.follow.score(x)
        self._scores.append((own, following))
        shift, slope, next_shift, next_slope = self._draw
        self.reach *= sigmoid(shift + slope * own)
        self.following = sigmoid(next_shift + next_slope * following)
        self.values.append(self.reach)
        return self.reach * self.following >= self.least

    def observe(self, outcome: RoundOutcome) -> None:
        if not self._scores or outcome.first_right is None:
            return
        # The first token is judged by what was committed, also where the batch did not verify it.
        depth = max(outcome.depth, 1)
        accepted = outcome.num_expanded if outcome.depth else int(outcome.first_right)
        for level, (own, following) in enumerate(self._scores[: min(accepted + 1, depth)], start=1):
            self.accept.learn(own, level <= accepted)
            self._rule.count(level, level <= accepted)
            if level <= accepted and level < depth:
                self.follow.learn(following, level < accepted)
        self.accept.advance()
        self.follow.advance()
        self._labels = min(self._labels + 1, ROW_MEMORY)
        self.first += ((accepted > 0) - self.first) / (self._labels + FIRST_LABELS)


class RowTextRule(TextRule):
    """A row takes all that its text proposes where that is worth more than what it expects of the exit head.

    All rows share the calibration, and the batch decides how much of it is verified.
    """

    def __init__(self, rule: LoadRule, row: RowController) -> None:
        super().__init__(accept=rule.text)
        self._rule, self._row = rule, row

    def count(self, values: Sequence[float], drafts: bool) -> int:
        worth = [value for value in values[:LONGEST_COPY] if value >= LEAST_VALUE]
        exit_head, reach = 0.0, self._row.first
        for depth in range(1, HORIZON + 1):
            exit_head += max(reach - self._row.least, 0.0)
            reach *= self._rule.chance(depth + 1)
        return len(worth) if not drafts or sum(worth) > exit_head else 0

    def observe(self, steps: Sequence[TextStep], right: int, judged: int, outcome: RoundOutcome) -> None:
        self.judge(steps, right, judged)


def _as_asked(rows: int, nodes: int) -> tuple[int, float]:
    return rows, nodes


def _expected_excess(mean: float, deviation: float) -> float:
    """The expectation of max(x, 0) for a normal x."""
    if deviation <= 0:
        return max(mean, 0.0)
    z = mean / deviation
    return deviation * exp(-z * z / 2) / sqrt(2 * pi) + mean * (1 + erf(z / sqrt(2))) / 2
