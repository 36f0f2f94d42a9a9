"""All controllers replayed under several cost models, and on synthetic streams; one JSON file.

Fields of the dataclasses are keys of the file.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from eesd.bench.measure.results import describe_machine, read_json, rounded
from eesd.bench.replay.costs import COST_MODELS, CostModel
from eesd.bench.replay.oracles import Clairvoyant
from eesd.bench.replay.replay import (
    OFF,
    Ratio,
    Replay,
    fastest,
    mean_replay,
    regret,
    replay,
    replay_fixed_lengths,
    replay_seeds,
    speed_ratio,
)
from eesd.bench.replay.streams import STREAMS, SyntheticStream
from eesd.bench.replay.traces import Trace
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.controllers import make_controller

KIND, SCHEMA = "simulation", 1
MEASURED = "measured"
"""Name of the cost model that was measured on the trace's engine."""
SEEDS = 5
"""Seeds of each controller that learns."""
CURVE_POINTS = 200
"""Points of each regret curve."""

# Labels of controllers in tables and JSON, besides OFF and the controllers' names.
HINDSIGHT, POSTERIOR_MEANS, CLAIRVOYANT = "best fixed in hindsight", "cost-aware-ts, posterior means", "clairvoyant"
OPTIMAL = "optimal"
TUNED = {
    "fixed, tuned": tuple(f"fixed:k={k}" for k in range(1, 13)),
    "threshold, tuned": tuple(f"threshold:p={p / 20}" for p in range(2, 19)),
    "adaedl, tuned": tuple(
        f"adaedl:target={target},gamma={gamma}" for target in (0.5, 0.6, 0.7, 0.8, 0.9) for gamma in (0.1, 0.2, 0.4)
    ),
}
"""Controllers that are tuned, and their candidates."""
LEARNING = {
    "ucb": "ucb",
    "beta-ts": "beta-ts",
    "calibration-ts": "calibration-ts",
    POSTERIOR_MEANS: "cost-aware-ts:draws=0",
    "cost-aware-ts": "cost-aware-ts",
}
"""Controllers that learn on the trace."""
WITHOUT_CURVE = (OFF, HINDSIGHT, POSTERIOR_MEANS, CLAIRVOYANT)
"""Controllers without a regret curve: two are off the scale, one is the base, and one would hide another curve."""

LEARNING_ON_STREAMS = ("ucb:discount=1", "beta-ts", "calibration-ts", "cost-aware-ts")
"""Controllers that learn on streams. ``ucb`` does not forget here, because a stream does not change."""
STREAM_COSTS, STREAM_TOKENS, STREAM_RUNS, STREAM_REQUESTS, STREAM_DEPTH = "70b", 8000, 4, 16, 16
"""Cost model, tokens, repetitions, requests and depth of a stream."""


@dataclass(frozen=True)
class RegretCurve:
    """Plain steps lost against the base of the comparison, by tokens decoded."""

    controller: str
    tokens: list[int]
    regret: list[float]


