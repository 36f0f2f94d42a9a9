"""The draft length of a batch: the value of one more node per row, weighed against its cost to the
batch.

With few rows a node costs little, because reading the weights dominates. With many rows each node
costs its full computation, so that little is drafted. docs/controllers.md derives the rule.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.batch_costs import BatchCosts
from eesd.controllers.calibration import CalibratedDraft, Calibrator
from eesd.controllers.text_rule import PRIOR as TEXT_PRIOR
from eesd.controllers.value import HORIZON, REFIT_EVERY, most_valuable

FIRST_RIGHT = 2.0
FIRST_LABELS = 4.0
"""Pseudo-counts of first drafted tokens: number of right tokens, and total number."""
MEMORY = 256.0
"""Number of recent labels that determine the acceptance of first tokens."""
FADING = 0.998
FADED = 16.0
"""Share of the labels that remains after a round without a draft, and the minimum number of labels.
Fewer labels mean more doubt, so that a draft is tried now and then."""
RATE_DISCOUNT = 0.98
"""Decay factor of a round's weight in the rate, per later round."""
LEAST_VALUE = 0.1
"""Minimum chance that a token from the text, and all tokens before it, are right; less likely
tokens are not proposed to the batch."""
DEAREST = 0.8
"""Node price at which nothing is drafted: even a certain token would not repay the host's time."""
LONGEST_COPY = 16
"""Maximum number of tokens of the text in one round."""
MOST_LEVELS = 32
"""Number of levels with separate prices; further levels have the last price."""

Size = Callable[[int, int], tuple[int, int]]
"""Maps a call's number of rows, and number of nodes per row, to the numbers of rows and nodes that
the engine computes, padding included."""


