"""The map from what the draft shows to the chance that the verifier agrees, learned while decoding (docs/controllers.md).

A *score* z, fixed weights on a token's features, says offline what acceptance to expect: sigma(z). Online, a Gaussian posterior
over (shift a, slope s, request offset b) recalibrates it: P(accepted) = sigma(a + s z + b). Shift and slope belong to the model
and live on; b belongs to the request, starts at 0 +- its prior width with every request and wanders as the text does.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite, log, log1p
from typing import Any

from eesd.controllers.base import DraftStep

FEATURES = 5
WIDTHS = ("shift", "slope", "request", "wander", "drift")


def features(step: DraftStep) -> tuple[float, ...]:
    """1, log(1 + margin), log-odds of the token against all others, depth / 6, whether it is the round's first; all bounded."""
    p, margin, depth = step.probability, step.margin, step.depth
    odds = log(p / (1 - p)) if 0.05 < p < 0.9996 else (-3.0 if p < 0.5 else 8.0)
    return (1.0, log1p(min(max(margin, 0.0), 12.0)), odds, min(depth, 6) / 6, 1.0 if depth == 1 else 0.0)


@dataclass(frozen=True)
class Prior:
    """What is known before the first round. ``eesd-distill`` fits one to each head; it travels as JSON.

    ``accept`` and ``following`` are the weights [5] of :func:`features` in the log-odds that the drafted token is accepted, and
    that the next one will be if this one is. ``shift``, ``slope``, ``request`` are the standard deviations of a, s - 1, b;
    ``wander`` of b's step from round to round; ``drift`` that of a's and s's.
    """

    accept: tuple[float, ...] = (-0.61, 2.11, 0.79, 0.95, 0.07)
    following: tuple[float, ...] = (-0.05, 0.99, -0.16, 1.93, 0.24)
    shift: float = 0.7
    slope: float = 0.3
    request: float = 0.4
    wander: float = 0.03
    drift: float = 0.003

    def __post_init__(self) -> None:
        if len(self.accept) != FEATURES or len(self.following) != FEATURES:
            raise ValueError(f"accept and following must have {FEATURES} weights")
        if not all(map(isfinite, (*self.accept, *self.following))):
            raise ValueError("weights must be finite")
        if not all(0 <= getattr(self, name) < 100 for name in WIDTHS):
            raise ValueError("standard deviations must be 0 or above, and below 100")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> "Prior":
        """From what :meth:`to_dict` gave, or JSON made of it; ValueError for what cannot be."""
        if not isinstance(value, dict) or value.keys() != {"accept", "following", *WIDTHS}:
            raise ValueError(f"its entries must be accept, following, {', '.join(WIDTHS)}")
        lists = value["accept"], value["following"]
        if not all(isinstance(weights, (list, tuple)) for weights in lists):
            raise ValueError("accept and following must be lists")
        widths = [value[name] for name in WIDTHS]
        if not all(type(number) in (int, float) for number in (*lists[0], *lists[1], *widths)):
            raise ValueError("weights and standard deviations must be numbers")
        try:
            accept, following, widths = (list(map(float, numbers)) for numbers in (*lists, widths))
        except OverflowError:
            raise ValueError("weights and standard deviations must be finite") from None
        return Prior(tuple(accept), tuple(following), *widths)


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z)) if z > -500 else 0.0


class Calibrator:
    """Posterior over (a, s, b) for one score: mean and covariance (aa, as, ab, ss, sb, bb).

    Assumed-density filtering: each label is a logistic likelihood, and the posterior is replaced by the Gaussian of one Newton
    step (online Laplace). Between rounds b wanders and a, s drift; no variance exceeds the prior's.
    """

    def __init__(self, weights: Sequence[float], prior: Prior) -> None:
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
