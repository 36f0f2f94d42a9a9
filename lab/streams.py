"""Synthetic traces with known chances of acceptance."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from eesd.bench.replay.traces import Trace, TracedRequest


@dataclass(frozen=True)
class SyntheticStream:
    """A text in which each position has a level of acceptance. The levels form a Markov chain.

    Attributes:
        name: Name in reports.
        levels: The probability of acceptance at each level, in ascending order.
        stay: Probability that a position keeps its predecessor's level. If not, the level is drawn
            uniformly.
        spread: Standard deviation of the log-odds of acceptance between requests.
        overconfidence: The difference between the log-odds that draft steps show and the true
            log-odds.
    """

    name: str
    levels: tuple[float, ...]
    stay: float
    spread: float = 0.0
    overconfidence: float = 0.0

    def trace(self, tokens: int, requests: int, seed: int, depth: int = 16) -> Trace:
        """Draw requests of ``tokens`` tokens. Each draft step reports a chance of acceptance, and
        its margin is the log-odds of this chance."""
        rng = np.random.default_rng(seed)
        return Trace(
            tuple(self._request(tokens, depth, rng) for _ in range(requests)), {"stream": self.name}
        )

    def _request(self, tokens: int, depth: int, rng: np.random.Generator) -> TracedRequest:
        count = len(self.levels)
        fresh = rng.integers(count, size=tokens + depth)
        level = fresh.copy()
        stays = rng.random(tokens + depth) < self.stay
        for i in range(1, len(level)):
            if stays[i]:
                level[i] = level[i - 1]
        odds = np.log(np.array(self.levels) / (1 - np.array(self.levels)))[level]
        if self.spread:
            odds += self.spread * rng.standard_normal()
        chances, shown = (1 / (1 + np.exp(-z)) for z in (odds, odds + self.overconfidence))
        # There is one draw for each text position, which all roots share. Every policy judges a
        # position at most once, so the distribution is the same as with one draw for each root. Two
        # policies on one stream therefore have the same luck.
        right = rng.random(tokens + depth) < chances
        probability, right = (
            sliding_window_view(array, depth)[1 : tokens + 1] for array in (shown, right)
        )
        room = np.minimum(tokens - 1 - np.arange(tokens), depth)
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), room).astype(np.int32)
        p = probability.astype(np.float32)
        return TracedRequest(self.name, np.log(p), np.log(p / (1 - p)), accepted)
