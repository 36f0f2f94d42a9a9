"""The benchmark of masks runs, and shows what was measured."""

from pathlib import Path

import pytest
from support.command import assert_refused, run, succeed
from support.constrained import with_new_lines

from eesd.bench.tools.masks import CONSTRAINTS, main


@pytest.fixture(scope="module")
def plans(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_new_lines(engine, tmp_path_factory.mktemp("lines") / "plans")


def test_every_kind_of_constraint_is_measured(plans: Path) -> None:
    shown = succeed(main, "--engine-dir", plans, "--tokens", 50).stdout.splitlines()
    assert shown[0].startswith("97 tokens")
    for line, kind in zip(shown[4:], CONSTRAINTS, strict=False):
        name, *times = (cell.strip() for cell in line.split("|")[1:-1])
        reading, median, p99, longest = map(float, times)
        assert name == kind and reading > 0 and 0 < median <= p99 <= longest


def test_a_directory_that_is_damaged_is_refused(plans: Path, tmp_path: Path) -> None:
    (plans / "manifest.json").rename(tmp_path / "manifest.json")
    assert_refused(run(main, "--engine-dir", plans), "manifest.json")
