"""A round of one or several sequences: draft, verify, accept, commit, top-down in
:func:`run_round`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.common.errors import EESDError
from eesd.controllers import Controller, DraftStep, RoundOutcome
from eesd.controllers.calibration import CERTAIN
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.decoding.draft_tree import DraftTree, Node, Share
from eesd.runtime.decoding.guard import EXIT_HEAD, TEXT, Guard
from eesd.runtime.decoding.samplers import AcceptResult
from eesd.runtime.decoding.text_drafter import NOTHING, TextProposal
from eesd.runtime.engines.base import Call, Engine, StepOutputs

if TYPE_CHECKING:
    from eesd.runtime.engines.backends import Engines
    from eesd.runtime.session import Session

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one round committed, by which results compare, and what it took: all that statistics
    count.

    Attributes:
        tokens: At least one. The first ``num_accepted`` were drafted; the one behind them, if there
            is one, is the bonus token.
        num_accepted: Draft tokens among them. What the verifier accepts behind the end of the text
            is not committed.
        finish_reason: ``stop`` (EOS), ``length`` (max_new_tokens or the end of the cache), or None:
            call ``step`` again.
        from_text: Of each accepted token, whether the text proposed it, and the exit head did not.
        judged_text: The same for each judged token: the accepted ones, and the first rejected one.
        rejected: What was drafted behind the accepted tokens, and not accepted: the best path.
        outcome: What was judged, also behind the end of the text: the observers of the round get
            it.
        levels: Deepest level that was verified, of tokens from the draft or from the text.
        drafting: Whether the round was allowed to draft.
        draft_seconds: Time in the draft engine.
    """

    tokens: list[int]
    num_accepted: int
    finish_reason: str | None
    from_text: Sequence[bool]
    rejected: Sequence[int]
    outcome: RoundOutcome = field(compare=False)
    judged_text: Sequence[bool] = field(compare=False)
    levels: int = field(compare=False)
    drafting: bool = field(compare=False)
    draft_seconds: float = field(compare=False)


@dataclass(frozen=True)
class Drafter:
    """What a session needs to draft with the exit head: the draft engine, the controller, the nodes
    of a level (1: a chain), the budget that chooses what is verified (None: everything), and the
    tokens of the draft's columns."""

    engine: Engine
    controller: Controller
    tree_width: int = 1
    budget: TreeBudget | None = None
    columns: DraftColumns = WHOLE


@dataclass(frozen=True)
class Drafting:
    """How a sequence drafts: with the exit head, from the text, or both; with neither it decodes
    plainly.

    Attributes:
        drafter: How the exit head drafts; None: not at all.
        text: Says how much of what the text proposes is verified; None: the text does not draft.
        guard: Pauses a drafter that loses time; None: no drafter is paused.
        value: What rounds cost and are worth, which controller, budget and text rule share; None:
            nothing needs it.
        fixed: Whether every round must draft and verify the same, because tokens depend on it: with
            rejection sampling.
    """

    drafter: Drafter | None = None
    text: TextRule | None = None
    guard: Guard | None = None
    value: RoundValue | None = None
    fixed: bool = False

    @cached_property
    def rules(self) -> list[Controller | TreeBudget | TextRule]:
        """Controller, budget and text rule, as far as there are any."""
        of_head = (self.drafter.controller, self.drafter.budget) if self.drafter is not None else ()
        return [rule for rule in (*of_head, self.text) if rule is not None]

    @cached_property
    def observers(self) -> list[RoundValue | Controller | TreeBudget | TextRule | Guard]:
        """All that learn from each committed round, in this order: the rules share the value."""
        return [one for one in (self.value, *self.rules, self.guard) if one is not None]

    def begin_request(self) -> None:
        """Tell the rules that another text begins."""
        for rule in self.rules:
            rule.begin_request()

    def allows(self, drafter: str, sure: float = 0.0) -> bool:
        """Whether the guard lets this drafter draft now; see :meth:`Guard.allows`."""
        return self.guard is None or self.guard.allows(drafter, sure)


