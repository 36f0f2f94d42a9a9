"""Replay one controller on a trace under a cost model. A replay needs no engine and runs thousands
of rounds per second.

Costs are in plain steps, so the number of tokens per unit of cost is the speed relative to plain
decoding. All comparisons are paired, because all controllers decode the same text and the bootstrap
resamples whole requests.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eesd.bench.measure.stats import bounds, resampled
from eesd.bench.replay.costs import CostModel
from eesd.bench.replay.traces import Trace
from eesd.common.prior import CalibrationPrior
from eesd.controllers import CONTROLLERS, Controller, DraftStep, RoundOutcome, make_controller
from eesd.controllers.base import EXIT, Fixed

Array = NDArray[np.float64]
DRAWS = 2000
"""Bootstrap samples."""
OFF = "off"
"""The name of plain decoding in tables and JSON."""


class Threshold(Controller):
    """Keep drafting while the draft's last token has at least probability ``p`` (as in
    Kangaroo)."""

    def __init__(self, p: float = 0.6, seed: int = 0) -> None:
        self.p = p

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.probability >= self.p


REPLAYED = CONTROLLERS | {"threshold": Threshold}
"""All controllers of a replay by name."""


class Clairvoyant(Controller):
    """Drafts exactly the tokens that will be accepted. Its speed is an upper bound for every
    controller.

    For constant acceptance a, draft steps of cost c, and a verify cost independent of the nodes,
    its speed is 1 / (1 - a + c a).

    Attributes:
        accepted: Number of tokens of the next round's chain that the verifier will accept. A replay
            sets it before each round.
    """

    accepted = 0

    def begin_round(self, width: int) -> int:
        return self.accepted

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.accepted


@dataclass(frozen=True)
class Replay:
    """The result of one controller on one trace. Costs are in plain steps. They include the
    controller's own time, which is spread evenly over the rounds.

    Attributes:
        tokens, cost: Tokens and seconds of each request [R].
        rounds: One row [n, 4] for each round. It has the request, the number of committed tokens,
            the number of draft tokens, and the cost. If there are several seeds, these are the
            rounds of the first seed.
        own_seconds: The controller's own time per round, measured on this machine.
    """

    name: str
    tokens: Array
    cost: Array
    rounds: Array
    own_seconds: float

    @property
    def speed(self) -> float:
        """The tokens per plain step over all requests. This is the speed-up over plain decoding in
        total time."""
        return float(self.tokens.sum() / self.cost.sum())


def replay(
    name: str, controller: Controller, trace: Trace, costs: CostModel, charge: bool = True
) -> Replay:
    """Run a new controller over all requests in order. As in an :class:`~eesd.runtime.llm.LLM`, the
    controller goes on learning from request to request.

    If ``charge`` is True, the costs include the controller's own time (except for a
    :class:`Clairvoyant`).
    """
    table = costs.chain_costs(trace.depth)
    plain = costs.plain_seconds
    seconds = [
        (costs.calls.draft_cost(n) * plain, costs.calls.verify_cost(n + 1) * plain)
        for n in range(len(table))
    ]
    rounds: list[tuple[int, int, int, float]] = []
    own, clock = 0.0, time.thread_time  # CPU time, because other processes may take the core
    clairvoyant = controller if isinstance(controller, Clairvoyant) else None
    for index, request in enumerate(trace.requests):
        controller.begin_request()
        steps = request.steps
        accepted_at = request.accepted.tolist()
        position = 0
        while position < request.tokens:
            room = request.room(position)
            if clairvoyant:
                clairvoyant.accepted = accepted_at[position]
            started = clock()
            drafted = draft_length(controller, steps[position], room)
            own += clock() - started
            accepted = min(drafted, accepted_at[position])
            draft_seconds, verify_seconds = seconds[drafted]
            outcome = chain_outcome(drafted, accepted, draft_seconds, verify_seconds)
            started = clock()
            teach(controller, outcome)
            own += clock() - started
            rounds.append((index, accepted + 1, drafted, table[drafted]))
            position += accepted + 1
    found = np.array(rounds, float)
    per_round = own / len(rounds)
    if charge and not clairvoyant:
        found[:, 3] += per_round / plain
    which = found[:, 0].astype(int)
    tokens, cost = (
        np.bincount(which, found[:, column], len(trace.requests)).astype(np.float64)
        for column in (1, 3)
    )
    return Replay(name, tokens, cost, found, per_round)


def chain_outcome(
    drafted: int,
    accepted: int,
    draft_seconds: float,
    verify_seconds: float,
    expected: float | None = None,
) -> RoundOutcome:
    """Return the outcome of a round that drafted a chain of ``drafted`` tokens. All of them were
    verified."""
    if expected is None:
        expected = accepted + 1
    return RoundOutcome(
        steps=drafted,
        depth=drafted,
        nodes=drafted,
        accepted=accepted,
        num_expanded=accepted,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
        expected=expected,
        seconds=draft_seconds + verify_seconds,
        drafter=EXIT if drafted else "",
    )


def teach(controller: Controller, outcome: RoundOutcome) -> None:
    """Pass a committed round to a controller whose ``value`` no other rule shares."""
    if controller.value is not None:
        controller.value.observe(outcome)
    controller.observe(outcome)


def draft_length(controller: Controller, steps: Sequence[DraftStep], room: int) -> int:
    """Return the number of tokens of a chain that a controller drafts, which is at most ``room``.
    This function calls the controller as a session does."""
    if not room:
        return 0
    length = controller.begin_round(1)
    if length is not None:
        return min(length, room)
    drafted = 1
    while drafted < room and controller.keep_drafting(steps[drafted - 1]):
        drafted += 1
    return drafted


def replay_seeds(
    spec: str, trace: Trace, costs: CostModel, seeds: int = 1, prior: CalibrationPrior | None = None
) -> Replay:
    """Replay a controller with several seeds and return the mean costs. ``prior`` is the
    controller's calibration prior."""
    replays = [
        replay(spec, make_controller(spec, seed, prior, kinds=REPLAYED), trace, costs)
        for seed in range(seeds)
    ]
    cost = np.mean([run.cost for run in replays], axis=0)
    return replace(
        replays[0], cost=cost, own_seconds=float(np.mean([run.own_seconds for run in replays]))
    )


