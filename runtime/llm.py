"""The Python API. Load a model with ``eesd.load(engine_dir)`` and generate text. The model offers
``generate``, ``stream``, and sessions that the caller drives round by round."""

import logging
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from threading import RLock
from typing import Any, TypedDict, Unpack

import numpy as np

from eesd.common.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_path,
    check_type,
    shown,
)
from eesd.common.draft_vocab import DraftColumns, load_draft_vocab
from eesd.common.errors import EESDError
from eesd.common.machine import release_freed_memory
from eesd.common.manifest import Manifest, load_manifest
from eesd.controllers import Controller, make_controller
from eesd.controllers.calibration import RejectionTS
from eesd.runtime.chat_template import Message
from eesd.runtime.decoding.drafting import PLAIN, Drafting, make_drafting
from eesd.runtime.decoding.drafting import Speculation as Speculation
from eesd.runtime.decoding.round import Observer
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.backends import EngineOptions, Engines, open_engines
from eesd.runtime.engines.base import KVCache
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import Constraint, Generation, Request, TokenLogprob, Update
from eesd.runtime.session import Session
from eesd.runtime.text import TextCodec

Prompt = str | Sequence[Message] | Sequence[int]
LOGGER = logging.getLogger(__name__)
GREEDY = Sampling()
SPECULATION = Speculation()
GENERATION_CONFIGS = ("auto", "none")
"""The values of ``generation_config``, which decides whether to use the sampling options of
``generation_config.json``."""


@dataclass(frozen=True)
class Piece:
    """One token of a stream.

    Attributes:
        text: The text that became certain with this token. It may be empty.
        token: The token's id. It is None in a last piece that only returns text that was held back
            because it could have begun a stop string.
        from_draft: Whether a drafter proposed the token. If not, the token is the verifier's bonus
            token.
        logprob: Log-probability, if requested.
    """

    text: str
    token: int | None
    from_draft: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text, tokens: The new text and its tokens.
        finish_reason: ``stop``, ``length``, or ``deadline``.
        stats: Counts and seconds.
        logprobs: Log-probabilities of the tokens, if requested.
        prompt_logprobs: Log-probabilities of the prompt's tokens, if requested.
        cached_tokens: Number of prompt tokens whose keys and values were kept from earlier
            requests.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0


class Options(TypedDict, total=False):
    """Options of a request in addition to the prompt and the sampling options.
    :class:`~eesd.runtime.request.Request` explains them. ``stop`` may be a single string."""

    max_new_tokens: int
    stop: str | Sequence[str]
    draft: bool
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    seconds: float | None
    constraint: Constraint | None


def completion_of(updates: Sequence[Update], request: Request) -> Completion:
    """Put the completion of a request together from all its updates. The last update has the finish
    reason."""
    outputs = [output for update in updates for output in update.tokens]
    last = updates[-1]
    prompt = next((list(one.prompt_logprobs) for one in updates if one.prompt_logprobs), None)
    return Completion(
        "".join(output.text for output in outputs) + last.held,
        [output.token for output in outputs],
        last.finish_reason or "",
        last.stats,
        None
        if request.logprobs is None
        else [output.logprob for output in outputs if output.logprob],
        prompt,
        last.cached_tokens,
    )


def load(
    engine_dir: str | os.PathLike[str],
    backend: str = "auto",
    *,
    speculation: Speculation | None = SPECULATION,
    threads: int | None = None,
    generation_config: str = "auto",
    exact: bool | None = None,
    activations: str | None = None,
    kv_cache_dtype: str | None = None,
    prefix_memory: int = 0,
    plain_content: bool = False,
    nvtx: bool = False,
) -> "LLM":
    """Open an engine directory that ``eesd-export`` wrote. Notices about its engines are logged as
    warnings.

    Args:
        engine_dir: The directory.
        backend: The backend. It is ``auto``, ``tensorrt``, ``ort`` or ``torch``.
        speculation: How to draft. If it is None, the model decodes plainly and no draft engine is
            loaded. The drafter ``text`` does not need a draft engine, either.
        threads: Number of CPU threads of an engine. By default it is the number of processors that
            this process may use, minus one if there are more than four.
        generation_config: ``auto`` uses the sampling options of the model's
            ``generation_config.json`` for requests without sampling options. ``none`` ignores the
            file.
        exact: If True, drafting does not change any bit of a logit, even in trees and on a GPU; see
            :class:`~eesd.runtime.engines.backends.EngineOptions`. Default: True where that costs
            little. If False, requests of a batch on a GPU may change the last bits of each other's
            logits.
        activations: The type of the activations that are multiplied by quantized weights on the
            CPU. It is ``int8`` or ``float32``. Default: int8.
        kv_cache_dtype: The type of the KV cache on the CPU. It is ``float32``, ``float16`` or
            ``int8``. Default: float32.
        prefix_memory: Maximum number of bytes of keys and values that are kept for later requests
            with the same beginning. If it is 0, nothing is kept. A ``Service`` has a separate
            limit.
        plain_content: Whether chat text that spells a special token is tokenized as plain text, so
            that it can neither end nor begin a turn. Templates for which this is impossible are
            refused.
        nvtx: Whether to mark the phases prefill, draft, verify and accept as NVTX ranges, which
            Nsight Systems shows.

    Raises:
        EESDError: The directory or an argument cannot be used.
    """
    directory = check_path("engine_dir", engine_dir, "the output directory of eesd-export")
    check_flag("plain_content", plain_content)
    check_choice("generation_config", generation_config, GENERATION_CONFIGS)
    check_integer("prefix_memory", prefix_memory, 0, 2**62)
    manifest = load_manifest(directory)
    draft = (
        isinstance(speculation, Speculation)
        and speculation.needs_engine
        and manifest.exit_head.can_draft
    )
    options = EngineOptions(backend, threads, draft, exact, activations, kv_cache_dtype, nvtx)
    engines = open_engines(directory, manifest, options)
    if engines.notice:
        LOGGER.warning("%s", engines.notice)
    default = models_sampling(manifest) if generation_config == "auto" else GREEDY
    llm = LLM(directory, manifest, engines, speculation, default, prefix_memory, plain_content)
    release_freed_memory()  # temporary memory for packing weights and reading the tokenizer
    return llm


