"""Tests of the default controller and the guard on a simulated machine. Decoding is not slower than
plain decoding, and drafting never stops for good."""

from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner
from support.command import slow_but

from eesd.bench.replay.costs import BUNDLED, FOUR_BIT, CallCosts
from eesd.bench.replay.traces import Trace, TracedRequest
from eesd.controllers import make_controller
from eesd.runtime.decoding import guard
from eesd.runtime.decoding.guard import Guard, Terms
from lab.machine import Machine, burst, decode
from lab.starts import HEADS, MACHINES, main, simulate_starts
from lab.streams import SyntheticStream

pytestmark = pytest.mark.fast
VERIFY = {1: 9.8e-3, 2: 11.7e-3, 3: 12.7e-3, 4: 14.0e-3, 5: 14.7e-3, 8: 17.7e-3, 17: 27e-3}
"""The seconds that a verify pass takes for each number of nodes. They are those of a model of 135
million parameters on two cores."""


def texts(acceptance: float, tokens: int, count: int, seed: int) -> Trace:
    """Returns requests whose acceptance varies from text to text and from token to token."""
    random = np.random.default_rng(seed)
    found = list[TracedRequest]()
    for _ in range(count):
        mean = acceptance + 0.15 * random.standard_normal()
        levels = tuple(
            float(np.clip(mean + d, 0.01 + 0.001 * i, 0.98 + 0.001 * i))
            for i, d in enumerate((-0.3, -0.1, 0.1, 0.3))
        )
        found += (
            SyntheticStream("text", levels, 0.5)
            .trace(tokens, 1, seed=int(random.integers(1 << 30)))
            .requests
        )
    return Trace(tuple(found), {})


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(
    ("draft", "acceptance"),
    [(1.5e-3, 0.2), (3.5e-3, 0.2), (3.5e-3, 0.47), (5e-3, 0.4), (5e-3, 0.6)],
)
def test_hardly_slower_from_the_first_request_on(
    draft: float, acceptance: float, requests: int
) -> None:
    """The cost of a weak head is limited. The seeds are fixed, so this cannot fail by bad luck."""
    costs = CallCosts({1: draft, 16: 16 * draft}, VERIFY)
    plain = drafting = 0.0
    for seed in range(24 // requests):
        trace = texts(acceptance, 96, requests, seed)
        plain += decode(trace, Machine(costs, seed=seed)).seconds
        drafting += decode(
            trace, Machine(costs, seed=seed), make_controller("cost-aware-ts", seed), Guard()
        ).seconds
    assert plain / drafting >= 0.975


GOOD = SyntheticStream("good", (0.5, 0.7, 0.9, 0.97), 0.8)


@pytest.mark.parametrize("machine", slow_but(MACHINES, "load", "stalls"))
def test_a_head_that_pays_is_never_locked_out(machine: str) -> None:
    starts = [*simulate_starts(HEADS["pays"], FOUR_BIT, machine, "cost-aware-ts", 6)]
    assert min(start.drafting for start in starts) > 0.3
    assert max(start.behind for start in starts) < 0.01


@pytest.mark.parametrize(
    ("head", "machine"),
    slow_but(
        [*product(("useless", "overrated"), MACHINES)],
        ("useless", "steady"),
        ("overrated", "stalls"),
        ("overrated", "burst"),
    ),
)
def test_a_head_that_does_not_pay_costs_little(head: str, machine: str) -> None:
    starts = [*simulate_starts(HEADS[head], FOUR_BIT, machine, "cost-aware-ts", 5)]
    assert np.median([start.first for start in starts]) < 0.025  # is 0.023 for 60 overrated heads
    assert np.median([start.thousand for start in starts]) < 0.01
    assert max(start.behind for start in starts) < 0.013


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(Guard.__init__, "__defaults__", (Terms(allowance=0.0),)), (guard, "median_low", max)],
    ids=["never forgives", "no medians"],
)
def test_a_wrong_guard_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    starts = [*simulate_starts(HEADS["pays"], FOUR_BIT, "stalls", "cost-aware-ts", 6)]
    assert min(start.drafting for start in starts) < 0.3


def test_a_burst_while_drafting_pays_stops_it_for_a_moment_only() -> None:
    trace = GOOD.trace(128, 16, seed=3)
    costs = BUNDLED.calls.scaled(BUNDLED.plain_seconds)
    found = [
        decode(
            trace,
            Machine(costs, disturbance=disturbance),
            make_controller("cost-aware-ts"),
            Guard(),
        )
        for disturbance in (None, burst(4, 20, 1))
    ]
    undisturbed, disturbed = (1 + run.lost(costs, 1024) for run in found)
    assert disturbed < 1.05 * undisturbed and found[1].seconds > found[0].seconds


def test_starts_are_shown(pytestconfig: pytest.Config) -> None:
    trace = pytestconfig.rootpath / "bench/results/trace-greedy.npz"
    result = CliRunner().invoke(main, ["--trace", str(trace), "--starts", "1"])
    assert result.exit_code == 0 and "recorded  stalls lost of 100 tokens" in result.output
    result = CliRunner().invoke(main, ["--trace", str(trace), "--costs", "9b"])
    assert result.exit_code == 2 and "no costs '9b'" in result.output
