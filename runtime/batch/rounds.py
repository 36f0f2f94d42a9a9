"""Rounds of a batch: one draft call for each level and group, one verify call for all groups."""

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ParamSpec, TypeVar

from eesd.controllers.call_costs import CallCosts
from eesd.controllers.load_rule import LoadRule
from eesd.runtime.batch.group import Group, mean_slots, used_slots
from eesd.runtime.batch.row import Row
from eesd.runtime.decoding.session import Round, RoundResult
from eesd.runtime.engines.base import Call, JointEngine, Part, RowsBinding, StepOutputs

Report = Callable[[Row, RoundResult], bool]
"""Told what a round brought a row; says whether the row is finished."""
Rounds = Sequence[tuple[Row, Round | None]]
"""Rows of a group and their rounds; None: the row failed when its round began."""
MEASURED_SLOTS = 256
"""Slots of the rows with which calls are timed."""
WORTH_JOINING = 4
"""Nodes that would only fill a call, and that take as long as what a joint call takes more."""
P = ParamSpec("P")
R = TypeVar("R")


class RoundRunner:
    """Runs rounds of the rows of one group, or, with a joint engine, of several."""

    def __init__(self, rule: LoadRule, joint: JointEngine | None) -> None:
        self._rule, self._joint = rule, joint

    def measure(self, group: Group, most_rows: int, most_nodes: int, seconds: float) -> None:
        """Time calls over dummy rows of an empty group for about so many seconds, so that the rule knows what they cost."""
        count, started = 1, time.perf_counter()
        while count <= most_rows and time.perf_counter() - started < seconds:
            group.make_room(1, MEASURED_SLOTS)
            for nodes in (1, 2, 4, 8):
                if nodes <= most_nodes:
                    _measure(group, group.verify, self._rule.verify, count, nodes)
            if group.draft is not None:
                _measure(group, group.draft, self._rule.draft, count, 1)
            count *= 2
        group.make_room(1)

    def run(self, groups: Sequence[Group], report: Report, pieces: Sequence[Part] = ()) -> list[Row]:
        """Run a round of all rows of some groups.

        Args:
            groups: The groups; more than one needs a joint engine.
            report: Told what the round brought each row.
            pieces: Of prompts, for the same verify call; they need a joint engine.

        Returns:
            The rows that are finished, or failed alone; they still hold their place.
        """
        started = time.perf_counter()
        for group in groups:
            group.make_room(1)
        rows, slots, rule = [row for group in groups for row in group.active], mean_slots(groups), self._rule
        rule.begin_round()
        least = rule.step_cost(len(rows), slots)
        for row in rows:
            if row.controller is not None:
                row.controller.least = least
        rounds = [[(row, _alone(row, row.session.begin)) for row in group.active] for group in groups]
        self._draft(groups, rounds, slots)
        everyone = [pair for own in rounds for pair in own]
        levels = rule.levels(_sums([_values(row, current) for row, current in everyone]), len(rows), slots)
        calls = [[_call(row, current, levels) for row, current in own] for own in rounds]
        called = time.perf_counter()
        outputs, nodes = self._verify(groups, calls, pieces)
        seconds = time.perf_counter() - called
        tokens, finished = 0, []
        for (row, current), output in zip(everyone, outputs, strict=True):
            result = _alone(row, row.session.commit, current, output, seconds) if row.error is None and current else None
            ended = _alone(row, report, row, result) if result else None
            tokens += len(result.tokens) if result else 0
            if ended or row.error is not None:
                finished.append(row)
        if not any(current and current.tree.steps for _, current in everyone):
            rule.fade()
        verifying = time.perf_counter() - called
        self._note_time(len(rows), nodes, slots, tokens, called - started, verifying, shared=bool(pieces))
        for group, own in zip(groups, calls, strict=True):
            group.drafted = max(len(call.tokens) for call in own) - 1
        return finished

    def _verify(
        self, groups: Sequence[Group], calls: Sequence[Sequence[Call]], pieces: Sequence[Part]
    ) -> tuple[list[StepOutputs], int]:
        """One call for all groups, and for pieces of prompts. Returns what rows get, and how many nodes that took."""
        for group, own in zip(groups, calls, strict=True):
            group.make_room(max(len(call.tokens) for call in own))
        if len(groups) == 1 and not pieces and groups[0].rows.ragged:
            return groups[0].verify.forward(0, calls[0]), _nodes(calls[0])
        if len(groups) == 1 and not pieces:
            filled = len(calls[0]) * max(len(call.tokens) for call in calls[0])
            if self._joint is None or filled - _nodes(calls[0]) < WORTH_JOINING:
                return groups[0].verify.forward(0, calls[0]), filled
        assert self._joint is not None
        parts = [Part(group.rows, 0, own) for group, own in zip(groups, calls, strict=True)]
        outputs = self._joint.forward([*parts, *pieces])
        return [output for own in outputs[: len(parts)] for output in own], sum(map(_nodes, calls))

    def _note_time(
        self, count: int, nodes: int, slots: float, tokens: int, before: float, verifying: float, shared: bool
    ) -> None:
        """Tell the rule what a round cost, in seconds. What a call cost that a prompt ``shared`` is not known apart."""
        if shared:
            verifying = min(verifying, self._rule.verify.seconds(count, nodes / count, slots))
        else:
            self._rule.verify.add(count, nodes / count, slots, verifying)
        self._rule.add_round(count, slots, tokens, before + verifying)

    def _draft(self, groups: Sequence[Group], rounds: Sequence[Rounds], slots: float) -> None:
        """Draft level by level, while the rule finds it worth what it costs all rows. Rows of a fixed length draft it."""
        everyone, depth = [pair for own in rounds for pair in own], 0
        while True:
            wanting = [(row, current) for row, current in everyone if current and current.drafting]
            free = [(row, current) for row, current in wanting if not row.fixed]
            if free and not self._is_worth_it(everyone, free, depth, slots):
                for _, current in free:
                    current.drafting = False
                wanting = [pair for pair in wanting if pair[0].fixed]
            if not wanting:
                return
            depth += 1
            started = time.perf_counter()
            count = sum(_draft_level(group, own, depth) for group, own in zip(groups, rounds, strict=True))
            self._rule.draft.add(count, 1, slots, time.perf_counter() - started)

    def _is_worth_it(self, rounds: Rounds, free: Sequence[tuple[Row, Round]], depth: int, slots: float) -> bool:
        """Whether another level of drafts, of the rows ``free``, pays."""
        drafting, count = {id(row) for row, _ in free}, len(rounds)
        certain = _sums([_values(row, current)[depth:] for row, current in rounds if id(row) not in drafting])
        controllers = [row.controller for row, _ in free if row.controller is not None]
        if not depth:
            return self._rule.begins([one.first for one in controllers], count, slots, certain)
        return self._rule.goes_on([(one.reach, one.following) for one in controllers], depth, count, slots, certain)


