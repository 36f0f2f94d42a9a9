"""What the batch's rule decides, in a simulation: rows whose drafts are accepted at known rates, calls of known cost."""

from collections.abc import Callable, Sequence
from math import log

import numpy as np
import pytest

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.call_costs import CallCosts
from eesd.controllers.load_rule import LoadRule, RowController

pytestmark = pytest.mark.fast

SLOTS = 256
PRIOR = CalibrationPrior(accept=(0.0, 0.0, 1.0, 0.0, 0.0), following=(0.0, 0.0, 0.0, 0.0, 0.0))
"""The draft's log-odds are those of acceptance, and say nothing about the token behind."""


def verify_seconds(rows: int, nodes: int) -> float:
    """A model whose weights take 20 ms, and a node 0.9 ms: measured with 135 M weights in float32 on two processors."""
    return 20e-3 + 0.7e-3 * rows + 0.9e-3 * rows * nodes


def draft_seconds(rows: int) -> float:
    return 0.5e-3 + 0.4e-3 * rows


class Rows:
    """Rows that draft and are verified under a rule, until so many rounds are over. Chances are around 0.9 or 0.2."""

    def __init__(self, rule: LoadRule, rows: int, easy: float, seed: int = 0) -> None:
        self.rule, self.rows, self.easy = rule, rows, easy
        self.random = np.random.default_rng(seed)
        for count in (1, 2, 4, 8, 16, 32):
            for nodes in (1, 2, 4, 8):
                rule.verify.add(count, nodes, SLOTS, verify_seconds(count, nodes))
            rule.draft.add(count, 1, SLOTS, draft_seconds(count))
        self.controllers = [RowController(rule) for _ in range(rows)]
        self.tokens, self.seconds, self.levels = 0, 0.0, 0

    def run(self, rounds: int) -> float:
        """Tokens per second of the second half of so many rounds."""
        for number in range(rounds):
            if number == rounds // 2:
                self.tokens, self.seconds, self.levels = 0, 0.0, 0
            self.round()
        return self.tokens / self.seconds

    def round(self) -> None:
        self.rule.begin_round(self.rows, SLOTS)
        for row in self.controllers:
            row.begin_round(1)
        chances: list[list[float]] = [[] for _ in self.controllers]
        active, depth, seconds = [*range(self.rows)], 0, 0.0
        while active and depth < 8 and self._draws(active, depth):
            seconds += draft_seconds(len(active))
            self.rule.draft.add(len(active), 1, SLOTS, draft_seconds(len(active)))
            depth += 1
            active = [i for i in active if self._step(i, depth, chances[i])]
        values = [sum(one.values[level] for one in self.controllers if level < len(one.values)) for level in range(depth)]
        levels = self.rule.levels(values)
        seconds += verify_seconds(self.rows, 1 + levels)
        tokens = 0
        for row, drafted in zip(self.controllers, chances, strict=True):
            right = next((i for i, chance in enumerate(drafted) if self.random.random() >= chance), len(drafted))
            own, accepted = drafted[:levels], min(right, levels)
            tokens += accepted + 1
            row.observe(
                RoundOutcome(
                    steps=depth,
                    draft_seconds=0.0,
                    depth=len(own),
                    nodes=len(own),
                    verify_seconds=0.0,
                    accepted=accepted,
                    num_expanded=accepted,
                    first_right=right > 0 if drafted else None,
                )
            )
        self.rule.verify.add(self.rows, 1 + levels, SLOTS, verify_seconds(self.rows, 1 + levels))
        self.rule.observe(depth > 0, tokens, seconds)
        self.tokens += tokens
        self.seconds += seconds
        self.levels += levels

    def _draws(self, active: Sequence[int], depth: int) -> bool:
        chosen = [self.controllers[i] for i in active]
        return self.rule.goes_on([(one.reach, one.next) for one in chosen], depth)

    def _step(self, row: int, depth: int, chances: list[float]) -> bool:
        chance = 0.9 if self.random.random() < self.easy else 0.2
        chances.append(chance)
        margin = max(log(chance / (1 - chance)), 0.0)
        return self.controllers[row].keep_drafting(DraftStep(depth, chance, chance, margin, depth))


