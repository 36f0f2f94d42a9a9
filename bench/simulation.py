"""What replays showed, as one JSON file: every controller under every cost model, and on streams whose optimum is known."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from eesd.bench.costs import COST_MODELS, CostModel
from eesd.bench.results import describe_machine, read_json, rounded
from eesd.bench.simulate import (
    CLAIRVOYANT,
    HINDSIGHT,
    OFF,
    POSTERIOR_MEANS,
    Ratio,
    Replay,
    compare,
    faster,
    fastest,
    fixed_speeds,
    masks_of,
    mean_of,
    regret,
    replay,
)
from eesd.bench.streams import STREAMS, Stream
from eesd.bench.traces import Trace
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.controllers import make_controller

KIND, SCHEMA = "simulation", 1
MEASURED = "measured"
SEEDS = 5
POINTS = 200
"""Of each regret curve."""
OPTIMAL = "optimal"
NOT_DRAWN = (OFF, HINDSIGHT, POSTERIOR_MEANS, CLAIRVOYANT)
"""Without a regret curve: those far off the scale, the base itself, and one that lies on another."""
LEARNING = ("ucb:discount=1", "beta-ts", "calibration-ts", "cost-aware-ts")
"""On the streams. A bandit that forgets would go on exploring, although nothing changes there."""
STREAM_COSTS, STREAM_TOKENS, STREAM_RUNS, STREAM_REQUESTS, STREAM_DEPTH = "70b", 8000, 4, 16, 16


@dataclass(frozen=True)
class Curve:
    """Plain steps lost by tokens decoded, against the base of its replays."""

    controller: str
    tokens: list[int]
    regret: list[float]


@dataclass(frozen=True)
class Row:
    """One controller, made from ``spec``. Ratios of speeds with 95 % intervals: ``of_ceiling`` to that of the clairvoyant (on a
    known stream the optimal policy), ``by_task`` to that of the best fixed length of each task in hindsight.
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
class Replays:
    """Every controller on one trace under one cost model.

    ``best_by_task`` names the best fixed length of each task. ``regret`` is against the best fixed length of all, on a known
    stream against the optimal policy.
    """

    name: str
    costs: CostModel
    best_by_task: dict[str, str]
    rows: list[Row]
    regret: list[Curve]

    def row(self, controller: str) -> Row:
        return next(row for row in self.rows if row.controller == controller)


