"""Continuous batching: requests join and leave between rounds; prompts are prefilled in pieces, in rounds or between them."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eesd.common.checks import check_integer
from eesd.common.errors import EESDError
from eesd.controllers.load_rule import FixedLevels, LoadRule
from eesd.runtime.batch.group import Group
from eesd.runtime.batch.prefix_cache import PrefixCache
from eesd.runtime.batch.request import ConstraintError, Generation, Update
from eesd.runtime.batch.rounds import RoundRunner
from eesd.runtime.batch.row import Row
from eesd.runtime.batch.row_exactness import check_rows
from eesd.runtime.decoding.session import RoundResult, check_prompt
from eesd.runtime.engines.base import Binding, Call, JoiningEngine, KVCache, Part, Rows, RowsEngine, Values
from eesd.runtime.llm import LLM

SEPARATE, JOINT = (512, 4), (256, 2)
"""Slots of the texts in the first group, and how many times more each next group holds: where every group needs a call of its
own, and where calls are joint."""
PARTS = 3
"""Parts of a joint call: groups, and pieces of prompts, of which one always has a place."""
MEASURING_SECONDS = 3.0
"""Time in which calls are timed at the start."""
MOST_PREFILLING = 4
"""Prompts that are prefilled in turn, so that a long one does not keep short ones waiting."""
SMALL_PIECE = 128
"""A prompt waits for its turn rather than for a piece smaller than this, which would cost more for each token."""


LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchOptions:
    """Limits of a batch.

    Attributes:
        max_rows: Requests that run at the same time.
        max_queue: Requests that wait; more are refused.
        prefill_tokens: Tokens of prompts in a round, or between two, while there are rows that decode.
        kv_memory: Bytes of keys and values that the requests that run may come to need, together.
        prefix_memory: Bytes of keys and values that are kept for requests that begin alike; 0: none. They change how long a
            request takes to begin, from which one user may learn what another asked: give 0 where that matters.
        join_memory: Most bytes that the verify weights may take a second time, in float32, so that groups of rows and pieces of
            prompts share calls. If they take more, or the backend has no such calls, each has its own, which is slower.
        levels: Levels that every round drafts; None: as many as pay, given the load.

    Raises:
        EESDError: A value is out of range.
    """

    max_rows: int = 16
    max_queue: int = 256
    prefill_tokens: int = 128
    kv_memory: int = 2 << 30
    prefix_memory: int = 256 << 20
    join_memory: int = 1 << 30
    levels: int | None = None

    def __post_init__(self) -> None:
        check_integer("max_rows", self.max_rows, 1, 1024)
        check_integer("max_queue", self.max_queue, 0, 1_000_000)
        check_integer("prefill_tokens", self.prefill_tokens, 1, 65536)
        check_integer("kv_memory", self.kv_memory, 1, 2**62)
        check_integer("prefix_memory", self.prefix_memory, 0, 2**62)
        check_integer("join_memory", self.join_memory, 0, 2**62)
        if self.levels is not None:
            check_integer("levels", self.levels, 0, 64)


@dataclass(eq=False)
class _Workspace:
    """A cache in which one prompt is prefilled, and the verify engine bound to it."""

    kv_cache: KVCache
    verify: Binding


@dataclass(eq=False)
class _Prefilling:
    """A request whose prompt is being prefilled."""

    row: Row
    workspace: _Workspace


@dataclass(frozen=True)
class _Ride:
    """A piece of a prompt in a call that it shares."""

    one: _Prefilling
    call: Call

    @property
    def part(self) -> Part:
        return Part(self.one.workspace.kv_cache, 0, [self.call], logits=False)


class Scheduler:
    """The batch, driven by one thread: :meth:`add` requests, and call :meth:`step` while there is work.

    Attributes:
        rule: What decides how far to draft, and what it learned.
        prefixes: Keys and values of earlier texts.
        waiting: Requests that have not begun.
        rounds: Rounds so far.
        request_seconds: Time that requests took lately, from their place in a row to their end.
    """

    def __init__(self, llm: LLM, options: BatchOptions) -> None:
        """Raises :class:`EESDError` if the backend cannot run several rows, or rows change each other's logits here."""
        verify, draft = llm.engines.verify, llm.engines.draft
        assert isinstance(verify, RowsEngine) and isinstance(draft, RowsEngine | None)
        self._llm, self._options, self._engine, self._draft = llm, options, verify, draft
        prior = llm.manifest.exit_head.calibration
        self.rule = LoadRule(prior) if options.levels is None else FixedLevels(options.levels, prior)
        self.prefixes = PrefixCache(options.prefix_memory)
        self.waiting: deque[Generation] = deque()
        self.rounds = 0
        self.request_seconds = 1.0
        self._prefilling: deque[_Prefilling] = deque()
        self._idle: list[_Workspace] = []
        rows = self._engine.new_rows(options.max_rows)
        self._slot_bytes = rows.slot_bytes
        self._check_memory(rows)
        self._joint = None
        if isinstance(verify, JoiningEngine) and options.max_rows > 1:
            self._joint = verify.join(PARTS, options.join_memory)
        sizes = (
            [None]
            if rows.fixed or rows.ragged
            else _group_sizes(llm.manifest.max_seq_len, *(JOINT if self._joint else SEPARATE))
        )
        memory = [rows, *(self._engine.new_rows(options.max_rows) for _ in sizes[1:])]
        self._groups = [self._new_group(*pair) for pair in zip(memory, sizes, strict=True)]
        self._rounds = RoundRunner(self.rule, self._joint)
        check_rows(verify, rows, self._groups[0].verify, self._joint, options.max_rows)
        most_nodes = 1 + llm.manifest.max_tree_nodes
        self._rounds.measure(self._groups[0], options.max_rows, most_nodes, MEASURING_SECONDS)

    @property
    def running(self) -> int:
        """Requests that decode."""
        return sum(len(group.active) for group in self._groups)

    @property
    def prefilling(self) -> int:
        """Requests whose prompt is being prefilled."""
        return len(self._prefilling)

    @property
    def drafted(self) -> int:
        """Levels that the last rounds verified, at most."""
        return max((group.drafted for group in self._groups if group.active), default=0)

    @property
    def kv_used(self) -> float:
        """Share of the memory for keys and values that is promised to requests."""
        return sum(self._needs(row.generation) for row in self._rows()) / self._options.kv_memory

    def check(self, generation: Generation) -> None:
        """Raise :class:`EESDError` if a request can never run."""
        request, manifest = generation.request, self._llm.manifest
        limits = self._llm.limits(request.max_new_tokens, request.ignore_eos)
        check_prompt(request.tokens, limits, manifest.geometry.vocab_size)
        if request.stop:
            _ = self._llm.codec  # which a model without a tokenizer does not have
        if self._needs(generation) > self._options.kv_memory:
            raise EESDError(
                f"The request may come to need {self._needs(generation) >> 20} MiB of keys and values, and all requests have "
                f"{self._options.kv_memory >> 20} MiB together; ask for fewer than {request.max_new_tokens} new tokens (the "
                f"model takes {manifest.max_seq_len} in all), or start with more memory."
            )

    def add(self, generation: Generation) -> None:
        """Let a request wait for its turn. It must have passed :meth:`check`."""
        self.waiting.append(generation)

    def step(self) -> bool:
        """Let requests begin and end, prefill some tokens, run a round. Returns whether there is more to do."""
        self._end_some()
        self._begin_some()
        rides = self._next_rides()
        if not rides:
            self._prefill_some()
        active = [group for group in self._groups if group.active]
        if not active and rides:
            self._prefill_together(rides)
        while active:
            together = PARTS - len(rides) if self._joint else 1
            self._round(active[:together], rides)
            active, rides = active[together:], []
        self._regroup()
        return bool(self.waiting or self._prefilling or self.running)

    def end_all(self, reason: str, error: Exception | None = None) -> None:
        """End every request."""
        while self.waiting:
            self.waiting.popleft().on_update(Update(finish_reason=reason, error=_sentence(error) if error else None))
        for row in self._rows():
            self._end(row, reason, error)

    def _rows(self) -> list[Row]:
        """All requests that have begun."""
        return [*(one.row for one in self._prefilling), *(row for group in self._groups for row in group.active)]

    def _needs(self, generation: Generation) -> int:
        """Bytes of keys and values that a request may come to need."""
        request, manifest = generation.request, self._llm.manifest
        slots = min(len(request.tokens) + request.max_new_tokens, manifest.max_seq_len)
        return (slots + manifest.max_tree_nodes) * self._slot_bytes

    def _end_some(self) -> None:
        """End requests that were cancelled or whose time is over."""
        now = time.monotonic()
        for generation in [one for one in self.waiting if one.cancelled or one.is_late(now)]:
            self.waiting.remove(generation)
            generation.on_update(Update(finish_reason="cancelled" if generation.cancelled else "deadline"))
        for row in self._rows():
            if row.generation.cancelled or row.generation.is_late(now):
                self._end(row, "cancelled" if row.generation.cancelled else "deadline")

    def _begin_some(self) -> None:
        """Begin requests in their order, while there is a row and memory for them."""
        while self.waiting and len(self._rows()) < self._options.max_rows and len(self._prefilling) < MOST_PREFILLING:
            promised = sum(self._needs(row.generation) for row in self._rows())
            if promised + self._needs(self.waiting[0]) > self._options.kv_memory:
                return
            generation = self.waiting.popleft()
            workspace = self._idle.pop() if self._idle else self._new_workspace()
            workspace.kv_cache.reset()
            try:
                row = Row(self._llm, self.rule, generation, workspace.kv_cache, workspace.verify)
            except Exception as error:  # whatever it is, it concerns this request alone
                LOGGER.exception("A request could not begin.")
                self._idle.append(workspace)
                generation.on_update(Update(finish_reason="error", error=_sentence(error)))
                continue
            if generation.request.prompt_logprobs is None:
                self._take_prefix(row, workspace.kv_cache)
            self._go_on(_Prefilling(row, workspace))  # of some prompts nothing is left to prefill

    def _take_prefix(self, row: Row, kv_cache: KVCache) -> None:
        """Copy the keys and values of the prompt's beginning that are known."""
        tokens = row.request.tokens[:-1]
        at = 0
        for values in self.prefixes.find(tokens):
            length = values.shape[3]
            kv_cache.reserve(at + length)
            kv_cache.fill(at, values)
            at += length
        row.session.prefill_from(at)
        row.cached_tokens = at

    @property
    def _most_prefilled(self) -> int:
        """Tokens of prompts in a call."""
        return self._options.prefill_tokens if self.running else self._engine.prefill_chunk

    def _next_rides(self) -> list[_Ride]:
        """Pieces of the next prompts that can share the call of a round: one, and more if they are whole prompts. Without rows
        that decode, several that share a call of their own, or none."""
        rides: list[_Ride] = []
        if not self._joint:
            return rides
        places = max(PARTS - sum(bool(group.active) for group in self._groups), 1)
        left = self._most_prefilled
        for one in [*self._prefilling]:
            if len(rides) == places or one.row.reports_prompt or (rides and one.row.unfilled > left):
                break
            try:
                call = one.row.session.next_piece(_piece(one.row.unfilled, left))
            except Exception as error:  # whatever it is, it concerns this request alone
                self._end(one.row, "error", error)
                continue
            assert call is not None
            rides.append(_Ride(one, call))
            left -= len(call.tokens)
        return rides if self.running or len(rides) > 1 else []

    def _prefill_some(self) -> None:
        """Prefill prompts between rounds, each a piece in turn. Those that are complete join a group."""
        left = most = self._most_prefilled
        while self._prefilling and left > 0:
            row = self._prefilling[0].row
            piece = _piece(row.unfilled, left)
            if left < most and piece < min(row.unfilled, SMALL_PIECE):
                return
            one = self._prefilling.popleft()
            try:
                left -= max(row.prefill(piece), 1)
            except Exception as error:  # whatever it is, it concerns this request alone
                self._idle.append(one.workspace)
                self._end(one.row, "error", error)
                continue
            self._go_on(one)

    def _go_on(self, one: _Prefilling) -> None:
        """Let a row whose prompt is complete decode, and another one wait for its next turn."""
        if one.row.prefilled:
            self._join(one)
        else:
            self._prefilling.append(one)

    def _join(self, one: _Prefilling) -> None:
        """Let a row whose prompt is complete decode."""
        kv_cache = one.workspace.kv_cache
        self._keep_prefix(one.row, kv_cache.values)
        self._group_for(len(one.row.request.tokens)).join(one.row, kv_cache)
        self._idle.append(one.workspace)

    def _round(self, groups: Sequence[Group], rides: Sequence[_Ride]) -> None:
        """Run a round of some groups. If the engine fails, their rows end; the others go on."""
        self.rounds += 1
        homes, started = {row: group for group in groups for row in group.active}, time.perf_counter()
        try:
            finished = self._rounds.run(
                groups, lambda row, result: self._report(homes[row], row, result), [ride.part for ride in rides]
            )
        except Exception as error:
            LOGGER.exception("A round failed; %d requests end.", len(homes))
            for row in [row for row, group in homes.items() if row in group.active]:
                self._end(row, "error", error)
            return
        seconds = time.perf_counter() - started
        for row in finished:
            if row.error is not None:
                if not isinstance(row.error, ConstraintError):
                    LOGGER.error("A request failed.", exc_info=row.error)
                self._end(row, "error", row.error)
            else:
                homes[row].leave(row)
        self._add_pieces(rides, seconds)

    def _prefill_together(self, rides: Sequence[_Ride]) -> None:
        """Prefill pieces of several prompts in one call, without rows that decode. If the engine fails, their requests end."""
        assert self._joint is not None
        started = time.perf_counter()
        try:
            self._joint.forward([ride.part for ride in rides])
        except Exception as error:
            LOGGER.exception("A prefill failed; %d requests end.", len(rides))
            for ride in rides:
                self._end(ride.one.row, "error", error)
            return
        self._add_pieces(rides, time.perf_counter() - started)

    def _add_pieces(self, rides: Sequence[_Ride], seconds: float) -> None:
        """Go on behind pieces of prompts that a call of so many seconds has put into their caches."""
        for ride in rides:
            self._prefilling.remove(ride.one)
            ride.one.row.session.add_piece(ride.call, seconds)
            self._go_on(ride.one)

    def _report(self, group: Group, row: Row, result: RoundResult) -> bool:
        """Tell what a round brought a row. Returns whether the row is finished."""
        update = row.update(result)
        ended = update.finish_reason is not None
        if ended:
            self.request_seconds += (time.monotonic() - row.began - self.request_seconds) / 8
            self._keep_prefix(row, lambda start, stop: group.values(row, start, stop))
            row.session.close()
        row.generation.on_update(update)
        return ended

    def _end(self, row: Row, reason: str, error: Exception | None = None) -> None:
        """End a request that no round ended."""
        for one in [one for one in self._prefilling if one.row is row]:
            self._prefilling.remove(one)
            self._idle.append(one.workspace)
        for group in self._groups:
            if row in group.active:
                group.leave(row)
        row.session.close()
        update = row.last_update(reason, None if error is None else _sentence(error))
        row.generation.on_update(replace(update, refused=isinstance(error, ConstraintError)))

    def _keep_prefix(self, row: Row, read: Callable[[int, int], Values]) -> None:
        """Keep a row's keys and values for requests that begin like it."""
        if self._options.prefix_memory:
            self.prefixes.add(row.session.tokens[:-1], read)

    def _regroup(self) -> None:
        """Move texts that have become long to their group."""
        for group in self._groups:
            for row in [row for row in group.active if group.has_outgrown(row)]:
                self._group_for(len(row.session.tokens)).take_over(group, row)

    def _check_memory(self, rows: Rows) -> None:
        """Raise :class:`EESDError` if rows that are allocated whole take more than requests may."""
        taken, given = self._options.max_rows * rows.slots * rows.slot_bytes, self._options.kv_memory
        if rows.fixed and taken > given:
            raise EESDError(
                f"{self._options.max_rows} rows of {rows.slots} slots take {-(-taken >> 20)} MiB of the GPU's memory, and "
                f"{given >> 20} MiB are given for keys and values; start with fewer rows or more memory."
            )

    def _new_group(self, rows: Rows, most_slots: int | None) -> Group:
        draft = self._draft.bind_rows(rows) if self._draft else None
        longest = self._llm.manifest.max_tree_nodes
        return Group(rows, self._engine.bind_rows(rows), draft, longest, most_slots)

    def _group_for(self, tokens: int) -> Group:
        """The first group whose rows have room for a text of this length and a round."""
        longest = self._llm.manifest.max_tree_nodes
        return next(group for group in self._groups if group.most_slots is None or tokens + longest <= group.most_slots)

    def _new_workspace(self) -> _Workspace:
        kv_cache = self._engine.new_kv_cache()
        return _Workspace(kv_cache, self._engine.bind(kv_cache))


def _piece(tokens: int, most: int) -> int:
    """Tokens of the next piece, if as few pieces as possible are alike."""
    pieces = max(-(-tokens // most), 1)
    return -(-tokens // pieces)


def _group_sizes(max_seq_len: int, first: int, growth: int) -> list[int | None]:
    """The most slots of each group; the last one takes the longest texts."""
    sizes: list[int | None] = []
    size = first
    while size < max_seq_len:
        sizes.append(size)
        size *= growth
    return [*sizes, None]


def _sentence(error: Exception) -> str:
    """What a user is told about an error; only errors of this project are written for users."""
    return str(error) if isinstance(error, EESDError) else "The request failed inside the server; its log says why."
