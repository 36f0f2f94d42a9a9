"""Tests of the calibration prior. It is fitted to validation texts, stored with the head, exported
into the manifest, and used by controllers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize
from support.command import assert_refused, run, succeed
from support.distilling import SMALL, distill

from eesd import load
from eesd.common.json_input import from_json
from eesd.common.manifest import load_manifest
from eesd.common.prior import CalibrationPrior
from eesd.controllers.calibration import CostAwareTS, sigmoid
from eesd.distill.acceptance import GreedyDrafts, drafted_rounds
from eesd.distill.calibrate import (
    REQUEST_STDS,
    LabelledText,
    best_request_std,
    calibrate,
    fit_prior,
    fit_weights,
    label_rounds,
    predict,
)
from eesd.distill.cli import main
from eesd.export.cli import main as export_main
from eesd.export.engine_dir import stored_head
from eesd.export.inspect import main as inspect
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.llm import Speculation

pytestmark = pytest.mark.fast

TRUTH = CalibrationPrior(accept=(1.0, 0.3, 0.6, -0.8, 0.5))


def texts(
    count: int, tokens: int, offset: float, seed: int, truth: CalibrationPrior = TRUTH
) -> list[LabelledText]:
    """Returns texts whose drafted tokens are correct with the probability that ``truth`` predicts
    at depth 2. Each text adds a random offset."""
    random = np.random.default_rng(seed)
    drafts = []
    for b in random.normal(0, offset, count):
        odds = random.normal(1, 2, tokens)
        margin = random.uniform(0, 6, tokens)
        probability = np.clip(1 / (1 + np.exp(-odds)), 0.06, 0.99)
        w = truth.accept
        z = (
            w[0]
            + w[1] * np.log1p(margin)
            + w[2] * np.log(probability / (1 - probability))
            + w[3] / 3
        )
        correct = random.random(tokens) < [sigmoid(value) for value in z + b]
        text = GreedyDrafts(
            correct[None], probability[None].astype(np.float32), margin[None].astype(np.float32)
        )
        drafts.append(label_rounds(drafted_rounds(text)))
    return drafts


def test_fitted_weights_equal_those_of_another_optimizer() -> None:
    random = np.random.default_rng(0)
    x = np.column_stack([np.ones(500), random.normal(0, 2, (500, 4))])
    y = (random.random(500) < 1 / (1 + np.exp(-(x @ [0.5, 1, -2, 0, 0.3])))).astype(float)
    mean = np.array([1.0, 0, 0, 3, 0])
    other = minimize(
        lambda w: np.logaddexp(0, x @ w).sum() - y @ (x @ w) + ((w - mean) ** 2).sum() / 0.5,
        mean,
        tol=1e-10,
    )
    assert fit_weights(x, y, list(mean), std=0.5) == pytest.approx(other.x, abs=1e-4)


def test_fitted_weights_recover_the_truth_and_keep_the_prior_without_data() -> None:
    random = np.random.default_rng(1)
    truth = [-1.0, 2.0, 0.5, 0.0, 1.0]
    x = np.column_stack([np.ones(40_000), random.normal(0, 1, (40_000, 4))])
    y = (random.random(40_000) < 1 / (1 + np.exp(-(x @ truth)))).astype(float)
    assert fit_weights(x, y, [0.0] * 5) == pytest.approx(truth, abs=0.07)
    assert fit_weights(x[:0], y[:0], truth) == pytest.approx(truth)
    separable = fit_weights(100 * x, (x[:, 1] > 0).astype(float), [0.0] * 5)
    assert np.isfinite(separable).all() and separable[1] > 0.1


def test_labels_end_with_the_first_rejection() -> None:
    """There are two rounds. The first drafts four tokens, of which two are accepted. The second
    drafts one token, because the last token of the text is not drafted."""
    correct = np.array([True, True, False, True, False])
    drafts = GreedyDrafts(
        correct[None], np.full((1, 5), 0.5, np.float32), np.arange(5, dtype=np.float32)[None]
    )
    text = label_rounds(drafted_rounds(drafts, draft_length=4))
    labels: dict[str, Any] = {
        score: [[(x[1], x[3] * 6, y) for x, y in labelled] for labelled in text[score]]
        for score in text
    }
    log = [pytest.approx(np.log1p(margin)) for margin in range(5)]
    assert labels["accept"] == [
        [(log[0], 1, True), (log[1], 2, True), (log[2], 3, False)],
        [(log[3], 1, True)],
    ]
    assert labels["following"] == [[(log[0], 1, True), (log[1], 2, False)], []]


def test_a_prior_that_predicts_better_is_returned() -> None:
    result = calibrate(texts(48, 150, offset=0.0, seed=2))
    assert result.prior is not None
    for score in ("accept", "following"):
        assert result.fitted[score].prior_loss < result.default[score].prior_loss
        assert result.fitted[score].online_loss < result.default[score].online_loss
    assert result.fitted["accept"].prior_error < 0.02 < result.default["accept"].prior_error
    x = np.array([1.0, np.log1p(3.0), 1.0, 1 / 3, 0.0])
    assert x @ np.array(result.prior.accept) == pytest.approx(x @ np.array(TRUTH.accept), abs=0.15)


def test_a_prior_that_predicts_no_better_is_not_returned() -> None:
    """The texts follow the default prior, so a prior fitted to some of the texts is no better on
    the others."""
    result = calibrate(texts(6, 40, offset=0.4, seed=3, truth=CalibrationPrior()))
    assert result.prior is None
    assert result.fitted["accept"].prior_loss > result.default["accept"].prior_loss


@pytest.mark.parametrize(("offset", "least", "most"), [(0.0, 0.0, 0.2), (1.5, 0.55, 1.0)])
def test_the_request_offset_width_follows_the_texts(
    offset: float, least: float, most: float
) -> None:
    result = calibrate(texts(40, 150, offset, seed=4))
    assert result.prior is not None and least <= result.prior.request <= most


def test_a_request_offset_width_needs_a_significant_gain() -> None:
    losses = np.full((len(REQUEST_STDS), 20), 10.0)
    losses[0, ::2] = 9.0
    losses[0, 1::2] = 10.9
    assert best_request_std(losses) == CalibrationPrior().request
    losses[0] = 9.97
    assert best_request_std(losses) == CalibrationPrior().request
    losses[0] = 9.8
    assert best_request_std(losses) == REQUEST_STDS[0]


def test_online_predictions_improve_from_text_to_text() -> None:
    labelled = texts(30, 100, offset=0.0, seed=5)
    wrong = CalibrationPrior(accept=(-3.0, 0.0, 0.5, 0.0, 0.0), shift=3.0)
    online = [text.losses.mean() for text in predict(wrong, "accept", labelled)]
    alone = [text.losses.mean() for text in predict(wrong, "accept", labelled, online=False)]
    assert np.mean(online[10:]) < 0.7 * np.mean(alone[10:])
    fitted = [
        text.losses.mean()
        for text in predict(fit_prior(labelled), "accept", labelled, online=False)
    ]
    assert np.mean(fitted) < np.mean(online)


@pytest.fixture(scope="module")
def calibrated(learner: Path, own_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head after a few steps, with validation texts that are long enough to fit a prior."""
    output = tmp_path_factory.mktemp("calibrated") / "head"
    longer = ("--validation-prompts", 25, "--validation-tokens", 90)
    result = distill(
        learner, own_rows, output, "--steps", 20, "--lr", 1e-2, "--save-every", 20, *longer
    )
    assert (
        "| accepted | fitted |" in result.stdout and "The fitted prior is written" in result.stdout
    )
    return output


