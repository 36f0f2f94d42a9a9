"""``examples/one_round.py``, a round without anything that makes it fast, is an oracle for the runtime."""

import importlib.util
from pathlib import Path

import pytest
from support.harness import Harness

import eesd

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/one_round.py"


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
