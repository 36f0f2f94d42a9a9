"""What rounds cost and what draft lengths are worth, estimated while decoding."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar

from eesd.controllers.base import RoundOutcome, Stateful, number

MEMORY = 64
"""About this many of the last samples of a count make its mean."""
FORGETTING = 1 / 32
"""Share of its weight that a count loses for each sample of another one. What was once measured, perhaps while the machine was
slow, is not believed for long if it keeps the controller from measuring it again."""
CLIP = 0.25
"""A sample moves an estimate as if it were off by at most this share, so that stalls of the machine hardly count."""
STIFFNESS = 8.0
"""This many samples of one count weigh as much as the line through all counts, and as the line's usual slope."""
USUAL_SLOPE = 0.1
"""Where only one count is known, each more costs this share of a count of 0; from zero, costs are proportional."""
FORGOTTEN = 1e-3
"""A count with less weight is dropped."""
FIRST_SAMPLE = 2.0
"""A count's first sample is at most this many times what the curve expected."""


class CostCurve(Stateful):
    """Seconds as a function of a count.

    Each count has Huber's mean of its own samples. Where samples are few, the estimate leans on a line through all counts. It
    never falls as the count grows. ``from_zero``: a count of 0 costs nothing.
    """

    def __init__(self, from_zero: bool = False) -> None:
        self.samples: dict[int, tuple[float, float]] = {}
        """Weight (samples, fewer as they age) and mean seconds, by count."""
        self._from_zero = from_zero
        self._table: list[float] = []

    def add(self, count: int, seconds: float) -> None:
        """Note one call. The mean starts at the least of three samples, so that an early outlier hardly counts."""
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
            other: (weight * (1 - FORGETTING), seen) for other, (weight, seen) in self.samples.items() if weight > FORGOTTEN
        }
        self.samples = aged | {count: (samples + 1, mean)}

    @property
    def fitted(self) -> bool:
        """Whether there is a table."""
        return bool(self._table)

    def _expected(self, count: int) -> float:
        """The cost of a count that has no samples yet."""
        if count >= len(self._table):
            self.fit(count)
        return self._table[count]

    def fit(self, longest: int) -> None:
        """Compute the table for 0 to ``longest`` from the samples."""
        points = [(count, min(samples, MEMORY), mean) for count, (samples, mean) in sorted(self.samples.items())]
        total = sum(w for _, w, _ in points)
        x0 = sum(w * n for n, w, _ in points) / total
        y0 = sum(w * y for _, w, y in points) / total
        spread = sum(w * (n - x0) ** 2 for n, w, _ in points)
        usual = y0 / x0 if self._from_zero else USUAL_SLOPE * y0 / (1 + USUAL_SLOPE * x0)
        found = sum(w * (n - x0) * (y - y0) for n, w, y in points)
        slope = max((found + STIFFNESS * usual) / (spread + STIFFNESS), 0.0)
        own = {n: (w, y - y0 - slope * (n - x0)) for n, w, y in points}
        residuals = _interpolated({n: w * r / (w + STIFFNESS) for n, (w, r) in own.items()}, longest)
        self._table = _rising([max(y0 + slope * (n - x0) + residuals[n], 1e-9) for n in range(longest + 1)])
        if self._from_zero:
            self._table[0] = 0.0

    def seconds(self, count: int) -> float:
        """The fitted cost; beyond the table's end it rises with the table's mean slope."""
        table = self._table
        if count < len(table):
            return table[count]
        return table[-1] + (table[-1] - table[0]) / max(len(table) - 1, 1) * (count - len(table) + 1)

    def state(self) -> dict[str, Any]:
        samples = [[count, samples, mean] for count, (samples, mean) in self.samples.items()]
        return {"samples": samples, "table": self._table}

    def restore(self, state: Any) -> None:
        if not isinstance(state, Mapping) or state.keys() != {"samples", "table"}:
            raise ValueError("a cost curve must have the entries samples, table")
        if not all(isinstance(part, list) and len(part) <= 10_000 for part in state.values()):
            raise ValueError("samples and table must be lists")
        for row in state["samples"]:
            if not isinstance(row, list) or len(row) != 3:
                raise ValueError("samples must be lists of a count, a number of samples and their mean")
            count, samples, mean = (number(value, "samples") for value in row)
            if min(count, mean) < 0 or samples <= 0 or count > 10_000:
                raise ValueError("samples must be above 0, their mean not negative, and counts at most 10000")
            self.samples[int(count)] = samples, mean
        self._table = [number(value, "table") for value in state["table"]]
        if self._table != sorted(self._table) or min(self._table, default=0) < 0 or (self._table and not self.samples):
            raise ValueError("the table of costs must not fall, and needs samples")


