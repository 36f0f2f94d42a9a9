"""The whole model as its own draft: the export fits a calibration prior to text that the model writes."""

import json
import re
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from support import tiny_models
from support.command import add_tokenizer, listing, run, succeed
from support.killing import kill_command

from eesd.common.manifest import load_manifest
from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep
from eesd.export import calibrate
from eesd.export.cli import main
from eesd.export.inspect import main as inspect
from eesd.export.own_text import OwnText, write_texts
from eesd.export.prior import DraftedRound, label_rounds
from eesd.runtime.engines import cpu_build, operators
from eesd.runtime.llm import Speculation, load

FEW = 8
"""Prompts where a test is not about the quality of the fit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build(tmp_path_factory.mktemp("whole") / "model", 97, layers=2, damping=0.5, seed=0)
    add_tokenizer(model)
    return model


def command(model: Path, output: Path, *options: object) -> tuple[object, ...]:
    return ("--model", model, "--no-check", "--exit-head", "quantized", "--max-seq-len", 256, *options, "-o", output)


@pytest.fixture(scope="module")
def calibrated(model: Path) -> tuple[Path, str]:
    """An engine directory, and what its export said."""
    plans = model.parent / "plans"
    return plans, succeed(main, *command(model, plans, "--calibrate")).stdout


def prior_of(directory: Path) -> CalibrationPrior | None:
    return load_manifest(directory).exit_head.calibration


def test_the_prior_is_in_the_manifest(calibrated: tuple[Path, str]) -> None:
    plans, _ = calibrated
    prior = prior_of(plans)
    assert prior is not None and prior.accept != CalibrationPrior().accept
    assert "prior of this draft" in succeed(inspect, plans, "--verify").stdout
    if not operators.missing():
        found = cpu_build.find_build(plans, load_manifest(plans))
        assert found is not None and found.parent == plans, "the build is still found"
    llm = load(plans, threads=1, speculation=Speculation("cost-aware-ts", guard=False))
    assert llm.generate([5, 6, 7], max_new_tokens=20, ignore_eos=True).stats.accepted_tokens > 0


def test_the_prior_predicts_held_out_text(calibrated: tuple[Path, str]) -> None:
    """Its engine directory is random, but its seeds are fixed."""
    said = re.findall(
        r"draft: (\S+) tokens a round of 4 drafts predicted, (\S+) measured .* \(95 %: (\S+) to (\S+)\)", calibrated[1]
    )
    assert len(said) == 2, "greedily, and at temperature 1"
    for predicted, measured, low, high in (map(float, line) for line in said):
        assert predicted == pytest.approx(measured, rel=0.1) and low < measured < high


def test_the_same_model_gets_the_same_prior(
    model: Path, calibrated: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prior does not depend on the clock."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks) ** 2))
    succeed(main, *command(model, tmp_path / "again", "--calibrate"))
    assert prior_of(tmp_path / "again") == prior_of(calibrated[0])


@pytest.mark.parametrize("without", ["a template", "a tokenizer", "a first token"])
def test_models_without_a_template_begin_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setattr(calibrate, "MOST_PROMPTS", FEW)
    model = tiny_models.build(tmp_path / "model", 97, layers=2, damping=0.5, seed=0)
    if without == "a template":
        add_tokenizer(model, template=None)
    if without == "a first token":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"bos_token_id": None}))
    said = succeed(main, *command(model, tmp_path / "plans", "--calibrate", "--max-tree-nodes", 12)).stdout
    assert said.count("measured on held-out text") == 2
    assert load_manifest(tmp_path / "plans").bos_token_id == (None if without == "a first token" else 1)


def test_it_can_be_left_out(model: Path, tmp_path: Path) -> None:
    said = succeed(main, *command(model, tmp_path / "plans", "--no-calibrate")).stdout
    assert prior_of(tmp_path / "plans") is None and "calibrated" not in said and "predicted" not in said


@pytest.mark.parametrize(("options", "reason"), [(("--no-pack",), "not built for the CPU"), (("--pack",), "GB of memory")])
def test_it_is_left_out_where_it_would_not_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str], reason: str
) -> None:
    monkeypatch.setattr(calibrate, "available_memory", lambda: 1000)
    said = succeed(main, *command(model, tmp_path / "plans", *options)).stdout
    reason = "not built" if operators.missing() else reason
    assert re.search(f"draft not calibrated: .*{reason}.*--calibrate does it anyway", said)
    assert prior_of(tmp_path / "plans") is None


def test_a_cache_that_is_too_small_is_told(model: Path, tmp_path: Path) -> None:
    options = ("--max-seq-len", 4, "--max-tree-nodes", 2, "--calibrate")
    said = succeed(main, *command(model, tmp_path / "plans", *options)).stdout
    assert "draft not calibrated, controllers will begin with the default prior: The prompt" in said
    assert prior_of(tmp_path / "plans") is None


@pytest.mark.parametrize("options", [("--exit-head", "none"), ("--exit-head", "quantized", "--exit-layer", 1)])
def test_without_a_draft_there_is_nothing_to_calibrate(model: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    if "--exit-layer" in options:
        options = ("--exit-layer", 1)  # an untrained head, which the default leaves alone
        said = succeed(main, "--model", model, "--no-check", *options, "-o", tmp_path / "plans").stdout
        assert "calibrated" not in said
    else:
        said = succeed(main, "--model", model, "--no-check", *options, "--calibrate", "-o", tmp_path / "plans").stdout
        assert "draft not calibrated: there is none" in said
    assert prior_of(tmp_path / "plans") is None


@pytest.mark.parametrize("where", ["eesd.export.calibrate.write_texts", "pathlib.Path.replace"])
def test_a_killed_export_leaves_a_whole_directory(model: Path, tmp_path: Path, where: str) -> None:
    """Killed while the model writes, and before the manifest with the prior has its name."""
    module, _, attribute = where.rpartition(".")
    module, name = ("pathlib", "pathlib.Path") if module == "pathlib.Path" else (module, module)
    arrange = f"import eesd.export.calibrate as calibrate, {module}; calibrate.MOST_PROMPTS = {FEW}; {name}.{attribute} = kill"
    kill_command("eesd.export.cli", arrange, *command(model, tmp_path / "plans", "--calibrate"))
    assert prior_of(tmp_path / "plans") is None
    load(tmp_path / "plans", threads=1).generate([5, 6], max_new_tokens=4)
    assert run(main, *command(model, tmp_path / "plans", "--no-calibrate")).exit_code == 0
    assert listing(tmp_path) == ["plans"] and not [name for name in listing(tmp_path / "plans") if name.startswith(".")]


def test_an_export_to_the_same_place_keeps_its_own_manifest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another export replaces the directory while the model writes: its manifest stays."""
    plans = tmp_path / "plans"

    def interfere(*arguments: object) -> list[OwnText]:
        succeed(main, *command(model, plans, "--no-calibrate", "--max-tree-nodes", 9))
        return write_texts(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate, "MOST_PROMPTS", FEW)
    monkeypatch.setattr(calibrate, "write_texts", interfere)
    said = succeed(main, *command(model, plans, "--calibrate")).stdout
    assert "was written again meanwhile" in said and load_manifest(plans).max_tree_nodes == 9