def _measure(group: Group, binding: RowsBinding, costs: CallCosts, count: int, nodes: int) -> None:
    # Rows that pay for their own text alone get one: what is in its slots does not matter.
    slot = min(MEASURED_SLOTS, group.rows.slots) - nodes if group.rows.ragged else 0
    calls = [Call([0] * nodes, range(slot, slot + nodes), slot)] * count
    for again in range(3):
        started = time.perf_counter()
        binding.forward(0, calls)
        if again:  # the first call prepares the others
            costs.add(count, nodes, slot + nodes if group.rows.ragged else group.rows.slots, time.perf_counter() - started)


def _nodes(calls: Sequence[Call]) -> int:
    return sum(len(call.tokens) for call in calls)


def _draft_level(group: Group, rounds: Rounds, depth: int) -> int:
    """Run a draft step, the ``depth``-th, of the rows of a group that draft. Rows between them take part in vain.

    Returns:
        Rows that took part.
    """
    wanting = [(number, row, current) for number, (row, current) in enumerate(rounds) if current and current.drafting]
    if not wanting:
        return 0
    assert group.draft is not None
    started = time.perf_counter()
    group.make_room(depth)
    first, last = wanting[0][0], wanting[-1][0]
    calls = [_idle_call(row) for row, _ in rounds[first : last + 1]]
    for number, row, current in wanting:
        call = row.session.next_draft(current)
        assert call is not None
        calls[number - first] = call
    outputs = group.draft.forward(first, calls)
    seconds = time.perf_counter() - started
    for number, row, current in wanting:
        _alone(row, row.session.drafted, current, outputs[number - first], seconds)
        current.drafting = current.drafting and row.error is None
    return len(calls)


def _alone(row: Row, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Do something for one row. If it fails, the row has failed, and the others go on."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        row.error = error
        return None


def _idle_call(row: Row) -> Call:
    """A node that only fills a call. It is written where the root will be."""
    slot = used_slots(row)
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