@dataclass(eq=False, slots=True)
class Round:
    """A round of one sequence.

    Attributes:
        session: Its sequence.
        drafting: How it drafts in this round.
        error: Why it failed; its sequence stands where the round began, unless there is a result.
        result: What was committed.
        tree: What is drafted.
        proposal: What the text proposes behind the root.
        drafter: Drafts in this round; None: it may not draft.
        started: Time at which the round began, in seconds.
        most_depth: Levels that may be drafted.
        most_nodes: Nodes that may be verified besides the root.
        length: Draft steps, if the controller knows them; None: it is asked after each.
        wants_more: Whether another draft step is wanted.
        draft_seconds: Time in the draft engine.
        nodes: What is verified.
        drafted_at: Time at which the draft was complete.
    """

    session: "Session"
    drafting: Drafting
    error: Exception | None = None
    result: RoundResult | None = None
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
        """Begin a round: what the text proposes, and whether to draft. A round that was begun
        before is forgotten.

        Raises:
            EESDError: The session is finished or closed.
        """
        session = self.session
        session.check_open()
        if session.finish_reason is not None:
            raise EESDError("The session is finished; start a new one.")
        if session.unfilled:
            session.prefill()
        self.started = time.perf_counter()
        manifest = session.manifest
        self.most_depth = self._max_depth()
        self.most_nodes = min(manifest.max_tree_nodes, manifest.max_seq_len - len(session.tokens))
        drafter = self.drafting.drafter
        if drafter is not None and not (self.most_depth >= 1 and self.drafting.allows(EXIT_HEAD)):
            drafter = None
        self.drafter = drafter
        session.sampler.begin_round(session.tokens)
        self.proposal = proposal = self._proposal(self.drafting.text, self.most_depth)
        width, budget = (drafter.tree_width, drafter.budget) if drafter else (1, None)
        self.tree = DraftTree(
            session.tokens[-1], self.most_nodes, width, budget, session.engines.in_place
        )
        if proposal.tokens and (copied := self._copied()):
            self.tree.follow_text(proposal.tokens[:copied])
        elif drafter is not None:
            self.length = drafter.controller.begin_round(width)
            self.wants_more = self.length != 0

    def next_draft(self) -> Call:
        """The call of the next draft step."""
        session = self.session
        tree = self.tree
        drafter = self.drafter
        assert drafter is not None
        if not tree.steps:
            session.kv_cache.reserve(len(session.tokens) + self.most_nodes)
        session.drafted_to = max(session.drafted_to, len(session.tokens) - 1 + len(tree.nodes))
        first = tree.frontier[0].index
        call = session.call(tree.nodes, first)
        choose = (
            session.sampler.chooser(tree.nodes[first:], tree.branching)
            if drafter.engine.chooses
            else None
        )
        return call._replace(choose=choose)

    def draft_chain(self) -> bool:
        """Draft steps of a chain in one call, which does not wait for the host between them, if
        that can be. All of them if their number is known, else as many as the controller allows
        before it is asked."""
        session = self.session
        tree = self.tree
        drafter = self.drafter
        assert drafter is not None
        chain = drafter.engine.draft_chain
        steps = self.length or drafter.controller.steps_at_once
        if (
            chain is None
            or not steps
            or drafter.tree_width > 1
            or not session.sampler.proposes_top_tokens
        ):
            return False
        session.kv_cache.reserve(len(session.tokens) + self.most_nodes)
        started = time.perf_counter()
        last = tree.frontier[0]
        slot = len(session.tokens) - 1 + last.index
        count = min(steps, self.most_depth - last.depth)
        session.drafted_to = max(session.drafted_to, slot + count)
        outputs = chain(session.kv_cache, last.token, slot, count)
        self.drafted(outputs, time.perf_counter() - started, count)
        return True

    def drafted(self, outputs: StepOutputs, seconds: float, levels: int = 1) -> None:
        """Add levels to the draft from the draft engine's outputs, and ask the controller whether
        to continue. It is told of each, and its last answer counts."""
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
        """End the draft, and choose what is verified: what is worth it alone, or beside others its
        ``share``.

        Where drafting is fixed all of it is: with rejection sampling, what is left out must not
        depend on what was drafted.
        """
        session = self.session
        tree = self.tree
        drafter = self.drafter
        text = self.drafting.text
        if text is not None and drafter is not None and tree.steps and tree.frontier:
            self._add_text(text, joins=drafter.budget is not None)
        nodes = tree.prune(None if self.drafting.fixed else share)
        self.nodes = nodes
        self.drafted_at = time.perf_counter()
        session.kv_cache.reserve(len(session.tokens) - 1 + len(nodes))
        call = session.verified(nodes)
        return (
            call._replace(choose=session.sampler.chooser(nodes, 0))
            if session.engines.verify.chooses
            else call
        )

    def commit(self, outputs: StepOutputs, seconds: float) -> RoundResult:
        """Accept what the verifier agrees with, and commit it.

        Args:
            outputs: The verifier's, for the call of :meth:`complete`.
            seconds: Of this call.
        """
        session = self.session
        tree = self.tree
        tokens = session.tokens
        session.drafted_to = 0  # verify wrote their slots
        path, bonus = session.sampler.accept(tree.root, outputs)
        if session.engines.in_place:
            path, bonus = cut_displaced(path, bonus)
        if path and path[-1].index != len(path):  # a chain's slots are consecutive already
            session.kv_cache.compact(len(tokens), [len(tokens) - 1 + node.index for node in path])

        chosen = [*[node.token for node in path], bonus]
        outcome = self._outcome(path, chosen, seconds)
        result = self._result(outcome, path, chosen)
        committed_at = time.perf_counter()
        stats = session.stats.with_round(result)
        # The commit: one statement behind everything that may raise. No signal is handled within
        # it.
        session.tokens = [*tokens, *result.tokens]
        session.stats = stats
        session.finish_reason = result.finish_reason

        guard = self.drafting.guard
        pauses = guard.pauses if guard is not None else 0
        for one in self.drafting.observers:  # also if they were not allowed to draft or to copy
            one.observe(outcome)
        if guard is not None:
            session.stats.guard_pauses += guard.pauses - pauses
        session.stats.host_seconds += time.perf_counter() - committed_at
        if session.observer is not None:
            session.observer(
                result.tokens,
                outputs.logits[[0, *(node.index for node in path)][: len(result.tokens)]],
            )
        return result

    def _outcome(self, path: Sequence[Node], chosen: Sequence[int], seconds: float) -> RoundOutcome:
        """What the accepted ``path`` and the ``chosen`` tokens say of the round, whose verify call
        took ``seconds``."""
        tree = self.tree
        nodes = self.nodes
        proposal = self.proposal
        drafter = self.drafting.drafter
        depth = max([node.depth for node in nodes if not node.from_text])
        expected: float | None = 1 + sum(proposal.values[: len(nodes) - 1])
        if drafter is not None and tree.steps:
            expected = drafter.controller.expected_tokens(depth)
        pairs = enumerate(zip(proposal.tokens, chosen, strict=False))
        right = next(
            (i for i, (token, other) in pairs if token != other),
            min(len(proposal.tokens), len(chosen)),
        )
        return RoundOutcome(
            steps=tree.steps,
            draft_seconds=self.drafted_at - self.started,
            depth=depth,
            nodes=len(nodes) - 1,
            verify_seconds=seconds,
            accepted=len(path),
            num_expanded=sum([node.expanded for node in path]),
            first_right=tree.root.candidates[0].token == chosen[0]
            if tree.steps and tree.root.candidates
            else None,
            expected=len(chosen) if expected is None else expected,
            seconds=time.perf_counter() - self.started,
            labels=tree.labels(chosen)
            if drafter is not None and drafter.budget is not None
            else (),
            proposed=proposal.steps[: min(right + 1, len(chosen))],
            right=right,
        )

    def _add_text(self, text: TextRule, joins: bool) -> None:
        """Add to what was drafted what the text proposes behind the root, if it ``joins``, and
        behind the best drafted path."""
        tree = self.tree
        if joins:
            tree.join_text(tree.root, self.proposal.tokens, self.proposal.chances)
        best = tree.frontier[0]
        most = (
            0
            if best.candidates
            else min(self.most_depth - best.depth, self.most_nodes - len(tree.nodes) + 1)
        )
        behind = (
            self.session.index.propose(self.session.tokens, most, text, best.path())
            if most > 0
            else NOTHING
        )
        if joins:
            tree.join_text(best, behind.tokens, behind.chances)
        else:
            tree.follow_text(behind.tokens[: text.count_behind(behind.values, len(tree.nodes) - 1)])

    def _proposal(self, text: TextRule | None, most: int) -> TextProposal:
        """What must follow the root, or what the text proposes, at most ``most`` tokens: they are
        judged in every round, also where they are not verified."""
        session = self.session
        if most > 0 and (tokens := [*session.forced(most)]):
            return TextProposal(tokens, [], [CERTAIN] * len(tokens), [CERTAIN] * len(tokens))
        return session.index.propose(session.tokens, most, text) if text and most > 0 else NOTHING

    def _copied(self) -> int:
        """How many of the proposed tokens this round verifies without drafting."""
        proposal = self.proposal
        text = self.drafting.text
        if not proposal.steps:
            return len(proposal.tokens)  # nothing else may follow
        if text is None:
            return 0
        count = text.count(proposal.values, self.drafter is not None)
        return count if self.drafting.allows(TEXT, sum(proposal.values[:count])) else 0

    def _max_depth(self) -> int:
        """Levels that this round may draft: the bonus token must fit behind them."""
        session = self.session
        root = len(session.tokens) - 1
        ends = [last - root for last in session.engines.last_positions if last >= root]
        return min(session.left - 1, session.manifest.max_tree_nodes, *ends[:1])

    def _grow(self, tree: DraftTree, outputs: StepOutputs, row: int = 0) -> DraftStep | None:
        """Add a level to the tree from the draft's outputs for its frontier, which begin in
        ``row``. Outputs that are no numbers propose nothing, and so end the draft."""
        first = tree.frontier[0].index - row
        told = outputs.topk_logprobs if outputs.chosen is None else outputs.chosen
        if told is not None and isnan(told.min()):
            return tree.grow([[] for _ in tree.frontier])
        propose = self.session.sampler.propose
        count = tree.branching
        return tree.grow(
            [propose(node, outputs, node.index - first, count) for node in tree.frontier]
        )

    def _result(
        self, outcome: RoundOutcome, path: Sequence[Node], tokens: list[int]
    ) -> RoundResult:
        """What the round commits of its tokens: everything up to EOS or a stop string; and why the
        sequence ends there."""
        reason = "length" if len(tokens) >= self.session.left else None
        if (count := self.session.end_of(tokens)) is not None:
            tokens = tokens[:count]
            reason = "stop"
        accepted = path[: len(tokens)]
        last = path[-1] if path else self.nodes[0]
        judged = [*accepted, *last.children[:1]][: len(tokens)]
        return RoundResult(
            tokens,
            len(accepted),
            reason,
            [node.from_text for node in accepted],
            [] if reason else _rejected(last),
            outcome,
            judged_text=[node.from_text for node in judged],
            levels=max([node.depth for node in self.nodes]),
            drafting=self.drafter is not None or len(self.nodes) > 1,
            draft_seconds=self.draft_seconds,
        )


