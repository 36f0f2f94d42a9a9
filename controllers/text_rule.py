"""When to verify what the text itself proposes, instead of drafting or of decoding plainly
(docs/controllers.md)."""

from collections.abc import Sequence
from math import log

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import RoundOutcome, TextStep
from eesd.controllers.calibration import CERTAIN, Calibrator, sigmoid
from eesd.controllers.value import RoundValue, most_valuable

PRIOR = CalibrationPrior(accept=(-0.67, 1.11, 0.88, 1.58, 0.0), request=0.6, wander=0.05)
"""Fitted on 7000 greedy positions of a 135 M model on Spec-Bench."""
LONGEST_MATCH = 32
MOST_TIMES = 8
"""More says nothing more about the next token."""
DOUBT = 1.0
"""Standard deviations that a chance is lowered by. Labels are free, so nothing is lost by waiting
for some."""
FIRST_DRAFTS = 4
"""Drafting rounds before the text is compared with them."""
DISCOUNT = 0.99
"""Weight of a drafting round in what drafting is worth, for each later one."""
SLOPE_PRIOR = 4.0
"""Squared tokens by which the slope of drafting's worth over the text's is drawn to 0."""
SIZES = (1, 2, 4, 8, 16, 32)
"""Tokens that are verified: an engine prepares each size once, which takes time on a CPU. All sizes
are worth 0.4 % more."""
FIRST_NODES = 4
"""Nodes of a pass at most while none is measured; afterwards twice as many as were. What more would
cost is a guess."""
FEW = 8
"""Nodes up to which drafts have any number, so every size is prepared."""


def text_features(step: TextStep) -> tuple[float, ...]:
    """1, log length, log times, and log share of the continuations, all bounded. The fifth feature
    is not used."""
    length = min(step.length, LONGEST_MATCH)
    times = min(step.times, MOST_TIMES)
    return (1.0, log(length), log(times), max(log(step.times / step.of), -4.0), 0.0)


def combined(
    chances: Sequence[float], index: int | None, chance: float
) -> tuple[list[float], float]:
    """Chances of a node's children when the draft and the text both propose some.

    Both are taken as independent witnesses of the verifier's token, so their distributions are
    multiplied. Of the draft's, what its candidates leave is the share of a token that only the text
    proposes.

    Args:
        chances: Of the draft's candidates.
        index: Which of them the text proposes; None: another token.
        chance: That the text is right.

    Returns:
        The candidates' chances, and that of the text's token.
    """
    own = chances[index] if index is not None else max(1 - sum(chances), 0.0)
    total = own * chance + max(1 - own, 0.0) * (1 - chance)
    mixed = [
        (one * chance if i == index else one * (1 - chance)) / total
        for i, one in enumerate(chances)
    ]
    return mixed, own * chance / total


class DraftingWorth:
    """What a round that drafts is worth, as a line over what the text was worth in it.

    Where the text has much to offer, drafting does well, too: tokens are easy, and the text goes on
    behind the draft. The mean of all rounds that drafted would say that drafting is as good where
    it stands alone.
    """

    def __init__(self) -> None:
        self.sums = [0.0] * 7
        """Of 1, w, w^2, tokens, seconds, w tokens, and w seconds over the rounds, w the text's
        worth; discounted."""

    @property
    def rounds(self) -> float:
        """Rounds that drafted, discounted."""
        return self.sums[0]

    def add(self, text_worth: float, tokens: float, seconds: float) -> None:
        """A round that drafted where the text was worth so much brought ``tokens`` in
        ``seconds``."""
        w = text_worth
        new = (1.0, w, w * w, tokens, seconds, w * tokens, w * seconds)
        self.sums = [old * DISCOUNT + value for old, value in zip(self.sums, new, strict=True)]

    def expected(self, text_worth: float, rate: float) -> float:
        """Tokens minus ``rate`` times seconds of a round that drafts where the text is worth so
        much."""
        rounds, w, ww, tokens, seconds, w_tokens, w_seconds = self.sums
        mean = w / rounds
        gained = (tokens - rate * seconds) / rounds
        slope = (w_tokens - rate * w_seconds - w * gained) / (ww - w * mean + SLOPE_PRIOR)
        return gained + min(max(slope, 0.0), 1.0) * (text_worth - mean)


