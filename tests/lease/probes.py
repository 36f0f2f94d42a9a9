"""Tests of the project that need a GPU, a profile of one round, and NVIDIA's checker of memory."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from lease import Lease
from lease.equality import exported

TESTS = Path(__file__).resolve().parents[1]
FILES = ("engines/test_gpu.py", "engines/test_device_sampler.py", "engines/test_device_rejection.py")


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


def profile(lease: Lease) -> dict[str, Any]:
    """The kernels of a round of four drafts that take the most time, of the bundled model; and the time line as a file."""
    import eesd
    from eesd.runtime.llm import Speculation

    llm = eesd.load(exported(lease, "float16"), "torch", speculation=Speculation("fixed:k=4", guard=False))
    llm.generate("def main(", max_new_tokens=32, ignore_eos=True)
    on_gpu = lease.on_gpu
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])]) as found:
        llm.generate("def main(", max_new_tokens=16, ignore_eos=True)
    found.export_chrome_trace(str(lease.output / "round-trace.json"))
    most = sorted(found.key_averages(), key=lambda e: -(e.self_device_time_total if on_gpu else e.self_cpu_time_total))[:12]
    return {"most time": [[e.key[:80], e.count, e.self_device_time_total, e.self_cpu_time_total] for e in most]}


def memory_checker(lease: Lease) -> dict[str, Any]:
    """compute-sanitizer's memcheck of a short text of the bundled model."""
    found = shutil.which("compute-sanitizer")
    if found is None or not lease.on_gpu:
        return {"skipped": "there is no compute-sanitizer" if found is None else "it needs a GPU"}
    run = [sys.executable, "-m", "eesd.runtime.cli", "--engine-dir", str(exported(lease, "float16")), "--backend", "torch"]
    done = subprocess.run([found, "--tool", "memcheck", *run, "-p", "def", "-n", "4"], capture_output=True, text=True)
    return {"exit code": done.returncode, "errors": re.findall(r"ERROR SUMMARY: .*", done.stdout), "end": done.stdout[-800:]}
