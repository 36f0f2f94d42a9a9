"""A batch that runs in a thread, for programs with many threads or an event loop."""

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

from eesd.common.checks import check_type
from eesd.common.errors import EESDError
from eesd.controllers.load_rule import LoadRule
from eesd.runtime.batch.scheduler import BatchOptions, Scheduler
from eesd.runtime.decoding.drafting import Drafting
from eesd.runtime.llm import LLM, Completion, completion_of
from eesd.runtime.request import Generation, OnUpdate, QueueFullError, Request, Update

OPTIONS = BatchOptions()


class ClosedError(EESDError):
    """The service no longer takes requests."""


@dataclass(frozen=True)
class Load:
    """The current load of a service.

    Attributes:
        queued, prefilling, running: The numbers of requests that are waiting, that are being
            prefilled, and that are decoding.
        kv_used: Share of the memory for keys and values that requests occupy.
        rounds: Rounds so far.
        prefix_queries, prefix_hits: ``prefix_queries`` is the number of tokens of all prompts.
            ``prefix_hits`` is the number of these tokens whose keys and values were kept from
            earlier prompts.
        drafted: Number of drafted levels that the last round verified.
        pauses: Number of times that a request temporarily lost its keys and values to other
            requests.
        round_tokens: A counter of rounds. The key is the number of prompt tokens and new tokens
            that a round computed.
    """

    queued: int = 0
    prefilling: int = 0
    running: int = 0
    kv_used: float = 0.0
    rounds: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    pauses: int = 0
    round_tokens: Mapping[int, int] = field(default_factory=dict)


class Service:
    """Runs requests of an :class:`~eesd.runtime.llm.LLM` together. Each request gets the tokens
    that it would get alone. On a GPU without ``exact``, this is true up to rounding, because
    rounding depends on the other requests.

    Other calls of the LLM wait for the service's rounds.

    Attributes:
        llm: The model.
        options: Limits of the batch.
    """

    def __init__(self, llm: LLM, options: BatchOptions = OPTIONS) -> None:
        """Start. Raises :class:`EESDError` if the backend cannot run several rows."""
        check_type("llm", llm, LLM, "an LLM")
        check_type("options", options, BatchOptions, "BatchOptions")
        self.llm = llm
        self.options = options
        with llm.lock:
            self._scheduler = Scheduler(llm, options)
        self._inbox: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._closing = self._stopping = False
        self._kv_used = 0.0
        """The value of :attr:`Scheduler.kv_used` after the last step. This copy exists because
        other threads must not read the rows."""
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="eesd-batch", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_update: OnUpdate) -> Generation:
        """Submit a request. May be called from any thread.

        Args:
            request: The request.
            on_update: A function that is called in the service's thread with the update of each
                round.

        Raises:
            EESDError: The request can never run.
            QueueFullError: Too many requests wait.
            ClosedError: The service was closed.
        """
        if os.getpid() != self._process:
            raise ClosedError(
                "The service runs in the process that made it, and this one was forked from it; "
                "make a service here."
            )
        generation = Generation(request, on_update)
        self._scheduler.check(generation)
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise ClosedError("The service takes no more requests; it is being stopped.")
            waiting = len(self._inbox) + len(self._scheduler.waiting)
            free = self.options.max_rows - self._scheduler.running - self._scheduler.prefilling
            if waiting >= self.options.max_queue + max(free, 0):
                until_half_empty = max(
                    1.0, self._scheduler.request_seconds * (waiting / 2) / self.options.max_rows
                )
                raise QueueFullError(
                    f"The queue is full: {waiting} requests wait; try again later.",
                    until_half_empty,
                )
            self._inbox.append(generation)
            self._changed.notify_all()
        return generation

    @property
    def longest(self) -> int:
        """Maximum length, in tokens, of a text (prompt included) for which there is memory."""
        return self._scheduler.longest

    @property
    def places(self) -> int:
        """Maximum number of requests that run or wait at the same time."""
        return self.options.max_rows + self.options.max_queue

    def generate(self, request: Request) -> Completion:
        """Submit a request, and wait for its completion. This raises the errors of :meth:`submit`,
        and :class:`EESDError` if the request fails later."""
        told = SimpleQueue[Update]()
        self.submit(request, told.put)
        updates = [told.get()]
        while (last := updates[-1]).finish_reason is None:
            updates.append(told.get())
        if last.finish_reason not in ("stop", "length", "deadline"):
            raise EESDError(last.error or f"The request ended early: {last.finish_reason}.")
        return completion_of(updates, request)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop taking requests. Running requests may go on for ``drain_seconds`` and are then
        cancelled. This method may be called more than once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(drain_seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def load(self) -> Load:
        """The current load. May be called from any thread."""
        scheduler = self._scheduler
        prefixes = scheduler.prefixes
        return Load(
            len(self._inbox) + len(scheduler.waiting) + scheduler.paused,
            scheduler.prefilling,
            scheduler.running,
            self._kv_used,
            scheduler.rounds,
            prefixes.queries,
            prefixes.hits,
            scheduler.drafted,
            scheduler.pauses,
            dict(scheduler.round_tokens),
        )

    @property
    def slots(self) -> int:
        """Number of KV cache slots for which there is memory."""
        return self._scheduler.slots

    @property
    def alive(self) -> bool:
        """Whether the service's thread runs."""
        return self._thread.is_alive()

    @property
    def deciding(self) -> Drafting | LoadRule:
        """The rules that decided how far the last round drafted. They are the rules of the request
        if it ran alone, and the rule of the batch if not."""
        return self._scheduler.alone or self._scheduler.rule

    def _run(self) -> None:
        """The function of the thread. It takes new requests, and runs rounds while there is
        work."""
        busy = False
        try:
            while True:
                with self._changed:
                    while not (self._inbox or busy or self._stopping or self._closing):
                        self._changed.wait()
                    if self._stopping or (self._closing and not self._inbox and not busy):
                        break
                    while self._inbox:
                        self._scheduler.add(self._inbox.popleft())
                with self.llm.lock:
                    busy = self._scheduler.step()
                self._kv_used = self._scheduler.kv_used
            self._scheduler.end_all("cancelled")
        except BaseException as error:
            self._scheduler.end_all("error", error if isinstance(error, Exception) else None)
            raise
        finally:
            with self._changed:
                self._closing = True
                left = [*self._inbox]
                self._inbox = deque()
            for generation in left:
                generation.tell(Update(finish_reason="cancelled"))
