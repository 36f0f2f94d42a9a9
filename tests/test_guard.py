"""The guard: with made-up seconds, and in sessions whose clock only the engines move."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.harness import Harness, Wrapped, finish, generated

from eesd.controllers import make_controller
from eesd.runtime.decoding.guard import FIRST_PROBES, LONGEST_PAUSE, PROBE_EVERY, TRIAL, Guard
from eesd.runtime.decoding.session import Session

pytestmark = pytest.mark.fast


def play(guard: Guard, rounds: int, drafting_seconds: float, plain_seconds: float, tokens: int = 2) -> list[bool]:
    """Rounds of fixed cost: a drafting one gives ``tokens`` tokens, a plain one gives one. Which of them drafted."""
    drafted = []
    for _ in range(rounds):
        drafting = guard.allows()
        guard.record(drafting, tokens if drafting else 1, drafting_seconds if drafting else plain_seconds)
        drafted.append(drafting)
    return drafted


def pauses(drafted: list[bool]) -> list[int]:
    """Lengths of the runs of plain rounds that are longer than a probe."""
    runs = "".join("d" if d else "p" for d in drafted).split("d")
    return [len(run) for run in runs if len(run) > 1]


def test_stays_while_drafting_is_faster() -> None:
    guard = Guard()
    drafted = play(guard, 1000, drafting_seconds=1.9, plain_seconds=1.0)
    assert guard.pauses == 0 and not guard.paused
    assert drafted[:PROBE_EVERY].count(False) == FIRST_PROBES
    assert 1000 - sum(drafted) == 1000 // PROBE_EVERY + FIRST_PROBES
    assert guard.rate(True) == pytest.approx(2 / 1.9) and guard.rate(False) == pytest.approx(1.0)


def test_pauses_when_drafting_is_slower_and_tries_again_ever_later() -> None:
    guard = Guard()
    drafted = play(guard, 6000, drafting_seconds=2.1, plain_seconds=1.0)
    lengths = pauses(drafted)
    assert drafted.index(False) == 1, "one plain round comes early, to compare with"
    first_pause = [i for i, d in enumerate(drafted) if d][TRIAL - 1] + 1
    assert drafted[first_pause : first_pause + 16] == [False] * 16 and drafted[first_pause + 16]
    assert lengths[:6] == [16, 32, 64, 128, 256, 512]
    assert max(lengths) <= LONGEST_PAUSE
    assert sum(drafted) < 0.03 * len(drafted)


def test_pauses_never_longer_than_the_longest() -> None:
    guard = Guard()
    lengths = pauses(play(guard, 20000, drafting_seconds=9.0, plain_seconds=1.0))
    assert lengths[-3:-1] == [LONGEST_PAUSE] * 2


def test_comes_back_when_drafting_became_faster() -> None:
    guard = Guard()
    play(guard, 100, drafting_seconds=3.0, plain_seconds=1.0)
    slow = guard.pauses
    drafted = play(guard, 600, drafting_seconds=1.0, plain_seconds=1.0)
    assert slow > 0 and guard.pauses == slow
    assert sum(drafted[-400:]) >= 400 - 400 // PROBE_EVERY - 1


def test_a_good_trial_forgives() -> None:
    """After drafting paid again, the next pause begins short."""
    guard = Guard()
    play(guard, 200, drafting_seconds=3.0, plain_seconds=1.0)
    while guard.paused:
        play(guard, 1, drafting_seconds=1.0, plain_seconds=1.0)
    play(guard, 100, drafting_seconds=1.0, plain_seconds=1.0)
    assert pauses(play(guard, 200, drafting_seconds=5.0, plain_seconds=1.0))[0] == 16


def test_does_not_judge_before_it_knows_plain_decoding() -> None:
    guard = Guard()
    for _ in range(3 * TRIAL):
        guard.record(True, 2, 100.0)
    assert guard.pauses == 0 and guard.rate(False) == 0
    guard.record(False, 1, 1.0)
    for _ in range(TRIAL):
        guard.record(True, 2, 100.0)
    assert guard.pauses == 1 and not guard.allows()


def test_one_slow_round_or_bad_luck_does_not_stop_it() -> None:
    """Half of the rounds give 1 token, half give 3, at 1.7 plain steps each; and now and then the machine stalls."""
    guard, random = Guard(), np.random.default_rng(0)
    for _ in range(2000):
        drafting = guard.allows()
        stall = 30.0 if random.random() < 0.003 else 0.0
        guard.record(drafting, int(random.choice([1, 3])) if drafting else 1, (1.7 if drafting else 1.0) + stall)
    assert guard.pauses == 0


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
    assert TRIAL <= stats.drafting_rounds < 0.4 * stats.rounds
    assert sum(r.num_accepted > 0 for r in rounds) <= stats.drafting_rounds
    assert stats.draft_seconds == 3.0 * stats.draft_steps and stats.verify_seconds == stats.rounds
    assert stats.host_seconds == 0 and stats.to_dict()["guard_pauses"] == guard.pauses
    monkeypatch.undo()
    assert session.tokens[3:] == generated(harness.session([5, 9, 3], new_tokens=200))


def test_fast_drafting_does_not_pause(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    session = timed_session(harness, monkeypatch, draft_seconds=0.05, guard=Guard())
    rounds, stats = finish(session), session.stats
    assert stats.guard_pauses == 0
    assert len(rounds) - stats.drafting_rounds <= FIRST_PROBES + len(rounds) // PROBE_EVERY
    assert stats.tokens_per_second > 1.5


def test_pauses_are_counted_by_request(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard outlives a session; its earlier pauses are not the next session's."""
    guard = Guard()
    first = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    finish(first)
    second = timed_session(harness, monkeypatch, draft_seconds=3.0, guard=guard)
    finish(second)
    assert first.stats.guard_pauses + second.stats.guard_pauses == guard.pauses
