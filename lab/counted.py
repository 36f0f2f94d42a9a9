"""Runs sessions on the clock of another device. Each call advances the runtime's clock by the cost
that the call has in a cost model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from eesd.bench.replay.costs import CostModel
from eesd.runtime.engines.base import Call, StepOutputs
from eesd.runtime.llm import LLM

Forward = Callable[[Sequence[Call]], list[StepOutputs]]


class CountedClock:
    """Simulated seconds of a device that is not present. The tokens and the bits come from the
    engines of this machine. Controllers, guard and text drafter see these seconds, and decide as
    they would on that device. The host takes no time, and a piece of a prompt takes the time of a
    plain step.
    """

    def __init__(self, costs: CostModel) -> None:
        self.seconds = 0.0
        self._costs = costs.calls.scaled(costs.plain_seconds)
        self._steps = 0

    @contextmanager
    def timing(self, llm: LLM) -> Iterator[None]:
        """Count the calls of the LLM's engines, which other LLMs may share."""
        verify = llm.engines.verify
        draft = llm.engines.draft
        assert draft is not None
        with (
            patch("time.perf_counter", lambda: self.seconds),
            patch.object(verify, "forward", _watched(verify.forward, self._verified)),
            patch.object(draft, "forward", _watched(draft.forward, self._drafted)),
        ):
            yield

    def _verified(self, calls: Sequence[Call], _: Sequence[StepOutputs]) -> None:
        self.seconds += self._costs.verify_cost(
            max(sum(len(call.tokens) for call in calls if call.logits), 1)
        )
        self._steps = 0

    def _drafted(self, _: Sequence[Call], outputs: Sequence[StepOutputs]) -> None:
        before = self._costs.draft_cost(self._steps)
        self._steps += max(output.levels for output in outputs)
        self.seconds += self._costs.draft_cost(self._steps) - before


def _watched(
    forward: Forward, called: Callable[[Sequence[Call], Sequence[StepOutputs]], None]
) -> Forward:
    def watched(calls: Sequence[Call]) -> list[StepOutputs]:
        outputs = forward(calls)
        called(calls, outputs)
        return outputs

    return watched