@dataclass(eq=False)
class PromptPiece:
    """A piece of a sequence's prompt, for the verify call of a round; ``error`` says why it
    failed."""

    session: "Session"
    call: Call
    error: Exception | None = None


class Policy:
    """How far the sequences of a round draft. By this one they draft as if each had the engines to
    itself."""

    def begin(self, sessions: Sequence["Session"]) -> Sequence[Drafting]:
        """How each of them drafts in this round."""
        return [session.drafting for session in sessions]

    def draft_on(self, rounds: Sequence[Round], depth: int) -> Sequence[Round]:
        """The rounds that draft another level, after ``depth`` levels. An empty list ends all
        drafts."""
        return [current for current in rounds if current.wants_more]

    def shares(self, rounds: Sequence[Round]) -> Sequence[Share | None]:
        """What of each draft is verified, except where drafting is fixed; None: what is worth it
        for a request alone."""
        return [None] * len(rounds)

    def drafted(self, rounds: int, seconds: float) -> None:
        """Learn that a draft call took ``seconds``, for so many ``rounds`` together."""

    def verified(
        self,
        rounds: Sequence[Round],
        calls: Sequence[Call],
        seconds: tuple[float, float],
        prompts: Sequence[Call],
    ) -> None:
        """Learn from the round.

        Args:
            rounds: All.
            calls: Of the rounds that did not fail before.
            seconds: Of drafting, and of the rest of the round.
            prompts: Of the pieces of prompts that ran with it.
        """


