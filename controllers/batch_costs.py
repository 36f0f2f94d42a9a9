"""Estimate the costs of engine calls over several sequences while the calls run."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.controllers.value import is_due

SLOTS = 1024.0
"""Slots are counted in this unit, so that all features have about the same size."""
FORGETTING = 0.98
"""In the fit of the line, each later sample multiplies a sample's weight by this factor."""
PRIOR_WEIGHT = 1e-3
"""Ridge penalty on changes of the line, because the observed calls may not determine each of its
terms."""
CLIP = 0.3
"""A sample that is off by more than this share counts as if it were off by this share, so that
stalls of the machine hardly count."""
PACE = 1 / 3
SHAPE = 0.1
"""A sample's relative deviation is raised to the power ``PACE`` and changes the pace. A deviation
of at most ``SHAPE`` is attributed to the call's size, because changes of pace affect calls of all
sizes alike."""
LEAST = 1e-9
"""Minimum of each term of the line, in seconds."""
FIRST = 24
"""Number of initial samples, which define a pace of 1."""
LINE_WEIGHT = 0.5
MOST_SAMPLES = 30.0
"""The weight of the line, and the maximum weight of the samples with the same number of nodes. Both
are counted in samples."""


class BatchCosts:
    """Estimates the seconds of a call over B rows with S slots each, and N nodes in all.

    The estimate is the pace of the machine times a line through all calls, a + b N + c B S + d N S.
    The four terms are the times for reading the weights, for computing nodes, for reading caches,
    and for attention. Kernels take nodes in blocks, so each N that was seen has a factor, which is
    the time of its calls divided by the line's estimate. Between these N, factors are interpolated.
    """

    def __init__(self) -> None:
        self._line = np.zeros(4)
        self._moments = np.zeros((5, 5))
        """The moments of [the features divided by the seconds, 1]. The fit minimises relative
        errors, because with absolute errors the largest calls would dominate."""
        self._seen: dict[int, tuple[float, NDArray[np.float64]]] = {}
        """The weight of the samples of each N, and the means of their features and seconds [5] at a
        pace of 1."""
        self._factors: tuple[list[int], NDArray[np.float64]] = [1], np.ones(1)
        """The values of N that have factors, and the factors."""
        self._samples = 0
        self._pace = 1.0

    def add(self, rows: int, nodes: int, slots: float, seconds: float) -> None:
        """Record a call over ``rows`` sequences, with ``nodes`` nodes in all. A sequence has
        ``slots`` slots on average."""
        self._samples += 1
        if self._samples > FIRST:
            expected = self.seconds(rows, nodes, slots)
            change = min(max(seconds / expected, 1 - CLIP), 1 + CLIP)
            self._pace *= change**PACE
            seconds = expected / self._pace * min(max(change, 1 - SHAPE), 1 + SHAPE)
        length = slots / SLOTS
        x = np.array([1.0, nodes, rows * length, nodes * length, seconds])
        self._moments = FORGETTING * self._moments + np.outer(x, x) / seconds**2
        count, means = self._seen.get(nodes, (0.0, x))
        count = min(count + 1, MOST_SAMPLES)
        self._seen[nodes] = count, means + (x - means) / count
        if is_due(self._samples):
            self._fit()

    def _fit(self) -> None:
        """Compute the line, and the factor of each observed N."""
        known = self._moments[:4, :4]
        wanted = self._moments[:4, 4]
        # After only a few fast calls the matrix is singular to working precision, and solve() would
        # raise an exception.
        change, *_ = np.linalg.lstsq(
            known + PRIOR_WEIGHT * np.eye(4), wanted - known @ self._line, rcond=None
        )
        self._line = self._line + change
        nodes = sorted(self._seen)
        counts = np.array([self._seen[n][0] for n in nodes])
        means = np.array([self._seen[n][1] for n in nodes]).T
        ratios = means[4] / (np.maximum(self._line, LEAST) @ means[:4])
        self._factors = nodes, (LINE_WEIGHT + counts * ratios) / (LINE_WEIGHT + counts)

    def seconds(self, rows: int, nodes: int, slots: float) -> float:
        """The expected time of a call."""
        return float(self._expected(rows, nodes, slots))

    def curve(
        self, rows: NDArray[np.int64], nodes: NDArray[np.int64], slots: float
    ) -> NDArray[np.float64]:
        """Return the expected times [n] of calls over ``rows`` rows, which have ``nodes`` nodes in
        all. No call costs more than a larger call, because disturbances only ever add time."""
        return np.minimum.accumulate(self._expected(rows, nodes, slots)[::-1])[::-1]

    def _expected(self, rows: Any, nodes: Any, slots: float) -> Any:
        a, b, c, d = np.maximum(self._line, LEAST).tolist()
        length = slots / SLOTS
        return (
            self._pace
            * (a + b * nodes + c * rows * length + d * nodes * length)
            * np.interp(nodes, *self._factors)
        )
