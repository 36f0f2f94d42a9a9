"""The bundled model, on prompts from files that it was not trained on: the same tokens with and without drafting."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.llm import LLM, Speculation, load
from eesd.runtime.sampling import Sampling

EXAMPLE = Path(__file__).parent.parent / "examples/pycode"
SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.0, top_p=0.95, seed=4)]
SPECULATIONS = [
    Speculation(controller, width, guard=False)
    for controller in ("fixed:k=4", "threshold:p=0.5", "cost-aware-ts")
    for width in (1, 3)
]
SPECULATIONS += [Speculation("cost-aware-ts", width, guard=False, tree_budget=True) for width in (1, 2)]


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, exported as `make run` does."""
    directory = tmp_path_factory.mktemp("bundled") / "plans"
    options = ["--model", str(EXAMPLE / "model"), "--dtype", "float32", "--output", str(directory)]
    result = CliRunner().invoke(export_main, options)
    assert result.exit_code == 0, result.output
    return directory


def prompts() -> list[str]:
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def tokens(llm: LLM, prompt: str, sampling: Sampling, count: int) -> list[int]:
    return llm.generate(prompt, sampling, max_new_tokens=count, ignore_eos=True).tokens


def assert_lossless(directory: Path, texts: list[str], sampling: Sampling, count: int) -> None:
    plain = load(directory, speculation=None)
    drafting = {speculation: load(directory, speculation=speculation) for speculation in SPECULATIONS}
    for text in texts:
        expected = tokens(plain, text, sampling, count)
        assert len(expected) == count
        for speculation, llm in drafting.items():
            assert tokens(llm, text, sampling, count) == expected, (speculation, sampling, text)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"temperature {s.temperature}")
def test_a_few_prompts_are_lossless(bundled: Path, sampling: Sampling) -> None:
    assert_lossless(bundled, prompts()[::20], sampling, 64)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"temperature {s.temperature}")
def test_every_prompt_is_lossless(bundled: Path, sampling: Sampling) -> None:
    texts = prompts()
    assert len(texts) >= 50
    assert_lossless(bundled, texts, sampling, 128)


def test_drafting_pays_in_tokens_per_round(bundled: Path) -> None:
    llm = load(bundled, speculation=Speculation("fixed:k=4", guard=False))
    stats = [llm.generate(text, max_new_tokens=64, ignore_eos=True).stats for text in prompts()[::10]]
    assert sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats) > 2


def test_the_bundle_is_small_and_complete(bundled: Path) -> None:
    files = list((EXAMPLE / "model").iterdir())
    assert sum(file.stat().st_size for file in files) <= 30_000_000
    assert CliRunner().invoke(inspect_main, [str(bundled), "--verify"]).exit_code == 0
    assert load(bundled, speculation=None).manifest.exit_trained


def test_text_looks_like_python(bundled: Path) -> None:
    text = "def add(a, b):\n    "
    completion = load(bundled).generate(text, max_new_tokens=60)
    assert "return" in completion.text or '"""' in completion.text
