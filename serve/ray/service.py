"""The batch of a server whose engines run elsewhere: in the replicas of a Ray Serve deployment."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import fields, replace
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any, cast

from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.runtime.batch.scheduler import check_memory
from eesd.runtime.batch.service import Load
from eesd.runtime.constraint import GrammarConstraint
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.backends import Engines
from eesd.runtime.llm import GREEDY, LLM, models_sampling
from eesd.runtime.request import Generation, OnUpdate, QueueFullError, Request, Update
from eesd.runtime.session import check_prompt

LOGGER = logging.getLogger(__name__)
ATTEMPTS = 5
"""Times that a request is given to a replica, if replicas die."""
PAUSE_SECONDS = 0.2
"""Before the second time; then twice as long, and so on: it takes a moment until a dead replica is
no choice any more."""

Stream = Callable[[Request, str | None], AsyncGenerator[Update, None]]
"""Runs a request in some replica, under a grammar if there is one. Closing the generator cancels
it."""


class RemoteGeneration(Generation):
    """A request that a replica runs. ``cancel`` also tells the replica."""

    task: "asyncio.Task[None]"

    def cancel(self) -> None:
        super().cancel()
        self.task.get_loop().call_soon_threadsafe(self.task.cancel)


class RemoteService:
    """What the routes of the server need of a :class:`~eesd.runtime.batch.service.Service`, over
    replicas.

    A replica that dies in the middle of a text is no loss: the same request gives the same tokens,
    so another replica runs it again, and the client gets the tokens that it does not have yet. Only
    sampling by ``rejection`` cannot be repeated; such a request then ends with an error, unless it
    had no token.

    Args:
        engine_dir: The engine directory, for tokenizer, chat template and limits; no engine is
            loaded.
        stream: Runs a request in a replica.
        lost: The exceptions by which a stream says that its replica is gone.
        max_requests: Most requests at once. More get :class:`~eesd.runtime.request.QueueFullError`.
        longest: Most tokens of a text for which a replica has memory; None: as many as the model's.
        generation_config, plain_content: As for :func:`eesd.load`.
    """

    def __init__(
        self,
        engine_dir: Path,
        stream: Stream,
        lost: tuple[type[Exception], ...],
        max_requests: int,
        longest: int | None = None,
        generation_config: str = "auto",
        plain_content: bool = False,
    ) -> None:
        manifest = load_manifest(engine_dir)
        sampling = models_sampling(manifest) if generation_config == "auto" else GREEDY
        self.llm = LLM(
            engine_dir, manifest, cast(Engines, None), None, sampling, plain_content=plain_content
        )
        self._stream, self._lost, self._most = stream, lost, max_requests
        self.longest = manifest.max_seq_len if longest is None else longest
        self._open: set[RemoteGeneration] = set()
        self.alive = True

    def submit(self, request: Request, on_update: OnUpdate) -> Generation:
        """Run a request in a replica; in the thread of the event loop alone.

        Raises:
            EESDError: The request can never run.
            QueueFullError: There are too many requests.
        """
        manifest = self.llm.manifest
        check_prompt(request.tokens, manifest)
        check_memory(request, manifest.max_seq_len, self.longest)
        if not isinstance(request.constraint, GrammarConstraint | None):
            raise EESDError(
                "The constraint cannot be sent to a replica; give one that "
                "eesd.make_constraint makes."
            )
        if len(self._open) >= self._most:
            raise QueueFullError(
                f"{self._most} requests are waiting or running; try again later.", 1.0
            )
        generation = RemoteGeneration(request, on_update)
        generation.task = asyncio.get_running_loop().create_task(self._run(generation))
        self._open.add(generation)
        generation.task.add_done_callback(lambda _: self._open.discard(generation))
        return generation

    @property
    def places(self) -> int:
        """Requests that can run or wait at once."""
        return self._most

    def load(self) -> Load:
        """What this process knows: the replicas have the rest."""
        return Load(running=len(self._open))

    def beliefs(self) -> dict[str, Any]:
        """Nothing: each replica learns for itself."""
        return {}

    def close(self, drain_seconds: float = 0.0) -> None:
        """Cancel what runs. Ray has drained the replica before."""
        self.alive = False
        for generation in list(self._open):
            generation.cancel()

    async def _run(self, generation: RemoteGeneration) -> None:
        """Give the request to replicas until one ends it, and pass on each token once."""
        end = Update(finish_reason="cancelled")
        try:
            end = await self._attempts(generation)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # whatever it is, the client must hear it
            cause = getattr(error, "cause", error)  # Ray wraps what a replica raised
            reason = (
                str(cause)
                if isinstance(cause, EESDError)
                else f"The replica failed ({type(cause).__name__}); see its log."
            )
            end = Update(finish_reason="error", error=reason)
            LOGGER.warning("A request failed in a replica.", exc_info=error)
        generation.tell(end)

    async def _attempts(self, generation: RemoteGeneration) -> Update:
        """The last update of the request; those before it are passed on."""
        constraint = generation.request.constraint
        # Each replica reads it itself.
        grammar = constraint.grammar if isinstance(constraint, GrammarConstraint) else None
        request, start, sent, stats = (
            replace(generation.request, constraint=None),
            monotonic(),
            0,
            Stats(),
        )
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(PAUSE_SECONDS * attempt)
            with suppress(*self._lost):
                seconds = (
                    None
                    if request.seconds is None
                    else max(request.seconds - (monotonic() - start), 0.001)
                )
                known, again = sent, sent > 0
                async with aclosing(
                    self._stream(replace(request, seconds=seconds), grammar)
                ) as updates:
                    async for update in updates:
                        tokens, known = update.tokens[known:], max(known - len(update.tokens), 0)
                        sent += len(tokens)
                        stats = _at_least(stats, update.stats)
                        prompt = None if again else update.prompt_logprobs
                        update = replace(update, tokens=tokens, prompt_logprobs=prompt, stats=stats)
                        if update.finish_reason:
                            return update
                        if tokens:
                            generation.tell(update)
            if sent and not (request.sampling.greedy or request.sampling.method == "coupled"):
                return Update(
                    finish_reason="error",
                    error="The replica stopped, and this text cannot be repeated; ask again.",
                )
        return Update(
            finish_reason="error",
            error=f"Replicas stopped {ATTEMPTS} times while they ran the request; ask again.",
        )


def _at_least(before: Stats, now: Stats) -> Stats:
    """The later of two statistics, with no count less than before: those of a request that began
    again start at nothing."""
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(Stats)):
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(new, list):
            values[name] = [max(pair) for pair in zip_longest(old, new, fillvalue=0)]
        else:
            values[name] = new if new is None or old is None else max(old, new)
    return Stats(**values)
