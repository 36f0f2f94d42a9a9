"""What engine calls over several sequences cost, estimated while they run."""

from collections.abc import Sequence
from operator import mul

SLOTS = 1024.0
"""Slots are counted in this many, so that all features are of one size."""
FORGETTING = 0.98
"""Weight of a sample, for each later one."""
PRIOR_WEIGHT = 1e-3
"""How firmly the coefficients are held at first."""
CLIP = 0.3
"""A sample counts as if it were off by at most this share: stalls of the machine hardly count."""
CELL_WEIGHT = 3.0
"""Samples of one size of call that weigh as much as the fit through all sizes."""
STALLS = 4
"""More samples in a row that are off are no stalls: the machine has become slower, or faster."""
MOST_SAMPLES = 30.0
"""Weight that a size of call can have."""


class CallCosts:
    """Seconds of a call over B rows of n nodes, with S slots each.

    A line through all calls, a + b N + c B S + d N S for N = B n nodes: reading the weights, computing nodes, reading caches,
    attention. Each size (B, n) has besides a factor of its own, because kernels take rows in blocks.
    """

    def __init__(self) -> None:
        self._weights = [1e-2, 1e-3, 0.0, 0.0]
        self._covariance = [[1 / PRIOR_WEIGHT if row == column else 0.0 for column in range(4)] for row in range(4)]
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}
        """Samples, and the mean of measured over fitted seconds, by (B, n)."""
        self.samples = 0
        self._off = 0
        """Samples in a row that were off by more than ``CLIP``."""

    def add(self, rows: int, nodes: float, slots: float, seconds: float) -> None:
        """Note a call over ``rows`` sequences of ``nodes`` nodes, with as many slots; on average, where they differ."""
        x = _features(rows, nodes, slots)
        fitted = self._fitted(x)
        self._off = self._off + 1 if abs(seconds - fitted) > CLIP * fitted else 0
        if self.samples > 8 and self._off <= STALLS:
            seconds = min(max(seconds, fitted * (1 - CLIP)), fitted * (1 + CLIP))
        self.samples += 1
        self._fit([value / seconds for value in x])  # relative errors count, or the largest calls would decide alone
        cell = rows, round(nodes)
        count, ratio = self._cells.get(cell, (0.0, 1.0))
        count = min(count + 1, MOST_SAMPLES)
        self._cells[cell] = count, ratio + (seconds / self._fitted(x) - ratio) / count

    def _fit(self, x: Sequence[float]) -> None:
        """One step of recursive least squares towards the target 1. For four numbers lists are faster than arrays."""
        shared = [_dot(row, x) for row in self._covariance]
        variance = FORGETTING + _dot(shared, x)
        error = (1 - _dot(self._weights, x)) / variance
        self._weights = [weight + value * error for weight, value in zip(self._weights, shared, strict=True)]
        trace = sum(row[i] - shared[i] ** 2 / variance for i, row in enumerate(self._covariance)) / FORGETTING
        # What no call tells apart is not to become unknown again.
        scale = min(8 / PRIOR_WEIGHT / trace, 1.0) / FORGETTING
        self._covariance = [
            [(old - one * other / variance) * scale for old, other in zip(row, shared, strict=True)]
            for row, one in zip(self._covariance, shared, strict=True)
        ]

    def seconds(self, rows: int, nodes: float, slots: float) -> float:
        """The expected time of a call."""
        count, ratio = self._cells.get((rows, round(nodes)), (0.0, 1.0))
        return self._fitted(_features(rows, nodes, slots)) * (CELL_WEIGHT + count * ratio) / (CELL_WEIGHT + count)

    def _fitted(self, x: Sequence[float]) -> float:
        return max(_dot([max(weight, 0.0) for weight in self._weights], x), 1e-6)


def _features(rows: int, nodes: float, slots: float) -> tuple[float, ...]:
    many, length = rows * nodes, slots / SLOTS
    return 1.0, many, rows * length, many * length


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(map(mul, a, b)))
