"""Decide when to verify tokens that the text proposes, instead of drafting or decoding plainly
(docs/controllers.md)."""

from collections.abc import Sequence
from functools import partial
from math import log
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import RoundOutcome, TextStep
from eesd.controllers.calibration import CERTAIN, Calibrator, sigmoid
from eesd.controllers.value import RoundValue, most_valuable

if TYPE_CHECKING:
    from eesd.controllers.load_rule import LoadRule

PRIOR = CalibrationPrior(accept=(-0.67, 1.11, 0.88, 1.58, 0.0), request=0.6, wander=0.05)
"""The prior was fitted on 7000 greedy positions of a 135 M model on Spec-Bench."""
LONGEST_MATCH = 32
MOST_TIMES = 8
"""The bounds of the features. Larger values say nothing more about the next token."""
DOUBT = 1.0
"""Number of standard deviations by which chances are lowered. Rounds label the text's proposal even
if it was not verified, so waiting for labels costs nothing."""
FIRST_DRAFTS = 4
"""Number of drafting rounds before the text's proposals are compared with them."""
DISCOUNT = 0.99
"""In the worth of drafting, each later drafting round multiplies a drafting round's weight by this
factor."""
SLOPE_PRIOR = 4.0
"""Ridge penalty (in squared tokens) on the slope of the line that gives the worth of drafting from
the worth of the text's proposal."""
SIZES = np.array([1, 2, 4, 8, 16, 32])
"""The numbers of tokens that may be verified. An engine prepares each size once, which takes time
on a CPU. Allowing all sizes would gain only 0.4 %."""
SIZES_AFTER_DRAFT = np.array([1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
"""The numbers of nodes that a pass with a draft may have. All small numbers are allowed, because
engines prepare calls of these sizes for drafts anyway."""


def text_features(step: TextStep) -> tuple[float, ...]:
    """Return the features [5] of a proposed token. They are 1, log length, log times, log share of
    the continuations, and 0 (not used). All features are bounded."""
    length = min(step.length, LONGEST_MATCH)
    times = min(step.times, MOST_TIMES)
    return (1.0, log(length), log(times), max(log(step.times / step.of), -4.0), 0.0)


def combined(
    chances: Sequence[float], index: int | None, chance: float
) -> tuple[list[float], float]:
    """Return the chances of a node's children if both the draft and the text propose children.

    The draft and the text are treated as independent evidence of the verifier's token, so their
    distributions are multiplied. A token that only the text proposes has the draft's remaining
    probability.

    Args:
        chances: Chances of the draft's candidates.
        index: Index of the candidate that the text proposes, or None if the text proposes another
            token.
        chance: Chance that the text is right.

    Returns:
        The candidates' chances, and the chance of the text's token.
    """
    own = chances[index] if index is not None else max(1 - sum(chances), 0.0)
    total = own * chance + max(1 - own, 0.0) * (1 - chance)
    mixed = [
        (one * chance if i == index else one * (1 - chance)) / total
        for i, one in enumerate(chances)
    ]
    return mixed, own * chance / total


class DraftingWorth:
    """Estimates the worth of a round that drafts as a linear function of the worth of the text's
    proposal.

    If the text's proposal is good, drafting does well, too, because the tokens are easy and the
    text extends the draft. So the mean over all drafting rounds would overrate drafting in rounds
    without a proposal.
    """

    def __init__(self) -> None:
        self.sums = [0.0] * 7
        """The discounted sums of 1, w, w^2, tokens, seconds, w tokens, and w seconds over the
        rounds. Here w is the worth of the text's proposal."""

    @property
    def rounds(self) -> float:
        """The discounted number of rounds that drafted."""
        return self.sums[0]

    def add(self, text_worth: float, tokens: float, seconds: float) -> None:
        """Record a drafting round with the worth of the text's proposal, and the round's tokens and
        seconds."""
        w = text_worth
        new = (1.0, w, w * w, tokens, seconds, w * tokens, w * seconds)
        self.sums = [old * DISCOUNT + value for old, value in zip(self.sums, new, strict=True)]

    def expected(self, text_worth: float, rate: float) -> float:
        """Return the expected tokens of a drafting round minus ``rate`` times its seconds, if the
        text's proposal has this worth."""
        rounds, w, ww, tokens, seconds, w_tokens, w_seconds = self.sums
        mean = w / rounds
        gained = (tokens - rate * seconds) / rounds
        slope = (w_tokens - rate * w_seconds - w * gained) / (ww - w * mean + SLOPE_PRIOR)
        return gained + min(max(slope, 0.0), 1.0) * (text_worth - mean)


class TextRule:
    """Chooses how many of the text's tokens a sequence verifies.

    In every round the committed tokens show whether the text's proposal was right, even if it was
    not verified. So the rule does not need to explore. The worth of a round is its expected tokens
    minus lambda times its seconds. ``value`` estimates lambda and the seconds. The worth of
    drafting is learned from the rounds that drafted. A row of a batch uses ``load`` instead, and
    shares the calibration with the other rows.
    """

    def __init__(self, value: RoundValue | None = None, load: "LoadRule | None" = None) -> None:
        self.accept = Calibrator(PRIOR.accept, PRIOR)
        self.value = value or RoundValue()
        self._load = load
        if load is not None:
            self.accept = load.text
        self.drafting = DraftingWorth()
        self.whole = 0.0
        """The discounted number of rounds whose whole draft was accepted."""
        self.drafts = 0
        self._text_worth = 0.0
        """Worth of the text's proposal in this round."""

    def begin_request(self) -> None:
        """Begin another request."""
        self.accept.begin_request()

    def chance(self, step: TextStep) -> float:
        """Return the chance that the verifier chooses this token, given that it chose all tokens
        before this token. The chance is lowered by ``DOUBT`` standard deviations."""
        shift, slope = self.accept.draw((-DOUBT, 0.0))
        return min(sigmoid(shift + slope * self.accept.score(text_features(step))), CERTAIN)

    def count(self, values: Sequence[float], drafts: bool) -> int:
        """Return how many of the text's tokens to verify now, without drafting.

        Args:
            values: For each token, the chance that it and all tokens before it are right.
            drafts: Whether the round could draft instead.

        Returns:
            One of ``SIZES``, or 0 to draft (or to decode plainly if there is no drafter). For a row
            of a batch the result may be any number, and the batch may verify fewer tokens.
        """
        if self._load is not None:
            return self._load.copied(values, drafts)
        if not self.value.verify.table:
            return 0
        best, most = self._best(values)
        self._text_worth = most
        if drafts and self.drafts < FIRST_DRAFTS:
            return 0
        plain = 1 - self.value.rate * self.value.seconds(0, 0)
        if drafts and self.drafting.expected(most, self.value.rate) - plain >= most:
            return 0
        return best

    def count_behind(self, values: Sequence[float], nodes: int) -> int:
        """Return how many of the text's tokens to verify after a draft. The total number of nodes
        is one of ``SIZES_AFTER_DRAFT``.

        Args:
            values: For each token, the chance that it and all tokens before it are right, given the
                draft.
            nodes: Number of drafted nodes that are verified.
        """
        if self.drafts < FIRST_DRAFTS or not self.value.verify.table:
            return 0
        right = self.whole / self.drafting.rounds
        return self._best(values, nodes, right, SIZES_AFTER_DRAFT)[0]

    def _best(
        self,
        values: Sequence[float],
        nodes: int = 0,
        right: float = 1.0,
        sizes: NDArray[np.int64] = SIZES,
    ) -> tuple[int, float]:
        """Return the most valuable number of tokens, and its worth. Return 0 and 0.0 if no number
        is worth its price.

        Args:
            values: For each token, the chance that it and all tokens before it are right, given the
                nodes before the text's tokens.
            nodes: Number of these nodes in the pass.
            right: Chance that they are right.
            sizes: Numbers of nodes that the pass may have.
        """
        return most_valuable(
            [right * value for value in values[: max(self.value.verify.known - nodes, 0)]],
            partial(self.value.prices, nodes),
            sizes[sizes > nodes] - nodes,
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round."""
        for number, step in enumerate(outcome.proposed):
            self.accept.learn(self.accept.score(text_features(step)), number < outcome.right)
        self.accept.advance()
        if outcome.steps and self._load is None:
            spent = self.value.seconds(outcome.steps, outcome.nodes)  # stalls hardly count
            self.drafting.add(self._text_worth, outcome.accepted + 1, spent)
            self.whole = self.whole * DISCOUNT + (outcome.num_expanded >= outcome.depth)
            self.drafts += 1
        self._text_worth = 0.0
