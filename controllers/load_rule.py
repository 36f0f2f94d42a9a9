"""Choose the draft length of a batch. The rule weighs the value of one more node per row against
its cost to the batch.

With few rows a node costs little, because reading the weights dominates. With many rows each node
costs its full computation, so little is drafted. docs/controllers.md derives the rule.
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
"""The initial pseudo-counts of first drafted tokens. The first number counts the right tokens, and
the second number counts all tokens."""
MEMORY = 256.0
"""Number of recent labels that determine the acceptance of first tokens."""
FADING = 0.998
FADED = 16.0
"""The share of the labels that remains after a round without a draft, and the minimum number of
labels. When there are fewer labels, the estimate is less certain, so a draft is tried now and
then."""
RATE_DISCOUNT = 0.98
"""In the rate, each later round multiplies a round's weight by this factor."""
LEAST_VALUE = 0.1
"""A token from the text is proposed to the batch only if the chance that it and all tokens before
it are right is at least this large."""
DEAREST = 0.8
"""If a node costs this price (in tokens), nothing is drafted, because even a token that is certain
to be accepted would not repay the host's time."""
LONGEST_COPY = 16
"""Maximum number of tokens that the text proposes in one round."""
MOST_LEVELS = 32
"""Number of levels that have separate prices. Further levels have the last price."""

Size = Callable[[int, int], tuple[int, int]]
"""A function that takes a call's number of rows and its number of nodes per row. It returns the
numbers of rows and nodes that the engine computes, padding included."""


class LoadRule:
    """The estimates that all rows of a batch share. They are the costs of calls, the acceptance,
    and the rate (in tokens per second) for each number of rows.

    Attributes:
        draft, verify: Costs of the calls of each engine, including the host's work for them. The
            batch adds samples.
        draft_size, verify_size: Functions that return the sizes of calls after padding. They are
            set when the batch is made.
        padded: Whether a verify pass pads all rows to the longest row. If True, all rows verify the
            same number of levels. If False, each row may verify a different number of nodes. It is
            set together with the sizes.
        accept, following: The calibrations of drafts.
        text: The calibration of the texts' proposals.
        normals: The random numbers of this round. All rows use the same numbers, because separate
            numbers for many rows would cancel out and explore nothing. Set by :meth:`begin_round`.
        first: The chance that the first token of a row's draft is right. It is drawn at random for
            each round. It varies more if there were few recent drafts. Set by :meth:`begin_round`.
        rate: The value of a second, in tokens. It is the recent rate of all rows, but at least the
            rate of plain decoding. Waiting requests count as rows. It is 0 if the number of levels
            is fixed. Set by :meth:`begin_round`.
        can_pay: Whether any draft may be worth its time in this round. Set by :meth:`begin_round`.
    """

    def __init__(self, prior: CalibrationPrior | None = None, fixed: int | None = None) -> None:
        """The calibrations begin with the prior of the exit head. If ``fixed`` is given, each round
        drafts this number of levels."""
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
        """The tokens, the seconds and the number of recent rounds, for each number of rows."""
        self._known: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        """The results of :meth:`_curves` for each number of rows. They are kept until the costs are
        computed again."""
        self.rows = 1
        self._rounds = 0
        self.first = FIRST_RIGHT / FIRST_LABELS

    def begin_round(self, rows: int, slots: float, waiting: int = 0) -> None:
        """Begin a round. This lets the calibrations drift, and draws random numbers.

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
        """Record the tokens and seconds of a round, and whether any row drafted."""
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
        """Return the number of rows that draft one more level. It is the number for which gain
        minus price is largest, looking up to ``HORIZON`` levels ahead. If rows are padded, either
        all rows draft or no row drafts.

        Args:
            reaches: Two chances for each row that could draft another level. The first is the
                chance that all its drafted tokens are accepted, and the second is the chance that
                the next token is then accepted. The likeliest row is first.
            depth: Levels drafted so far.
            values: The chances of the tokens that each row of the batch drafted or took from its
                text.
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
        """Return the number of tokens that a row takes from its text. The row takes all tokens that
        are likely enough, but none if the expected draft is worth at least as much.

        Args:
            values: The chance, for each token, that this token and all tokens before it are right.
            drafts: Whether the row could draft instead.
        """
        likely = [value for value in values[:LONGEST_COPY] if value >= LEAST_VALUE]
        draft = sum(self.first**level for level in range(1, HORIZON + 1)) * drafts
        return len(likely) * (sum(likely) > draft)

    def levels(self, values: Sequence[Sequence[float]]) -> list[int]:
        """Return the number of levels that each row verifies. The numbers are chosen so that the
        batch verifies its most valuable nodes. ``values`` are the chances of each row's nodes."""
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
        """Return one row's share of the price (in tokens) if each row verifies ``nodes`` nodes."""
        prices: NDArray[np.float64] = self._price(nodes if self.padded else nodes * self.rows)
        return prices / self.rows

    def _price(self, count: Any) -> Any:
        """Return the prices (in tokens) of ``count`` levels if rows are padded, or of ``count``
        nodes of all rows together if they are not."""
        return self._prices[np.minimum(count, len(self._prices) - 1)]

    def _curves(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds of a verify pass and of a draft step. The verify pass has 0, 1, 2, ...
        levels if rows are padded, and 0, 1, 2, ... nodes of all rows together if not. The draft
        step has 1, 2, ... rows."""
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
        """Return the mean duration in seconds, drafts included, of recent rounds of ``rows``
        rows."""
        _, seconds, rounds = self._lately.get(rows) or (
            0.0,
            self.verify.seconds(*self.verify_size(rows, 1), slots),
            1.0,
        )
        return seconds / rounds


class RowController(CalibratedDraft):
    """Estimates the chances of one row's draft. The batch decides how far to draft.

    Attributes:
        path_chances: The chance, for each drafted level, that this level and all levels before it
            are accepted. Set by each draft step.
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
        """The chance that all drafted tokens and the next token are accepted."""
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
