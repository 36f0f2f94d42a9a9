"""The guard: with made-up seconds, and in sessions whose clock only the engines move."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.harness import Harness, Wrapped, finish, generated

from eesd.controllers import make_controller
from eesd.runtime.decoding.guard import FIRST_INTERVAL, LARGEST_BALANCE, LARGEST_SAVINGS, LONGEST_INTERVAL, Guard
from eesd.runtime.decoding.session import Session

pytestmark = pytest.mark.fast


def play(guard: Guard, rounds: int, drafting_seconds: float, plain_seconds: float = 1.0, tokens: int = 2) -> list[bool]:
    """Rounds of fixed cost: a drafting one gives ``tokens`` tokens, a plain one gives one. Which of them drafted."""
    drafted = []
    for _ in range(rounds):
        drafting = guard.allows()
        brought = tokens if drafting else 1
        guard.record(drafting, brought, brought, drafting_seconds if drafting else plain_seconds)
        drafted.append(drafting)
    return drafted


def test_stays_while_drafting_is_faster() -> None:
    guard = Guard()
    drafted = play(guard, 2000, drafting_seconds=1.5)
    assert guard.pauses == 0 and not guard.paused
    assert drafted[:2] == [False, False] and all(drafted[2 : 2 + FIRST_INTERVAL])
    probes = [i for i in range(1, 2000) if not drafted[i] and not drafted[i - 1]]
    assert np.diff(probes).tolist()[:2] == [FIRST_INTERVAL + 2, 2 * FIRST_INTERVAL + 2], "settled: ever fewer probes"
    assert 2000 - sum(drafted) <= 2 * (2000 / LONGEST_INTERVAL + 4)


@pytest.mark.parametrize(
    ("drafting_seconds", "first", "later"), [(2.05, 0.025, 0.012), (2.5, 0.025, 0.012), (4.0, 0.045, 0.021)]
)
def test_loses_at_most_a_few_percent_where_drafting_does_not_pay(drafting_seconds: float, first: float, later: float) -> None:
    guard = Guard()
    for rounds, most in ((100, first), (4000, later)):
        drafted = play(guard, rounds, drafting_seconds)
        lost = sum(drafted) * (drafting_seconds - 2)
        tokens = len(drafted) + sum(drafted)
        assert 0 < lost < most * tokens
    assert guard.pauses > 2


def test_comes_back_when_drafting_became_faster() -> None:
    guard = Guard()
    play(guard, 300, drafting_seconds=3.0)
    slow = guard.pauses
    drafted = play(guard, 600, drafting_seconds=1.0)
    assert slow > 0 and guard.pauses == slow
    assert sum(drafted[-400:]) >= 390


def test_stops_soon_when_drafting_became_slower() -> None:
    guard = Guard()
    play(guard, 5000, drafting_seconds=1.0)
    drafted = play(guard, 3000, drafting_seconds=3.0)
    assert guard.pauses and sum(drafted[:60]) < 25
    assert sum(drafted) < LARGEST_BALANCE + LARGEST_SAVINGS + 0.01 * 3000, "trials first cost what was gained before"


def test_does_not_judge_before_it_knows_plain_decoding() -> None:
    guard = Guard()
    for _ in range(50):
        guard.record(True, 2, 2, 100.0)
    assert guard.pauses == 0 and guard.plain_seconds == 0
    assert not guard.allows(), "it asks for a probe"


def test_one_slow_round_or_bad_luck_does_not_stop_it() -> None:
    """Rounds of 1 or 3 tokens where 2 are expected, at 1.7 plain steps; and now and then the machine stalls."""
    guard, random = Guard(), np.random.default_rng(0)
    for _ in range(2000):
        drafting = guard.allows()
        stall = 30.0 if random.random() < 0.003 else 0.0
        guard.record(drafting, int(random.choice([1, 3])) if drafting else 1, 2, (1.7 if drafting else 1.0) + stall)
    assert guard.pauses == 0


def test_expectations_that_are_not_met_count_for_little() -> None:
    """Rounds bring one token, but are expected to bring three, in two plain steps."""
    guard = Guard()
    drafted = 0
    for _ in range(500):
        drafting = guard.allows()
        drafted += drafting
        guard.record(drafting, 1, 3 if drafting else 1, 2.0 if drafting else 1.0)
    assert drafted < 15 and guard.pauses


def test_a_slower_machine_is_not_the_fault_of_drafting() -> None:
    """Everything takes five times longer for a while: drafting pays, and goes on."""
    guard = Guard()
    play(guard, 500, drafting_seconds=1.3)
    drafted = play(guard, 200, drafting_seconds=5 * 1.3, plain_seconds=5.0)
    assert sum(drafted[-150:]) > 120
    assert guard.plain_seconds == 5.0
    play(guard, 2 * LONGEST_INTERVAL, drafting_seconds=1.3)
    assert guard.plain_seconds == 1.0, "probes that say something new are soon followed by others"


def paused_guard() -> Guard:
    """A guard that has paused its drafter, in a machine where a plain round takes a second."""
    guard = Guard()
    play(guard, 2, drafting_seconds=1.0)
    while not guard.paused:
        guard.record(True, 1, 1, 2.0)
    return guard


def test_a_pause_ends_although_another_drafter_has_all_rounds() -> None:
    """It brings the tokens that the allowance is for. Rounds without any draft may be as rare as probes are."""
    guard, rounds = paused_guard(), 0
    while guard.paused:
        guard.pass_over(2)
        rounds += 1
    assert rounds < 100
    assert guard.allows() and not guard.probes


def timed_session(harness: Harness, monkeypatch: pytest.MonkeyPatch, draft_seconds: float, guard: Guard) -> Session:
    """A session whose clock moves by ``draft_seconds`` for a draft call and by one for a verify call."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("eesd.runtime.decoding.session.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def passing(seconds: float) -> Wrapped:
        return Wrapped(
            workspace.verify if seconds == 1 else workspace.draft, lambda *_: setattr(clock, "now", clock.now + seconds)
        )

    workspace = harness.workspace()
    timed = type(workspace)(workspace.kv_cache, passing(1), passing(draft_seconds))
    return harness.session([5, 9, 3], None, make_controller("fixed:k=3"), new_tokens=200, guard=guard, workspace=timed)


def test_slow_drafting_is_paused_and_the_statistics_say_so(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    session = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    rounds, stats = finish(session), session.stats
    assert stats.guard_pauses == guard.pauses >= 2
    assert 2 <= stats.drafting_rounds < 0.2 * stats.rounds
    assert sum(r.num_accepted > 0 for r in rounds) <= stats.drafting_rounds
    assert stats.draft_seconds == 3.0 * stats.draft_steps and stats.verify_seconds == stats.rounds
    assert stats.host_seconds == 0 and stats.to_dict()["guard_pauses"] == guard.pauses
    monkeypatch.undo()
    assert session.tokens[3:] == generated(harness.session([5, 9, 3], new_tokens=200))


def test_fast_drafting_does_not_pause(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    session = timed_session(harness, monkeypatch, draft_seconds=0.05, guard=Guard())
    rounds, stats = finish(session), session.stats
    assert stats.guard_pauses == 0
    assert len(rounds) - stats.drafting_rounds <= 8
    assert stats.tokens_per_second > 1.5


def test_pauses_are_counted_by_request(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard outlives a session; its earlier pauses are not the next session's."""
    guard = Guard()
    first = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    finish(first)
    second = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    finish(second)
    assert first.stats.guard_pauses + second.stats.guard_pauses == guard.pauses
