"""A request that runs: its tokens, its KV cache, the calls over them, and the report of each round.

The draft proposes tokens after the last committed one (the root). After each step the controller says whether to continue.
Where the text repeats, it proposes tokens itself, which cost no draft step. One verify pass judges all of them. The accepted
path and the verifier's bonus token are committed; the bonus token is the next root, and its cache entry is made by the next
round's passes, so nothing runs twice or alone.
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.draft_vocab import WHOLE
from eesd.common.errors import EESDError
from eesd.common.manifest import PREFILL_CHUNK
from eesd.runtime.decoding.draft_tree import Node, is_chain, tree_mask
from eesd.runtime.decoding.round import Drafting, RoundResult, run_round
from eesd.runtime.decoding.samplers import Allowed, make_sampler
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.decoding.text_drafter import TextIndex
from eesd.runtime.engines.base import Call, Engine, KVCache, Logits, StepOutputs
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import Generation, TokenLogprob, TokenOutput, Update
from eesd.runtime.text import TextCodec, TextStream

LOGIT_CHUNK = 64
"""Tokens of a prompt whose logits are in memory at a time."""


@dataclass(frozen=True)
class Limits:
    """What a model and its engines allow a sequence.

    Attributes:
        vocab_size: V.
        eos_token_ids: Tokens that end a text.
        max_seq_len: Slots of the cache.
        max_tree_nodes: Nodes that a round may verify besides the root.
        prefill_chunk: Tokens of a prompt that one call takes.
        in_place: Whether only logits of nodes in the slots count that they would have as a chain. A path that leaves them is
            cut: what its first displaced node says about the next token is asked again.
        last_positions: A round does not draft beyond the next of these, ascending: another kernel computes later tokens.
        exact: See :class:`~eesd.runtime.decoding.stats.Stats`.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_seq_len: int
    max_tree_nodes: int
    prefill_chunk: int = PREFILL_CHUNK
    in_place: bool = False
    last_positions: tuple[int, ...] = ()
    exact: bool | None = None


Observer = Callable[[Sequence[int], Logits], None]
"""Called after each round with the tokens that it committed and, for each, the verifier's logits behind the token before it
[tokens, V]. They are valid during the call. Without an observer, logits may stay on the device."""


