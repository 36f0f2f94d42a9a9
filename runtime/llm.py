"""The Python API: ``eesd.load(engine_dir)``, then ``generate``, ``stream``, or sessions of one's own."""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest, load_manifest, verify_files
from eesd.controllers import Controller, make_controller
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.session import Drafter, Limits, Session
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.backends import Engines, open_engines
from eesd.runtime.engines.base import Binding, KVCache
from eesd.runtime.text import Message, TextCodec, TextStream

Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Speculation:
    """How an :class:`LLM` drafts: who decides how far (see ``eesd.controllers``), the width of the token tree's levels
    (1: a chain), whether the guard rests drafting when it does not pay, and whether a :class:`TreeBudget` chooses what is
    verified of all that the draft proposes: a chain then gets second choices, a tree loses what is not worth its place."""

    controller: str = "cost-aware-ts"
    tree_width: int = 1
    guard: bool = True
    seed: int = 0
    tree_budget: bool = False


@dataclass(frozen=True)
class Piece:
    """What one token of a stream brought: its text (may be empty), and whether it was drafted or the verifier's own.

    ``token`` is None in a last piece that only brings text held back for a stop string that did not come."""

    text: str
    token: int | None
    drafted: bool


@dataclass(frozen=True)
class Completion:
    """A finished generation. ``tokens`` are the new ones; ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True)
class _Workspace:
    """A kv_cache and the engines bound to it; reused from request to request, so nothing is bound twice."""

    kv_cache: KVCache
    verify: Binding
    draft: Binding | None


def load(
    engine_dir: str | os.PathLike[str],
    backend: str = "auto",
    *,
    speculation: Speculation | None = Speculation(),
    threads: int | None = None,
    verify_hashes: bool = False,
) -> "LLM":
    """Open an engine directory that ``eesd-export`` wrote.

    ``speculation=None`` loads no draft engine: plain decoding with no overhead. ``threads`` defaults to the physical cores;
    ``verify_hashes`` re-hashes every file first. Raises :class:`EESDError` when the directory cannot be used.
    """
    directory = Path(engine_dir)
    manifest = load_manifest(directory)
    if verify_hashes:
        verify_files(directory, manifest)
    engines = open_engines(directory, manifest, backend, threads, draft=speculation is not None)
    return LLM(directory, manifest, engines, speculation)


class LLM:
    """A model ready to generate. Not for several threads at once: serve requests from one, or load once for each.

    The controller and the guard live as long as the LLM: what one request taught them helps the next.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        engines: Engines,
        speculation: Speculation | None,
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.speculation = speculation
        self.controller: Controller | None = None
        self.guard: Guard | None = None
        self.budget: TreeBudget | None = None
        self.engines = engines
        """Both engines, to bind to KV caches of one's own."""
        self._codec: TextCodec | None = None
        self._idle: list[_Workspace] = []
        if speculation is not None:
            self._check(speculation)
            self.controller = make_controller(speculation.controller, speculation.seed, manifest.exit_head.calibration)
            self.guard = Guard() if speculation.guard else None
            self.budget = TreeBudget(prior=manifest.exit_head.calibration) if speculation.tree_budget else None

    def _check(self, speculation: Speculation) -> None:
        widest = min(self.manifest.draft_top_k, self.manifest.max_tree_nodes)
        if not 1 <= speculation.tree_width <= widest:
            raise EESDError(f"tree_width is {speculation.tree_width}; this engine allows 1 to {widest}.")

    @property
    def codec(self) -> TextCodec:
        """Tokenizer and chat template, loaded when first needed."""
        if self._codec is None:
            self._codec = TextCodec(self.directory)
        return self._codec

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (``{"role": ..., "content": ...}``), or of token ids as they are."""
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        tokens = [int(item) for item in prompt if isinstance(item, Integral)]
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if len(tokens) + len(messages) != len(prompt) or (tokens and messages):
            raise EESDError("A prompt is a text, a list of token ids, or a list of chat messages.")
        return self.codec.encode(messages) if messages else tokens

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
        """A :class:`Session` to drive round by round; its cache goes back to the LLM at the end of the ``with`` block."""
        workspace = self._idle.pop() if self._idle else self._new_workspace()
        workspace.kv_cache.reset()
        manifest = self.manifest
        limits = Limits(
            () if ignore_eos else manifest.eos_token_ids,
            max_new_tokens,
            manifest.max_seq_len,
            manifest.max_tree_nodes,
            self.engines.verify.prefill_chunk,
        )
        drafter = None
        if draft and workspace.draft and self.controller and self.speculation:
            drafter = Drafter(workspace.draft, self.controller, self.guard, self.speculation.tree_width, self.budget)
            self.controller.begin_request()
            if self.budget:
                self.budget.begin_request()
        try:
            tokens = self.encode(prompt)
            yield Session(
                tokens,
                workspace.kv_cache,
                workspace.verify,
                drafter,
                limits,
                sampling or Sampling(),
                manifest.geometry.vocab_size,
            )
        finally:
            self._idle.append(workspace)

    def _new_workspace(self) -> _Workspace:
        verify, draft = self.engines
        kv_cache = verify.new_kv_cache()
        return _Workspace(kv_cache, verify.bind(kv_cache), draft.bind(kv_cache) if draft else None)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        draft: bool = True,
        ignore_eos: bool = False,
    ) -> Completion:
        """Generate until EOS, a stop string, ``max_new_tokens``, or the end of the cache.

        ``draft=False`` decodes plainly. The tokens are the same either way: always when greedy or ``coupled``, in
        distribution with ``rejection``. Raises :class:`EESDError` for a prompt or options that cannot be used.
        """
        stream = self.stream(prompt, sampling, max_new_tokens=max_new_tokens, stop=stop, draft=draft, ignore_eos=ignore_eos)
        pieces = []
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                reason, stats = end.value
                tokens = [piece.token for piece in pieces if piece.token is not None]
                return Completion("".join(piece.text for piece in pieces), tokens, reason, stats)

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        draft: bool = True,
        ignore_eos: bool = False,
    ) -> Generator[Piece, None, tuple[str, Stats]]:
        """As :meth:`generate`, piece by piece as rounds are committed.

        Text comes in whole characters. The generator's return value is (finish_reason, :class:`Stats`).
        """
        with self.session(prompt, sampling, max_new_tokens=max_new_tokens, draft=draft, ignore_eos=ignore_eos) as session:
            text = None
            if stop or (self.directory / "tokenizer.json").exists():
                text = TextStream(self.codec, session.tokens, stop)
            while session.finish_reason is None:
                result = session.step()
                for token, drafted in zip(result.tokens, result.drafted, strict=True):
                    yield Piece(text.push(token) if text else "", token, drafted)
                    if text and text.stopped:
                        return "stop", session.stats
            if text and (rest := text.finish()):
                yield Piece(rest, None, False)
            return session.finish_reason, session.stats
