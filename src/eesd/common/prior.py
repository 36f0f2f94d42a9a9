"""The calibration prior of an exit head. It describes the assumptions of the controllers about the
head's confidence before the first round.

``eesd-distill`` fits one prior for each head, and ``exit_head.json`` and ``manifest.json`` store
it.
"""

from dataclasses import dataclass
from math import isfinite

from eesd.common.checks import first_fault

FEATURES = 5
"""Number of features of a drafted token. They are listed at
:func:`eesd.controllers.calibration.features`."""
STANDARD_DEVIATIONS = ("shift", "slope", "request", "wander", "drift")


@dataclass(frozen=True)
class CalibrationPrior:
    """Prior over the map from the draft's confidence to the probability of acceptance, sigma(a + s
    z + b).

    The score z is a weighted sum of a drafted token's features. The shift a and the slope s belong
    to the model, and the offset b belongs to one request. The defaults are used for heads without a
    fitted prior.

    Attributes:
        accept: Feature weights [5] of the score for "the drafted token is accepted".
        following: Feature weights [5] of the score for "the next drafted token is accepted too,
            given that this one is".
        shift: Standard deviation of ``a``.
        slope: Standard deviation of s - 1.
        request: Standard deviation of b at the start of a request.
        wander: Standard deviation of the change of b from one round to the next.
        drift: Standard deviation of the change of a and s from one round to the next.

    Raises:
        ValueError: A list has the wrong length, or a number is out of range.
    """

    accept: tuple[float, ...] = (-0.61, 2.11, 0.79, 0.95, 0.07)
    following: tuple[float, ...] = (-0.05, 0.99, -0.16, 1.93, 0.24)
    shift: float = 0.7
    slope: float = 0.3
    request: float = 0.4
    wander: float = 0.03
    drift: float = 0.003

    def __post_init__(self) -> None:
        weights = (self.accept, self.following)
        faults = {
            f"accept and following must have {FEATURES} weights": (
                {*map(len, weights)} != {FEATURES}
            ),
            "weights must be finite": not all(isfinite(one) for side in weights for one in side),
            "standard deviations must be 0 or above, and below 100": (
                not all(0 <= getattr(self, name) < 100 for name in STANDARD_DEVIATIONS)
            ),
        }
        if fault := first_fault(faults):
            raise ValueError(fault)
