"""Medians and ratios with bootstrap intervals (Efron 1979)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95


class Interval(NamedTuple):
    """A median, or a ratio, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def shown(self, style: str = ".2f", scale: float = 1, unit: str = "", bold: bool = True) -> str:
        """Return the interval as a cell of a table. The numbers have this style."""
        median, low, high = (f"{value * scale:{style}}" for value in self)
        return f"{'**' * bold}{median}{unit}{'**' * bold} ({low} to {high})"


def resampled(count: int, draws: int = RESAMPLES, seed: int = 0) -> NDArray[np.int64]:
    """Return the indices [draws, count] of bootstrap samples."""
    return np.random.Generator(np.random.PCG64(seed)).integers(count, size=(draws, count))


def bounds(samples: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile interval of a statistic's bootstrap samples."""
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median of one value per prompt, and its interval over prompts. The interval is
    paired if each value compares two runs of a prompt."""
    data = np.asarray(values, dtype=np.float64)
    return Interval(
        float(np.median(data)), *bounds(np.median(data[resampled(len(data), seed=seed)], axis=1))
    )
