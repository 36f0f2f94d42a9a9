"""The policy of a batch lets rows draft as long as drafting makes the whole batch faster."""

import time
from collections.abc import Sequence
from functools import cache, partial
from weakref import WeakKeyDictionary

import numpy as np

from eesd.controllers.batch_costs import BatchCosts
from eesd.controllers.load_rule import LoadRule, RowController
from eesd.controllers.text_rule import TextRule
from eesd.runtime.decoding.draft_tree import Share
from eesd.runtime.decoding.drafting import PLAIN, Drafting
from eesd.runtime.decoding.round import Policy, Round, TokenSequence
from eesd.runtime.engines.base import Call, Engine, KVCache

MEASURED_SLOTS = 256
"""The calls that are timed have this number of slots per row."""
PROMPTS_SHARE = 0.7
FEW_ROWS = 8
WEIGHT_OF_WAITING = 4
"""Prompt pieces take at most ``PROMPTS_SHARE`` of a round's time, multiplied by the largest of 1,
``FEW_ROWS`` / rows, and ``WEIGHT_OF_WAITING`` * waiting prompts / rows. With few rows the processor
is half idle, and new rows share the calls of these rows. If more requests wait than decode, the
time to their first tokens matters more than the time between tokens."""
LEAST_PART = 0.05
"""Minimum share of a call's time that is attributed to a prompt piece."""
PIECES = (8, 12, 16, 24, 32, 48, 64, 96)
"""The numbers of tokens that a prompt piece may have if it shares a call with rows. The largest
number comes from the batch's options."""


class LoadPolicy(Policy):
    """Drafts as far as a :class:`~eesd.controllers.load_rule.LoadRule` allows under the load."""

    def __init__(self, rule: LoadRule, verify: Engine, draft: Engine | None) -> None:
        self._rule = rule
        self._verify = verify
        self._draft = draft
        self._known: WeakKeyDictionary[TokenSequence, Drafting] = WeakKeyDictionary()
        self._prompts = BatchCosts()
        """Estimates the seconds that prompt pieces add to a round."""
        self.waiting = 0
        """Number of requests whose prompts are not complete, limited to the number of rows that do
        not decode. Set by the scheduler before each round."""

    def measure(self, kv_caches: Sequence[KVCache], most_nodes: int, seconds: float) -> None:
        """Run and time calls over empty caches for about ``seconds`` seconds. The measured times
        are the rule's first costs."""
        self._rule.verify_size = cache(partial(_size, self._verify, kv_caches))
        unequal = [
            Call(kv_cache, [0] * nodes, (), 0)
            for nodes, kv_cache in zip((1, 2), kv_caches, strict=False)
        ]
        self._rule.padded = self._verify.work(unequal).nodes > 3
        if self._draft is not None:
            self._rule.draft_size = cache(partial(_size, self._draft, kv_caches))
        count = 1
        started = time.perf_counter()
        slots = min(MEASURED_SLOTS, self._verify.manifest.max_seq_len)
        while count <= len(kv_caches) and time.perf_counter() - started < seconds:
            used = kv_caches[:count]
            for kv_cache in used:
                kv_cache.reserve(slots)
            for nodes in range(1, 9) if count == 1 else (1, 2, 4, 8):
                if nodes <= min(most_nodes, slots):
                    _measure(self._verify, self._rule.verify, used, nodes, slots)
            if self._draft is not None:
                _measure(self._draft, self._rule.draft, used, 1, slots)
            count *= 2
        for kv_cache in kv_caches:
            kv_cache.reset()
        plain = self._rule.verify.seconds(1, 1, slots)
        for tokens in PIECES[::2]:  # until pieces are measured, the cost of nodes gives a guess
            seconds = self._rule.verify.seconds(1, 1 + tokens, slots)
            self._prompts.add(1, tokens, slots, max(seconds - plain, LEAST_PART * seconds))

    def prompt_tokens(self, sequences: Sequence[TokenSequence], slot: int, most: int) -> int:
        """Return the number of prompt tokens, from ``slot`` on, that may join the next round of
        ``sequences``. It is at most ``most``. If there are many rows and few waiting prompts, these
        tokens do not double the round's time."""
        rows = len(sequences)
        round_time = self._rule.round_seconds(rows, self._slots(sequences))
        share = PROMPTS_SHARE / rows * max(FEW_ROWS, rows, WEIGHT_OF_WAITING * self.waiting)
        counts = np.array([*[count for count in PIECES if count < most], most])
        fitting = int(
            (self._prompts.curve(np.ones_like(counts), counts, slot) <= share * round_time).sum()
        )
        return int(counts[max(fitting - 1, 0)])

    def _slots(self, sequences: Sequence[TokenSequence]) -> float:
        """Return the number of slots of the rows, as engines count them."""
        return self._verify.work([_root_call(sequence) for sequence in sequences]).slots

    def begin(self, sequences: Sequence[TokenSequence]) -> Sequence[Drafting]:
        if not sequences:
            return []
        self._rule.begin_round(len(sequences), self._slots(sequences), self.waiting)
        return [self._drafting(sequence) for sequence in sequences]

    def _drafting(self, sequence: TokenSequence) -> Drafting:
        """Return the drafters of a row in a batch of several rows."""
        own = sequence.drafting
        if own.fixed or (own.drafter is None and own.text is None):
            return own
        if not self._rule.can_pay:
            return PLAIN
        found = self._known.get(sequence)
        if found is None:
            row = own.with_drafter(controller=RowController(self._rule))
            found = Drafting(row.drafter)
            if own.text is not None:
                found = Drafting(row.drafter, TextRule(load=self._rule))
            self._known[sequence] = found
        return found

    def draft_on(self, rounds: Sequence[Round], depth: int) -> Sequence[Round]:
        wanting = [current for current in rounds if current.wants_more]
        free = [current for current in wanting if not current.drafting.fixed]
        if free:
            free.sort(key=lambda current: _controller(current).chance, reverse=True)
            reaches = [(row.reach, row.next) for row in map(_controller, free)]
            count = self._rule.goes_on(reaches, depth, [*map(_path_chances, rounds)])
            for current in free[count:]:
                current.wants_more = False
        return [current for current in wanting if current.wants_more]

    def shares(self, rounds: Sequence[Round]) -> Sequence[Share | None]:
        values = [*map(_path_chances, rounds)]
        if not any(values):
            return super().shares(rounds)
        return [Share(levels, self._rule.price) for levels in self._rule.levels(values)]

    def drafted(self, rounds: int, seconds: float) -> None:
        self._rule.draft.add(*self._rule.draft_size(rounds, 1), self._rule.slots, seconds)

    def verified(
        self,
        rounds: Sequence[Round],
        calls: Sequence[Call],
        seconds: tuple[float, float],
        prompts: Sequence[Call],
    ) -> None:
        if not calls:
            return
        rule = self._rule
        drafting, verifying = seconds
        nodes, slots, computed = self._verify.work(calls)
        drafted = any(current.error is None and current.tree.steps for current in rounds)
        if not drafted:  # deciding not to draft counts as plain-round time
            verifying += drafting
            drafting = 0.0
        # Split the slowdown in proportion, because the machine's pace affects both parts.
        if prompts:
            tokens = sum(len(call.tokens) for call in prompts)
            behind = max(call.slot for call in prompts)
            alone = rule.verify.seconds(computed, nodes, slots)
            piece = self._prompts.seconds(1, tokens, behind)
            self._prompts.add(1, tokens, behind, verifying * piece / (alone + piece))
            verifying *= alone / (alone + piece)
        rule.verify.add(computed, nodes, slots, verifying)
        tokens = sum(len(current.result.tokens) for current in rounds if current.result)
        rule.observe(drafted, tokens, drafting + verifying)