def test_the_controller_uses_the_prior_that_distillation_fitted(
    learner: Path, calibrated: Path, tmp_path: Path
) -> None:
    entry = json.loads((calibrated / "exit_head.json").read_text())["calibration"]
    prior = from_json(CalibrationPrior, entry)
    assert prior.accept != CalibrationPrior().accept
    plans = tmp_path / "plans"
    succeed(export_main, "--model", learner, "--exit-head", calibrated, "--no-check", "-o", plans)
    assert load_manifest(plans).exit_head.calibration == prior
    assert "prior of this draft" in succeed(inspect, plans).stdout
    drafter = load(plans, speculation=Speculation("cost-aware-ts")).drafting.drafter
    assert drafter is not None
    controller = drafter.controller
    assert isinstance(controller, CostAwareTS)
    x = (1.0, 0.5, 2.0, 0.5, 0.0)
    assert controller.accept.score(x) == pytest.approx(np.dot(prior.accept, x))
    assert controller.following.score(x) == pytest.approx(np.dot(prior.following, x))


def test_zero_steps_add_a_prior_and_keep_the_weights(
    learner: Path, own_rows: Path, calibrated: Path, tmp_path: Path
) -> None:
    """The head has no prior at first. The prompts come from the rows, as they do in training, or
    from a file."""
    old = shutil.copytree(calibrated, tmp_path / "old")
    wanted = json.loads((old / "exit_head.json").read_text())
    (old / "exit_head.json").write_text(
        json.dumps({name: value for name, value in wanted.items() if name != "calibration"})
    )
    assert stored_head(Checkpoint(learner), old).config.calibration is None
    longer = ("--validation-prompts", 25, "--validation-tokens", 90, "--steps", 0)
    distill(learner, own_rows, tmp_path / "new", "--init-head", old, *longer)
    assert json.loads((tmp_path / "new" / "exit_head.json").read_text()) == wanted
    weights = (tmp_path / "new" / "exit_head.safetensors").read_bytes()
    assert weights == (calibrated / "exit_head.safetensors").read_bytes()
    given = (
        "--model",
        learner,
        "--exit-layer",
        1,
        *SMALL,
        *longer,
        "--validation",
        own_rows,
        "--init-head",
        old,
        "-o",
        old,
    )
    succeed(main, *given)
    assert json.loads((old / "exit_head.json").read_text())["calibration"] is not None
    assert (old / "exit_head.safetensors").read_bytes() == weights


