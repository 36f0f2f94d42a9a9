"""What fresh processes take: the figures fit the engine directory, on every Linux."""

import json
import subprocess
import sys

import pytest
from support.command import assert_refused, run, succeed
from support.harness import Harness
from support.without_operators import needs_operators

from eesd.bench.tools.fresh import Footprint, main
from eesd.common.manifest_reader import load_manifest
from eesd.export.cpu.build import build_for_cpu

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@needs_operators()
def test_weights_and_cache_of_a_process_are_told_apart(harness: Harness) -> None:
    manifest = load_manifest(harness.directory)
    packed = sum(file.stat().st_size for file in build_for_cpu(harness.directory, manifest).iterdir())
    command = [sys.executable, "-m", "eesd.bench.tools.fresh", str(harness.directory), "--repeats", "0", "--tokens", "8"]

    def measured(prompt: int) -> Footprint:
        done = subprocess.run([*command, "--prompt", str(prompt)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return Footprint(**json.loads(done.stdout))

    short, long = measured(20), measured(320)
    for found in (short, long):
        assert 0 < found.weights <= packed + (1 << 16) and found.load > 0
        assert found.rest > 1 << 20 and found.besides == found.rest + found.libraries
    geometry = manifest.geometry
    written = 300 * 8 * manifest.num_caches * geometry.num_kv_heads * geometry.head_dim
    assert long.cache - short.cache > written / 2, "the cache's pages are counted elsewhere"


def test_medians_of_processes_are_shown(harness: Harness) -> None:
    shown = succeed(main, harness.directory, "--prompt", 9, "--tokens", 4, "--repeats", 1).stdout
    assert [line.split(", ")[0] for line in shown.splitlines() if ", " in line] == [
        "imports",
        "load",
        "weights",
        "KV cache",
        "libraries",
        "own memory",
        "besides weights and KV cache",
    ]
    assert_refused(run(main, harness.directory / "none", "--repeats", 1), "none")