def _measure(
    engine: Engine, costs: BatchCosts, kv_caches: Sequence[KVCache], nodes: int, slots: int
) -> None:
    first = slots - nodes
    calls = [Call(kv_cache, [0] * nodes, range(first, slots), first) for kv_cache in kv_caches]
    for again in range(3):
        started = time.perf_counter()
        engine.forward(calls)
        if again:  # the first call only prepares the later ones
            work = engine.work(calls)
            costs.add(work.rows, work.nodes, work.slots, time.perf_counter() - started)


def _size(engine: Engine, kv_caches: Sequence[KVCache], rows: int, nodes: int) -> tuple[int, int]:
    """Return the numbers of rows and nodes that an engine computes for a call of ``rows`` rows with
    ``nodes`` nodes each."""
    work = engine.work([Call(kv_cache, [0] * nodes, (), 0) for kv_cache in kv_caches[:rows]])
    return work.rows, work.nodes


def _root_call(sequence: TokenSequence) -> Call:
    """The verify call of a row that has drafted nothing."""
    slot = len(sequence.tokens) - 1
    return Call(sequence.kv_cache, sequence.tokens[-1:], (slot,), slot)


def _path_chances(current: Round) -> Sequence[float]:
    """Return the chance of acceptance of each level that a row has drafted."""
    if current.error is not None:
        return []
    if not current.tree.steps:
        return current.proposal.path_chances[: len(current.tree.nodes) - 1]
    if current.drafting.fixed:
        return [1.0] * current.tree.steps  # all its levels are verified
    return _controller(current).path_chances


def _controller(current: Round) -> RowController:
    """The controller of a row, which estimates the chances of the row's draft."""
    assert current.drafting.drafter is not None and isinstance(
        current.drafting.drafter.controller, RowController
    )
    return current.drafting.drafter.controller
