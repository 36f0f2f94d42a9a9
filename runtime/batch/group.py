"""Rows that run together: one draft call for each level, one verify call for each round."""

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from eesd.controllers.call_costs import CallCosts
from eesd.controllers.load_rule import LoadRule
from eesd.runtime.batch.row import Row
from eesd.runtime.batch.row_exactness import check_rows
from eesd.runtime.decoding.session import Round, RoundResult
from eesd.runtime.engines.base import Call, KVCache, Rows, RowsBinding, RowsEngine, Values

Report = Callable[[Row, RoundResult], bool]
"""Told what a round brought a row; says whether the row is finished."""
Rounds = Sequence[tuple[Row, Round | None]]
"""Rows and their rounds; None: the row failed when its round began."""
MEASURED_SLOTS = 256
"""Slots of the rows with which calls are timed."""
P = ParamSpec("P")
R = TypeVar("R")


class RowCache:
    """What a session in a group sees of its keys and values. The group makes room; drafts are chains, so nothing is moved."""

    def reserve(self, slots: int) -> None:
        pass

    def reset(self) -> None:
        raise AssertionError("a row begins with its prompt's keys and values")

    def compact(self, start: int, sources: list[int]) -> None:
        raise AssertionError("the accepted nodes of a chain are in their place")

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        raise AssertionError("the group owns the keys and values")

    def values(self, start: int, stop: int) -> Values:
        raise AssertionError("the group owns the keys and values")

    def fill(self, start: int, values: Values) -> None:
        raise AssertionError("the group owns the keys and values")


ROW_CACHE = RowCache()


