"""The Python API: ``eesd.load(engine_dir)``, then ``generate``, ``stream``, or sessions that the
caller drives."""

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
from eesd.common.manifest import MAX_TREE_NODES, Manifest, load_manifest
from eesd.controllers import Controller, make_controller
from eesd.controllers.cost_aware_ts import RejectionTS
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.chat_template import Message
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.decoding.round import Drafter, Drafting
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.backends import EngineOptions, Engines, open_engines
from eesd.runtime.engines.base import KVCache
from eesd.runtime.prefix_cache import PrefixCache
from eesd.runtime.request import Constraint, Generation, Request, TokenLogprob, Update
from eesd.runtime.session import Observer, Session
from eesd.runtime.text import TextCodec

Prompt = str | Sequence[Message] | Sequence[int]
LOGGER = logging.getLogger(__name__)
GREEDY = Sampling()
GENERATION_CONFIGS = ("auto", "none")
"""Whether the sampling options of ``generation_config.json`` are used."""
DRAFTERS = ("exit", "text", "both")


@dataclass(frozen=True)
class Speculation:
    """How an :class:`LLM` drafts.

    Attributes:
        controller: Decides how far to draft: a name and options for
            :func:`eesd.controllers.make_controller`.
        tree: Nodes of a level of the draft tree; a budget leaves out candidates that are not worth
            their place in the verify pass. 1 is a chain with second candidates. 0 drafts a chain
            without a budget.
        guard: Whether to pause drafting while it is slower than plain decoding.
        seed: Of the controller's random generator.
        drafter: What drafts: ``exit`` (the exit head), ``text`` (the text itself, where it repeats;
            the draft engine is not loaded, and ``controller`` and ``tree`` decide nothing), or
            ``both``.

    Raises:
        EESDError: A value has another type, or is out of range.
    """

    controller: str = "cost-aware-ts"
    tree: int = 0
    guard: bool = True
    seed: int = 0
    drafter: str = "both"

    def __post_init__(self) -> None:
        check_type("controller", self.controller, str, "a name such as fixed:k=4")
        check_integer("tree", self.tree, 0, MAX_TREE_NODES)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_flag("guard", self.guard)
        check_choice("drafter", self.drafter, DRAFTERS)

    @property
    def head_drafts(self) -> bool:
        """Whether the exit head drafts."""
        return self.drafter != "text"

    @property
    def text_drafts(self) -> bool:
        """Whether drafts come from the text."""
        return self.drafter != "exit"


@dataclass(frozen=True)
class Piece:
    """One token of a stream.

    Attributes:
        text: The text that became certain with it; may be empty.
        token: Its id. None in a last piece, whose text was held back for a stop string that did not
            come.
        from_draft: Whether the draft proposed it. False: it is the verifier's bonus token.
        logprob: If asked for.
    """

    text: str
    token: int | None
    from_draft: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text, tokens: What is new.
        finish_reason: ``stop``, ``length``, or ``deadline``.
        stats: Counts and seconds.
        logprobs: Of the tokens, if asked for.
        prompt_logprobs: Of the prompt's tokens, if asked for.
        cached_tokens: Tokens of the prompt whose keys and values were kept from earlier requests.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0


class Options(TypedDict, total=False):
    """What a request may ask for besides prompt and sampling;
    :class:`~eesd.runtime.request.Request` says what each means. ``stop`` may be a single string."""

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
    """A request's completion from all its updates, of which the last has a reason."""
    outputs = [output for update in updates for output in update.tokens]
    last = updates[-1]
    prompt = next(
        (update.prompt_logprobs for update in updates if update.prompt_logprobs is not None), None
    )
    return Completion(
        "".join(output.text for output in outputs) + last.held,
        [output.token for output in outputs],
        last.finish_reason or "",
        last.stats,
        None
        if request.logprobs is None
        else [output.logprob for output in outputs if output.logprob],
        None if prompt is None else list(prompt),
        last.cached_tokens,
    )


