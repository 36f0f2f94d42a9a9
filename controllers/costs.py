"""What rounds cost and what lengths are worth, estimated while decoding."""

from typing import Any

MEMORY = 64
"""About so many of the last samples count."""
CLIP = 0.25
"""A sample moves an estimate as if it were at most so much off: stalls of the machine hardly count."""
STIFFNESS = 8.0
"""So many samples of a node count weigh as much as the line through all counts."""


class Cost:
    """Seconds of one kind of call: Huber's mean of the last samples, begun at the least of three: outliers hardly move it."""

    def __init__(self, count: int = 0, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= 3:
            self.seconds = seconds if self.count == 1 else min(self.seconds, seconds)
            return
        bound = CLIP * self.seconds
        self.seconds += min(max(seconds - self.seconds, -bound), bound) / min(self.count, MEMORY)


class Curve:
    """Seconds by a count: each count's own samples, leaning on a line through all counts where they are few, and never falling
    as the count grows. ``from_zero`` says that nothing costs nothing; of one count alone others then are in proportion."""

    def __init__(self, from_zero: bool = False) -> None:
        self.samples: dict[int, Cost] = {}
        self._from_zero = from_zero
        self._table: list[float] = []

    def add(self, count: int, seconds: float) -> None:
        self.samples.setdefault(count, Cost()).add(seconds)

    def fit(self, longest: int) -> None:
        """Compute the table for 0 to ``longest`` anew from the samples."""
        points = [(count, min(cost.count, MEMORY), cost.seconds) for count, cost in sorted(self.samples.items())]
        if self._from_zero and len(points) == 1:
            points.insert(0, (0, points[0][1], 0.0))
        total = sum(w for _, w, _ in points)
        x0 = sum(w * n for n, w, _ in points) / total
        y0 = sum(w * y for _, w, y in points) / total
        spread = sum(w * (n - x0) ** 2 for n, w, _ in points)
        slope = max(sum(w * (n - x0) * (y - y0) for n, w, y in points) / spread, 0.0) if spread else 0.0
        own = {n: (w, y - y0 - slope * (n - x0)) for n, w, y in points}
        residuals = _between({n: w * r / (w + STIFFNESS) for n, (w, r) in own.items()}, longest)
        self._table = _rising([max(y0 + slope * (n - x0) + residuals[n], 1e-9) for n in range(longest + 1)])
        if self._from_zero:
            self._table[0] = 0.0

    def seconds(self, count: int) -> float:
        """Of the fitted table; beyond its end as it rises on the whole."""
        table = self._table
        if count < len(table):
            return table[count]
        return table[-1] + (table[-1] - table[0]) / max(len(table) - 1, 1) * (count - len(table) + 1)

    def state(self) -> dict[str, Any]:
        samples = [[count, cost.count, cost.seconds] for count, cost in self.samples.items()]
        return {"samples": samples, "table": list(self._table)}

    def restore(self, state: dict[str, Any]) -> None:
        self.samples = {int(count): Cost(int(times), float(seconds)) for count, times, seconds in state["samples"]}
        self._table = [float(value) for value in state["table"]]


class RoundCosts:
    """Seconds of a round's drafts by steps, and of its verify pass by drafted nodes.

    Drafts are a curve, too: where a device changes from one engine to the other, the first step costs more than those
    behind it (on a CPU three times as much), and going on costs only what the next one does.
    """

    def __init__(self) -> None:
        self.draft, self.verify = Curve(from_zero=True), Curve()

    def add(self, steps: int, draft_seconds: float, nodes: int, verify_seconds: float) -> None:
        if steps:
            self.draft.add(steps, draft_seconds)
        self.verify.add(nodes, verify_seconds)

    @property
    def known(self) -> bool:
        """Whether there is enough to compare lengths: a draft, and verify at two node counts."""
        return bool(self.draft.samples) and len(self.verify.samples) > 1

    def fit(self, steps: int, nodes: int) -> None:
        """Compute both tables anew, to so many draft steps and nodes."""
        self.draft.fit(steps)
        self.verify.fit(nodes)

    def state(self) -> dict[str, Any]:
        return {"draft": self.draft.state(), "verify": self.verify.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.draft.restore(state["draft"])
        self.verify.restore(state["verify"])


def _between(known: dict[int, float], longest: int) -> list[float]:
    """Values for 0 to ``longest``: linear between known places, constant outside."""
    places = sorted(known)
    values = []
    for n in range(longest + 1):
        left = max((p for p in places if p <= n), default=places[0])
        right = min((p for p in places if p >= n), default=places[-1])
        share = (n - left) / (right - left) if left < n < right else 0.0
        values.append(known[left if n >= left else right] * (1 - share) + known[right] * share)
    return values


def _rising(values: list[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        size = 1
        while pools and pools[-1][0] > value:
            mean, count = pools.pop()
            value, size = (value * size + mean * count) / (size + count), size + count
        pools.append((value, size))
    return [value for value, size in pools for _ in range(size)]


class Lengths:
    """How often drafts survive to each depth, from rounds whose length did not depend on what was drafted.

    Feedback is one-sided full information: a round that drafted n tokens says for every shorter length how many had been
    accepted. What lies behind the first rejection or behind n is censored and not counted.
    """

    def __init__(self, longest: int, discount: float) -> None:
        self.discount = discount
        self.judged = [0.0] * longest
        self.accepted = [0.0] * longest

    def add(self, drafted: int, accepted: int) -> None:
        reached = min(drafted, accepted + 1)
        for depth in range(len(self.judged)):
            self.judged[depth] = self.judged[depth] * self.discount + (depth < reached)
            self.accepted[depth] = self.accepted[depth] * self.discount + (depth < min(reached, accepted))

    def rates(self, costs: RoundCosts, width: int = 1, optimism: float = 0.0) -> list[float]:
        """Tokens per second of every fixed length 0, 1, ...: (1 + sum of S_j) / (k draft + verify(k)).

        S_j is the product of the acceptances at depths 1 to j, posterior means under Beta(1, 0): 1 where nothing is known; each
        raised by ``optimism`` standard errors. A level has ``width`` nodes.
        """
        survival, tokens, rates = 1.0, 1.0, [1 / costs.verify.seconds(0)]
        for depth, (judged, right) in enumerate(zip(self.judged, self.accepted, strict=True)):
            raised = (right + 1) / (judged + 1) + optimism * 0.5 / (judged + 1) ** 0.5
            survival *= min(raised, 1.0)
            tokens += survival
            rates.append(tokens / (costs.draft.seconds(depth + 1) + costs.verify.seconds((depth + 1) * width)))
        return rates

    def state(self) -> dict[str, Any]:
        return {"judged": list(self.judged), "accepted": list(self.accepted)}

    def restore(self, state: dict[str, Any]) -> None:
        self.judged = [float(value) for value in state["judged"]]
        self.accepted = [float(value) for value in state["accepted"]]
