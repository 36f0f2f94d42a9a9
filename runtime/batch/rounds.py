"""Rounds of a batch: one draft call for each level, one verify call, which also takes pieces of prompts."""

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ParamSpec, TypeVar

from eesd.controllers.call_costs import CallCosts
from eesd.controllers.load_rule import LoadRule
from eesd.runtime.batch.row import Row
from eesd.runtime.decoding.session import Round, RoundResult
from eesd.runtime.engines.base import Call, Engine, KVCache

Report = Callable[[Row, RoundResult], bool]
"""Told what a round brought a row; says whether the row is finished."""
Rounds = Sequence[tuple[Row, Round | None]]
"""Rows and their rounds; None: the row failed when its round began."""
Pieces = Sequence[tuple[Row, Call]]
"""Rows whose prompt is not complete, and the calls of its next pieces."""
MEASURED_SLOTS = 256
"""Slots of the rows with which calls are timed."""
P = ParamSpec("P")
R = TypeVar("R")


class RoundRunner:
    """Runs rounds.

    Attributes:
        drafted: Levels that the last round verified.
    """

    def __init__(self, rule: LoadRule, verify: Engine, draft: Engine | None) -> None:
        self._rule, self._verify, self._draft = rule, verify, draft
        self.drafted = 0

    def measure(self, kv_caches: Sequence[KVCache], most_nodes: int, seconds: float) -> None:
        """Time calls over caches without texts for about so many seconds, so that the rule knows what they cost."""
        count, started, slots = 1, time.perf_counter(), min(MEASURED_SLOTS, self._verify.manifest.max_seq_len)
        while count <= len(kv_caches) and time.perf_counter() - started < seconds:
            used = kv_caches[:count]
            for kv_cache in used:
                kv_cache.reserve(slots)
            for nodes in (1, 2, 4, 8):
                if nodes <= min(most_nodes, slots):
                    _measure(self._verify, self._rule.verify, used, nodes, slots)
            if self._draft is not None:
                _measure(self._draft, self._rule.draft, used, 1, slots)
            count *= 2
        for kv_cache in kv_caches:
            kv_cache.reset()

    def run(self, rows: Sequence[Row], report: Report, pieces: Pieces = ()) -> list[Row]:
        """Run a round.

        Args:
            rows: Rows that decode.
            report: Told what the round brought each of them.
            pieces: Of prompts, for the same verify call.

        Returns:
            The rows that are finished, or failed alone.
        """
        started = time.perf_counter()
        slots = self._verify.work([_root_call(row) for row in rows]).slots if rows else 0.0
        rounds = self._begin(rows, slots)
        self._draft_levels(rounds, slots)
        levels = self._rule.levels(_sums([_values(row, current) for row, current in rounds]), len(rows), slots) if rows else 0
        planned = [(row, current, call) for row, current in rounds if current and (call := _call(row, current, levels))]
        calls = [call for _, _, call in planned]
        called = time.perf_counter()
        every = [*calls, *(call for _, call in pieces)]
        outputs = self._verify.forward(every) if every else []
        seconds, tokens, finished = time.perf_counter() - called, 0, []
        for (row, current, _), output in zip(planned, outputs, strict=False):
            result = _alone(row, row.session.commit, current, output, seconds)
            tokens += len(result.tokens) if result else 0
            if result and _alone(row, report, row, result):
                finished.append(row)
        for (row, piece), output in zip(pieces, outputs[len(calls) :], strict=True):
            _alone(row, row.add_piece, piece, output, seconds)
        if rows and not any(current and current.tree.steps for _, current in rounds):
            self._rule.fade()
        if calls:
            self.drafted = max(len(call.tokens) for call in calls) - 1
            self._note_time(calls, slots, tokens, called - started, time.perf_counter() - called, shared=bool(pieces))
        return [*finished, *(row for row in (*rows, *(row for row, _ in pieces)) if row.error is not None)]

    def _begin(self, rows: Sequence[Row], slots: float) -> Rounds:
        """Begin the rounds of all rows."""
        if not rows:
            return []
        self._rule.begin_round()
        least = self._rule.step_cost(len(rows), slots)
        for row in rows:
            if row.controller is not None:
                row.controller.least = least
        return [(row, _alone(row, row.session.begin)) for row in rows]

    def _note_time(
        self, calls: Sequence[Call], slots: float, tokens: int, before: float, verifying: float, shared: bool
    ) -> None:
        """Tell the rule what a round cost, in seconds. What a call cost that a prompt ``shared`` is not known apart."""
        count = len(calls)
        nodes = self._verify.work(calls).nodes / count
        if shared:
            verifying = min(verifying, self._rule.verify.seconds(count, nodes, slots))
        else:
            self._rule.verify.add(count, nodes, slots, verifying)
        self._rule.add_round(count, slots, tokens, before + verifying)

    def _draft_levels(self, rounds: Rounds, slots: float) -> None:
        """Draft level by level, while the rule finds it worth what it costs all rows. Rows of a fixed length draft it."""
        depth = 0
        while True:
            wanting = [(row, current) for row, current in rounds if current and current.drafting]
            free = [(row, current) for row, current in wanting if not row.fixed]
            if free and not self._is_worth_it(rounds, free, depth, slots):
                for _, current in free:
                    current.drafting = False
                wanting = [pair for pair in wanting if pair[0].fixed]
            if not wanting:
                return
            depth += 1
            self._draft_level(wanting, slots)

    def _draft_level(self, wanting: Sequence[tuple[Row, Round]], slots: float) -> None:
        """Run a draft step of some rows."""
        assert self._draft is not None
        started = time.perf_counter()
        planned = [(row, current, _alone(row, row.session.next_draft, current)) for row, current in wanting]
        calls = [call for _, _, call in planned if call is not None]
        outputs = iter(self._draft.forward(calls)) if calls else iter(())
        seconds = time.perf_counter() - started
        for row, current, call in planned:
            if call is not None:
                _alone(row, row.session.drafted, current, next(outputs), seconds)
            current.drafting = current.drafting and row.error is None
        if calls:
            self._rule.draft.add(len(calls), 1, slots, time.perf_counter() - started)

    def _is_worth_it(self, rounds: Rounds, free: Sequence[tuple[Row, Round]], depth: int, slots: float) -> bool:
        """Whether another level of drafts, of the rows ``free``, pays."""
        drafting, count = {id(row) for row, _ in free}, len(rounds)
        certain = _sums([_values(row, current)[depth:] for row, current in rounds if id(row) not in drafting])
        controllers = [row.controller for row, _ in free if row.controller is not None]
        if not depth:
            return self._rule.begins([one.first for one in controllers], count, slots, certain)
        return self._rule.goes_on([(one.reach, one.following) for one in controllers], depth, count, slots, certain)


