"""Continuous batching. Requests join and leave between rounds, and prompts are prefilled in pieces
while other rows decode."""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eesd.common.checks import check_integer
from eesd.common.errors import EESDError
from eesd.controllers.load_rule import LoadRule
from eesd.runtime.batch.load_policy import LoadPolicy
from eesd.runtime.decoding.drafting import Drafting
from eesd.runtime.decoding.round import EACH_ALONE, Policy, PromptPiece, Round, run_round
from eesd.runtime.engines.base import KVCache
from eesd.runtime.engines.row_check import check_rows
from eesd.runtime.llm import LLM
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import ConstraintError, Generation, Update
from eesd.runtime.session import Session, check_prompt

MEASURING_SECONDS = 3.0
"""At the start, measuring the costs of calls takes this number of seconds."""
IN_TURN = 4
"""Number of prompts that are prefilled in turn, so that later prompts need not wait for a long
one."""
SHORT = 64
"""Maximum length, in tokens, of a prompt that may be prefilled ahead of the prompts in turn."""
PASSING = 0.065
"""Such short prompts may have at most this share of the tokens of the prompts in turn. Rounds also
do other work, so the prompts in turn wait only about 5 % longer."""
HEADROOM = 64
"""A text that is longer than each of the last ``KNOWN`` texts is expected to grow by this number of
tokens."""
KNOWN = 64

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchOptions:
    """Limits of a batch.

    Attributes:
        max_rows: Maximum number of requests that run at the same time.
        max_queue: Maximum number of requests that wait. Further requests are refused.
        prefill_tokens: Maximum number of prompt tokens that are computed in a round, or between two
            rounds, while rows decode. With many rows the number may be smaller, so that no row
            waits twice as long.
        kv_memory: Maximum number of bytes of the keys and values of all running requests together.
            If growing texts need more, the youngest request pauses, and its keys and values are
            computed again when there is room.
        prefix_memory: Maximum number of bytes of keys and values that are kept for later requests
            with the same beginning. If it is 0, nothing is kept. Reuse shortens the time to the
            first token, and from this time a user may infer other users' prompts. Use 0 if that
            matters.
        levels: Number of levels that each round drafts. If it is None, each round drafts as many
            levels as are worth their cost under the load.

    Raises:
        EESDError: A value is out of range.
    """

    max_rows: int = 16
    max_queue: int = 256
    prefill_tokens: int = 128
    kv_memory: int = 2 << 30
    prefix_memory: int = 256 << 20
    levels: int | None = None

    def __post_init__(self) -> None:
        check_integer("max_rows", self.max_rows, 1, 1024)
        check_integer("max_queue", self.max_queue, 0, 1_000_000)
        check_integer("prefill_tokens", self.prefill_tokens, 1, 65536)
        check_integer("kv_memory", self.kv_memory, 1, 2**62)
        check_integer("prefix_memory", self.prefix_memory, 0, 2**62)
        if self.levels is not None:
            check_integer("levels", self.levels, 0, 64)