class Group:
    """Rows with texts of similar length over one piece of memory. The rows in use are the first ones.

    Attributes:
        active: The rows, in the order of the memory.
        most_slots: Texts longer than this belong to another group; None: there is no other.
        drafted: Levels that the last round verified.
    """

    def __init__(
        self,
        rows: Rows,
        verify: RowsBinding,
        draft: RowsBinding | None,
        rule: LoadRule,
        longest: int,
        most_slots: int | None,
    ) -> None:
        """``longest`` is the most nodes that a round verifies besides the root."""
        self.active: list[Row] = []
        self.most_slots = most_slots
        self.drafted = 0
        self._rows, self._verify, self._draft, self._rule, self._longest = rows, verify, draft, rule, longest

    def check(self, engine: RowsEngine, most_rows: int) -> None:
        """Raise :class:`EESDError` if rows change each other's logits. ``engine`` is the verify engine. The group is empty."""
        check_rows(engine, self._rows, self._verify, most_rows)

    def measure(self, most_rows: int, seconds: float) -> None:
        """Time calls over dummy rows, so that the rule knows what they cost. Takes about this many seconds."""
        count, started = 1, time.perf_counter()
        while count <= most_rows and time.perf_counter() - started < seconds:
            self._make_room(MEASURED_SLOTS)
            for nodes in (1, 2, 4, 8):
                if nodes <= 1 + self._longest:
                    self._measure(self._verify, self._rule.verify, count, nodes)
            if self._draft is not None:
                self._measure(self._draft, self._rule.draft, count, 1)
            count *= 2
        self._make_room(1)

    def _measure(self, binding: RowsBinding, costs: CallCosts, count: int, nodes: int) -> None:
        calls = [Call([0] * nodes, range(nodes), 0)] * count
        for again in range(3):
            started = time.perf_counter()
            binding.forward(0, calls)
            if again:  # the first call prepares the others
                costs.add(count, nodes, self._rows.slots, time.perf_counter() - started)

    def join(self, row: Row, kv_cache: KVCache) -> None:
        """Take a row whose prompt is in a cache of its own."""
        used = row.session.prefilled
        self._make_room(used + 1 + self._longest)
        self._rows.take(len(self.active), kv_cache, used)
        row.session.move_to(ROW_CACHE)
        self.active.append(row)

    def take_over(self, other: "Group", row: Row) -> None:
        """Take a row from another group."""
        used, at = _used(row), other.active.index(row)
        self._make_room(used + 1 + self._longest)
        self._rows.take_over(len(self.active), other._rows, at, used)
        other.leave(row)
        self.active.append(row)

    def leave(self, row: Row) -> None:
        """Give up a row. The last one takes its place."""
        at, last = self.active.index(row), self.active.pop()
        if last is not row:
            self._rows.move(len(self.active), at, _used(last))
            self.active[at] = last

    def values(self, row: Row, start: int, stop: int) -> Values:
        """Keys and values of a row's slots from ``start`` to ``stop - 1``."""
        return self._rows.values(self.active.index(row), start, stop)

    def has_outgrown(self, row: Row) -> bool:
        return self.most_slots is not None and _used(row) + 1 + self._longest > self.most_slots

    def round(self, report: Report) -> list[Row]:
        """Run a round of all rows. Returns those that are finished, or failed alone; they still hold their place."""
        started = time.perf_counter()
        self._make_room(1)
        count, slots = len(self.active), self._rows.slots
        self._rule.begin_round()
        least = self._rule.step_cost(count, slots)
        for row in self.active:
            if row.controller is not None:
                row.controller.least = least
        rounds = [(row, _alone(row, row.session.begin)) for row in self.active]
        self._run_draft(rounds)
        levels = self._rule.levels(_sums([_values(row, current) for row, current in rounds]), count, slots)
        calls = [_call(row, current, levels) for row, current in rounds]
        nodes = max(len(call.tokens) for call in calls)
        called = time.perf_counter()
        outputs = self._verify.forward(0, calls)
        seconds = time.perf_counter() - called
        tokens, finished = 0, []
        for (row, current), output in zip(rounds, outputs, strict=True):
            result = _alone(row, row.session.commit, current, output, seconds) if row.error is None and current else None
            ended = _alone(row, report, row, result) if result else None
            tokens += len(result.tokens) if result else 0
            if ended or row.error is not None:
                finished.append(row)
        ended_at = time.perf_counter()
        self._rule.verify.add(count, nodes, slots, ended_at - called)
        if not any(current and current.tree.steps for _, current in rounds):
            self._rule.fade()
        self._rule.add_round(count, slots, tokens, ended_at - started)
        self.drafted = nodes - 1
        return finished

    def _run_draft(self, rounds: Rounds) -> None:
        """Draft level by level, while the rule finds it worth what it costs all rows. Rows of a fixed length draft it."""
        count, slots, depth = len(rounds), self._rows.slots, 0
        while True:
            wanting = [(row, current) for row, current in rounds if current and current.drafting]
            free = [(row, current) for row, current in wanting if not row.fixed]
            if free and not self._is_worth_it(rounds, free, depth, count, slots):
                for _, current in free:
                    current.drafting = False
                wanting = [pair for pair in wanting if pair[0].fixed]
            if not wanting:
                return
            depth += 1
            self._draft_level(rounds, wanting, slots)

    def _is_worth_it(self, rounds: Rounds, free: Sequence[tuple[Row, Round]], depth: int, count: int, slots: int) -> bool:
        """Whether another level of drafts, of the rows ``free``, pays."""
        drafting = {id(row) for row, _ in free}
        certain = _sums([_values(row, current)[depth:] for row, current in rounds if id(row) not in drafting])
        controllers = [row.controller for row, _ in free if row.controller is not None]
        if not depth:
            return self._rule.begins([one.first for one in controllers], count, slots, certain)
        return self._rule.goes_on([(one.reach, one.following) for one in controllers], depth, count, slots, certain)

    def _draft_level(self, rounds: Rounds, wanting: Sequence[tuple[Row, Round]], slots: int) -> None:
        """Run a draft step of the rows ``wanting``. Rows between them take part, and what they get is forgotten."""
        assert self._draft is not None
        started = time.perf_counter()
        numbers = {id(row): number for number, (row, _) in enumerate(rounds)}
        at = [numbers[id(row)] for row, _ in wanting]
        first, last = min(at), max(at)
        calls = [_idle_call(row) for row, _ in rounds[first : last + 1]]
        for number, (row, current) in zip(at, wanting, strict=True):
            call = row.session.next_draft(current)
            assert call is not None
            calls[number - first] = call
        outputs = self._draft.forward(first, calls)
        seconds = time.perf_counter() - started
        for number, (row, current) in zip(at, wanting, strict=True):
            _alone(row, row.session.drafted, current, outputs[number - first], seconds)
            current.drafting = current.drafting and row.error is None
        self._rule.draft.add(len(calls), 1, slots, time.perf_counter() - started)

    def _make_room(self, slots: int) -> None:
        """Have room for a text that needs so many slots, and for a round of the rows that there are."""
        used = [_used(row) for row in self.active]
        self._rows.resize(max(slots, max(used, default=0) + 1 + self._longest), used)


def _alone(row: Row, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Do something for one row. If it fails, the row has failed, and the others go on."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        row.error = error
        return None


def _used(row: Row) -> int:
    """Slots whose keys and values count: all but the last token's."""
    return len(row.session.tokens) - 1


def _idle_call(row: Row) -> Call:
    """A node that only fills a call. It is written where the root will be."""
    slot = _used(row)
    return Call([0], [slot], slot)


def _call(row: Row, current: Round | None, levels: int) -> Call:
    """What a row verifies. The length of a row with rejection sampling is fixed."""
    call = None
    if current is not None and row.error is None:
        call = _alone(row, row.session.complete, current, None if row.fixed else levels)
    return call or _idle_call(row)


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
