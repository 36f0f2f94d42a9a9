"""What a row of a batch drafts from its own text."""

from collections.abc import Sequence

from eesd.controllers.base import RoundOutcome
from eesd.controllers.load_rule import LoadRule, RowController
from eesd.controllers.text_rule import TextChances, TextStep

LEAST_VALUE = 0.1
"""Chance of a token of the text, and all before it, below which it is not proposed to the batch."""
LONGEST_COPY = 16
"""Tokens of the text that one round verifies at most."""


class RowTextRule(TextChances):
    """The text's chances, calibrated by all rows; how many levels are verified, the batch decides.

    A row takes what the text proposes where that is worth more than what it expects of the exit head.

    Attributes:
        values: For each token that the row takes this round, the chance that it and all before it are right.
    """

    def __init__(self, rule: LoadRule, row: RowController, heads: bool) -> None:
        super().__init__(rule.text)
        self.values: list[float] = []
        self._rule, self._row, self._heads = rule, row, heads

    def count(self, values: Sequence[float], drafts: bool) -> int:
        worth = [value for value in values[:LONGEST_COPY] if value >= LEAST_VALUE]
        exit_head = 0.0
        if drafts and self._heads:
            reach = self._row.first
            for depth in range(1, 4):
                exit_head += max(reach - self._row.least, 0.0)
                reach *= self._rule.chance(depth + 1)
        self.values = worth if sum(worth) > exit_head else []
        return len(self.values)

    def count_behind(self, values: Sequence[float], nodes: int) -> int:
        return 0

    def observe(self, steps: Sequence[TextStep], right: int, judged: int, outcome: RoundOutcome) -> None:
        super().observe(steps, right, judged, outcome)
        self.values = []
