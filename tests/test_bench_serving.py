"""The benchmark of batches and the soak, on a small engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import assert_refused, run, succeed

from eesd.bench.serving.cli import contestants, main, table
from eesd.bench.soak import is_clean
from eesd.bench.soak import main as soak


def test_batches_are_measured_and_their_tokens_compared(engine: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "serving.json"
    lines = [{"id": str(n), "task": "t", "prompt": "def f(x): return x" * n} for n in (1, 3, 2)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ("--task", f"prompts={prompts}", "--concurrency", "1,2", "--rounds", 2, "--prompts", 3, "-n", 6, "--threads", 1)
    found = succeed(main, "--engine-dir", engine, *options, "--output", output)
    results = json.loads(output.read_text())
    assert set(results["results"]) == {"EESD, automatic", "EESD, always", "EESD, never"}
    assert results["tokens_equal"] == dict.fromkeys(results["results"], 1.0)
    for by in results["results"].values():
        assert set(by) == {"1", "2"}
        for one in by.values():
            assert len(one["each"]) == 2 and one["tokens_per_second"] > 0
            assert 0 < one["first_token_seconds"]["p50"] <= one["first_token_seconds"]["p99"]
    assert table(results) in found.output


def test_bad_options_are_refused(engine: Path, tmp_path: Path) -> None:
    given = ("--engine-dir", engine, "--output", tmp_path / "out.json", "--concurrency")
    for text in ("", "1,x", "0"):
        assert_refused(run(main, *given, text), "--concurrency")


def test_peers_take_part_when_their_model_is_given(tmp_path: Path) -> None:
    found = contestants(tmp_path, "python", tmp_path / "model.gguf", None)
    assert [one.name for one in found][3:] == ["llama.cpp"] and found[3].path.endswith("model.gguf")


def test_a_soak_is_clean_only_if_nothing_went_wrong() -> None:
    report = {
        "load": {"counts": {"equal": 3, "hung up": 1, "status 429": 2}, "left": {"num_requests_running": 0.0}},
        "restart": {"after_restart": {"equal": 3}, "problems": []},
        "exit_status": 0,
    }
    assert is_clean(report)
    for path, value in (
        (("load", "counts", "WRONG TOKENS"), 1),
        (("load", "counts", "status 500"), 1),
        (("load", "left", "num_requests_running"), 1.0),
        (("restart", "after_restart", "equal"), 2),
        (("exit_status",), 1),
    ):
        changed = json.loads(json.dumps(report))
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        assert not is_clean(changed)


@pytest.mark.slow
def test_a_short_soak_is_clean(bundled: Path, tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "eesd.bench.soak", "--engine-dir", str(bundled), "--minutes", "0.4", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-2000:]}"
    report = json.loads(output.read_text())
    assert report["clean"] and report["load"]["counts"]["equal"] > 10 and report["restart"]["after_restart"] == {"equal": 3}


def test_the_soak_explains_a_missing_directory(tmp_path: Path) -> None:
    assert_refused(run(soak, "--engine-dir", tmp_path / "none", "--output", tmp_path / "out.json"), "none")
