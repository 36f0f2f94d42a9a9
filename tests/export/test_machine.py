"""Tests of the probes of the machine. A stand-in replaces ``nvidia-smi``."""

import os
import sys
from pathlib import Path

import pytest
import torch

from eesd.common import machine_report

pytestmark = pytest.mark.fast

TWO_GPUS = "echo '0, GPU-aa11, 9.0'; echo '1, GPU-bb22, 8.9'"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``nvidia-smi`` that lists two GPUs."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{TWO_GPUS}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delitem(sys.modules, "torch")
    return script


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "9.0"),
        ("0,1", "9.0"),
        ("1", "8.9"),
        ("1,0", "8.9"),
        ("GPU-b", "8.9"),
        ("MIG-7", "9.0"),
        ("", None),
        ("-1", None),
    ],
)
def test_the_gpu_is_the_first_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: str | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_report.compute_capability() == found


@pytest.mark.usefixtures("driver")
def test_torch_is_asked_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lists the GPUs in the order in which CUDA numbers them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (12, 0)}[device])
    assert machine_report.compute_capability() == "9.0"
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert machine_report.compute_capability() == "12.0"


def test_a_driver_without_gpus_has_no_compute_capability(driver: Path) -> None:
    driver.write_text("#!/bin/sh\necho No devices were found\n")
    assert machine_report.compute_capability() is None