ALONE = Policy()


def run_round(
    sessions: Sequence["Session"],
    engines: "Engines",
    policy: Policy = ALONE,
    pieces: Sequence[PromptPiece] = (),
) -> list[Round]:
    """Run one round: a draft call for each level, and one verify call, which also takes pieces of
    prompts.

    It is a transaction for each sequence. What fails for one is its round's ``error``, and the
    others go on. If an engine fails, nothing is committed, and the error is raised.

    Returns:
        The round of each sequence.
    """
    started = time.perf_counter()
    rounds = [
        Round(session, drafting)
        for session, drafting in zip(sessions, policy.begin(sessions), strict=True)
    ]
    for current in rounds:
        _alone(current, current.begin)
    began = time.perf_counter()
    with engines.span("draft"):
        draft(rounds, policy)
    drafting = time.perf_counter() - began
    shares = zip(rounds, policy.shares(rounds), strict=True)
    calls = [
        call for current, share in shares if (call := _alone(current, current.complete, share))
    ]
    planned = [current for current in rounds if current.error is None]
    called = time.perf_counter()
    every = [*calls, *[piece.call for piece in pieces]]
    with engines.span("verify" if calls else "prefill"):
        outputs = engines.verify.forward(every) if every else []
    seconds = time.perf_counter() - called
    with engines.span("accept"):
        for current, output in zip(planned, outputs, strict=False):
            current.result = _alone(current, current.commit, output, seconds)
    for piece, output in zip(pieces, outputs[len(planned) :], strict=True):
        _alone(piece, piece.session.add_piece, piece.call, output, seconds)
    policy.verified(
        rounds, calls, (drafting, time.perf_counter() - started - drafting), every[len(calls) :]
    )
    return rounds


