"""Both engines of a directory, which are assembled by hand. A test can therefore wrap, break or
time every part of a session."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from eesd.common.draft_vocab import DraftColumns, load_draft_vocab
from eesd.common.manifest import load_manifest
from eesd.controllers import Controller, DraftStep, RoundOutcome, TextStep
from eesd.controllers.base import EXIT
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.decoding.drafting import Drafter, Drafting
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.decoding.round import Observer
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import RoundResult
from eesd.runtime.engines.backends import EngineOptions, Engines, open_engines
from eesd.runtime.engines.base import Call, Engine, KVCache, StepOutputs, Work
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_engine import OrtEngine
from eesd.runtime.llm import LLM
from eesd.runtime.request import Generation, Request
from eesd.runtime.session import Session
from support.on_cache import OnCache

FIRST_SLOTS = 16
"""The number is small, so that every generation outgrows it."""


@dataclass(frozen=True)
class Workspace:
    """A KV cache, and the engines for it."""

    kv_cache: KVCache
    verify: Engine
    draft: Engine

    def drafted(self, tokens: Sequence[int], slot: int) -> StepOutputs:
        """Returns the outputs of a draft call over consecutive tokens from ``slot`` on."""
        return OnCache(self.draft, self.kv_cache).forward(
            tokens, range(slot, slot + len(tokens)), slot
        )


class Harness:
    """Makes sessions that use the same cache one after the other, like the sessions of
    ``eesd.LLM``. The stale content of the cache must have no effect.

    Attributes:
        exact_trees: Whether the nodes of a tree get the same bits as the same path run as a chain.
    """

    def __init__(self, directory: Path, standard: bool = True) -> None:
        """Open a directory with ONNX Runtime's operators or, unless ``standard``, with the default
        engine."""
        self.directory = directory
        self.manifest = load_manifest(directory)
        self.exact_trees = False
        if standard:
            self._verify: Engine = OrtEngine(
                directory, self.manifest, self.manifest.verify, threads=1
            )
            self._draft: Engine = OrtEngine(
                directory, self.manifest, [self.manifest.draft], threads=1
            )
        else:
            engines = open_engines(directory, self.manifest, EngineOptions("ort", threads=1))
            assert engines.draft is not None
            self._verify = engines.verify
            self._draft = engines.draft
            self.exact_trees = engines.exact_trees
        self.columns = DraftColumns(load_draft_vocab(directory, self.manifest))
        self._shared = self.workspace(self.manifest.max_seq_len)

    def workspace(self, slots: int = FIRST_SLOTS) -> Workspace:
        """Returns a cache and the engines. With ONNX Runtime's operators, the cache starts with
        ``slots`` slots."""
        own = isinstance(self._verify, OrtEngine)
        kv_cache = HostKVCache(self.manifest, slots) if own else self._verify.new_kv_caches()[0]
        return Workspace(kv_cache, self._verify, self._draft)

    def session(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        controller: Controller | None = None,
        width: int = 1,
        *,
        new_tokens: int = 40,
        eos: tuple[int, ...] = (),
        guard: Guard | None = None,
        budget: TreeBudget | None = None,
        workspace: Workspace | None = None,
        observer: Observer | None = None,
        text: TextRule | None = None,
        in_place: bool = False,
    ) -> Session:
        """Returns a session that drafts with the exit head if there is a ``controller``, and from
        the text if there is a ``text``."""
        parts = workspace or self._shared
        sampling = sampling or Sampling()
        drafter = (
            Drafter(parts.draft, controller, width, budget, self.columns) if controller else None
        )
        drafting = Drafting(drafter, text, guard, _shared(controller, budget, text))
        # The tests compare sessions, so no session may draw a random seed.
        sampling = replace(sampling, seed=sampling.seed or 0)
        request = Request(
            tokens=prompt,
            sampling=sampling,
            max_new_tokens=new_tokens,
            stop_token_ids=eos,
            ignore_eos=True,
        )
        engines = Engines(parts.verify, parts.draft, in_place=in_place)
        return Session(Generation(request), parts.kv_cache, engines, drafting, observer=observer)

    def fresh_prefill(self, tokens: Sequence[int]) -> Workspace:
        """Returns a new cache that holds all tokens except the last."""
        workspace = self.workspace()
        self.session(tokens, workspace=workspace).prefill()
        return workspace


def _shared(
    controller: Controller | None, budget: TreeBudget | None, text: TextRule | None
) -> RoundValue:
    """Returns the shared value of rounds. All parts that make decisions use it, as in an LLM."""
    rules = [
        rule for rule in (budget, text, controller) if rule is not None and rule.value is not None
    ]
    value = rules[0].value if rules else None
    for rule in rules:
        rule.value = value
    return value or RoundValue()


def finish(session: Session) -> list[RoundResult]:
    """Run a session to its end. Returns the rounds."""
    rounds = []
    while session.finish_reason is None:
        rounds.append(session.step())
    return rounds


def generated(session: Session) -> list[int]:
    """Run a session to its end. Returns all new tokens."""
    finish(session)
    return session.tokens[session.stats.prompt_tokens :]


class RandomStop(Controller):
    """A controller that flips a coin after each step."""

    def __init__(self, seed: int, chance: float = 0.5) -> None:
        self._random = np.random.default_rng(seed)
        self._chance = chance

    def keep_drafting(self, step: DraftStep) -> bool:
        return bool(self._random.random() < self._chance)


class SometimesCopies(TextRule):
    """A rule that verifies all proposals of the text in some of the rounds. ``share`` is the share
    of these rounds."""

    def __init__(self, seed: int = 0, share: float = 1.0) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._share = share

    def chance(self, step: TextStep) -> float:
        return max(super().chance(step), 0.8)

    def count(self, values: Sequence[float], drafts: bool) -> int:
        return len(values) if self._random.random() < self._share else 0

    def count_behind(self, values: Sequence[float], nodes: int) -> int:
        return int(self._random.integers(len(values) + 1))


class PauseUntil(Guard):
    """A guard that only pauses ``drafter`` before ``round``."""

    def __init__(self, round: int, drafter: str = EXIT) -> None:
        super().__init__()
        self._left = round
        self._drafter = drafter

    def allows(self, drafter: str, sure: float = 0.0) -> bool:
        return drafter != self._drafter or self._left <= 0

    def observe(self, outcome: RoundOutcome) -> bool:
        self._left -= 1
        return False


class Wrapped:
    """An engine with a function that is called before and after each call. A prefill's logits are
    ignored."""

    chooses = False

    def __init__(
        self,
        inner: Engine,
        before: Callable[[Sequence[int], int], None] = lambda tokens, slot: None,
        after: Callable[[Sequence[int], int, StepOutputs], None] = lambda tokens, slot, outputs: (
            None
        ),
    ) -> None:
        self._inner = inner
        self._before = before
        self._after = after
        self.manifest = inner.manifest
        self.prefill_chunk = inner.prefill_chunk

    def new_kv_caches(self, count: int = 1) -> Sequence[KVCache]:
        return self._inner.new_kv_caches(count)

    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        self._inner.prepare(kv_caches)

    def work(self, calls: Sequence[Call]) -> Work:
        return self._inner.work(calls)

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        for call in calls:
            self._before(call.tokens, call.slot)
        found = self._inner.forward(calls)
        for call, outputs in zip(calls, found, strict=True):
            unread = StepOutputs(np.zeros((len(call.tokens), 97), np.float32))
            self._after(call.tokens, call.slot, outputs if call.logits else unread)
        return found


def recording_drafts(workspace: Workspace) -> tuple[Workspace, dict[int, NDArray[np.float32]]]:
    """Returns the workspace, and a dict that will get the logits of its draft engine for each
    slot."""
    logits: dict[int, NDArray[np.float32]] = {}

    def note(tokens: Sequence[int], slot: int, outputs: StepOutputs) -> None:
        logits.update({slot + i: outputs.logits[i].copy() for i in range(len(tokens))})

    return replace(workspace, draft=Wrapped(workspace.draft, after=note)), logits


def timed(
    monkeypatch: pytest.MonkeyPatch,
    workspace: Workspace,
    draft_step: float = 0.0,
    node: float = 0.0,
) -> Workspace:
    """Returns engines that drive a clock. A draft call takes ``draft_step`` seconds, a verify pass
    takes 1 second, and each additional node takes ``node`` seconds."""
    clock = SimpleNamespace(now=0.0)
    stands = SimpleNamespace(perf_counter=lambda: clock.now, monotonic=lambda: clock.now)
    for part in ("decoding.round", "session"):
        monkeypatch.setattr(f"eesd.runtime.{part}.time", stands)

    def passing(engine: Engine, seconds: float, more: float) -> Wrapped:
        return Wrapped(
            engine,
            lambda tokens, _: setattr(clock, "now", clock.now + seconds + more * (len(tokens) - 1)),
        )

    return replace(
        workspace,
        verify=passing(workspace.verify, 1, node),
        draft=passing(workspace.draft, draft_step, 0),
    )


def without_budget(*llms: LLM) -> None:
    """Let LLMs verify all drafted nodes, because a budget leaves out nodes depending on the
    clock."""
    for llm in llms:
        llm.drafting = llm.drafting.with_drafter(budget=None)
