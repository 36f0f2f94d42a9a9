"""What ``eesd-distill`` says before it begins: tokens, time, and what a head will know."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.command import succeed
from support.distilling import LENGTH, SMALL, distill

from eesd.common.geometry import ExitConfig
from eesd.distill import forecast as forecast_module
from eesd.distill.cli import main
from eesd.distill.forecast import HEADS, READING, TRAINING, WRITING, Forecast, Known, forecast, product_rate
from eesd.distill.options import TrainingOptions
from eesd.model.checkpoint import Checkpoint
from eesd.model.exit_head import ExitHead


@pytest.mark.parametrize("options", [TrainingOptions(1), TrainingOptions(1, deep=(2, 3), draft_vocab=40, own_lm_head=True)])
def test_work_is_that_of_the_weights(learner: Path, options: TrainingOptions) -> None:
    """Counted from the modules themselves: all matrices of the model but its embeddings, and of the head with its LM head."""
    checkpoint = Checkpoint(learner)
    geometry = checkpoint.geometry
    training = replace(options, steps=10, batch=4, accumulate=2, length=32)
    found = forecast(geometry, training, 1000, 5000, True, 1, 1e9)
    model = sum(value.numel() for value in checkpoint.decoder().state_dict().values() if value.ndim == 2)
    config = ExitConfig(1, own_lm_head=True, draft_vocab=training.draft_vocab, deep=training.deep)
    head = sum(value.numel() for value in ExitHead(geometry, config).parameters() if value.ndim == 2)
    model -= 0 if geometry.tied_embeddings else geometry.vocab_size * geometry.hidden_size
    assert (found.written, found.read, found.trained) == (1000, 5000, 10 * 4 * 2 * 32)
    expected = (2 * model * 1000 / WRITING, 2 * model * 5000 / READING, 6 * head * found.trained / TRAINING)
    assert found.seconds == pytest.approx([one / 1e9 for one in expected])
    again = forecast(geometry, training, 0, 5000, False, 1, 1e9)
    assert again.read == again.trained == found.trained and again.seconds[0] == 0, "the teacher runs on every batch"
    shared = forecast(geometry, training, 1000, 5000, True, 4, 1e9)
    assert shared.trained == 4 * found.trained, "each process has batches of its own"
    assert shared.seconds == pytest.approx([found.seconds[0] / 4, found.seconds[1] / 4, found.seconds[2]])


def test_a_head_is_forecast_from_one_that_saw_as_much_and_as_different_text() -> None:
    def nearest(trained: float, text: float) -> Known:
        return Forecast(0, 0, int(trained), int(text), (0, 0, 0)).nearest()

    shipped = nearest(160e6, 70e6)
    assert (shipped.first, shipped.tokens) == (0.581, 2.45) and shipped is HEADS[-1]
    again_and_again = nearest(48e6, 1e6)
    assert again_and_again.text < 4e6 and again_and_again.first < shipped.first, "the same text again teaches less"
    assert nearest(1, 1) is HEADS[0] and nearest(0, 0) is HEADS[0]
    assert all(before.first < after.first and before.tokens < after.tokens for before, after in pairwise(HEADS))


def test_it_is_said_before_the_work(learner: Path, own_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of this run, and what the nearest known head knew."""
    monkeypatch.setattr(forecast_module, "HEADS", (Known(100, 100, 0.1, 1.1), Known(10**9, 10**9, 0.9, 3.0)))
    said = distill(learner, own_rows, tmp_path / "head", "--steps", 5).stdout
    assert f"1 min to train on {5 * 4 * LENGTH} tokens" in said and "right in 0.1, and 1.1 tokens a round" in said
    assert "to write" not in said and said.startswith("About ")
    assert not distill(learner, own_rows, tmp_path / "head", "--steps", 5).stdout.startswith("About "), "it is done already"
    arguments = ("--model", learner, "--exit-layer", 1, "--self-prompt", 4, "-o", tmp_path / "own", *SMALL)
    said = succeed(main, *arguments, "--own-rows", 20, "--steps", 1).stdout
    assert f"to write {10 * LENGTH} tokens" in said


def test_the_rate_is_that_of_this_machine() -> None:
    assert product_rate(torch.device("cpu"), "float32") > 1e8
