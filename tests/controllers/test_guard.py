"""Tests of the guard with invented durations, and in sessions whose clock only the engines
advance."""

import numpy as np
import pytest
from support.harness import Harness, finish, generated, timed

from eesd.bench.replay.replay import chain_outcome
from eesd.controllers import RoundOutcome, make_controller
from eesd.controllers.base import EXIT, TEXT
from eesd.runtime.decoding.guard import TERMS, Guard
from eesd.runtime.session import Session

pytestmark = pytest.mark.fast


def note(guard: Guard, outcome: RoundOutcome, expected: float, seconds: float) -> None:
    guard.observe(outcome._replace(expected=expected, seconds=seconds))


def drafting(tokens: int, draft_seconds: float, verify_seconds: float = 1.0) -> RoundOutcome:
    """Returns a round of two draft steps that committed ``tokens`` tokens."""
    return chain_outcome(2, tokens - 1, draft_seconds, verify_seconds)


def copied(tokens: int, nodes: int = 4) -> RoundOutcome:
    """A round that verified proposals of the text."""
    return RoundOutcome(
        steps=0,
        draft_seconds=0.0,
        depth=0,
        nodes=nodes,
        verify_seconds=1.0,
        accepted=tokens - 1,
        num_expanded=0,
        drafter=TEXT,
    )


def play(
    guard: Guard,
    rounds: int,
    seconds: float,
    plain: float = 1.0,
    tokens: int = 2,
    expected: float | None = None,
) -> list[bool]:
    """Run rounds of fixed cost. A drafting round takes ``seconds`` and commits ``tokens`` tokens,
    and a plain round commits one token. Returns which rounds drafted."""
    drafted = []
    for _ in range(rounds):
        if guard.allows(EXIT):
            note(
                guard,
                drafting(tokens, seconds - plain),
                tokens if expected is None else expected,
                seconds,
            )
            drafted.append(True)
        else:
            note(guard, chain_outcome(0, 0, 0.0, plain), 1, plain)
            drafted.append(False)
    return drafted


def test_stays_while_drafting_is_faster() -> None:
    guard = Guard()
    drafted = play(guard, 2000, 1.5)
    assert guard.pauses == 0
    assert not any(drafted[: TERMS.near]) and all(
        drafted[TERMS.near : TERMS.near + TERMS.first_interval]
    )
    probes = np.flatnonzero(np.diff(np.array(drafted).astype(int)) == -1)
    assert np.diff(probes).tolist()[:2] == [
        2 * TERMS.first_interval + TERMS.near,
        4 * TERMS.first_interval + TERMS.near,
    ], "ever fewer probes"
    assert 2000 - sum(drafted) <= TERMS.near * 12


@pytest.mark.parametrize("seconds", [2.0, 2.1, 2.5, 4.0])
def test_loses_little_where_drafting_does_not_pay(seconds: float) -> None:
    """Only two things are lost: one round, because the cost is not known yet, and the allowance."""
    guard = Guard()
    drafted = play(guard, 4000, seconds)
    lost = sum(drafted) * (seconds - 2)
    tokens = len(drafted) + sum(drafted)
    assert lost < 4 * TERMS.stake + 1.3 * TERMS.allowance * tokens
    assert guard.pauses > 2 and sum(drafted[-2000:]), "but it is tried again and again"


def test_comes_back_when_drafting_became_faster() -> None:
    guard = Guard()
    play(guard, 300, 3.0)
    slow = guard.pauses
    drafted = play(guard, 1500, 1.0)
    assert slow > 0 and sum(drafted[-400:]) >= 380


def test_stops_soon_when_drafting_became_slower() -> None:
    guard = Guard()
    play(guard, 5000, 1.0)
    drafted = play(guard, 3000, 3.0)
    assert guard.pauses and sum(drafted[60:]) < TERMS.most + TERMS.allowance * 4 * 3000 + 60


def test_stops_when_tokens_are_no_longer_accepted() -> None:
    guard = Guard()
    play(guard, 1000, 1.5)
    drafted = play(guard, 1000, 1.5, tokens=1)
    assert guard.pauses and sum(drafted) < 120 and sum(drafted[200:]) < 10


def test_does_not_judge_before_it_knows_plain_decoding() -> None:
    guard = Guard()
    for _ in range(50):
        note(guard, drafting(1, 100.0), 1, 101.0)
    assert guard.pauses == 0 and not guard.allows(EXIT) and not guard.allows(TEXT), (
        "it asks for a probe"
    )


def test_stalls_do_not_stop_it() -> None:
    """Every eighth call, including the first drafting round, takes several times as long."""
    guard = Guard()
    random = np.random.default_rng(0)
    drafted = []
    for number in range(2000):
        stall = 4.0 if number == TERMS.near or random.random() < 0.12 else 0.0
        if guard.allows(EXIT):
            note(guard, drafting(2, 0.5 + stall), 2, 1.6 + stall)
        else:
            note(guard, chain_outcome(0, 0, 0.0, 1.0 + stall), 1, 1.0 + stall)
        drafted.append(guard.allows(EXIT))
    assert np.mean(drafted) > 0.9


