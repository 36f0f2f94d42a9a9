"""Measures the latency of a round's engine calls for each number of draft steps and of verified
nodes."""

import random
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from eesd.controllers import Controller, DraftStep, RoundOutcome
from eesd.runtime.session import Session

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
SHORT = 8
SHORT_ROUNDS = 4
LONG_ROUNDS = 1
"""Each length up to ``SHORT`` has ``SHORT_ROUNDS`` rounds, and each longer length has
``LONG_ROUNDS`` rounds. Controllers choose roughly this mixture."""
PLAIN_ROUNDS = 6
"""Consecutive non-drafting rounds. The first half warms the processor's caches and is discarded."""


class RandomLengths(Controller):
    """Drafts all lengths, including 0, in a shuffled order that is always the same.

    Lengths 0 and 1 come first, so that they are measured even if the text has room for only a few
    tokens.

    Attributes:
        remaining: The lengths of the rounds that are still to come.
    """

    def __init__(self, longest: int) -> None:
        lengths = [length for length in (0, *LENGTHS) if length <= longest]
        order = [
            length
            for length in lengths
            for _ in range(SHORT_ROUNDS if length <= SHORT else LONG_ROUNDS)
        ]
        random.Random(0).shuffle(order)
        self.remaining = [
            length for length in (0, 1, *order) for _ in range(1 if length else PLAIN_ROUNDS)
        ]

    def begin_round(self, width: int) -> int | None:
        return None if self.remaining[0] else 0

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.remaining[0]

    def observe(self, outcome: RoundOutcome) -> None:
        del self.remaining[0]


class RoundTiming(NamedTuple):
    """The draft steps and the drafted nodes of one round, and the seconds that each engine took."""

    steps: int
    nodes: int
    draft_seconds: float
    verify_seconds: float


def timed_rounds(session: Session) -> Iterator[RoundTiming]:
    """Yield the timing of each round, until the session ends or the caller stops."""
    while session.finish_reason is None:
        before = session.stats
        session.step()
        after = session.stats
        yield RoundTiming(
            after.draft_steps - before.draft_steps,
            after.draft_tokens - before.draft_tokens,
            after.draft_seconds - before.draft_seconds,
            after.verify_seconds - before.verify_seconds,
        )


def measure_latency(
    session: Session, controller: RandomLengths
) -> tuple[list[list[float]], list[list[float]]]:
    """Measure engine calls within the rounds of a session that drafts with ``controller``. Single
    calls would not do, because the cost of a call depends on the preceding call.

    Returns two tables of median seconds. The first has the seconds of all draft steps of a round as
    [[steps, seconds], ...], and the second has the seconds of its verify pass as [[nodes, seconds],
    ...]. A pass over one node is a step of plain decoding.
    """
    drafting: dict[int, list[float]] = {}
    verifying: dict[int, list[float]] = {}
    plain = 0
    for steps, nodes, draft_seconds, verify_seconds in timed_rounds(session):
        plain = 0 if steps else plain + 1
        if steps:
            drafting.setdefault(steps, []).append(draft_seconds)
        if steps or plain > PLAIN_ROUNDS // 2:
            verifying.setdefault(1 + nodes, []).append(verify_seconds)
        if not controller.remaining:
            break
    return _medians(drafting), _medians(verifying)


def _medians(samples: dict[int, list[float]]) -> list[list[float]]:
    return [[count, statistics.median(samples[count])] for count in sorted(samples)]
