"""Many simulated starts of a process: is drafting slower than plain decoding, and does a disturbance stop it for good?"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from eesd.bench.replay.costs import CallCosts, CostModel
from eesd.bench.replay.machine import Disturbance, Machine, Run, burst, decode, stall
from eesd.bench.replay.traces import Trace
from eesd.controllers import make_controller
from eesd.runtime.decoding.guard import Guard

BURST_SECONDS = 1.0
FACTORS = ((20.0, 1.0), (1.0, 5.0), (10.0, 10.0), (2.0, 2.0), (1.5, 1.0))
"""How much slower a burst makes the draft and the verify pass."""
STALLS = ((1.0, 400.0), (1000.0, 1.0))
"""The same for a stall, which slows a single round."""
NOISE = (0.02, 0.15)
"""Range of the standard deviation of the logarithm of a call's seconds."""
LATEST = 300
"""Last round in which a disturbance begins."""
LAST_PART = 0.75
"""Drafting stopped for good if it is slower than half-way between plain decoding and itself undisturbed behind this share."""


@dataclass(frozen=True)
class Start:
    """One start, decoded plainly, undisturbed, and disturbed.

    Attributes:
        tokens: Tokens decoded.
        first: Speed over plain decoding in the first request, undisturbed.
        speed: Speed over plain decoding in all requests, undisturbed.
        lost: Tokens that the disturbance cost after its end: the time of other decisions, at the undisturbed speed.
        stopped: Whether drafting did not come back.
    """

    tokens: int
    first: float
    speed: float
    lost: float
    stopped: bool


def simulate_starts(trace: Trace, costs: CostModel, spec: str, starts: int) -> Iterator[Start]:
    """Start ``starts`` processes that decode the trace's requests in an order of their own, each disturbed in another way.

    Args:
        trace: The trace.
        costs: What rounds cost on an undisturbed machine.
        spec: The controller and its options.
        starts: Number of processes.
    """
    seconds = costs.calls.scaled(costs.plain_seconds)
    for seed in range(starts):
        random = np.random.default_rng(seed)
        order = random.permutation(len(trace.requests))
        own = Trace(tuple(trace.requests[i] for i in order), trace.origin)
        begin, noise = int(random.integers(LATEST)) if seed % 2 else seed // 2 % 16, float(random.uniform(*NOISE))
        kinds = [partial(burst, begin, *factors, BURST_SECONDS) for factors in FACTORS]
        kinds += [partial(stall, begin, *factors) for factors in STALLS]
        yield _start(own, seconds, spec, seed, noise, kinds[int(random.integers(len(kinds)))](), begin)


def _start(trace: Trace, costs: CallCosts, spec: str, seed: int, noise: float, disturbance: Disturbance, begin: int) -> Start:
    def run(text: Trace, drafting: bool, disturbed: Disturbance | None = None) -> Run:
        machine = Machine(costs, noise, disturbed, seed)
        return decode(text, machine, *((make_controller(spec, seed, trace.prior), Guard()) if drafting else ()))

    first = Trace(trace.requests[:1], trace.origin)
    plain, usual, disturbed = run(trace, False), run(trace, True), run(trace, True, disturbance)
    tokens = sum(request.tokens for request in trace.requests)
    behind = disturbed.tokens_at(disturbed.seconds_at(begin) + BURST_SECONDS)
    rate = tokens / usual.undisturbed_seconds(costs)
    last = int(tokens * LAST_PART)
    plainly, *drafting = (part.undisturbed_seconds(costs, last) for part in (plain, usual, disturbed))
    return Start(
        tokens=tokens,
        first=run(first, False).seconds / run(first, True).seconds,
        speed=plain.seconds / usual.seconds,
        lost=(disturbed.undisturbed_seconds(costs, behind) - usual.undisturbed_seconds(costs, behind)) * rate,
        stopped=drafting[0] < 0.95 * plainly and 1 / drafting[1] < (1 / plainly + 1 / drafting[0]) / 2,
    )