@dataclass
class Simulation:
    """``origin`` says what recorded the traces, ``prompts`` and ``tuning_prompts`` how many they have by task."""

    origin: dict[str, Any]
    options: dict[str, Any]
    prompts: dict[str, int]
    tuning_prompts: dict[str, int]
    replays: list[Replays] = field(default_factory=list)
    streams: list[Replays] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=lambda: describe_machine())
    kind: str = KIND
    schema: int = SCHEMA

    @classmethod
    def of(cls, trace: Trace, tuning: Trace, costs: Sequence[str]) -> Self:
        """What is to be replayed; raises :class:`EESDError` for costs that are not there."""
        models = find_costs(costs, trace)
        streams = {"costs": STREAM_COSTS, "tokens": STREAM_TOKENS, "runs": STREAM_RUNS}
        options = {"costs": list(models), "seeds": SEEDS, "streams": streams}
        prompts, tuned_on = (dict(Counter(request.task for request in part.requests)) for part in (trace, tuning))
        return cls(trace.origin, options, prompts, tuned_on)

    def save(self, path: Path) -> None:
        """Write the file whole."""
        value = vars(self) | {name: [_replays_to_json(r) for r in getattr(self, name)] for name in ("replays", "streams")}
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(rounded(value)) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of :meth:`save`. Raises :class:`EESDError` when it is not one, or of another schema."""
        raw = read_json(path)
        if not is_simulation(raw):
            raise EESDError(f"{path} is not a simulation; give the simulation.json that eesd-bench simulate wrote.")
        if raw.get("schema") != SCHEMA:
            raise EESDError(f"{path} has schema {raw.get('schema')}, this EESD reads {SCHEMA}; simulate again.")
        try:
            return cls(**raw | {name: [_replays_from_json(item) for item in raw[name]] for name in ("replays", "streams")})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EESDError(f"{path} is damaged (a value is missing or unknown); simulate again.") from None


def is_simulation(raw: Any) -> bool:
    """Whether a JSON value is what :class:`Simulation` writes."""
    return isinstance(raw, dict) and raw.get("kind") == KIND


def _replays_to_json(replays: Replays) -> dict[str, Any]:
    return asdict(replays) | {"costs": replays.costs.to_dict()}


def _replays_from_json(raw: dict[str, Any]) -> Replays:
    rows = []
    for row in raw["rows"]:
        ratios = {name: Ratio(**row[name]) for name in ("speedup", "over_best_fixed", "of_ceiling")}
        rows.append(Row(**row | ratios | {"by_task": {task: Ratio(**ratio) for task, ratio in row["by_task"].items()}}))
    curves = [Curve(**curve) for curve in raw["regret"]]
    return Replays(**raw | {"costs": CostModel.from_dict(raw["costs"]), "rows": rows, "regret": curves})


def find_costs(names: Sequence[str], trace: Trace | None) -> dict[str, CostModel]:
    """Cost models by name; ``measured`` is what was measured on the trace's engine. Without a trace only names are checked.

    Raises :class:`EESDError` for a name that is not known, and where nothing was measured.
    """
    found = {}
    for name in names:
        if name != MEASURED and name not in COST_MODELS:
            raise EESDError(f"There are no costs {name!r}; there are {', '.join((MEASURED, *COST_MODELS))}.")
        costs = COST_MODELS[name] if name != MEASURED else trace.costs if trace else None
        if trace and costs is None:
            raise EESDError(f"The trace has no measured costs; give --costs of {', '.join(COST_MODELS)}.")
        if costs:
            found[name] = costs
    return found


def simulate_all(simulation: Simulation, trace: Trace, tuning: Trace) -> Iterator[None]:
    """Replay everything into ``simulation``; yields after each cost model and each stream."""
    options = simulation.options
    for name, costs in find_costs(options["costs"], trace).items():
        simulation.replays.append(replays_of(name, trace, tuning, costs, options["seeds"]))
        yield
    streams = options["streams"]
    for stream in STREAMS:
        simulation.streams.append(on_stream(stream, COST_MODELS[streams["costs"]], streams["tokens"], streams["runs"]))
        yield


def replays_of(name: str, trace: Trace, tuning: Trace, costs: CostModel, seeds: int = SEEDS) -> Replays:
    """Every controller on ``trace``; what has an option to tune takes the value that was fastest on ``tuning``."""
    comparison = compare(trace, tuning, costs, seeds)
    runs, best = comparison.runs, comparison.best
    masks = masks_of(trace)
    rows = [
        _row(label, runs, runs[CLAIRVOYANT], {task: faster(run, best[task], mask) for task, mask in masks.items()})
        for label, run in runs.items()
    ]
    curves = [_curve(label, run, runs[HINDSIGHT]) for label, run in runs.items() if label not in NOT_DRAWN]
    return Replays(name, costs, {task: run.name for task, run in best.items()}, rows, curves)


def on_stream(stream: Stream, costs: CostModel, tokens: int, count: int) -> Replays:
    """Those that learn, on ``count`` independent streams, on each of which they begin anew. Their own time is free."""
    traces = [stream.trace(tokens // STREAM_REQUESTS, STREAM_REQUESTS, seed, STREAM_DEPTH) for seed in range(count)]
    optimal = stream.optimal(costs, STREAM_DEPTH)
    fixed = [fixed_speeds(trace, costs) for trace in traces]
    each = {
        OFF: [runs[0] for runs in fixed],
        HINDSIGHT: [fastest(runs) for runs in fixed],
        OPTIMAL: [replay(OPTIMAL, optimal, trace, costs, charge=False) for trace in traces],
    }
    for spec in LEARNING:
        each[spec] = [
            replay(spec, make_controller(spec, seed), trace, costs, charge=False) for seed, trace in enumerate(traces)
        ]
    runs = {label: mean_of(found) for label, found in each.items()}
    rows = [_row(label, runs, runs[OPTIMAL], {}) for label in runs]
    curves = [_curve(label, run, runs[OPTIMAL]) for label, run in runs.items() if label not in (OFF, OPTIMAL)]
    return Replays(stream.name, costs, {}, rows, curves)


def _row(label: str, runs: Mapping[str, Replay], ceiling: Replay, by_task: dict[str, Ratio]) -> Row:
    run = runs[label]
    return Row(
        controller=label,
        spec=run.name,
        speedup=faster(run, runs[OFF]),
        over_best_fixed=faster(run, runs[HINDSIGHT]),
        of_ceiling=faster(run, ceiling),
        by_task=by_task,
        tokens_per_round=float(run.rounds[:, 1].mean()),
        own_microseconds=run.own_seconds * 1e6,
    )


def _curve(label: str, run: Replay, base: Replay) -> Curve:
    lost = regret(run, base)
    places = np.unique(np.linspace(0, len(lost) - 1, POINTS).round().astype(int))
    return Curve(label, (places + 1).tolist(), lost[places].round(3).tolist())