class Session:
    """A request over its own KV cache, alone or as a row of a batch. ``step`` runs one round; between steps nothing runs.

    ``step`` is a transaction: if drafting, verifying or accepting raises (a cancel, a failing engine), the session stands where
    the round began, and ``step`` can be called again. Controllers learn after the commit, so they never learn from a cancelled
    round.

    Attributes:
        generation, request: The handle of the caller, and the request.
        tokens: The prompt and everything committed.
        stats: Counts and seconds so far.
        finish_reason: None until the sequence ends; see :class:`RoundResult`.
        drafting: How it drafts alone.
        verify, limits, eos_token_ids, forced, sampler, index, observer: Its rounds work with these. ``forced`` gives at most
            so many tokens that must follow.
        drafted_to: From this slot on there is nothing of a draft that verify has not written again.
        began: Time at which it began, in seconds of ``time.monotonic``.
        cached_tokens: Tokens of the prompt whose keys and values were kept from earlier requests.
        lock: Held while engines run. Sessions over the same engines share it, so other threads wait for a round to end.
    """

    def __init__(
        self,
        generation: Generation,
        kv_cache: KVCache,
        verify: Engine,
        drafting: Drafting,
        limits: Limits,
        codec: TextCodec | None = None,
        observer: Observer | None = None,
        lock: "RLock | None" = None,
    ) -> None:
        """Begin a request.

        Args:
            generation: The request, as it was accepted.
            kv_cache: Memory of the sequence.
            verify: The verify engine.
            drafting: How it drafts alone.
            limits: Of the model and its engines.
            codec: Makes the text; None: there are only token ids.
            observer: Told what each round commits.
            lock: Held while engines run. Default: a new one.

        Raises:
            EESDError: The prompt is empty, too long, or has an unknown token.
        """
        self.generation, self.request = generation, (request := generation.request)
        check_prompt(request.tokens, limits.max_seq_len, limits.vocab_size)
        generation.began = self.began = time.monotonic()
        self.tokens = list(request.tokens)
        self.stats = Stats(prompt_tokens=len(self.tokens), exact=limits.exact)
        self.finish_reason: str | None = None
        self.verify, self.drafting, self.limits = verify, drafting, limits
        self.eos_token_ids = (*(() if request.ignore_eos else limits.eos_token_ids), *request.stop_token_ids)
        self.forced = None if request.constraint is None or not request.draft else self._forced
        columns = drafting.drafter.columns if drafting.drafter else WHOLE
        self.sampler = make_sampler(request.sampling, limits.vocab_size, columns, self._restriction())
        self.index = TextIndex()
        self.observer = observer if request.logprobs is None else self._observe
        self.drafted_to = self.cached_tokens = 0
        self.lock = lock or RLock()
        self._observer, self._kv_cache = observer, kv_cache
        self._text = TextStream(codec, request.tokens, request.stop) if codec is not None else None
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs = None if request.prompt_logprobs is None else [TokenLogprob(self.tokens[0], None)]
        self._target = len(self.tokens) - 1
        self._prefilled = self._observed = 0
        self._moved = self._closed = False

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
        logits = self.request.prompt_logprobs is not None and self._observed < last
        most = min(most, self.limits.prefill_chunk, LOGIT_CHUNK if logits else most)
        stop = min(start + most, last if logits else self._target)
        if start == stop:
            return None
        self._kv_cache.reserve(stop)
        return Call(self._kv_cache, self.tokens[start:stop], range(start, stop), start, logits=logits)

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Go on behind a piece of the prompt, whose call took so many seconds."""
        stop = piece.slot + len(piece.tokens)
        top = self.request.prompt_logprobs
        if self._prompt_logprobs is not None and top is not None and self._observed < stop and piece.logits:
            start = max(piece.slot, self._observed)  # after a move, observed tokens come again
            self._prompt_logprobs += _logprobs(self.tokens[start + 1 : stop + 1], outputs.logits[start - piece.slot :], top)
            self._observed = stop
        self._prefilled = stop
        self.stats.prefill_seconds += seconds

    def take_prefix(self, prefixes: PrefixCache) -> None:
        """Take the kept keys and values of the prompt's beginning, unless its log-probabilities are asked for."""
        if self.request.prompt_logprobs is None:
            for part in prefixes.find(self.tokens[:-1], self.request.salt):
                stop = self._prefilled + part.shape[3]
                self._kv_cache.reserve(stop)
                self._kv_cache.fill(self._prefilled, part)
                self._prefilled = stop
            if not self._moved:
                self.cached_tokens = self._prefilled

    def keep_prefix(self, prefixes: PrefixCache) -> None:
        """Keep its keys and values for requests that begin like it."""
        if not self.unfilled:
            prefixes.add(self.tokens[:-1], self._kv_cache.values, self.request.salt)

    @property
    def unfilled(self) -> int:
        """Tokens of the prompt, or after a move of the text, that are still to be put into the cache."""
        return self._target - self._prefilled

    def move(self, kv_cache: KVCache) -> None:
        """Go on in another cache, between two rounds: the keys and values of all tokens are computed again."""
        self.check_open()
        self._kv_cache, self._prefilled, self._target, self._moved = kv_cache, 0, len(self.tokens) - 1, True

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

    def end(self) -> KVCache:
        """Close the session, and keep its output for drafts of later ones. Returns its cache."""
        self.close()
        if (text := self.drafting.text) is not None and text.past is not None:
            text.past.add(self.new_tokens)
        return self._kv_cache

    def check_open(self) -> None:
        """Raise :class:`EESDError` if the session is closed."""
        if self._closed:
            raise EESDError("The session is closed, and its KV cache belongs to the next one; start a new session.")

    @property
    def new_tokens(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self.stats.prompt_tokens :]

    @property
    def left(self) -> int:
        """Most tokens that may still follow."""
        return min(self.request.max_new_tokens - self.stats.new_tokens, self.limits.max_seq_len - len(self.tokens))

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

    def _restriction(self) -> Allowed | None:
        """What restricts the tokens: the request's constraint, and EOS before ``min_tokens``."""
        constraint, least, size = self.request.constraint, self.request.min_tokens, self.limits.vocab_size
        eos = [token for token in self.eos_token_ids if token < size]
        if constraint is None and (not least or not eos):
            return None

        def allowed(path: Sequence[int]) -> NDArray[np.bool_] | None:
            tokens = [*self.new_tokens, *path]
            mask = None if constraint is None else constraint.allowed(tokens)
            if len(tokens) >= least or not eos:
                return mask
            longer = np.ones(size, np.bool_) if mask is None else mask.copy()
            longer[eos] = False
            return longer if longer.any() else mask  # a constraint that has come to its end goes before min_tokens

        return allowed

    def _forced(self, most: int) -> Sequence[int]:
        """What the constraint says must follow."""
        assert self.request.constraint is not None
        return self.request.constraint.forced(self.new_tokens, most)

    def until_stop(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens belong to the text, if a stop string ends it within them."""
        if not self.request.stop:
            return None
        text = copy(self._text)
        assert text is not None
        for count, token in enumerate(tokens, 1):
            if token not in self.request.stop_token_ids:
                text.push(token)
            if text.stop:
                return count
        return None

    def update(self, result: RoundResult) -> Update:
        """What to report of a round."""
        outputs: list[TokenOutput] = []
        sources = ["text" if text else "exit" for text in result.from_text]
        sources += ["verify"] * (len(result.tokens) - len(sources))
        for at, (token, source) in enumerate(zip(result.tokens, sources, strict=True)):
            text = self._text.push(token) if self._text and token not in self.request.stop_token_ids else ""
            outputs.append(TokenOutput(token, text, source, self._logprobs[at] if self._logprobs else None))
        self._logprobs = []
        held = self._text.finish() if self._text and result.finish_reason else ""
        prompt, self._prompt_logprobs = self._prompt_logprobs, None
        return Update(
            tuple(outputs),
            tuple(result.rejected),
            held,
            result.finish_reason,
            stop=self._text.stop if self._text else None,
            prompt_logprobs=None if prompt is None else tuple(prompt),
            cached_tokens=self.cached_tokens,
            stats=self.stats,
        )

    def last_update(self, reason: str, error: str | None = None) -> Update:
        """The end of a request that no round ended."""
        held = self._text.finish() if self._text else ""
        stats, cached = replace(self.stats), self.cached_tokens
        return Update(held=held, finish_reason=reason, error=error, cached_tokens=cached, stats=stats)

    def _observe(self, tokens: Sequence[int], logits: Logits) -> None:
        assert self.request.logprobs is not None
        self._logprobs = _logprobs(tokens, logits, self.request.logprobs)
        if self._observer is not None:
            self._observer(tokens, logits)


def check_prompt(prompt: Sequence[int], max_seq_len: int, vocab_size: int) -> None:
    """Raise :class:`EESDError` if the prompt is empty, too long, or has an unknown token."""
    if not len(prompt):
        raise EESDError("The prompt is empty; give at least one token.")
    if len(prompt) >= max_seq_len:
        raise EESDError(
            f"The prompt has {len(prompt)} tokens, the cache {max_seq_len} slots; "
            "shorten the prompt or export with a larger --max-seq-len."
        )
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise EESDError(f"The prompt has the token id {shown(outside)}; ids go from 0 to {vocab_size - 1}.")


def _logprobs(tokens: Sequence[int], logits: Logits, top: int) -> list[TokenLogprob]:
    """Of each token under the logits behind the one before it [n, V]; and the ``top`` most likely ones."""
    found = []
    for token, row in zip(tokens, logits, strict=True):
        scores = row.astype(np.float64)
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        best = np.argpartition(-scores, min(top, len(scores) - 1))[:top] if top else np.empty(0, np.int64)
        best = best[np.lexsort((best, -scores[best]))]
        found.append(TokenLogprob(int(token), float(scores[token]), tuple((int(i), float(scores[i])) for i in best)))
    return found
