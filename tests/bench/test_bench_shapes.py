"""Shapes are measured on every CPU backend. The tests do not check speeds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import assert_refused, listing, run, succeed

from eesd.bench.tools.shapes import main
from eesd.common.manifest_reader import load_manifest
from eesd.export.predict import bytes_of_pass

TOOLS = Path(__file__).parent.parent.parent / "bench/tools"
NO_TOOLS = ("__init__", "spec_bench_table")


def measured(backend: str, work: Path) -> dict[str, Any]:
    """What shapes.py measures with this backend. Both backends share one export."""
    file = work / f"{backend}.json"
    sizes = ("--nodes", "1 2 64", "--behind", "16 512 4096")
    options = ("--backend", backend, "--dtype", "float32", "--work", work, "--threads", 1, "--repeats", 3, "--json", file)
    assert "| verify 64 behind 512 |" in succeed(main, "--shape", "tiny", *options, *sizes).stdout
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_a_tiny_shape_is_exported_and_measured_on_both_backends(tmp_path: Path) -> None:
    for backend in ("ort", "torch"):
        found = measured(backend, tmp_path)
        passes = found["passes"]
        shapes = [(row["behind"], row["nodes"]) for row in passes["verify"]]
        assert shapes == [(16, 1), (16, 2), (16, 64), (512, 1), (512, 2), (512, 64)]  # 4096 do not fit the cache
        assert [row["behind"] for row in passes["draft"]] == [row["tokens"] for row in found["first"]] == [16, 512]
        rows = passes["verify"] + passes["draft"] + found["first"]
        assert all(0 < row["low"] <= row["seconds"] <= row["high"] for row in rows)
        assert found["bandwidth"] > 0
    assert listing(tmp_path) == ["ort.json", "tiny-float32", "torch.json"]  # the checkpoint is deleted

    manifest = load_manifest(tmp_path / "tiny-float32")
    verify = bytes_of_pass(manifest, manifest.verify[0], 0)
    blocks = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64)
    projections = 64 * 32 * 2  # of keys and values in the exit block, in 4 bits, with 16 bits of scale and of minimum for 32
    exits = projections // 2 + projections // 32 * 4 + 4 * 64  # and the norm before them
    assert verify == 4 * (blocks + 64 + 64 * 256) + exits
    assert bytes_of_pass(manifest, manifest.verify[0], 10) - verify == 10 * 2 * 5 * 2 * 16 * 4


@pytest.mark.parametrize("name", ["peers", *(path.stem for path in TOOLS.glob("*.py") if path.stem not in NO_TOOLS)])
def test_every_tool_starts_in_one_way(name: str) -> None:
    command = [sys.executable, "-m", f"eesd.bench.tools.{name}", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "Usage: " in result.stdout and result.stdout.count("Options:") == 1, result.stderr
    assert f"python -m eesd.bench.tools.{name} " in (TOOLS.parent.parent / "docs/bench.md").read_text("utf-8")


def test_lists_of_numbers_are_checked() -> None:
    assert_refused(run(main, "--shape", "tiny", "--nodes", "1 x"), "--nodes '1 x'", "positive integers")