def draft(rounds: Sequence[Round], policy: Policy) -> None:
    """Draft level by level: one call for all that draft on."""
    depth = 0
    while drafting := policy.draft_on(rounds, depth):
        depth += 1
        started = time.perf_counter()
        if len(drafting) == 1 and _alone(drafting[0], drafting[0].draft_chain):
            continue
        calls = [call for current in drafting if (call := _alone(current, current.next_draft))]
        planned = [current for current in drafting if current.error is None]
        if not planned:
            continue
        assert planned[0].drafter is not None
        called = time.perf_counter()
        outputs = planned[0].drafter.engine.forward(calls)
        seconds = time.perf_counter() - called
        for current, output in zip(planned, outputs, strict=True):
            _alone(current, current.drafted, output, seconds)
        policy.drafted(len(planned), time.perf_counter() - started)


def _alone(
    one: Round | PromptPiece, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R | None:
    """Do something for one sequence, unless it has failed. If this fails, it has failed, and the
    others go on."""
    if one.error is not None:
        return None
    try:
        return action(*args, **kwargs)
    except Exception as error:
        one.error = error
        if isinstance(one, Round):
            one.wants_more = False
        return None


def _rejected(node: Node) -> list[int]:
    """The first path behind the last accepted node that was verified, and not accepted."""
    tokens = []
    while children := node.children:
        node = children[0]
        tokens.append(node.token)
    return tokens


def cut_displaced(path: list[Node], bonus: int) -> AcceptResult:
    """A path up to its first node that is not in the slot that it has in a chain. That node's token
    is the bonus token: it was chosen by a node in its place, and so would be everything before it,
    but nothing behind it."""
    displaced = next((i for i, node in enumerate(path) if node.index != i + 1), None)
    return (
        AcceptResult(path, bonus)
        if displaced is None
        else AcceptResult(path[:displaced], path[displaced].token)
    )
