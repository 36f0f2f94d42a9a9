"""What a round costs: its draft steps, and a verify pass by node count.

A cost model is measured on an engine or follows from layer counts (``layer_costs``), for devices that are not here.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from eesd.bench.results import Sweep
from eesd.common.errors import EESDError


@dataclass(frozen=True)
class Costs:
    """What a round's calls cost, in any unit: its drafts by steps, its verify pass by nodes.

    The first draft step finds its weights evicted by the verify pass before it, those behind it less and less.
    """

    draft: Mapping[int, float]
    verify: Mapping[int, float]

    def of_verify(self, nodes: int) -> float:
        """v(n): a pass over ``nodes`` nodes."""
        return _on_curve(self.verify, nodes)

    def of_draft(self, steps: int) -> float:
        """d(k): all draft steps of a round. Of one count alone others are in proportion."""
        return _on_curve({0: 0.0, **self.draft}, steps)

    def of_round(self, steps: int, nodes: int) -> float:
        """A round of so many draft steps that drafted so many nodes."""
        return self.of_draft(steps) + self.of_verify(nodes + 1)

    def scaled(self, factor: float) -> "Costs":
        """In another unit."""
        draft, verify = ({count: cost * factor for count, cost in part.items()} for part in (self.draft, self.verify))
        return Costs(draft, verify)


def _on_curve(curve: Mapping[int, float], count: int) -> float:
    """Linear between the counts that are known and beyond the last two."""
    counts = sorted(curve)
    if count <= counts[-1] or len(counts) == 1:
        return float(np.interp(count, counts, [curve[known] for known in counts]))
    before, last = counts[-2:]
    return curve[last] + (curve[last] - curve[before]) / (last - before) * (count - last)


def costs_of(sweeps: Iterable[Sweep]) -> dict[tuple[str, int], Costs]:
    """Seconds by engine and tree width: over all sweeps the mean of what each found, without the tenth at either end."""
    groups: dict[tuple[str, int], list[Sweep]] = {}
    for sweep in sweeps:
        groups.setdefault((sweep.engine, sweep.width), []).append(sweep)
    return {
        key: Costs(_means(sweep.draft for sweep in group), _means(sweep.verify for sweep in group))
        for key, group in groups.items()
    }


def _means(curves: Iterable[list[list[float]]]) -> dict[int, float]:
    """By count, over all curves that have it."""
    found: dict[int, list[float]] = {}
    for count, seconds in (point for curve in curves for point in curve):
        found.setdefault(int(count), []).append(seconds)
    return {count: _trimmed_mean(found[count]) for count in sorted(found)}


def _trimmed_mean(values: list[float]) -> float:
    left_out = len(values) // 10
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])


@dataclass(frozen=True)
class CostModel:
    """Costs of a device by name: ``calls`` in plain steps, one of which takes ``plain_seconds``.

    A round's cost in plain steps says how fast it is whatever the device; seconds say what a controller's own time is worth.
    """

    name: str
    calls: Costs
    plain_seconds: float

    def __post_init__(self) -> None:
        calls = self.calls
        if min(calls.verify, default=0) != 1:
            raise EESDError(f"The verify costs of {self.name} must be given for node counts from 1.")
        if not calls.draft or not min(*calls.draft.values(), self.plain_seconds, *calls.verify.values()) > 0:
            raise EESDError(f"A cost of {self.name} is not above 0.")

    @classmethod
    def of_seconds(cls, name: str, seconds: Costs) -> Self:
        """From measured calls: a plain step is a verify pass over one node."""
        if 1 not in seconds.verify or not seconds.draft:
            raise EESDError("No prompt leaves room to measure costs; give shorter prompts.")
        plain = seconds.verify[1]
        return cls(name, seconds.scaled(1 / plain), plain)

    def table(self, longest: int) -> list[float]:
        """Plain steps of a round that drafts 0, 1, ... ``longest`` tokens."""
        return [self.calls.of_round(n, n) for n in range(longest + 1)]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        calls = self.calls
        return {
            "name": self.name,
            "draft": [[steps, cost] for steps, cost in calls.draft.items()],
            "verify": [[nodes, cost] for nodes, cost in calls.verify.items()],
            "plain_seconds": self.plain_seconds,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """From what :meth:`to_dict` gave; KeyError, TypeError or ValueError for anything else."""
        draft, verify = ({int(count): float(cost) for count, cost in value[name]} for name in ("draft", "verify"))
        return cls(value["name"], Costs(draft, verify), value["plain_seconds"])


def layer_costs(
    name: str, layers: int, exit_layer: int, plain_seconds: float, *, exit_blocks: int = 1, head: float = 1.0
) -> CostModel:
    """From layer counts: T(n) = n (N + e + h) + L + h, in layers; ``head`` is what the LM head costs, in layers.

    The verify pass costs the same for all node counts: at batch 1 a GPU is bound by reading the weights.
    """
    draft = (exit_layer + exit_blocks + head) / (layers + head)
    return CostModel(name, Costs({1: draft}, {1: 1.0}), plain_seconds)


BUNDLED = CostModel(
    "bundled, 2 CPU cores",
    Costs(
        {1: 0.28, 2: 0.43, 3: 0.60, 4: 0.74, 5: 0.87, 6: 1.01, 8: 1.20, 12: 1.59, 16: 1.90},
        {1: 1.0, 2: 1.24, 3: 1.32, 4: 1.43, 5: 1.48, 7: 1.66, 9: 1.67, 13: 2.06, 17: 2.08, 25: 2.58, 33: 2.69},
    ),
    2.9e-3,
)
"""The bundled model, float32, ONNX Runtime, measured on two cores."""

COST_MODELS = {
    "bundled": BUNDLED,
    "7b": layer_costs("7B, exit after 4 of 32 layers", 32, 4, 10e-3),
    "13b": layer_costs("13B, exit after 4 of 40 layers", 40, 4, 19e-3),
    "70b": layer_costs("70B, exit after 5 of 80 layers", 80, 5, 50e-3),
}
"""By name. The large ones are computed, not measured; their seconds are the weights in float16 at 1.5 TB/s (70B: at 3 TB/s)."""
