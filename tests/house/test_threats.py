"""Each line of docs/threats.md names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "threats.md"


@pytest.mark.fast
def test_each_threat_has_a_test() -> None:
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)
    }
    lines = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| tries")
    ]
    assert len(lines) > 15
    for line in lines:
        named = set(re.findall(r"`(test_\w+)`", line.rpartition("|")[0].rpartition("|")[2]))
        assert named and named <= defined, line
