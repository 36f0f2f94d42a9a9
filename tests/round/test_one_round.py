"""``examples/one_round.py``, a round without anything that makes it fast, is an oracle for the runtime; the loop of
``examples/embedding/controllers.py`` is not EESD's."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from support.harness import Harness

import eesd
from eesd.controllers import CONTROLLERS, make_controller

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/one_round.py"
LOOP = ROOT / "examples/embedding/controllers.py"


@pytest.mark.fast
@pytest.mark.parametrize("prompt", [[5], [5, 9, 3], [60, 2, 44, 44, 17, 8, 90, 31]])
def test_the_runtime_gives_the_tokens_of_the_example(harness: Harness, prompt: list[int]) -> None:
    spec = importlib.util.spec_from_file_location("one_round", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    llm = eesd.load(harness.directory, threads=1)
    assert llm.generate(prompt, max_new_tokens=40).tokens == module.generate(harness.directory, prompt, 40)


def test_architecture_shows_the_round_of_the_example() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("Its round:\n\n")[2].partition("\nThe runtime's")[0]
    assert "root, drafted" in page and page.replace("\n    ", "\n        ").strip() in EXAMPLE.read_text("utf-8")


@pytest.mark.fast
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_in_another_loop_changes_the_seconds_and_not_the_tokens(name: str) -> None:
    """The seconds are the toy's own, not the machine's."""
    toy, plain = run_path(str(LOOP)), [3]
    for position in range(3, 303):
        plain.append(int(toy["VERIFIER"][toy["row"](plain[-1], position)].argmax()))
    tokens, seconds = toy["generate"](make_controller(name), [1, 2, 3], 300)
    assert tokens == plain[1:] and seconds < 0.9 * 300 * (toy["PASS"] + toy["NODE"])


def test_another_loop_needs_no_engine_and_the_default_controller_is_fastest() -> None:
    code = f"import runpy, sys; runpy.run_path({str(LOOP)!r}, run_name='__main__'); print(*sys.modules)"
    *lines, names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    speed = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert max(speed, key=lambda name: speed[name]) == "cost-aware-ts"
    assert not [name for name in names.split() if name.startswith(("eesd.runtime", "torch", "onnx"))]
