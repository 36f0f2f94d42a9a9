"""The optimal policy on synthetic streams, whose chances of acceptance are known. It bounds what controllers can reach."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from eesd.bench.replay.costs import CostModel
from eesd.bench.replay.streams import SyntheticStream
from eesd.controllers import Controller, DraftStep

STREAMS = (
    SyntheticStream("constant", (0.8,), 0.0),
    SyntheticStream("narrow", (0.7, 0.75, 0.8, 0.85, 0.9), 0.0),
    SyntheticStream("correlated", (0.5, 0.65, 0.8, 0.95, 0.99), 0.8),
    SyntheticStream("persistent", (0.5, 0.65, 0.8, 0.95, 0.99), 0.99),
)
"""Streams with a mean acceptance of about .8. It is constant; varies a little; is similar within a round; is similar for about
100 tokens."""


class OptimalPolicy(Controller):
    """The optimal policy where acceptance is a Markov chain with known probabilities.

    The text position i has a level x_i, a Markov chain with known transition probabilities. A token drafted for position i is
    accepted with probability p(x_i), and a draft step shows that probability. Every round drafts at least one token, as rounds
    of the online controllers do.

    A round ends where the text continues, so easy and hard passages have different rates: h(x) is the relative value of a root
    at level x. An accepted token at level y saves h(y) and brings the next token: r(y) = p(y) (1 + E[h(y') | y] - h(y)). Let S
    be the chance that all drafted tokens are accepted. At rate lambda, the gain of continuing after k tokens is

        G_k(S, x) = max(0, S E[r(y) | x] - lambda (costs[k+1] - costs[k]) + E[G_(k+1)(S p(y), y) | x]).

    G grows with S, so the policy is a threshold on S for each k and level.

    Attributes:
        rate: Tokens per unit of cost that the policy reaches.
        thresholds: Smallest S to continue at, [D][M]; infinite where the policy always stops.
    """

    def __init__(self, levels: Sequence[float], transition: Sequence[Sequence[float]], costs: Sequence[float]) -> None:
        """Solve for the policy.

        Args:
            levels: p(x) of each level [M], ascending.
            transition: Transition probabilities between levels [M, M].
            costs: Cost of a round that drafts 0, 1, ... D tokens [D + 1].

        Raises:
            ValueError: The levels do not ascend, or a row of ``transition`` does not sum to 1.
        """
        self._levels = list(levels)
        self.rate, self.thresholds = _solve(np.array(levels), np.array(transition), np.array(costs))

    @classmethod
    def of(cls, stream: SyntheticStream, costs: CostModel, depth: int) -> Self:
        """The optimal policy on a stream that drafts at most ``depth`` tokens a round."""
        count = len(stream.levels)
        transition = (1 - stream.stay) / count + stream.stay * np.eye(count)
        return cls(stream.levels, transition.tolist(), costs.chain_costs(depth))

    def keep_drafting(self, step: DraftStep) -> bool:
        levels = self._levels
        right = min(bisect_left(levels, step.probability), len(levels) - 1)
        level = min(max(right - 1, 0), right, key=lambda i: abs(levels[i] - step.probability))
        return step.depth < len(self.thresholds) and step.path_probability >= self.thresholds[step.depth][level]


Array = NDArray[np.float64]
GRID = np.exp(np.linspace(np.log(1e-4), 0, 257))
"""Values of S at which G is computed; it is interpolated linearly between them."""


def _solve(levels: Array, transition: Array, costs: Array, rounds: int = 4000) -> tuple[float, list[list[float]]]:
    """Rate and thresholds of the optimal policy, by value iteration over roots and backward induction within a round."""
    if (np.diff(levels) <= 0).any():
        raise ValueError("levels must ascend")
    if not np.allclose(transition.sum(axis=1), 1):
        raise ValueError("each row of transition must sum to 1")
    h, rate = np.zeros(len(levels)), 1 / costs[0]
    for _ in range(rounds):
        worth = levels * (1 + transition @ h - h)
        first, _ = _gains(levels, transition, costs, worth, rate)
        value = transition @ (1 + h + worth + first) - rate * costs[1]
        gain = value - h
        h = h + gain - gain[0]  # relative values are defined up to a constant
        rate += 0.5 * gain.mean() / costs[1]
        if np.ptp(gain) + abs(gain).max() < 1e-7:
            break
    return float(rate), _gains(levels, transition, costs, worth, rate)[1]


def _gains(levels: Array, transition: Array, costs: Array, worth: Array, rate: float) -> tuple[Array, list[list[float]]]:
    """G_1(p(x), x) [M] and the thresholds, by backward induction from the longest draft."""
    longest = len(costs) - 1
    thresholds = [[float("inf")] * len(levels) for _ in range(longest)]
    ahead = transition @ worth
    gain = np.zeros((len(GRID), len(levels)))  # G_(k+1) by S and level
    for depth in range(longest - 1, 0, -1):
        later = np.stack([np.interp(GRID * p, GRID, column) for p, column in zip(levels, gain.T, strict=True)], axis=1)
        going_on = GRID[:, None] * ahead - rate * (costs[depth + 1] - costs[depth]) + later @ transition.T
        pays = going_on >= 0
        thresholds[depth] = [float(GRID[column.argmax()]) if column.any() else float("inf") for column in pays.T]
        gain = np.maximum(going_on, 0)
    return np.array([np.interp(p, GRID, column) for p, column in zip(levels, gain.T, strict=True)]), thresholds
