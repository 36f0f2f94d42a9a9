"""Tests of the project that need a GPU, and NVIDIA's checkers of memory and of races."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lease import Lease
from lease.equality import exported

TESTS = Path(__file__).resolve().parents[1]
FILES = ("engines/test_gpu.py", "engines/test_device_sampler.py")


def tests(lease: Lease) -> dict[str, Any]:
    """Tests for GPUs with torch, and on a GPU those of choices on the device. They fail the step if one fails."""
    report, choice = lease.output / "tests.xml", ["-k", "not ort and not tensorrt"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *choice]
    files = [str(TESTS / name) for name in (FILES if lease.on_gpu else FILES[:1])]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-1000:])
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    return counts | {
        "failed": [case.attrib["name"] for case in suite if any(part.tag in ("failure", "error") for part in case)]
    }


def checker(tool: str, lease: Lease) -> dict[str, Any]:
    """A tool of compute-sanitizer over a short text of the bundled model."""
    found = shutil.which("compute-sanitizer")
    if found is None or not lease.on_gpu:
        return {"skipped": "there is no compute-sanitizer" if found is None else "it needs a GPU"}
    run = [sys.executable, "-m", "eesd.runtime.cli", "--engine-dir", str(exported(lease, "float16")), "--backend", "torch"]
    done = subprocess.run([found, "--tool", tool, *run, "-p", "def", "-n", "4"], capture_output=True, text=True)
    return {"exit code": done.returncode, "errors": re.findall(r".* SUMMARY: .*", done.stdout), "end": done.stdout[-800:]}
