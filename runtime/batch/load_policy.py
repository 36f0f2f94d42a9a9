"""How the rows of a batch draft together: as far as it pays for the whole batch."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product, zip_longest
from weakref import WeakKeyDictionary

from eesd.controllers.call_costs import CallCosts
from eesd.controllers.load_rule import LoadRule, RowController, RowTextRule
from eesd.runtime.decoding.draft_tree import Share
from eesd.runtime.decoding.round import Drafting, Policy, Round
from eesd.runtime.decoding.text_drafter import TextDrafter
from eesd.runtime.engines.base import Call, Engine, KVCache
from eesd.runtime.session import Session

MEASURED_SLOTS = 256
"""Slots of the rows with which calls are timed."""
PROMPTS_SHARE, FEW_ROWS = 0.7, 8
"""Pieces of prompts take at most this share of a round's time, if the round has FEW_ROWS rows or more. Beside n fewer
rows they take FEW_ROWS / n times as much: n rows leave the processor half idle, and new rows share their calls."""
LEAST_PART = 0.05
"""Share of a call's time that a piece of a prompt takes at least."""
LATELY, MOST_STRETCH = 0.1, 3.0
"""Weight of the last round in what rounds take lately, and the most that one counts, in plain rounds."""
PIECES = (8, 12, 16, 24, 32, 48, 64, 96)
"""Tokens that pieces of prompts beside rows have at most; or as many as the batch's options say."""