@pytest.mark.parametrize("slowed", [1, 2])
@pytest.mark.parametrize("times", [3, 30])
def test_slow_first_calls_do_not_stop_it(slowed: int, times: int) -> None:
    """None of fifty processes stops drafting because its first calls were slow."""
    for tokens in np.random.default_rng(0).integers(1, 5, 50).tolist():
        guard = Guard()
        drafted = 0
        play(guard, TERMS.near, 1.0)
        for _ in range(40):
            if guard.allows(EXIT):
                seconds = 1.6 * (times if drafted < slowed else 1)
                note(guard, drafting(tokens if not drafted else 3, seconds - 1), 2.8, seconds)
                drafted += 1
            else:
                note(guard, chain_outcome(0, 0, 0.0, 1.0), 1, 1.0)
        assert guard.pauses == 0 and drafted >= 30


def test_bad_luck_does_not_stop_it() -> None:
    """Rounds commit 1 or 3 tokens where 2 are expected, and take 1.7 plain steps. Sometimes many
    rounds in a row commit 1 token."""
    guard = Guard()
    random = np.random.default_rng(0)
    drafted = []
    for _ in range(4000):
        drafted.append(guard.allows(EXIT))
        if drafted[-1]:
            note(guard, drafting(int(random.choice([1, 3])), 0.7), 2, 1.7)
        else:
            note(guard, chain_outcome(0, 0, 0.0, 1.0), 1, 1.0)
    assert np.mean(drafted) > 0.9


def test_expectations_that_are_not_met_count_for_little() -> None:
    """Rounds that take two plain steps commit one token where three are expected."""
    drafted = play(Guard(), 500, 2.0, tokens=1, expected=3.0)
    assert sum(drafted) < 30


def test_a_slower_machine_is_not_the_fault_of_drafting() -> None:
    """For a while all calls take five times as long. Drafting still pays, so it continues."""
    guard = Guard()
    play(guard, 500, 1.3)
    drafted = play(guard, 200, 5 * 1.3, plain=5.0)
    assert sum(drafted) > 180 and guard.pauses == 0
    assert sum(play(guard, 200, 1.3)) > 180 and guard.pauses == 0


def test_an_exit_head_that_does_not_pay_cannot_spend_what_the_text_gains() -> None:
    guard = Guard()
    drafts = 0
    for number in range(1000):
        if number % 2 and guard.allows(TEXT):
            note(guard, copied(5), 5, 1.2)
        elif guard.allows(EXIT):
            note(guard, drafting(1, 1.0), 1, 2.0)
            drafts += 1
        else:
            note(guard, chain_outcome(0, 0, 0.0, 1.0), 1, 1.0)
    assert guard.allows(TEXT) or guard.allows(EXIT) or drafts
    assert drafts < 2 + 2 * TERMS.stake + TERMS.allowance * 3000


def test_a_pause_ends_although_another_drafter_has_all_rounds() -> None:
    """The tokens that the other drafter commits increase the allowance. Rounds without drafts may
    be as rare as probes."""
    guard = Guard()
    play(guard, TERMS.near, 1.0)
    while guard.allows(EXIT):
        note(guard, drafting(1, 1.0), 1, 2.0)
    rounds = 0
    while not guard.allows(EXIT):
        note(
            guard,
            copied(5) if guard.allows(TEXT) else chain_outcome(0, 0, 0.0, 1.0),
            5 if guard.allows(TEXT) else 1,
            1.0,
        )
        rounds += 1
    assert rounds < 200


def test_a_pause_does_not_hold_back_what_is_sure() -> None:
    """Stalls in the first rounds empty the text's account. Repetitions are still drafted, but not
    in a probe."""
    guard = Guard()
    assert not guard.allows(TEXT, TERMS.sure)
    play(guard, TERMS.near, 1.0)
    for seconds in (20.0, *[3.0] * (TERMS.trial - 1)):
        note(guard, copied(1), 2, seconds)
    assert not guard.allows(TEXT) and not guard.allows(TEXT, TERMS.sure - 0.01)
    rounds = 0
    while not guard.allows(TEXT):
        assert guard.allows(TEXT, TERMS.sure)
        note(guard, copied(5), 5, 2.0)
        rounds += 1
    assert rounds < 8, "it earns its account back"


def timed_session(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, draft_seconds: float, guard: Guard
) -> Session:
    workspace = timed(monkeypatch, harness.workspace(), draft_seconds)
    return harness.session(
        [5, 9, 3],
        None,
        make_controller("fixed:k=3"),
        new_tokens=200,
        guard=guard,
        workspace=workspace,
    )


def test_slow_drafting_is_paused_and_the_statistics_say_so(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = Guard()
    session = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    rounds = finish(session)
    stats = session.stats
    assert stats.guard_pauses == guard.pauses >= 1
    assert 1 <= stats.drafting_rounds < 0.1 * stats.rounds
    assert sum(r.num_accepted > 0 for r in rounds) <= stats.drafting_rounds
    assert stats.draft_seconds == 3.0 * stats.draft_steps and stats.verify_seconds == stats.rounds
    assert stats.host_seconds == 0 and stats.to_dict()["guard_pauses"] == guard.pauses
    monkeypatch.undo()
    assert session.tokens[3:] == generated(harness.session([5, 9, 3], new_tokens=200))


def test_fast_drafting_does_not_pause(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    session = timed_session(harness, monkeypatch, draft_seconds=0.05, guard=Guard())
    rounds = finish(session)
    stats = session.stats
    assert stats.guard_pauses == 0
    assert len(rounds) - stats.drafting_rounds <= 4 * TERMS.near
    assert stats.tokens_per_second > 1.5


def test_pauses_are_counted_by_request(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard outlives a session. Its earlier pauses do not affect the next session."""
    guard = Guard()
    first = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    finish(first)
    second = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    finish(second)
    assert first.stats.guard_pauses + second.stats.guard_pauses == guard.pauses
