"""One request in the batch: its session, its text, and what is reported of its tokens."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eesd.controllers import make_controller
from eesd.controllers.base import Controller
from eesd.controllers.load_rule import LoadRule, RowController
from eesd.controllers.row_text_rule import RowTextRule
from eesd.runtime.batch.request import Generation, TokenLogprob, TokenOutput, Update
from eesd.runtime.decoding.samplers import Allowed
from eesd.runtime.decoding.session import Drafter, RoundResult, Session
from eesd.runtime.decoding.text_drafter import TextDrafter
from eesd.runtime.engines.base import Call, KVCache, Logits, StepOutputs
from eesd.runtime.llm import LLM
from eesd.runtime.text import TextStream

REJECTION_DRAFT = "fixed:k=2"
"""How requests with rejection sampling draft. Their tokens depend on how far they draft, so that must not follow the load."""

LOGIT_CHUNK = 64
"""Tokens of a prompt whose logits are in memory at a time."""


class Row:
    """A request that has begun.

    Attributes:
        generation: The request, and whom to tell.
        session: Its sequence.
        kv_cache: The keys and values of its sequence.
        controller: What it expects of its draft; None: it decodes plainly, or drafts a fixed length.
        error: What went wrong with this row alone.
        began: Time at which it got its row, in seconds.
        cached_tokens: Tokens of its prompt whose keys and values were kept from earlier requests.
    """

    def __init__(self, llm: LLM, rule: LoadRule, generation: Generation, kv_cache: KVCache) -> None:
        request = generation.request
        self.generation, self.request, self.kv_cache = generation, request, kv_cache
        self.error: Exception | None = None
        self.cached_tokens = 0
        self.began = time.monotonic()
        self.controller: RowController | None = None
        self.fixed = not request.sampling.greedy and request.sampling.method == "rejection"
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] | None = None
        drafter, text = None, None
        if request.draft and llm.speculation is not None:
            drafter, text = self._drafters(llm, rule)
        self.session = Session(
            request.tokens,
            kv_cache,
            llm.engines.verify,
            drafter,
            llm.limits(request.max_new_tokens, request.ignore_eos),
            request.sampling,
            llm.manifest.geometry.vocab_size,
            None if request.logprobs is None else self._observe,
            text,
            self._restriction(llm),
            None if request.constraint is None or not request.draft else self._forced,
        )
        self.session.stats.exact = llm.engines.exact
        self._text = TextStream(llm.codec, request.tokens, request.stop) if llm.has_tokenizer or request.stop else None
        if request.prompt_logprobs is not None:
            self._prompt_logprobs = [TokenLogprob(request.tokens[0], None)]

    def _drafters(self, llm: LLM, rule: LoadRule) -> tuple[Drafter | None, TextDrafter | None]:
        """How this row drafts."""
        assert llm.speculation is not None
        controller: Controller
        controller = own = RowController(rule)
        if self.fixed:
            controller = make_controller(REJECTION_DRAFT)
        else:
            self.controller = own
        engine = llm.engines.draft if llm.speculation.head_drafts else None
        drafter = None if engine is None else Drafter(engine, controller, columns=llm.draft_columns)
        if not llm.speculation.text_drafts or self.fixed:
            return drafter, None
        return drafter, TextDrafter(RowTextRule(rule, own, engine is not None), llm.text.past if llm.text else None)

    def _restriction(self, llm: LLM) -> Allowed | None:
        """What restricts the tokens: the request's constraint, and EOS before ``min_tokens``."""
        constraint, least, size = self.request.constraint, self.request.min_tokens, llm.manifest.geometry.vocab_size
        eos = [] if self.request.ignore_eos else [token for token in llm.manifest.eos_token_ids if token < size]
        if constraint is None and (not least or not eos):
            return None

        def allowed(path: Sequence[int]) -> NDArray[np.bool_] | None:
            session = self.session
            tokens = [*session.tokens[session.stats.prompt_tokens :], *path]
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
        return self.request.constraint.forced(self.session.tokens[self.session.stats.prompt_tokens :], most)

    def next_piece(self, most: int) -> Call | None:
        """The call of the next piece of the prompt, at most ``most`` tokens; None: the prompt is complete."""
        if self._prompt_logprobs is None:
            return self.session.next_piece(most)
        return self.session.next_piece(min(most, LOGIT_CHUNK), logits=True)

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Go on behind a piece of the prompt, whose call took so many seconds."""
        if self._prompt_logprobs is not None and self.request.prompt_logprobs is not None:
            behind = self.request.tokens[piece.slot + 1 : piece.slot + 1 + len(piece.tokens)]
            self._prompt_logprobs += _logprobs(behind, outputs.logits, self.request.prompt_logprobs)
        self.session.add_piece(piece, seconds)

    @property
    def unfilled(self) -> int:
        """Tokens of the prompt that are still to be put into the cache."""
        return self.session.stats.prompt_tokens - 1 - self.session.prefilled

    @property
    def prefilled(self) -> bool:
        return not self.unfilled

    def update(self, result: RoundResult) -> Update:
        """What to report of a round. A stop string ends the request."""
        outputs: list[TokenOutput] = []
        reason, stop = result.finish_reason, None
        sources = ["text" if text else "exit" for text in result.from_text]
        sources += ["verify"] * (len(result.tokens) - len(sources))
        for at, (token, source) in enumerate(zip(result.tokens, sources, strict=True)):
            text = self._text.push(token) if self._text else ""
            outputs.append(TokenOutput(token, text, source, self._logprobs[at] if self._logprobs else None))
            if self._text and self._text.stopped:
                reason, stop = "stop", self._text.stop
                break
        self._logprobs = []
        held = self._text.finish() if self._text and reason else ""
        prompt, self._prompt_logprobs = self._prompt_logprobs, None
        return Update(
            tuple(outputs),
            tuple(result.rejected),
            held,
            reason,
            stop=stop,
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
