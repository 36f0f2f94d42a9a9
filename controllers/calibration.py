"""The map from the draft's confidence to the chance of acceptance, learned while decoding (docs/controllers.md).

A *score* z is a fixed weighted sum of a token's features. Offline it predicts the acceptance sigma(z). Online a Gaussian
posterior over (shift a, slope s, request offset b) recalibrates it: P(accepted) = sigma(a + s z + b). Shift and slope belong to
the model and persist. The offset belongs to the request: it starts at 0 with its prior width and drifts with the text.
"""

from collections.abc import Sequence
from math import exp, log, log1p

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep

CERTAIN = 0.9999
"""No chance is higher: a parent must stay likelier than its child."""


def features(step: DraftStep) -> tuple[float, ...]:
    """1, log(1 + margin), log-odds of the token, depth / 6, and 1 for a round's first token; all bounded."""
    p, margin, depth = step.probability, step.margin, step.depth
    odds = log(p / (1 - p)) if 0.05 < p < 0.9996 else (-3.0 if p < 0.5 else 8.0)
    return (1.0, log1p(min(max(margin, 0.0), 12.0)), odds, min(depth, 6) / 6, 1.0 if depth == 1 else 0.0)


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z)) if z > -500 else 0.0


class Calibrator:
    """Posterior over (a, s, b) for one score: mean and covariance (aa, as, ab, ss, sb, bb).

    Assumed-density filtering: each label is a logistic likelihood; one Newton step (online Laplace) gives the next Gaussian.
    Between rounds the variances of a, s and b grow, up to the prior's.
    """

    def __init__(self, weights: Sequence[float], prior: CalibrationPrior) -> None:
        self._weights = tuple(weights)
        self._prior = prior
        self.mean = [0.0, 1.0, 0.0]
        self.covariance = [prior.shift**2, 0.0, 0.0, prior.slope**2, 0.0, prior.request**2]

    def score(self, x: Sequence[float]) -> float:
        """z of a token with the features ``x`` [5]."""
        w = self._weights
        return w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3] + w[4] * x[4]

    def begin_request(self) -> None:
        """Integrate out the previous request's offset; the new one's is unknown."""
        c = self.covariance
        self.mean[2] = c[2] = c[4] = 0.0
        c[5] = self._prior.request**2

    def learn(self, z: float, accepted: bool) -> None:
        """Update the posterior with one label."""
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
        """Let a, s and b drift: one round has passed."""
        c, prior = self.covariance, self._prior
        drift = prior.drift**2
        c[0] = min(c[0] + drift, prior.shift**2)
        c[3] = min(c[3] + drift * prior.slope, prior.slope**2)
        c[5] = min(c[5] + prior.wander**2, prior.request**2)

    def draw(self, normal: Sequence[float]) -> tuple[float, float]:
        """Draw (intercept a + b, slope s) from the posterior with two standard normal numbers; b takes its mean given a and s.

        Exploring a and s pays because they persist. The offset b is gone with the request and is not explored.
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
