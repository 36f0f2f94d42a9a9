"""Thompson Sampling over one acceptance probability, as in the paper (Liu et al. 2024, section 3.3)."""

from math import inf
from typing import Any

import numpy as np

from eesd.controllers.base import Controller, DraftStep, RoundOutcome


class BetaTS(Controller):
    """theta ~ Beta(alpha, beta) after each drafted token; draft another with probability theta.

    After verification alpha grows by the accepted tokens and beta by one if a token was rejected; tokens behind the first
    rejection were never judged and count for neither. ``discount`` < 1 forgets (both counts shrink by it each round, down
    to the prior): about the last 1 / (1 - discount) rounds count, since acceptance differs from text to text. 1 is the paper's.
    """

    def __init__(self, alpha: float = 2.0, beta: float = 1.0, discount: float = 0.9, seed: int = 0) -> None:
        if not (0 < alpha < inf and 0 < beta < inf):
            raise ValueError("alpha and beta must be above 0 and finite")
        if not 0 < discount <= 1:
            raise ValueError("discount must be above 0 and at most 1")
        self.prior = (alpha, beta)
        self.accepted = 0.0
        self.rejected = 0.0
        self.discount = discount
        self._random = np.random.Generator(np.random.PCG64(seed))

    def keep_drafting(self, step: DraftStep) -> bool:
        theta = self._random.beta(self.prior[0] + self.accepted, self.prior[1] + self.rejected)
        return bool(self._random.random() < theta)

    def observe(self, outcome: RoundOutcome) -> None:
        self.accepted = self.accepted * self.discount + outcome.followed
        self.rejected = self.rejected * self.discount + (outcome.followed < outcome.drafted)

    def state(self) -> dict[str, Any]:
        return {
            "prior": list(self.prior),
            "accepted": self.accepted,
            "rejected": self.rejected,
            "discount": self.discount,
            "random": self._random.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.prior = (float(state["prior"][0]), float(state["prior"][1]))
        self.accepted = float(state["accepted"])
        self.rejected = float(state["rejected"])
        self.discount = float(state["discount"])
        self._random.bit_generator.state = state["random"]