def load(
    engine_dir: str | os.PathLike[str],
    backend: str = "auto",
    *,
    speculation: Speculation | None = Speculation(),
    threads: int | None = None,
    generation_config: str = "auto",
    exact: bool | None = None,
    activations: str | None = None,
    kv_cache_dtype: str | None = None,
    prefix_memory: int = 0,
    plain_content: bool = False,
    nvtx: bool = False,
) -> "LLM":
    """Open an engine directory that ``eesd-export`` wrote. What the user should know of its engines
    is logged as a warning.

    Args:
        engine_dir: The directory.
        backend: ``auto``, ``tensorrt``, ``ort`` or ``torch``.
        speculation: How to draft. None: decode plainly, without a draft engine. The drafter
            ``text`` loads none either.
        threads: CPU threads of an engine; default: the processors of this process, one fewer if
            there are more than four.
        generation_config: ``auto`` takes the sampling options of the model's
            ``generation_config.json`` where a request gives none; ``none`` does not.
        exact: Whether drafting may change no bit of a logit, also in trees and on a GPU; see
            :class:`~eesd.runtime.engines.backends.EngineOptions`. Default: where that costs little.
            Where it does not hold, requests of a batch on a GPU may change each other's last bits.
        activations: ``int8`` or ``float32``: what quantized weights are multiplied by on the
            CPU. Default: int8.
        kv_cache_dtype: ``float32``, ``float16`` or ``int8``: the KV cache on the CPU. Default:
            float32.
        prefix_memory: Bytes of keys and values kept for requests that begin alike; 0: none. A
            ``Service`` has its own.
        plain_content: Text of chat messages that spells a special token is tokenized as plain text,
            so that it can end no turn and begin none. A template for which this cannot be done is
            refused.
        nvtx: Mark prefill, draft, verify and accept as NVTX ranges, which Nsight Systems shows.

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
        and speculation.head_drafts
        and manifest.exit_head.can_draft
    )
    options = EngineOptions(backend, threads, draft, exact, activations, kv_cache_dtype, nvtx)
    engines = open_engines(directory, manifest, options)
    if engines.notice:
        LOGGER.warning("%s", engines.notice)
    default = models_sampling(manifest) if generation_config == "auto" else GREEDY
    llm = LLM(directory, manifest, engines, speculation, default, prefix_memory, plain_content)
    release_freed_memory()  # what packing weights and reading the tokenizer took for a while
    return llm


def models_sampling(manifest: Manifest) -> Sampling:
    """How the model's ``generation_config.json`` says to sample; greedy if there was none. Options
    that are not applied are logged as a warning.

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
    """A model ready to generate. Any thread may use it: calls wait for each other's rounds.

    The controller and the guard live as long as the LLM: what they learned from one request helps
    the next.

    Attributes:
        manifest: The engine directory's manifest.
        default_sampling: For requests that give none.
        engines: The verify engine and the draft engine.
        draft_columns: The tokens that the draft can predict.
        value: What rounds cost and are worth, which controller, budget and text share.
        controller, guard, budget: What decides about drafting with the exit head; None where it is
            not used.
        text: What decides about drafting from the text; None where it is not used.
        prefixes: Keys and values of earlier texts.
        observer: Told each round's tokens and logits; see :data:`~eesd.runtime.session.Observer`.
        lock: Held while the engines run, and while what requests share changes.
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
        # Read now: later the directory may have been exported again, with another tokenizer.
        self.draft_columns = DraftColumns(load_draft_vocab(directory, manifest))
        has_tokenizer = (directory / "tokenizer.json").exists()
        self._codec = (
            TextCodec(directory, manifest.max_seq_len, plain_content) if has_tokenizer else None
        )
        self.lock = RLock()
        self._idle: list[KVCache] = []
        self._ended: deque[tuple[Session, PrefixCache]] = deque()
        self.prefixes = PrefixCache(prefix_memory)
        self.observer: Observer | None = None
        self._draft_with(speculation)

    def _draft_with(self, speculation: Speculation | None) -> None:
        """Make the controller, the guard and the budget."""
        check_type("speculation", speculation, Speculation | None, "a Speculation or None")
        self.speculation = speculation
        self.value = RoundValue()
        self.controller: Controller | None = None
        self.guard = Guard() if speculation is not None and speculation.guard else None
        self.budget: TreeBudget | None = None
        self.text = (
            TextRule(value=self.value)
            if speculation is not None and speculation.text_drafts
            else None
        )
        if (
            speculation is not None
            and speculation.head_drafts
            and not self.manifest.exit_head.can_draft
        ):
            if not speculation.text_drafts:
                raise EESDError(
                    "The directory has no exit head; export with --exit-head, or choose the "
                    "drafter text."
                )
        elif speculation is not None and speculation.head_drafts:
            widest = min(self.manifest.draft_top_k, self.manifest.max_tree_nodes)
            if speculation.tree > widest:
                raise EESDError(f"tree is {speculation.tree}; this engine allows 0 to {widest}.")
            prior = self.manifest.exit_head.calibration
            self.controller = make_controller(
                speculation.controller, speculation.seed, prior, self.value
            )
            self.budget = TreeBudget(prior=prior, value=self.value) if speculation.tree else None

    def with_speculation(self, speculation: Speculation | None) -> "LLM":
        """An LLM that drafts in another way with the engines and KV caches of this one. Nothing is
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
            EESDError: The prompt is nothing of these, or the template refuses the messages.
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
        """A request, as :meth:`generate` makes it: for :meth:`run`, or for a service.

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
        """A :class:`Session` that the caller drives round by round.

        Its cache returns to the LLM after the ``with`` block, and the session cannot be used any
        more.

        Raises:
            EESDError: The prompt or an option cannot be used.
        """
        request = self.request(
            prompt, sampling, max_new_tokens=max_new_tokens, draft=draft, ignore_eos=ignore_eos
        )
        with self._alone(Generation(request)) as session:
            yield session

    @contextmanager
    def _alone(self, generation: Generation) -> Iterator[Session]:
        """A request that runs alone."""
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
            # Here, too, if an abandoned generator is collected: anywhere, in any thread. So this
            # waits for nobody.
            session.close()
            self._ended.append((session, self.prefixes))
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        """Keep what requests that have ended leave, and let others use their caches."""
        while self._ended:
            session, prefixes = self._ended.popleft()
            session.keep_prefix(prefixes)
            self._idle.append(session.close())

    def begin(
        self, generation: Generation, kv_cache: KVCache, observer: Observer | None = None
    ) -> Session:
        """Begin a request over an empty cache. Raises :class:`EESDError` if it can never run."""
        drafting = self._drafting(generation.request)
        codec = self.codec if generation.request.stop else self._codec
        return Session(generation, kv_cache, self.engines, drafting, codec, observer, self.lock)

    def _drafting(self, request: Request) -> Drafting:
        """How a request drafts, if it runs alone."""
        speculation = self.speculation
        if not request.draft or speculation is None:
            return Drafting()
        fixed = not request.sampling.greedy and request.sampling.method == "rejection"
        controller = self.controller
        budget = self.budget
        if fixed and controller is not None:
            budget = None
            if speculation.controller.startswith("fixed"):
                controller = make_controller(speculation.controller)
            else:
                controller = RejectionTS(
                    request.sampling.seed or 0, self.manifest.exit_head.calibration
                )
        drafter = None
        if self.engines.draft is not None and controller is not None:
            drafter = Drafter(
                self.engines.draft, controller, max(speculation.tree, 1), budget, self.draft_columns
            )
        return (
            Drafting(drafter, fixed=True)
            if fixed
            else Drafting(drafter, self.text, self.guard, self.value)
        )

    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Generate until EOS, a stop string, ``max_new_tokens``, the deadline, or the end of the
        cache.

        The tokens are the same with and without drafting: always when greedy or ``coupled``, in
        distribution with ``rejection``.

        Args:
            prompt: Text, chat messages, or token ids.
            sampling: Default: that of the model's ``generation_config.json``, or greedy.
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

        Text comes in whole characters. The generator's return value is (finish_reason,
        :class:`Stats`).
        """
        for update in self.run(self.request(prompt, sampling, **options)):
            for output in update.tokens:
                yield Piece(output.text, output.token, output.source != "verify", output.logprob)
        if update.held:
            yield Piece(update.held, None, False)
        return update.finish_reason or "", update.stats

    def run(self, request: Request) -> Iterator[Update]:
        """Run a request alone. Yields what each round brought, as a service tells it; the last
        update has a reason."""
        generation = Generation(request)
        with self._alone(generation) as session:
            update = Update()
            while update.finish_reason is None:
                late = generation.is_late(time.monotonic())
                update = session.last_update("deadline") if late else session.update(session.step())
                yield update


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The strings to stop before; a single string is one of them, not its letters."""
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise EESDError(f"stop is {shown(stop)}; it must be a string or a list of strings.")
    return tuple(stop)
