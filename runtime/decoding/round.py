"""A round of one or several sequences: draft, verify, accept, commit, top-down in :func:`run_round`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.controllers import Controller, RoundOutcome
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import RoundValue
from eesd.runtime.decoding.draft_tree import DraftTree, Node, Share
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.decoding.text_drafter import NOTHING, Proposal, TextDrafter
from eesd.runtime.engines.base import Call, Engine

if TYPE_CHECKING:
    from eesd.runtime.decoding.session import Session

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one round committed, by which results compare, and what it took: all that statistics count.

    Attributes:
        tokens: At least one. The first ``num_accepted`` were drafted; the one behind them, if there is one, is the bonus token.
        num_accepted: Draft tokens among them. What the verifier accepts behind the end of the text is not committed.
        finish_reason: ``stop`` (EOS), ``length`` (max_new_tokens or the end of the cache), or None: call ``step`` again.
        from_text: Of each accepted token, whether the text proposed it, and the exit head did not.
        rejected: What was drafted behind the accepted tokens, and not accepted: the best path.
        outcome: What was judged, also behind the end of the text: what all that learn are told.
        levels: Deepest level that was verified, of tokens from the draft or from the text.
        drafting: Whether the round was allowed to draft.
        draft_seconds, seconds: Time in the draft engine, and of the whole round.
    """

    tokens: list[int]
    num_accepted: int
    finish_reason: str | None
    from_text: Sequence[bool]
    rejected: Sequence[int]
    outcome: RoundOutcome = field(compare=False)
    levels: int = field(compare=False)
    drafting: bool = field(compare=False)
    draft_seconds: float = field(compare=False)
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class Drafter:
    """What a session needs to draft with the exit head: the draft engine, the controller, the nodes of a level (1: a
    chain), the budget that chooses what is verified (None: everything), and the tokens of the draft's columns."""

    engine: Engine
    controller: Controller
    tree_width: int = 1
    budget: TreeBudget | None = None
    columns: DraftColumns = WHOLE


@dataclass(frozen=True)
class Drafting:
    """How a sequence drafts: with the exit head, from the text, or both; with neither it decodes plainly.

    Attributes:
        drafter: How the exit head drafts; None: not at all.
        text: How the text drafts; None: not at all.
        guard: Pauses a drafter that loses time; None: no drafter is paused.
        value: What rounds cost and are worth, which controller, budget and text rule share; None: nothing needs it.
        fixed: Whether every round must draft and verify the same, because tokens depend on it: with rejection sampling.
    """

    drafter: Drafter | None = None
    text: TextDrafter | None = None
    guard: Guard | None = None
    value: RoundValue | None = None
    fixed: bool = False

    def begin_request(self) -> None:
        """Tell all that learn that another text begins."""
        if self.drafter is not None:
            self.drafter.controller.begin_request()
            if self.drafter.budget is not None:
                self.drafter.budget.begin_request()
        if self.text is not None:
            self.text.rule.begin_request()

    def allows(self, drafter: str, sure: float = 0.0) -> bool:
        """Whether the guard lets this drafter draft now; see :meth:`Guard.allows`."""
        return self.guard is None or self.guard.allows(drafter, sure)


@dataclass(eq=False, slots=True)
class Round:
    """A round of one sequence.

    Attributes:
        session: The sequence.
        drafting: How it drafts in this round.
        error: Why it failed; its sequence stands where the round began, unless there is a result.
        result: What was committed.
        tree: What is drafted.
        proposal: What the text proposes behind the root.
        drafter: Drafts in this round; None: it may not draft.
        started: Time at which the round began, in seconds.
        most_depth: Levels that may be drafted.
        most_nodes: Nodes that may be verified besides the root.
        copied: Tokens of the text that the draft begins with.
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
    proposal: Proposal = NOTHING
    drafter: Drafter | None = None
    started: float = 0.0
    most_depth: int = 0
    most_nodes: int = 0
    copied: int = 0
    length: int | None = None
    wants_more: bool = False
    draft_seconds: float = 0.0
    nodes: list[Node] = field(default_factory=list)
    drafted_at: float = 0.0


@dataclass(eq=False)
class Piece:
    """A piece of a sequence's prompt, for the verify call of a round; ``error`` says why it failed."""

    session: "Session"
    call: Call
    error: Exception | None = None


