"""Tests that ``eesd-export`` refuses unusable models, exit heads, options and outputs in one line,
before it writes anything. If it fails later, it leaves no files behind, and keeps the previous
export."""

import errno
import json
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
from safetensors.torch import load_file, save_file
from support.command import (
    assert_one_line,
    assert_refused,
    contents,
    export_engine,
    listing,
    run,
    succeed,
)
from support.engine_dirs import trained_head
from support.without_operators import needs_operators, without_operators

from eesd.common.manifest import load_manifest
from eesd.export import engine_dir, weights
from eesd.export.cli import main as export_main
from eesd.export.cpu import build as cpu_build
from eesd.export.cpu.build import build_for_cpu
from eesd.export.inspect import main as inspect_main
from eesd.runtime.engines import ort_engine

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the test may damage, outside ``tmp_path``."""
    return shutil.copytree(text_model, tmp_path_factory.mktemp("damaged") / "model")


def export_to(output: Path, model: Path | str, *options: object) -> Result:
    return run(export_main, "--model", model, "-o", output, "--exit-layer", 1, *options)


def test_damaged_and_unsuitable_models_are_refused(model: Path, tmp_path: Path) -> None:
    """``tests/model/test_checkpoint.py`` has the kinds of damage."""
    tensors = load_file(model / WEIGHTS)
    config = json.loads((model / "config.json").read_text())
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 10)
    assert_refused(export_to(tmp_path / "plans", model), WEIGHTS, "truncated", "fetch")
    save_file({name: tensor.double() for name, tensor in tensors.items()}, model / WEIGHTS)
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    assert_refused(
        export_to(tmp_path / "plans", model),
        "float64 cannot be exported",
        "--dtype float32|float16|bfloat16",
    )
    assert listing(tmp_path) == []


@pytest.mark.parametrize("name", ["llama-9000b", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_unknown_model_name_is_refused(tmp_path: Path, name: str) -> None:
    assert_refused(
        export_to(tmp_path / "plans", name),
        name,
        "neither a directory nor a Hugging Face id",
        "llama-70b",
    )


def test_model_that_is_a_file_is_refused(text_model: Path, tmp_path: Path) -> None:
    for path in (text_model / WEIGHTS, text_model / WEIGHTS / "model"):
        assert_refused(export_to(tmp_path / "plans", path), str(path), "neither a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_model_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "config.json").chmod(0)
    assert_refused(export_to(tmp_path / "plans", model), "Permission denied", "config.json")


@pytest.mark.parametrize("name", ["llama-70b", "nobody/nothing"])
def test_model_that_is_not_in_the_cache_is_refused_offline(tmp_path: Path, name: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "eesd.export.cli",
        "--model",
        name,
        "--exit-layer",
        "4",
        "-o",
        str(tmp_path / "plans"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert_one_line(done.stderr, "/", "not in the local cache", "local directory of the model")


def test_a_head_is_found_in_the_hubs_cache(text_model: Path, tmp_path: Path) -> None:
    """The cache has huggingface_hub's layout. A head that is not in the cache is refused."""
    snapshot = tmp_path / "cache/hub/models--somebody--head/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "exit_head.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(snapshot.name)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "eesd.export.cli",
        "--model",
        str(text_model),
        "-o",
        str(tmp_path / "plans"),
    ]
    for name, words in (
        ("somebody/head", ("0" * 40, "exit head")),
        ("nobody/head", ("local directory of the exit head",)),
    ):
        done = subprocess.run(
            [*command, "--exit-head", name], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2 and not done.stdout
        assert_one_line(done.stderr, *words)


def test_half_of_a_head_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "exit_head.safetensors").touch()
    result = run(export_main, "--model", model, "-o", tmp_path / "plans")
    assert_refused(result, "exit_head.json is missing", "remove exit_head.safetensors")


def test_an_exit_layer_that_is_not_the_heads_is_refused(text_model: Path, tmp_path: Path) -> None:
    """``tests/model/test_heads.py`` has other heads that do not fit."""
    head = trained_head(text_model, tmp_path / "head", 1, False, layer=2)
    result = export_to(tmp_path / "plans", text_model, "--exit-head", head)
    assert_refused(result, "exit after layer 2", "--exit-layer is 1")
    assert listing(tmp_path) == ["head"]


