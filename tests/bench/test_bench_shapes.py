"""Calls are timed on every CPU backend. The tests do not check speeds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import assert_refused, run, succeed

from eesd.common.manifest import load_manifest
from lab.shapes import main

ROOT = Path(__file__).parent.parent.parent
NO_TOOLS = ("__init__", "spec_bench_table")


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_calls_of_a_directory_are_timed(engine: Path, backend: str) -> None:
    longest = load_manifest(engine).max_seq_len
    sizes = ("--nodes", "1 2", "--behind", f"16 {longest}", "--threads", 1, "--repeats", 3)
    shown = succeed(main, engine, "--backend", backend, *sizes).stdout
    rows = dict(re.findall(r"^\| (.*\d) \| (.*\)) \|", shown, re.MULTILINE))
    # There is no room after the longest text.
    assert [*rows] == [
        "draft step after 16",
        "verify 1 after 16",
        "verify 2 after 16",
        "first token of 16",
    ]
    for cell in rows.values():
        median, low, high = map(float, re.findall(r"[\d.]+", cell))
        assert 0 <= low <= median <= high > 0
    assert float(shown.split()[1]) > 0


@pytest.mark.parametrize(
    "name",
    ["peers", *(path.stem for path in (ROOT / "lab").glob("*.py") if path.stem not in NO_TOOLS)],
)
def test_every_tool_starts_in_one_way(name: str) -> None:
    command = [sys.executable, "-m", f"lab.{name}", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (
        result.returncode == 0
        and "Usage: " in result.stdout
        and result.stdout.count("Options:") == 1
    ), result.stderr
    assert f"python -m lab.{name} " in (ROOT / "docs/bench.md").read_text("utf-8")


def test_lists_of_numbers_are_checked(engine: Path) -> None:
    assert_refused(run(main, engine, "--nodes", "1 x"), "--nodes '1 x'", "positive integers")