class LoadPolicy(Policy):
    """By the load: :class:`~eesd.controllers.load_rule.LoadRule` decides."""

    def __init__(self, rule: LoadRule, verify: Engine, draft: Engine | None) -> None:
        self._rule, self._verify, self._draft = rule, verify, draft
        self._known: WeakKeyDictionary[Session, Drafting] = WeakKeyDictionary()
        self._prompts = CallCosts()
        """What pieces of prompts add to a round."""
        self._stretch = 1.0
        """How much longer a round with its drafts lasts than a plain one, lately."""
        self._count, self._slots = 0, 0.0

    def measure(self, kv_caches: Sequence[KVCache], most_nodes: int, seconds: float) -> None:
        """Time calls over caches without texts for about so many seconds, so that the rule knows what they cost."""
        self._rule.verify_size = cache(partial(_size, self._verify, kv_caches))
        if self._draft is not None:
            self._rule.draft_size = cache(partial(_size, self._draft, kv_caches))
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
        if time.perf_counter() - started < seconds:
            self._measure_prompts(kv_caches[0])
        for kv_cache in kv_caches:
            kv_cache.reset()

    def _measure_prompts(self, kv_cache: KVCache) -> None:
        """Time pieces of a prompt, behind few tokens and behind many."""
        longest = min(8 * MEASURED_SLOTS, self._verify.manifest.max_seq_len)
        kv_cache.reserve(longest)
        for tokens, slots in product((PIECES[2], PIECES[5]), (longest // 8, longest)):
            if tokens < min(slots, self._verify.prefill_chunk):
                self._prompts.add(1, tokens, slots, _seconds(self._verify, kv_cache, tokens, slots))

    def prompt_tokens(self, sessions: Sequence[Session], slot: int, most: int) -> int:
        """How many tokens of a prompt, from ``slot`` on, may share the next round of ``sessions``: at most ``most``, and so few
        that many rows wait less than twice as long."""
        slots = self._verify.work([_root_call(session) for session in sessions]).slots
        round_time = self._stretch * self._rule.plain_seconds(len(sessions), slots)
        time_left = PROMPTS_SHARE * round_time * max(FEW_ROWS / len(sessions), 1)
        fitting = [count for count in (*PIECES, most) if count <= most and self._prompts.seconds(1, count, slot) <= time_left]
        return max(fitting, default=min(PIECES[0], most))

    def begin(self, sessions: Sequence[Session]) -> Sequence[Drafting]:
        if not sessions:
            return []
        self._rule.begin_round()
        self._count, self._slots = len(sessions), self._verify.work([_root_call(session) for session in sessions]).slots
        draftings = [self._drafting(session) for session in sessions]
        least = self._rule.step_cost(self._count, self._slots)
        for controller in filter(None, map(_controller, draftings)):
            controller.least = least
        return draftings

    def _drafting(self, session: Session) -> Drafting:
        """How a row drafts beside others."""
        own = session.drafting
        if own.fixed or (own.drafter is None and own.text is None):
            return own
        found = self._known.get(session)
        if found is None:
            controller, head, text = RowController(self._rule), own.drafter, own.text
            found = self._known[session] = Drafting(
                replace(head, controller=controller) if head else None,
                TextDrafter(RowTextRule(self._rule, controller), text.past) if text else None,
            )
        return found

    def draft_on(self, rounds: Sequence[Round], depth: int) -> Sequence[Round]:
        wanting = [current for current in rounds if current.wants_more]
        free = [current for current in wanting if not current.drafting.fixed]
        if free and not self._is_worth_it(rounds, free, depth):
            for current in free:
                current.wants_more = False
        return [current for current in wanting if current.wants_more]

    def _is_worth_it(self, rounds: Sequence[Round], free: Sequence[Round], depth: int) -> bool:
        """Whether another level of drafts, of the rounds ``free``, pays."""
        certain = _sums([_values(current)[depth:] for current in rounds if current not in free])
        controllers = [one for current in free if (one := _controller(current.drafting))]
        if not depth:
            return self._rule.begins([one.first for one in controllers], self._count, self._slots, certain)
        reaches = [(one.reach, one.following) for one in controllers]
        return self._rule.goes_on(reaches, depth, self._count, self._slots, certain)

    def share(self, rounds: Sequence[Round]) -> Share | None:
        if not rounds:
            return None
        values = _sums([_values(current) for current in rounds])
        levels = self._rule.levels(values, self._count, self._slots)
        return Share(levels, self._rule.price(self._count, self._slots))

    def drafted(self, rounds: int, seconds: float) -> None:
        self._rule.draft.add(*self._rule.draft_size(rounds, 1), self._slots, seconds)

    def verified(
        self, rounds: Sequence[Round], calls: Sequence[Call], seconds: tuple[float, float], prompts: Sequence[Call]
    ) -> None:
        if rounds and not any(current.error is None and current.tree.steps for current in rounds):
            self._rule.fade()
        if not calls:
            return
        count, (before, verifying) = len(calls), seconds
        nodes, slots, computed = self._verify.work(calls)
        if prompts:  # what the call cost without the prompts is not known
            alone = self._rule.verify.seconds(computed, nodes / computed, slots)
            tokens, behind = sum(len(call.tokens) for call in prompts), max(call.slot for call in prompts)
            self._prompts.add(1, tokens, behind, max(verifying - alone, LEAST_PART * verifying))
            verifying = min(verifying, alone)
        else:
            self._rule.verify.add(computed, nodes / computed, slots, verifying)
        tokens = sum(len(current.result.tokens) for current in rounds if current.result)
        self._rule.add_round(count, self._slots, tokens, before + verifying)
        if rounds and (plain := self._rule.plain_seconds(len(rounds), self._slots)):
            self._stretch += LATELY * (min(max((before + verifying) / plain, 1.0), MOST_STRETCH) - self._stretch)


def _measure(engine: Engine, costs: CallCosts, kv_caches: Sequence[KVCache], nodes: int, slots: int) -> None:
    first = slots - nodes
    calls = [Call(kv_cache, [0] * nodes, range(first, slots), first) for kv_cache in kv_caches]
    for again in range(3):
        started = time.perf_counter()
        engine.forward(calls)
        if again:  # the first call prepares the others
            work = engine.work(calls)
            costs.add(work.rows, work.nodes / work.rows, work.slots, time.perf_counter() - started)


def _seconds(engine: Engine, kv_cache: KVCache, tokens: int, slots: int) -> float:
    """Seconds of a piece of a prompt, less those of its last token alone. The piece ends in the last of so many slots."""
    taken = []
    for count in (tokens, tokens, 1):  # the first call prepares the others
        first, started = slots - count, time.perf_counter()
        engine.forward([Call(kv_cache, [0] * count, range(first, slots), first, logits=False)])
        taken.append(time.perf_counter() - started)
    return max(taken[1] - taken[2], LEAST_PART * taken[1])


def _size(engine: Engine, kv_caches: Sequence[KVCache], rows: int, nodes: int) -> tuple[int, float]:
    """The rows that an engine computes for a call of ``rows`` rows with ``nodes`` nodes each, and the nodes of each row."""
    work = engine.work([Call(kv_cache, [0] * nodes, (), 0) for kv_cache in kv_caches[:rows]])
    return work.rows, work.nodes / work.rows


def _root_call(session: Session) -> Call:
    """The call of a row that drafts nothing."""
    slot = len(session.tokens) - 1
    return Call(session.kv_cache, session.tokens[-1:], (slot,), slot)


def _controller(drafting: Drafting) -> RowController | None:
    """What the rule knows of a row's draft; None: it has none, or a fixed one."""
    controller = drafting.drafter.controller if drafting.drafter else None
    return controller if isinstance(controller, RowController) else None


def _values(current: Round) -> Sequence[float]:
    """For each level that a row has drafted, the chance that it is accepted."""
    if current.error is not None:
        return []
    if not current.tree.steps:
        return current.proposal.values[: len(current.tree.nodes) - 1]
    if current.drafting.fixed:
        return [1.0] * current.tree.steps  # whatever they are worth, they are verified
    controller = _controller(current.drafting)
    return controller.values if controller is not None else []


def _sums(values: Sequence[Sequence[float]]) -> list[float]:
    """For each level, the tokens that all rows together expect of it."""
    return [sum(level) for level in zip_longest(*values, fillvalue=0.0)]
