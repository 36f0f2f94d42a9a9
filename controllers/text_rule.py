"""When to verify tokens that the text proposes, instead of drafting or decoding plainly
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
"""Fitted on 7000 greedy positions of a 135 M model on Spec-Bench."""
LONGEST_MATCH = 32
MOST_TIMES = 8
"""Bounds of the features: larger values say nothing more about the next token."""
DOUBT = 1.0
"""Number of standard deviations by which chances are lowered. Rounds label the text's proposal even
if it was not verified, so waiting for labels costs nothing."""
FIRST_DRAFTS = 4
"""Number of drafting rounds before the text's proposals are compared with them."""
DISCOUNT = 0.99
"""Decay factor of a drafting round's weight in the worth of drafting, per later drafting round."""
SLOPE_PRIOR = 4.0
"""Ridge penalty, in squared tokens, on the slope of drafting's worth as a function of the text's
worth."""
SIZES = np.array([1, 2, 4, 8, 16, 32])
"""Numbers of tokens to verify. An engine prepares each size once, which takes time on a CPU;
allowing all sizes would gain only 0.4 %."""
FIRST_NODES = 4
"""Maximum number of nodes of a pass before any pass is measured; later it is twice the largest
measured number. Costs beyond it are a guess."""
SIZES_AFTER_DRAFT = np.array([1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
"""Numbers of nodes in a pass with a draft. All small numbers are allowed, because engines prepare
calls of these sizes for drafts anyway."""


def text_features(step: TextStep) -> tuple[float, ...]:
    """Features [5] of a proposed token, all bounded: 1, log length, log times, log share of the
    continuations, and 0 (not used)."""
    length = min(step.length, LONGEST_MATCH)
    times = min(step.times, MOST_TIMES)
    return (1.0, log(length), log(times), max(log(step.times / step.of), -4.0), 0.0)


def combined(
    chances: Sequence[float], index: int | None, chance: float
) -> tuple[list[float], float]:
    """Chances of a node's children if both draft and text propose children.

    Both count as independent witnesses of the verifier's token, so their distributions are
    multiplied. A token that only the text proposes has the draft's remaining probability.

    Args:
        chances: Chances of the draft's candidates.
        index: Index of the candidate that the text proposes; None if it proposes another token.
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
    """The worth of a round that drafts, as a linear function of the worth of the text's proposal.

    If the text's proposal is good, drafting does well, too: the tokens are easy, and the text
    extends the draft. So the mean over all drafting rounds would overrate drafting in rounds
    without a proposal.
    """

    def __init__(self) -> None:
        self.sums = [0.0] * 7
        """Discounted sums of 1, w, w^2, tokens, seconds, w tokens, and w seconds over the rounds,
        where w is the text's worth."""

    @property
    def rounds(self) -> float:
        """Discounted number of rounds that drafted."""
        return self.sums[0]

    def add(self, text_worth: float, tokens: float, seconds: float) -> None:
        """Add a drafting round: the worth of the text's proposal, and the round's tokens and
        seconds."""
        w = text_worth
        new = (1.0, w, w * w, tokens, seconds, w * tokens, w * seconds)
        self.sums = [old * DISCOUNT + value for old, value in zip(self.sums, new, strict=True)]

    def expected(self, text_worth: float, rate: float) -> float:
        """Expected tokens of a drafting round minus ``rate`` times its seconds, at this worth of
        the text's proposal."""
        rounds, w, ww, tokens, seconds, w_tokens, w_seconds = self.sums
        mean = w / rounds
        gained = (tokens - rate * seconds) / rounds
        slope = (w_tokens - rate * w_seconds - w * gained) / (ww - w * mean + SLOPE_PRIOR)
        return gained + min(max(slope, 0.0), 1.0) * (text_worth - mean)


class TextRule:
    """Chooses the number of the text's tokens that one sequence verifies.

    In every round the committed tokens show whether the text's proposal was right, even if it was
    not verified, so chances need no exploration. The worth of a round is its expected tokens minus
    lambda times its seconds, both from ``value``. The worth of drafting is learned from the rounds
    that drafted. A row of a batch uses ``load`` instead, and shares the calibration with the other
    rows.
    """

    def __init__(self, value: RoundValue | None = None, load: "LoadRule | None" = None) -> None:
        self.accept = Calibrator(PRIOR.accept, PRIOR)
        self.value = value or RoundValue()
        self._load = load
        if load is not None:
            self.accept = load.text
        self.drafting = DraftingWorth()
        self.whole = 0.0
        """Discounted number of rounds whose draft was accepted as a whole."""
        self.drafts = 0
        self._text_worth = 0.0
        """Worth of the text's proposal in this round."""

    def begin_request(self) -> None:
        """Begin another request."""
        self.accept.begin_request()

    def chance(self, step: TextStep) -> float:
        """Chance that the verifier chooses this token, given that it chose all tokens before this
        token; lowered by ``DOUBT`` standard deviations."""
        shift, slope = self.accept.draw((-DOUBT, 0.0))
        return min(sigmoid(shift + slope * self.accept.score(text_features(step))), CERTAIN)

    def count(self, values: Sequence[float], drafts: bool) -> int:
        """Number of the text's tokens to verify now, without drafting.

        Args:
            values: For each token, the chance that it and all tokens before it are right.
            drafts: Whether the round could draft instead.

        Returns:
            One of ``SIZES``; 0 to draft, or to decode plainly if there is no drafter. For a row of
            a batch it may be any number, and the batch may verify fewer tokens.
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
        """Number of the text's tokens to verify after a draft. The total number of nodes is one of
        ``SIZES_AFTER_DRAFT``.

        Args:
            values: For each token, the chance that it and all tokens before it are right, given the
                draft.
            nodes: Drafted nodes that are verified.
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
        """The most valuable number of tokens, and its worth; 0 and 0.0 if no number is worth its
        price.

        Args:
            values: For each token, the chance that it and all tokens before it are right, given the
                nodes before the text's tokens.
            nodes: Number of these nodes in the pass.
            right: Chance that they are right.
            sizes: Numbers of nodes that the pass may have.
        """
        known = max(FIRST_NODES, 2 * max(self.value.verify.samples)) - nodes
        return most_valuable(
            [right * value for value in values[: max(known, 0)]],
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
