"""The script for the first hour on a GPU (gpu_first_hour.sh), as far as it runs without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "gpu_first_hour.sh"


def run_script(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path} | environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_it_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    found = run_script(tmp_path, tmp_path / "page.md", GPU="yes")
    assert found.returncode == 2 and "There is no NVIDIA GPU here" in found.stderr and not (tmp_path / "page.md").exists()


@pytest.mark.slow
def test_its_commands_run_and_its_page_shows_what_failed(tmp_path: Path) -> None:
    """Without a GPU, torch runs what plans would; the plans are built all the same."""
    model = shutil.copytree(SCRIPT.parents[1] / "examples/pycode/model", tmp_path / "model")
    found = run_script(model, tmp_path / "page.md", GPU="no")
    page = (tmp_path / "page.md").read_text()
    assert found.returncode == 0, found.stderr + page
    assert page.endswith("## Failed\n\nnothing\n") and page.count("exit code 0") == page.count("exit code") > 8
    assert "tokens are equal (24)" in page and "tokens differ" not in page

    next(model.glob("*.safetensors")).unlink()
    found = run_script(model, tmp_path / "page.md", GPU="no")
    assert found.returncode == 1 and "* Export, 1 stages" in (tmp_path / "page.md").read_text()
