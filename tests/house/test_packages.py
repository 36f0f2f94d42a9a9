"""Tests of combinations of packages that ``pip`` may have installed. ONNX Runtime may be there for
the CPU, for GPUs or for both, or the installation may be damaged. TensorRT has several variants."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime
import pytest
from support import fake_tensorrt as fake
from support.command import assert_refused, run, succeed
from support.without_operators import without_operators

import eesd
from eesd.common import machine, machine_report
from eesd.export.build import main as build_main
from eesd.export.cli import main as export_main
from eesd.runtime import doctor
from eesd.runtime.cli import main
from eesd.runtime.engines import backends
from eesd.runtime.engines.trt_plans import FLAVOURS, library_version
from eesd.serve.cli import main as serve_main

AGAIN = ("--force-reinstall", "--no-deps", "--no-cache-dir")
GPU_ROWS = ("run plans on a GPU (tensorrt)", "run plans on a GPU (tensorrt-rtx)")


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ``onnxruntime-gpu`` and ``onnxruntime`` are installed."""
    record = tmp_path / "onnxruntime_gpu-1.30.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.30.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def jobs() -> dict[str, str]:
    found: dict[str, str] = json.loads(succeed(doctor.main, "--json").stdout)["jobs"]
    return found


@pytest.mark.usefixtures("both")
def test_two_packages_of_onnx_runtime_are_refused_with_the_remedy(engine: Path) -> None:
    """The packages overwrite each other's files, so the order of installation decides which package
    runs."""
    words = (
        "onnxruntime-gpu 1.30.0 are both installed",
        "pip uninstall -y onnxruntime onnxruntime-gpu; pip install",
    )
    assert_refused(run(main, "--engine-dir", engine, "-p", "hello"), *words)
    assert_refused(run(main, "--engine-dir", engine, "-p", "hello", "--backend", "ort"), *words)
    succeed(main, "--engine-dir", engine, "-p", "hello", "--backend", "torch", "-n", 2)
    found = jobs()
    for row in ("run on the CPU (ort)", "run on a GPU (ort)"):
        assert found[row].startswith("no: ") and all(word in found[row] for word in words)
    assert found["run on the CPU (torch)"].startswith("yes")
    facts = json.loads(succeed(doctor.main, "--json").stdout)
    assert facts["packages"]["onnxruntime"].endswith(", 1.30.0 of onnxruntime-gpu")


def test_what_is_left_of_two_packages_is_refused(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one package is removed, the files of both packages are removed."""
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    result = run(main, "--engine-dir", engine, "-p", "hello")
    assert_refused(
        result, "onnxruntime cannot be loaded", "pip install --force-reinstall onnxruntime"
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert_refused(run(main, "--engine-dir", engine, "-p", "hello"), "onnxruntime cannot be loaded")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a GPU of compute capability 9.0, and both flavours of TensorRT."""
    for flavour, name in FLAVOURS.items():
        monkeypatch.setitem(sys.modules, name, fake.module(flavour))
    monkeypatch.setattr(machine, "nvidia_driver", lambda: True)
    monkeypatch.setattr(machine, "torch_sees_gpu", lambda: True)
    monkeypatch.setattr(machine_report, "compute_capability", lambda: "9.0")


@pytest.mark.usefixtures("gpu")
def test_the_doctor_looks_at_each_backend_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = jobs()
    assert found["run on a GPU (torch)"].startswith("yes")
    assert found["run on a GPU (ort)"] == (
        "no: the installed ONNX Runtime is for the CPU; "
        "pip uninstall -y onnxruntime onnxruntime-gpu; pip install onnxruntime-gpu"
    )
    assert [found[row] for row in GPU_ROWS] == [
        "yes",
        "no: it has no kernels for compute capability 9.0; use tensorrt",
    ]
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(machine_report, "compute_capability", lambda: "8.9")
    found = jobs()
    assert found["run on a GPU (ort)"].startswith("yes") and [found[row] for row in GPU_ROWS] == [
        "yes",
        "yes",
    ]


@pytest.mark.usefixtures("gpu")
def test_a_library_that_cannot_be_loaded_is_not_a_missing_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "tensorrt", Broken("tensorrt"))
    row = jobs()["run plans on a GPU (tensorrt)"]
    assert (
        "cannot be loaded: libnvinfer.so.10" in row
        and "pip install --force-reinstall tensorrt" in row
    )


@pytest.mark.usefixtures("gpu")
def test_the_version_is_that_of_the_module() -> None:
    """The package ``tensorrt`` does not exist if only ``tensorrt-cu12`` is installed."""
    assert library_version("tensorrt") == fake.VERSION and machine.installed("tensorrt") is None


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("file:///home/me/a%20checkout", "pip install '/home/me/a checkout[export]'"),
        ("file:///tmp/eesd-1.whl", "pip install '/tmp/eesd-1.whl[export]'"),
        ("https://x.org/eesd-1.whl", "pip install 'eesd[export] @ https://x.org/eesd-1.whl'"),
        (None, "pip install 'eesd[export]' (from the index or the directory that eesd came from)"),
    ],
)
def test_what_is_missing_is_installed_from_where_eesd_came(
    url: str | None, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A package index may lack the name, or have another project under it."""
    checkout = Path(__file__).parents[2]
    assert machine.pip_install("export") == f"pip install -e '{checkout}[export]'"
    found = tmp_path / "lib" / "site-packages"
    (found / "eesd-1.dist-info").mkdir(parents=True)
    (found / "eesd-1.dist-info" / "METADATA").write_text("Name: eesd\nVersion: 1\n")
    if url is not None:
        (found / "eesd-1.dist-info" / "direct_url.json").write_text(json.dumps({"url": url}))
    monkeypatch.syspath_prepend(found)
    monkeypatch.setattr(eesd, "__file__", str(found / "eesd" / "__init__.py"))
    assert machine.pip_install("export") == command


def test_without_a_compiler_every_door_says_what_to_do(
    text_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with without_operators():
        remedy = f"C++ compiler (g++ or clang++), and then run: {machine.pip_install('', *AGAIN)}"
        options = ("--exit-layer", 1, "--no-check", "--dtype", "bfloat16")
        said = succeed(export_main, "--model", text_model, "-o", tmp_path, *options).stdout
        assert "not built for the CPU: The operators" in said and remedy in said
        run_it = ("--engine-dir", tmp_path, "-p", "hello", "-n", 2)
        succeed(main, *run_it)
        assert "torch runs the bfloat16 engines" in caplog.text and remedy in caplog.text
        refused = ((build_main, tmp_path, "--target", "cpu"), (main, *run_it, "--backend", "ort"))
        for command, *arguments in refused:
            assert_refused(run(command, *arguments), remedy)
        monkeypatch.setattr(backends, "installed", lambda _: None)
        doors = ((main, *run_it), (serve_main, *run_it[:2], "--port", 0))
        for command, *arguments in doors:
            words = (remedy, "bfloat16 engines", machine.pip_install("torch"))
            assert_refused(run(command, *arguments), *words)
        found = jobs()
        assert found["run on the CPU (ort)"] == "yes, but float32 engines alone, and slowly"
        assert remedy in found["own operators"]