class RoundCosts(Stateful):
    """Seconds of a round's draft by steps, and of its verify pass by nodes.

    The draft's cost is a curve because its first step costs more than later ones where a device switches from one engine to
    the other (on a CPU three times as much); one more step then costs only the difference.
    """

    learned: ClassVar = ("draft", "verify")

    def __init__(self) -> None:
        self.draft, self.verify = CostCurve(from_zero=True), CostCurve()

    def add(self, outcome: RoundOutcome) -> None:
        if outcome.steps:
            self.draft.add(outcome.steps, outcome.draft_seconds)
        self.verify.add(outcome.nodes, outcome.verify_seconds)

    @property
    def known(self) -> bool:
        """Whether there are enough samples to compare lengths: a draft, and verify at two node counts."""
        return bool(self.draft.samples) and len(self.verify.samples) > 1

    def fit(self, steps: int, nodes: int) -> None:
        """Compute both tables, up to this many draft steps and nodes."""
        self.draft.fit(steps)
        self.verify.fit(nodes)


def _interpolated(known: dict[int, float], longest: int) -> list[float]:
    """Values for 0 to ``longest``: linear between known counts, constant outside."""
    counts = sorted(known)
    values = []
    for n in range(longest + 1):
        left = max((c for c in counts if c <= n), default=counts[0])
        right = min((c for c in counts if c >= n), default=counts[-1])
        share = (n - left) / (right - left) if left < n < right else 0.0
        values.append(known[left if n >= left else right] * (1 - share) + known[right] * share)
    return values


def _rising(values: list[float]) -> list[float]:
    """The largest sequence that never falls and is nowhere above ``values``: disturbances only ever add time."""
    return list(accumulate(reversed(values), min))[::-1]


class AcceptanceByDepth(Stateful):
    """How often drafts are accepted at each depth, from rounds whose length did not depend on what was drafted.

    Feedback is one-sided full information: a round of n draft tokens tells for every shorter length how many would have been
    accepted. Tokens behind the first rejection or behind n were not judged and do not count.
    """

    learned: ClassVar = ("judged", "accepted")

    def __init__(self, longest: int, discount: float) -> None:
        self.discount = discount
        self.judged = [0.0] * longest
        self.accepted = [0.0] * longest

    def check_learned(self) -> None:
        if not all(0 <= accepted <= judged for judged, accepted in zip(self.judged, self.accepted, strict=True)):
            raise ValueError("no more can be accepted than was judged")

    def add(self, length: int, accepted: int) -> None:
        """Note a round of ``length`` draft tokens, of which ``accepted`` were accepted."""
        judged = min(length, accepted + 1)
        for depth in range(len(self.judged)):
            self.judged[depth] = self.judged[depth] * self.discount + (depth < judged)
            self.accepted[depth] = self.accepted[depth] * self.discount + (depth < min(judged, accepted))

    def rates(self, costs: RoundCosts, width: int = 1, optimism: float = 0.0) -> list[float]:
        """Tokens per second of every fixed length k = 0, 1, ...: (1 + S_1 + ... + S_k) / (draft(k) + verify(k * width)).

        S_j is the product of the acceptances at depths 1 to j: posterior means under Beta(1, 0), so 1 where nothing is known,
        each raised by ``optimism`` standard errors. A level has ``width`` nodes.
        """
        survival, tokens, rates = 1.0, 1.0, [1 / costs.verify.seconds(0)]
        for depth, (judged, accepted) in enumerate(zip(self.judged, self.accepted, strict=True)):
            raised = (accepted + 1) / (judged + 1) + optimism * 0.5 / (judged + 1) ** 0.5
            survival *= min(raised, 1.0)
            tokens += survival
            rates.append(tokens / (costs.draft.seconds(depth + 1) + costs.verify.seconds((depth + 1) * width)))
        return rates