def _measure(engine: Engine, costs: CallCosts, kv_caches: Sequence[KVCache], nodes: int, slots: int) -> None:
    first = slots - nodes
    calls = [Call(kv_cache, [0] * nodes, range(first, slots), first) for kv_cache in kv_caches]
    for again in range(3):
        started = time.perf_counter()
        engine.forward(calls)
        if again:  # the first call prepares the others
            costs.add(len(calls), nodes, engine.work(calls).slots, time.perf_counter() - started)


def _alone(row: Row, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Do something for one row. If it fails, the row has failed, and the others go on."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        row.error = error
        return None


def _root_call(row: Row) -> Call:
    """The call of a row that drafts nothing."""
    slot = len(row.session.tokens) - 1
    return Call(row.kv_cache, row.session.tokens[-1:], (slot,), slot)


def _call(row: Row, current: Round, levels: int) -> Call | None:
    """What a row verifies; None if it has failed. The length of a row with rejection sampling is fixed."""
    return None if row.error else _alone(row, row.session.complete, current, None if row.fixed else levels)


def _values(row: Row, current: Round | None) -> Sequence[float]:
    """For each level that a row has drafted, the chance that it is accepted."""
    if current is None:
        return []
    copied = len(current.tree.nodes) - 1 if not current.tree.steps else 0
    if copied:
        return current.proposal.values[:copied]
    if row.fixed:
        return [1.0] * current.tree.steps  # whatever they are worth, they are verified
    return row.controller.values if row.controller is not None else []


def _sums(values: Sequence[Sequence[float]]) -> list[float]:
    """For each level, the tokens that all rows together expect of it."""
    return [sum(level) for level in zip_longest(*values, fillvalue=0.0)]
