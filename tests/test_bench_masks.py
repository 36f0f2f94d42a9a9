"""The benchmark of masks runs, and its report says what was measured."""

import json
from pathlib import Path

import pytest
from support.command import assert_refused, run, succeed
from support.constrained import with_new_lines

from eesd.bench.masks import CONSTRAINTS, main


@pytest.fixture(scope="module")
def plans(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_new_lines(engine, tmp_path_factory.mktemp("lines") / "plans")


def test_every_kind_of_constraint_is_measured(plans: Path, tmp_path: Path) -> None:
    shown = succeed(main, "--engine-dir", plans, "--tokens", 50, "-o", tmp_path / "masks.json").stdout
    report = json.loads((tmp_path / "masks.json").read_text())
    assert report["vocab_size"] == 97 and report["constraints"].keys() == CONSTRAINTS.keys()
    for kind, found in report["constraints"].items():
        assert kind in shown
        assert found["masks"] == 50 and found["texts"] >= 1 and found["grammar_seconds"] > 0
        times = found["mask_seconds"]
        assert 0 < times["median"] <= times["p99"] <= times["longest"]


def test_a_directory_that_is_damaged_is_refused(plans: Path, tmp_path: Path) -> None:
    (plans / "manifest.json").rename(tmp_path / "manifest.json")
    assert_refused(run(main, "--engine-dir", plans), "manifest.json")
