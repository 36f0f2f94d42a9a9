"""The map from what the draft shows to the chance that the verifier agrees, learned while decoding (docs/controllers.md).

A *score* z, fixed weights on a token's features, says offline what acceptance to expect: sigma(z). Online, a Gaussian posterior
over (shift a, slope s, request offset b) recalibrates it: P(accepted) = sigma(a + s z + b). Shift and slope belong to the model
and live on; b belongs to the request, starts at 0 +- its prior width with every request and wanders as the text does.
"""

from collections.abc import Sequence
from math import exp, log, log1p
from typing import Any

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep


def features(step: DraftStep) -> tuple[float, ...]:
    """1, log(1 + margin), log-odds of the token against all others, depth / 6, whether it is the round's first; all bounded."""
    p, margin, depth = step.probability, step.margin, step.depth
    odds = log(p / (1 - p)) if 0.05 < p < 0.9996 else (-3.0 if p < 0.5 else 8.0)
    return (1.0, log1p(min(max(margin, 0.0), 12.0)), odds, min(depth, 6) / 6, 1.0 if depth == 1 else 0.0)


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z)) if z > -500 else 0.0


class Calibrator:
    """Posterior over (a, s, b) for one score: mean and covariance (aa, as, ab, ss, sb, bb).

    Assumed-density filtering: each label is a logistic likelihood, and the posterior is replaced by the Gaussian of one Newton
    step (online Laplace). Between rounds b wanders and a, s drift; no variance exceeds the prior's.
    """

    def __init__(self, weights: Sequence[float], prior: CalibrationPrior) -> None:
        self._weights = tuple(weights)
        self._prior = prior
        self.mean = [0.0, 1.0, 0.0]
        self.covariance = [prior.shift**2, 0.0, 0.0, prior.slope**2, 0.0, prior.request**2]

    def score(self, x: Sequence[float]) -> float:
        w = self._weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3] + w[4] * x[4]

    def begin_request(self) -> None:
        """The offset of the request before is integrated out; the new one's is not known."""
        c = self.covariance
        self.mean[2] = c[2] = c[4] = 0.0
        c[5] = self._prior.request**2

    def learn(self, z: float, accepted: bool) -> None:
        a, s, b = self.mean
        aa, as_, ab, ss, sb, bb = self.covariance
        p = sigmoid(a + s * z + b)
        ga, gs, gb = aa + as_ * z + ab, as_ + ss * z + sb, ab + sb * z + bb  # covariance times the gradient (1, z, 1)
        curvature = p * (1 - p)
        scale = 1 + curvature * (ga + gs * z + gb)
        step, shrink = (accepted - p) / scale, curvature / scale
        self.mean = [a + ga * step, s + gs * step, b + gb * step]
        self.covariance = [
            aa - ga * ga * shrink,
            as_ - ga * gs * shrink,
            ab - ga * gb * shrink,
            ss - gs * gs * shrink,
            sb - gs * gb * shrink,
            bb - gb * gb * shrink,
        ]

    def advance(self) -> None:
        """A round has passed."""
        c, prior = self.covariance, self._prior
        drift = prior.drift**2
        c[0] = min(c[0] + drift, prior.shift**2)
        c[3] = min(c[3] + drift * prior.slope, prior.slope**2)
        c[5] = min(c[5] + prior.wander**2, prior.request**2)

    def draw(self, normal: Sequence[float]) -> tuple[float, float]:
        """(intercept a + b, slope s): a and s drawn from the posterior by two standard normal numbers, b its mean given them.

        What the model's own calibration teaches is used forever, so exploring it pays; b is soon gone and is not explored.
        """
        aa, as_, ab, ss, sb, _ = self.covariance
        a, s, b = self.mean
        sd = aa**0.5
        if sd == 0:
            return a + b, s + ss**0.5 * normal[1]
        along, with_a = as_ / sd, ab / sd
        rest = max(ss - along * along, 0.0) ** 0.5
        with_s = (sb - along * with_a) / rest if rest else 0.0
        return a + b + (sd + with_a) * normal[0] + with_s * normal[1], s + along * normal[0] + rest * normal[1]

    def state(self) -> dict[str, Any]:
        return {"mean": list(self.mean), "covariance": list(self.covariance)}

    def restore(self, state: dict[str, Any]) -> None:
        self.mean = [float(value) for value in state["mean"]]
        self.covariance = [float(value) for value in state["covariance"]]
