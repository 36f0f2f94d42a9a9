"""Synthetic streams whose acceptance is known: traces on which the optimal policy can be computed."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from eesd.bench.costs import CostModel
from eesd.bench.traces import Request, Trace
from eesd.controllers.oracles import Optimal


@dataclass(frozen=True)
class Stream:
    """Text whose position i has level x_i, a Markov chain over ``levels`` (ascending probabilities of acceptance).

    From one position to the next the level stays with probability ``stay``, else it is drawn anew from all with equal chances.
    """

    name: str
    levels: tuple[float, ...]
    stay: float

    @property
    def transition(self) -> list[list[float]]:
        count = len(self.levels)
        return [[(1 - self.stay) / count + self.stay * (i == j) for j in range(count)] for i in range(count)]

    def optimal(self, costs: CostModel, depth: int) -> Optimal:
        return Optimal(self.levels, self.transition, costs.table(depth))

    def trace(self, tokens: int, requests: int, seed: int, depth: int = 16) -> Trace:
        """Requests of ``tokens`` tokens. What a step shows is the true probability and its log-odds as the margin."""
        rng = np.random.default_rng(seed)
        return Trace(tuple(self._request(tokens, depth, rng) for _ in range(requests)), {"stream": self.name})

    def _request(self, tokens: int, depth: int, rng: np.random.Generator) -> Request:
        count = len(self.levels)
        fresh = rng.integers(count, size=tokens + depth)
        level, stays = fresh.copy(), rng.random(tokens + depth) < self.stay
        for i in range(1, len(level)):
            if stays[i]:
                level[i] = level[i - 1]
        chances = np.array(self.levels)[level]
        # One draw for each position of the text: whatever the policy, a position is judged once at most, so this is the same
        # law as a draw for each root, and two policies on a stream meet the same luck.
        right = rng.random(tokens + depth) < chances
        probability, right = (sliding_window_view(array, depth)[1 : tokens + 1] for array in (chances, right))
        room = np.minimum(tokens - 1 - np.arange(tokens), depth)
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), room).astype(np.int32)
        p = probability.astype(np.float32)
        entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p))
        return Request(self.name, np.log(p), np.log(p / (1 - p)), entropy, accepted)


STREAMS = (
    Stream("constant", (0.8,), 0.0),
    Stream("narrow", (0.7, 0.75, 0.8, 0.85, 0.9), 0.0),
    Stream("correlated", (0.5, 0.65, 0.8, 0.95, 0.99), 0.8),
    Stream("persistent", (0.5, 0.65, 0.8, 0.95, 0.99), 0.99),
)
"""Mean acceptance about .8: always the same; a little different; alike within a round; alike for about 100 tokens."""
