"""Tests that the bundled model gives the same tokens with and without drafting. The prompts are
from files that it was not trained on."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.bundled import EXAMPLE, SAMPLINGS, assert_lossless, prompts

from eesd.export.inspect import main as inspect_main
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import Speculation, load


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"temperature {s.temperature}")
def test_a_few_prompts_are_lossless(bundled: Path, sampling: Sampling) -> None:
    assert_lossless(bundled, prompts()[::30], sampling, 48)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "sampling"), [*enumerate(SAMPLINGS)], ids=str)
def test_every_prompt_is_lossless(bundled: Path, number: int, sampling: Sampling) -> None:
    """Each prompt is decoded with one of the samplings."""
    texts = prompts()
    assert len(texts) >= 50
    assert_lossless(bundled, texts[number :: len(SAMPLINGS)], sampling, 128)


def test_drafting_pays_in_tokens_per_round(bundled: Path) -> None:
    llm = load(bundled, speculation=Speculation("fixed:k=4", guard=False))
    stats = [
        llm.generate(text, max_new_tokens=64, ignore_eos=True).stats for text in prompts()[::10]
    ]
    assert sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats) > 2


def test_the_bundle_is_small_and_complete(bundled: Path) -> None:
    files = list((EXAMPLE / "model").iterdir())
    assert sum(file.stat().st_size for file in files) <= 30_000_000
    assert CliRunner().invoke(inspect_main, [str(bundled), "--verify"]).exit_code == 0
    assert load(bundled, speculation=None).manifest.exit_head.trained


def test_text_looks_like_python(bundled: Path) -> None:
    text = "def add(a, b):\n    "
    completion = load(bundled).generate(text, max_new_tokens=60)
    assert "return" in completion.text or '"""' in completion.text
