"""Fit the prior of the controllers' calibration (docs/controllers.md) to drafted rounds of several
texts.

Each drafted token up to and including the first rejected one gives a label. The weights of both
scores are fitted to the labels. The standard deviation of the request offset is chosen so that the
controllers' online calibration predicts best. All reported metrics are cross-validated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.common import markdown
from eesd.common.prior import FEATURES, CalibrationPrior
from eesd.controllers.base import DraftStep
from eesd.controllers.calibration import Calibrator, features, sigmoid

SCORES = ("accept", "following")
"""Fields of the prior. ``accept`` predicts whether a drafted token is accepted. ``following``
predicts whether the next drafted token is accepted, too."""
FOLDS = 4
"""Number of folds in the cross-validation over texts."""
REQUEST_STDS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.75)
"""Candidate standard deviations of the request offset. With larger values, an offset can fall so
low that nothing is drafted. No label can then raise the offset again."""
MIN_GAIN = 0.005
"""Smallest fraction by which a standard deviation must lower the loss. Smaller gains made sampling
slower."""
BINS = 10
"""Number of bins of the expected calibration error. All bins have the same width."""

Floats = NDArray[np.float64]
LabelledRound = list[tuple[tuple[float, ...], bool]]
"""The features and the label of each labelled drafted token of one round."""
LabelledText = dict[str, list[LabelledRound]]
"""The rounds of one text, for each of ``SCORES``."""


class DraftedRound(NamedTuple):
    """A round that drafted a chain.

    Attributes:
        steps: The controller's input for each drafted token.
        accepted: Number of drafted tokens that were accepted.
    """

    steps: Sequence[DraftStep]
    accepted: int


def label_rounds(rounds: Iterable[DraftedRound]) -> LabelledText:
    """Label the drafted tokens of a text's rounds.

    Returns:
        The labelled tokens of each score. For ``accept``, they are the drafted tokens up to the
        first rejected token, and the label is whether the token was accepted. For ``following``,
        they are the same tokens without the last one, and the label is whether the next token was
        accepted.
    """
    accept: list[LabelledRound] = []
    following: list[LabelledRound] = []
    for steps, accepted in rounds:
        x = [features(step) for step in steps[: accepted + 1]]
        accept.append([(row, level < accepted) for level, row in enumerate(x)])
        following.append([(row, level + 1 < accepted) for level, row in enumerate(x[:-1])])
    return {"accept": accept, "following": following}


def fit_weights(x: Floats, y: Floats, mean: Sequence[float], std: float = 1.0) -> tuple[float, ...]:
    """Fit a logistic regression by Newton's method with step halving.

    Args:
        x: Features [n, F].
        y: Labels [n], 0 or 1.
        mean: Mean of the weights' Gaussian prior [F].
        std: Standard deviation of the weights' Gaussian prior.

    Returns:
        The mode of the posterior [F].
    """
    start = np.asarray(mean, np.float64)

    def loss(w: Floats) -> float:
        z = x @ w
        return float(np.logaddexp(0, z).sum() - y @ z + ((w - start) ** 2).sum() / (2 * std**2))

    w = start
    for _ in range(100):
        p = np.exp(-np.logaddexp(0, -(x @ w)))
        gradient = x.T @ (p - y) + (w - start) / std**2
        hessian = (x.T * (p * (1 - p))) @ x + np.eye(len(w)) / std**2
        step = np.linalg.solve(hessian, gradient)
        if float(gradient @ step) < 1e-9:
            break
        before = loss(w)
        size = 1.0
        while loss(w - size * step) > before and size > 1e-6:
            size /= 2
        w = w - size * step
    return tuple(w.tolist())


class Predictions(NamedTuple):
    """The predicted probabilities p [n] of labelled drafted tokens, and the labels y [n] (0 or
    1)."""

    p: Floats
    y: Floats

    @property
    def losses(self) -> Floats:
        """The log-loss of each prediction [n], in nats."""
        losses: Floats = -np.log(np.clip(np.where(self.y > 0, self.p, 1 - self.p), 1e-12, 1))
        return losses

    @property
    def calibration_error(self) -> float:
        """The expected calibration error. It is the mean distance between probability and frequency
        over ``BINS`` bins of equal width."""
        bins = np.minimum((self.p * BINS).astype(int), BINS - 1)
        gaps = np.bincount(bins, self.p - self.y, BINS)
        return float(np.abs(gaps).sum() / max(len(self.p), 1))


def predict(
    prior: CalibrationPrior, score: str, texts: Sequence[LabelledText], online: bool = True
) -> list[Predictions]:
    """Predict the labels of several texts as a controller would if they were consecutive requests.

    Args:
        prior: The initial prior.
        score: One of ``SCORES``.
        texts: The labelled texts.
        online: Whether the calibration learns from each round. If not, only the prior is used.

    Returns:
        The predictions for each text.
    """
    calibrator = Calibrator(getattr(prior, score), prior)
    predictions = []
    for text in texts:
        calibrator.begin_request()
        p = []
        y = []
        for labelled in text[score]:
            shift, slope, offset = calibrator.mean
            scores = [calibrator.score(x) for x, _ in labelled]
            p += [sigmoid(shift + slope * z + offset) for z in scores]
            y += [label for _, label in labelled]
            if online:
                for z, (_, label) in zip(scores, labelled, strict=True):
                    calibrator.learn(z, label)
                calibrator.advance()
        predictions.append(Predictions(np.array(p, np.float64), np.array(y, np.float64)))
    return predictions


class PredictionQuality(NamedTuple):
    """Quality of a prior's predictions of one score.

    Attributes:
        drafts: Number of labelled drafted tokens.
        prior_loss: Mean log-loss of the prior alone, in nats.
        prior_error: Expected calibration error of the prior alone.
        online_loss: Mean log-loss with online learning, in nats.
        online_error: Expected calibration error with online learning.
    """

    drafts: int
    prior_loss: float
    prior_error: float
    online_loss: float
    online_error: float


@dataclass(frozen=True)
class CalibrationResult:
    """The fitted prior, compared with the default prior.

    Attributes:
        prior: The fitted prior, or None if it is not significantly better than the default prior.
        texts: Number of validation texts.
        default: The quality of the default prior, by score.
        fitted: The cross-validated quality of fitted priors, by score.
    """

    prior: CalibrationPrior | None
    texts: int
    default: dict[str, PredictionQuality]
    fitted: dict[str, PredictionQuality]


def calibrate(labelled: Sequence[LabelledText]) -> CalibrationResult:
    """Fit a prior to the labelled drafted tokens of several texts.

    The fitted prior is accepted if its cross-validated loss is lower than the default prior's by
    more than a standard error. This loss is the sum of the losses of the prior alone and with
    online learning.
    """
    fold_of = np.arange(len(labelled)) % FOLDS
    folds = [_select(labelled, fold_of == fold) for fold in range(FOLDS)]
    priors = [fit_prior(_select(labelled, fold_of != fold)) for fold in range(FOLDS)]
    losses = np.zeros((len(REQUEST_STDS), len(labelled)))
    for fold, (held_out, prior) in enumerate(zip(folds, priors, strict=True)):
        for number, std in enumerate(REQUEST_STDS):
            losses[number, fold_of == fold] = _online_losses(replace(prior, request=std), held_out)
    priors = [
        replace(prior, request=best_request_std(losses[:, fold_of != fold]))
        for fold, prior in enumerate(priors)
    ]
    default, default_losses = _evaluate([CalibrationPrior()] * FOLDS, folds)
    fitted, fitted_losses = _evaluate(priors, folds)
    better = _significant(default_losses - fitted_losses)
    result = replace(fit_prior(labelled), request=best_request_std(losses)) if better else None
    return CalibrationResult(result, len(labelled), default, fitted)


def fit_prior(texts: Sequence[LabelledText]) -> CalibrationPrior:
    """Fit both scores' weights to labelled texts. The default prior is the mean of the weights' own
    prior, N(default, 1)."""
    default = CalibrationPrior()
    weights = []
    for score in SCORES:
        rows = [row for text in texts for labelled in text[score] for row in labelled]
        x = np.array([x for x, _ in rows]).reshape(-1, FEATURES)
        y = np.array([label for _, label in rows], np.float64)
        fitted = fit_weights(x, y, getattr(default, score))
        weights.append(tuple(round(weight, 4) for weight in fitted))
    return replace(default, accept=weights[0], following=weights[1])


def best_request_std(losses: Floats) -> float:
    """Choose a standard deviation of the request offset.

    Args:
        losses: The loss of each candidate on each text [candidates, texts].

    Returns:
        The candidate with the lowest loss, or the default if the gain is below ``MIN_GAIN`` or
        below a standard error.
    """
    default = CalibrationPrior().request
    default_losses = losses[REQUEST_STDS.index(default)]
    best = int(losses.sum(1).argmin())
    return (
        REQUEST_STDS[best]
        if _significant((1 - MIN_GAIN) * default_losses - losses[best])
        else default
    )


def _significant(gains: Floats) -> bool:
    """Whether the sum of the gains [texts] exceeds its standard error."""
    return len(gains) > 1 and bool(gains.sum() > gains.std(ddof=1) * len(gains) ** 0.5)


def _select(texts: Sequence[LabelledText], mask: NDArray[np.bool_]) -> list[LabelledText]:
    return [text for text, selected in zip(texts, mask, strict=True) if selected]


def _online_losses(prior: CalibrationPrior, texts: Sequence[LabelledText]) -> Floats:
    """Return the loss of both scores with online learning for each text [texts], in nats."""
    losses = [
        [predictions.losses.sum() for predictions in predict(prior, score, texts)]
        for score in SCORES
    ]
    return np.asarray(np.sum(losses, axis=0), np.float64)


def _evaluate(
    priors: Sequence[CalibrationPrior], folds: Sequence[list[LabelledText]]
) -> tuple[dict[str, PredictionQuality], Floats]:
    """Evaluate one prior for each fold.

    Args:
        priors: The prior of each fold.
        folds: The texts of each fold.

    Returns:
        The quality by score, and the sum of all losses of each text ([texts], in nats). Texts are
        in the order of the folds.
    """
    qualities = {}
    losses = []
    for score in SCORES:
        metrics: list[float] = []
        for online in (False, True):
            by_text = [
                predictions
                for prior, texts in zip(priors, folds, strict=True)
                for predictions in predict(prior, score, texts, online)
            ]
            whole = Predictions(
                np.concatenate([text.p for text in by_text]),
                np.concatenate([text.y for text in by_text]),
            )
            metrics += [float(whole.losses.sum()) / max(len(whole.p), 1), whole.calibration_error]
            losses.append([text.losses.sum() for text in by_text])
        qualities[score] = PredictionQuality(len(whole.p), *metrics)
    return qualities, np.asarray(np.sum(losses, axis=0), np.float64)


def table(result: CalibrationResult) -> str:
    """Return a Markdown table of the qualities."""
    columns = (
        "label",
        "prior",
        "drafts",
        "log-loss, prior alone",
        "ECE, prior alone",
        "log-loss, online",
        "ECE, online",
    )
    rows = [
        (name, kind, qualities[score].drafts, *(f"{value:.4f}" for value in qualities[score][1:]))
        for score, name in zip(SCORES, ("accepted", "next accepted"), strict=True)
        for kind, qualities in (("default", result.default), ("fitted", result.fitted))
    ]
    title = f"Calibration on {result.texts} validation texts, cross-validated in {FOLDS} folds:"
    return f"{title}\n\n{markdown.table_text(columns, rows)}"
