"""A simulated machine. It runs rounds of the real controller and guard on a trace with noise and
disturbances, and uses no clock."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eesd.bench.replay.costs import CallCosts
from eesd.bench.replay.replay import chain_outcome, draft_length, teach
from eesd.bench.replay.traces import Trace
from eesd.controllers import Controller
from eesd.controllers.base import EXIT
from eesd.runtime.decoding.guard import Guard

COLD = 0.1
"""A plain round right after a drafting round is slower by this share, because the draft has filled
the processor's caches."""

STALL_SECONDS = 4e-3
"""Mean length of a stall, during which another program has the processor."""

Disturbance = Callable[[int, float], tuple[float, float]]
"""Maps the rounds and seconds that have passed to factors of the draft's and the verify pass's
seconds."""


def burst(first: int, draft: float, verify: float, seconds: float = 1.0) -> Disturbance:
    """Return a disturbance that slows calls down by these factors. It begins at round ``first`` and
    lasts ``seconds``."""
    began: list[float] = []

    def factors(rounds: int, now: float) -> tuple[float, float]:
        if rounds >= first and not began:
            began.append(now)
        return (draft, verify) if began and now - began[0] < seconds else (1.0, 1.0)

    return factors


def changing_load(random: np.random.Generator) -> Disturbance:
    """Return the disturbance by other programs that come and go. The load changes every 0.7 seconds
    on average. Calls are then up to three times slower, or run at full speed."""
    until = 0.0
    factors = (1.0, 1.0)

    def current(_: int, now: float) -> tuple[float, float]:
        nonlocal until, factors
        if now >= until:
            slower = float(np.exp(random.uniform(0, np.log(3)))) if random.random() < 0.6 else 1.0
            # A draft, which is small, may be slowed more or less than a pass.
            factors = slower ** float(random.uniform(0.8, 1.25)), slower
            until = now + float(random.exponential(0.7))
        return factors

    return current


class Machine:
    """Gives the seconds of calls. They are the seconds of ``costs`` with lognormal noise. A
    disturbance slows calls down, and calls stall at random times.

    ``stalls`` is the mean number of stalls per second. A stall lasts 4 ms on average, while another
    program has the processor.
    """

    def __init__(
        self,
        costs: CallCosts,
        noise: float = 0.05,
        disturbance: Disturbance | None = None,
        seed: int = 0,
        stalls: float = 0.0,
    ) -> None:
        self._costs = costs
        self._noise = noise
        self._disturbance = disturbance
        self._stalls = stalls
        self._random = np.random.default_rng(seed)
        self._now = 0.0
        self._rounds = 0
        self._drafted = False

    def run(self, steps: int) -> tuple[float, float]:
        """Return the seconds of a round's draft and of its verify pass."""
        slower = self._disturbance(self._rounds, self._now) if self._disturbance else (1.0, 1.0)
        noise = np.exp(self._noise * self._random.standard_normal(2)).tolist()
        draft = slower[0] * noise[0] * self._costs.draft_cost(steps)
        verify = slower[1] * noise[1] * self._costs.verify_cost(steps + 1)
        if self._drafted and not steps:
            verify *= 1 + COLD
        draft = draft + self._stalled(draft)
        verify = verify + self._stalled(verify)
        self._drafted = steps > 0
        self._now += draft + verify
        self._rounds += 1
        return draft, verify

    def _stalled(self, seconds: float) -> float:
        """Return the seconds of stalls during a call that takes ``seconds``."""
        if not self._stalls:
            return 0.0
        return float(
            self._random.exponential(
                STALL_SECONDS, self._random.poisson(self._stalls * seconds)
            ).sum()
        )


@dataclass(frozen=True)
class Run:
    """One decoding run. ``rounds`` [rounds, 3] has the committed tokens, the draft steps and the
    seconds of each round."""

    rounds: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Total seconds of all rounds."""
        return float(self.rounds[:, 2].sum())

    def lost(self, costs: CallCosts, first: int, last: float = np.inf) -> float:
        """Return the time that drafting lost on tokens ``first`` to ``last``. It is a share of the
        time that plain decoding takes, without noise and disturbances."""
        ends = self.rounds[:, 0].cumsum()
        steps = self.rounds[:, 1].astype(int)
        plain = costs.verify_cost(1)
        spent = np.array([costs.round_cost(n, n) for n in steps.tolist()])
        spent[1:][(steps[:-1] > 0) & (steps[1:] == 0)] += COLD * plain
        part = (ends > first) & (ends <= last)
        return float(spent[part].sum() / (plain * self.rounds[part, 0].sum()) - 1)

    def drafting(self, first: int) -> float:
        """Return the share of rounds after the first ``first`` tokens that drafted."""
        return float((self.rounds[self.rounds[:, 0].cumsum() > first, 1] > 0).mean())


def decode(
    trace: Trace, machine: Machine, controller: Controller | None = None, guard: Guard | None = None
) -> Run:
    """Decode all requests of a trace in one process. Without a controller, decoding is plain."""
    rounds: list[tuple[int, int, float]] = []
    for request in trace.requests:
        if controller:
            controller.begin_request()
        position = 0
        accepted_at = request.accepted.tolist()
        steps = request.steps
        while position < request.tokens:
            room = request.room(position)
            drafted = 0
            if controller and room > 0 and (guard is None or guard.allows(EXIT)):
                drafted = draft_length(controller, steps[position], room)
            accepted = min(drafted, accepted_at[position])
            draft_seconds, verify_seconds = machine.run(drafted)
            if controller:
                expected = controller.expected_tokens(drafted) if drafted else None
                outcome = chain_outcome(drafted, accepted, draft_seconds, verify_seconds, expected)
                teach(controller, outcome)
                if guard:
                    guard.observe(outcome)
            rounds.append((accepted + 1, drafted, draft_seconds + verify_seconds))
            position += accepted + 1
    return Run(np.array(rounds, np.float64))
