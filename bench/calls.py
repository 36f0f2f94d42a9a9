"""What a round's calls cost, by draft steps and by nodes; and our code around the raw session's call."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.runtime.decoding.session import Session
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.ort_cpu import OrtBinding

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
OFTEN, SELDOM = 4, 1
"""Rounds of each length up to 8, and of longer ones: about the mixture that is met in use."""
PLAIN = 6
"""Rounds without drafts in a row, as plain decoding makes them; the first half only drives out what drafting left behind."""


class Scattered(Controller):
    """Drafts all lengths in a random order that is always the same, 0 included; 0 and 1 come first, where room is short."""

    def __init__(self, longest: int) -> None:
        lengths = [length for length in (0, *LENGTHS) if length <= longest]
        order = [length for length in lengths for _ in range(OFTEN if length <= 8 else SELDOM)]
        random.Random(0).shuffle(order)
        self.left = [length for length in (0, 1, *order) for _ in range(1 if length else PLAIN)]

    def length_ahead(self) -> int | None:
        return None if self.left[0] else 0

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.left[0]

    def observe(self, outcome: RoundOutcome) -> None:
        del self.left[0]

    def state(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def restore(self, state: dict[str, Any]) -> None:
        self.left = [int(length) for length in state["left"]]


class RoundRun(NamedTuple):
    """One round of a session: draft steps, drafted nodes, and the seconds of both engines."""

    steps: int
    nodes: int
    draft_seconds: float
    verify_seconds: float


def rounds_of(session: Session) -> Iterator[RoundRun]:
    """Run a session round by round to its end, or as far as they are asked for."""
    while session.finish_reason is None:
        before = session.stats
        session.step()
        after = session.stats
        yield RoundRun(
            after.draft_steps - before.draft_steps,
            after.drafted - before.drafted,
            after.draft_seconds - before.draft_seconds,
            after.verify_seconds - before.verify_seconds,
        )


class Swept(NamedTuple):
    """Seconds of a round's drafts by steps, and of its verify pass by node count; one node is plain decoding's."""

    draft: list[list[float]]
    verify: list[list[float]]


def sweep(session: Session, controller: Scattered) -> Swept:
    """Medians over the rounds of a session that drafts with this controller, until its lengths or its room are used up.

    What a call costs depends on what those before it and the host's code left in the caches, so it is measured where it is
    made, and amid others of all sizes.
    """
    drafting: dict[int, list[float]] = {}
    verifying: dict[int, list[float]] = {}
    plain = 0
    for steps, nodes, draft_seconds, verify_seconds in rounds_of(session):
        plain = 0 if steps else plain + 1
        if steps:
            drafting.setdefault(steps, []).append(draft_seconds)
        if steps or plain > PLAIN // 2:
            verifying.setdefault(1 + nodes, []).append(verify_seconds)
        if not controller.left:
            break
    return Swept(_medians(drafting), _medians(verifying))


def _medians(samples: dict[int, list[float]]) -> list[list[float]]:
    return [[count, statistics.median(samples[count])] for count in sorted(samples)]


def call_overhead(engines: Engines, repeats: int = 200) -> float | None:
    """Median seconds that our code adds to a draft step over the raw session's call; None where a backend has no such call."""
    assert engines.draft is not None
    draft = engines.draft.bind(engines.verify.new_kv_cache())
    if not isinstance(draft, OrtBinding):
        return None
    draft.forward([1], [0], 0)
    calls: dict[str, Callable[[], Any]] = {
        "own": lambda: draft.forward([1], [0], 0),
        "raw": lambda: draft.run_again(1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return statistics.median(a - b for a, b in zip(seconds["own"], seconds["raw"], strict=True))