@dataclass(frozen=True)
class Row:
    """One controller. Ratios are ratios of speeds, with 95 % intervals.

    Attributes:
        controller: Label in tables.
        spec: The controller and its options.
        speedup: Speed relative to plain decoding.
        over_best_fixed: Speed relative to the best fixed length in hindsight.
        of_ceiling: Speed relative to the clairvoyant; on a stream to the optimal policy.
        by_task: Speed relative to the best fixed length of each task, on the requests of this task.
        tokens_per_round: Tokens committed per round.
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
    """All controllers on one trace or stream, under one cost model.

    Attributes:
        name: Name of the cost model or of the stream.
        costs: The cost model.
        best_by_task: The best fixed length of each task, in hindsight.
        rows: One row for each controller.
        regret: Regret against the best fixed length in hindsight; on a stream against the optimal policy.
    """

    name: str
    costs: CostModel
    best_by_task: dict[str, str]
    rows: list[Row]
    regret: list[RegretCurve]

    def row(self, controller: str) -> Row:
        """The row with this label."""
        return next(row for row in self.rows if row.controller == controller)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return asdict(self) | {"costs": self.costs.to_dict()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Read what :meth:`to_dict` returned. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        rows = []
        for row in raw["rows"]:
            ratios = {name: Ratio(**row[name]) for name in ("speedup", "over_best_fixed", "of_ceiling")}
            by_task = {task: Ratio(**ratio) for task, ratio in row["by_task"].items()}
            rows.append(Row(**row | ratios | {"by_task": by_task}))
        curves = [RegretCurve(**curve) for curve in raw["regret"]]
        return cls(**raw | {"costs": CostModel.from_dict(raw["costs"]), "rows": rows, "regret": curves})


@dataclass
class Simulation:
    """All comparisons on one pair of traces.

    Attributes:
        origin: Origin of the trace.
        options: Cost models, seeds, and size of the streams.
        prompts: Number of reported prompts of each task.
        tuning_prompts: Number of tuning prompts of each task.
        replays: One comparison for each cost model.
        streams: One comparison for each synthetic stream.
        machine: Where the controllers' own time was measured.
        kind: Tells the file from a :class:`~eesd.bench.measure.results.Result`.
        schema: Version of the file format.
    """

    origin: dict[str, Any]
    options: dict[str, Any]
    prompts: dict[str, int]
    tuning_prompts: dict[str, int]
    replays: list[Comparison] = field(default_factory=list)
    streams: list[Comparison] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=describe_machine)
    kind: str = KIND
    schema: int = SCHEMA

    @classmethod
    def prepare(cls, trace: Trace, tuning: Trace, costs: Sequence[str]) -> Self:
        """A simulation without comparisons; :func:`run_simulation` adds them.

        Args:
            trace: Trace of the reported prompts.
            tuning: Trace of the tuning prompts.
            costs: Names of cost models.

        Raises:
            EESDError: A cost model is unknown or was not measured.
        """
        models = find_costs(costs, trace)
        streams = {"costs": STREAM_COSTS, "tokens": STREAM_TOKENS, "runs": STREAM_RUNS}
        options = {"costs": list(models), "seeds": SEEDS, "streams": streams}
        prompts, tuned_on = (dict(Counter(request.task for request in part.requests)) for part in (trace, tuning))
        return cls(trace.origin, options, prompts, tuned_on)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        value = vars(self) | {name: [item.to_dict() for item in getattr(self, name)] for name in ("replays", "streams")}
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(rounded(value)) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that :meth:`save` wrote. Raises :class:`EESDError` for any other file, and for another schema."""
        raw = read_json(path)
        if not is_simulation(raw):
            raise EESDError(f"{path} is not a simulation; give a simulation.json that eesd-bench simulate wrote.")
        if raw.get("schema") != SCHEMA:
            raise EESDError(f"{path} has schema {raw.get('schema')}, this EESD reads schema {SCHEMA}; simulate again.")
        try:
            return cls(**raw | {name: [Comparison.from_dict(item) for item in raw[name]] for name in ("replays", "streams")})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EESDError(f"{path} is damaged (a value is missing or unknown); simulate again.") from None


def is_simulation(raw: Any) -> bool:
    """Whether a JSON value is a :class:`Simulation`."""
    return isinstance(raw, dict) and raw.get("kind") == KIND


def find_costs(names: Sequence[str], trace: Trace | None) -> dict[str, CostModel]:
    """Look up cost models.

    Args:
        names: Keys of ``COST_MODELS``, or ``measured``.
        trace: Has the measured costs. None: only check the names.

    Raises:
        EESDError: A name is unknown, or the trace has no measured costs.
    """
    found = {}
    for name in names:
        if name != MEASURED and name not in COST_MODELS:
            raise EESDError(f"There are no costs {name!r}; there are {', '.join((MEASURED, *COST_MODELS))}.")
        costs = COST_MODELS[name] if name != MEASURED else trace.costs if trace else None
        if trace and costs is None:
            raise EESDError(f"The trace has no measured costs; give --costs with one of {', '.join(COST_MODELS)}.")
        if costs:
            found[name] = costs
    return found


def run_simulation(simulation: Simulation, trace: Trace, tuning: Trace) -> Iterator[None]:
    """Add all comparisons to a simulation.

    Args:
        simulation: Of :meth:`Simulation.prepare`.
        trace: Trace of the reported prompts.
        tuning: Trace of the tuning prompts.

    Yields:
        After each comparison.
    """
    options = simulation.options
    for name, costs in find_costs(options["costs"], trace).items():
        simulation.replays.append(compare_on_trace(name, trace, tuning, costs, options["seeds"]))
        yield
    streams = options["streams"]
    for stream in STREAMS:
        simulation.streams.append(compare_on_stream(stream, COST_MODELS[streams["costs"]], streams["tokens"], streams["runs"]))
        yield


