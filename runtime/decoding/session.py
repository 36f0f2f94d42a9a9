"""A sequence being generated: its tokens, its KV cache, and the calls over them.

The draft proposes tokens behind the last committed one (the root). After each step the controller says whether to continue.
Where the text repeats, it proposes tokens itself, which cost no draft step. One verify pass judges all of them. The accepted
path and the verifier's bonus token are committed; the bonus token is the next root, and its cache entry is made by the next
round's passes, so nothing runs twice or alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock

from eesd.common.checks import shown
from eesd.common.draft_vocab import WHOLE
from eesd.common.errors import EESDError
from eesd.common.manifest import PREFILL_CHUNK
from eesd.runtime.decoding.draft_tree import Node, is_chain, tree_mask
from eesd.runtime.decoding.round import Drafting, RoundResult, run_round
from eesd.runtime.decoding.samplers import Allowed, make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.decoding.text_drafter import TextIndex
from eesd.runtime.engines.base import Call, Engine, KVCache, Logits, StepOutputs, Values

LOGIT_CHUNK = 64
"""Tokens of a prompt whose logits are in memory at a time."""


@dataclass(frozen=True)
class Limits:
    """Where a sequence ends (EOS ids, new tokens, slots of the cache), how many nodes a round may verify besides the root, how
    many tokens of the prompt one call takes, and whether only logits of nodes ``in_place`` count: in the slots that they would
    have as a chain. A path that leaves them is cut: what its first displaced node says about the next token is asked again. A
    round does not draft beyond the next of ``last_positions``, ascending: another kernel computes the tokens behind them.
    ``until_stop`` says how many of the next tokens belong to the text, if a stop string ends it within them."""

    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    max_seq_len: int
    max_tree_nodes: int
    prefill_chunk: int = PREFILL_CHUNK
    in_place: bool = False
    last_positions: tuple[int, ...] = ()
    until_stop: Callable[[Sequence[int]], int | None] | None = None


Forced = Callable[[int], Sequence[int]]
"""At most so many tokens that must follow everything committed."""
Observer = Callable[[Sequence[int], Logits], None]
"""Called after each round with the tokens that it committed and, for each, the verifier's logits behind the token before it
[tokens, V]. They are valid during the call. Without an observer, logits may stay on the device."""


class Session:
    """A sequence over its own KV cache. ``step`` runs one round; between steps nothing runs and nothing is pending.

    ``step`` is a transaction: if drafting, verifying or accepting raises (a cancel, a failing engine), the session stands where
    the round began, and ``step`` can be called again. Controllers learn after the commit, so they never learn from a cancelled
    round.

    Attributes:
        tokens: The prompt and everything committed.
        stats: Counts and seconds so far.
        finish_reason: None until the sequence ends; see :class:`RoundResult`.
        drafting: How it drafts alone.
        verify, limits, observer, forced, sampler, index: What its rounds work with; see the arguments.
        drafted_to: From this slot on there is nothing of a draft that verify has not written again.
        lock: Held while engines run. Sessions over the same engines share it, so other threads wait for a round to end.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        kv_cache: KVCache,
        verify: Engine,
        drafting: Drafting,
        limits: Limits,
        sampling: Sampling,
        vocab_size: int,
        observer: Observer | None = None,
        allowed: Allowed | None = None,
        forced: Forced | None = None,
        prompt_observer: Observer | None = None,
    ) -> None:
        """Begin a sequence.

        Args:
            prompt: Token ids, at least one.
            kv_cache: Memory of the sequence.
            verify: The verify engine.
            drafting: How it drafts alone.
            limits: Where the sequence ends.
            sampling: How tokens are chosen.
            vocab_size: V.
            observer: Told what each round commits.
            allowed: Restricts the tokens; see :data:`~eesd.runtime.decoding.samplers.Allowed`.
            forced: Knows tokens that must follow, which are a draft for nothing.
            prompt_observer: The same as ``observer`` for the tokens of the prompt but the first, piece by piece.

        Raises:
            EESDError: The prompt is empty, too long, or has an unknown token.
        """
        check_prompt(prompt, limits, vocab_size)
        self.tokens = list(prompt)
        self.stats = Stats(prompt_tokens=len(prompt))
        self.finish_reason: str | None = None
        self.drafting = drafting
        self.lock = RLock()
        self._kv_cache = kv_cache
        self.verify = verify
        self.index = TextIndex()
        self.forced = forced
        self.limits = limits
        columns = drafting.drafter.columns if drafting.drafter else WHOLE
        self.sampler = make_sampler(sampling, vocab_size, columns, allowed)
        self.observer = observer
        self._prompt_observer = prompt_observer
        self._target = len(prompt) - 1
        self._prefilled = self._observed = 0
        self.drafted_to = 0
        self._closed = False

    def prefill(self) -> None:
        """Put the prompt, all but its last token, into the cache. The first ``step`` does it if this was not called.

        The last token is the first root, so prefill needs no logits.
        """
        with self.lock:
            while (piece := self.next_piece(self.limits.prefill_chunk)) is not None:
                started = time.perf_counter()
                [outputs] = self.verify.forward([piece])
                self.add_piece(piece, outputs, time.perf_counter() - started)

    def next_piece(self, most: int) -> Call | None:
        """The call of the next piece of the prompt, at most ``most`` tokens; None: the prompt is complete."""
        self.check_open()
        start, last = self._prefilled, self.stats.prompt_tokens - 1
        logits = self._prompt_observer is not None and self._observed < last
        most = min(most, self.limits.prefill_chunk, LOGIT_CHUNK if logits else most)
        stop = min(start + most, last if logits else self._target)
        if start == stop:
            return None
        self._kv_cache.reserve(stop)
        return Call(self._kv_cache, self.tokens[start:stop], range(start, stop), start, logits=logits)

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Go on behind a piece of the prompt, whose call took so many seconds."""
        stop = piece.slot + len(piece.tokens)
        if self._prompt_observer is not None and self._observed < stop and piece.logits:
            start = max(piece.slot, self._observed)  # after a move, what was observed before comes again
            self._prompt_observer(self.tokens[start + 1 : stop + 1], outputs.logits[start - piece.slot :])
            self._observed = stop
        self._prefilled = stop
        self.stats.prefill_seconds += seconds

    def fill(self, values: Sequence[Values]) -> None:
        """Take the keys and values of the prompt's beginning, in their order, instead of computing them."""
        for part in values:
            stop = self._prefilled + part.shape[3]
            self._kv_cache.reserve(stop)
            self._kv_cache.fill(self._prefilled, part)
            self._prefilled = stop

    @property
    def unfilled(self) -> int:
        """Tokens of the prompt, or after a move of the text, that are still to be put into the cache."""
        return self._target - self._prefilled

    def move(self, kv_cache: KVCache) -> None:
        """Go on in another cache, between two rounds: the keys and values of all tokens are computed again."""
        self.check_open()
        self._kv_cache, self._prefilled, self._target = kv_cache, 0, len(self.tokens) - 1

    def step(self) -> RoundResult:
        """Run one round and commit what it accepted. Raises :class:`EESDError` on a finished or closed session."""
        with self.lock:
            [current] = run_round([self], self.verify)
        if current.error is not None:
            raise current.error
        assert current.result is not None
        return current.result

    def peek(self) -> Logits:
        """The verifier's logits [V] behind the last committed token, by a single-token pass. Commits nothing."""
        with self.lock:
            self.prefill()
            self._kv_cache.reserve(len(self.tokens))
            [outputs] = self.verify.forward([self.verified([Node(self.tokens[-1], index=0)])])
            row: Logits = outputs.logits[0].copy()
        return row

    @property
    def kv_cache(self) -> KVCache:
        """The session's cache, for calls of other engines. Raises :class:`EESDError` on a closed session."""
        self.check_open()
        return self._kv_cache

    def close(self) -> None:
        """Give up the cache, which the next session will use. Then only ``tokens``, ``stats``, ``finish_reason`` are left."""
        self._closed = True

    def check_open(self) -> None:
        """Raise :class:`EESDError` if the session is closed."""
        if self._closed:
            raise EESDError("The session is closed, and its KV cache belongs to the next one; start a new session.")

    @property
    def left(self) -> int:
        """Most tokens that may still follow."""
        return min(self.limits.max_new_tokens - self.stats.new_tokens, self.limits.max_seq_len - len(self.tokens))

    def verified(self, nodes: Sequence[Node]) -> Call:
        """The call of the verify engine for nodes. Slots after theirs keep nothing of the draft."""
        stop = len(self.tokens) - 1 + len(nodes)
        if self.drafted_to > stop:
            self._kv_cache.clear(stop, self.drafted_to)
        return self.call(nodes)

    def call(self, nodes: Sequence[Node], first: int = 0) -> Call:
        """The engine call for the nodes from ``first`` on, each in the slot ``node.index`` behind the root's."""
        root, called = len(self.tokens) - 1, nodes[first:]
        tokens, positions = [node.token for node in called], [root + node.depth for node in called]
        if is_chain(nodes):
            return Call(self._kv_cache, tokens, positions, root + first)
        return Call(self._kv_cache, tokens, positions, root + first, root, tree_mask(nodes, first))


def check_prompt(prompt: Sequence[int], limits: Limits, vocab_size: int) -> None:
    """Raise :class:`EESDError` if the prompt is empty, too long, or has an unknown token."""
    if not len(prompt):
        raise EESDError("The prompt is empty; give at least one token.")
    if len(prompt) >= limits.max_seq_len:
        raise EESDError(
            f"The prompt has {len(prompt)} tokens, the cache {limits.max_seq_len} slots; "
            "shorten the prompt or export with a larger --max-seq-len."
        )
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise EESDError(f"The prompt has the token id {shown(outside)}; ids go from 0 to {vocab_size - 1}.")
