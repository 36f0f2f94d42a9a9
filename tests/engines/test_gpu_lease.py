"""Tests that rehearse ``lab.lease`` on the CPU. They check its requirements, how its steps end, and
that it continues after a stop."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.no_torch import BLOCK

from lab.lease.steps import STEPS
from lab.lease.whole import CLIENTS

ROOT = Path(__file__).parent.parent.parent
MISSING = re.sub(
    r"blocked = \{.*?\}",
    'blocked = {"gguf", "tensorrt", "tensorrt_rtx", "eesd_tensorrt"}',
    BLOCK,
    flags=re.S,
)
MISSING += """
import importlib.util

found = importlib.util.find_spec

def find_spec(name, *of):
    return None if name.partition(".")[0] in Blocker.blocked else found(name, *of)

importlib.util.find_spec = find_spec
"""
BAD = """
import os
import time

from lab.lease import Step


def hangs(lease):
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (lease.output / "child").write_text(str(child.pid))
    time.sleep(600)


def crashes(lease):
    os.abort()


def runs_out(lease):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


def works(lease):
    with (lease.output / "count").open("a") as file:
        file.write("x")
    return {"device": lease.device}


STEPS = {
    "hangs": Step(hangs, 6),
    "crashes": Step(crashes, 60),
    "runs out": Step(runs_out, 60),
    "works": Step(works, 60),
}
"""


def lease(output: Path, *options: object, **environment: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "lab.lease", "--output", output, "--device", "cpu", *options]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    path = output / "lease.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_steps_that_hang_crash_or_run_out_of_memory_do_not_end_it(tmp_path: Path) -> None:
    (tmp_path / "bad_steps.py").write_text(BAD)
    steps = ("--steps", "bad_steps")
    output = tmp_path / "out"
    lines = lease(output, *steps, PYTHONPATH=str(tmp_path))
    assert [line["status"] for line in lines] == [
        "hung: ended after 6 s",
        "crashed: SIGABRT",
        "failed",
        "ok",
    ]
    assert "Tried to allocate 9 GiB" in lines[2]["error"] and lines[3]["found"] == {"device": "cpu"}
    state = Path(f"/proc/{(output / 'child').read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", (
        "what a step started ends with it"
    )
    assert lease(output, *steps, PYTHONPATH=str(tmp_path)) == lines, "all of it was done"
    again = lease(output, *steps, "--again", "--only", "works", PYTHONPATH=str(tmp_path))
    assert len(again) == 5 and (output / "count").read_text() == "xx"
    assert lease(tmp_path / "late", *steps, "--minutes", 0.05, PYTHONPATH=str(tmp_path)) == []


@pytest.mark.slow
def test_all_steps_run_on_a_bare_machine(tmp_path: Path) -> None:
    """The machine has neither gguf nor TensorRT, and no installed package of this project."""
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    # torch's AMX products add in a different order in longer calls, so different tokens would not
    # be a fault.
    lines = lease(
        tmp_path / "out",
        "--minutes",
        30,
        PYTHONPATH=str(tmp_path),
        ONEDNN_MAX_CPU_ISA="AVX512_CORE",
    )
    wrong = {line["step"]: line.get("error") for line in lines if line["status"] != "ok"}
    assert not wrong and [line["step"] for line in lines] == list(STEPS)
    found = {line["step"]: line["found"] for line in lines}
    assert "gguf" not in found["machine"]["packages"] and "torch" in found["machine"]
    products = found["quantized products"]
    assert products.get("wrong", []) == products.get("rows depend on each other", []) == []
    for clients in CLIENTS:  # the step itself compares their tokens
        for seen in map(found[f"served, {clients} clients"].__getitem__, ("plain", "drafting")):
            assert 0 < seen["seconds to the first token"] < 8 * clients / seen["tokens a second"]
    assert (
        found["one pass"]["same most likely tokens"]
        and found["one pass"]["graphs have the bits of eager calls"]
    )
    assert all(
        found["tokens in float16"][way]["differ"] == 0
        for way in ("chain", "tree", "sampled", "long text")
    )
