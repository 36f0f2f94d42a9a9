"""bench/shapes.py runs on every CPU backend. The tests do not check speeds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import listing, succeed

from eesd.bench.shapes import NODE_COUNTS, main
from eesd.common.manifest_reader import load_manifest
from eesd.export.predict import bytes_of_pass

SCRIPT = Path(__file__).parent.parent / "bench/shapes.py"


def measured(backend: str, work: Path) -> dict[str, Any]:
    """What shapes.py measures with this backend. Both backends share one export."""
    file = work / f"{backend}.json"
    options = ("--backend", backend, "--dtype", "float32", "--work", work, "--threads", 1, "--repeats", 3, "--json", file)
    assert "| verify 64 |" in succeed(main, "--shape", "tiny", *options).stdout
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_a_tiny_shape_is_exported_and_measured_on_both_backends(tmp_path: Path) -> None:
    for backend in ("ort", "torch"):
        found = measured(backend, tmp_path)
        assert [row["nodes"] for row in found["passes"]["verify"]] == list(NODE_COUNTS)
        times = [row["seconds"] for row in found["passes"]["verify"]] + [
            found["passes"]["draft"]["seconds"],
            found["bandwidth"],
        ]
        assert min(times) > 0 and 0 < found["round"]["host_share"] < 1
    assert listing(tmp_path) == ["ort.json", "tiny-float32", "torch.json"]  # the checkpoint is deleted

    manifest = load_manifest(tmp_path / "tiny-float32")
    verify = bytes_of_pass(manifest, manifest.verify[0], 0)
    blocks = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64)
    projections = 64 * 32 * 2  # of keys and values in the exit block, in 4 bits with a scale and a zero point for 32
    exits = projections // 2 + projections // 32 * 4 + projections // 32 // 2 + 4 * 64  # and the norm before them
    assert verify == 4 * (blocks + 64 + 64 * 256) + exits
    assert bytes_of_pass(manifest, manifest.verify[0], 10) - verify == 10 * 2 * 5 * 2 * 16 * 4


def test_shapes_runs_as_a_script() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "--shape" in result.stdout, result.stderr
