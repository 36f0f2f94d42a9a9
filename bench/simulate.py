"""Replays controllers on traces under a cost model: thousands of rounds a second, no engine.

Costs are in plain steps, so tokens per unit of time is the speed relative to plain decoding. Every figure is paired: all
policies decode the same text, and the bootstrap draws whole requests.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.bench.costs import CostModel
from eesd.bench.traces import Trace
from eesd.controllers import Controller, DraftStep, RoundOutcome, make_controller
from eesd.controllers.baselines import Fixed
from eesd.controllers.calibration import Prior
from eesd.controllers.oracles import Clairvoyant, Oracle

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """One controller on one trace.

    ``tokens`` and ``cost`` are per request, ``rounds`` [n, 4] per round: request, tokens committed, tokens drafted, cost. Costs
    contain the controller's own time, spread evenly over the rounds.
    """

    name: str
    tokens: Array
    cost: Array
    rounds: Array
    own_seconds: float
    """The controller's own time per round, in seconds of this machine."""

    @property
    def speed(self) -> float:
        """Tokens per plain step, over all requests: total time of plain decoding over total time."""
        return float(self.tokens.sum() / self.cost.sum())


def replay(name: str, controller: Controller, trace: Trace, costs: CostModel, charge: bool = True) -> Replay:
    """Run ``controller`` over all requests in order; it learns from one to the next, as in an :class:`~eesd.runtime.llm.LLM`.

    With ``charge`` a controller pays for its own time, as measured here; an oracle never does.
    """
    table = costs.table(trace.depth)
    draft, verify = (
        costs.draft * costs.plain_seconds,
        [costs.verify_cost(n + 1) * costs.plain_seconds for n in range(len(table))],
    )
    rounds: list[tuple[int, int, int, float]] = []
    own, clock = 0.0, time.thread_time  # another process that takes the core meanwhile is not its fault
    oracle = controller if isinstance(controller, Oracle) else None
    for index, request in enumerate(trace.requests):
        controller.begin_request()
        steps, accepted_at = request.steps, request.accepted.tolist()
        position = 0
        while position < request.tokens:
            room = request.room(position)
            if oracle:
                oracle.reveal(accepted_at[position])
            started = clock()
            drafted = draft_length(controller, steps[position], room)
            own += clock() - started
            accepted = min(drafted, accepted_at[position])
            outcome = RoundOutcome(drafted, accepted, drafted * draft, verify[drafted], drafted, drafted)
            started = clock()
            controller.observe(outcome)
            own += clock() - started
            rounds.append((index, accepted + 1, drafted, table[drafted]))
            position += accepted + 1
    found, per_round = np.array(rounds, float), own / len(rounds)
    if charge and not oracle:
        found[:, 3] += per_round / costs.plain_seconds
    which = found[:, 0].astype(int)
    tokens, cost = (np.bincount(which, found[:, column], len(trace.requests)).astype(np.float64) for column in (1, 3))
    return Replay(name, tokens, cost, found, per_round)


def draft_length(controller: Controller, steps: Sequence[DraftStep], room: int) -> int:
    """How many tokens the controller drafts of a chain, as a session asks it."""
    if not room:
        return 0
    ahead = controller.length_ahead()
    if ahead is not None:
        return min(ahead, room)
    drafted = 1
    while drafted < room and controller.keep_drafting(steps[drafted - 1]):
        drafted += 1
    return drafted


def replay_spec(spec: str, trace: Trace, costs: CostModel, seeds: int = 1, prior: Prior | None = None) -> Replay:
    """A controller by its name, with ``seeds`` seeds: tokens and cost of all together, ``rounds`` of the first."""
    runs = [replay(spec, make_controller(spec, seed, prior), trace, costs) for seed in range(seeds)]
    tokens, cost = (np.sum([getattr(run, name) for run in runs], axis=0) for name in ("tokens", "cost"))
    return replace(runs[0], tokens=tokens, cost=cost, own_seconds=float(np.mean([run.own_seconds for run in runs])))


def fixed_speeds(trace: Trace, costs: CostModel) -> list[Replay]:
    """Every fixed length from 0 (plain decoding) up, uncharged: the arms that adaptive controllers are compared with."""
    return [replay(f"fixed:k={k}" if k else "off", Ahead(k), trace, costs, charge=False) for k in range(trace.depth + 1)]


