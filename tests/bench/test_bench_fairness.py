"""What the measurement of fairness makes of the times of streams."""

from pathlib import Path

import pytest
from support.command import assert_refused, run

from eesd.bench.tools.fairness import Gaps, report_of
from eesd.bench.tools.fairness import main as fairness


def test_gaps_beside_a_prompt_are_compared_with_the_others() -> None:
    quiet = [0.1 * i for i in range(-10, 51)]  # of which those in the 5 seconds before the prompt count
    slow = [5.0 + 0.15 * i for i in range(1, 21)]
    report = report_of(Gaps([[*quiet, *slow]], [(5.0, 8.0)]))
    assert report["counts"] == {"without": 49, "beside": 20} and report["fair"]
    assert report["ratios"] == {name: pytest.approx(1.5) for name in ("p50", "p99")}
    slower = [5.0 + 0.21 * i for i in range(1, 21)]
    assert not report_of(Gaps([[*quiet, *slower]], [(5.0, 9.2)]))["fair"]


def test_fairness_explains_a_missing_directory(tmp_path: Path) -> None:
    assert_refused(run(fairness, "--engine-dir", tmp_path / "none", "--output", tmp_path / "out.json"), "none")
