"""A session is a running request. It has the request's sequence and the rules that end the text,
and it reports each round.

The draft proposes tokens after the last committed token (the root). After each draft step the
controller decides whether to continue. If the text repeats itself, tokens are proposed from its
repetitions, without a draft step. One verify pass judges all proposed tokens. The round commits the
accepted path and the verifier's bonus token, which is the next root. The next round's passes write
the root's cache entry, so no token is computed twice or needs a separate pass.
"""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import shown
from eesd.common.draft_vocab import WHOLE
from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest
from eesd.runtime.decoding.draft_tree import Node
from eesd.runtime.decoding.drafting import Drafting
from eesd.runtime.decoding.round import Observer, TokenSequence, run_round
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.sampling import normalize
from eesd.runtime.decoding.stats import RoundResult
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, KVCache, Logits, StepOutputs
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import Generation, TokenLogprob, TokenOutput, Update
from eesd.runtime.text import TextCodec, TextStream


class Session(TokenSequence):
    """A running request with its own KV cache. It runs alone or as a row of a batch. ``step`` runs
    one round, and nothing is pending between steps.

    ``step`` is a transaction. If drafting, verifying or accepting raises an exception (such as a
    cancellation or an engine failure), the session is as it was before the round, and ``step`` can
    be called again. Controllers learn after the commit, so they never learn from a cancelled round.

    Attributes:
        generation: The caller's handle. Set by the constructor.
        request: The request of ``generation``. Set by the constructor.
        ends: The tokens that end the text. Set by the constructor.
        began: Time at which the session began, in seconds of ``time.monotonic``.
        cached_tokens: Number of prompt tokens whose keys and values came from earlier requests. Set
            by :meth:`take_prefix`.
        lock: The lock that is held while engines run. Sessions that use the same engines share the
            lock, so other threads wait until a round ends.
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
            kv_cache: An empty cache for the sequence.
            engines: The engines that run the calls.
            drafting: The drafters of the request when it runs alone.
            codec: Turns tokens into text. It is None if there is no tokenizer.
            observer: Called with each round's tokens and logits.
            lock: The lock that other sessions over these engines share, or None if there are no
                other sessions.

        Raises:
            EESDError: The prompt is empty, too long, or has an unknown token.
        """
        request = generation.request
        manifest = engines.verify.manifest
        check_prompt(request.tokens, manifest)
        self.generation = generation
        self.request = request
        self.lock = lock or RLock()
        self.cached_tokens = 0
        self._moved = False
        self._looked_up = False
        self._text = None
        if codec is not None:
            self._text = TextStream(codec, request.tokens, request.stop, request.min_tokens)
        self.ends = self._ends(manifest)
        self._unended: list[int] = []
        if request.min_tokens:
            self._unended = [t for t in self.ends if t < manifest.geometry.vocab_size]
        columns = drafting.drafter.columns if drafting.drafter else WHOLE
        super().__init__(
            request.tokens,
            kv_cache,
            engines,
            drafting,
            make_sampler(
                request.sampling,
                manifest.geometry.vocab_size,
                columns,
                self._allowed if request.constraint is not None or self._unended else None,
            ),
            request.max_new_tokens,
            observer,
        )
        self._observer = observer
        self._logprobs: list[TokenLogprob] = []
        if request.logprobs is not None:
            self.observer = self._observe
        self._prompt_logprobs: list[TokenLogprob] | None = None
        if request.prompt_logprobs is not None:
            self._prompt_logprobs = [TokenLogprob(request.tokens[0], None)]
            self._to_score = len(request.tokens) - 1
        self.began = time.monotonic()
        generation.began = self.began

    def _ends(self, manifest: Manifest) -> tuple[int, ...]:
        """The tokens that end the text."""
        ends = [*self.request.stop_token_ids]
        if not self.request.ignore_eos:
            ends += manifest.eos_token_ids
        if self._text is not None:
            ends += self._text.stop_tokens
        return tuple(ends)

    # The prompt

    def prefill(self) -> None:
        with self.lock:
            super().prefill()

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        stop = piece.slot + len(piece.tokens)
        if piece.logits and self._scored < stop:
            assert self.request.prompt_logprobs is not None and self._prompt_logprobs is not None
            start = max(piece.slot, self._scored)  # after a move, some tokens are computed again
            logits = outputs.logits[start - piece.slot :]
            self._prompt_logprobs += _logprobs(
                self.tokens[start + 1 : stop + 1], logits, self.request.prompt_logprobs
            )
            self._scored = stop
        super().add_piece(piece, outputs, seconds)

    def take_prefix(self, prefixes: PrefixCache) -> None:
        """Reuse the keys and values that are kept for the beginning of the text. Nothing is reused
        if the request asks for the prompt's log-probabilities. This method may be called again
        until a piece of the prompt is computed."""
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
        """If the whole prompt is computed, keep its keys and values for later requests with the
        same beginning."""
        if not self.unfilled:
            prefixes.add(self.tokens[:-1], self._kv_cache.values, self.request.salt)

    def move(self, kv_cache: KVCache) -> None:
        """Continue with another cache, in which the keys and values of all tokens are computed
        again. Call this method between two rounds."""
        self.check_open()
        self._kv_cache = kv_cache
        self._moved = True
        self._looked_up = False
        self._prefilled = 0
        self._target = len(self.tokens) - 1

    # Rounds

    def step(self) -> RoundResult:
        """Run one round and commit its tokens. Raises :class:`EESDError` on a finished or closed
        session."""
        with self.lock:
            [current] = run_round([self], self.engines)
        if current.error is not None:
            raise current.error
        assert current.result is not None
        return current.result

    def peek(self) -> Logits:
        """Return the verifier's logits [V] after the last committed token. A single-token pass
        computes them and commits nothing."""
        with self.lock:
            self.prefill()
            self._kv_cache.reserve(len(self.tokens))
            [outputs] = self.engines.verify.forward(
                [self.verified([Node(self.tokens[-1], index=0)])]
            )
            row: Logits = outputs.logits[0].copy()
        return row

    @property
    def new_tokens(self) -> list[int]:
        """The committed tokens that follow the prompt."""
        return self.tokens[self.stats.prompt_tokens :]

    def _allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return a mask [V] of the tokens that the constraint and ``min_tokens`` allow after a
        drafted path, or None if all tokens are allowed."""
        tokens = [*self.new_tokens, *path]
        mask = None
        if self.request.constraint is not None:
            mask = self.request.constraint.allowed(tokens)
        if len(tokens) >= self.request.min_tokens or not self._unended:
            return mask
        longer = np.ones(self.manifest.geometry.vocab_size, np.bool_)
        if mask is not None:
            longer = mask.copy()
        longer[self._unended] = False
        # If the constraint has come to its end, it takes precedence over ``min_tokens``.
        return longer if longer.any() else mask

    def forced(self, most: int) -> Sequence[int]:
        constraint = self.request.constraint
        if constraint is None or not self.request.draft:
            return ()
        return constraint.forced(self.new_tokens, most)

    def end_of(self, tokens: Sequence[int]) -> int | None:
        end = next((count for count, token in enumerate(tokens, 1) if token in self.ends), None)
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
        """The report of a round. Call this once for each round."""
        outputs: list[TokenOutput] = []
        sources = [*result.sources, "verify"]  # the bonus token, if the text does not end before it
        for at, (token, source) in enumerate(zip(result.tokens, sources, strict=False)):
            text = ""
            if self._text and token not in self.request.stop_token_ids:
                text = self._text.push(token)
            logprob = self._logprobs[at] if self._logprobs else None
            outputs.append(TokenOutput(token, text, source, logprob))
        self._logprobs = []
        held = ""
        stop = None
        if self._text:
            held = self._text.finish() if result.finish_reason else ""
            stop = self._text.stop
        prompt = self._prompt_logprobs
        self._prompt_logprobs = None
        return Update(
            tuple(outputs),
            tuple(result.rejected),
            held,
            result.finish_reason,
            stop=stop,
            prompt_logprobs=None if prompt is None else tuple(prompt),
            cached_tokens=self.cached_tokens,
            stats=self.stats,
        )

    def last_update(self, reason: str, error: str | None = None) -> Update:
        """The final update of a request that ended between rounds."""
        return Update(
            held=self._text.finish() if self._text else "",
            finish_reason=reason,
            error=error,
            cached_tokens=self.cached_tokens,
            stats=replace(self.stats),
        )

    def _observe(self, tokens: Sequence[int], logits: Logits) -> None:
        assert self.request.logprobs is not None
        self._logprobs = _logprobs(tokens, logits, self.request.logprobs)
        if self._observer is not None:
            self._observer(tokens, logits)


def _logprobs(tokens: Sequence[int], logits: Logits, top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token, and the ``top`` most likely tokens at its position.
    The logits [n, V] are those after the previous token."""
    found = []
    for token, row in zip(tokens, logits, strict=True):
        scores = normalize(row.astype(np.float64))
        best = np.argpartition(-scores, min(top, len(scores) - 1))[:top]
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
            f"The prompt has {len(prompt)} tokens, but the cache has "
            f"{manifest.max_seq_len} slots; shorten the prompt, or export with a larger "
            "--max-seq-len."
        )
    vocab_size = manifest.geometry.vocab_size
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise EESDError(
            f"The prompt has the token id {shown(outside)}; ids go from 0 to {vocab_size - 1}."
        )