class TextRule:
    """How many tokens that the text proposes one sequence verifies: the most valuable number, or
    none.

    The committed tokens tell in every round whether the text was right, also when nothing was
    verified, so chances need no exploration. The value of a round is its expected tokens minus
    lambda times its seconds; ``value`` knows both. What drafting is worth is learned from the
    rounds that drafted.
    """

    def __init__(self, value: RoundValue | None = None, accept: Calibrator | None = None) -> None:
        """``accept`` calibrates the chances; rules may share it."""
        self.accept = accept or Calibrator(PRIOR.accept, PRIOR)
        self.value = value or RoundValue()
        self.drafting = DraftingWorth()
        self.whole = 0.0
        """How many of the rounds that drafted accepted all that was drafted, discounted."""
        self.drafts = 0
        self._text_worth = 0.0
        """What the text was worth in this round."""

    def begin_request(self) -> None:
        """Another request begins."""
        self.accept.begin_request()

    def chance(self, step: TextStep) -> float:
        """The chance that the verifier agrees, if it agreed with everything before; lower by what
        the rule is in doubt."""
        shift, slope = self.accept.draw((-DOUBT, 0.0))
        return min(sigmoid(shift + slope * self.accept.score(text_features(step))), CERTAIN)

    def count(self, values: Sequence[float], drafts: bool) -> int:
        """How many tokens of the text to verify now, without drafting.

        Args:
            values: For each token the chance that it and all before it are right.
            drafts: Whether the round could draft instead.

        Returns:
            One of ``SIZES``; 0 to draft, or where there is no drafting, to decode plainly.
        """
        if not self.value.verify.fitted:
            return 0
        best, most = self._best(values)
        self._text_worth = most
        if drafts and self.drafts < FIRST_DRAFTS:
            return 0
        plain = 1 - self.value.rate * self.value.seconds(0, 0)
        return (
            0 if drafts and self.drafting.expected(most, self.value.rate) - plain >= most else best
        )

    def count_behind(self, values: Sequence[float], nodes: int) -> int:
        """How many tokens of the text to verify behind a draft: with it at most ``FEW`` nodes, or
        one of ``SIZES``.

        Args:
            values: For each token the chance that it and all before it are right, if the draft is.
            nodes: Drafted nodes that are verified.
        """
        if self.drafts < FIRST_DRAFTS or not self.value.verify.fitted:
            return 0
        return self._best(values, nodes, self.whole / self.drafting.rounds, FEW)[0]

    def _best(
        self, values: Sequence[float], nodes: int = 0, right: float = 1.0, few: int = 0
    ) -> tuple[int, float]:
        """The most valuable number of tokens, and its worth; 0 and 0.0 where none is worth
        anything.

        Args:
            values: For each token the chance that it and all before it are right, if the nodes
                before them are.
            nodes: Nodes before them in the pass.
            right: The chance that those are right.
            few: Passes of at most so many nodes may have any number of them, others one of
                ``SIZES``.
        """
        known = max(FIRST_NODES, 2 * max(self.value.verify.samples)) - nodes
        return most_valuable(
            [right * value for value in values[: max(known, 0)]],
            self.value.price(0, nodes),
            lambda more: nodes + more <= few or nodes + more in SIZES,
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a committed round."""
        self.judge(outcome)
        if outcome.steps:
            spent = self.value.seconds(outcome.steps, outcome.nodes)  # stalls hardly count
            self.drafting.add(self._text_worth, outcome.accepted + 1, spent)
            self.whole = self.whole * DISCOUNT + (outcome.num_expanded >= outcome.depth)
            self.drafts += 1
        self._text_worth = 0.0

    def judge(self, outcome: RoundOutcome) -> None:
        """Learn how many of the text's tokens were right."""
        for number, step in enumerate(outcome.proposed):
            self.accept.learn(self.accept.score(text_features(step)), number < outcome.right)
        self.accept.advance()
