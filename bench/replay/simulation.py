"""Replay all controllers under several cost models, and write one JSON file.

Fields of the dataclasses are keys of the file.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from eesd.bench.measure.results import Saved, describe_machine
from eesd.bench.replay.costs import COST_MODELS, CostModel
from eesd.bench.replay.replay import (
    OFF,
    REPLAYED,
    Clairvoyant,
    Ratio,
    Replay,
    fastest,
    replay,
    replay_fixed_lengths,
    replay_seeds,
    speed_ratio,
)
from eesd.bench.replay.traces import Trace
from eesd.common.errors import EESDError
from eesd.controllers import make_controller

MEASURED = "measured"
"""Name of the cost model that was measured on the trace's engine."""
SEEDS = 5
"""Number of seeds of each controller that learns."""

# Labels of controllers in tables and JSON. OFF and the controllers' names are labels as well.
HINDSIGHT = "best fixed in hindsight"
CLAIRVOYANT = "clairvoyant"
TUNED = {
    "fixed, tuned": tuple(f"fixed:k={k}" for k in range(1, 13)),
    "threshold, tuned": tuple(f"threshold:p={p / 20}" for p in range(2, 19)),
}
"""The controllers that are tuned, with their candidates."""
LEARNING = ("beta-ts", "calibration-ts", "cost-aware-ts")
"""Controllers that learn on the trace."""


@dataclass(frozen=True)
class Row:
    """The figures of one controller. ``controller`` is its label in tables, and ``spec`` has its
    options. All ratios are ratios of speeds with 95 % intervals.

    Attributes:
        speedup, over_best_fixed, of_ceiling: The speed relative to plain decoding, to the best
            fixed length in hindsight, and to the clairvoyant controller.
        by_task: The speed on the requests of each task, relative to the best fixed length of that
            task.
        own_microseconds: The controller's own time per round.
    """

    controller: str
    spec: str
    speedup: Ratio
    over_best_fixed: Ratio
    of_ceiling: Ratio
    by_task: dict[str, Ratio]
    tokens_per_round: float
    own_microseconds: float


