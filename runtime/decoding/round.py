"""A round of one or several sequences: draft, verify, accept and commit. :func:`run_round` shows
the order."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import ParamSpec, TypeVar

from eesd.common.errors import EESDError
from eesd.controllers import DraftStep, RoundOutcome
from eesd.controllers.base import TEXT
from eesd.controllers.calibration import CERTAIN
from eesd.controllers.text_rule import TextRule
from eesd.runtime.decoding.draft_tree import DraftTree, Node, Share
from eesd.runtime.decoding.drafting import Drafter, Drafting
from eesd.runtime.decoding.samplers import AcceptResult
from eesd.runtime.decoding.sequence import TokenSequence
from eesd.runtime.decoding.stats import RoundResult
from eesd.runtime.decoding.text_drafter import NOTHING, TextProposal
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, KVCache, StepOutputs

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Round:
    """A round of one sequence.

    Attributes:
        sequence: The sequence that it reads, and to which it commits.
        drafting: Drafters of this round.
        error: Set if the round fails. Its sequence is then unchanged, unless there is a result.
        result: Set by :meth:`commit`.
        kv_cache: The sequence's cache. Set by :meth:`begin`, like all attributes below.
        tree: The draft. Each draft step adds to it.
        proposal: The text's proposal after the root.
        drafter: The drafter of this round; None if no drafter with an engine may draft.
        started: Time at which the round began, in seconds.
        most_depth: Maximum number of levels to draft.
        most_nodes: Maximum number of nodes to verify, not counting the root.
        length: Number of draft steps, if the controller fixes it before the first; None if the
            controller decides after each step.
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
        """Begin the round: read the text's proposal, and decide whether to draft.

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
        self.most_depth = self._max_depth()
        self.most_nodes = min(manifest.max_tree_nodes, manifest.max_seq_len - len(tokens))
        drafter = self.drafting.drafter
        if drafter is not None and self.most_depth >= 1 and self.drafting.allows(drafter.name):
            self.drafter = drafter
        sequence.sampler.begin_round(tokens)
        self.proposal = self._proposal(self.drafting.text, self.most_depth)
        self.tree = self._tree(tokens[-1])
        copied = self._copied()
        if copied:
            self.tree.follow(self.proposal.tokens[:copied], TEXT)
        elif self.drafter is not None:
            self.length = self.drafter.controller.begin_round(self.drafter.tree_width)
            self.wants_more = self.length != 0

    def next_draft(self) -> Call:
        """The call of the next draft step."""
        sequence = self.sequence
        tree = self.tree
        drafter = self.drafter
        assert drafter is not None
        if not tree.steps:
            self.kv_cache.reserve(len(sequence.tokens) + self.most_nodes)
        sequence.drafted_to = max(sequence.drafted_to, len(sequence.tokens) - 1 + len(tree.nodes))
        first = tree.frontier[0].index
        call = sequence.call(tree.nodes, first)
        if drafter.engine.chooses:
            chooser = sequence.sampler.chooser(tree.nodes[first:], tree.branching)
            call = call._replace(choose=chooser)
        return call

    def draft_chain(self) -> bool:
        """If the engine can, draft several steps of a chain in one call, without waiting for the
        host in between: all steps if the controller fixed their number, and the controller's
        ``steps_at_once`` if it did not. Returns whether the engine did."""
        sequence = self.sequence
        tree = self.tree
        drafter = self.drafter
        assert drafter is not None
        chain = drafter.engine.draft_chain
        steps = self.length or drafter.controller.steps_at_once
        if (
            chain is None
            or not steps
            or drafter.tree_width > 1
            or not sequence.sampler.proposes_top_tokens
        ):
            return False
        self.kv_cache.reserve(len(sequence.tokens) + self.most_nodes)
        started = time.perf_counter()
        last = tree.frontier[0]
        slot = len(sequence.tokens) - 1 + last.index
        count = min(steps, self.most_depth - last.depth)
        sequence.drafted_to = max(sequence.drafted_to, slot + count)
        outputs = chain(self.kv_cache, last.token, slot, count)
        self.drafted(outputs, time.perf_counter() - started, count)
        return True

    def drafted(self, outputs: StepOutputs, seconds: float, levels: int = 1) -> None:
        """Add levels to the draft from the draft engine's outputs. The controller sees each level;
        its answer to the last level decides whether to continue."""
        assert self.drafter is not None
        tree = self.tree
        controller = self.drafter.controller
        self.draft_seconds += seconds
        for row in range(levels):
            step = self._grow(tree, outputs, row)
            ends = step is None or tree.frontier[0].depth >= self.most_depth or tree.is_full
            self.wants_more = not ends and step is not None and controller.keep_drafting(step)
            if step is None:
                break

    def complete(self, share: Share | None = None) -> Call:
        """End the draft, choose the nodes to verify, and return the verify call.

        Args:
            share: The row's share of a batch's pass; None for a sequence alone. Drafting that is
                ``fixed`` ignores it: with rejection sampling, the choice of nodes to leave out must
                not depend on the drafted tokens.
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
        """Accept the tokens that the verifier agrees with, and commit them.

        Args:
            outputs: The verifier's outputs for the call of :meth:`complete`.
            seconds: Time of this call.
        """
        sequence = self.sequence
        tree = self.tree
        tokens = sequence.tokens
        sequence.drafted_to = 0  # verify has overwritten the slots of the draft
        path, bonus = sequence.sampler.accept(tree.root, outputs)
        if sequence.engines.in_place:
            path, bonus = cut_displaced(path, bonus)
        if path and path[-1].index != len(path):  # the slots of a chain are consecutive already
            self.kv_cache.compact(len(tokens), [len(tokens) - 1 + node.index for node in path])

        chosen = [*[node.token for node in path], bonus]
        outcome = self._outcome(path, chosen, seconds)
        result = self._result(outcome, path, chosen)
        committed_at = time.perf_counter()
        # The commit: one statement after everything that may raise. No signal is handled within it.
        vars(sequence).update(
            tokens=[*tokens, *result.tokens],
            stats=sequence.stats.with_round(result),
            finish_reason=result.finish_reason,
        )

        pauses = self.drafting.pauses
        for one in self.drafting.observers:  # even those that could not draft in this round
            one.observe(outcome)
        sequence.stats.guard_pauses += self.drafting.pauses - pauses
        sequence.stats.host_seconds += time.perf_counter() - committed_at
        if sequence.observer is not None:
            sequence.observer(
                result.tokens,
                outputs.logits[[0, *(node.index for node in path)][: len(result.tokens)]],
            )
        return result

    def _tree(self, root_token: int) -> DraftTree:
        drafter = self.drafter
        if drafter is None:
            return DraftTree(root_token, self.most_nodes)
        return DraftTree(
            root_token,
            self.most_nodes,
            drafter.tree_width,
            drafter.budget,
            self.sequence.engines.in_place,
            drafter.name,
        )

    def _outcome(self, path: Sequence[Node], chosen: Sequence[int], seconds: float) -> RoundOutcome:
        """The outcome for the observers.

        Args:
            path: The accepted nodes.
            chosen: Their tokens and the bonus token.
            seconds: Time of the verify call.
        """
        tree = self.tree
        nodes = self.nodes
        proposal = self.proposal
        drafter = self.drafting.drafter
        depth = max([node.depth for node in nodes if node.source == tree.source])
        drafts = drafter is not None and tree.steps > 0
        name = tree.source
        first_right = None
        expected: float | None = None
        if drafter is not None and drafts:
            expected = drafter.controller.expected_tokens(depth)
            if tree.root.candidates:
                first_right = tree.root.candidates[0].token == chosen[0]
        else:
            expected = 1 + sum(proposal.path_chances[: len(nodes) - 1])
            name = nodes[-1].source if len(nodes) > 1 else ""
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
            expected=len(chosen) if expected is None else expected,
            seconds=time.perf_counter() - self.started,
            labels=tree.labels(chosen),
            proposed=proposal.steps[: min(right + 1, len(chosen))],
            right=right,
            drafter=name,
        )

    def _add_text(self, text: TextRule, joins: bool) -> None:
        """Add the text's proposal after the best drafted path to the draft. If the draft has a
        budget (``joins``), also add the text's proposal after the root."""
        tree = self.tree
        if joins:
            tree.join(tree.root, self.proposal.tokens, self.proposal.chances, TEXT)
        best = tree.frontier[0]
        most = min(self.most_depth - best.depth, self.most_nodes - len(tree.nodes) + 1)
        if best.candidates or most <= 0:
            return
        sequence = self.sequence
        more = sequence.index.propose(sequence.tokens, most, text, best.path())
        if joins:
            tree.join(best, more.tokens, more.chances, TEXT)
        else:
            count = text.count_behind(more.path_chances, len(tree.nodes) - 1)
            tree.follow(more.tokens[:count], TEXT)

    def _proposal(self, text: TextRule | None, most: int) -> TextProposal:
        """The tokens that must follow the root; if there are none, the text's proposal. At most
        ``most`` tokens. The text's tokens are judged in every round, even if they are not
        verified."""
        sequence = self.sequence
        if most <= 0:
            return NOTHING
        tokens = [*sequence.forced(most)]
        if tokens:
            return TextProposal(tokens, [], [CERTAIN] * len(tokens), [CERTAIN] * len(tokens))
        return sequence.index.propose(sequence.tokens, most, text) if text else NOTHING

    def _copied(self) -> int:
        """Number of proposed tokens that this round verifies without drafting."""
        proposal = self.proposal
        text = self.drafting.text
        if not proposal.steps:
            return len(proposal.tokens)  # these tokens must follow
        if text is None:
            return 0
        count = text.count(proposal.path_chances, self.drafter is not None)
        return count if self.drafting.allows(TEXT, sum(proposal.path_chances[:count])) else 0

    def _max_depth(self) -> int:
        """Maximum number of levels of the draft: the bonus token must fit after them."""
        sequence = self.sequence
        root = len(sequence.tokens) - 1
        ends = [last - root for last in sequence.engines.last_positions if last >= root]
        return min(sequence.left - 1, sequence.manifest.max_tree_nodes, *ends[:1])

    def _grow(self, tree: DraftTree, outputs: StepOutputs, row: int = 0) -> DraftStep | None:
        """Add a level to the tree. The outputs for the frontier begin in ``row``. If outputs are
        NaN, nothing is proposed, which ends the draft."""
        first = tree.frontier[0].index - row
        told = outputs.topk_logprobs if outputs.chosen is None else outputs.chosen
        if told is not None and isnan(told.min()):
            return tree.grow([[] for _ in tree.frontier])
        propose = self.sequence.sampler.propose
        count = tree.branching
        return tree.grow(
            [propose(node, outputs, node.index - first, count) for node in tree.frontier]
        )

    def _result(
        self, outcome: RoundOutcome, path: Sequence[Node], tokens: list[int]
    ) -> RoundResult:
        """The result of the round: its tokens up to EOS or a stop string, and the reason if the
        sequence ends."""
        reason = "length" if len(tokens) >= self.sequence.left else None
        count = self.sequence.end_of(tokens)
        if count is not None:
            tokens = tokens[:count]
            reason = "stop"
        accepted = path[: len(tokens)]
        last = path[-1] if path else self.nodes[0]
        judged = [*accepted, *last.children[:1]][: len(tokens)]
        return RoundResult(
            tokens,
            len(accepted),
            reason,
            [node.source for node in accepted],
            [] if reason else _rejected(last),
            outcome,
            judged=[node.source for node in judged],
            levels=max([node.depth for node in self.nodes]),
            drafting=self.drafter is not None or len(self.nodes) > 1,
            draft_seconds=self.draft_seconds,
        )


