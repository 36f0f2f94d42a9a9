"""What controllers know of a draft's confidence before the first round. ``eesd-distill`` fits it; manifests carry it as JSON."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

FEATURES = 5
"""Features of a drafted token; see :func:`eesd.controllers.calibration.features`."""
WIDTHS = ("shift", "slope", "request", "wander", "drift")


@dataclass(frozen=True)
class CalibrationPrior:
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
    def from_dict(value: dict[str, Any]) -> "CalibrationPrior":
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
        return CalibrationPrior(tuple(accept), tuple(following), *widths)