def rate(make: Callable[[], LoadRule], rows: int, easy: float, rounds: int = 1000) -> float:
    return Rows(make(), rows, easy).run(rounds)


@pytest.mark.parametrize("easy", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("rows", [1, 4, 16, 32])
def test_automatic_is_as_good_as_the_better_of_always_and_never(rows: int, easy: float) -> None:
    fixed = {levels: rate(lambda levels=levels: LoadRule(PRIOR, levels), rows, easy) for levels in (0, 1, 3)}  # type: ignore[misc]
    assert rate(lambda: LoadRule(PRIOR), rows, easy) > 0.98 * max(fixed.values()), fixed


def test_drafting_fades_as_the_batch_fills_and_comes_back() -> None:
    rule = LoadRule(PRIOR)
    levels = []
    for rows in (1, 4, 16, 64, 4, 1):
        simulated = Rows(rule, rows, easy=0.5)
        simulated.run(200)
        levels.append(simulated.levels / 100)
    assert levels[0] > levels[1] > levels[2] > levels[3]
    assert levels[3] < 0.2
    assert levels[4] == pytest.approx(levels[1], rel=0.2) and levels[5] == pytest.approx(levels[0], rel=0.2)


def test_automatic_is_above_both_in_between() -> None:
    best = max(rate(lambda levels=levels: LoadRule(PRIOR, levels), 8, 0.5) for levels in (0, 3))  # type: ignore[misc]
    assert rate(lambda: LoadRule(PRIOR), 8, 0.5) > 1.03 * best


def test_a_budget_pays_its_rows_part() -> None:
    """Of what it costs if all rows verify as many nodes."""
    rule = LoadRule(PRIOR)
    for nodes in (1, 2, 4, 8, 16) * 10:
        rule.verify.add(8, nodes, SLOTS, verify_seconds(8, nodes))
    rule.begin_round(8, SLOTS)
    assert rule.price(1)(3) == pytest.approx(rule.rate * 3 * 0.9e-3, rel=0.1)
    assert LoadRule(PRIOR, 2).levels([6.4, 5.1, 4.1, 3.3]) == 2


def test_costs_of_calls_are_learned_for_sizes_that_were_not_measured() -> None:
    costs = CallCosts()
    random = np.random.default_rng(0)
    for _ in range(200):
        rows, nodes, slots = (
            int(random.choice([1, 2, 4, 8])),
            int(random.choice([1, 2, 4])),
            int(random.choice([128, 256, 640])),
        )
        costs.add(rows, nodes, slots, _seconds(rows, nodes, slots) * float(random.uniform(0.95, 1.05)))
    for rows, nodes, slots in ((1, 1, 128), (3, 5, 512), (6, 3, 256), (16, 2, 640), (12, 6, 900)):
        assert costs.seconds(rows, nodes, slots) == pytest.approx(_seconds(rows, nodes, slots), rel=0.08)


def _seconds(rows: int, nodes: int, slots: int) -> float:
    return 0.02 + 0.0009 * rows * nodes + 0.4e-6 * rows * slots + 0.5e-6 * rows * nodes * slots


def test_a_stall_hardly_counts_and_a_slower_machine_is_believed() -> None:
    costs = CallCosts()
    for _ in range(30):
        costs.add(2, 1, SLOTS, 0.02)
    costs.add(2, 1, SLOTS, 2.0)
    assert costs.seconds(2, 1, SLOTS) < 0.022
    for _ in range(60):
        costs.add(2, 1, SLOTS, 0.04)
    assert costs.seconds(2, 1, SLOTS) == pytest.approx(0.04, rel=0.05)