class Ahead(Fixed):
    """A length, 0 allowed."""

    def __init__(self, k: int) -> None:
        self.k = k


def best_fixed(trace: Trace, costs: CostModel) -> Replay:
    """The best fixed length in hindsight, plain decoding included."""
    return max(fixed_speeds(trace, costs), key=lambda run: run.speed)


def tuned(specs: Sequence[str], tuning: Trace, costs: CostModel) -> str:
    """The fastest of ``specs`` on a trace of other prompts."""
    return max(specs, key=lambda spec: replay_spec(spec, tuning, costs).speed)


@dataclass(frozen=True)
class Ratio:
    """How much faster one run is than another, with the bounds of an interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def faster(run: Replay, base: Replay, requests: NDArray[np.bool_] | None = None, draws: int = 2000, seed: int = 0) -> Ratio:
    """Speed of ``run`` over that of ``base``, with the 95 % interval of a paired bootstrap over requests.

    ``requests`` [R] chooses some of them, such as those of a task.
    """
    columns = np.stack([run.tokens, run.cost, base.tokens, base.cost], axis=1)
    if requests is not None:
        columns = columns[requests]
    picks = np.random.default_rng(seed).integers(len(columns), size=(draws, len(columns)))
    totals = np.concatenate([columns.sum(axis=0)[None], columns[picks].sum(axis=1)])
    ratios = totals[:, 0] / totals[:, 1] / (totals[:, 2] / totals[:, 3])
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    return Ratio(float(ratios[0]), float(low), float(high))


def regret(run: Replay, speed: float) -> Array:
    """Plain steps lost so far against tokens at ``speed``, [tokens]: position n is what n + 1 tokens cost more."""
    spent = np.repeat(run.rounds[:, 3] / run.rounds[:, 1], run.rounds[:, 1].astype(int)).cumsum()
    return np.asarray(spent - np.arange(1, len(spent) + 1) / speed)


THRESHOLDS = tuple(f"threshold:p={p / 20}" for p in range(2, 19))
LENGTHS = tuple(f"fixed:k={k}" for k in range(1, 13))
ADAEDL = tuple(f"adaedl:target={target},gamma={gamma}" for target in (0.5, 0.6, 0.7, 0.8, 0.9) for gamma in (0.1, 0.2, 0.4))
ONLINE = ("ucb", "beta-ts", "calibration-ts", "cost-aware-ts:draws=0", "cost-aware-ts")


def _fastest(runs: Sequence[Replay], requests: NDArray[np.bool_]) -> Replay:
    return max(runs, key=lambda run: run.tokens[requests].sum() / run.cost[requests].sum())


def compare(trace: Trace, tuning: Trace, costs: CostModel, seeds: int = 5, prior: Prior | None = None) -> list[dict[str, Any]]:
    """Every controller on ``trace``; what has an option to tune takes the value that was fastest on ``tuning``.

    One row each: speed against plain decoding and against the best fixed length in hindsight, overall and by task (there the
    best length of each task), with intervals; tokens a round; microseconds a round of its own.
    """
    hindsight = fixed_speeds(trace, costs)
    off, best = hindsight[0], max(hindsight, key=lambda run: run.speed)
    runs = [off, best]
    for specs in (LENGTHS, THRESHOLDS, ADAEDL):
        run = replay_spec(tuned(specs, tuning, costs), trace, costs)
        runs.append(replace(run, name=f"{run.name} (tuned)"))
    runs += [replay_spec(spec, trace, costs, seeds, prior) for spec in ONLINE]
    runs.append(replay("clairvoyant", Clairvoyant(), trace, costs))
    masks = {task: np.array([request.task == task for request in trace.requests]) for task in trace.tasks}
    bases = {task: _fastest(hindsight, mask) for task, mask in masks.items()}
    return [
        {
            "controller": run.name if run is not best else f"{run.name} (in hindsight)",
            "speedup": asdict(faster(run, off)),
            "over_best_fixed": asdict(faster(run, best)),
            "by_task": {task: asdict(faster(run, bases[task], mask)) for task, mask in masks.items()},
            "tokens_per_round": float(run.rounds[:, 1].mean()),
            "own_microseconds": run.own_seconds * 1e6,
        }
        for run in runs
    ]
