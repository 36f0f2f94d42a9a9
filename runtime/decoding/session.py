"""A sequence being generated: what each part of a round does to it.

The draft proposes tokens behind the last committed one (the root). After each step the controller says whether to continue.
Where the text repeats, it proposes tokens itself, which cost no draft step. One verify pass judges all of them. The accepted
path and the verifier's bonus token are committed; the bonus token is the next root, and its cache entry is made by the next
round's passes, so nothing runs twice or alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock

import numpy as np

from eesd.common.checks import shown
from eesd.common.draft_vocab import WHOLE
from eesd.common.errors import EESDError
from eesd.common.manifest import PREFILL_CHUNK
from eesd.controllers import DraftStep, RoundOutcome
from eesd.controllers.calibration import CERTAIN
from eesd.runtime.decoding.draft_tree import DraftTree, Node, Share, is_chain, tree_mask
from eesd.runtime.decoding.guard import EXIT_HEAD, TEXT
from eesd.runtime.decoding.round import Drafting, Round, RoundResult, run_round
from eesd.runtime.decoding.samplers import AcceptResult, Allowed, make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.decoding.text_drafter import NOTHING, Proposal, TextDrafter, TextIndex
from eesd.runtime.engines.base import Call, Engine, KVCache, Logits, StepOutputs, Values

LOGIT_CHUNK = 64
"""Tokens of a prompt whose logits are in memory at a time."""


@dataclass(frozen=True)
class Limits:
    """Where a sequence ends (EOS ids, new tokens, slots of the cache), how many nodes a round may verify besides the root, how
    many tokens of the prompt one call takes, and whether only logits of nodes ``in_place`` count: in the slots that they would
    have as a chain. A path that leaves them is cut: what its first displaced node says about the next token is asked again. A
    round does not draft beyond the next of ``last_positions``, ascending: another kernel computes the tokens behind them.
    ``until_stop`` says how many of the next tokens belong to the text, if a stop string ends it within them."""

    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    max_seq_len: int
    max_tree_nodes: int
    prefill_chunk: int = PREFILL_CHUNK
    in_place: bool = False
    last_positions: tuple[int, ...] = ()
    until_stop: Callable[[Sequence[int]], int | None] | None = None


Forced = Callable[[int], Sequence[int]]
"""At most so many tokens that must follow everything committed."""
Observer = Callable[[Sequence[int], Logits], None]
"""Called after each round with the tokens that it committed and, for each, the verifier's logits behind the token before it
[tokens, V]. They are valid during the call. Without an observer, logits may stay on the device."""


class Session:
    """A sequence over its own KV cache. ``step`` runs one round; between steps nothing runs and nothing is pending.

    ``step`` is a transaction: if drafting, verifying or accepting raises (a cancel, a failing engine), the session stands where
    the round began, and ``step`` can be called again. Controllers learn after the commit, so they never learn from a cancelled
    round.

    Attributes:
        tokens: The prompt and everything committed.
        stats: Counts and seconds so far.
        finish_reason: None until the sequence ends; see :class:`RoundResult`.
        drafting: How it drafts alone.
        lock: Held while engines run. Sessions over the same engines share it, so other threads wait for a round to end.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        kv_cache: KVCache,
        verify: Engine,
        drafting: Drafting,
        limits: Limits,
        sampling: Sampling,
        vocab_size: int,
        observer: Observer | None = None,
        allowed: Allowed | None = None,
        forced: Forced | None = None,
        prompt_observer: Observer | None = None,
    ) -> None:
        """Begin a sequence.

        Args:
            prompt: Token ids, at least one.
            kv_cache: Memory of the sequence.
            verify: The verify engine.
            drafting: How it drafts alone.
            limits: Where the sequence ends.
            sampling: How tokens are chosen.
            vocab_size: V.
            observer: Told what each round commits.
            allowed: Restricts the tokens; see :data:`~eesd.runtime.decoding.samplers.Allowed`.
            forced: Knows tokens that must follow, which are a draft for nothing.
            prompt_observer: The same as ``observer`` for the tokens of the prompt but the first, piece by piece.

        Raises:
            EESDError: The prompt is empty, too long, or has an unknown token.
        """
        check_prompt(prompt, limits, vocab_size)
        self.tokens = list(prompt)
        self.stats = Stats(prompt_tokens=len(prompt))
        self.finish_reason: str | None = None
        self.drafting = drafting
        self.lock = RLock()
        self._kv_cache = kv_cache
        self._verify = verify
        self._index = TextIndex()
        self._forced = forced
        self._limits = limits
        columns = drafting.drafter.columns if drafting.drafter else WHOLE
        self._sampler = make_sampler(sampling, vocab_size, columns, allowed)
        self._observer = observer
        self._prompt_observer = prompt_observer
        self._target = len(prompt) - 1
        self._prefilled = self._observed = 0
        self._drafted = 0
        """From this slot on there is nothing of a draft that verify has not written again."""
        self._closed = False

    def prefill(self) -> None:
        """Put the prompt, all but its last token, into the cache. The first ``step`` does it if this was not called.

        The last token is the first root, so prefill needs no logits.
        """
        with self.lock:
            while (piece := self.next_piece(self._limits.prefill_chunk)) is not None:
                self.add_piece(piece, *_timed(self._verify, piece))

    def next_piece(self, most: int) -> Call | None:
        """The call of the next piece of the prompt, at most ``most`` tokens; None: the prompt is complete."""
        self._check_open()
        start, last = self._prefilled, self.stats.prompt_tokens - 1
        logits = self._prompt_observer is not None and self._observed < last
        most = min(most, self._limits.prefill_chunk, LOGIT_CHUNK if logits else most)
        stop = min(start + most, last if logits else self._target)
        if start == stop:
            return None
        self._kv_cache.reserve(stop)
        return Call(self._kv_cache, self.tokens[start:stop], range(start, stop), start, logits=logits)

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Go on behind a piece of the prompt, whose call took so many seconds."""
        stop = piece.slot + len(piece.tokens)
        if self._prompt_observer is not None and self._observed < stop and piece.logits:
            start = max(piece.slot, self._observed)  # after a move, what was observed before comes again
            self._prompt_observer(self.tokens[start + 1 : stop + 1], outputs.logits[start - piece.slot :])
            self._observed = stop
        self._prefilled = stop
        self.stats.prefill_seconds += seconds

    def fill(self, values: Sequence[Values]) -> None:
        """Take the keys and values of the prompt's beginning, in their order, instead of computing them."""
        for part in values:
            stop = self._prefilled + part.shape[3]
            self._kv_cache.reserve(stop)
            self._kv_cache.fill(self._prefilled, part)
            self._prefilled = stop

    @property
    def unfilled(self) -> int:
        """Tokens of the prompt, or after a move of the text, that are still to be put into the cache."""
        return self._target - self._prefilled

    def move(self, kv_cache: KVCache) -> None:
        """Go on in another cache, between two rounds: the keys and values of all tokens are computed again."""
        self._check_open()
        self._kv_cache, self._prefilled, self._target = kv_cache, 0, len(self.tokens) - 1

    def step(self) -> RoundResult:
        """Run one round and commit what it accepted. Raises :class:`EESDError` on a finished or closed session."""
        with self.lock:
            [current] = run_round([self], self._verify)
        if current.error is not None:
            raise current.error
        assert current.result is not None
        return current.result

    def begin(self, current: Round) -> None:
        """Begin a round: what the text proposes, and whether to draft. A round that was begun before is forgotten.

        Raises:
            EESDError: The session is finished or closed.
        """
        self._check_open()
        if self.finish_reason is not None:
            raise EESDError("The session is finished; start a new one.")
        if self.unfilled:
            self.prefill()
        current.started = time.perf_counter()
        current.most_depth, current.most_nodes = self._max_depth(), self._max_nodes()
        drafter = current.drafting.drafter
        if drafter is not None and not (current.most_depth >= 1 and current.drafting.allows(EXIT_HEAD)):
            drafter = None
        current.drafter = drafter
        self._sampler.begin_round(self.tokens)
        current.proposal = proposal = self._proposal(current.drafting.text, current.most_depth)
        width, budget = (drafter.tree_width, drafter.budget) if drafter else (1, None)
        current.tree = DraftTree(self.tokens[-1], current.most_nodes, width, budget, self._limits.in_place)
        copied = current.copied = self._copied(current) if proposal.tokens else 0
        if copied:
            current.tree.follow_text(proposal.tokens[:copied])
        if drafter is None:
            return
        if not copied:
            current.length = drafter.controller.begin_round(width)
            current.wants_more = current.length != 0
        elif proposal.steps and budget is None and copied < current.most_depth and not drafter.engine.chooses:
            # Plans of drafts take one node a call, so devices draft where nothing is copied.
            current.wants_more = drafter.controller.begin_after_text(width, proposal.values[:copied])
            current.tree.frontier = current.tree.nodes[-1:]

    def next_draft(self, current: Round) -> Call:
        """The call of the next draft step."""
        assert current.drafter is not None
        tree = current.tree
        if not tree.steps:
            self._kv_cache.reserve(len(self.tokens) + current.most_nodes)
        self._drafted = max(self._drafted, len(self.tokens) - 1 + len(tree.nodes))
        first = tree.frontier[0].index if tree.steps else 0  # the first step also reads tokens of the text
        call = self._call(tree.nodes, first)
        if current.drafter.engine.chooses:
            return call._replace(choose=self._sampler.chooser(tree.nodes[first:], tree.branching))
        return call

    def draft_chain(self, current: Round) -> bool:
        """Draft steps of a chain in one call, which does not wait for the host between them, if that can be. All of them if
        their number is known, else as many as the controller allows before it is asked."""
        tree, drafter = current.tree, current.drafter
        assert drafter is not None
        chain, steps = drafter.engine.draft_chain, current.length or drafter.controller.steps_at_once
        if chain is None or not steps or drafter.tree_width > 1 or not self._sampler.proposes_top_tokens:
            return False
        if current.copied and not tree.steps:  # the first step also reads tokens of the text
            return False
        self._kv_cache.reserve(len(self.tokens) + current.most_nodes)
        started, last = time.perf_counter(), tree.frontier[0]
        slot, count = len(self.tokens) - 1 + last.index, min(steps, current.most_depth - last.depth)
        self._drafted = max(self._drafted, slot + count)
        outputs = chain(self._kv_cache, last.token, slot, count)
        self.drafted(current, outputs, time.perf_counter() - started, count)
        return True

    def drafted(self, current: Round, outputs: StepOutputs, seconds: float, levels: int = 1) -> None:
        """Add levels to the draft from the draft engine's outputs, and ask the controller whether to continue. It is told of
        each, and its last answer counts."""
        assert current.drafter is not None
        tree, controller = current.tree, current.drafter.controller
        current.draft_seconds += seconds
        first = 0 if tree.steps else tree.frontier[0].index
        for row in range(first, first + levels):
            step = self._grow(tree, outputs, row)
            ends = step is None or tree.frontier[0].depth >= current.most_depth or tree.is_full
            current.wants_more = not ends and step is not None and controller.keep_drafting(step)
            if step is None:
                break

    def complete(self, current: Round, share: Share | None = None) -> Call:
        """End the draft, and choose what is verified: what is worth it alone, or beside others its ``share``.

        Where drafting is fixed all of it is: with rejection sampling, what is left out must not depend on what was drafted.
        """
        tree, drafter, text = current.tree, current.drafter, current.drafting.text
        if text is not None and drafter is not None and tree.steps and tree.frontier:
            self._add_text(text, current, joins=drafter.budget is not None)
        nodes = tree.prune(None if current.drafting.fixed else share)
        current.nodes, current.drafted_at = nodes, time.perf_counter()
        self._kv_cache.reserve(len(self.tokens) - 1 + len(nodes))
        call = self._verified(nodes)
        return call._replace(choose=self._sampler.chooser(nodes, 0)) if self._verify.chooses else call

    def commit(self, current: Round, outputs: StepOutputs, seconds: float) -> RoundResult:
        """Accept what the verifier agrees with, and commit it.

        Args:
            current: The round.
            outputs: The verifier's, for the call of :meth:`complete`.
            seconds: Of this call.
        """
        tree, nodes, started = current.tree, current.nodes, current.started
        self._drafted = 0  # verify wrote their slots
        path, bonus = self._sampler.accept(tree.root, outputs)
        if self._limits.in_place:
            path, bonus = cut_displaced(path, bonus)
        if path and path[-1].index != len(path):  # a chain's slots are consecutive already
            self._kv_cache.compact(len(self.tokens), [len(self.tokens) - 1 + node.index for node in path])

        chosen = [*[node.token for node in path], bonus]
        outcome = RoundOutcome(
            steps=tree.steps,
            draft_seconds=current.drafted_at - started,
            depth=max([0, *[node.depth - current.copied for node in nodes if not node.from_text]]),
            nodes=len(nodes) - 1,
            verify_seconds=seconds,
            accepted=len(path),
            num_expanded=sum([node.expanded for node in path]),
            copied=current.copied if tree.steps else 0,
            first_right=tree.root.candidates[0].token == chosen[0] if tree.steps and tree.root.candidates else None,
        )
        result = self._result(current, outcome, path, chosen)
        committed_at, stats = time.perf_counter(), self.stats.with_round(result)
        # The commit: one statement behind everything that may raise. No signal is handled within it.
        self.tokens, self.stats, self.finish_reason = [*self.tokens, *result.tokens], stats, result.finish_reason

        self._learn(current, outcome, chosen)
        self.stats.host_seconds += time.perf_counter() - committed_at
        if self._observer is not None:
            self._observer(result.tokens, outputs.logits[[0, *(node.index for node in path)][: len(result.tokens)]])
        return result

    def _learn(self, current: Round, outcome: RoundOutcome, chosen: Sequence[int]) -> None:
        """Tell all that decide about a committed round, also if they were not allowed to draft or to copy."""
        drafter, text, guard = current.drafting.drafter, current.drafting.text, current.drafting.guard
        proposal = current.proposal
        expected = 1 + sum(proposal.values[: outcome.nodes])
        if current.drafting.value is not None:  # before the rules that share it
            current.drafting.value.observe(outcome)
        if drafter is not None:
            if outcome.steps:
                expected = drafter.controller.expected_tokens(outcome)
            drafter.controller.observe(outcome)
            if drafter.budget is not None:
                drafter.budget.observe(current.tree.labels(chosen), outcome)
        if text is not None:
            pairs = enumerate(zip(proposal.tokens, chosen, strict=False))
            right = next((i for i, (token, other) in pairs if token != other), min(len(proposal.tokens), len(chosen)))
            judged = min(right + 1, len(proposal.tokens), len(chosen))
            text.rule.observe(proposal.steps, right, judged, outcome)
        if guard is not None:
            pauses = guard.pauses
            guard.record(outcome, expected, time.perf_counter() - current.started)
            self.stats.guard_pauses += guard.pauses - pauses

    def peek(self) -> Logits:
        """The verifier's logits [V] behind the last committed token, by a single-token pass. Commits nothing."""
        with self.lock:
            self.prefill()
            self._kv_cache.reserve(len(self.tokens))
            outputs, _ = _timed(self._verify, self._verified([Node(self.tokens[-1], index=0)]))
            row: Logits = outputs.logits[0].copy()
        return row

    @property
    def kv_cache(self) -> KVCache:
        """The session's cache, for calls of other engines. Raises :class:`EESDError` on a closed session."""
        self._check_open()
        return self._kv_cache

    def close(self) -> None:
        """Give up the cache, which the next session will use. Then only ``tokens``, ``stats``, ``finish_reason`` are left."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EESDError("The session is closed, and its KV cache belongs to the next one; start a new session.")

    def _add_text(self, text: TextDrafter, current: Round, joins: bool) -> None:
        """Add to what was drafted what the text proposes behind the root, if it ``joins``, and behind the best drafted path."""
        tree = current.tree
        if joins:
            tree.join_text(tree.root, current.proposal.tokens, current.proposal.chances)
        best = tree.frontier[0]
        most = 0 if best.candidates else min(current.most_depth - best.depth, current.most_nodes - len(tree.nodes) + 1)
        behind = self._index.propose(self.tokens, most, text, best.path()) if most > 0 else NOTHING
        if joins:
            tree.join_text(best, behind.tokens, behind.chances)
        else:
            tree.follow_text(behind.tokens[: text.rule.count_behind(behind.values, len(tree.nodes) - 1)])

    def _proposal(self, text: TextDrafter | None, most: int) -> Proposal:
        """What must follow the root, or what the text proposes, at most ``most`` tokens: they are judged in every round, also
        where they are not verified."""
        if self._forced is not None and most > 0 and (tokens := list(self._forced(most))):
            return Proposal(tokens, [], [CERTAIN] * len(tokens), [CERTAIN] * len(tokens))
        return self._index.propose(self.tokens, most, text) if text and most > 0 else NOTHING

    def _copied(self, current: Round) -> int:
        """How many of the proposed tokens this round verifies without drafting."""
        proposal, text = current.proposal, current.drafting.text
        if not proposal.steps:
            return len(proposal.tokens)  # nothing else may follow
        if text is None:
            return 0
        count = text.rule.count(proposal.values, current.drafter is not None)
        return count if current.drafting.allows(TEXT, sum(proposal.values[:count])) else 0

    @property
    def left(self) -> int:
        """Most tokens that may still follow."""
        return min(self._limits.max_new_tokens - self.stats.new_tokens, self._limits.max_seq_len - len(self.tokens))

    def _max_depth(self) -> int:
        """Levels that this round may draft: the bonus token must fit behind them."""
        root = len(self.tokens) - 1
        ends = [last - root for last in self._limits.last_positions if last >= root]
        return min(self.left - 1, self._limits.max_tree_nodes, *ends[:1])

    def _max_nodes(self) -> int:
        """Nodes that this round may verify besides the root."""
        return min(self._limits.max_tree_nodes, self._limits.max_seq_len - len(self.tokens))

    def _grow(self, tree: DraftTree, outputs: StepOutputs, row: int = 0) -> DraftStep | None:
        """Add a level to the tree from the draft's outputs for its frontier, which begin in ``row``. Outputs that are no
        numbers propose nothing, and so end the draft."""
        first = tree.frontier[0].index - row
        told = outputs.topk_logprobs if outputs.chosen is None else outputs.chosen
        if told is not None and np.isnan(told).any():
            return tree.grow([[] for _ in tree.frontier])
        propose, count = self._sampler.propose, tree.branching
        return tree.grow([propose(node, outputs, node.index - first, count) for node in tree.frontier])

    def _verified(self, nodes: Sequence[Node]) -> Call:
        """The call of the verify engine for nodes. Slots after theirs keep nothing of the draft."""
        stop = len(self.tokens) - 1 + len(nodes)
        if self._drafted > stop:
            self._kv_cache.clear(stop, self._drafted)
        return self._call(nodes)

    def _call(self, nodes: Sequence[Node], first: int = 0) -> Call:
        """The engine call for the nodes from ``first`` on, each in the slot ``node.index`` behind the root's."""
        root, called = len(self.tokens) - 1, nodes[first:]
        tokens, positions = [node.token for node in called], [root + node.depth for node in called]
        if is_chain(nodes):
            return Call(self._kv_cache, tokens, positions, root + first)
        return Call(self._kv_cache, tokens, positions, root + first, root, tree_mask(nodes, first))

    def _result(self, current: Round, outcome: RoundOutcome, path: Sequence[Node], tokens: list[int]) -> RoundResult:
        """What the round commits of its tokens: everything up to EOS or a stop string; and why the sequence ends there."""
        limits, reason = self._limits, "length" if len(tokens) >= self.left else None
        ends = [i for i, token in enumerate(tokens, 1) if token in limits.eos_token_ids]
        if ends:
            tokens, reason = tokens[: ends[0]], "stop"
        if limits.until_stop is not None and (count := limits.until_stop(tokens)) is not None:
            tokens, reason = tokens[:count], "stop"
        accepted = path[: len(tokens)]
        return RoundResult(
            tokens,
            len(accepted),
            reason,
            [node.from_text for node in accepted],
            [] if reason else _rejected(path[-1] if path else current.nodes[0]),
            outcome,
            levels=max([node.depth for node in current.nodes]),
            drafting=current.drafter is not None or len(current.nodes) > 1,
            draft_seconds=current.draft_seconds,
            seconds=time.perf_counter() - current.started,
        )


