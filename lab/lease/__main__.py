"""Checks for a GPU that is available for minutes. The most informative steps run first. Each step
runs in a separate process.

    python3 -m lab.lease --minutes 9 --output DIR        # the same command again continues

It runs from a checkout, and this project need not be installed. It needs torch for the GPU, onnx,
onnxruntime, transformers, tokenizers, numpy and click. The server also needs fastapi, uvicorn and
prometheus_client. DIR/lease.jsonl gets a JSON line for each step when it ends, even if it hung,
crashed or ran out of memory. ``--device cpu`` rehearses all steps with small shapes.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = (str(ROOT / "src"), str(ROOT / "tests"), str(ROOT))
"""From here, the steps import eesd, the support modules of the tests, and the lab."""
LEAST_SECONDS = 5
"""A step begins only if at least this much time remains."""
TAIL = 1500
"""Number of characters of a failed step's output that are kept in its line."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9, help="Time for all steps.")
    parser.add_argument("--output", type=Path, required=True, help="Directory of the results.")
    parser.add_argument("--device", default="cuda", help="Torch device; cpu rehearses.")
    parser.add_argument("--only", nargs="*", help="Names of steps.")
    parser.add_argument(
        "--again", action="store_true", help="Also run steps that have a line already."
    )
    parser.add_argument("--steps", default="lab.lease.steps", help="Module that has STEPS.")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = PATHS
    steps: Mapping[str, Any] = importlib.import_module(options.steps).STEPS
    options.output.mkdir(parents=True, exist_ok=True)
    if options.run:
        found = steps[options.run].run(
            importlib.import_module("lab.lease").Lease(options.device, options.output)
        )
        (options.output / f"{options.run}.json").write_text(json.dumps(found))
        return
    run_all(steps, options, time.monotonic() + 60 * options.minutes)


def run_all(steps: Mapping[str, Any], options: argparse.Namespace, end: float) -> None:
    """Run the steps that have no line yet until the time is up."""
    path = options.output / "lease.jsonl"
    done = (
        set()
        if options.again or not path.exists()
        else {json.loads(line)["step"] for line in path.open() if line.strip()}
    )
    for name in options.only or steps:
        left = end - time.monotonic()
        if name in done or left < LEAST_SECONDS:
            continue
        line = {
            "step": name,
            "device": options.device,
            **run_step(name, min(steps[name].seconds, left), options),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            os.fsync(file.fileno())
        print(f"{name}: {line['status']}, {line['seconds']} s", flush=True)


def run_step(name: str, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one step in a separate process. Returns its status, its seconds, and its result or the
    end of its output."""
    own = (
        "--run",
        name,
        "--output",
        options.output,
        "--device",
        options.device,
        "--steps",
        options.steps,
    )
    result = options.output / f"{name}.json"
    log = options.output / f"{name}.log"
    result.unlink(missing_ok=True)
    path = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.lease", *map(str, own)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        status = wait(process, limit)
    line: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if status == "ok" and result.exists():
        return line | {"found": json.loads(result.read_text())}
    return line | {"error": log.read_text(errors="replace")[-TAIL:]}


def wait(process: "subprocess.Popen[bytes]", limit: float) -> str:
    """Wait for a process. At the time limit, kill it and its children. Returns its status."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"hung: ended after {limit:.0f} s"
    if code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    return "ok" if code == 0 else "failed"


if __name__ == "__main__":
    main()
