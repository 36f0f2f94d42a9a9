"""How far a batch drafts: what another node of every row is worth, against what it costs the whole batch.

With few rows a node costs little, because reading the weights decides; with many rows each node costs its computation, and
drafting fades. docs/controllers.md derives the rule.
"""

from collections.abc import Callable, Sequence

import numpy as np

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.calibration import Calibrator
from eesd.controllers.call_costs import CallCosts
from eesd.controllers.cost_aware_ts import CalibratedDraft
from eesd.controllers.text_rule import PRIOR as TEXT_PRIOR
from eesd.controllers.text_rule import TextRule, TextStep
from eesd.controllers.value import HORIZON, most_valuable, pays

FIRST_RIGHT, FIRST_LABELS = 2.0, 4.0
"""First tokens of drafts that are taken as right at first, of so many."""
MEMORY = 256.0
"""Labels that make the acceptance of first tokens."""
FADING, FADED = 0.998, 16.0
"""Share of its labels that is kept over a round in which nothing is drafted, and the labels that are always kept. What was
learned long ago is in doubt, so a draft is tried again now and then; with fewer labels that would be too often."""
RATE_DISCOUNT, RATE_WEIGHT = 0.98, 5.0
"""Weight of a round in the rate for each later one; rounds that the first estimate weighs as much as."""
LEAST_VALUE = 0.1
"""Chance of a token of the text, and all before it, below which it is not proposed to the batch."""
LONGEST_COPY = 16
"""Tokens of the text that one round verifies at most."""

Size = Callable[[int, int], tuple[int, float]]
"""Given the rows of a call and the nodes of each: what the engine computes, which may fill up both."""