def models_sampling(manifest: Manifest) -> Sampling:
    """Read the sampling options from the model's ``generation_config.json``. Without this file,
    decoding is greedy. Options that are not applied are logged as a warning.

    Raises:
        EESDError: A value cannot be used.
    """
    if manifest.sampling.notice:
        LOGGER.warning("%s", manifest.sampling.notice)
    try:
        return Sampling(**manifest.sampling.given)
    except EESDError as error:
        raise EESDError(
            f"The manifest is damaged: {str(error).removesuffix('.')}; export the model again."
        ) from None


class LLM:
    """A model ready to generate. Any thread may use it. Calls from several threads take turns,
    round by round.

    The controller and the guard live as long as the LLM, so requests benefit from earlier requests.

    Attributes:
        manifest: The engine directory's manifest.
        default_sampling: The sampling options of requests that do not set any.
        engines: The verify engine and the draft engine.
        draft_columns: The tokens that the draft can predict.
        speculation: The drafting options, or None to decode plainly.
        drafting: The drafters that all requests use, except those with rejection sampling.
        prefixes: Keys and values of earlier texts.
        observer: A function that is called with each round's tokens and logits; see
            :data:`~eesd.runtime.decoding.round.Observer`. Set by the user.
        lock: The lock that is held while the engines run, and while state that requests share
            changes.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        engines: Engines,
        speculation: Speculation | None,
        default_sampling: Sampling = GREEDY,
        prefix_memory: int = 0,
        plain_content: bool = False,
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.engines = engines
        self.default_sampling = default_sampling
        # These files are read now because the directory may later be exported again with another
        # tokenizer.
        self.draft_columns = DraftColumns(load_draft_vocab(directory, manifest))
        self._codec: TextCodec | None = None
        if (directory / "tokenizer.json").exists():
            self._codec = TextCodec(directory, manifest.max_seq_len, plain_content)
        self.lock = RLock()
        self._idle: list[KVCache] = []
        self._ended: deque[tuple[Session, PrefixCache]] = deque()
        self.prefixes = PrefixCache(prefix_memory)
        self.observer: Observer | None = None
        self._draft_with(speculation)

    def _draft_with(self, speculation: Speculation | None) -> None:
        """Make the drafters, their controller, budget and guard."""
        check_type("speculation", speculation, Speculation | None, "a Speculation or None")
        self.speculation = speculation
        self.drafting = PLAIN
        if speculation is not None:
            self.drafting = make_drafting(
                speculation, self.manifest, self.engines, self.draft_columns
            )

    def with_speculation(self, speculation: Speculation | None) -> "LLM":
        """An LLM that uses this LLM's engines and KV caches, but drafts differently. Nothing is
        loaded again.

        Its controller and guard are new. Raises :class:`EESDError` if the tree is too wide.
        """
        other = copy(self)
        other._draft_with(speculation)
        return other

    @property
    def has_tokenizer(self) -> bool:
        return self._codec is not None

    @property
    def codec(self) -> TextCodec:
        """Tokenizer and chat template. Raises :class:`EESDError` if the model has none."""
        if self._codec is None:
            raise EESDError(
                f"{self.directory} has no tokenizer.json; give token ids, or export from a "
                "model that has one."
            )
        return self._codec

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or of chat messages (``{"role": ..., "content": ...}``). Token ids
        are returned unchanged.

        Raises:
            EESDError: The prompt has the wrong type, or the template refuses the messages.
        """
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        several = isinstance(prompt, Sequence) or (
            isinstance(prompt, np.ndarray) and prompt.ndim == 1
        )
        several = several and not isinstance(prompt, bytes | bytearray)
        items: list[Any] = list(prompt) if several else [None]
        if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
            return [int(item) for item in items]
        if not all(isinstance(item, Mapping) for item in items):
            raise EESDError("A prompt is a text, a list of token ids, or a list of chat messages.")
        return self.codec.encode(items)

    def request(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Request:
        """Make a request for :meth:`run` or for a service, as :meth:`generate` does.

        Raises:
            EESDError: The prompt or an option cannot be used.
        """
        check_type("sampling", sampling, Sampling | None, "a Sampling or None")
        if unknown := options.keys() - {field.name for field in fields(Request)[2:]}:
            raise EESDError(
                f"There is no option {shown(min(unknown))}; give some of "
                f"{', '.join(Options.__annotations__)}."
            )
        chosen: dict[str, Any] = {**options, "stop": _stop_strings(options.get("stop", ()))}
        return Request(
            tokens=self.encode(prompt), sampling=sampling or self.default_sampling, **chosen
        )

    @contextmanager
    def session(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 256,
        draft: bool = True,
        ignore_eos: bool = False,
    ) -> Iterator[Session]:
        """Open a :class:`Session` that the caller drives round by round.

        After the ``with`` block, its cache returns to the LLM, and the session can no longer be
        used.

        Raises:
            EESDError: The prompt or an option cannot be used.
        """
        request = self.request(
            prompt, sampling, max_new_tokens=max_new_tokens, draft=draft, ignore_eos=ignore_eos
        )
        with self._running(Generation(request)) as session:
            yield session

    @contextmanager
    def _running(self, generation: Generation) -> Iterator[Session]:
        """The session of a request that runs alone."""
        with self.lock:
            self._settle()
            if not self._idle:
                self._idle.append(self.engines.new_kv_caches()[0])
            self._idle[-1].reset()
            session = self.begin(generation, self._idle[-1], self.observer)
            session.drafting.begin_request()
            session.take_prefix(self.prefixes)
            self._idle.pop()
        try:
            yield session
        finally:
            # This also runs when an abandoned generator is garbage-collected, at any moment and in
            # any thread, so it must not wait for a lock.
            session.close()
            self._ended.append((session, self.prefixes))
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        """Keep the prefixes of ended requests, and free their caches so that other requests can use
        them."""
        while self._ended:
            session, prefixes = self._ended.popleft()
            session.keep_prefix(prefixes)
            self._idle.append(session.close())

    def begin(
        self, generation: Generation, kv_cache: KVCache, observer: Observer | None = None
    ) -> Session:
        """Begin a request with an empty cache. Raises :class:`EESDError` if it can never run."""
        drafting = self._drafting(generation.request)
        codec = self.codec if generation.request.stop else self._codec
        return Session(generation, kv_cache, self.engines, drafting, codec, observer, self.lock)

    def _drafting(self, request: Request) -> Drafting:
        """Return the drafters of a request that runs alone."""
        if self.speculation is None or not request.draft:
            return PLAIN
        if request.sampling.greedy or request.sampling.method != "rejection":
            return self.drafting
        spec = self.speculation.controller
        controller: Controller = RejectionTS(
            request.sampling.seed or 0, self.manifest.exit_head.calibration
        )
        if spec.startswith("fixed"):
            controller = make_controller(spec)
        fixed = self.drafting.with_drafter(controller=controller, budget=None)
        return Drafting(fixed.drafter, fixed=True)

    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Generate until EOS, a stop string, ``max_new_tokens``, the deadline, or the end of the
        cache.

        Drafting does not change the result. With greedy decoding and with ``coupled`` sampling, the
        tokens are the same with and without drafting. With ``rejection`` sampling, their
        distribution is the same.

        Args:
            prompt: Text, chat messages, or token ids.
            sampling: The sampling options. By default, they come from the model's
                ``generation_config.json``, and decoding is greedy if there is no such file.
            options: See :class:`Options`.

        Raises:
            EESDError: The prompt or an option cannot be used, or the constraint cannot be followed.
        """
        request = self.request(prompt, sampling, **options)
        return completion_of([*self.run(request)], request)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Generator[Piece, None, tuple[str, Stats]]:
        """Like :meth:`generate`, but yield each token when its round is committed.

        The text is only split between whole characters. The generator's return value is
        (finish_reason, :class:`Stats`).
        """
        for update in self.run(self.request(prompt, sampling, **options)):
            for output in update.tokens:
                yield Piece(output.text, output.token, output.source != "verify", output.logprob)
        if update.held:
            yield Piece(update.held, None, False)
        return update.finish_reason or "", update.stats

    def run(self, request: Request) -> Iterator[Update]:
        """Run a request alone. It yields an update after each round, and the last update has a
        finish reason."""
        generation = Generation(request)
        with self._running(generation) as session:
            update = Update()
            while update.finish_reason is None:
                late = generation.is_late(time.monotonic())
                update = session.last_update("deadline") if late else session.update(session.step())
                yield update


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings as a tuple. A single string is one stop string, not a sequence of
    letters."""
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise EESDError(f"stop is {shown(stop)}; it must be a string or a list of strings.")
    return tuple(stop)