def check_prompt(prompt: Sequence[int], limits: Limits, vocab_size: int) -> None:
    """Raise :class:`EESDError` if the prompt is empty, too long, or has an unknown token."""
    if not len(prompt):
        raise EESDError("The prompt is empty; give at least one token.")
    if len(prompt) >= limits.max_seq_len:
        raise EESDError(
            f"The prompt has {len(prompt)} tokens, the cache {limits.max_seq_len} slots; "
            "shorten the prompt or export with a larger --max-seq-len."
        )
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise EESDError(f"The prompt has the token id {shown(outside)}; ids go from 0 to {vocab_size - 1}.")


def _timed(engine: Engine, call: Call) -> tuple[StepOutputs, float]:
    """The outputs of a call, and its seconds."""
    started = time.perf_counter()
    [outputs] = engine.forward([call])
    return outputs, time.perf_counter() - started


def _rejected(node: Node) -> list[int]:
    """The first path behind the last accepted node that was verified, and not accepted."""
    tokens = []
    while children := node.children:
        node = children[0]
        tokens.append(node.token)
    return tokens


def cut_displaced(path: list[Node], bonus: int) -> AcceptResult:
    """A path up to its first node that is not in the slot that it has in a chain. That node's token is the bonus token: it was
    chosen by a node in its place, and so would be everything before it, but nothing behind it."""
    displaced = next((i for i, node in enumerate(path) if node.index != i + 1), None)
    return AcceptResult(path, bonus) if displaced is None else AcceptResult(path[:displaced], path[displaced].token)