def replay_fixed_lengths(trace: Trace, costs: CostModel) -> list[Replay]:
    """Replay every fixed length from 0 (plain decoding) to the depth of the trace. The controllers'
    own time is not counted."""
    return [
        replay(f"fixed:k={k}" if k else OFF, _FixedLength(k), trace, costs, charge=False)
        for k in range(trace.depth + 1)
    ]


class _FixedLength(Fixed):
    """Like :class:`Fixed`, but allows length 0."""

    def __init__(self, k: int) -> None:
        self.k = k


def fastest(replays: Sequence[Replay]) -> Replay:
    """Return the replay with the highest speed. For the result of :func:`replay_fixed_lengths`,
    this is the best fixed length in hindsight."""
    return max(replays, key=lambda run: run.speed)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds and the bounds of its interval."""

    value: float
    low: float
    high: float


def speed_ratio(run: Replay, base: Replay, requests: NDArray[np.bool_] | None = None) -> Ratio:
    """Return the speed of ``run`` divided by the speed of ``base`` on the same trace. The 95 %
    interval comes from a paired bootstrap over requests.

    ``requests`` is a mask [R] of the requests to use, or None to use all requests.
    """
    columns = np.stack([run.tokens, run.cost, base.tokens, base.cost], axis=1)
    if requests is not None:
        columns = columns[requests]
    totals = np.concatenate(
        [columns.sum(axis=0)[None], columns[resampled(len(columns), DRAWS)].sum(axis=1)]
    )
    ratios = totals[:, 0] / totals[:, 1] / (totals[:, 2] / totals[:, 3])
    return Ratio(float(ratios[0]), *bounds(ratios[1:]))
