"""Replays controllers on traces under a cost model: thousands of rounds a second, no engine.

Costs are in plain steps, so tokens per unit of time is the speed relative to plain decoding. Every figure is paired: all
policies decode the same text, and the bootstrap draws whole requests.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eesd.bench.costs import CostModel
from eesd.bench.traces import Trace
from eesd.common.prior import CalibrationPrior
from eesd.controllers import Controller, DraftStep, RoundOutcome, make_controller
from eesd.controllers.baselines import Fixed
from eesd.controllers.oracles import Clairvoyant, Oracle

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """One controller on one trace.

    ``tokens`` and ``cost`` are per request, ``rounds`` [n, 4] per round: request, tokens committed, tokens drafted, cost. Costs
    contain the controller's own time, spread evenly over the rounds. Of several seeds ``rounds`` are the first one's, all else
    is the mean.
    """

    name: str
    tokens: Array
    cost: Array
    rounds: Array
    spent: Array
    """Cost up to each token of the trace."""
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
    table, plain = costs.table(trace.depth), costs.plain_seconds
    seconds = [(costs.calls.of_draft(n) * plain, costs.calls.of_verify(n + 1) * plain) for n in range(len(table))]
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
            outcome = RoundOutcome(drafted, accepted, *seconds[drafted], drafted, drafted, accepted)
            started = clock()
            controller.observe(outcome)
            own += clock() - started
            rounds.append((index, accepted + 1, drafted, table[drafted]))
            position += accepted + 1
    found, per_round = np.array(rounds, float), own / len(rounds)
    if charge and not oracle:
        found[:, 3] += per_round / plain
    which = found[:, 0].astype(int)
    tokens, cost = (np.bincount(which, found[:, column], len(trace.requests)).astype(np.float64) for column in (1, 3))
    spent = np.repeat(found[:, 3] / found[:, 1], found[:, 1].astype(int)).cumsum()
    return Replay(name, tokens, cost, found, spent, per_round)


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


def replay_spec(spec: str, trace: Trace, costs: CostModel, seeds: int = 1, prior: CalibrationPrior | None = None) -> Replay:
    """A controller by its name, the mean of ``seeds`` seeds."""
    runs = [replay(spec, make_controller(spec, seed, prior), trace, costs) for seed in range(seeds)]
    return mean_of(runs)


def mean_of(runs: Sequence[Replay]) -> Replay:
    """One controller's runs on the same trace, or on traces of the same lengths, as one."""
    cost, spent = (np.mean([getattr(run, name) for run in runs], axis=0) for name in ("cost", "spent"))
    return replace(runs[0], cost=cost, spent=spent, own_seconds=float(np.mean([run.own_seconds for run in runs])))


def fixed_speeds(trace: Trace, costs: CostModel) -> list[Replay]:
    """Every fixed length from 0 (plain decoding) up, uncharged: the arms that adaptive controllers are compared with."""
    return [replay(f"fixed:k={k}" if k else OFF, Ahead(k), trace, costs, charge=False) for k in range(trace.depth + 1)]


class Ahead(Fixed):
    """A length, 0 allowed."""

    def __init__(self, k: int) -> None:
        self.k = k


def fastest(runs: Sequence[Replay]) -> Replay:
    """The one with the best speed; of :func:`fixed_speeds` the best fixed length in hindsight."""
    return max(runs, key=lambda run: run.speed)


def tuned(specs: Sequence[str], tuning: Trace, costs: CostModel) -> str:
    """The fastest of ``specs`` on a trace of other prompts, their own time left out: it is the same for all."""
    return max(specs, key=lambda spec: replay(spec, make_controller(spec), tuning, costs, charge=False).speed)


@dataclass(frozen=True)
class Ratio:
    """How much faster one run is than another, with the bounds of an interval."""

    value: float
    low: float
    high: float


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


def regret(run: Replay, base: Replay) -> Array:
    """Plain steps lost so far against ``base``, which decoded the same text; [tokens]: position n is what n + 1 tokens cost
    more."""
    return np.asarray(run.spent - base.spent)


THRESHOLDS = tuple(f"threshold:p={p / 20}" for p in range(2, 19))
LENGTHS = tuple(f"fixed:k={k}" for k in range(1, 13))
ADAEDL = tuple(f"adaedl:target={target},gamma={gamma}" for target in (0.5, 0.6, 0.7, 0.8, 0.9) for gamma in (0.1, 0.2, 0.4))
OFF, HINDSIGHT, POSTERIOR_MEANS, CLAIRVOYANT = (
    "off",
    "best fixed in hindsight",
    "cost-aware-ts, posterior means",
    "clairvoyant",
)
TUNED = {"fixed, tuned": LENGTHS, "threshold, tuned": THRESHOLDS, "adaedl, tuned": ADAEDL}
ONLINE = {
    "ucb": "ucb",
    "beta-ts": "beta-ts",
    "calibration-ts": "calibration-ts",
    POSTERIOR_MEANS: "cost-aware-ts:draws=0",
    "cost-aware-ts": "cost-aware-ts",
}


@dataclass(frozen=True)
class Comparison:
    """Every controller on one trace, by what it is called in tables; ``best`` has the best fixed length of each task."""

    runs: dict[str, Replay]
    best: dict[str, Replay]


def compare(trace: Trace, tuning: Trace, costs: CostModel, seeds: int = 5) -> Comparison:
    """Every controller on ``trace``; what has an option to tune takes the value that was fastest on ``tuning``."""
    hindsight = fixed_speeds(trace, costs)
    runs = {OFF: hindsight[0], HINDSIGHT: fastest(hindsight)}
    for label, specs in TUNED.items():
        runs[label] = replay_spec(tuned(specs, tuning, costs), trace, costs)
    for label, spec in ONLINE.items():
        runs[label] = replay_spec(spec, trace, costs, seeds, trace.prior)
    runs[CLAIRVOYANT] = replay(CLAIRVOYANT, Clairvoyant(), trace, costs)
    best = {
        task: max(hindsight, key=lambda run: run.tokens[mask].sum() / run.cost[mask].sum())
        for task, mask in masks_of(trace).items()
    }
    return Comparison(runs, best)


def masks_of(trace: Trace) -> dict[str, NDArray[np.bool_]]:
    """Which requests [R] are of each task."""
    return {task: np.array([request.task == task for request in trace.requests]) for task in trace.tasks}
