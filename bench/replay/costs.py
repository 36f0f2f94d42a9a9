"""Cost models. They give the seconds of a round with a number of draft steps and verified nodes,
and are measured or predicted."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from eesd.bench.measure.results import CallLatency
from eesd.common.errors import EESDError


@dataclass(frozen=True)
class CallCosts:
    """The costs of a round's calls in any unit. ``draft`` maps a number of draft steps to the cost
    of all these steps, and ``verify`` maps a number of nodes (including the root) to the cost of a
    verify pass.

    The cost of a draft is not proportional to its steps. The verify pass evicts the draft's weights
    from the processor's caches, so the first step costs more than later steps.
    """

    draft: Mapping[int, float]
    verify: Mapping[int, float]

    def verify_cost(self, nodes: int) -> float:
        """Return v(n), the cost of a pass over ``nodes`` nodes. The root is one of them."""
        return _interpolated(self.verify, nodes)

    def draft_cost(self, steps: int) -> float:
        """Return d(k), the cost of all draft steps of a round. If the cost of only one number of
        steps is known, costs are assumed to be proportional to it."""
        return _interpolated({0: 0.0, **self.draft}, steps)

    def round_cost(self, steps: int, nodes: int) -> float:
        """Return the cost of a round with this number of draft steps and drafted nodes."""
        return self.draft_cost(steps) + self.verify_cost(nodes + 1)

    def scaled(self, factor: float) -> "CallCosts":
        """Return the costs in another unit."""
        draft, verify = (
            {count: cost * factor for count, cost in part.items()}
            for part in (self.draft, self.verify)
        )
        return CallCosts(draft, verify)


def _interpolated(costs: Mapping[int, float], count: int) -> float:
    """Interpolate linearly between known counts. Beyond the largest count, the last segment
    continues."""
    counts = sorted(costs)
    if count <= counts[-1] or len(counts) == 1:
        return float(np.interp(count, counts, [costs[known] for known in counts]))
    before, last = counts[-2:]
    return costs[last] + (costs[last] - costs[before]) / (last - before) * (count - last)


def mean_call_costs(latencies: Iterable[CallLatency]) -> dict[tuple[str, int], CallCosts]:
    """Return the costs in seconds for each (engine, tree width). The cost at each count is the mean
    over all prompts without the lowest and the highest tenth."""
    groups: dict[tuple[str, int], list[CallLatency]] = {}
    for latency in latencies:
        groups.setdefault((latency.engine, latency.width), []).append(latency)
    return {
        key: CallCosts(_means(one.draft for one in group), _means(one.verify for one in group))
        for key, group in groups.items()
    }


def _means(tables: Iterable[list[list[float]]]) -> dict[int, float]:
    """Return the trimmed mean at each count over all tables that have the count."""
    found: dict[int, list[float]] = {}
    for count, seconds in (row for table in tables for row in table):
        found.setdefault(int(count), []).append(seconds)
    ends = {count: len(values) // 10 for count, values in found.items()}
    return {
        count: statistics.fmean(sorted(found[count])[ends[count] : len(found[count]) - ends[count]])
        for count in sorted(found)
    }


@dataclass(frozen=True)
class CostModel:
    """The costs of one model on one device. If costs are missing or not above 0, :class:`EESDError`
    is raised.

    Attributes:
        name: Name in reports.
        calls: Costs in plain steps. A plain step is a verify pass over one node, as in plain
            decoding.
        plain_seconds: Seconds of a plain step. It converts a controller's own time to plain steps.
    """

    name: str
    calls: CallCosts
    plain_seconds: float

    def __post_init__(self) -> None:
        calls = self.calls
        if min(calls.verify, default=0) != 1:
            raise EESDError(
                f"The verify costs of {self.name} must be given for node counts from 1."
            )
        if (
            not calls.draft
            or not min(*calls.draft.values(), self.plain_seconds, *calls.verify.values()) > 0
        ):
            raise EESDError(f"A cost of {self.name} is not above 0.")

    @classmethod
    def from_seconds(cls, name: str, seconds: CallCosts) -> Self:
        """Make a cost model from measured costs. Raises :class:`EESDError` if drafts or plain steps
        were not measured."""
        if 1 not in seconds.verify or not seconds.draft:
            raise EESDError("No prompt leaves room to measure costs; give shorter prompts.")
        plain = seconds.verify[1]
        return cls(name, seconds.scaled(1 / plain), plain)

    def chain_costs(self, longest: int) -> list[float]:
        """Return the costs (in plain steps) of rounds that draft a chain of 0, 1, ... ``longest``
        tokens."""
        return [self.calls.round_cost(n, n) for n in range(longest + 1)]

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON values."""
        draft, verify = (
            [[count, cost] for count, cost in part.items()]
            for part in (self.calls.draft, self.calls.verify)
        )
        return {
            "name": self.name,
            "draft": draft,
            "verify": verify,
            "plain_seconds": self.plain_seconds,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError or ValueError for anything
        else."""
        draft, verify = (
            {int(count): float(cost) for count, cost in value[name]} for name in ("draft", "verify")
        )
        return cls(value["name"], CallCosts(draft, verify), value["plain_seconds"])


def _predicted(name: str, draft: float, first: float, last: float) -> CostModel:
    """Make a cost model from predicted milliseconds. They are given for a draft step, and for
    verify passes over 1 and 33 nodes."""
    return CostModel(
        f"{name}: predicted", CallCosts({1: draft / first}, {1: 1.0, 33: last / first}), first / 1e3
    )


BUNDLED = CostModel(
    "bundled, 2 CPU cores",
    CallCosts(
        {1: 0.28, 2: 0.43, 3: 0.60, 4: 0.74, 5: 0.87, 6: 1.01, 8: 1.20, 12: 1.59, 16: 1.90},
        {
            1: 1.0,
            2: 1.24,
            3: 1.32,
            4: 1.43,
            5: 1.48,
            7: 1.66,
            9: 1.67,
            13: 2.06,
            17: 2.08,
            25: 2.58,
            33: 2.69,
        },
    ),
    2.9e-3,
)
"""The costs of the bundled model in float32. They were measured with ONNX Runtime on two cores."""

FOUR_BIT = CostModel(
    "4-bit file of 135 M parameters, exit after 4 of 30 layers, 2 CPU cores",
    CallCosts(
        {1: 0.25, 2: 0.42, 3: 0.59, 4: 0.76, 16: 2.8}, {1: 1.0, 2: 1.06, 4: 1.16, 8: 1.5, 17: 2.6}
    ),
    6e-3,
)
"""A draft step takes 17 % of a pass, and the host adds 8 % to a round that drafts. The costs of
passes come from decision 0082."""

COST_MODELS = {
    "bundled": BUNDLED,
    "4bit": FOUR_BIT,
    "8b": _predicted(
        "8B in 16 bits on an H200, draft of 4 layers and a quarter of the words",
        1.117,
        5.220,
        6.244,
    ),
    "8b-exported": _predicted(
        "8B in 16 bits on an H200, its draft as exported by default, in 4 bits", 0.862, 5.218, 6.244
    ),
    "70b": _predicted(
        "70B in 16 bits on two H200, its draft as exported by default, in 4 bits",
        2.092,
        41.94,
        44.50,
    ),
}
"""The cost models by name. The predictions come from docs/predict.md, and their constants were
measured on an H200."""
