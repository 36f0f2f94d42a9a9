"""One sequence being generated, round by round.

A round: the draft proposes behind the last committed token (the root), the controller says after each step whether to go on,
one verify pass judges everything, the accepted path and the verifier's own token are committed. That own token becomes the
next round's root and rides in the next verify pass, so nothing is ever run twice or on its own.
"""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from eesd.common.errors import EESDError
from eesd.common.manifest import PREFILL_CHUNK
from eesd.controllers import Controller, DraftStep, RoundOutcome
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.decoding.draft_tree import Growth
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.sampling import Logits, Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.decoding.tree import TokenTree
from eesd.runtime.engines.base import Binding, ChainBinding, KVCache, StepOutputs


@dataclass(frozen=True)
class Limits:
    """Where a sequence ends: EOS ids, new tokens, and the slots of the cache; and how much one round may draft."""

    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    max_seq_len: int
    max_tree_nodes: int
    prefill_chunk: int = PREFILL_CHUNK


class Round(NamedTuple):
    """What one round committed: its tokens (at least one), and for each whether it was drafted or the verifier's own."""

    tokens: list[int]
    drafted: list[bool]
    finish_reason: str | None
    """``stop`` (EOS), ``length`` (max_new_tokens or the end of the cache), or None: call ``step`` again."""


@dataclass(frozen=True)
class Drafter:
    """What a session needs to draft: the bound draft engine, who decides how far, the width of a tree's levels, and who decides
    how much of the tree is verified (None: all)."""

    binding: Binding
    controller: Controller
    guard: Guard | None
    tree_width: int = 1
    budget: TreeBudget | None = None


