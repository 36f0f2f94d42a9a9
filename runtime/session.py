"""A request that runs: its tokens, its KV cache, the calls over them, and the report of each round.

The draft proposes tokens after the last committed one (the root). After each step the controller
says whether to continue. Where the text repeats, it proposes tokens itself, which cost no draft
step. One verify pass judges all of them. The accepted path and the verifier's bonus token are
committed; the bonus token is the next root, and its cache entry is made by the next round's passes,
so nothing runs twice or alone.
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.draft_vocab import WHOLE
from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest
from eesd.runtime.decoding.draft_tree import Node, is_chain, tree_mask
from eesd.runtime.decoding.round import Drafting, RoundResult, run_round
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.decoding.text_drafter import TextIndex
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, KVCache, Logits, StepOutputs
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import Generation, TokenLogprob, TokenOutput, Update
from eesd.runtime.text import TextCodec, TextStream

LOGIT_CHUNK = 64
"""Tokens of a prompt whose logits are in memory at a time."""

Observer = Callable[[Sequence[int], Logits], None]
"""Called after each round with the tokens that it committed and, for each, the verifier's logits
behind the token before it [tokens, V]. They are valid during the call. Without an observer, logits
may stay on the device."""


class Session:
    """A request over its own KV cache, alone or as a row of a batch. ``step`` runs one round;
    between steps nothing is pending.

    ``step`` is a transaction: if drafting, verifying or accepting raises (a cancel, a failing
    engine), the session stands where the round began, and ``step`` can be called again. Controllers
    learn after the commit, so they never learn from a cancelled round.

    Attributes:
        generation, request: The handle of the caller, and the request.
        tokens: The prompt and everything committed.
        stats: Counts and seconds so far.
        finish_reason: None until the sequence ends; see :class:`RoundResult`.
        drafting: How it drafts alone.
        engines, manifest: The engines that run it, and the directory's manifest.
        ends: Tokens that end the text.
        began: Time at which it began, in seconds of ``time.monotonic``.
        cached_tokens: Tokens of the prompt whose keys and values were kept from earlier requests.
        sampler, index, observer: Its rounds work with these.
        drafted_to: From this slot on there is nothing of a draft that verify has not written again.
        lock: Held while engines run. Sessions over the same engines share it, so other threads wait
            for a round to end.
    """

    def __init__(
        self,
        generation: Generation,
        kv_cache: KVCache,
        engines: Engines,
        drafting: Drafting,
        codec: TextCodec | None = None,
        observer: Observer | None = None,
        lock: "RLock | None" = None,
    ) -> None:
        """Begin a request.

        Args:
            generation: The request.
            kv_cache: Memory of the sequence, empty.
            engines: Run it.
            drafting: How it drafts alone.
            codec: Makes the text; None: there are only token ids.
            observer: Told what each round commits.
            lock: Shared with other sessions over these engines; None: there are no others.

        Raises:
            EESDError: The prompt is empty, too long, or has an unknown token.
        """
        request = generation.request
        manifest = engines.verify.manifest
        check_prompt(request.tokens, manifest)
        self.generation = generation
        self.request = request
        self.manifest = manifest
        self.engines = engines
        self.drafting = drafting
        self.tokens = list(request.tokens)
        self.stats = Stats(prompt_tokens=len(request.tokens), exact=engines.exact)
        self.finish_reason: str | None = None
        self.lock = lock or RLock()
        self.index = TextIndex()
        self._text = None
        if codec is not None:
            self._text = TextStream(codec, request.tokens, request.stop, request.min_tokens)
        self.ends = (
            *(() if request.ignore_eos else manifest.eos_token_ids),
            *request.stop_token_ids,
            *(self._text.stop_tokens if self._text else ()),
        )
        columns = drafting.drafter.columns if drafting.drafter else WHOLE
        vocab_size = manifest.geometry.vocab_size
        self._unended = (
            [token for token in self.ends if token < vocab_size] if request.min_tokens else []
        )
        restricted = request.constraint is not None or self._unended
        self.sampler = make_sampler(
            request.sampling, vocab_size, columns, self._allowed if restricted else None
        )
        self._observer = observer
        self.observer = observer if request.logprobs is None else self._observe
        self._logprobs: list[TokenLogprob] = []
        wanted = request.prompt_logprobs is not None
        self._prompt_logprobs = [TokenLogprob(request.tokens[0], None)] if wanted else None
        self.cached_tokens = self._prefilled = self._observed = self.drafted_to = 0
        self._target = len(request.tokens) - 1
        self._kv_cache = kv_cache
        self._moved = False
        self._looked_up = False
        self._closed = False
        generation.began = self.began = time.monotonic()

    # The prompt

    def prefill(self) -> None:
        """Put the prompt, all but its last token, into the cache. The first ``step`` does it if
        this was not called.

        The last token is the first root, so prefill needs no logits.
        """
        with self.lock:
            while (piece := self.next_piece(self.engines.verify.prefill_chunk)) is not None:
                started = time.perf_counter()
                with self.engines.span("prefill"):
                    [outputs] = self.engines.verify.forward([piece])
                self.add_piece(piece, outputs, time.perf_counter() - started)

    def next_piece(self, most: int) -> Call | None:
        """The call of the next piece of the prompt, at most ``most`` tokens; None: the prompt is
        complete."""
        self.check_open()
        start = self._prefilled
        last = self.stats.prompt_tokens - 1
        logits = self.request.prompt_logprobs is not None and self._observed < last
        most = min(most, self.engines.verify.prefill_chunk, LOGIT_CHUNK if logits else most)
        stop = min(start + most, last if logits else self._target)
        if start == stop:
            return None
        self._kv_cache.reserve(stop)
        return Call(
            self._kv_cache, self.tokens[start:stop], range(start, stop), start, logits=logits
        )

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Note that the call of a piece of the prompt is done, and took ``seconds``."""
        stop = piece.slot + len(piece.tokens)
        if piece.logits and self._observed < stop:
            assert self.request.prompt_logprobs is not None and self._prompt_logprobs is not None
            start = max(piece.slot, self._observed)  # after a move, observed tokens come again
            logits = outputs.logits[start - piece.slot :]
            self._prompt_logprobs += _logprobs(
                self.tokens[start + 1 : stop + 1], logits, self.request.prompt_logprobs
            )
            self._observed = stop
        self._prefilled = stop
        self.stats.prefill_seconds += seconds

    @property
    def unfilled(self) -> int:
        """Tokens of the prompt, or after a move of the text, that are still to be put into the
        cache."""
        return self._target - self._prefilled

    def take_prefix(self, prefixes: PrefixCache) -> None:
        """Take the kept keys and values of the text's beginning, unless log-probabilities of the
        prompt are asked for. Until a piece is computed, this may be called again."""
        if self.request.prompt_logprobs is not None:
            return
        taken = self._prefilled if self._looked_up else None
        self._looked_up = True
        for part in prefixes.find(self.tokens[:-1], self.request.salt, taken):
            stop = self._prefilled + part.shape[3]
            self._kv_cache.reserve(stop)
            self._kv_cache.fill(self._prefilled, part)
            self._prefilled = stop
        if not self._moved:
            self.cached_tokens = self._prefilled

    def keep_prefix(self, prefixes: PrefixCache) -> None:
        """Keep the keys and values for requests that begin alike. Nothing is kept of a prompt that
        is not complete."""
        if not self.unfilled:
            prefixes.add(self.tokens[:-1], self._kv_cache.values, self.request.salt)

    def move(self, kv_cache: KVCache) -> None:
        """Go on in another cache, between two rounds: the keys and values of all tokens are
        computed again."""
        self.check_open()
        self._kv_cache = kv_cache
        self._moved = True
        self._looked_up = False
        self._prefilled, self._target = 0, len(self.tokens) - 1

    # Rounds

    def step(self) -> RoundResult:
        """Run one round and commit what it accepted. Raises :class:`EESDError` on a finished or
        closed session."""
        with self.lock:
            [current] = run_round([self], self.engines)
        if current.error is not None:
            raise current.error
        assert current.result is not None
        return current.result

    def peek(self) -> Logits:
        """The verifier's logits [V] behind the last committed token, by a single-token pass.
        Commits nothing."""
        with self.lock:
            self.prefill()
            self._kv_cache.reserve(len(self.tokens))
            [outputs] = self.engines.verify.forward(
                [self.verified([Node(self.tokens[-1], index=0)])]
            )
            row: Logits = outputs.logits[0].copy()
        return row

    @property
    def kv_cache(self) -> KVCache:
        """The session's cache, for calls of other engines. Raises :class:`EESDError` on a closed
        session."""
        self.check_open()
        return self._kv_cache

    def close(self) -> KVCache:
        """Give up the cache, which the next session will use, and return it. Then ``tokens``,
        ``stats`` and ``finish_reason`` are left."""
        self._closed = True
        return self._kv_cache

    def check_open(self) -> None:
        """Raise :class:`EESDError` if the session is closed."""
        if self._closed:
            raise EESDError(
                "The session is closed, and its KV cache belongs to the next one; start a new "
                "session."
            )

    @property
    def new_tokens(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self.stats.prompt_tokens :]

    @property
    def left(self) -> int:
        """Most tokens that may still follow."""
        return min(
            self.request.max_new_tokens - self.stats.new_tokens,
            self.manifest.max_seq_len - len(self.tokens),
        )

    def verified(self, nodes: Sequence[Node]) -> Call:
        """The call of the verify engine for nodes. Slots after theirs keep nothing of the draft."""
        stop = len(self.tokens) - 1 + len(nodes)
        if self.drafted_to > stop:
            self._kv_cache.clear(stop, self.drafted_to)
        return self.call(nodes)

    def call(self, nodes: Sequence[Node], first: int = 0) -> Call:
        """The engine call for the nodes from ``first`` on, each in the slot ``node.index`` behind
        the root's."""
        root = len(self.tokens) - 1
        called = nodes[first:]
        tokens = [node.token for node in called]
        positions = [root + node.depth for node in called]
        if is_chain(nodes):
            return Call(self._kv_cache, tokens, positions, root + first)
        return Call(self._kv_cache, tokens, positions, root + first, root, tree_mask(nodes, first))

    def _allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens [V] that may follow a drafted path: by the constraint, and no end before
        ``min_tokens``. None: all."""
        tokens = [*self.new_tokens, *path]
        constraint = self.request.constraint
        mask = None if constraint is None else constraint.allowed(tokens)
        if len(tokens) >= self.request.min_tokens or not self._unended:
            return mask
        longer = (
            np.ones(self.manifest.geometry.vocab_size, np.bool_) if mask is None else mask.copy()
        )
        longer[self._unended] = False
        # A constraint that has come to its end goes before min_tokens.
        return longer if longer.any() else mask

    def forced(self, most: int) -> Sequence[int]:
        """At most ``most`` tokens that must follow everything committed, by the constraint: a draft
        for nothing."""
        constraint = self.request.constraint
        return (
            constraint.forced(self.new_tokens, most)
            if constraint is not None and self.request.draft
            else ()
        )

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """The number of these next tokens that belong to the text, if EOS or a stop string ends it
        within them."""
        ends = [count for count, token in enumerate(tokens, 1) if token in self.ends]
        end = ends[0] if ends else None
        if not self.request.stop:
            return end
        text = copy(self._text)
        assert text is not None
        for count, token in enumerate(tokens[:end], 1):
            if token not in self.request.stop_token_ids:
                text.push(token)
            if text.stop:
                return count
        return end

    # Reports

    def update(self, result: RoundResult) -> Update:
        """What to report of a round."""
        outputs: list[TokenOutput] = []
        sources = ["text" if text else "exit" for text in result.from_text]
        sources += ["verify"] * (len(result.tokens) - len(sources))
        for at, (token, source) in enumerate(zip(result.tokens, sources, strict=True)):
            text = (
                self._text.push(token)
                if self._text and token not in self.request.stop_token_ids
                else ""
            )
            outputs.append(
                TokenOutput(token, text, source, self._logprobs[at] if self._logprobs else None)
            )
        self._logprobs = []
        held = self._text.finish() if self._text and result.finish_reason else ""
        prompt = self._prompt_logprobs
        self._prompt_logprobs = None
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
        stats = replace(self.stats)
        cached = self.cached_tokens
        return Update(
            held=held, finish_reason=reason, error=error, cached_tokens=cached, stats=stats
        )

    def _observe(self, tokens: Sequence[int], logits: Logits) -> None:
        assert self.request.logprobs is not None
        self._logprobs = _logprobs(tokens, logits, self.request.logprobs)
        if self._observer is not None:
            self._observer(tokens, logits)


def _logprobs(tokens: Sequence[int], logits: Logits, top: int) -> list[TokenLogprob]:
    """Of each token under the logits behind the one before it [n, V]; and the ``top`` most likely
    ones."""
    found = []
    for token, row in zip(tokens, logits, strict=True):
        scores = row.astype(np.float64)
        scores -= scores.max()
        scores -= np.log(np.exp(scores).sum())
        best = (
            np.argpartition(-scores, min(top, len(scores) - 1))[:top]
            if top
            else np.empty(0, np.int64)
        )
        best = best[np.lexsort((best, -scores[best]))]
        found.append(
            TokenLogprob(
                int(token), float(scores[token]), tuple((int(i), float(scores[i])) for i in best)
            )
        )
    return found


def check_prompt(prompt: Sequence[int], manifest: Manifest) -> None:
    """Raise :class:`EESDError` if the prompt is empty, too long, or has an unknown token."""
    if not len(prompt):
        raise EESDError("The prompt is empty; give at least one token.")
    if len(prompt) >= manifest.max_seq_len:
        raise EESDError(
            f"The prompt has {len(prompt)} tokens, the cache {manifest.max_seq_len} slots; "
            "shorten the prompt or export with a larger --max-seq-len."
        )
    vocab_size = manifest.geometry.vocab_size
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise EESDError(
            f"The prompt has the token id {shown(outside)}; ids go from 0 to {vocab_size - 1}."
        )
