"""Tests that an interrupted round has no effect. The session continues, and ends with the same
tokens."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from support.harness import Harness, RandomStop, Workspace, Wrapped, generated
from support.lossless_checks import check_interrupted_anywhere
from support.without_operators import needs_operators

from eesd.controllers import Controller, DraftStep, RoundOutcome, make_controller
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import Call
from eesd.runtime.llm import load
from eesd.runtime.session import Session

pytestmark = pytest.mark.fast

PROMPT = [5, 9, 3]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=7),
    Sampling(temperature=0.9, seed=7, method="rejection"),
]
NAMES = ["greedy", "coupled", "rejection"]
NEW_TOKENS = 24


class Failure:
    """Raises an error at the ``at``-th call, and never again."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self._left = at
        self._error = error

    def __call__(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error("broken off")


def broken(workspace: Workspace, place: str, failure: Failure) -> Workspace:
    engine, _, moment = place.partition("-")
    inner = workspace.draft if engine == "draft" else workspace.verify
    wrapped = (
        Wrapped(inner, before=failure) if moment == "before" else Wrapped(inner, after=failure)
    )
    return (
        replace(workspace, draft=wrapped)
        if engine == "draft"
        else replace(workspace, verify=wrapped)
    )


def snapshot(session: Session) -> dict[str, Any]:
    """Returns the visible state of a session. It must not show anything of a round in progress."""
    return asdict(session.stats) | {
        "tokens": list(session.tokens),
        "finish_reason": session.finish_reason,
        "prefill_seconds": 0,
    }


def finish_despite(session: Session, error: type[BaseException]) -> int:
    """Run the session to its end, and continue after errors. Returns the number of errors."""
    raised = 0
    while session.finish_reason is None:
        before = snapshot(session)
        try:
            session.step()
        except error:
            raised += 1
            assert snapshot(session) == before
    return raised


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("draft-before", RuntimeError),
        ("draft-after", KeyboardInterrupt),
        ("verify-before", KeyboardInterrupt),
        ("verify-after", RuntimeError),
    ],
)
@pytest.mark.parametrize("width", [1, 2])
def test_a_failing_engine_leaves_nothing_behind(
    harness: Harness, width: int, place: str, error: type[BaseException], sampling: Sampling
) -> None:
    expected = generated(
        harness.session(
            PROMPT, sampling, make_controller("fixed:k=3"), width, new_tokens=NEW_TOKENS
        )
    )
    for at in (1, 2, 3, 4, 5, 8):
        workspace = broken(harness.workspace(), place, Failure(at, error))
        session = harness.session(
            PROMPT,
            sampling,
            make_controller("fixed:k=3"),
            width,
            new_tokens=NEW_TOKENS,
            workspace=workspace,
        )
        assert finish_despite(session, error) == 1
        assert session.tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=2)], ids=["greedy", "coupled"]
)
@pytest.mark.parametrize("place", ["draft-after", "verify-before", "verify-after"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_budget_learns_nothing_from_a_failing_round(
    harness: Harness, width: int, place: str, sampling: Sampling
) -> None:
    expected = generated(harness.session(PROMPT, sampling, new_tokens=NEW_TOKENS))
    for at in (1, 3, 5):
        workspace = broken(harness.workspace(), place, Failure(at, KeyboardInterrupt))
        budget = TreeBudget()
        failed = False
        controller = make_controller("fixed:k=3")
        session = harness.session(
            PROMPT,
            sampling,
            controller,
            width,
            new_tokens=NEW_TOKENS,
            workspace=workspace,
            budget=budget,
        )
        while session.finish_reason is None:
            before = deepcopy(vars(budget.accept)), budget.covered, budget.missed
            try:
                session.step()
            except KeyboardInterrupt:
                failed = True
                assert (vars(budget.accept), budget.covered, budget.missed) == before
        assert failed and session.tokens[len(PROMPT) :] == expected


def test_a_failing_prefill_can_be_repeated(harness: Harness) -> None:
    """The failure may also come between the chunks of a long prompt."""
    prompt = [token % 97 for token in range(7, 307)]
    expected = generated(harness.session(prompt, new_tokens=8))
    for at in (1, 2, 3):
        workspace = broken(harness.workspace(), "verify-after", Failure(at, KeyboardInterrupt))
        workspace.verify.prefill_chunk = 128
        session = harness.session(prompt, new_tokens=8, workspace=workspace)
        with pytest.raises(KeyboardInterrupt):
            session.prefill()
        assert generated(session) == expected


class BrokenController(RandomStop):
    """A controller that raises an error once, in a decision or in an observation."""

    def __init__(
        self, asked: Callable[[DraftStep], None] | None, told: Callable[[RoundOutcome], None] | None
    ) -> None:
        super().__init__(seed=0, chance=1.0)
        self._asked = asked
        self._told = told

    def keep_drafting(self, step: DraftStep) -> bool:
        if self._asked:
            self._asked(step)
        return step.depth < 3

    def observe(self, outcome: RoundOutcome) -> None:
        if self._told:
            self._told(outcome)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("width", [1, 3])
def test_a_controller_that_fails_while_drafting_leaves_nothing(
    harness: Harness, width: int, sampling: Sampling
) -> None:
    expected = generated(
        harness.session(
            PROMPT, sampling, make_controller("fixed:k=3"), width, new_tokens=NEW_TOKENS
        )
    )
    for at in (1, 2, 4):
        controller = BrokenController(Failure(at, ZeroDivisionError), None)
        session = harness.session(PROMPT, sampling, controller, width, new_tokens=NEW_TOKENS)
        assert finish_despite(session, ZeroDivisionError) == 1
        assert session.tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("width", [1, 3])
def test_a_controller_learns_after_the_commit(
    harness: Harness, width: int, sampling: Sampling
) -> None:
    """If the controller fails while it observes a round, the round is already committed, so the
    observed outcome and the session agree."""
    expected = generated(
        harness.session(
            PROMPT, sampling, make_controller("fixed:k=3"), width, new_tokens=NEW_TOKENS
        )
    )
    for at in (1, 2, 4):
        told: list[RoundOutcome] = []
        failure = Failure(at, ZeroDivisionError)

        def learn(
            outcome: RoundOutcome, told: list[RoundOutcome] = told, failure: Failure = failure
        ) -> None:
            told.append(outcome)
            failure(outcome)

        session = harness.session(
            PROMPT, sampling, BrokenController(None, learn), width, new_tokens=NEW_TOKENS
        )
        raised = 0
        while session.finish_reason is None:
            before = len(session.tokens)
            try:
                session.step()
            except ZeroDivisionError:
                raised += 1
            assert sum(outcome.accepted for outcome in told) == session.stats.accepted_tokens
            assert len(session.tokens) - before == told[-1].accepted + 1 or session.finish_reason
        assert raised == 1 and len(told) == session.stats.rounds
        assert session.tokens[len(PROMPT) :] == expected


def test_a_cancelled_round_is_not_observed(harness: Harness) -> None:
    outcomes: list[RoundOutcome] = []
    workspace = broken(harness.workspace(), "verify-after", Failure(5, KeyboardInterrupt))
    session = harness.session(
        PROMPT, controller=BrokenController(None, outcomes.append), workspace=workspace
    )
    assert finish_despite(session, KeyboardInterrupt) == 1
    assert len(outcomes) == session.stats.rounds
    assert sum(outcome.accepted for outcome in outcomes) == session.stats.accepted_tokens


@pytest.mark.parametrize(("width", "rounds"), [(1, 0), (2, 2)])
def test_an_interrupt_at_any_line_keeps_tokens_and_counts_consistent(
    harness: Harness, width: int, rounds: int
) -> None:
    """Ctrl-C may come at any line, even within the commit. The tokens and the counts stay
    consistent."""
    controller: Controller = make_controller("fixed:k=3")

    def make() -> Session:
        return harness.session(PROMPT, SAMPLINGS[1], controller, width, new_tokens=12)

    assert check_interrupted_anywhere(make, rounds) > 60


def test_peek_commits_nothing(harness: Harness) -> None:
    session, undisturbed = (
        harness.session(
            PROMPT, controller=make_controller("fixed:k=3"), workspace=harness.workspace()
        )
        for _ in "ab"
    )
    while session.finish_reason is None:
        before = snapshot(session)
        token = int(session.peek().argmax())
        assert snapshot(session) == before
        assert session.step().tokens[0] == token
    assert session.tokens[len(PROMPT) :] == generated(undisturbed)


@needs_operators()
def test_outputs_are_views_until_the_next_call(harness: Harness) -> None:
    """Engines may reuse their memory, so a wrapper must copy the outputs that it keeps."""
    engine = load(harness.directory, threads=1).engines.verify
    (kv_cache,) = engine.new_kv_caches()
    first, second = (
        engine.forward([Call(kv_cache, [token], (slot,), slot)])[0]
        for slot, token in enumerate(PROMPT[:2])
    )
    assert np.shares_memory(first.logits, second.logits)
