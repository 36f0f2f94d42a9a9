"""Replays controllers on traces under a cost model: thousands of rounds a second, no engine.

Costs are in plain steps, so tokens per unit of time is the speed relative to plain decoding. Every figure is paired: all
policies decode the same text, and the bootstrap draws whole requests.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.bench.costs import CostModel
from eesd.bench.traces import Trace
from eesd.controllers import Controller, DraftStep, RoundOutcome
from eesd.controllers.oracles import Oracle

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """One controller on one trace. ``tokens`` and ``cost`` are per request, ``rounds`` [n, 4] per round: request, tokens committed,
    tokens drafted, cost. ``cost`` and ``rounds`` contain the controller's own time, spread evenly over the rounds."""

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
    draft, verify = costs.draft * costs.plain_seconds, [costs.verify_cost(n + 1) * costs.plain_seconds for n in range(len(table))]
    rounds: list[tuple[int, int, int, float]] = []
    own, clock = 0.0, time.perf_counter
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
            outcome = RoundOutcome(drafted, accepted, drafted * draft, verify[drafted], drafted)
            started = clock()
            controller.observe(outcome)
            own += clock() - started
            rounds.append((index, accepted + 1, drafted, table[drafted]))
            position += accepted + 1
    found, per_round = np.array(rounds, float), own / len(rounds)
    if charge and not oracle:
        found[:, 3] += per_round / costs.plain_seconds
    which = found[:, 0].astype(int)
    tokens, cost = (np.bincount(which, found[:, column], len(trace.requests)) for column in (1, 3))
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


def fixed_speeds(trace: Trace, costs: CostModel) -> list[Replay]:
    """Every fixed length from 0 (plain decoding) up, uncharged: the arms that adaptive controllers are compared with."""
    return [replay(f"fixed:k={k}" if k else "off", Ahead(k), trace, costs, charge=False) for k in range(trace.depth + 1)]


class Ahead(Controller):
    """A length, 0 allowed."""

    def __init__(self, k: int) -> None:
        self.k = k

    def length_ahead(self) -> int:
        return self.k

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.k

    def state(self) -> dict[str, Any]:
        return {"k": self.k}

    def restore(self, state: dict[str, Any]) -> None:
        self.k = int(state["k"])