class Session:
    """A sequence over its own KV cache. ``step`` runs one round; between steps nothing runs and nothing is pending.

    ``step`` is a transaction: if it raises (a cancel, a failing engine), the session stands where the round began and ``step``
    can be called again. With ``drafter`` None it is plain decoding through the same verify engine.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        kv_cache: KVCache,
        verify: Binding,
        drafter: Drafter | None,
        limits: Limits,
        sampling: Sampling,
        vocab_size: int,
    ) -> None:
        if not len(prompt):
            raise EESDError("The prompt is empty; give at least one token.")
        if len(prompt) >= limits.max_seq_len:
            raise EESDError(
                f"The prompt has {len(prompt)} tokens, the cache {limits.max_seq_len} slots; "
                "shorten the prompt or export with a larger --max-seq-len."
            )
        if limits.max_new_tokens < 1:
            raise EESDError(f"max_new_tokens is {limits.max_new_tokens}; it must be at least 1.")
        outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise EESDError(f"The prompt has the token id {outside}; ids go from 0 to {vocab_size - 1}.")
        self.tokens = list(prompt)
        """Prompt and everything committed. All but the last token (the root) are in the cache once the prefill is done."""
        self.stats = Stats(prompt_tokens=len(prompt))
        self.finish_reason: str | None = None
        self._kv_cache = kv_cache
        self._verify = verify
        self._drafter = drafter
        self._limits = limits
        self._sampler = make_sampler(sampling, vocab_size)
        self._prefilled = 0
        self._rests_before = drafter.guard.rests if drafter and drafter.guard else 0

    def prefill(self) -> None:
        """Put the prompt, all but its last token, into the cache; the first ``step`` does it if this was not called."""
        started = time.perf_counter()
        end = self.stats.prompt_tokens - 1
        while self._prefilled < end:
            start, stop = self._prefilled, min(self._prefilled + self._limits.prefill_chunk, end)
            self._kv_cache.reserve(stop)
            self._verify.forward(self.tokens[start:stop], range(start, stop), start)
            self._prefilled = stop
        self.stats.prefill_seconds += time.perf_counter() - started

    def step(self) -> Round:
        """Run one round and commit what it accepted. Raises :class:`EESDError` on a finished session."""
        if self.finish_reason is not None:
            raise EESDError("The session is finished; start a new one.")
        if self._prefilled < self.stats.prompt_tokens - 1:
            self.prefill()
        begun = time.perf_counter()
        self._sampler.begin(self.tokens)
        drafter = self._drafter_now()
        width, budget = (drafter.tree_width, drafter.budget) if drafter else (1, None)
        growth = Growth(self.tokens[-1], self._sampler, width, budget)
        draft_seconds = self._draft(growth, drafter) if drafter else 0.0
        tree = growth.kept(self._node_limit())
        until_drafted = time.perf_counter() - begun
        outputs, verify_seconds = self._run_verify(tree)
        path, token = self._sampler.accept(tree, outputs)
        if path and path[-1] != len(path):
            self._kv_cache.compact(len(self.tokens), [len(self.tokens) - 1 + node for node in path])
        drafted = [tree.tokens[node] for node in path]
        result = self._cut([*drafted, token], len(path))
        outcome = RoundOutcome(
            tree.depths[-1],
            len(path),
            until_drafted,
            verify_seconds,
            len(tree) - 1,
            growth.steps,
            growth.followed(drafted),
        )
        if drafter is not None:
            drafter.controller.observe(outcome)
        if budget is not None:
            budget.observe(growth.judged([*drafted, token]), outcome)
        stats = self._accounted(outcome, result, draft_seconds, time.perf_counter() - begun, drafter is not None)
        # The commit: one statement behind everything that may raise. No signal is handled within it.
        self.tokens, self.stats, self.finish_reason = [*self.tokens, *result.tokens], stats, result.finish_reason
        return result

    def peek(self) -> Logits:
        """The verifier's logits [V] behind the last committed token, by a single-token pass; commits nothing."""
        if self._prefilled < self.stats.prompt_tokens - 1:
            self.prefill()
        outputs, _ = self._run_verify(TokenTree(self.tokens[-1]))
        row: Logits = outputs.logits[0].copy()
        return row

    @property
    def kv_cache(self) -> KVCache:
        """The cache, to bind engines of one's own to."""
        return self._kv_cache

    def propose(self, draft: Binding, count: int) -> tuple[list[int], list[DraftStep]]:
        """What ``draft``, bound to :attr:`kv_cache`, proposes behind the last committed token: a chain of ``count`` tokens, or as
        many as there is room for, and what a controller would be told of each, entropy included. Commits nothing."""
        if self._prefilled < self.stats.prompt_tokens - 1:
            self.prefill()
        root, count, steps = len(self.tokens) - 1, min(self._room(), count), []
        self._sampler.begin(self.tokens)
        self._kv_cache.reserve(root + 1 + count)
        growth = Growth(self.tokens[-1], self._sampler)
        for node in range(count):
            outputs = self._run_draft(growth.tree, [node], root, draft)
            growth.add_level(outputs, 1)
            steps.append(growth.last_step(outputs, node, with_entropy=True))
        return growth.tree.tokens[1:], steps

    def _drafter_now(self) -> Drafter | None:
        """The drafter, unless there is none, no room to draft, or the guard lets it rest."""
        drafter = self._drafter
        if drafter is None or self._room() < 1 or (drafter.guard and not drafter.guard.allows()):
            return None
        return drafter

    def _room(self) -> int:
        """How many levels a draft of this round may have."""
        new_left = self._limits.max_new_tokens - self.stats.new_tokens
        slots_left = self._limits.max_seq_len - len(self.tokens)
        return min(new_left - 1, slots_left - 1, self._limits.max_tree_nodes)

    def _node_limit(self) -> int:
        """How many nodes a verify pass of this round may have besides the root."""
        return min(self._limits.max_tree_nodes, self._limits.max_seq_len - len(self.tokens))

    def _draft(self, growth: Growth, drafter: Drafter) -> float:
        """Grow the tree until the controller has enough; the seconds spent in the engine."""
        controller, binding = drafter.controller, drafter.binding
        ahead = controller.length_ahead()
        if ahead == 0:
            return 0.0
        tree, room, most = growth.tree, self._room(), self._node_limit()
        self._kv_cache.reserve(len(self.tokens) + most)
        if ahead and drafter.tree_width == 1 and self._sampler.follows_draft and isinstance(binding, ChainBinding):
            return self._draft_ahead(growth, min(ahead, room), binding)
        seconds = 0.0
        while True:
            started = time.perf_counter()
            outputs = self._run_draft(tree, growth.frontier, len(self.tokens) - 1, binding)
            seconds += time.perf_counter() - started
            first = growth.frontier[0]
            growth.add_level(outputs, most + 1 - len(tree))
            if not growth.frontier or growth.steps >= room or len(tree) > most:
                return seconds
            if not controller.keep_drafting(growth.last_step(outputs, first, controller.needs_entropy)):
                return seconds

    def _draft_ahead(self, growth: Growth, count: int, binding: ChainBinding) -> float:
        """Grow a chain whose length is known in one call, which needs the host for none of its steps."""
        started = time.perf_counter()
        outputs = binding.draft_chain(growth.tree.tokens[0], len(self.tokens) - 1, count)
        seconds = time.perf_counter() - started
        for row in range(count):
            growth.add_level(outputs, 1, row)
        return seconds

    def _run_draft(self, tree: TokenTree, frontier: list[int], root: int, binding: Binding) -> StepOutputs:
        """The whole frontier through the draft in one call."""
        tokens = [tree.tokens[node] for node in frontier]
        slot = root + frontier[0]
        if tree.is_chain:
            return binding.forward(tokens, [slot], slot)
        positions = [root + tree.depths[node] for node in frontier]
        return binding.forward(tokens, positions, slot, root, tree.visible(frontier[0]))

    def _run_verify(self, tree: TokenTree) -> tuple[StepOutputs, float]:
        root = len(self.tokens) - 1
        self._kv_cache.reserve(root + len(tree))
        started = time.perf_counter()
        if tree.is_chain:
            outputs = self._verify.forward(tree.tokens, range(root, root + len(tree)), root)
        else:
            positions = [root + depth for depth in tree.depths]
            outputs = self._verify.forward(tree.tokens, positions, root, root, tree.visible())
        return outputs, time.perf_counter() - started

    def _cut(self, tokens: list[int], accepted: int) -> Round:
        """What the round commits of its tokens: all up to EOS; and why the sequence ends with them, if it does."""
        limits, reason = self._limits, None
        end = next((i for i, token in enumerate(tokens) if token in limits.eos_token_ids), None)
        if end is not None:
            tokens, reason = tokens[: end + 1], "stop"
        elif (
            self.stats.new_tokens + len(tokens) >= limits.max_new_tokens or len(self.tokens) + len(tokens) >= limits.max_seq_len
        ):
            reason = "length"
        return Round(tokens, [index < accepted for index in range(len(tokens))], reason)

    def _accounted(self, outcome: RoundOutcome, result: Round, draft_seconds: float, seconds: float, drafting: bool) -> Stats:
        """The statistics with this round in them; the guard is told of it."""
        stats = copy(self.stats)
        stats.offered_at_depth, stats.accepted_at_depth = stats.offered_at_depth.copy(), stats.accepted_at_depth.copy()
        stats.rounds += 1
        stats.new_tokens += len(result.tokens)
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += outcome.verify_seconds
        stats.host_seconds += seconds - draft_seconds - outcome.verify_seconds
        if drafting:
            stats.drafting_rounds += 1
            stats.draft_steps += outcome.steps
            stats.drafted += outcome.nodes
            stats.accepted += outcome.accepted
            stats.judge(outcome.drafted, outcome.accepted)
        guard = self._drafter.guard if self._drafter else None
        if guard is not None:
            guard.record(drafting, len(result.tokens), seconds)
            stats.guard_rests = guard.rests - self._rests_before
        return stats