@dataclass(eq=False)
class PromptPiece:
    """A piece of a sequence's prompt, for the verify call of a round.

    Attributes:
        sequence: The sequence of the prompt.
        call: The call of the piece.
        error: Set if the piece fails.
    """

    sequence: TokenSequence
    call: Call
    error: Exception | None = None


class Policy:
    """Decides how far the sequences of a round draft. This base class lets each sequence draft as
    if it had the engines to itself."""

    def begin(self, sequences: Sequence[TokenSequence]) -> Sequence[Drafting]:
        """The drafters of each sequence in this round."""
        return [sequence.drafting for sequence in sequences]

    def draft_on(self, rounds: Sequence[Round], depth: int) -> Sequence[Round]:
        """The rounds that draft another level, after ``depth`` levels. An empty list ends all
        drafts."""
        return [current for current in rounds if current.wants_more]

    def shares(self, rounds: Sequence[Round]) -> Sequence[Share | None]:
        """Each draft's share of the verify pass; None for a draft that is chosen as if the sequence
        were alone."""
        return [None] * len(rounds)

    def drafted(self, rounds: int, seconds: float) -> None:
        """Learn that a draft call for ``rounds`` rows took ``seconds``."""

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
            calls: Verify calls of the rounds that had not failed by then.
            seconds: Seconds of drafting, and of the rest of the round.
            prompts: Calls of the pieces of prompts that ran in the same verify call.
        """


EACH_ALONE = Policy()


def run_round(
    sequences: Sequence[TokenSequence],
    engines: Engines,
    policy: Policy = EACH_ALONE,
    pieces: Sequence[PromptPiece] = (),
) -> list[Round]:
    """Run one round: a draft call for each level, and one verify call, which also takes pieces of
    prompts.

    A round is a transaction for each sequence: an error of one sequence is stored as its round's
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
    """Draft level by level, with one call for all rounds that draft on."""
    depth = 0
    while drafting := policy.draft_on(rounds, depth):
        depth += 1
        started = time.perf_counter()
        if len(drafting) == 1 and _isolated(drafting[0], drafting[0].draft_chain):
            continue
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
    """Number of equal tokens at the beginning."""
    count = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        count += 1
    return count


def _rejected(node: Node) -> list[int]:
    """The rejected tokens: the best verified path below ``node``, which is the last accepted
    node."""
    tokens = []
    while children := node.children:
        node = children[0]
        tokens.append(node.token)
    return tokens


def cut_displaced(path: list[Node], bonus: int) -> AcceptResult:
    """Cut a path before the first node whose slot is not its slot in a chain. The token of that
    node becomes the bonus token: all nodes before it are in the slots of a chain, so they chose it
    correctly."""
    displaced = next((i for i, node in enumerate(path) if node.index != i + 1), None)
    if displaced is None:
        return AcceptResult(path, bonus)
    return AcceptResult(path[:displaced], path[displaced].token)