class LoadRule:
    """Estimates that all rows share: call costs, acceptance, and the rate, in tokens per second,
    for each number of rows.

    Attributes:
        draft, verify: Costs of calls, including the host's work for them. The batch adds samples.
        draft_size, verify_size: Sizes of calls after padding. Set when the batch is made.
        padded: Whether a verify pass pads all rows to the longest. If so, all rows verify the same
            number of levels; if not, each row may verify a different number of nodes. Set with the
            sizes.
        accept, following: The calibrations of drafts.
        text: The calibration of the texts' proposals.
        normals: Random numbers of this round, the same for all rows: separate numbers for many rows
            would cancel out and explore nothing. Set by :meth:`begin_round`.
        first: Chance that the first token of a row's draft is right, drawn for this round. It
            varies more if there were few recent drafts. Set by :meth:`begin_round`.
        rate: Value of a second, in tokens: the recent rate of all rows, at least the plain rate;
            waiting requests count as rows. 0 with fixed levels. Set by :meth:`begin_round`.
        can_pay: Whether any draft may be worth its time in this round. Set by :meth:`begin_round`.
    """

    def __init__(self, prior: CalibrationPrior | None = None, fixed: int | None = None) -> None:
        """Begin with the prior of the exit head. With ``fixed``, each round drafts this number of
        levels."""
        self._fixed = fixed
        self.prior = prior = prior or CalibrationPrior()
        self.draft = BatchCosts()
        self.verify = BatchCosts()
        self.draft_size: Size = _as_asked
        self.verify_size: Size = _as_asked
        self.padded = False
        self.accept = Calibrator(prior.accept, prior)
        self.following = Calibrator(prior.following, prior)
        self.text = Calibrator(TEXT_PRIOR.accept, TEXT_PRIOR)
        self.random = np.random.Generator(np.random.PCG64(0))
        self._right = FIRST_RIGHT
        self._judged = FIRST_LABELS
        self._lately: dict[int, tuple[float, float, float]] = {}
        """Tokens, seconds and number of recent rounds, by number of rows."""
        self._known: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        """Results of :meth:`_curves` since the costs were last computed, by number of rows."""
        self.rows = 1
        self._rounds = 0
        self.first = FIRST_RIGHT / FIRST_LABELS

    def begin_round(self, rows: int, slots: float, waiting: int = 0) -> None:
        """Begin a round: the calibrations drift, and random numbers are drawn.

        Args:
            rows: Number of rows.
            slots: Slots of each row.
            waiting: Number of requests whose prompts wait for the round.
        """
        self.rows = rows
        self.slots = slots
        self._rounds += 1
        if self._rounds % REFIT_EVERY == 0:
            self._known.clear()
        if rows not in self._known:
            self._known[rows] = self._curves()
        verifying, self._drafting = self._known[rows]
        tokens, seconds, _ = self._lately.get(rows, (0.0, 1.0, 1.0))
        self.rate = max(tokens / seconds, rows / verifying[0]) * (1 + waiting / rows)
        if self._fixed is not None:
            self.rate = 0.0
        self._prices = self.rate * (verifying - verifying[0])
        most = DEAREST * np.arange(len(verifying)) * (rows if self.padded else 1)
        self.can_pay = bool((self._prices <= most)[1:].any())
        self.accept.advance()
        self.following.advance()
        self.normals = self.random.standard_normal(4).tolist()
        self.first = float(self.random.beta(self._right + 0.5, self._judged - self._right + 0.5))

    def judge_first(self, right: bool) -> None:
        """Count the first token of a row's draft as right or wrong."""
        self._judged = self._judged * (1 - 1 / MEMORY) + 1
        self._right = self._right * (1 - 1 / MEMORY) + right

    def observe(self, drafted: bool, tokens: int, seconds: float) -> None:
        """Add the tokens and seconds of a round, and whether any row drafted."""
        if not drafted and self._judged > FADED:
            self._judged *= FADING
            self._right *= FADING
        known = self._lately.get(self.rows, (0.0, 0.0, 0.0))
        discount = RATE_DISCOUNT ** min(self.rows, 8)
        self._lately[self.rows] = (
            known[0] * discount + tokens,
            known[1] * discount + seconds,
            known[2] * discount + 1,
        )

    def goes_on(
        self, reaches: Sequence[tuple[float, float]], depth: int, values: Sequence[Sequence[float]]
    ) -> int:
        """Number of rows that draft one more level: the number with the largest gain minus price,
        up to ``HORIZON`` levels ahead. If rows are padded, either all rows draft or none does.

        Args:
            reaches: Two chances of each row that would draft on, the likeliest row first: that all
                its drafted tokens are accepted, and that the next one is.
            depth: Levels drafted so far.
            values: For each row of the batch, chances of the tokens that it drafted or took from
                its text.
        """
        if self._fixed is not None:
            return len(reaches) if depth < self._fixed else 0
        ahead = np.arange(1, HORIZON + 1)[:, None]
        counts = np.arange(1, len(reaches) + 1)
        reach, following = np.array(reaches).T
        gains = (reach * following**ahead).cumsum(0).cumsum(1)
        if self.padded:
            before = depth
            added = ahead
            counts = counts[-1:]
            gains = gains[:, -1:]
        else:
            before = sum(self.levels(values))
            added = ahead * counts
        drafting = self.rate * ahead * self._drafting[counts - 1]
        price = self._price(before + added) - self._price(before) + drafting
        most = (gains - price).max(0)
        return int(counts[most.argmax()]) if most.max() >= 0 else 0

    def copied(self, values: Sequence[float], drafts: bool) -> int:
        """Number of tokens that a row takes from its text: all that are likely enough, or 0 if the
        expected draft is worth at least as much.

        Args:
            values: For each token, the chance that it and all tokens before it are right.
            drafts: Whether the row could draft instead.
        """
        likely = [value for value in values[:LONGEST_COPY] if value >= LEAST_VALUE]
        draft = sum(self.first**level for level in range(1, HORIZON + 1)) * drafts
        return len(likely) * (sum(likely) > draft)

    def levels(self, values: Sequence[Sequence[float]]) -> list[int]:
        """Number of levels that each row verifies, so that the batch verifies its most valuable
        nodes. ``values`` are the chances of each row's nodes."""
        if self._fixed is not None:
            return [min(len(row), self._fixed) for row in values]
        if self.padded:
            sums = [sum(level) for level in zip_longest(*values, fillvalue=0.0)]
            return [most_valuable(sums, self._price)[0]] * len(values)
        nodes = sorted(
            ((value, row) for row, own in enumerate(values) for value in own), reverse=True
        )
        chosen = Counter(
            row for _, row in nodes[: most_valuable([value for value, _ in nodes], self._price)[0]]
        )
        return [chosen[row] for row in range(len(values))]

    def price(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """One row's share of the price, in tokens, if each row verifies ``nodes`` nodes."""
        prices: NDArray[np.float64] = self._price(nodes if self.padded else nodes * self.rows)
        return prices / self.rows

    def _price(self, count: Any) -> Any:
        """Prices, in tokens, of ``count`` levels of padded rows, or of ``count`` nodes of all rows
        together."""
        return self._prices[np.minimum(count, len(self._prices) - 1)]

    def _curves(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of a verify pass with 0, 1, 2, ... levels (padded rows) or nodes of all rows
        together; and seconds of a draft step of 1, 2, ... rows."""
        if self.padded:
            sizes = [self.verify_size(self.rows, 1 + levels) for levels in range(1 + MOST_LEVELS)]
        else:
            sizes = [
                (self.rows, self.rows + nodes) for nodes in range(self.rows * (1 + MOST_LEVELS))
            ]
        drafts = [self.draft_size(count, 1) for count in range(1, self.rows + 1)]
        rows, nodes = np.array(sizes).T
        drafting, drafted = np.array(drafts).T
        return self.verify.curve(rows, nodes, self.slots), self.draft.curve(
            drafting, drafted, self.slots
        )

    def round_seconds(self, rows: int, slots: float) -> float:
        """Mean seconds of recent rounds of ``rows`` rows, drafts included."""
        _, seconds, rounds = self._lately.get(rows) or (
            0.0,
            self.verify.seconds(*self.verify_size(rows, 1), slots),
            1.0,
        )
        return seconds / rounds


class RowController(CalibratedDraft):
    """Estimates the chances of one row's draft. The batch decides how far to draft.

    Attributes:
        path_chances: For each drafted level, the chance that it and all levels before it are
            accepted. Set by each draft step.
    """

    def __init__(self, rule: LoadRule) -> None:
        self._rule = rule
        prior = rule.prior
        accept = Calibrator(prior.accept, prior, rule.accept)
        super().__init__(
            accept, Calibrator(prior.following, prior, rule.following), lambda: rule.normals
        )

    def begin_round(self, width: int) -> int | None:
        super().begin_round(width)
        self.next = self._rule.first
        self.path_chances = list[float]()
        return None

    @property
    def chance(self) -> float:
        """Chance that all drafted tokens and the next one are accepted."""
        return self.reach * self.next

    def keep_drafting(self, step: DraftStep) -> bool:
        self.add(step)
        self.path_chances.append(self.reach)
        return True

    def observe(self, outcome: RoundOutcome) -> None:
        if not self._scores or outcome.first_right is None:
            return
        # The committed tokens show whether the first drafted token was right, even if it was not
        # verified.
        accepted = outcome.num_expanded if outcome.depth else int(outcome.first_right)
        self._rule.judge_first(self.learn(max(outcome.depth, 1), accepted)[0])


def _as_asked(rows: int, nodes: int) -> tuple[int, int]:
    return rows, rows * nodes
