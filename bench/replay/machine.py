"""A simulated machine: rounds of the real controller and guard on a trace, with noise and disturbances, without clocks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eesd.bench.replay.costs import CallCosts
from eesd.bench.replay.replay import chain_outcome, draft_length
from eesd.bench.replay.traces import Trace
from eesd.controllers import Controller
from eesd.runtime.decoding.guard import EXIT_HEAD, Guard

COLD = 0.1
"""A plain round right behind a drafting one is this share slower: the draft has taken the processor's caches."""

Disturbance = Callable[[int, float], tuple[float, float]]
"""Factors of the draft's and of the verify pass's seconds, by the number of rounds and the seconds that have passed."""


def burst(first: int, draft: float, verify: float, seconds: float = 1.0) -> Disturbance:
    """From round ``first`` on, calls are slower by these factors, until ``seconds`` have passed."""
    began: list[float] = []

    def factors(rounds: int, now: float) -> tuple[float, float]:
        if rounds >= first and not began:
            began.append(now)
        return (draft, verify) if began and now - began[0] < seconds else (1.0, 1.0)

    return factors


def stall(first: int, draft: float, verify: float) -> Disturbance:
    """In round ``first``, calls are slower by these factors."""
    return lambda rounds, _: (draft, verify) if rounds == first else (1.0, 1.0)


class Machine:
    """Seconds of calls: those of ``costs``, with lognormal noise, and slowed by a disturbance."""

    def __init__(self, costs: CallCosts, noise: float = 0.05, disturbance: Disturbance | None = None, seed: int = 0) -> None:
        self._costs, self._noise, self._disturbance = costs, noise, disturbance
        self._random = np.random.default_rng(seed)
        self._now = 0.0
        self._rounds = 0
        self._drafted = False

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of a round's draft, and of its verify pass."""
        slower = self._disturbance(self._rounds, self._now) if self._disturbance else (1.0, 1.0)
        noise = np.exp(self._noise * self._random.standard_normal(2)).tolist()
        draft = slower[0] * noise[0] * self._costs.draft_cost(steps)
        verify = slower[1] * noise[1] * self._costs.verify_cost(steps + 1)
        if self._drafted and not steps:
            verify *= 1 + COLD
        self._drafted = steps > 0
        self._now += draft + verify
        self._rounds += 1
        return draft, verify


@dataclass(frozen=True)
class Run:
    """A decoding: for each round the tokens it brought, its draft steps, and its seconds [rounds, 3]."""

    rounds: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return float(self.rounds[:, 2].sum())

    def seconds_at(self, rounds: int) -> float:
        """Seconds of the first ``rounds`` rounds."""
        return float(self.rounds[:rounds, 2].sum())

    def tokens_at(self, seconds: float) -> int:
        """Tokens decoded after this time."""
        return int(self.rounds[self.rounds[:, 2].cumsum() <= seconds, 0].sum())

    def undisturbed_seconds(self, costs: CallCosts, behind: int = 0) -> float:
        """What the same rounds would have cost on a machine without noise and disturbances, behind the first tokens."""
        steps = self.rounds[self.rounds[:, 0].cumsum() > behind, 1].astype(int)
        return float(sum(costs.round_cost(n, n) for n in steps.tolist()))


def decode(trace: Trace, machine: Machine, controller: Controller | None = None, guard: Guard | None = None) -> Run:
    """Decode all requests of a trace in one process; without a controller plainly."""
    rounds: list[tuple[int, int, float]] = []
    for request in trace.requests:
        if controller:
            controller.begin_request()
        position, accepted_at, steps = 0, request.accepted.tolist(), request.steps
        while position < request.tokens:
            room = request.room(position)
            drafting = controller is not None and room > 0 and (guard is None or guard.allows(EXIT_HEAD))
            drafted = draft_length(controller, steps[position], room) if controller and drafting else 0
            accepted = min(drafted, accepted_at[position])
            draft_seconds, verify_seconds = machine.run(drafted)
            if controller:
                outcome = chain_outcome(drafted, accepted, draft_seconds, verify_seconds)
                expected = controller.expected_tokens(outcome)
                controller.observe(outcome)
                if guard:
                    guard.record(outcome, expected, draft_seconds + verify_seconds)
            rounds.append((accepted + 1, drafted, draft_seconds + verify_seconds))
            position += accepted + 1
    return Run(np.array(rounds, np.float64))