def test_training_from_a_head_drops_its_prior(
    learner: Path, own_rows: Path, calibrated: Path, tmp_path: Path
) -> None:
    # There are too few tokens to fit another prior.
    short = ("--steps", 2, "--validation-prompts", 1, "--validation-tokens", 2)
    distill(learner, own_rows, tmp_path / "on", "--init-head", calibrated, *short)
    assert json.loads((tmp_path / "on" / "exit_head.json").read_text())["calibration"] is None


def test_calibrating_a_head_with_weights_that_are_not_finite_is_refused(
    learner: Path, own_rows: Path, calibrated: Path, tmp_path: Path
) -> None:
    head = shutil.copytree(calibrated, tmp_path / "head")
    tensors = load_file(head / "exit_head.safetensors")
    save_file(
        tensors | {"norm.weight": tensors["norm.weight"] * float("nan")},
        head / "exit_head.safetensors",
    )
    arguments = ("--model", learner, "--exit-layer", 1, "--data", own_rows, "-o", head, *SMALL)
    assert_refused(
        run(main, *arguments, "--steps", 0, "--init-head", head), "not finite", str(head)
    )
    assert json.loads((head / "exit_head.json").read_text())["calibration"] is not None


def test_zero_steps_with_unfit_options_are_refused(
    learner: Path, own_rows: Path, calibrated: Path, tmp_path: Path
) -> None:
    start = ("--model", learner, "--exit-layer", 1, "-o", tmp_path / "out", *SMALL, "--steps", 0)
    assert_refused(run(main, *start, "--data", own_rows), "--steps 0", "--init-head")
    assert_refused(run(main, *start, "--init-head", calibrated), "either --data")
    assert_refused(
        run(main, *start, "--data", own_rows, "--init-head", calibrated, "--blocks", 2),
        "--blocks 1",
    )