@dataclass(frozen=True)
class Comparison:
    """The figures of all controllers on one trace under one cost model.

    Attributes:
        best_by_task: The fixed length that is best for each task in hindsight.
        rows: A row for each controller.
    """

    name: str
    costs: CostModel
    best_by_task: dict[str, str]
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return asdict(self) | {"costs": self.costs.to_dict()}

    @classmethod
    def from_dict(cls, **raw: Any) -> Self:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError, ValueError or
        AttributeError for anything else."""
        rows = []
        for row in raw["rows"]:
            ratios = {
                name: Ratio(**row[name]) for name in ("speedup", "over_best_fixed", "of_ceiling")
            }
            by_task = {task: Ratio(**ratio) for task, ratio in row["by_task"].items()}
            rows.append(Row(**row | ratios | {"by_task": by_task}))
        return cls(**raw | {"costs": CostModel.from_dict(raw["costs"]), "rows": rows})


@dataclass
class Simulation(Saved):
    """All comparisons on one pair of traces.

    Attributes:
        origin: Origin of the trace.
        options: Cost models and seeds.
        prompts, tuning_prompts: Number of prompts by task.
        replays: One comparison for each cost model.
        machine: Description of the machine on which the controllers' own time was measured.
        kind, schema: Kind and version of the file format.
    """

    origin: dict[str, Any]
    options: dict[str, Any]
    prompts: dict[str, int]
    tuning_prompts: dict[str, int]
    replays: list[Comparison] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=describe_machine)
    kind: str = "simulation"
    schema: int = 1

    WHAT: ClassVar = "a simulation; give a simulation.json that eesd-bench simulate wrote"
    ROWS: ClassVar = {"replays": Comparison.from_dict}

    @classmethod
    def prepare(cls, trace: Trace, tuning: Trace, costs: Sequence[str]) -> Self:
        """Make a simulation of the reported and the tuning prompts that has no comparisons.
        :func:`run_simulation` adds them.

        Raises:
            EESDError: A cost model is unknown or was not measured.
        """
        options = {"costs": list(find_costs(costs, trace)), "seeds": SEEDS}
        prompts, tuned_on = (
            dict(Counter(request.task for request in part.requests)) for part in (trace, tuning)
        )
        return cls(trace.origin, options, prompts, tuned_on)


def find_costs(names: Sequence[str], trace: Trace | None) -> dict[str, CostModel]:
    """Look up cost models by name. A name is a key of ``COST_MODELS``, or ``measured`` for the
    trace's costs. Without a trace, only the names are checked.

    Raises:
        EESDError: A name is unknown, or the trace has no measured costs.
    """
    found = {}
    for name in names:
        if name != MEASURED and name not in COST_MODELS:
            raise EESDError(
                f"There are no costs {name!r}; there are {', '.join((MEASURED, *COST_MODELS))}."
            )
        costs = trace and trace.costs
        if name != MEASURED:
            costs = COST_MODELS[name]
        if trace and costs is None:
            raise EESDError(
                "The trace has no measured costs; give --costs with one of "
                f"{', '.join(COST_MODELS)}."
            )
        if costs:
            found[name] = costs
    return found


def run_simulation(simulation: Simulation, trace: Trace, tuning: Trace) -> Iterator[None]:
    """Add all comparisons to a simulation that :meth:`Simulation.prepare` made from these traces.
    Yields after each comparison."""
    for name, costs in find_costs(simulation.options["costs"], trace).items():
        simulation.replays.append(
            compare_on_trace(name, trace, tuning, costs, simulation.options["seeds"])
        )
        yield


def compare_on_trace(
    name: str, trace: Trace, tuning: Trace, costs: CostModel, seeds: int = SEEDS
) -> Comparison:
    """Replay all controllers on a trace. Tuned controllers have the setting that is fastest on
    ``tuning``, and learning controllers are replayed with several seeds."""
    fixed = replay_fixed_lengths(trace, costs)
    runs = {OFF: fixed[0], HINDSIGHT: fastest(fixed)}
    for label, specs in TUNED.items():
        runs[label] = replay_seeds(_tuned(specs, tuning, costs), trace, costs)
    for spec in LEARNING:
        runs[spec] = replay_seeds(spec, trace, costs, seeds, trace.prior)
    runs[CLAIRVOYANT] = replay(CLAIRVOYANT, Clairvoyant(), trace, costs)
    masks = {
        task: np.array([request.task == task for request in trace.requests]) for task in trace.tasks
    }
    best = {task: _fastest_on(fixed, mask) for task, mask in masks.items()}
    rows = [
        _row(
            label,
            runs,
            runs[CLAIRVOYANT],
            {task: speed_ratio(run, best[task], mask) for task, mask in masks.items()},
        )
        for label, run in runs.items()
    ]
    return Comparison(name, costs, {task: run.name for task, run in best.items()}, rows)


def _tuned(specs: Sequence[str], tuning: Trace, costs: CostModel) -> str:
    """Return the spec that is fastest on the tuning trace. The controllers' own time is not
    counted, because it is equal for all candidates."""
    return max(
        specs,
        key=lambda spec: (
            replay(spec, make_controller(spec, kinds=REPLAYED), tuning, costs, charge=False).speed
        ),
    )


def _fastest_on(runs: Sequence[Replay], mask: NDArray[np.bool_]) -> Replay:
    """Return the replay that is fastest on the requests of the mask [R]."""
    return max(runs, key=lambda run: run.tokens[mask].sum() / run.cost[mask].sum())


def _row(label: str, runs: Mapping[str, Replay], ceiling: Replay, by_task: dict[str, Ratio]) -> Row:
    run = runs[label]
    return Row(
        controller=label,
        spec=run.name,
        speedup=speed_ratio(run, runs[OFF]),
        over_best_fixed=speed_ratio(run, runs[HINDSIGHT]),
        of_ceiling=speed_ratio(run, ceiling),
        by_task=by_task,
        tokens_per_round=float(run.rounds[:, 1].mean()),
        own_microseconds=run.own_seconds * 1e6,
    )
