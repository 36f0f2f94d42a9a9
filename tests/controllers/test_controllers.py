"""Tests of the controllers without an engine. They check what the controllers decide and what they
learn."""

import numpy as np
import pytest

from eesd.bench.replay.replay import teach
from eesd.common.errors import EESDError
from eesd.controllers import CONTROLLERS, Controller, DraftStep, RoundOutcome, make_controller
from eesd.controllers.thompson import BetaTS

pytestmark = pytest.mark.fast

SPECS = [
    "beta-ts",
    "beta-ts:alpha=2,beta=3,discount=0.95",
    "calibration-ts",
    "cost-aware-ts",
    "fixed",
    "fixed:k=7",
]


def rounds(controller: Controller, count: int, seed: int) -> list[bool]:
    """Returns the controller's decisions in an invented stream of rounds. The controller observes
    the outcome of each round."""
    random = np.random.default_rng(seed)
    decisions = []
    for number in range(count):
        if number % 20 == 0:
            controller.begin_request()
        depth = 0
        path = 1.0
        more = controller.begin_round(1) != 0
        while more and depth < 12:
            depth += 1
            probability, margin = random.random(2).tolist()
            path *= probability
            more = controller.keep_drafting(DraftStep(depth, probability, path, 5 * margin, depth))
            decisions.append(more)
        accepted = int(random.integers(0, depth + 1))
        teach(controller, outcome(depth, accepted, 0.01, 0.02 + 0.001 * depth))
    return decisions


@pytest.mark.parametrize("spec", SPECS)
def test_same_seed_same_decisions(spec: str) -> None:
    assert rounds(make_controller(spec, seed=5), 50, seed=0) == rounds(
        make_controller(spec, seed=5), 50, seed=0
    )


def test_another_seed_decides_otherwise() -> None:
    assert rounds(make_controller("beta-ts", seed=5), 50, seed=0) != rounds(
        make_controller("beta-ts", seed=6), 50, seed=0
    )


def test_every_controller_is_tested_here() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(CONTROLLERS)


def step(depth: int, probability: float = 0.5, margin: float = 1.0) -> DraftStep:
    return DraftStep(depth, probability, probability**depth, margin, depth)


def outcome(
    steps: int, accepted: int, draft_seconds: float = 0.1, verify_seconds: float = 1.0
) -> RoundOutcome:
    """A round of a chain whose steps take ``draft_seconds`` each."""
    return RoundOutcome(
        steps, steps * draft_seconds, steps, steps, verify_seconds, accepted, num_expanded=accepted
    )


def test_fixed_drafts_k_tokens() -> None:
    controller = make_controller("fixed:k=3")
    assert [controller.keep_drafting(step(depth)) for depth in (1, 2, 3, 4)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("outcomes", "accepted", "rejected"),
    [
        ([(4, 4)], 4, 0),  # all accepted: nothing was rejected
        ([(4, 1)], 1, 1),  # the third and fourth were never judged
        ([(4, 0)], 0, 1),
        ([(3, 2), (5, 5), (1, 0), (1, 1)], 8, 2),
    ],
)
def test_beta_ts_counts_what_was_judged(
    outcomes: list[tuple[int, int]], accepted: int, rejected: int
) -> None:
    controller = BetaTS(alpha=4, beta=1, discount=1)
    for drafted, taken in outcomes:
        controller.observe(outcome(drafted, taken))
    assert (controller.accepted, controller.rejected) == (accepted, rejected)
    assert controller.prior == (4, 1)


def test_beta_ts_continues_as_often_as_its_posterior_says() -> None:
    """The share of steps after which ``beta-ts`` continues is the mean of Beta(alpha + accepted,
    beta + rejected)."""
    controller = BetaTS(alpha=2, beta=1, discount=1, seed=3)
    for _ in range(5):
        controller.observe(outcome(2, 1))
    draws = 20000
    share = sum(controller.keep_drafting(step(1)) for _ in range(draws)) / draws
    assert share == pytest.approx((2 + 5) / (2 + 5 + 1 + 5), abs=4 * 0.5 / draws**0.5)


def test_beta_ts_forgets_older_rounds() -> None:
    controller = BetaTS(alpha=4, beta=1, discount=0.5)
    for drafted, accepted in ((4, 4), (4, 2), (4, 0)):
        controller.observe(outcome(drafted, accepted))
    assert (controller.accepted, controller.rejected) == ((4 * 0.5 + 2) * 0.5 + 0, 0.5 + 1)
    for _ in range(60):
        controller.observe(outcome(1, 1))
        controller.observe(outcome(0, 0))  # plain rounds give no information
    assert controller.accepted == pytest.approx(2) and controller.rejected == pytest.approx(0)
    assert controller.prior == (4, 1)


def test_beta_ts_follows_drift_with_a_discount() -> None:
    steady = BetaTS(discount=1)
    forgetful = BetaTS(discount=0.9)
    for controller in (steady, forgetful):
        for accepted in [4] * 200 + [0] * 30:
            controller.observe(outcome(4, accepted))
    assert steady.accepted / (steady.accepted + steady.rejected) > 0.9
    assert forgetful.accepted / (forgetful.accepted + forgetful.rejected) < 0.3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "beta",
            "no controller 'beta'; there are beta-ts, calibration-ts, cost-aware-ts, fixed\\.",
        ),
        ("", "no controller ''"),
        ("fixed:n=4", "fixed has no option 'n'; it has k"),
        ("fixed:=4", "no option ''"),
        ("fixed:seed=4", "no option 'seed'"),
        ("fixed:k=four", "k=four .* not a number"),
        ("fixed:k", "k= .* not a number"),
        ("fixed:k=2.5", "not a number"),
        ("fixed:k=0", "k must be at least 1"),
        ("threshold:p=0.5", "no controller 'threshold'"),
        ("beta-ts:alpha=0", "above 0"),
        ("beta-ts:alpha=nan", "above 0"),
        ("beta-ts:beta=inf", "finite"),
        ("beta-ts:discount=0", "discount must be above 0"),
        ("cost-aware-ts:prior=1", "no option 'prior'; it has none"),
    ],
)
def test_what_cannot_be_made_is_named(spec: str, message: str) -> None:
    with pytest.raises(EESDError, match=message):
        make_controller(spec)


def test_options_reach_the_controller() -> None:
    controller = make_controller("beta-ts:alpha=2,beta=3,discount=0.5")
    assert isinstance(controller, BetaTS)
    assert controller.prior == (2, 3) and controller.discount == 0.5
