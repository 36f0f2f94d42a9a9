"""Runs commands and tests of the project on a GPU, and NVIDIA's memory and race checkers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.lease import Lease
from lab.lease.equality import MODEL, PROMPTS, exported

TESTS = Path(__file__).resolve().parents[2] / "tests"
FILES = ("engines/test_gpu.py", "engines/test_device_sampler.py")


def commands(lease: Lease) -> dict[str, Any]:
    """Run an export, and generate texts with and without drafts, as in the README."""
    directory = lease.output / "commands"
    command("eesd.export.cli", "--model", MODEL, "--dtype", "bfloat16", "-o", directory)
    options = (
        "--backend",
        "torch",
        "-p",
        PROMPTS[0],
        "-n",
        120 if lease.on_gpu else 8,
        "--compare",
    )
    return {"shown": command("eesd.runtime.cli", "--engine-dir", directory, *options).splitlines()}


def tests(lease: Lease) -> dict[str, Any]:
    """Run the GPU tests of torch. On a GPU, also run the tests of token choices on the device. The
    step fails if a test fails."""
    files = [TESTS / name for name in (FILES if lease.on_gpu else FILES[:1])]
    shown = command(
        "pytest", "-q", "-p", "no:cacheprovider", "-k", "not ort and not tensorrt", *files
    )
    return {"result": shown.splitlines()[-1]}


def command(module: str, *arguments: object) -> str:
    """Return the output of a command of the project. Raises an error with the command's message."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{module}: {(done.stdout + done.stderr)[-1200:]}")
    return done.stdout + done.stderr


def checker(tool: str, lease: Lease) -> dict[str, Any]:
    """Run a tool of compute-sanitizer over a short text of the bundled model."""
    found = shutil.which("compute-sanitizer")
    if found is None or not lease.on_gpu:
        return {"skipped": "there is no compute-sanitizer" if found is None else "it needs a GPU"}
    run = [
        sys.executable,
        "-m",
        "eesd.runtime.cli",
        "--engine-dir",
        str(exported(lease, "float16")),
        "--backend",
        "torch",
    ]
    done = subprocess.run(
        [found, "--tool", tool, *run, "-p", "def", "-n", "4"], capture_output=True, text=True
    )
    return {
        "exit code": done.returncode,
        "errors": re.findall(r".* SUMMARY: .*", done.stdout),
        "end": done.stdout[-800:],
    }
