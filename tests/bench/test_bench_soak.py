"""The soak of the server, on a small engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import assert_refused, run

from eesd.bench.tools.soak import is_clean
from eesd.bench.tools.soak import main as soak


def test_a_soak_is_clean_only_if_nothing_went_wrong() -> None:
    report = {
        "load": {
            "counts": {"equal": 3, "hung up": 1, "status 429": 2},
            "left": {"num_requests_running": 0.0},
        },
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
    options = (
        "--engine-dir",
        str(bundled),
        "--minutes",
        "0.4",
        "--kv-memory",
        "20000000",
        "-o",
        str(output),
    )
    command = [sys.executable, "-m", "eesd.bench.tools.soak", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-2000:]}"
    report = json.loads(output.read_text())
    assert (
        report["clean"]
        and report["load"]["counts"]["equal"] > 10
        and report["restart"]["after_restart"] == {"equal": 3}
    )


def test_the_soak_explains_a_missing_directory(tmp_path: Path) -> None:
    assert_refused(
        run(soak, "--engine-dir", tmp_path / "none", "--output", tmp_path / "out.json"), "none"
    )
