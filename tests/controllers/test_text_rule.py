"""Tests of the rule for proposals of the text. The durations are invented."""

from collections.abc import Sequence

import numpy as np
import pytest

from eesd.controllers import RoundOutcome, TextStep
from eesd.controllers.text_rule import FIRST_DRAFTS, SIZES, TextRule, combined

pytestmark = pytest.mark.fast

PLAIN = 1.0
NODE = 0.05
DRAFT = 0.2
STEP = TextStep(length=2, times=1, of=1)


def round_of(
    rule: TextRule,
    steps: Sequence[TextStep],
    right: int,
    nodes: int = 0,
    drafts: int = 0,
    accepted: int = 0,
) -> None:
    outcome = RoundOutcome(
        steps=drafts,
        draft_seconds=DRAFT * drafts,
        depth=drafts,
        nodes=nodes,
        verify_seconds=PLAIN + NODE * nodes,
        accepted=accepted,
        num_expanded=min(accepted, drafts),
        proposed=steps[: right + 1],
        right=right,
    )
    rule.value.observe(outcome)
    rule.observe(outcome)


def taught(
    rights: Sequence[int], nodes: Sequence[int] = (0, 4, 1, 8), step: TextStep = STEP
) -> TextRule:
    """Returns a rule that has learned from rounds. In these rounds ``rights`` of ten proposed
    tokens were right, and ``nodes`` nodes were verified."""
    rule = TextRule()
    for number, right in enumerate(rights):
        verified = nodes[number % len(nodes)]
        round_of(rule, [step] * 10, right, verified, accepted=min(right, verified))
    return rule


def test_more_evidence_means_a_better_chance() -> None:
    rule = TextRule()
    lengths = [rule.chance(STEP._replace(length=n)) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert lengths[:6] == sorted(set(lengths)) and lengths[5] == lengths[6] < 1
    assert (
        rule.chance(STEP._replace(times=4, of=4))
        > rule.chance(STEP)
        > rule.chance(STEP._replace(of=5))
    )


def test_chances_become_those_of_the_text() -> None:
    random = np.random.default_rng(0)
    for truth in (0.1, 0.5, 0.9):
        rights = [next((i for i in range(10) if random.random() > truth), 10) for _ in range(1500)]
        assert taught(rights).chance(STEP) == pytest.approx(truth, abs=0.07)


def test_labels_need_no_verified_nodes() -> None:
    """The rule also learns from proposals that were not verified, so text is copied as soon as it
    repeats."""
    wrong = taught([0] * 200, nodes=[0])
    right = taught([10] * 60, nodes=[0])
    assert wrong.chance(STEP) < 0.1 and right.chance(STEP) > 0.9
    values = [right.chance(STEP) ** n for n in range(1, 11)]
    assert right.count(values, drafts=False) == 4, "no further than costs can be guessed"


def test_the_count_has_the_best_value() -> None:
    rule = taught([1, 0, 3] * 60)
    random = np.random.default_rng(1)
    counts = set()
    rate = rule.value.rate
    for _ in range(200):
        values = np.cumprod(random.random(12) ** random.exponential(0.6)).tolist()
        worth = {n: sum(values[:n]) - rate * NODE * n for n in (0, *SIZES) if n <= 12}
        count = rule.count(values, drafts=False)
        counts.add(count)
        assert worth[count] > max(worth.values()) - 0.02
    assert counts == {0, 1, 2, 4, 8}
    assert rule.count([0.01, 0.001], drafts=False) == 0, "not verified where it does not pay"
    assert rule.count([], drafts=False) == 0 == TextRule().count([0.9], drafts=False)


def test_the_text_goes_on_behind_a_draft_as_far_as_it_pays() -> None:
    def worth(kept: bool, values: Sequence[float], nodes: int) -> int:
        rule = taught([4, 0, 1, 2] * 10)
        for number in range(60):
            round_of(rule, [], 0, nodes=3, drafts=3, accepted=3 if kept or number % 4 == 0 else 1)
        return rule.count_behind(values, nodes)

    copied = [0.8**n for n in range(1, 30)]
    assert worth(True, copied, 3) > 5 >= worth(False, copied, 3) > 0, "less where drafts are wrong"
    assert worth(True, [0.02, 0.01], 3) == 0 == worth(True, [], 3)
    assert {3 + worth(True, copied[:most], 3) for most in range(30)} <= {*range(9), *SIZES}
    assert TextRule().count_behind(copied, 3) == 0, "nothing is known yet"


@pytest.mark.parametrize(
    ("accepted", "short", "long"), [(0, True, True), (3, False, True), (11, False, False)]
)
def test_the_text_replaces_drafting_where_it_is_worth_more(
    accepted: int, short: bool, long: bool
) -> None:
    rule = taught([4, 0, 1, 2] * 10)
    for number in range(60):
        asked = rule.count([0.99**n for n in range(1, 9)], drafts=True)
        assert number >= FIRST_DRAFTS or asked == 0, "at first it is unknown what drafting is worth"
        round_of(rule, [], 0, nodes=4, drafts=4, accepted=accepted)
    assert (rule.count([0.8], drafts=True) > 0) == short
    assert (rule.count([0.99**n for n in range(1, 9)], drafts=True) > 0) == long


def test_drafting_that_is_good_because_the_text_is_does_not_count() -> None:
    """A draft may gain nothing alone, but much if the text continues after it. Such a draft is not
    worth drafting."""
    rule = taught([4, 0, 1, 2] * 10)
    for number in range(80):
        copies = number % 2 == 0
        rule.count([0.99**n for n in range(1, 3)] if copies else [], drafts=True)
        round_of(rule, [], 0, nodes=4, drafts=2, accepted=3 if copies else 0)
    assert rule.count([0.8], drafts=True) == 1


def test_two_witnesses_are_combined() -> None:
    agreed, text = combined([0.6, 0.2], 0, 0.7)
    assert agreed[0] == text == pytest.approx(0.42 / (0.42 + 0.12)) and agreed[1] < 0.2
    disputed, other = combined([0.6, 0.2], None, 0.7)
    assert 0.2 < other < 0.7 and disputed[0] < 0.6 and other + sum(disputed) == pytest.approx(1)
    unsure, same = combined([0.6, 0.2], None, 0.5)
    assert unsure == pytest.approx([0.6, 0.2]) and same == pytest.approx(0.2)
    for chance in (0.0001, 0.9999):
        mixed, text = combined([0.9999, 0.00005], None, chance)
        assert all(0 <= one < 1 for one in (*mixed, text))