def test_larger_models_write_less() -> None:
    counts = [calibrate.prompts_for(size) for size in (1, 10**9, 2 * 10**9, 10**10, 10**12)]
    assert counts == [40, 40, 20, 4, 4]


def rounds_of(chance: float, texts: int, rounds: int, seed: int) -> list[OwnText]:
    """Texts whose drafts are right with one chance, and say so."""
    random, step = np.random.default_rng(seed), DraftStep(2, chance, chance, 0.0, 2)
    drawn = [[min(int(random.geometric(1 - chance)) - 1, 4) for _ in range(rounds)] for _ in range(texts)]
    return [OwnText(number, True, [DraftedRound([step] * 4, one) for one in text]) for number, text in enumerate(drawn)]


def test_the_interval_covers_the_expectation() -> None:
    """The prior knows the chance. 95 of 100 intervals of measurements should have its expectation inside."""
    prior = CalibrationPrior(accept=(0, 0, 1, 0, 0))
    found = [calibrate.quality(prior, rounds_of(0.8, 20, 8, seed)) for seed in range(200)]
    assert found[0].predicted == pytest.approx(sum(0.8**k for k in range(5)))
    assert 0.88 < np.mean([one.low < one.predicted < one.high for one in found]) < 0.99
    assert np.isnan(calibrate.quality(prior, rounds_of(0.8, 3, 8, 0)).low), "of three texts there is no interval"


def test_acceptance_by_depth_counts_what_was_judged() -> None:
    step = DraftStep(1, 0.5, 0.5, 0.0, 1)
    rounds = [DraftedRound([step] * 3, accepted) for accepted in (3, 1, 0, 0)]
    assert calibrate.acceptance(rounds) == [0.5, 0.5, 1.0] and calibrate.acceptance([]) == []
    labels = label_rounds(rounds)
    assert [[label for _, label in one] for one in labels["accept"]] == [[True] * 3, [True, False], [False], [False]]
    assert [[label for _, label in one] for one in labels["following"]] == [[True] * 2, [False], [], []]