def compare_on_trace(name: str, trace: Trace, tuning: Trace, costs: CostModel, seeds: int = SEEDS) -> Comparison:
    """Replay all controllers on a trace.

    Args:
        name: Name of the cost model.
        trace: Trace of the reported prompts.
        tuning: Trace of the tuning prompts; each tuned controller takes the candidate that is fastest on it.
        costs: The cost model.
        seeds: Seeds of each controller that learns.
    """
    fixed = replay_fixed_lengths(trace, costs)
    runs = {OFF: fixed[0], HINDSIGHT: fastest(fixed)}
    for label, specs in TUNED.items():
        runs[label] = replay_seeds(_tuned(specs, tuning, costs), trace, costs)
    for label, spec in LEARNING.items():
        runs[label] = replay_seeds(spec, trace, costs, seeds, trace.prior)
    runs[CLAIRVOYANT] = replay(CLAIRVOYANT, Clairvoyant(), trace, costs)
    masks = {task: np.array([request.task == task for request in trace.requests]) for task in trace.tasks}
    best = {task: _fastest_on(fixed, mask) for task, mask in masks.items()}
    rows = [
        _row(label, runs, runs[CLAIRVOYANT], {task: speed_ratio(run, best[task], mask) for task, mask in masks.items()})
        for label, run in runs.items()
    ]
    curves = [_curve(label, run, runs[HINDSIGHT]) for label, run in runs.items() if label not in WITHOUT_CURVE]
    return Comparison(name, costs, {task: run.name for task, run in best.items()}, rows, curves)


def _tuned(specs: Sequence[str], tuning: Trace, costs: CostModel) -> str:
    """The spec that is fastest on the tuning trace. The controllers' own time is not charged: it is equal for all."""
    return max(specs, key=lambda spec: replay(spec, make_controller(spec), tuning, costs, charge=False).speed)


def _fastest_on(runs: Sequence[Replay], mask: NDArray[np.bool_]) -> Replay:
    """The replay that is fastest on the requests of the mask [R]."""
    return max(runs, key=lambda run: run.tokens[mask].sum() / run.cost[mask].sum())


def compare_on_stream(stream: SyntheticStream, costs: CostModel, tokens: int, runs: int) -> Comparison:
    """Replay the controllers that learn on a stream. Their own time is not charged.

    Args:
        stream: The stream.
        costs: The cost model.
        tokens: Tokens of each trace drawn from the stream.
        runs: Number of traces. Every controller starts anew on each.
    """
    traces = [stream.trace(tokens // STREAM_REQUESTS, STREAM_REQUESTS, seed, STREAM_DEPTH) for seed in range(runs)]
    optimal = stream.optimal_policy(costs, STREAM_DEPTH)
    fixed = [replay_fixed_lengths(trace, costs) for trace in traces]
    found = {
        OFF: [lengths[0] for lengths in fixed],
        HINDSIGHT: [fastest(lengths) for lengths in fixed],
        OPTIMAL: [replay(OPTIMAL, optimal, trace, costs, charge=False) for trace in traces],
    }
    for spec in LEARNING_ON_STREAMS:
        found[spec] = [
            replay(spec, make_controller(spec, seed), trace, costs, charge=False) for seed, trace in enumerate(traces)
        ]
    means = {label: mean_replay(replays) for label, replays in found.items()}
    rows = [_row(label, means, means[OPTIMAL], {}) for label in means]
    curves = [_curve(label, run, means[OPTIMAL]) for label, run in means.items() if label not in (OFF, OPTIMAL)]
    return Comparison(stream.name, costs, {}, rows, curves)


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


def _curve(label: str, run: Replay, base: Replay) -> RegretCurve:
    lost = regret(run, base)
    places = np.unique(np.linspace(0, len(lost) - 1, CURVE_POINTS).round().astype(int))
    return RegretCurve(label, (places + 1).tolist(), lost[places].round(3).tolist())