class LoadRule:
    """Shared by all rows: costs of calls, acceptance, and the rate in tokens per second by number of rows.

    Attributes:
        draft, verify: What calls cost.
        draft_size, verify_size: What engines compute for a call.
        accept, following: The calibrations of drafts.
        text: Chances of what texts propose.
        normals: This round's random numbers, the same for all rows: those of many rows would cancel out, and explore nothing.
        first: The chance that the first token of a row's draft is right, drawn for this round: the less was seen lately, the
            more it varies.
    """

    def __init__(self, prior: CalibrationPrior | None = None, fixed: int | None = None) -> None:
        """Begin with the prior of the exit head. With ``fixed``, each round drafts this number of levels."""
        self._fixed = fixed
        self.prior = prior = prior or CalibrationPrior()
        self.draft, self.verify = CallCosts(), CallCosts()
        self.draft_size: Size = _as_asked
        self.verify_size: Size = _as_asked
        self.accept, self.following = Calibrator(prior.accept, prior), Calibrator(prior.following, prior)
        self.text = Calibrator(TEXT_PRIOR.accept, TEXT_PRIOR)
        self.random = np.random.Generator(np.random.PCG64(0))
        self._right, self._judged = FIRST_RIGHT, FIRST_LABELS
        self._rates: dict[int, list[float]] = {}
        self.begin_round(1, 0.0)

    def begin_round(self, rows: int, slots: float) -> None:
        """Begin a round of ``rows`` rows with ``slots`` slots each. The calibrations drift, and the round draws its numbers."""
        self.rows, self.slots = rows, slots
        self.accept.advance()
        self.following.advance()
        self.normals = self.random.standard_normal(4).tolist()
        self.first = float(self.random.beta(self._right + 0.5, self._judged - self._right + 0.5))

    def judge_first(self, right: bool) -> None:
        """Count the first token of a row's draft."""
        self._judged = self._judged * (1 - 1 / MEMORY) + 1
        self._right = self._right * (1 - 1 / MEMORY) + right

    def observe(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Note what the round brought, its seconds, and whether any row drafted."""
        if not drafted and self._judged > FADED:
            self._judged *= FADING
            self._right *= FADING
        known, discount = self._rate(), RATE_DISCOUNT ** min(self.rows, 8)
        self._rates[self.rows] = [known[0] * discount + tokens, known[1] * discount + seconds]

    @property
    def rate(self) -> float:
        """Tokens per second of all rows together, as lately; at first what plain decoding brings. 0 with fixed levels."""
        tokens, seconds = self._rate()
        return tokens / seconds if self._fixed is None else 0.0

    def _rate(self) -> list[float]:
        """Tokens and seconds of rounds with as many rows."""
        rows = self.rows
        return self._rates.get(rows) or [RATE_WEIGHT * rows, RATE_WEIGHT * self.plain_seconds(rows, self.slots)]

    def goes_on(self, reaches: Sequence[tuple[float, float]], depth: int, certain: Sequence[float] = ()) -> bool:
        """Whether some further levels are worth their seconds at the present rate (:func:`~eesd.controllers.value.pays`).

        Args:
            reaches: Of each row that would draft on.
            depth: Levels that are drafted.
            certain: What rows that draft from their text expect of the levels after ``depth``, together.
        """
        if self._fixed is not None:
            return depth < self._fixed
        rate, draft = self.rate, self.draft.seconds(*self.draft_size(len(reaches), 1), self.slots)
        before = self._verifying(depth)
        return pays(reaches, lambda ahead: rate * (self._verifying(depth + ahead) - before + ahead * draft), certain)

    def levels(self, values: Sequence[float]) -> int:
        """How many levels to verify, of those whose expected tokens, of all rows together, are ``values``."""
        if self._fixed is not None:
            return min(len(values), self._fixed)
        return most_valuable(values, self.price(self.rows))[0]

    def price(self, rows: int) -> Callable[[int], float]:
        """A function that gives the price of n nodes of so many ``rows``, in tokens, if each row verifies n."""
        rate, plain = self.rate * rows / self.rows, self._verifying(0)
        return lambda nodes: rate * (self._verifying(nodes) - plain)

    def _verifying(self, levels: int) -> float:
        """Seconds of a verify pass over the root and so many drafted nodes of each row."""
        return self.verify.seconds(*self.verify_size(self.rows, 1 + levels), self.slots)

    def plain_seconds(self, rows: int, slots: float) -> float:
        """Seconds of a verify pass of rows that drafted nothing."""
        return self.verify.seconds(*self.verify_size(rows, 1), slots)


class RowController(CalibratedDraft):
    """What one row tells the batch: how likely its draft is accepted. The batch decides how far to draft.

    Attributes:
        values: For each drafted level, the chance that it and all before it are accepted.
    """

    def __init__(self, rule: LoadRule) -> None:
        self._rule, prior = rule, rule.prior
        accept = Calibrator(prior.accept, prior, rule.accept)
        super().__init__(accept, Calibrator(prior.following, prior, rule.following), lambda: rule.normals)

    def begin_round(self, width: int) -> int | None:
        super().begin_round(width)
        self.next, self.values = self._rule.first, list[float]()
        return None

    def keep_drafting(self, step: DraftStep) -> bool:
        self.add(step)
        self.values.append(self.reach)
        return True

    def observe(self, outcome: RoundOutcome) -> None:
        if not self._scores or outcome.first_right is None:
            return
        # The first token is judged by what was committed, also where the batch did not verify it.
        accepted = outcome.num_expanded if outcome.depth else int(outcome.first_right)
        self._rule.judge_first(self.learn(max(outcome.depth, 1), accepted)[0])


class RowTextRule(TextRule):
    """A row takes all that its text proposes where that is worth more than what is expected of the exit head.

    All rows share the calibration, and the batch decides how much of it is verified.
    """

    def __init__(self, rule: LoadRule) -> None:
        super().__init__(accept=rule.text)
        self._rule = rule

    def count(self, values: Sequence[float], drafts: bool) -> int:
        worth = [value for value in values[:LONGEST_COPY] if value >= LEAST_VALUE]
        exit_head = sum(self._rule.first**level for level in range(1, HORIZON + 1)) if drafts else 0.0
        return len(worth) if sum(worth) > exit_head else 0

    def observe(self, steps: Sequence[TextStep], right: int, judged: int, outcome: RoundOutcome) -> None:
        self.judge(steps, right, judged)


def _as_asked(rows: int, nodes: int) -> tuple[int, float]:
    return rows, nodes
