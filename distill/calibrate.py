"""The prior with which the controllers begin to calibrate the head's confidence (docs/controllers.md), from validation texts.

Rounds of drafts are replayed over the texts; each draft up to and including the first rejection is a label. The weights of both
scores are fitted to these labels, the spread of the requests' offsets by how well the online calibration then predicts. All
figures are of texts that the weights in use were not fitted on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.common.prior import FEATURES, CalibrationPrior
from eesd.controllers.base import DraftStep
from eesd.controllers.calibration import Calibrator, features, sigmoid
from eesd.distill.acceptance import DEPTHS, Drafts, rounds_over

SCORES = ("accept", "following")
FOLDS = 4
SPREADS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.75)
"""Spreads of the requests' offsets that are tried. With wider ones an offset can fall so low that nothing is drafted, and so
nothing is judged that would raise it again."""
MATERIAL = 0.005
"""A spread must lower the loss by this part of it; one that brought less cost speed when sampling (docs/distill.md)."""
BINS = 10
"""Of equal width, for the calibration error."""

Floats = NDArray[np.float64]
Judged = list[tuple[tuple[float, ...], bool]]
"""The features of each judged draft of a round, and what became of it."""
Request = list[Judged]
"""The rounds of one text."""


def labels_of(drafts: Drafts, depth: int = DEPTHS) -> dict[str, Request]:
    """For each score, what rounds of ``depth`` drafts teach it: of each judged draft whether it is accepted, and of each
    accepted one whether the next judged one is, too."""
    accept: Request = []
    following: Request = []
    for found in rounds_over(drafts.right, depth):
        shown = [_features(drafts, found.start + level, level + 1) for level in range(found.judged)]
        accept.append([(x, level < found.accepted) for level, x in enumerate(shown)])
        following.append([(x, level + 1 < found.accepted) for level, x in enumerate(shown[:-1])])
    return {"accept": accept, "following": following}


def _features(drafts: Drafts, at: int, depth: int) -> tuple[float, ...]:
    probability, margin = float(drafts.probability[at]), float(drafts.margin[at])
    return features(DraftStep(depth, probability, probability, None, margin, depth))


def fit_weights(x: Floats, y: Floats, centre: Sequence[float], spread: float = 1.0) -> tuple[float, ...]:
    """Logistic regression of labels y [n] on features x [n, F] by Newton's method: the mode of the posterior where the weights'
    prior is N(centre, spread^2). A step that would make it worse is halved."""
    start = np.asarray(centre, np.float64)

    def loss(w: Floats) -> float:
        z = x @ w
        return float(np.logaddexp(0, z).sum() - y @ z + ((w - start) ** 2).sum() / (2 * spread**2))

    w = start
    for _ in range(100):
        p = np.exp(-np.logaddexp(0, -(x @ w)))
        gradient = x.T @ (p - y) + (w - start) / spread**2
        hessian = (x.T * (p * (1 - p))) @ x + np.eye(len(w)) / spread**2
        step = np.linalg.solve(hessian, gradient)
        if float(gradient @ step) < 1e-9:
            break
        before, size = loss(w), 1.0
        while loss(w - size * step) > before and size > 1e-6:
            size /= 2
        w = w - size * step
    return tuple(w.tolist())


class Forecast(NamedTuple):
    """Chances p [n] that were given to judged drafts, and what became of them, y [n]: 0 or 1."""

    p: Floats
    y: Floats

    @property
    def losses(self) -> Floats:
        """-log of the chance that was given to what happened, in nats."""
        losses: Floats = -np.log(np.clip(np.where(self.y > 0, self.p, 1 - self.p), 1e-12, 1))
        return losses

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of chance and frequency over bins of equal width."""
        bins = np.minimum((self.p * BINS).astype(int), BINS - 1)
        gaps = np.bincount(bins, self.p - self.y, BINS)
        return float(np.abs(gaps).sum() / max(len(self.p), 1))


def forecasts(prior: CalibrationPrior, score: str, requests: Sequence[Request], learning: bool = True) -> list[Forecast]:
    """For each request, the chances that the controllers give its drafts, who go on learning from one request to the next;
    without ``learning``, those of the prior alone."""
    calibrator, found = Calibrator(getattr(prior, score), prior), []
    for rounds in requests:
        calibrator.begin_request()
        p, y = [], []
        for judged in rounds:
            shift, slope, offset = calibrator.mean
            scores = [calibrator.score(x) for x, _ in judged]
            p += [sigmoid(shift + slope * z + offset) for z in scores]
            y += [right for _, right in judged]
            if learning:
                for z, (_, right) in zip(scores, judged, strict=True):
                    calibrator.learn(z, right)
                calibrator.advance()
        found.append(Forecast(np.array(p, np.float64), np.array(y, np.float64)))
    return found


