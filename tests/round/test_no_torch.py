"""Tests that everything except exporting works without torch and without the packages for
exporting."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import assert_one_line
from support.no_torch import BLOCK

import eesd
from eesd.common.errors import EESDError
from eesd.export.make import _rounded_on

ROOT = Path(__file__).parent.parent.parent
IMPORT = """
import json
import eesd
wanted = {"numpy", "onnx", "onnxruntime", "tokenizers", "click", "rich"}
print(json.dumps(sorted(wanted & sys.modules.keys())))
assert set(eesd.__all__) == {name for name in eesd.__all__ if getattr(eesd, name)}
"""

USE = """
from pathlib import Path
from click.testing import CliRunner
import eesd
import eesd.bench.cli, lab.shapes, eesd.export.inspect
import eesd.runtime.cli, eesd.runtime.doctor

directory = sys.argv[1]
llm = eesd.load(directory, threads=1)
text = llm.generate("hello", eesd.Sampling(temperature=0.7, seed=1), max_new_tokens=12).text
with llm.session([5, 6, 7], max_new_tokens=6) as session:
    while session.finish_reason is None:
        session.step()

options = ["-p", "hello", "-n", "12", "--temperature", "0.7", "--seed", "1"]
for command, arguments in (
    (eesd.runtime.cli.main, ["--engine-dir", directory, *options]),
    (eesd.runtime.cli.main, ["--engine-dir", directory, *options, "--compare", "--tree", "2"]),
    (eesd.export.inspect.main, [directory, "--verify"]),
    (eesd.export.inspect.main, [directory, "--memory"]),
    (eesd.runtime.doctor.main, ["--json"]),
):
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "--compare" in arguments or "-p" not in arguments or result.stdout == text + "\\n"
assert not Blocker.blocked & sys.modules.keys()
print(llm.generate([5, 6], max_new_tokens=30, ignore_eos=True).tokens)
"""

EXPORT = """
from eesd.export.cli import main
main()
"""

BUILD = """
from eesd.export.build import main
main()
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_importing_costs_nothing() -> None:
    done = python(IMPORT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_everything_but_exporting_works_and_gives_the_same_tokens(engine: Path) -> None:
    done = python(USE, engine)
    assert done.returncode == 0, done.stderr
    expected = (
        eesd.load(engine, threads=1).generate([5, 6], max_new_tokens=30, ignore_eos=True).tokens
    )
    assert json.loads(done.stdout) == expected


def test_exporting_says_what_to_install(text_model: Path, tmp_path: Path) -> None:
    done = python(EXPORT, "--model", text_model, "--exit-layer", 1, "-o", tmp_path / "plans")
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, "Exporting needs", "[export]'")
    assert not (tmp_path / "plans").exists()


READ = """
import sys
import eesd.export.weights, eesd.model.checkpoint, eesd.model.eagle_file
import eesd.model.initial_head, eesd.model.quantize
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_reading_and_quantizing_checkpoints_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rounding_on_a_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eesd.export.rounding", None)
    arguments: Any = [None] * 5
    with pytest.raises(EESDError, match=r"--round-on needs .*pip install .*\[distill\]'"):
        _rounded_on(Path("text"), *arguments)


def test_building_says_what_to_install(engine: Path) -> None:
    done = python(BUILD, engine, "--target", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, "Building needs onnx", "[export]'")


def test_help_needs_nothing() -> None:
    assert "--exit-layer" in python(EXPORT, "--help").stdout
