"""One sequence being generated, round by round.

A round: the draft proposes behind the last committed token (the root), the controller says after each step whether to go on,
one verify pass judges everything, the accepted path and the verifier's own token are committed. That own token becomes the
next round's root and rides in the next verify pass, so nothing is ever run twice or on its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import NamedTuple

import numpy as np

from eesd.controllers import Controller, DraftStep, RoundOutcome
from eesd.export.manifest import PREFILL_CHUNK
from eesd.runtime.choosing import Proposal, make_chooser
from eesd.runtime.engine import Binding, ChainBinding, Outputs, Slab
from eesd.runtime.errors import EESDError
from eesd.runtime.guard import Guard
from eesd.runtime.sampling import Logits, Sampling
from eesd.runtime.stats import Stats
from eesd.runtime.tree import TokenTree


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
    """What a session needs to draft: the bound draft engine, who decides how far, and the width of a tree's levels."""

    binding: Binding
    controller: Controller
    guard: Guard | None
    tree_width: int = 1


class Session:
    """A sequence over its own KV slab. ``step`` runs one round; between steps nothing runs and nothing is pending.

    ``step`` is a transaction: if it raises (a cancel, a failing engine), the session stands where the round began and ``step``
    can be called again. With ``drafter`` None it is plain decoding through the same verify engine.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        slab: Slab,
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
        self._slab = slab
        self._verify = verify
        self._drafter = drafter
        self._limits = limits
        self._chooser = make_chooser(sampling, vocab_size)
        self._prefilled = 0
        self._rests_before = drafter.guard.rests if drafter and drafter.guard else 0

    def prefill(self) -> None:
        """Put the prompt, all but its last token, into the cache; the first ``step`` does it if this was not called."""
        started = time.perf_counter()
        end = self.stats.prompt_tokens - 1
        while self._prefilled < end:
            start, stop = self._prefilled, min(self._prefilled + self._limits.prefill_chunk, end)
            self._slab.reserve(stop)
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
        tree = TokenTree(self.tokens[-1])
        self._chooser.begin(self.tokens)
        drafter = self._drafter_now()
        draft_seconds = self._draft(tree, drafter) if drafter else 0.0
        until_drafted = time.perf_counter() - begun
        outputs, verify_seconds = self._run_verify(tree)
        path, token = self._chooser.accept(tree, outputs)
        if path and path[-1] != len(path):
            self._slab.compact(len(self.tokens), [len(self.tokens) - 1 + node for node in path])
        result = self._cut([tree.tokens[node] for node in path] + [token], len(path))
        if drafter is not None:
            outcome = RoundOutcome(tree.depths[-1], len(path), until_drafted, verify_seconds, len(tree) - 1)
            drafter.controller.observe(outcome)
        seconds = time.perf_counter() - begun
        stats = self._accounted(tree, len(path), result, (draft_seconds, verify_seconds, seconds), drafter)
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
    def slab(self) -> Slab:
        """The cache, to bind engines of one's own to."""
        return self._slab

    def propose(self, draft: Binding, count: int) -> tuple[list[int], list[DraftStep]]:
        """What ``draft``, bound to :attr:`slab`, proposes behind the last committed token: a chain of ``count`` tokens, or as
        many as there is room for, and what a controller would be told of each, entropy included. Commits nothing."""
        if self._prefilled < self.stats.prompt_tokens - 1:
            self.prefill()
        tree, root, steps = TokenTree(self.tokens[-1]), len(self.tokens) - 1, []
        count = min(self._room(), count)
        self._chooser.begin(self.tokens)
        self._slab.reserve(root + 1 + count)
        for node in range(count):
            outputs = self._run_draft(tree, [node], root, draft)
            (proposal,) = self._chooser.propose(tree, node, outputs, 0, 1)
            tree.add(proposal.token, node, proposal.logprob, proposal.score, proposal.margin)
            path = exp(tree.logprobs[-1])
            steps.append(
                DraftStep(node + 1, exp(proposal.logprob), path, entropy_of(outputs.logits[0]), proposal.margin, node + 1)
            )
        return tree.tokens[1:], steps

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

    def _draft(self, tree: TokenTree, drafter: Drafter) -> float:
        """Grow the tree until the controller has enough; the seconds spent in the engine."""
        ahead, binding = drafter.controller.length_ahead(), drafter.binding
        if ahead == 0:
            return 0.0
        root = len(self.tokens) - 1
        budget = min(self._limits.max_tree_nodes, self._limits.max_seq_len - len(self.tokens))
        room, frontier, seconds, depth = self._room(), [0], 0.0, 0
        self._slab.reserve(root + 1 + budget)
        if ahead and drafter.tree_width == 1 and self._chooser.follows_draft and isinstance(binding, ChainBinding):
            return self._draft_ahead(tree, min(ahead, room), binding)
        while True:
            started = time.perf_counter()
            outputs = self._run_draft(tree, frontier, root, binding)
            seconds += time.perf_counter() - started
            depth += 1
            width, first = min(drafter.tree_width, budget + 1 - len(tree)), frontier[0]
            frontier = self._grow(tree, frontier, outputs, width, drafter.tree_width)
            if not frontier or depth >= room or len(tree) > budget:
                return seconds
            best = frontier[0]
            step = DraftStep(
                depth=depth,
                probability=exp(tree.logprobs[best] - tree.logprobs[tree.parents[best]]),
                path_probability=exp(tree.logprobs[best]),
                entropy=entropy_of(outputs.logits[tree.parents[best] - first]) if drafter.controller.needs_entropy else None,
                margin=tree.margins[best],
                nodes=len(tree) - 1,
            )
            if not drafter.controller.keep_drafting(step):
                return seconds

    def _draft_ahead(self, tree: TokenTree, count: int, binding: ChainBinding) -> float:
        """Grow a chain whose length is known in one call, which needs the host for none of its steps."""
        started = time.perf_counter()
        outputs = binding.draft_chain(tree.tokens[0], len(self.tokens) - 1, count)
        seconds = time.perf_counter() - started
        for row in range(count):
            (proposal,) = self._chooser.propose(tree, row, outputs, row, 1)
            tree.add(proposal.token, row, proposal.logprob, proposal.score, proposal.margin)
        return seconds

    def _run_draft(self, tree: TokenTree, frontier: list[int], root: int, binding: Binding) -> Outputs:
        """The whole frontier through the draft in one call."""
        tokens = [tree.tokens[node] for node in frontier]
        slot = root + frontier[0]
        if tree.is_chain:
            return binding.forward(tokens, [slot], slot)
        positions = [root + tree.depths[node] for node in frontier]
        return binding.forward(tokens, positions, slot, root, tree.visible(frontier[0]))

    def _grow(self, tree: TokenTree, frontier: list[int], outputs: Outputs, keep: int, width: int) -> list[int]:
        """Add the ``keep`` children of the frontier with the best paths, best first; the new frontier."""
        candidates: list[tuple[float, int, Proposal]] = []
        for row, node in enumerate(frontier):
            proposals = self._chooser.propose(tree, node, outputs, row, width)
            candidates += [(tree.scores[node] + proposal.score, node, proposal) for proposal in proposals]
        candidates.sort(key=lambda candidate: -candidate[0])
        return [tree.add(p.token, node, p.logprob, p.score, p.margin) for _, node, p in candidates[:keep]]

    def _run_verify(self, tree: TokenTree) -> tuple[Outputs, float]:
        root = len(self.tokens) - 1
        self._slab.reserve(root + len(tree))
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

    def _accounted(
        self, tree: TokenTree, accepted: int, result: Round, times: tuple[float, float, float], drafter: Drafter | None
    ) -> Stats:
        """The statistics with this round in them; the guard is told of it."""
        old, depth = self.stats, tree.depths[-1]
        stats = replace(old, offered_at_depth=[*old.offered_at_depth], accepted_at_depth=[*old.accepted_at_depth])
        draft_seconds, verify_seconds, seconds = times
        stats.rounds += 1
        stats.new_tokens += len(result.tokens)
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds
        stats.host_seconds += seconds - draft_seconds - verify_seconds
        if drafter is not None:
            stats.drafting_rounds += 1
            stats.draft_steps += depth
            stats.drafted += len(tree) - 1
            stats.accepted += accepted
            stats.judge(depth, accepted)
        guard = self._drafter.guard if self._drafter else None
        if guard is not None:
            guard.record(drafter is not None, len(result.tokens), seconds)
            stats.guard_rests = guard.rests - self._rests_before
        return stats


def entropy_of(logits: Logits) -> float:
    scores = logits.astype(np.float64) - logits.max()
    weights = np.exp(scores)
    total = weights.sum()
    return float(np.log(total) - (weights * scores).sum() / total)
