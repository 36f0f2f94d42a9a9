"""What rounds cost, and what their seconds are worth: one for all that decide how a request drafts
(docs/controllers.md)."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

from eesd.controllers.base import RoundOutcome

MEMORY = 64
"""About this many of the last samples of a count make its mean."""
FORGETTING = 1 / 32
"""Share of its weight that a count loses for each sample of another one. What was once measured,
perhaps while the machine was slow, is not believed for long if it keeps the controller from
measuring it again."""
CLIP = 0.25
"""A sample moves an estimate as if it were off by at most this share, so that stalls of the machine
hardly count."""
STIFFNESS = 8.0
"""This many samples of one count weigh as much as the line through all counts, and as the line's
usual slope."""
USUAL_SLOPE = 0.1
"""Where only one count is known, each more costs this share of a count of 0; from zero, costs are
proportional."""
FORGOTTEN = 1e-3
"""A count with less weight is dropped."""
FIRST_SAMPLE = 2.0
"""A count's first sample is at most this many times what the curve expected."""
LONGEST = 32
"""Counts that a table covers at least."""
DISCOUNT = 0.998
"""Weight of a round in the rate for each later one."""
FIRST_WEIGHT = 5.0
"""The first round, which is plain, weighs as much as so many, and is soon forgotten."""
FIRST_FITS = 16
REFIT_EVERY = 8
"""Costs are fitted after each of the first rounds, then after every ``REFIT_EVERY``-th."""
HORIZON = 3
"""Levels that a rule looks ahead: more than one only because the verify pass may cost more in
steps."""


class CostCurve:
    """Seconds as a function of a count.

    Each count has Huber's mean of its own samples. Where samples are few, the estimate leans on a
    line through all counts. It never falls as the count grows. ``from_zero``: a count of 0 costs
    nothing.
    """

    def __init__(self, from_zero: bool = False) -> None:
        self.samples: dict[int, tuple[float, float]] = {}
        """Weight (samples, fewer as they age) and mean seconds, by count."""
        self._from_zero = from_zero
        self._table: list[float] = []

    def add(self, count: int, seconds: float) -> None:
        """Note one call. The mean starts at the least of three samples, so that an early outlier
        hardly counts."""
        samples, mean = self.samples.get(count, (0.0, 0.0))
        if not samples:
            mean = min(seconds, FIRST_SAMPLE * self._expected(count)) if self.samples else seconds
        elif samples < 3:
            mean = min(mean, seconds)
        elif seconds < (1 - CLIP) * mean:  # nothing makes a call fast: the earlier ones were slowed
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

    @property
    def fitted(self) -> bool:
        """Whether there is a table."""
        return bool(self._table)

    def _expected(self, count: int) -> float:
        """The cost of a count that has no samples yet."""
        if not self.fitted:
            self.fit()
        return self.seconds(count)

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
        (first, begin) = knots[0]
        (last, end) = knots[-1]
        table = [begin + slope * (n - first) for n in range(first)]
        for (n, y), (following, to) in pairwise(knots):
            rise = (to - y) / (following - n)
            table += [y + rise * further for further in range(following - n)]
        table += [end + slope * further for further in range(max(LONGEST - last, 0) + 1)]
        # No count costs more than a larger one: disturbances only ever add time.
        self._table = [max(seconds, 1e-9) for seconds in accumulate(reversed(table), min)][::-1]
        if self._from_zero:
            self._table[0] = 0.0

    def seconds(self, count: int) -> float:
        """The fitted cost; beyond the table's end it rises with the table's mean slope."""
        table = self._table
        try:
            return table[count]
        except IndexError:
            return table[-1] + (table[-1] - table[0]) / max(len(table) - 1, 1) * (
                count - len(table) + 1
            )


class RoundValue:
    """What a request's rounds cost, and lambda, the tokens that a second brings at the recent rate.

    Who runs rounds tells it of each that is committed, once, and before the rules that share it.

    Attributes:
        draft: Seconds of a round's draft, by steps. The first step costs more than later ones where
            a device switches from one engine to the other (on a CPU three times as much); one more
            step then costs only the difference.
        verify: Seconds of a verify pass, by nodes besides the root.
        brought: Tokens and seconds of the recent rounds: older ones count less. The seconds are
            those of the curves, so that stalls of the machine hardly count.
        rounds: Committed rounds.
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
            if curve.samples and (due or not curve.fitted):
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
        """lambda, in tokens per second. It is known as soon as ``verify`` is fitted."""
        return self.brought[0] / self.brought[1]

    def seconds(self, steps: int, nodes: int) -> float:
        """What a round of so many draft steps and nodes costs."""
        return (self.draft.seconds(steps) if steps else 0.0) + self.verify.seconds(nodes)

    def price(
        self, steps: int, nodes: int, more: tuple[int, int] = (0, 1)
    ) -> Callable[[int], float]:
        """A function that gives the price of n times ``more`` steps and nodes beside these, in
        tokens at the recent rate."""
        rate = self.rate
        seconds = self.seconds
        (step, node) = more
        before = rate * seconds(steps, nodes)
        return lambda n: rate * seconds(steps + n * step, nodes + n * node) - before


def is_due(rounds: int) -> bool:
    """Whether estimates are computed again after so many rounds."""
    return rounds < FIRST_FITS or rounds % REFIT_EVERY == 0


def pays(reach: float, following: float, price: Callable[[int], float]) -> bool:
    """Whether some number of further levels, at most ``HORIZON``, brings more than its price.

    Args:
        reach: The chance that all that was drafted is accepted.
        following: The chance that the next token is.
        price: Of the first 1, 2, ... levels together, in tokens.
    """
    total = 0.0
    for levels in range(1, HORIZON + 1):
        total += reach * following**levels
        if total >= price(levels):
            return True
    return False


def most_valuable(
    values: Iterable[float],
    price: Callable[[int], float],
    allowed: Callable[[int], bool] | None = None,
) -> tuple[int, float]:
    """The number of nodes that brings most beyond its price, and how much; 0 and 0.0 where no
    number brings more.

    Args:
        values: The tokens that each node is expected to bring.
        price: Of the first 1, 2, ... nodes together, in tokens.
        allowed: Which numbers may be chosen; None: all.
    """
    best = 0
    most = 0.0
    total = 0.0
    for count, value in enumerate(values, start=1):
        total += value
        if (allowed is None or allowed(count)) and (worth := total - price(count)) > most:
            best = count
            most = worth
    return best, most