def test_cache_lengths_that_do_not_fit_are_refused(text_model: Path, tmp_path: Path) -> None:
    for options, words in (
        (("--max-seq-len", 513), ("513", "512 positions")),
        (("--max-seq-len", 32), ("32 does not fit",)),
    ):
        result = export_to(tmp_path / "plans", text_model, *options)
        assert_refused(result, *words)


def test_output_that_is_a_file_is_refused(text_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for output in (file, file / "plans", file / "new" / "plans"):
        assert_refused(export_to(output, text_model), f"{file} is a file", "another --output")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_directory_of_another_program_is_not_replaced(
    text_model: Path, tmp_path: Path, name: str
) -> None:
    """Other programs also have a manifest.json."""
    (tmp_path / name).write_text('{"format_version": 1, "name": "a web app"}')
    assert_refused(
        export_to(tmp_path, text_model), "is not an engine directory", "another --output"
    )
    assert listing(tmp_path) == [name]


def test_engine_directory_of_any_version_is_replaced_with_its_plans(
    text_model: Path, engine_copy: Path
) -> None:
    for name in ("draft.plan", "draft.plan.onnx", "draft.kernels", "timing.cache"):
        (engine_copy / name).write_bytes(b"built from the last export")
    manifest = json.loads((engine_copy / "manifest.json").read_text())
    (engine_copy / "manifest.json").write_text(json.dumps(manifest | {"format_version": 0}))
    export_engine(text_model, engine_copy, "--dtype", "bfloat16")
    assert json.loads((engine_copy / "manifest.json").read_text())["dtype"] == "bfloat16"
    assert not {"draft.plan", "draft.plan.onnx", "draft.kernels", "timing.cache"} & set(
        listing(engine_copy)
    )
    assert listing(engine_copy.parent) == ["plans"]


@needs_operators()
def test_packed_weights_are_part_of_the_directory(text_model: Path, engine_copy: Path) -> None:
    """Packed weights are deleted with their export, and a check of the files ignores them."""
    manifest = load_manifest(engine_copy)
    (packed,) = engine_copy.glob("cpu-*")
    assert build_for_cpu(engine_copy, manifest) == packed
    assert "all files are as exported" in succeed(inspect_main, engine_copy, "--verify").stdout
    export_engine(text_model, engine_copy, "--dtype", "bfloat16")
    (other,) = engine_copy.glob("cpu-*")
    assert (
        other.name != packed.name
        and build_for_cpu(engine_copy, load_manifest(engine_copy)) == other
    )
    export_engine(text_model, engine_copy, "--no-pack")
    assert not list(engine_copy.glob("cpu-*")) and listing(engine_copy.parent) == ["plans"]


@needs_operators()
def test_weights_that_cannot_be_packed_do_not_fail_the_export(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpu_build, "_write", full)
    arguments = ("--model", text_model, "--exit-layer", 1, "-o", tmp_path / "plans", "--no-check")
    result = succeed(export_main, *arguments)
    (line,) = [line for line in result.stdout.splitlines() if "not built for the CPU" in line]
    assert "No space left" in line and not list((tmp_path / "plans").glob("*cpu-*"))


def test_nothing_is_packed_where_the_operators_are_missing(
    text_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", text_model, "--exit-layer", 1, "-o", tmp_path / "plans", "--no-check")
    with without_operators():
        assert "not built for the CPU" in succeed(export_main, *arguments, "--pack").stdout
        assert "not built for the CPU" in succeed(export_main, *arguments).stdout
    assert not list((tmp_path / "plans").glob("cpu-*"))


def test_output_may_be_a_link_to_an_empty_directory(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    succeed(export_main, "--model", text_model, "-o", tmp_path / "link", "--exit-layer", 1)
    assert (tmp_path / "link").is_symlink() and "manifest.json" in listing(tmp_path / "real")


EXPORT = [sys.executable, "-m", "eesd.export.cli"]


class Failure(NamedTuple):
    """Make function ``name`` of ``owner`` raise ``error`` on its ``call``-th call."""

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
    """The first rename moves the previous export aside. The second rename puts the new export in
    its place."""
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
