"""A failed export leaves nothing behind, and keeps the previous export."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from click.testing import Result
from support.command import assert_one_line, assert_refused, contents, listing, run

from eesd.export import engine_dir, weights
from eesd.export.cli import main as export_main
from eesd.runtime.engines import ort_engine

EXPORT = [sys.executable, "-m", "eesd.export.cli"]


class Failure(NamedTuple):
    """Function ``name`` of ``owner`` raises ``error`` on its ``call``-th call."""

    owner: Any
    name: str
    call: int
    error: BaseException

    def arrange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(self.owner, self.name)
        calls = 0

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.call:
                raise self.error
            return original(*args, **kwargs)

        monkeypatch.setattr(self.owner, self.name, failing)


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES = [
    Failure(weights, "_bytes_of", 1, FULL),
    Failure(weights, "_bytes_of", 7, FULL),
    Failure(weights, "_bytes_of", 7, KeyboardInterrupt()),
    Failure(os, "fsync", 1, FULL),
    Failure(onnx, "save", 2, FULL),
    Failure(engine_dir, "file_info", 2, KeyboardInterrupt()),
    Failure(Path, "write_bytes", 1, FULL),
    Failure(Path, "write_text", 1, FULL),
    Failure(ort_engine.OrtEngine, "forward", 2, KeyboardInterrupt()),
]


def export_to(output: Path, model: Path | str, *options: object) -> Result:
    return run(export_main, "--model", model, "-o", output, "--exit-layer", 1, *options)


def assert_failed(result: Result, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        assert result.exit_code == 130
        return
    assert_refused(result, "error: No space left on device")


@pytest.mark.parametrize(
    "failure", FAILURES, ids=lambda f: f"{f.name}-{f.call}-{type(f.error).__name__}"
)
def test_failure_leaves_nothing_behind(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    failure.arrange(monkeypatch)
    assert_failed(export_to(tmp_path / "plans", text_model), failure.error)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("failure", FAILURES[1:3], ids=lambda f: type(f.error).__name__)
def test_failure_keeps_the_previous_export(
    text_model: Path, engine_copy: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    before = contents(engine_copy.parent)
    failure.arrange(monkeypatch)
    assert_failed(export_to(engine_copy, text_model, "--dtype", "float16"), failure.error)
    assert contents(engine_copy.parent) == before and listing(engine_copy.parent) == ["plans"]


@pytest.mark.parametrize("call", [1, 2])
def test_failure_while_replacing_restores_the_previous_export(
    text_model: Path, engine_copy: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The first rename moves the previous export aside; the second one puts the new export in its
    place."""
    before = contents(engine_copy.parent)
    Failure(Path, "rename", call, FULL).arrange(monkeypatch)
    assert_failed(export_to(engine_copy, text_model, "--dtype", "float16"), FULL)
    assert contents(engine_copy.parent) == before and listing(engine_copy.parent) == ["plans"]


def test_file_size_limit_leaves_nothing_behind(text_model: Path, tmp_path: Path) -> None:
    """The operating system refuses to extend the file of weights."""
    command = [
        *EXPORT,
        "--model",
        str(text_model),
        "--exit-layer",
        "1",
        "-o",
        str(tmp_path / "plans"),
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 2
    assert_one_line(done.stderr, "File too large")
    assert listing(tmp_path) == []


def test_export_stopped_by_sigterm_leaves_nothing_behind(text_model: Path, tmp_path: Path) -> None:
    """``timeout`` and ``docker stop`` send SIGTERM."""
    slow = (
        "import time, eesd.export.weights as w; f = w._bytes_of; w._bytes_of = lambda *a: "
        "(time.sleep(0.5), f(*a))[1]"
    )
    command = f"{slow}; from eesd.export.cli import main; main()"
    options = ["--model", str(text_model), "--exit-layer", "1", "-o", str(tmp_path / "plans")]
    process = subprocess.Popen([sys.executable, "-c", command, *options], stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".plans.*.new/weights.bin")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert listing(tmp_path) == []


def test_export_to_a_full_disk_is_refused(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12 - 10**6, 10**6)
    )
    result = export_to(tmp_path / "new" / "plans", text_model)
    assert_refused(result, "needs 0.1 GB", "0.0 GB free", "free some space")
    assert listing(tmp_path) == []


@pytest.mark.parametrize("wrong", [1.0, np.nan])
def test_export_with_wrong_graphs_is_not_published(
    text_model: Path, engine_copy: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    original = ort_engine._run_stage
    before = contents(engine_copy.parent)

    def run_wrong(*given: Any) -> list[Any]:
        return [value + np.float32(wrong) for value in original(*given)]

    monkeypatch.setattr(ort_engine, "_run_stage", run_wrong)
    for output in (engine_copy, engine_copy.parent / "new"):
        result = export_to(output, text_model)
        assert_refused(result, "verify and draft graph", "please report")
    assert contents(engine_copy.parent) == before and listing(engine_copy.parent) == ["plans"]