class Quality(NamedTuple):
    """How a prior forecasts one score of ``drafts`` judged drafts: log-loss (nats a draft) and expected calibration error, of
    the prior alone (``first``) and with what is learned on the way."""

    drafts: int
    first_loss: float
    first_error: float
    loss: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """What was found on ``texts`` texts: the prior to begin with, None where the fitted one is no better than the default, and
    for each score the qualities of the default and of fitted priors, on texts that these were not fitted on."""

    prior: CalibrationPrior | None
    texts: int
    default: dict[str, Quality]
    fitted: dict[str, Quality]


def calibrate(texts: Sequence[Drafts]) -> Calibration:
    """Fit a prior to drafts over texts, and measure it: each text by what was fitted on the three quarters without it.

    The fitted prior is found better where its losses at first and while learning, taken together, are lower by more than a
    standard error.
    """
    labelled = [labels_of(drafts) for drafts in texts]
    fold = np.arange(len(texts)) % FOLDS
    parts = [_where(labelled, fold == part) for part in range(FOLDS)]
    priors = [fit_prior(_where(labelled, fold != part)) for part in range(FOLDS)]
    losses = np.zeros((len(SPREADS), len(texts)))
    for part, (held, prior) in enumerate(zip(parts, priors, strict=True)):
        for number, spread in enumerate(SPREADS):
            losses[number, fold == part] = _losses(replace(prior, request=spread), held)
    priors = [replace(prior, request=best_spread(losses[:, fold != part])) for part, prior in enumerate(priors)]
    default, usual = _measured([CalibrationPrior()] * FOLDS, parts)
    fitted, reached = _measured(priors, parts)
    better = _clear(usual - reached)
    found = replace(fit_prior(labelled), request=best_spread(losses)) if better else None
    return Calibration(found, len(texts), default, fitted)


def fit_prior(labelled: Sequence[dict[str, Request]]) -> CalibrationPrior:
    """The default prior with both scores' weights fitted to these texts. It is the centre of the fit, too: what the texts do
    not tell stays as it was."""
    default, weights = CalibrationPrior(), []
    for score in SCORES:
        rows = [row for text in labelled for judged in text[score] for row in judged]
        x, y = np.array([x for x, _ in rows]).reshape(-1, FEATURES), np.array([right for _, right in rows], np.float64)
        fitted = fit_weights(x, y, getattr(default, score))
        weights.append(tuple(round(weight, 4) for weight in fitted))
    return replace(default, accept=weights[0], following=weights[1])


def best_spread(losses: Floats) -> float:
    """The spread with the least loss, by losses [spreads, texts]; the default's unless the gain is clear and material."""
    usual, best = losses[SPREADS.index(CalibrationPrior().request)], int(losses.sum(1).argmin())
    return SPREADS[best] if _clear((1 - MATERIAL) * usual - losses[best]) else CalibrationPrior().request


def _clear(gains: Floats) -> bool:
    """Whether gains [texts] are together more than their standard error."""
    return len(gains) > 1 and bool(gains.sum() > gains.std(ddof=1) * len(gains) ** 0.5)


def _where(labelled: Sequence[dict[str, Request]], chosen: NDArray[np.bool_]) -> list[dict[str, Request]]:
    return [text for text, wanted in zip(labelled, chosen, strict=True) if wanted]


def _losses(prior: CalibrationPrior, texts: Sequence[dict[str, Request]]) -> Floats:
    """Both scores' losses while learning, for each text, in nats."""
    found = [[f.losses.sum() for f in forecasts(prior, score, [text[score] for text in texts])] for score in SCORES]
    return np.asarray(np.sum(found, axis=0), np.float64)


def _measured(
    priors: Sequence[CalibrationPrior], parts: Sequence[list[dict[str, Request]]]
) -> tuple[dict[str, Quality], Floats]:
    """Each score's quality with a prior for each part of the texts, and all losses together for each text, in nats."""
    qualities, losses = {}, []
    for score in SCORES:
        figures: list[float] = []
        for learning in (False, True):
            made = [
                forecast
                for prior, texts in zip(priors, parts, strict=True)
                for forecast in forecasts(prior, score, [text[score] for text in texts], learning)
            ]
            whole = Forecast(np.concatenate([f.p for f in made]), np.concatenate([f.y for f in made]))
            figures += [float(whole.losses.sum()) / max(len(whole.p), 1), whole.error]
            losses.append([f.losses.sum() for f in made])
        qualities[score] = Quality(len(whole.p), *figures)
    return qualities, np.asarray(np.sum(losses, axis=0), np.float64)


def table(calibration: Calibration) -> str:
    """A Markdown table of the qualities."""
    lines = [
        f"Calibration on {calibration.texts} validation texts, each judged by what was fitted on others:",
        "",
        "| forecast | prior | drafts | log-loss at first | error at first | log-loss, learning | error, learning |",
        "|---|---|---|---|---|---|---|",
    ]
    for score, name in zip(SCORES, ("accepted", "next accepted"), strict=True):
        for kind, found in (("default", calibration.default), ("fitted", calibration.fitted)):
            q = found[score]
            figures = " | ".join(f"{value:.4f}" for value in q[1:])
            lines.append(f"| {name} | {kind} | {q.drafts} | {figures} |")
    return "\n".join(lines)
