"""Estimate the costs of rounds and the worth of a second. All rules of a request share these
estimates (docs/controllers.md)."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from eesd.controllers.base import RoundOutcome

MEMORY = 64
"""The mean of a count averages about this number of its last samples."""
FORGETTING = 1 / 32
"""The share of its weight that a count loses for each sample of another count. A high cost that was
measured while the machine was slow may keep the controller from measuring that count again, so such
a cost is soon forgotten."""
CLIP = 0.25
"""A sample that is off by more than this share moves an estimate only as much as if it were off by
this share, so that stalls of the machine hardly count."""
STIFFNESS = 8.0
"""Weight (in samples) of the line through all counts when the cost of one count is fitted. The
usual slope has the same weight when the line is fitted."""
USUAL_SLOPE = 0.1
"""If only one count is known, each further unit costs this share of the cost of count 0. With
``from_zero``, costs are proportional to the count."""
FORGOTTEN = 1e-3
"""A count with less weight is dropped."""
FIRST_SAMPLE = 2.0
"""A count's first sample counts as at most this multiple of the cost that the curve expects."""
FIRST_COUNTS = 4
"""The largest count that may be used before any cost is measured."""
LONGEST = 32
"""Minimum number of counts that a table covers."""
DISCOUNT = 0.998
"""In the rate, each later round multiplies a round's weight by this factor."""
FIRST_WEIGHT = 5.0
"""Weight of the first (plain) round in the rate. It decays quickly."""
FIRST_FITS = 16
REFIT_EVERY = 8
"""Costs are fitted after each of the first rounds. Later they are fitted once in this number of
rounds."""
HORIZON = 3
"""Number of levels that a rule looks ahead. One level would be enough if the cost of a verify pass
did not grow in steps."""

Price = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""A function that maps numbers of nodes to their prices in tokens."""


class CostCurve:
    """Estimates a duration in seconds as a function of a count.

    The estimate is Huber's mean of a count's samples, shrunk towards a line through all counts. It
    never falls as the count grows. With ``from_zero``, a count of 0 costs nothing.
    """

    def __init__(self, from_zero: bool = False) -> None:
        self.samples: dict[int, tuple[float, float]] = {}
        """The weight and the mean seconds of each count. The weight is in samples, and falls as the
        samples age."""
        self._from_zero = from_zero
        self.table: list[float] = []
        """The seconds of the counts 0, 1, 2 and so on. The table is empty before :meth:`fit`."""
        self._slope = 0.0
        """Mean slope of the table."""

    def add(self, count: int, seconds: float) -> None:
        """Record one call. The mean starts at the least of the first three samples, so that an
        early outlier hardly counts."""
        samples, mean = self.samples.get(count, (0.0, 0.0))
        if not samples:
            mean = min(seconds, FIRST_SAMPLE * self._expected(count)) if self.samples else seconds
        elif samples < 3:
            mean = min(mean, seconds)
        elif seconds < (1 - CLIP) * mean:  # no call is fast by chance: the others were slow
            mean += (seconds - mean) / 4
        else:
            bound = CLIP * mean
            mean += min(max(seconds - mean, -bound), bound) / min(samples + 1, MEMORY)
        aged = {
            other: (weight * (1 - FORGETTING), seen)
            for other, (weight, seen) in self.samples.items()
            if weight > FORGOTTEN
        }
        self.samples = aged | {count: (samples + 1, mean)}

    def _expected(self, count: int) -> float:
        """The expected cost of a count without samples."""
        if not self.table:
            self.fit()
        return self.seconds(count)

    @property
    def known(self) -> int:
        """The largest count to use. It is twice the largest measured count, and at least
        ``FIRST_COUNTS``, because the costs of larger counts are only a guess."""
        return max(FIRST_COUNTS, 2 * max(self.samples, default=0))

    def fit(self) -> None:
        """Compute the table from the samples."""
        points = [
            (count, min(samples, MEMORY), mean)
            for count, (samples, mean) in sorted(self.samples.items())
        ]
        total = sum(w for _, w, _ in points)
        x0 = sum(w * n for n, w, _ in points) / total
        y0 = sum(w * y for _, w, y in points) / total
        spread = sum(w * (n - x0) ** 2 for n, w, _ in points)
        usual = y0 / max(x0, 1.0) if self._from_zero else USUAL_SLOPE * y0 / (1 + USUAL_SLOPE * x0)
        found = sum(w * (n - x0) * (y - y0) for n, w, y in points)
        slope = max((found + STIFFNESS * usual) / (spread + STIFFNESS), 0.0)
        knots = [
            (n, (w * y + STIFFNESS * (y0 + slope * (n - x0))) / (w + STIFFNESS))
            for n, w, y in points
        ]
        first, begin = knots[0]
        last, end = knots[-1]
        table = [begin + slope * (n - first) for n in range(first)]
        for (n, y), (following, to) in pairwise(knots):
            rise = (to - y) / (following - n)
            table += [y + rise * further for further in range(following - n)]
        table += [end + slope * further for further in range(max(LONGEST - last, 0) + 1)]
        # No count costs more than a larger count, because disturbances only ever add time.
        self.table = [max(seconds, 1e-9) for seconds in accumulate(reversed(table), min)][::-1]
        if self._from_zero:
            self.table[0] = 0.0
        self._slope = (self.table[-1] - self.table[0]) / max(len(self.table) - 1, 1)

    def seconds(self, count: int) -> float:
        """Fitted cost of a count. Beyond the table's end it rises with the table's mean slope."""
        table = self.table
        beyond = count - len(table) + 1
        return table[count] if beyond <= 0 else table[-1] + self._slope * beyond

    def costs(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Fitted costs of several counts."""
        last = len(self.table) - 1
        beyond = np.maximum(counts - last, 0)
        return np.array(self.table)[np.minimum(counts, last)] + self._slope * beyond


