"""The host's time: the tool runs real rounds over engines that compute nothing."""

from pathlib import Path

import pytest
from support.command import assert_refused, run, succeed
from support.without_operators import needs_operators

from eesd.bench.tools import host

pytestmark = [pytest.mark.fast, needs_operators()]


def test_rounds_are_counted_and_the_same_again(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROMPT": 8, "WARM": 1, "ROUNDS": 2, "LEAST_SLOTS": 32}.items():
        monkeypatch.setattr(host, name, value)
    lines = [succeed(host.main, engine, "--rows", "1 2").stdout.splitlines() for _ in range(2)]
    rows, again = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[2:] if line]
        for found in lines
    ]
    assert [row[0] for row in rows] == [*host.WAYS, "a batch of 1", "a batch of 2"]
    assert all(int(row[3]) > 10 for row in rows)
    assert [row[-1] for row in rows] == [row[-1] for row in again]


def test_too_short_a_context_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_SLOTS", 10**6)
    assert_refused(run(host.main, engine), "--max-seq-len")
