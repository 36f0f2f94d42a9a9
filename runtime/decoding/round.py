"""A sequence of tokens with its KV cache, and the rounds of the sequence. A round drafts, verifies,
accepts and commits. Read this file top-down from :func:`run_round`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import ParamSpec, TypeVar

from eesd.common.errors import EESDError
from eesd.controllers import DraftStep, RoundOutcome, SiblingLabel
from eesd.controllers.base import TEXT
from eesd.controllers.calibration import CERTAIN
from eesd.controllers.text_rule import TextRule
from eesd.runtime.decoding.draft_tree import DraftTree, Node, Share, tree_mask
from eesd.runtime.decoding.drafting import Drafter, Drafting
from eesd.runtime.decoding.samplers import AcceptResult, SpecSampler
from eesd.runtime.decoding.stats import RoundResult, Stats
from eesd.runtime.decoding.text_drafter import NOTHING, TextIndex, TextProposal
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, KVCache, Logits, StepOutputs

P = ParamSpec("P")
R = TypeVar("R")
LOGIT_CHUNK = 64
"""Maximum number of prompt tokens whose logits are in memory at the same time."""

Observer = Callable[[Sequence[int], Logits], None]
"""A function that is called after each round. It receives the committed tokens, and the verifier's
logits [tokens, V] from which each of these tokens was chosen. The logits are valid only during the
call. Without an observer the logits may stay on the device."""


class TokenSequence:
    """A sequence of tokens, their KV cache, and the state of decoding. Subclasses add the rules
    that end a text.

    The last token is the **root** of the next round, in the slot ``len(tokens) - 1``. Once the
    prompt is prefilled, the slots before the root have the keys and values of all other tokens.

    Attributes:
        tokens: The prompt and all committed tokens. Set by each commit.
        stats: Counts and seconds so far. Set by each commit. Prefill adds its seconds, too.
        finish_reason: It is None until a commit ends the sequence; see :class:`RoundResult`.
        engines: The engines that run its calls. Set by the constructor.
        manifest: Manifest of the engine directory. Set by the constructor.
        drafting: The drafters of this sequence when it runs alone. Set by the constructor.
        sampler: The sampler that chooses its tokens. Set by the constructor.
        index: Index that finds repetitions in the tokens. Extended by each round.
        observer: The observer that is called after each commit, or None if nobody reads the logits.
        drafted_to: The slots before this slot may have drafted tokens that no verify pass has
            overwritten. Set by draft steps, and reset to 0 by each commit.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        kv_cache: KVCache,
        engines: Engines,
        drafting: Drafting,
        sampler: SpecSampler,
        most: int,
        observer: Observer | None = None,
    ) -> None:
        """Begin a sequence.

        Args:
            tokens: The prompt, which must not be empty.
            kv_cache: An empty cache.
            engines: The engines that run its calls.
            drafting: The drafters of this sequence when it runs alone.
            sampler: Chooses tokens.
            most: Maximum number of new tokens.
            observer: Called after each commit.
        """
        self.tokens = list(tokens)
        self.stats = Stats(prompt_tokens=len(tokens), exact=engines.exact)
        self.finish_reason: str | None = None
        self.engines = engines
        self.manifest = engines.verify.manifest
        self.drafting = drafting
        self.sampler = sampler
        self.index = TextIndex()
        self.observer = observer
        self.drafted_to = 0
        self._most = most
        self._kv_cache = kv_cache
        self._closed = False
        self._prefilled = 0
        self._target = len(tokens) - 1
        self._scored = 0
        """Number of prompt tokens whose logits were computed, if ``_to_score`` is not 0."""
        self._to_score = 0
        """Number of prompt tokens whose logits were requested."""

    # The prompt

    def prefill(self) -> None:
        """Put all tokens of the prompt except the last into the cache. The first round does this if
        the caller did not. The last token is the first root, so prefill needs no logits."""
        while (piece := self.next_piece(self.engines.verify.prefill_chunk)) is not None:
            started = time.perf_counter()
            with self.engines.span("prefill"):
                [outputs] = self.engines.verify.forward([piece])
            self.add_piece(piece, outputs, time.perf_counter() - started)

    def next_piece(self, most: int) -> Call | None:
        """Return the call for the next piece of the prompt, which has at most ``most`` tokens.
        Return None if the prompt is complete."""
        self.check_open()
        start = self._prefilled
        logits = self._scored < self._to_score
        most = min(most, self.engines.verify.prefill_chunk)
        stop = min(start + most, self._target)
        if logits:
            stop = min(start + most, start + LOGIT_CHUNK, self._to_score)
        if start == stop:
            return None
        self._kv_cache.reserve(stop)
        return Call(
            self._kv_cache, self.tokens[start:stop], range(start, stop), start, logits=logits
        )

    def add_piece(self, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        """Record that the call for a piece of the prompt is done and took ``seconds``."""
        self._prefilled = piece.slot + len(piece.tokens)
        self.stats.prefill_seconds += seconds

    @property
    def unfilled(self) -> int:
        """Number of tokens that are not in the cache yet. They are tokens of the prompt, or of a
        text that was moved to another cache."""
        return self._target - self._prefilled

    # Rounds

    def call(self, nodes: Sequence[Node], first: int = 0) -> Call:
        """Return the engine call for the nodes from ``first`` on. The slot of each node is
        ``node.index`` slots after the root's slot."""
        root = len(self.tokens) - 1
        called = nodes[first:]
        tokens = [node.token for node in called]
        positions = [root + node.depth for node in called]
        if nodes[-1].depth == len(nodes) - 1:  # a chain
            return Call(self._kv_cache, tokens, positions, root + first)
        return Call(self._kv_cache, tokens, positions, root + first, root, tree_mask(nodes, first))

    def verified(self, nodes: Sequence[Node]) -> Call:
        """Return the verify call for nodes. This also clears the slots of the draft after these
        nodes."""
        stop = len(self.tokens) - 1 + len(nodes)
        if self.drafted_to > stop:
            self._kv_cache.clear(stop, self.drafted_to)
        return self.call(nodes)

    @property
    def left(self) -> int:
        """Maximum number of further tokens."""
        return min(self._most - self.stats.new_tokens, self.manifest.max_seq_len - len(self.tokens))

    def forced(self, most: int) -> Sequence[int]:
        """Return up to ``most`` tokens that must follow because no other tokens are allowed. They
        are a draft that costs nothing."""
        return ()

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the given next tokens belong to the text. Return None if the text does
        not end within these tokens."""
        return None

    # The cache

    @property
    def kv_cache(self) -> KVCache:
        """The cache, which calls of other engines may use. Raises :class:`EESDError` on a closed
        sequence."""
        self.check_open()
        return self._kv_cache

    def close(self) -> KVCache:
        """Give up the cache and return it, so that the next sequence can use it. ``tokens``,
        ``stats`` and ``finish_reason`` remain."""
        self._closed = True
        return self._kv_cache

    def check_open(self) -> None:
        """Raise :class:`EESDError` if the sequence is closed."""
        if self._closed:
            raise EESDError(
                "The session is closed, and its KV cache belongs to the next one; start a new "
                "session."
            )


@dataclass(eq=False, slots=True)
class Round:
    """A round of one sequence.

    Attributes:
        sequence: The sequence that it reads, and to which it commits.
        drafting: Drafters of this round.
        error: Set if the round fails. The sequence is then unchanged, unless ``result`` is set.
        result: Set by :meth:`commit`.
        kv_cache: The sequence's cache. It is set by :meth:`begin`, and so are the attributes down
            to ``length``.
        tree: The draft. Each draft step adds to it.
        proposal: The text's proposal after the root.
        drafter: The drafter of this round, or None if no drafter with an engine may draft.
        started: Time at which the round began, in seconds.
        most_depth: Maximum number of levels to draft.
        most_nodes: Maximum number of nodes to verify, not counting the root.
        length: Number of draft steps if the controller fixes it before the first step, or None if
            the controller decides after each step.
        wants_more: Whether another draft step is wanted. Set by each draft step.
        draft_seconds: Time in the draft engine so far. Each draft step adds to it.
        nodes: The nodes to verify. Set by :meth:`complete`.
        drafted_at: Time at which the draft was complete. Set by :meth:`complete`.
    """

    sequence: TokenSequence
    drafting: Drafting
    error: Exception | None = None
    result: RoundResult | None = None
    kv_cache: KVCache = field(init=False)
    tree: DraftTree = field(init=False)
    proposal: TextProposal = NOTHING
    drafter: Drafter | None = None
    started: float = 0.0
    most_depth: int = 0
    most_nodes: int = 0
    length: int | None = None
    wants_more: bool = False
    draft_seconds: float = 0.0
    nodes: list[Node] = field(default_factory=list)
    drafted_at: float = 0.0

    def begin(self) -> None:
        """Begin the round. This reads the text's proposal, and decides whether to draft.

        Raises:
            EESDError: The sequence is finished or closed.
        """
        sequence = self.sequence
        tokens = sequence.tokens
        manifest = sequence.manifest
        self.kv_cache = sequence.kv_cache
        if sequence.finish_reason is not None:
            raise EESDError("The session is finished; start a new one.")
        if sequence.unfilled:
            sequence.prefill()
        self.started = time.perf_counter()
        self.most_nodes = min(manifest.max_tree_nodes, manifest.max_seq_len - len(tokens))
        # The bonus token must fit after the last level.
        ends = [last + 1 - len(tokens) for last in sequence.engines.last_positions]
        levels = [end for end in ends if end >= 0][:1]
        self.most_depth = min(sequence.left - 1, manifest.max_tree_nodes, *levels)
        drafter = self.drafting.drafter
        if drafter is not None and self.most_depth >= 1 and self._allows(drafter.name):
            self.drafter = drafter
        sequence.sampler.begin_round(tokens)
        self.proposal = self._proposal()
        if self.drafter is None:
            self.tree = DraftTree(tokens[-1], self.most_nodes)
        else:
            self.tree = DraftTree(
                tokens[-1],
                self.most_nodes,
                self.drafter.tree_width,
                self.drafter.budget,
                sequence.engines.in_place,
                self.drafter.name,
            )
        copied = self._copied()
        if copied:
            self.tree.follow(self.proposal.tokens[:copied], TEXT)
        elif self.drafter is not None:
            self.length = self.drafter.controller.begin_round(self.drafter.tree_width)
            self.wants_more = self.length != 0

    def next_draft(self) -> Call:
        """Return the draft call after the last level. If the draft is a chain of the engine's most
        likely tokens, the call requests several levels. These are all levels if the controller
        fixed their number, and the controller's ``steps_at_once`` if not."""
        sequence = self.sequence
        tree = self.tree
        drafter = self.drafter
        assert drafter is not None
        if not tree.steps:
            self.kv_cache.reserve(len(sequence.tokens) + self.most_nodes)
        levels = 1
        if drafter.tree_width == 1 and sequence.sampler.proposes_top_tokens:
            wanted = drafter.controller.steps_at_once
            if self.length is not None:
                wanted = self.length - tree.steps
            levels = max(min(wanted, self.most_depth - tree.steps), 1)
        written = len(sequence.tokens) - 2 + len(tree.nodes) + levels
        sequence.drafted_to = max(sequence.drafted_to, written)
        first = tree.frontier[0].index
        call = sequence.call(tree.nodes, first)._replace(levels=levels)
        if drafter.engine.chooses:
            chooser = sequence.sampler.chooser(tree.nodes[first:], tree.branching)
            call = call._replace(choose=chooser)
        return call

    def drafted(self, outputs: StepOutputs, seconds: float) -> None:
        """Add the levels that a draft call returned. The controller sees each level. Its answer to
        the last level decides whether to continue."""
        assert self.drafter is not None
        tree = self.tree
        self.draft_seconds += seconds
        for row in range(outputs.levels):
            step = self._grow(outputs, row)
            self.wants_more = False
            if step is None:
                break
            if tree.frontier[0].depth < self.most_depth and len(tree.nodes) <= self.most_nodes:
                self.wants_more = self.drafter.controller.keep_drafting(step)

    def complete(self, share: Share | None = None) -> Call:
        """End the draft, choose the nodes to verify, and return the verify call.

        Args:
            share: The row's share of a batch's pass, or None for a sequence that runs alone.
                Drafting that is ``fixed`` ignores the share, because with rejection sampling the
                choice of nodes to leave out must not depend on the drafted tokens.
        """
        sequence = self.sequence
        tree = self.tree
        drafter = self.drafter
        text = self.drafting.text
        if text is not None and drafter is not None and tree.steps and tree.frontier:
            self._add_text(text, joins=drafter.budget is not None)
        nodes = tree.prune(None if self.drafting.fixed else share)
        self.nodes = nodes
        self.drafted_at = time.perf_counter()
        self.kv_cache.reserve(len(sequence.tokens) - 1 + len(nodes))
        call = sequence.verified(nodes)
        if sequence.engines.verify.chooses:
            call = call._replace(choose=sequence.sampler.chooser(nodes, 0))
        return call

    def commit(self, outputs: StepOutputs, seconds: float) -> RoundResult:
        """Accept the drafted tokens that equal the verifier's tokens, and commit them.

        Args:
            outputs: The verifier's outputs for the call of :meth:`complete`.
            seconds: Duration of this call.
        """
        sequence = self.sequence
        tree = self.tree
        tokens = sequence.tokens
        sequence.drafted_to = 0  # the verify pass has overwritten the draft's slots
        path, bonus = sequence.sampler.accept(tree.root, outputs)
        if sequence.engines.in_place:
            path, bonus = cut_displaced(path, bonus)
        if path and path[-1].index != len(path):  # the slots of a chain are consecutive already
            self.kv_cache.compact(len(tokens), [len(tokens) - 1 + node.index for node in path])

        chosen = [*[node.token for node in path], bonus]
        outcome = self._outcome(path, chosen, seconds)
        result = self._result(outcome, path, chosen)
        committed_at = time.perf_counter()
        # The commit is one statement after everything that may raise an exception. No signal is
        # handled within this statement.
        vars(sequence).update(
            tokens=[*tokens, *result.tokens],
            stats=sequence.stats.with_round(result),
            finish_reason=result.finish_reason,
        )

        for rule in self.drafting.observers:  # even rules that could not draft in this round
            rule.observe(outcome)
        if self.drafting.guard is not None:
            sequence.stats.guard_pauses += self.drafting.guard.observe(outcome)
        sequence.stats.host_seconds += time.perf_counter() - committed_at
        if sequence.observer is not None:
            sequence.observer(
                result.tokens,
                outputs.logits[[0, *(node.index for node in path)][: len(result.tokens)]],
            )
        return result

    def _outcome(self, path: Sequence[Node], chosen: Sequence[int], seconds: float) -> RoundOutcome:
        """Return the outcome for the observers.

        Args:
            path: The accepted nodes.
            chosen: Their tokens and the bonus token.
            seconds: Duration of the verify call.
        """
        tree = self.tree
        nodes = self.nodes
        proposal = self.proposal
        drafter = self.drafter
        depth = max([node.depth for node in nodes if node.source == tree.source], default=0)
        first_right = None
        labels: Sequence[SiblingLabel] = ()
        if drafter is not None and tree.steps:
            name = drafter.name
            if tree.root.candidates:
                first_right = tree.root.candidates[0].token == chosen[0]
            if drafter.budget is None:
                expected = drafter.controller.expected_tokens(depth)
            else:
                expected = sum([node.rank for node in nodes])  # the root's is 1
                labels = tree.labels(chosen)
        else:
            name = nodes[-1].source
            expected = 1 + sum(proposal.path_chances[: len(nodes) - 1])
        right = _length_of_common(proposal.tokens, chosen)
        return RoundOutcome(
            steps=tree.steps,
            draft_seconds=self.drafted_at - self.started,
            depth=depth,
            nodes=len(nodes) - 1,
            verify_seconds=seconds,
            accepted=len(path),
            num_expanded=sum([node.expanded for node in path]),
            first_right=first_right,
            expected=expected or len(chosen),
            seconds=time.perf_counter() - self.started,
            labels=labels,
            proposed=proposal.steps[: min(right + 1, len(chosen))],
            right=right,
            drafter=name,
        )

    def _add_text(self, text: TextRule, joins: bool) -> None:
        """Extend the draft with the text's proposal after the best drafted path. If the draft has a
        budget (``joins``), also add the text's proposal after the root."""
        tree = self.tree
        if joins:
            tree.join(tree.root, self.proposal.tokens, self.proposal.chances, TEXT)
        best = tree.frontier[0]
        most = min(self.most_depth - best.depth, self.most_nodes - len(tree.nodes) + 1)
        if best.candidates or most <= 0:
            return
        more = self.sequence.index.propose(self.sequence.tokens, most, text, best.path())
        if joins:
            tree.join(best, more.tokens, more.chances, TEXT)
        elif more.tokens:
            count = text.count_behind(more.path_chances, len(tree.nodes) - 1)
            tree.follow(more.tokens[:count], TEXT)

    def _proposal(self) -> TextProposal:
        """Return the tokens that must follow the root or, if there are no such tokens, the text's
        proposal. They are judged in every round, even if they are not verified."""
        sequence = self.sequence
        text = self.drafting.text
        most = self.most_depth
        if most <= 0:
            return NOTHING
        tokens = [*sequence.forced(most)]
        if tokens:
            return TextProposal(tokens, [], [CERTAIN] * len(tokens), [CERTAIN] * len(tokens))
        if text is None:
            return NOTHING
        return sequence.index.propose(sequence.tokens, most, text)

    def _copied(self) -> int:
        """Return the number of proposed tokens that this round verifies without drafting."""
        proposal = self.proposal
        text = self.drafting.text
        if not proposal.steps:
            return len(proposal.tokens)  # these tokens must follow
        if text is None:
            return 0
        count = text.count(proposal.path_chances, self.drafter is not None)
        if not count or not self._allows(TEXT, sum(proposal.path_chances[:count])):
            return 0
        return count

    def _allows(self, drafter: str, sure: float = 0.0) -> bool:
        """Return whether the guard lets a drafter draft now; see :meth:`Guard.allows`."""
        guard = self.drafting.guard
        return guard is None or guard.allows(drafter, sure)

    def _grow(self, outputs: StepOutputs, row: int) -> DraftStep | None:
        """Add a level to the tree. The outputs for the frontier begin in row ``row``. If outputs
        are NaN, nothing is proposed, and the draft ends."""
        tree = self.tree
        first = tree.frontier[0].index - row
        values = outputs.topk_logprobs if outputs.chosen is None else outputs.chosen
        if values is not None and isnan(values.min()):
            return tree.grow([[] for _ in tree.frontier])
        propose = self.sequence.sampler.propose
        count = tree.branching
        return tree.grow(
            [propose(node, outputs, node.index - first, count) for node in tree.frontier]
        )

    def _result(
        self, outcome: RoundOutcome, path: Sequence[Node], tokens: list[int]
    ) -> RoundResult:
        """Return the result of the round. It has the tokens up to EOS or a stop string, and the
        finish reason if the sequence ends."""
        reason = None
        if len(tokens) >= self.sequence.left:
            reason = "length"
        count = self.sequence.end_of(tokens)
        if count is not None:
            tokens = tokens[:count]
            reason = "stop"
        accepted = path[: len(tokens)]
        rest = [self.nodes[0], *path][-1].first_path()
        rejected = list[int]()
        if reason is None:
            rejected = [node.token for node in rest]
        return RoundResult(
            tokens,
            len(accepted),
            reason,
            [node.source for node in accepted],
            rejected,
            outcome,
            judged=[node.source for node in [*accepted, *rest[:1]][: len(tokens)]],
            levels=max([node.depth for node in self.nodes]),
            drafting=self.drafter is not None or len(self.nodes) > 1,
            draft_seconds=self.draft_seconds,
        )


@dataclass(eq=False)
class PromptPiece:
    """A piece of a sequence's prompt that runs in the verify call of a round.

    Attributes:
        sequence: The sequence of the prompt.
        call: The call that computes the piece.
        error: Set if the piece fails.
    """

    sequence: TokenSequence
    call: Call
    error: Exception | None = None


class Policy:
    """Decides how far the sequences of a round draft. This base class lets each sequence draft as
    if it had the engines to itself."""

    def begin(self, sequences: Sequence[TokenSequence]) -> Sequence[Drafting]:
        """Return the drafters of each sequence in this round."""
        return [sequence.drafting for sequence in sequences]

    def draft_on(self, rounds: Sequence[Round], depth: int) -> Sequence[Round]:
        """Return the rounds that draft another level after ``depth`` levels. An empty list ends all
        drafts."""
        return [current for current in rounds if current.wants_more]

    def shares(self, rounds: Sequence[Round]) -> Sequence[Share | None]:
        """Return each draft's share of the verify pass. The share is None if the nodes are chosen
        as if the sequence ran alone."""
        return [None] * len(rounds)

    def drafted(self, rounds: int, seconds: float) -> None:
        """Record that a draft call for ``rounds`` rows took ``seconds``."""

    def verified(
        self,
        rounds: Sequence[Round],
        calls: Sequence[Call],
        seconds: tuple[float, float],
        prompts: Sequence[Call],
    ) -> None:
        """Learn from the round.

        Args:
            rounds: All rounds.
            calls: Verify calls of the rounds that had not failed before.
            seconds: Seconds of drafting, and of the rest of the round.
            prompts: Calls of the prompt pieces that ran in the same verify call.
        """


EACH_ALONE = Policy()


def run_round(
    sequences: Sequence[TokenSequence],
    engines: Engines,
    policy: Policy = EACH_ALONE,
    pieces: Sequence[PromptPiece] = (),
) -> list[Round]:
    """Run one round. It has a draft call for each level, and one verify call, which also computes
    prompt pieces.

    A round is a transaction for each sequence. The error of a sequence is stored as its round's
    ``error``, and the other sequences go on. If an engine fails, nothing is committed, and the
    error is raised.

    Returns:
        The round of each sequence.
    """
    started = time.perf_counter()
    rounds = [
        Round(sequence, drafting)
        for sequence, drafting in zip(sequences, policy.begin(sequences), strict=True)
    ]
    for current in rounds:
        _isolated(current, current.begin)
    began = time.perf_counter()
    with engines.span("draft"):
        draft(rounds, policy)
    drafting = time.perf_counter() - began
    shares = zip(rounds, policy.shares(rounds), strict=True)
    calls = [
        call for current, share in shares if (call := _isolated(current, current.complete, share))
    ]
    planned = [current for current in rounds if current.error is None]
    called = time.perf_counter()
    every = [*calls, *[piece.call for piece in pieces]]
    with engines.span("verify" if calls else "prefill"):
        outputs = engines.verify.forward(every) if every else []
    seconds = time.perf_counter() - called
    with engines.span("accept"):
        for current, output in zip(planned, outputs, strict=False):
            current.result = _isolated(current, current.commit, output, seconds)
    for piece, output in zip(pieces, outputs[len(planned) :], strict=True):
        _isolated(piece, piece.sequence.add_piece, piece.call, output, seconds)
    policy.verified(
        rounds, calls, (drafting, time.perf_counter() - started - drafting), every[len(calls) :]
    )
    return rounds


def draft(rounds: Sequence[Round], policy: Policy) -> None:
    """Draft level by level, with one call for all rounds that continue to draft. A draft engine may
    return several levels of a chain."""
    depth = 0
    while drafting := policy.draft_on(rounds, depth):
        depth += 1
        started = time.perf_counter()
        calls = [call for current in drafting if (call := _isolated(current, current.next_draft))]
        planned = [current for current in drafting if current.error is None]
        if not planned:
            continue
        assert planned[0].drafter is not None
        called = time.perf_counter()
        outputs = planned[0].drafter.engine.forward(calls)
        seconds = time.perf_counter() - called
        for current, output in zip(planned, outputs, strict=True):
            _isolated(current, current.drafted, output, seconds)
        policy.drafted(len(planned), time.perf_counter() - started)


def _isolated(
    one: Round | PromptPiece, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R | None:
    """Call ``action`` unless ``one`` has failed before. An exception is stored in ``one.error``, so
    that the other sequences go on."""
    if one.error is not None:
        return None
    try:
        return action(*args, **kwargs)
    except Exception as error:
        one.error = error
        if isinstance(one, Round):
            one.wants_more = False
        return None


def _length_of_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next(
        (at for at, (token, other) in pairs if token != other), min(len(tokens), len(others))
    )


def cut_displaced(path: list[Node], bonus: int) -> AcceptResult:
    """Cut a path before the first node whose slot is not the slot that it would have in a chain.
    The token of that node becomes the bonus token. All nodes before it are in the slots of a chain,
    so the verifier chose this token correctly."""
    displaced = next((i for i, node in enumerate(path) if node.index != i + 1), None)
    if displaced is None:
        return AcceptResult(path, bonus)
    return AcceptResult(path[:displaced], path[displaced].token)