class RoundValue:
    """Estimates the costs of a request's rounds, and lambda, which is the recent rate in tokens per
    second.

    Call :meth:`observe` once per committed round, before the rules that share this object observe
    the round.

    Attributes:
        draft: The seconds of a round's draft as a function of the number of steps. The first step
            costs more than later ones if the device has to switch engines (three times as much on a
            CPU).
        verify: The seconds of a verify pass as a function of the number of nodes (the root is not
            counted).
        brought: The discounted sums of the tokens and of the seconds of the recent rounds. The
            seconds come from the curves, so stalls of the machine hardly count.
        rounds: Number of committed rounds.
    """

    def __init__(self) -> None:
        self.draft = CostCurve(from_zero=True)
        self.verify = CostCurve()
        self.brought = [0.0, 0.0]
        self.rounds = 0

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round."""
        if outcome.steps:
            self.draft.add(outcome.steps, outcome.draft_seconds)
        self.verify.add(outcome.nodes, outcome.verify_seconds)
        self.rounds += 1
        due = is_due(self.rounds)
        for curve in (self.draft, self.verify):
            if curve.samples and (due or not curve.table):
                curve.fit()
        weight = 1.0 if self.rounds > 1 else FIRST_WEIGHT
        discount = min(DISCOUNT, 1 - 1 / (self.rounds + FIRST_WEIGHT))
        tokens, seconds = self.brought
        spent = max(self.seconds(outcome.steps, outcome.nodes), 1e-9)
        self.brought = [
            tokens * discount + weight * (outcome.accepted + 1),
            seconds * discount + weight * spent,
        ]

    @property
    def rate(self) -> float:
        """The rate lambda, in tokens per second. It is available as soon as ``verify`` is
        fitted."""
        return self.brought[0] / self.brought[1]

    def seconds(self, steps: int, nodes: int) -> float:
        """Return the seconds of a round with ``steps`` draft steps and ``nodes`` nodes."""
        drafting = self.draft.seconds(steps) if steps else 0.0
        return drafting + self.verify.seconds(nodes)

    def prices(self, nodes: int, more: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the prices of adding nodes to a pass of ``nodes`` nodes. ``more`` has the numbers
        of nodes to add, and the prices are in tokens at the recent rate."""
        rate = self.rate
        before = rate * self.verify.seconds(nodes)
        return rate * self.verify.costs(nodes + more) - before

    def pays(self, reach: float, following: float, depth: int, width: int) -> bool:
        """Return whether further levels (up to ``HORIZON``) bring more tokens than the recent rate
        would bring in the time that they take.

        Args:
            reach: Chance that all drafted tokens are accepted.
            following: Chance that the next token is then accepted.
            depth: Levels drafted so far.
            width: Number of nodes per level.
        """
        rate = self.rate
        before = rate * self.seconds(depth, depth * width)
        total = 0.0
        for levels in range(1, HORIZON + 1):
            total += reach * following**levels
            if total >= rate * self.seconds(depth + levels, (depth + levels) * width) - before:
                return True
        return False


def is_due(rounds: int) -> bool:
    """Return whether to compute estimates again after this number of rounds."""
    return rounds < FIRST_FITS or rounds % REFIT_EVERY == 0


def most_valuable(
    values: Sequence[float], price: Price, counts: NDArray[np.int64] | None = None
) -> tuple[int, float]:
    """Return the number of nodes for which gain minus price is largest, and this difference. Return
    0 and 0.0 if no number is worth its price.

    Args:
        values: The expected number of tokens of each node.
        price: Maps numbers of nodes to their prices in tokens.
        counts: The numbers to choose from, or None for all numbers.
    """
    total = np.cumsum(values)
    counts = np.arange(1, len(total) + 1) if counts is None else counts[counts <= len(total)]
    if not len(counts):
        return 0, 0.0
    worth = total[counts - 1] - price(counts)
    best = worth.argmax()
    if worth[best] <= 0:
        return 0, 0.0
    return int(counts[best]), float(worth[best])
