"""Thompson Sampling over one acceptance probability, as in the paper (Liu et al. 2024, section 3.3)."""

from math import inf
from typing import ClassVar

import numpy as np

from eesd.controllers.base import Controller, DraftStep, RoundOutcome


class BetaTS(Controller):
    """After each drafted token draw theta ~ Beta(alpha, beta), and draft another with probability theta.

    After verification alpha grows by the accepted tokens, and beta by one if a token was rejected. Tokens behind the first
    rejection were never judged and do not count. ``discount`` < 1 multiplies both counts each round, so that about the last
    1 / (1 - discount) rounds count, because acceptance differs from text to text; 1 is the paper's.
    """

    learned: ClassVar = ("accepted", "rejected", "random")

    def __init__(self, alpha: float = 2.0, beta: float = 1.0, discount: float = 0.9, seed: int = 0) -> None:
        if not (0 < alpha < inf and 0 < beta < inf):
            raise ValueError("alpha and beta must be above 0 and finite")
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        self.prior = (alpha, beta)
        self.accepted = 0.0
        self.rejected = 0.0
        self.discount = discount
        self.random = np.random.Generator(np.random.PCG64(seed))

    def check_learned(self) -> None:
        if min(self.accepted, self.rejected) < 0:
            raise ValueError("accepted and rejected must not be negative")

    def keep_drafting(self, step: DraftStep) -> bool:
        theta = self.random.beta(self.prior[0] + self.accepted, self.prior[1] + self.rejected)
        return bool(self.random.random() < theta)

    def observe(self, outcome: RoundOutcome) -> None:
        if not outcome.steps:
            return
        self.accepted = self.accepted * self.discount + outcome.num_expanded
        self.rejected = self.rejected * self.discount + (outcome.num_expanded < outcome.depth)
