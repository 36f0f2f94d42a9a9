"""The benchmark runs and finds the same tokens both ways. What it says of speed is not for tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_bundled import bundled  # noqa: F401 (a fixture)

SCRIPT = Path(__file__).parent.parent / "bench/speed.py"


@pytest.mark.slow
def test_speed(bundled: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "speed.json"
    options = ["--limit", "2", "--max-new-tokens", "24", "--controllers", "beta-ts fixed:k=2", "--tree-widths", "1 2"]
    command = [sys.executable, str(SCRIPT), "--engine-dir", str(bundled), "--json", str(out), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    results = json.loads(out.read_text())["results"]
    assert len(results) == 8  # two controllers, two widths, two temperatures
    assert all(found["equal"] == found["prompts"] == 2 for found in results)
    assert result.stdout.count("| beta-ts |") == 4
