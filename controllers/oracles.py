"""Controllers for traces only, which know what no controller can: the ceilings."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.controllers.base import Controller, DraftStep


class Oracle(Controller):
    """Is told before each round how many tokens of its chain will be accepted."""

    def reveal(self, accepted: int) -> None:
        raise NotImplementedError


class Clairvoyant(Oracle):
    """Drafts exactly what will be accepted. For constant acceptance a and flat verify its speed is 1 / (1 - a + c a)."""

    def __init__(self) -> None:
        self._accepted = 0

    def reveal(self, accepted: int) -> None:
        self._accepted = accepted

    def length_ahead(self) -> int:
        return self._accepted

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self._accepted

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class Optimal(Controller):
    """The best policy where acceptance is a Markov chain with known probabilities, by backward induction.

    Text position i has a level x_i, a Markov chain with the given ``transition`` [M, M]; a token drafted for it is accepted
    with probability ``levels[x_i]``, and a draft step shows that probability. ``costs`` [D + 1] is what a round costs
    that drafts 0, 1, ... D tokens. Every round drafts at least one, as those of the online controllers do.

    Rounds end where the text goes on, so easy and hard passages are worth their own rates: h(x) is the relative value of a
    root at level x. An accepted token at level y saves h(y) and brings the next one: r(y) = p(y) (1 + E[h(y') | y] - h(y)).
    With S the chance that all drafted tokens are accepted, the gain from going on after k tokens, at rate lambda, is

        G_k(S, x) = max(0, S E[r(y) | x] - lambda (costs[k+1] - costs[k]) + E[G_(k+1)(S p(y), y) | x]).

    It grows with S, so the policy is a threshold on S for each k and level.
    """

    def __init__(self, levels: Sequence[float], transition: Sequence[Sequence[float]], costs: Sequence[float]) -> None:
        self._levels = list(levels)
        self.rate, self.thresholds = solve(np.array(levels), np.array(transition), np.array(costs))

    def keep_drafting(self, step: DraftStep) -> bool:
        levels = self._levels
        right = min(bisect_left(levels, step.probability), len(levels) - 1)
        level = min(max(right - 1, 0), right, key=lambda i: abs(levels[i] - step.probability))
        return step.depth < len(self.thresholds) and step.path_probability >= self.thresholds[step.depth][level]

    def state(self) -> dict[str, Any]:
        return {"rate": self.rate, "thresholds": self.thresholds}

    def restore(self, state: dict[str, Any]) -> None:
        self.rate, self.thresholds = state["rate"], state["thresholds"]


Array = NDArray[np.float64]
GRID = np.exp(np.linspace(np.log(1e-4), 0, 257))
"""Values of S that G is computed for; linear between."""


def solve(levels: Array, transition: Array, costs: Array, rounds: int = 4000) -> tuple[float, list[list[float]]]:
    """Tokens per unit of cost of the optimal policy, and its thresholds [D][M] on S (infinite where it always stops)."""
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
        h = h + gain - gain[0]  # the relative value of a root, up to a constant
        rate += 0.5 * gain.mean() / costs[1]
        if np.ptp(gain) + abs(gain).max() < 1e-7:
            break
    return float(rate), _gains(levels, transition, costs, worth, rate)[1]


def _gains(levels: Array, transition: Array, costs: Array, worth: Array, rate: float) -> tuple[Array, list[list[float]]]:
    """G_1(p(x), x) [M], and the thresholds, by backward induction from the longest draft."""
    longest = len(costs) - 1
    thresholds = [[float("inf")] * len(levels) for _ in range(longest)]
    ahead = transition @ worth
    gain = np.zeros((len(GRID), len(levels)))  # G_(k+1), of S at its root
    for depth in range(longest - 1, 0, -1):
        later = np.stack([np.interp(GRID * p, GRID, column) for p, column in zip(levels, gain.T, strict=True)], axis=1)
        going_on = GRID[:, None] * ahead - rate * (costs[depth + 1] - costs[depth]) + later @ transition.T
        pays = going_on >= 0
        thresholds[depth] = [float(GRID[column.argmax()]) if column.any() else float("inf") for column in pays.T]
        gain = np.maximum(going_on, 0)
    return np.array([np.interp(p, GRID, column) for p, column in zip(levels, gain.T, strict=True)]), thresholds
