"""A request that has begun: its sequence, its text, and what is reported of its tokens."""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.decoding.round import Drafting, RoundResult
from eesd.runtime.decoding.samplers import Allowed
from eesd.runtime.decoding.session import Limits, Observer, Session
from eesd.runtime.engines.base import Engine, KVCache, Logits
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import Generation, TokenLogprob, TokenOutput, Update
from eesd.runtime.text import TextCodec, TextStream


class Running:
    """A request over its own KV cache, alone or as a row of a batch.

    Attributes:
        generation, request: What was asked for, and whom to tell.
        session: Its sequence.
        kv_cache: The keys and values of its sequence.
        began: Time at which it began, in seconds of ``time.monotonic``.
        cached_tokens: Tokens of its prompt whose keys and values were kept from earlier requests.
    """

    def __init__(
        self,
        generation: Generation,
        kv_cache: KVCache,
        verify: Engine,
        drafting: Drafting,
        limits: Limits,
        vocab_size: int,
        codec: TextCodec | None,
        observer: Observer | None = None,
    ) -> None:
        """Begin. ``codec`` makes the text; ``observer`` is told what each round commits. For the others see
        :class:`~eesd.runtime.decoding.session.Session`."""
        self.generation, self.kv_cache, self.cached_tokens = generation, kv_cache, 0
        self.request = request = generation.request
        generation.began = self.began = time.monotonic()
        self._observer, self._moved = observer, False
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] | None = None
        eos = [token for token in limits.eos_token_ids if token < vocab_size]
        self.session = Session(
            request.tokens,
            kv_cache,
            verify,
            drafting,
            replace(limits, until_stop=self._until_stop) if request.stop else limits,
            request.sampling,
            vocab_size,
            observer if request.logprobs is None else self._observe,
            self._restriction(vocab_size, eos),
            None if request.constraint is None or not request.draft else self._forced,
            None if request.prompt_logprobs is None else self._observe_prompt,
        )
        self._text = TextStream(codec, request.tokens, request.stop) if codec is not None else None
        if request.prompt_logprobs is not None:
            self._prompt_logprobs = [TokenLogprob(request.tokens[0], None)]

    def _restriction(self, vocab_size: int, eos: list[int]) -> Allowed | None:
        """What restricts the tokens: the request's constraint, and EOS before ``min_tokens``."""
        constraint, least = self.request.constraint, self.request.min_tokens
        if constraint is None and (not least or not eos):
            return None

        def allowed(path: Sequence[int]) -> NDArray[np.bool_] | None:
            tokens = [*self._new_tokens(), *path]
            mask = None if constraint is None else constraint.allowed(tokens)
            if len(tokens) >= least or not eos:
                return mask
            longer = np.ones(vocab_size, np.bool_) if mask is None else mask.copy()
            longer[eos] = False
            return longer if longer.any() else mask  # a constraint that has come to its end goes before min_tokens

        return allowed

    def _forced(self, most: int) -> Sequence[int]:
        """What the constraint says must follow."""
        assert self.request.constraint is not None
        return self.request.constraint.forced(self._new_tokens(), most)

    def _new_tokens(self) -> list[int]:
        return self.session.tokens[self.session.stats.prompt_tokens :]

    def _until_stop(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens belong to the text, if a stop string ends it within them."""
        text = copy(self._text)
        assert text is not None
        for count, token in enumerate(tokens, 1):
            if token not in self.request.stop_token_ids:
                text.push(token)
            if text.stop:
                return count
        return None

    def take_prefix(self, prefixes: PrefixCache) -> None:
        """Take the keys and values of the prompt's beginning that are known, unless its logits are asked for."""
        if self.request.prompt_logprobs is None:
            before = self.session.unfilled
            self.session.fill(prefixes.find(self.session.tokens[:-1], self.request.salt))
            if not self._moved:
                self.cached_tokens = before - self.session.unfilled

    def move(self, kv_cache: KVCache) -> None:
        """Go on in another cache; see :meth:`~eesd.runtime.decoding.session.Session.move`."""
        self.kv_cache, self._moved = kv_cache, True
        self.session.move(kv_cache)

    def keep_prefix(self, prefixes: PrefixCache) -> None:
        """Keep its keys and values for requests that begin like it."""
        if not self.session.unfilled:
            prefixes.add(self.session.tokens[:-1], self.kv_cache.values, self.request.salt)

    def end(self) -> None:
        """Close the sequence, and keep its output for drafts of later ones."""
        self.session.close()
        if (text := self.session.drafting.text) is not None and text.past is not None:
            text.past.add(self._new_tokens())

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
            stats=self.session.stats,
        )

    def last_update(self, reason: str, error: str | None = None) -> Update:
        """The end of a request that no round ended."""
        held = self._text.finish() if self._text else ""
        stats, cached = replace(self.session.stats), self.cached_tokens
        return Update(held=held, finish_reason=reason, error=error, cached_tokens=cached, stats=stats)

    def _observe(self, tokens: Sequence[int], logits: Logits) -> None:
        assert self.request.logprobs is not None
        self._logprobs = _logprobs(tokens, logits, self.request.logprobs)
        if self._observer is not None:
            self._observer(tokens, logits)

    def _observe_prompt(self, tokens: Sequence[int], logits: Logits) -> None:
        assert self.request.prompt_logprobs is not None and self._prompt_logprobs is not None
        self._prompt_logprobs += _logprobs(tokens, logits, self.request.prompt_logprobs)


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