class Scheduler:
    """Runs a batch of requests. One thread drives it: it calls :meth:`add` for new requests, and
    :meth:`step` while there is work.

    Attributes:
        rule: Decides how far a batch drafts. It learns from each round.
        alone: The drafters of the last round's row if the row ran alone. It is None if ``rule``
            decided how far to draft. Set by each round.
        prefixes: Keys and values of earlier texts.
        waiting: Requests that have not begun.
        rounds: Rounds so far.
        pauses: Number of times that a request lost its keys and values to other requests.
        round_tokens: A counter of rounds. The key is the number of prompt tokens and new tokens
            that a round computed.
        drafted: Number of drafted levels that the last round verified.
        request_seconds: Average time in seconds from the moment when a request gets a row until it
            ends, over recent requests.
    """

    def __init__(self, llm: LLM, options: BatchOptions) -> None:
        """Raises :class:`EESDError` if the backend cannot run several rows, or if rows change each
        other's logits on this machine."""
        self._llm = llm
        self._options = options
        self._engine = llm.engines.verify
        self.rule = LoadRule(llm.manifest.exit_head.calibration, options.levels)
        self.prefixes = PrefixCache(options.prefix_memory)
        self.waiting: deque[Generation] = deque()
        self.rounds = self.pauses = 0
        self.round_tokens = Counter[int]()
        self.request_seconds = 1.0
        self._lengths: deque[int] = deque(maxlen=KNOWN)
        self._paused: deque[Session] = deque()
        self._active: list[Session] = []
        self._prefilling: list[Session] = []
        """The first ``IN_TURN`` sessions take turns. The other sessions wait in the order of their
        arrival."""
        self._may_pass = float(SHORT)
        """Number of tokens of short prompts that may be prefilled ahead of other prompts."""
        self._kv_caches = llm.engines.new_kv_caches(options.max_rows)
        self._slot_bytes = self._kv_caches[0].slot_bytes
        self._check_memory()
        self._free = [*reversed(self._kv_caches)]
        check_rows(self._engine, self._kv_caches)
        self.drafted = 0
        self.alone: Drafting | None = None
        self._last_alone: Session | None = None
        self._policy = LoadPolicy(self.rule, self._engine, llm.engines.draft)
        self._policy.measure(self._kv_caches, 1 + llm.manifest.max_tree_nodes, MEASURING_SECONDS)

    @property
    def running(self) -> int:
        """Number of requests that are decoding."""
        return len(self._active)

    @property
    def prefilling(self) -> int:
        """Number of requests whose prompt is being prefilled."""
        return len(self._prefilling)

    @property
    def kv_used(self) -> float:
        """Share of the memory for keys and values that requests occupy."""
        return (
            sum(len(row.tokens) for row in self._rows())
            * self._slot_bytes
            / self._options.kv_memory
        )

    @property
    def paused(self) -> int:
        """Number of requests that have begun and are waiting for memory."""
        return len(self._paused)

    def check(self, generation: Generation) -> None:
        """Raise :class:`EESDError` if a request can never run."""
        request = generation.request
        manifest = self._llm.manifest
        check_prompt(request.tokens, manifest)
        if request.stop:
            _ = self._llm.codec  # raises for a model without a tokenizer
        tokens = len(request.tokens)
        new = request.max_new_tokens
        if min(tokens + new, manifest.max_seq_len) > self.longest:
            raise EESDError(
                f"The request may need {tokens} + {new} tokens, but the memory for keys and "
                f"values holds {self.longest}; ask for fewer new tokens, or start with more "
                "memory."
            )

    @property
    def longest(self) -> int:
        """The maximum length, in tokens, of a text for which there is memory."""
        slots = self.slots - self._llm.manifest.max_tree_nodes
        return min(slots, self._llm.manifest.max_seq_len)

    @property
    def slots(self) -> int:
        """Number of KV cache slots for which there is memory."""
        return self._options.kv_memory // self._slot_bytes

    def add(self, generation: Generation) -> None:
        """Let a request wait for its turn. The request must have passed :meth:`check`."""
        self.waiting.append(generation)

    def step(self) -> bool:
        """Begin and end requests, prefill some tokens, and run a round. Returns whether there is
        more to do."""
        self._end_some()
        self._begin_some()
        self._pause_some()
        self._policy.waiting = min(
            len(self._prefilling) + len(self.waiting), self._options.max_rows - self.running
        )
        pieces = self._next_pieces()
        if self._active or pieces:
            self._round(pieces)
        return bool(self.waiting or self._paused or self._prefilling or self.running)

    def end_all(self, reason: str, error: Exception | None = None) -> None:
        """End every request."""
        while self.waiting:
            self.waiting.popleft().tell(
                Update(finish_reason=reason, error=_sentence(error) if error else None)
            )
        for row in [*self._rows(), *self._paused]:
            self._end(row, reason, error)

    def _rows(self) -> list[Session]:
        """Return all requests that have a cache."""
        return [*self._prefilling, *self._active]

    def _bytes(self, rows: Sequence[Session]) -> int:
        """Return the number of bytes of keys and values that rows need for their next rounds."""
        return (
            sum(len(row.tokens) + self._llm.manifest.max_tree_nodes for row in rows)
            * self._slot_bytes
        )

    def _has_room(self, tokens: int, new: int, left: int) -> bool:
        """Return whether there is memory for a new text and the running texts until they all end.
        The expected length of a text is a mean over recent texts. Only recent texts that are longer
        than this text is now are included.

        Args:
            tokens: Number of tokens of the text, including its prompt.
            new: Tokens of the text.
            left: Maximum number of tokens that may still follow.
        """
        if not (rows := self._rows()):
            return True
        texts = [(tokens, self._to_come(new, left))]
        texts += [(len(row.tokens), self._to_come(row.stats.new_tokens, row.left)) for row in rows]
        slots = 0
        most = 0
        for number, (size, to_come) in enumerate(sorted(texts, key=lambda text: -text[1]), 1):
            slots += size + self._llm.manifest.max_tree_nodes
            # This is the number of slots in use when this text ends. All texts that expect more
            # tokens are then still running.
            most = max(most, slots + number * to_come)
        return most * self._slot_bytes <= self._options.kv_memory

    def _to_come(self, new: int, left: int) -> int:
        """Return the expected number of further tokens, which is at most ``left``."""
        longer = [length for length in self._lengths if length > new]
        return min(left, sum(longer) // len(longer) - new if longer else HEADROOM)

    def _end_some(self) -> None:
        """End requests that were cancelled or whose time is over."""
        now = time.monotonic()
        for generation in [one for one in self.waiting if one.cancelled or one.is_late(now)]:
            self.waiting.remove(generation)
            generation.tell(
                Update(finish_reason="cancelled" if generation.cancelled else "deadline")
            )
        for row in [*self._rows(), *self._paused]:
            if row.generation.cancelled or row.generation.is_late(now):
                self._end(row, "cancelled" if row.generation.cancelled else "deadline")

    def _begin_some(self) -> None:
        """Resume paused requests and begin waiting requests in their order, as long as there is a
        row and memory for them."""
        while len(self._rows()) < self._options.max_rows:
            if self._paused:
                row = self._paused[0]
                if not self._has_room(len(row.tokens), row.stats.new_tokens, row.left):
                    return
                self._paused.popleft()
                row.move(self._free.pop())
                row.take_prefix(self.prefixes)
                self._go_on(row)
                continue
            request = self.waiting[0].request if self.waiting else None
            if request is None or not self._has_room(
                len(request.tokens), 0, request.max_new_tokens
            ):
                return
            generation = self.waiting.popleft()
            kv_cache = self._free.pop()
            try:
                row = self._llm.begin(generation, kv_cache)
            except Exception as error:  # any error concerns only this request
                LOGGER.exception("A request could not begin.")
                self._give_back(kv_cache)
                generation.tell(Update(finish_reason="error", error=_sentence(error)))
                continue
            row.take_prefix(self.prefixes)
            self._go_on(row)  # some prompts have nothing left to prefill

    def _pause_some(self) -> None:
        """Take caches from the youngest requests until the other requests have room for a round."""
        while len(rows := self._rows()) > 1 and self._bytes(rows) > self._options.kv_memory:
            row = max(rows, key=lambda row: row.began)
            row.keep_prefix(self.prefixes)
            self._rows_of(row).remove(row)
            self._give_back(row.kv_cache)
            self._paused.append(row)
            self._paused = deque(sorted(self._paused, key=lambda row: row.began))
            self.pauses += 1

    def _rows_of(self, row: Session) -> "list[Session] | deque[Session]":
        """The collection that holds a row."""
        return next(rows for rows in (self._active, self._prefilling, self._paused) if row in rows)

    def _next_pieces(self) -> dict[Session, PromptPiece]:
        """Return the prompt pieces for the next call. There is at least one piece. A further piece
        is added if it completes its prompt or fills half of the call."""
        pieces: dict[Session, PromptPiece] = {}
        order = self._order()
        most = self._prompt_tokens(order)
        left = most
        for row in order:
            # Another request may have computed the beginning of the prompt.
            if not row.stats.prefill_seconds:
                row.take_prefix(self.prefixes)
            unfilled = row.unfilled
            if not unfilled:
                self._prefilling.remove(row)
                self._go_on(row)
                continue
            if pieces and left < min(unfilled, most / 2):
                break
            try:
                pieces_left = max(-(-unfilled // left), 1)  # as few pieces as possible
                call = row.next_piece(-(-unfilled // pieces_left))
            except Exception as error:  # any error concerns only this request
                self._end(row, "error", error)
                continue
            assert call is not None
            pieces[row] = PromptPiece(row, call)
            left -= len(call.tokens)
        return pieces

    def _order(self) -> list[Session]:
        """Return the prompts in the order in which they are prefilled. Short prompts that wait come
        first, as long as they delay the other prompts only a little. Then come the prompts in turn,
        the short ones first."""
        order = sorted(self._prefilling[:IN_TURN], key=lambda row: row.unfilled > SHORT)
        passing = []
        left = self._may_pass
        for row in self._prefilling[IN_TURN:]:
            if row.unfilled <= SHORT and left >= 0:
                passing.append(row)
                left -= row.unfilled
        return [*passing, *order]

    def _prefilled(self, pieces: dict[Session, PromptPiece]) -> None:
        """Record a call's progress on prompts. This counts the tokens of prompts that went ahead,
        and lets the next prompts take their turn."""
        in_turn = self._prefilling[:IN_TURN]
        for row, piece in pieces.items():
            tokens = len(piece.call.tokens)
            self._may_pass += PASSING * tokens if row in in_turn else -tokens
            if piece.error is not None:
                self._fail(row, piece.error)
                continue
            if row in in_turn:
                self._prefilling.remove(row)
                self._prefilling.insert(IN_TURN - 1, row)
            if not row.unfilled:
                self._prefilling.remove(row)
                self._go_on(row)
        self._may_pass = min(self._may_pass, SHORT)

    def _prompt_tokens(self, order: Sequence[Session]) -> int:
        """Maximum number of prompt tokens in the next call."""
        if not (self._active and order):
            return self._engine.prefill_chunk
        behind = len(order[0].tokens) - 1 - order[0].unfilled
        return self._policy.prompt_tokens(self._active, behind, self._options.prefill_tokens)

    def _go_on(self, row: Session) -> None:
        """Let a row decode if its prompt is complete. If not, let it wait for its turn."""
        if row.unfilled:
            self._prefilling.append(row)
        else:
            row.keep_prefix(self.prefixes)
            self._active.append(row)

    def _policy_of(self, shared: bool) -> Policy:
        """Return the policy of the next round. A single row drafts as it does without a batch.
        Several rows, or a row that has ``shared`` its call with a prompt, use the load policy."""
        if len(self._active) != 1 or shared or self._options.levels is not None:
            self.alone = None
            return self._policy
        if (row := self._active[0]) is not self._last_alone:
            self._last_alone = row
            row.drafting.begin_request()
        self.alone = row.drafting
        return EACH_ALONE

    def _round(self, pieces: dict[Session, PromptPiece]) -> None:
        """Run a round together with prompt pieces. If an engine fails, the decoding rows end and
        the prompts are tried again. If no rows decode, the requests of the prompts end."""
        rows = [*self._active]
        self.rounds += bool(rows)
        policy = self._policy_of(bool(pieces))
        try:
            rounds = run_round(rows, self._llm.engines, policy, [*pieces.values()])
        except Exception as error:
            failed = rows or [*pieces]
            LOGGER.exception("A call failed; %d requests end.", len(failed))
            for row in failed:
                self._end(row, "error", error)
            return
        self.drafted = max((len(current.nodes) - 1 for current in rounds), default=0)
        new = [len(current.result.tokens) for current in rounds if current.result]
        self.round_tokens[sum(new) + sum(len(piece.call.tokens) for piece in pieces.values())] += 1
        for row, current in zip(rows, rounds, strict=True):
            self._report(row, current)
        self._prefilled(pieces)

    def _report(self, row: Session, current: Round) -> None:
        """Report a round to a row's caller, and end the row if it is finished or failed."""
        try:
            if current.error is not None:
                raise current.error
            assert current.result is not None
            update = row.update(current.result)
        except Exception as error:  # any error concerns only this request
            self._fail(row, error)
            return
        if update.finish_reason is not None:
            self.request_seconds += (time.monotonic() - row.began - self.request_seconds) / 8
            self._lengths.append(row.stats.new_tokens)
            row.keep_prefix(self.prefixes)
            self._active.remove(row)
            self._leave(row)
        row.generation.tell(update)

    def _fail(self, row: Session, error: Exception) -> None:
        """End a request that failed without affecting other requests."""
        if not isinstance(error, ConstraintError):
            LOGGER.error("A request failed.", exc_info=error)
        self._end(row, "error", error)

    def _end(self, row: Session, reason: str, error: Exception | None = None) -> None:
        """End a request between rounds."""
        rows = self._rows_of(row)
        rows.remove(row)
        self._leave(row, has_cache=rows is not self._paused)
        update = row.last_update(reason, None if error is None else _sentence(error))
        row.generation.tell(replace(update, refused=isinstance(error, ConstraintError)))

    def _leave(self, row: Session, has_cache: bool = True) -> None:
        """Let another request use a row's cache."""
        kv_cache = row.close()
        if self._last_alone is row:
            self._last_alone = None
        if has_cache:
            self._give_back(kv_cache)

    def _give_back(self, kv_cache: KVCache) -> None:
        """Let another request use a cache. Caches are taken in a fixed order."""
        kv_cache.reset()
        self._free.append(kv_cache)
        self._free.sort(key=self._kv_caches.index, reverse=True)

    def _check_memory(self) -> None:
        """Raise :class:`EESDError` if no text fits the memory, or if caches that are allocated as a
        whole take more than ``kv_memory``."""
        taken = sum(kv_cache.fixed_bytes for kv_cache in self._kv_caches)
        given = self._options.kv_memory
        if taken > given:
            rows = len(self._kv_caches)
            raise EESDError(
                f"{rows} rows of {taken // rows // self._slot_bytes} slots take "
                f"{-(-taken >> 20)} MiB of the GPU's memory, and "
                f"{given >> 20} MiB are given for keys and values; start with fewer rows or "
                "more memory."
            )
        if self.longest < 2:  # room for a prompt token and a new token
            least = (2 + self._llm.manifest.max_tree_nodes) * self._slot_bytes
            raise EESDError(
                f"kv_memory is {self._options.kv_memory} bytes, but the shortest text needs "
                f"{least}; give more, such as 2GiB."
            )


def _sentence(error: Exception) -> str:
    """Return an error's message for the user. Only the messages of this project's errors are
    written for users."""
    if isinstance(error, EESDError):
        return str(error)
    return "The request failed inside the server; its log says why."
