"""Tests of what the batch's rule decides in a simulation. The acceptance rates of the rows and the
costs of the calls are known."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest

from eesd.common.prior import CalibrationPrior
from eesd.controllers.base import DraftStep, RoundOutcome
from eesd.controllers.batch_costs import BatchCosts
from eesd.controllers.load_rule import LoadRule, RowController

pytestmark = pytest.mark.fast

SLOTS = 256
PRIOR = CalibrationPrior(accept=(0.0, 0.0, 1.0, 0.0, 0.0), following=(0.0, 0.0, 0.0, 0.0, 0.0))
"""With this prior, the draft's log-odds equal the log-odds of acceptance, and they do not depend on
the next token."""


def verify_seconds(rows: int, nodes: int) -> float:
    """Reading the weights takes 20 ms and each node takes 0.9 ms. These times were measured with
    135 M weights in float32 on two processors."""
    return 20e-3 + 0.7e-3 * rows + 0.9e-3 * nodes


def eight_at_once(_: int, nodes: int) -> float:
    """Kernels process eight nodes in the time of one node."""
    return 10e-3 * -(-nodes // 8)


def draft_seconds(rows: int) -> float:
    return 0.5e-3 + 0.4e-3 * rows


class Rows:
    """A simulation of rows that draft and verify as a rule decides. The chance of acceptance is
    around 0.9 or around 0.2."""

    def __init__(
        self,
        rule: LoadRule,
        rows: int,
        easy: float,
        seed: int = 0,
        seconds: Callable[[int, int], float] = verify_seconds,
    ) -> None:
        self.rule = rule
        self.rows = rows
        self.easy = easy
        self.verify_seconds = seconds
        self.random = np.random.default_rng(seed)
        for count in (1, 2, 4, 8, 16, 32):
            for nodes in (1, 2, 4, 8):
                rule.verify.add(count, count * nodes, SLOTS, seconds(count, count * nodes))
            rule.draft.add(count, count, SLOTS, draft_seconds(count))
        self.controllers = [RowController(rule) for _ in range(rows)]
        self.tokens = 0
        self.seconds = 0.0
        self.levels = 0.0

    def run(self, rounds: int) -> float:
        """Returns the tokens per second in the second half of the rounds."""
        for number in range(rounds):
            if number == rounds // 2:
                self.tokens = 0
                self.seconds = 0.0
                self.levels = 0.0
            self.round()
        return self.tokens / self.seconds

    def round(self) -> None:
        self.rule.begin_round(self.rows, SLOTS)
        for row in self.controllers:
            row.begin_round(1)
        chances: list[list[float]] = [[] for _ in self.controllers]
        active = [*self.controllers]
        depth = 0
        seconds = 0.0
        while active and depth < 8:
            active.sort(key=lambda one: one.reach * one.next, reverse=True)
            reaches = [(one.reach, one.next) for one in active]
            active = active[
                : self.rule.goes_on(reaches, depth, [one.path_chances for one in self.controllers])
            ]
            if active:
                depth += 1
                seconds += draft_seconds(len(active))
                self.rule.draft.add(len(active), len(active), SLOTS, draft_seconds(len(active)))
            for one in active:
                self._step(one, depth, chances[self.controllers.index(one)])
        levels = self.rule.levels([one.path_chances for one in self.controllers])
        nodes = self.rows * (1 + max(levels)) if self.rule.padded else self.rows + sum(levels)
        verifying = self.verify_seconds(self.rows, nodes)
        seconds += verifying
        tokens = 0
        for row, drafted, most in zip(self.controllers, chances, levels, strict=True):
            right = next(
                (i for i, chance in enumerate(drafted) if self.random.random() >= chance),
                len(drafted),
            )
            own = drafted[:most]
            accepted = min(right, most)
            tokens += accepted + 1
            row.observe(
                RoundOutcome(
                    steps=len(drafted),
                    draft_seconds=0.0,
                    depth=len(own),
                    nodes=len(own),
                    verify_seconds=0.0,
                    accepted=accepted,
                    num_expanded=accepted,
                    first_right=right > 0 if drafted else None,
                )
            )
        self.rule.verify.add(self.rows, nodes, SLOTS, verifying)
        self.rule.observe(depth > 0, tokens, seconds)
        self.tokens += tokens
        self.seconds += seconds
        self.levels += sum(levels) / self.rows

    def _step(self, row: RowController, depth: int, chances: list[float]) -> None:
        chance = 0.9 if self.random.random() < self.easy else 0.2
        chances.append(chance)
        margin = max(log(chance / (1 - chance)), 0.0)
        row.keep_drafting(DraftStep(depth, chance, chance, margin, depth))


def rate(
    rule: LoadRule, rows: int, easy: float, seconds: Callable[[int, int], float] = verify_seconds
) -> float:
    return Rows(rule, rows, easy, seconds=seconds).run(600)


@pytest.mark.parametrize("seconds", [verify_seconds, eight_at_once])
@pytest.mark.parametrize("easy", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("rows", [2, 7, 16])
def test_automatic_is_as_good_as_the_better_of_always_and_never(
    rows: int, easy: float, seconds: Callable[[int, int], float]
) -> None:
    fixed = {levels: rate(LoadRule(PRIOR, levels), rows, easy, seconds) for levels in (0, 1, 3)}
    # With kernels that process blocks, the best fixed length happens to fill the blocks.
    share = 0.96 if seconds is verify_seconds else 0.93
    assert rate(LoadRule(PRIOR), rows, easy, seconds) > max(
        share * max(fixed.values()), 0.99 * fixed[0]
    ), fixed
    padded = LoadRule(PRIOR)
    padded.padded = True
    assert rate(padded, rows, easy, seconds) > 0.99 * fixed[0]


def test_drafting_fades_as_the_batch_fills_and_comes_back() -> None:
    rule = LoadRule(PRIOR)
    levels = []
    for rows in (1, 4, 16, 64, 4, 1):
        simulated = Rows(rule, rows, easy=0.5)
        simulated.run(200)
        levels.append(simulated.levels / 100)
    assert levels[0] > levels[1] > levels[2] > levels[3]
    assert levels[3] < 0.2
    assert levels[4] == pytest.approx(levels[1], rel=0.2) and levels[5] == pytest.approx(
        levels[0], rel=0.2
    )


def test_automatic_is_above_both_in_between() -> None:
    best = max(rate(LoadRule(PRIOR, levels), 8, 0.5) for levels in (0, 3))
    assert rate(LoadRule(PRIOR), 8, 0.5) > 1.06 * best


def rule_of(
    rows: int, seconds: Callable[[int, int], float], waiting: int = 0, padded: bool = False
) -> LoadRule:
    rule = LoadRule(PRIOR)
    rule.padded = padded
    for nodes in [*range(rows, 8 * rows + 1)] * 10:
        rule.verify.add(rows, nodes, SLOTS, seconds(rows, nodes))
    for count in [*range(1, rows + 1)] * 10:
        rule.draft.add(count, count, SLOTS, draft_seconds(count))
    rule.begin_round(rows, SLOTS, waiting)
    return rule


def test_a_budget_pays_its_rows_part() -> None:
    """The price of a row's nodes is the row's share of the cost of a pass in which all rows verify
    the same number of nodes."""
    rule = rule_of(8, verify_seconds)
    assert rule.price(np.array(3)) == pytest.approx(rule.rate * 3 * 0.9e-3, rel=0.1)
    assert LoadRule(PRIOR, 2).levels([[0.9, 0.8, 0.7], [0.9]]) == [2, 1]


def test_the_most_valuable_nodes_of_all_rows_are_verified() -> None:
    """Nodes that fit into a block of the kernels cost nothing. The next block costs as much as a
    round."""
    rule = rule_of(4, eight_at_once)
    assert rule.levels([[0.9, 0.8, 0.7], [0.6, 0.3], [0.2], []]) == [3, 1, 0, 0]
    assert rule.goes_on([(1.0, 0.6)] * 4, 0, [[]] * 4) == 4
    assert rule.goes_on([(0.9, 0.9), (0.9, 0.9), (1.0, 0.1)], 1, [[0.9], [0.9], [], []]) == 2
    rule = rule_of(4, eight_at_once, padded=True)
    assert rule.levels([[0.9, 0.8, 0.7], [0.6, 0.3], [0.2], []]) == [1] * 4
    assert rule.goes_on([(0.9, 0.1)] * 2, 1, [[0.9], [0.9], [0.9, 0.1], []]) == 0


def test_a_second_is_worth_what_plain_rounds_bring_and_more_where_prompts_wait() -> None:
    rule = rule_of(2, verify_seconds)
    waited_for = rule_of(2, verify_seconds, waiting=14)
    assert waited_for.rate == pytest.approx(8 * rule.rate)
    assert [one.goes_on([(1.0, 0.3)] * 2, 0, [[]] * 2) for one in (rule, waited_for)] == [2, 0]
    before = rule.rate
    for _ in range(50):
        rule.observe(True, 2, 1.0)  # while the machine is slow, no draft is worth its time
    rule.begin_round(2, SLOTS)
    assert rule.rate == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("padded", [False, True])
def test_no_drafts_are_made_where_a_node_costs_what_a_token_brings(padded: bool) -> None:
    assert rule_of(4, verify_seconds, padded=padded).can_pay
    # Seven rows leave one of eight nodes free.
    assert rule_of(7, eight_at_once, padded=padded).can_pay is not padded
    assert not rule_of(8, lambda _, nodes: 2e-3 * nodes, padded=padded).can_pay


def test_costs_of_calls_are_learned_for_sizes_that_were_not_measured() -> None:
    costs = BatchCosts()
    random = np.random.default_rng(0)
    for _ in range(200):
        rows = int(random.choice([1, 2, 4, 8]))
        slots = int(random.choice([128, 256, 640]))
        nodes = rows * int(random.choice([1, 2, 4]))
        costs.add(
            rows, nodes, slots, _seconds(rows, nodes, slots) * float(random.uniform(0.95, 1.05))
        )
    for rows, nodes, slots in (
        (1, 1, 128),
        (3, 15, 512),
        (6, 18, 256),
        (16, 32, 640),
        (12, 72, 900),
    ):
        assert costs.seconds(rows, nodes, slots) == pytest.approx(
            _seconds(rows, nodes, slots), rel=0.08
        )


def _seconds(rows: int, nodes: int, slots: int) -> float:
    return 0.02 + 0.0009 * nodes + 0.4e-6 * rows * slots + 0.5e-6 * nodes * slots


def test_costs_of_kernels_that_take_blocks_are_learned() -> None:
    """The curve also holds for longer texts. A larger call never costs less."""
    costs = BatchCosts()
    for _ in range(20):
        for nodes in (1, 2, 4, 7, 8, 9, 12, 16):
            costs.add(1, nodes, SLOTS, eight_at_once(1, nodes))
    curve = costs.curve(np.ones(16, int), np.arange(1, 17), SLOTS).tolist()
    assert curve == sorted(curve)
    assert curve[:8] == pytest.approx([0.01] * 8, rel=0.15) and curve[8:] == pytest.approx(
        [0.02] * 8, rel=0.15
    )


def test_a_slower_machine_is_slower_for_all_sizes() -> None:
    """Plain rounds set the pace for all sizes. The cost of one more node, in units of a plain
    round, stays the same."""
    costs = BatchCosts()
    for _ in range(10):
        for nodes in (1, 2, 4, 8, 16):
            costs.add(4, nodes, SLOTS, verify_seconds(4, nodes))
    costs.add(4, 4, SLOTS, 2.0)
    assert costs.seconds(4, 4, SLOTS) < 1.1 * verify_seconds(4, 4), "a stall hardly counts"
    for pace in (2.0, 1.0, 0.5, 1.0):
        for _ in range(100):
            costs.add(4, 4, SLOTS, pace * verify_seconds(4, 4))
        expected = [pace * verify_seconds(4, nodes) for nodes in (4, 8, 16)]
        assert costs.curve(np.full(3, 4), np.array([4, 8, 16]), SLOTS).tolist() == pytest.approx(
            expected, rel=0.03
        )


def test_a_few_fast_calls_are_no_failure() -> None:
    """A few very fast calls of one size do not determine the fitted line, and raise no error,
    although the sums over the calls are large."""
    costs = BatchCosts()
    for seconds in (1e-6, 2e-6, 1e-8):
        costs.add(4, 1024, 8192, seconds)
        assert 0 < costs.seconds(4, 1024, 8192) < 1e-4