class Policy:
    """How far the sequences of a round draft. By this one they draft as if each had the engines to itself."""

    def begin(self, sessions: Sequence["Session"]) -> Sequence[Drafting]:
        """How each of them drafts in this round."""
        return [session.drafting for session in sessions]

    def draft_on(self, rounds: Sequence[Round], depth: int) -> Sequence[Round]:
        """The rounds that draft another level, after ``depth`` levels. An empty list ends all drafts."""
        return [current for current in rounds if current.wants_more]

    def share(self, rounds: Sequence[Round]) -> Share | None:
        """What of each draft is verified, except where drafting is fixed; None: what is worth it for a request alone."""
        return None

    def drafted(self, rounds: int, seconds: float) -> None:
        """Learn that a draft call took ``seconds``, for so many ``rounds`` together."""

    def verified(
        self, rounds: Sequence[Round], calls: Sequence[Call], seconds: tuple[float, float], prompts: Sequence[Call]
    ) -> None:
        """Learn from the round.

        Args:
            rounds: All.
            calls: Of the rounds that did not fail before.
            seconds: Before the verify call, and from there on.
            prompts: Of the pieces of prompts that ran with it.
        """


ALONE = Policy()


def run_round(
    sessions: Sequence["Session"], verify: Engine, policy: Policy = ALONE, pieces: Sequence[Piece] = ()
) -> list[Round]:
    """Run one round: a draft call for each level, and one verify call, which also takes pieces of prompts.

    It is a transaction for each sequence. What fails for one is its round's ``error``, and the others go on. If an engine
    fails, nothing is committed, and the error is raised.

    Returns:
        The round of each sequence.
    """
    started = time.perf_counter()
    rounds = [Round(session, drafting) for session, drafting in zip(sessions, policy.begin(sessions), strict=True)]
    for current in rounds:
        _alone(current, current.session.begin, current)
    draft(rounds, policy)
    share = policy.share(rounds)
    calls = [call for current in rounds if (call := _alone(current, current.session.complete, current, share))]
    planned = [current for current in rounds if current.error is None]
    called = time.perf_counter()
    every = [*calls, *[piece.call for piece in pieces]]
    outputs = verify.forward(every) if every else []
    seconds = time.perf_counter() - called
    for current, output in zip(planned, outputs, strict=False):
        current.result = _alone(current, current.session.commit, current, output, seconds)
    for piece, output in zip(pieces, outputs[len(planned) :], strict=True):
        _alone(piece, piece.session.add_piece, piece.call, output, seconds)
    policy.verified(rounds, calls, (called - started, time.perf_counter() - called), every[len(calls) :])
    return rounds


def draft(rounds: Sequence[Round], policy: Policy) -> None:
    """Draft level by level: one call for all that draft on."""
    depth = 0
    while drafting := policy.draft_on(rounds, depth):
        depth += 1
        started = time.perf_counter()
        if len(drafting) == 1 and _alone(drafting[0], drafting[0].session.draft_chain, drafting[0]):
            continue
        calls = [call for current in drafting if (call := _alone(current, current.session.next_draft, current))]
        planned = [current for current in drafting if current.error is None]
        if not planned:
            continue
        assert planned[0].drafter is not None
        called = time.perf_counter()
        outputs = planned[0].drafter.engine.forward(calls)
        seconds = time.perf_counter() - called
        for current, output in zip(planned, outputs, strict=True):
            _alone(current, current.session.drafted, current, output, seconds)
        policy.drafted(len(planned), time.perf_counter() - started)


def _alone(one: Round | Piece, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Do something for one sequence, unless it has failed. If this fails, it has failed, and the others go on."""
    if one.error is not None:
        return None
    try:
        return action(*args, **kwargs)
    except Exception as error:
        one.error = error
        if isinstance(one, Round):
            one.wants_more = False
        return None
