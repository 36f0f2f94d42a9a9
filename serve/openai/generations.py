"""The generations of one HTTP request. Their updates pass from the batch's thread to the event
loop, and the generations are cancelled when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any

from eesd.runtime.constraint import GrammarConstraint
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.request import Generation, Request, TokenLogprob, TokenOutput, Update
from eesd.serve.grammar.token_filter import TokenFilter
from eesd.serve.http.errors import APIError
from eesd.serve.http.metrics import Meter, num_drafts
from eesd.serve.http.options import Serving
from eesd.serve.openai.schemas import (
    CompletionDetails,
    PromptDetails,
    ResponseMetrics,
    SpeculativeDecoding,
    Usage,
)

LIVENESS_SECONDS = 5.0
"""Interval in seconds at which a request without updates checks whether the batch is alive."""


@dataclass
class Progress:
    """The output of one choice so far. ``finish_reason`` has OpenAI's values, and ``stop_reason``
    is a stop string or ``deadline``. The reader of a chat sets ``thought_tokens``."""

    request: Request
    outputs: list[TokenOutput] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | None = None
    thought_tokens: int = 0
    cached_tokens: int = 0
    stats: Stats = field(default_factory=Stats)

    def see(self, update: Update) -> str:
        """Process an update. Return its new text."""
        text = "".join(output.text for output in update.tokens) + update.held
        self.outputs += update.tokens
        self.text.append(text)
        self.stats = update.stats
        self.cached_tokens = max(self.cached_tokens, update.cached_tokens)
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        if update.finish_reason:
            self.finish_reason = update.finish_reason
            self.stop_reason = update.stop
            if update.finish_reason == "deadline":
                self.finish_reason = "length"
                self.stop_reason = "deadline"
        return text


class Generations:
    """Runs requests and yields each ``(index, update)`` as it arrives. Use this in an ``async
    with`` block, which cancels unfinished requests at its end.

    Args:
        serving: The server.
        requests: One request for each choice. Requests with the same prompt are adjacent.
        choices: Number of choices for each prompt.
        keep_tokens: Whether to keep generated tokens. If False, only the prompts are scored, and
            the single token that each request generates is dropped.

    Attributes:
        id: The id of the answer, which the writer of the answer sets.
        progress: The output of each choice so far.

    Raises:
        EESDError: Raised on entering the block if a request cannot be used, or if the queue is
            full.
        APIError: Raised while iterating if a request failed, or if it ended without a token because
            the server stopped or was too slow.
    """

    def __init__(
        self,
        serving: Serving,
        requests: Sequence[Request],
        choices: int = 1,
        keep_tokens: bool = True,
    ) -> None:
        self.id = ""
        self.progress = [Progress(request) for request in requests]
        self._choices = choices
        self._serving = serving
        self._keep = keep_tokens
        self._updates: asyncio.Queue[tuple[int, Update, float]] = asyncio.Queue()
        self._running: list[Generation] = []
        self._meters: list[Meter] = []

    async def __aenter__(self) -> "Generations":
        loop = asyncio.get_running_loop()

        def deliver(index: int, update: Update) -> None:
            # The event loop is closed if the server has stopped without waiting.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._updates.put_nowait, (index, update, monotonic()))

        try:
            for index, choice in enumerate(self.progress):
                start = monotonic()
                self._running.append(
                    self._serving.service.submit(choice.request, partial(deliver, index))
                )
                meter = Meter(self._serving.metrics, self._running[-1], start, self._keep)
                self._meters.append(meter)
        except BaseException:
            self._cancel()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()
        metrics = self._serving.metrics
        for first in range(0, len(self._meters), self._choices):
            texts = slice(first, first + self._choices)
            metrics.asked([choice.request for choice in self.progress[texts]])
            longest = max(meter.tokens for meter in self._meters[texts])
            metrics.observe("request_max_num_generation_tokens", longest)

    def _cancel(self) -> None:
        for generation in self._running:
            generation.cancel()
        for meter in self._meters:
            meter.end("cancelled", monotonic())  # counts the choices that had not ended

    @property
    def ended(self) -> bool:
        """Whether all choices are complete."""
        return all(choice.finish_reason is not None for choice in self.progress)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while not self.ended:
            index, update, time = await self._next()
            self._meters[index].see(update, time)
            if update.finish_reason in ("error", "cancelled"):
                raise self._failure(update)
            if (
                update.finish_reason == "deadline"
                and not update.tokens
                and not self.progress[index].outputs
            ):
                limit = self._serving.options.request_timeout
                raise APIError(
                    503, f"No token came within {limit:g} seconds; try again later.", code="timeout"
                )
            if not self._keep:
                reason = "length" if update.finish_reason == "stop" else update.finish_reason
                update = replace(update, tokens=(), held="", finish_reason=reason, stop=None)
            yield index, update

    async def _next(self) -> tuple[int, Update, float]:
        while True:
            with suppress(asyncio.QueueEmpty):
                return self._updates.get_nowait()
            with suppress(TimeoutError):
                async with asyncio.timeout(LIVENESS_SECONDS):
                    return await self._updates.get()
            if not self._serving.service.alive:
                raise APIError(
                    500, "The batch has stopped; restart the server.", code="internal_error"
                )

    def _failure(self, update: Update) -> APIError:
        if update.finish_reason == "cancelled":
            return APIError(
                503,
                "The server stopped before the text was complete; send the request again.",
                code="stopping",
            )
        message = update.error or "The request failed; the server's log says why."
        if update.refused:
            return APIError(400, message, code="constraint_failed")
        return APIError(500, message, code="internal_error")

    def usage(self) -> Usage:
        """Return the numbers of tokens so far. Each prompt is counted once, even if it has several
        choices."""
        prompts = self.progress[:: self._choices]
        prompt = sum(len(choice.request.tokens) for choice in prompts)
        new = sum(len(choice.outputs) for choice in self.progress)
        cached = sum(choice.cached_tokens for choice in prompts)
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )
        if thoughts := sum(choice.thought_tokens for choice in self.progress):
            usage.completion_tokens_details = CompletionDetails(reasoning_tokens=thoughts)
        return usage

    def metrics(self) -> ResponseMetrics:
        """Return the drafting metrics of all choices together."""
        all_stats = [choice.stats for choice in self.progress]
        rounds = sum(map(num_drafts, all_stats))
        drafted = sum(stats.draft_tokens for stats in all_stats)
        accepted = sum(stats.accepted_tokens for stats in all_stats)
        depth = max(len(stats.accepted_at_depth) for stats in all_stats)
        # Number of rounds that verified a draft and accepted at least d tokens (d = 0, 1, ...).
        at_least = [rounds] + [
            sum(sum(stats.accepted_at_depth[d : d + 1]) for stats in all_stats)
            for d in range(depth)
        ]
        speculative = SpeculativeDecoding(
            mean_acceptance_length=1 + accepted / max(rounds, 1),
            draft_acceptance_rate=accepted / max(drafted, 1),
            acceptance_histogram=[
                n - more for n, more in zip(at_least, [*at_least[1:], 0], strict=True)
            ],
            num_spec_steps=rounds,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
        )
        return ResponseMetrics(speculative_decoding=speculative)

    def extras(self) -> dict[str, Any]:
        """Return the fields that an answer has in addition to the fields of its API."""
        return {"metrics": self.metrics(), **self._ignored()}

    def _ignored(self) -> dict[str, list[str]]:
        """Return the keywords of JSON schemas that are not enforced, if there are any."""
        constraint = self.progress[0].request.constraint
        known = isinstance(constraint, GrammarConstraint | TokenFilter) and constraint.ignored
        return {"ignored_keywords": sorted(known)} if known else {}

    def facts(self) -> dict[str, Any]:
        """Return facts about the request for the log and for traces. The times are those of the
        first choice."""
        spec = self.metrics().speculative_decoding
        request = self.progress[0].request
        return {
            "response_id": self.id,
            "max_tokens": request.max_new_tokens,
            "temperature": request.sampling.temperature,
            "prompt_tokens": sum(len(choice.request.tokens) for choice in self.progress),
            "completion_tokens": sum(len(choice.outputs) for choice in self.progress),
            "finish_reasons": [choice.finish_reason or "none" for choice in self.progress],
            "draft_tokens": spec.num_draft_tokens,
            "accepted_tokens": spec.num_accepted_draft_tokens,
            **dict(*(meter.facts() for meter in self._meters[:1])),
            **self._ignored(),
        }
