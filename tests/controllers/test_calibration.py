"""Tests that the calibration and cost-aware drafting learn the known parameters of simulated
streams."""

import dataclasses
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from eesd.bench.replay.replay import teach
from eesd.common.errors import EESDError
from eesd.common.json_input import from_json
from eesd.common.prior import CalibrationPrior
from eesd.controllers import DraftStep, RoundOutcome, make_controller
from eesd.controllers.calibration import Calibrator, CostAwareTS, features
from eesd.controllers.thompson import CalibrationTS
from eesd.controllers.value import CostCurve, RoundValue
from eesd.runtime.llm import Speculation, load

pytestmark = pytest.mark.fast


def step(depth: int, probability: float = 0.6, margin: float = 1.0) -> DraftStep:
    return DraftStep(depth, probability, probability**depth, margin, depth)


def outcome(
    steps: int, accepted: int, draft: float = 0.1, verify: float = 1.0, nodes: int | None = None
) -> RoundOutcome:
    verified = steps if nodes is None else nodes
    return RoundOutcome(
        steps, steps * draft, steps, verified, verify, accepted, num_expanded=accepted
    )


def grid_posterior(
    labels: list[tuple[float, bool]], prior: CalibrationPrior
) -> tuple[float, float]:
    """Computes the mean and the standard deviation of the intercept a + b by brute force. The slope
    is fixed at 1."""
    a = np.linspace(-6, 6, 2001)
    log_density = -(a**2) / 2 / (prior.shift**2 + prior.request**2)
    for z, accepted in labels:
        log_density += np.log(expit(a + z) if accepted else expit(-a - z))
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = float(weights @ a)
    return mean, float((weights @ (a - mean) ** 2) ** 0.5)


def test_posterior_is_that_of_logistic_regression() -> None:
    prior = CalibrationPrior(slope=1e-6)
    calibrator = Calibrator(prior.accept, prior)
    random = np.random.default_rng(0)
    labels = [(float(z), bool(random.random() < expit(z - 1))) for z in random.normal(1, 1.5, 200)]
    for z, accepted in labels:
        calibrator.learn(z, accepted)
    mean, deviation = grid_posterior(labels, prior)
    aa, _, ab, _, _, bb = calibrator.covariance
    assert calibrator.mean[0] + calibrator.mean[2] == pytest.approx(mean, abs=0.3 * deviation)
    assert (aa + 2 * ab + bb) ** 0.5 == pytest.approx(deviation, rel=0.1)


def test_learns_shift_and_slope_over_many_requests() -> None:
    prior = CalibrationPrior(shift=1.0, slope=0.5, drift=0.0)
    calibrator = Calibrator(prior.accept, prior)
    random = np.random.default_rng(1)
    for _ in range(100):
        calibrator.begin_request()
        offset = random.normal(0, prior.request)
        for z in random.normal(1, 1.5, 40).tolist():
            calibrator.learn(z, bool(random.random() < expit(-0.8 + 0.6 * z + offset)))
    assert calibrator.mean[:2] == pytest.approx([-0.8, 0.6], abs=0.2)


def test_a_request_has_its_own_offset_and_leaves_the_shared_part() -> None:
    prior = CalibrationPrior()
    calibrator = Calibrator(prior.accept, prior)
    for _ in range(100):
        calibrator.learn(1.0, True)
        calibrator.learn(1.0, False)
    low = calibrator.mean[2]
    assert low < -0.15, "accepted half of the time where 0.73 was expected"
    calibrator.begin_request()
    assert calibrator.mean[2] == 0 and calibrator.covariance[5] == prior.request**2
    assert calibrator.covariance[2] == calibrator.covariance[4] == 0
    assert calibrator.mean[0] < 0, "what all requests share remembers it"


def test_draws_have_the_posterior_of_what_requests_share() -> None:
    calibrator = Calibrator(CalibrationPrior().accept, CalibrationPrior())
    random = np.random.default_rng(2)
    for z in random.normal(1, 1.5, 60).tolist():
        calibrator.learn(z, bool(random.random() < expit(z)))
    drawn = np.array([calibrator.draw(random.standard_normal(2).tolist()) for _ in range(20000)])
    aa, as_, ab, ss, sb, _ = calibrator.covariance
    shared = np.array([[aa, as_], [as_, ss]])
    # The gain contains the coefficients of the regression of b on a and s.
    gain = np.array([[1, 0], [0, 1]]) + np.array(
        [np.array([ab, sb]) @ np.linalg.inv(shared), [0, 0]]
    )
    assert np.cov(drawn.T) == pytest.approx(gain @ shared @ gain.T, rel=0.06, abs=2e-3)
    assert drawn.mean(axis=0) == pytest.approx(
        [calibrator.mean[0] + calibrator.mean[2], calibrator.mean[1]], abs=0.02
    )


@pytest.mark.parametrize("name", ["calibration-ts", "cost-aware-ts"])
@pytest.mark.parametrize(
    ("drafted", "accepted", "judged"), [(5, 5, 5), (5, 2, 3), (5, 0, 1), (3, 3, 3)]
)
def test_labels_behind_the_first_rejection_are_not_counted(
    name: str, drafted: int, accepted: int, judged: int
) -> None:
    controller = make_controller(name)
    assert isinstance(controller, CalibrationTS | CostAwareTS)
    learned: list[bool] = []
    controller.begin_round(1)
    controller.accept.learn = lambda z, accepted: learned.append(accepted)  # type: ignore[method-assign]
    for depth in range(1, drafted + 1):
        controller.keep_drafting(step(depth))
    controller.observe(outcome(drafted, accepted))
    assert learned == [True] * min(accepted, judged) + [False] * (judged - accepted)


@pytest.mark.parametrize("name", ["calibration-ts", "cost-aware-ts"])
def test_steps_of_a_cancelled_round_are_forgotten(name: str) -> None:
    once = make_controller(name)
    cancelled = make_controller(name)
    assert isinstance(once, CalibrationTS | CostAwareTS) and isinstance(
        cancelled, CalibrationTS | CostAwareTS
    )
    for depth in (1, 2, 3):
        cancelled.keep_drafting(step(depth, 0.9))
    once.random = deepcopy(cancelled.random)
    for controller in (cancelled, once):
        controller.begin_round(1)
        controller.keep_drafting(step(1, 0.4))
    for controller in (cancelled, once):
        controller.observe(outcome(1, 1))
    assert (
        once.accept.mean == cancelled.accept.mean
        and once.accept.covariance == cancelled.accept.covariance
    )


def test_prior_goes_through_json_and_is_checked() -> None:
    prior = CalibrationPrior(shift=0.2)
    stored = json.loads(json.dumps(dataclasses.asdict(prior)))
    assert from_json(CalibrationPrior, stored) == prior
    for bad in (
        {"accept": [1.0]},
        {"shift": -1.0},
        {"request": float("nan")},
        {"following": [float("inf")] * 5},
    ):
        with pytest.raises(ValueError, match="must"):
            from_json(CalibrationPrior, stored | bad)
    started = make_controller("cost-aware-ts", prior=dataclasses.replace(prior, accept=(9.0,) * 5))
    assert isinstance(started, CostAwareTS) and started.accept.score((1, 1, 1, 1, 1)) == 45


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("margin", [-1.0, 0.0, 50.0, float("inf")])
def test_features_are_bounded(p: float, margin: float) -> None:
    assert np.abs(features(DraftStep(40, p, p, margin, 40))).max() <= 8


def test_cost_ignores_stalls_and_follows_change() -> None:
    curve = CostCurve()
    random = np.random.default_rng(0)
    curve.add(1, 30.0)  # the first call binds its buffers
    for _ in range(300):
        curve.add(1, float(random.normal(1, 0.05)) + (50 if random.random() < 0.02 else 0))
    assert curve.samples[1][1] == pytest.approx(1, rel=0.05)
    for _ in range(300):
        curve.add(1, 1.5)
    assert curve.samples[1][1] == pytest.approx(1.5, rel=0.02)


def test_cost_curve_never_falls_and_knows_what_it_saw() -> None:
    curve = RoundValue()
    random = np.random.default_rng(0)
    true = {0: 1.0, 1: 1.19, 2: 1.25, 4: 1.35, 8: 1.58}
    for _ in range(60):
        for nodes, seconds in true.items():
            draft = (0.26 + 0.09 * (nodes - 1)) * float(random.normal(1, 0.02))
            curve.observe(
                outcome(nodes, 0, draft / max(nodes, 1), seconds * float(random.normal(1, 0.02)))
            )
    table = [curve.verify.seconds(n) for n in range(20)]
    assert table == sorted(table)
    assert [table[n] for n in true] == pytest.approx(list(true.values()), rel=0.04)
    assert 1.25 < table[3] < 1.35 and curve.draft.seconds(0) == 0
    assert [curve.draft.seconds(n) for n in (1, 3, 6, 12)] == pytest.approx(
        [0.26, 0.44, 0.71, 1.25], rel=0.03
    )


def test_one_length_of_drafts_is_known_by_its_step() -> None:
    curve = RoundValue()
    curve.observe(outcome(4, 0, 0.2))
    assert [curve.draft.seconds(n) for n in range(3)] == pytest.approx([0, 0.2, 0.4])


def test_a_count_that_was_slow_once_is_tried_again() -> None:
    """Three tokens once took fifty times too long. The other counts soon correct the estimate
    roughly, and a few samples correct it precisely."""
    curve = CostCurve(from_zero=True)
    curve.add(1, 1.0)
    curve.fit()
    curve.add(3, 150.0)
    for _ in range(500):
        curve.add(1, 1.0)
    curve.fit()
    assert curve.seconds(3) < 4
    for _ in range(3):
        curve.add(3, 3.0)
    curve.fit()
    assert curve.seconds(3) == pytest.approx(3, rel=0.1)


def test_costs_that_were_measured_while_the_machine_was_slow_fall_at_once() -> None:
    curve = CostCurve()
    for _ in range(20):
        curve.add(0, 10.0)
        curve.add(2, 12.0)
    for _ in range(15):
        curve.add(2, 1.2)
    curve.fit()
    assert curve.seconds(0) <= curve.seconds(2) < 2.5


def drafted_by(controller: CostAwareTS, probability: float, longest: int = 16) -> int:
    depth = 1
    while depth < longest and controller.keep_drafting(
        step(depth, probability, float(np.log(probability / (1 - probability))))
    ):
        depth += 1
    return depth


def test_measures_a_plain_round_and_one_draft_first() -> None:
    controller = CostAwareTS()
    assert controller.begin_round(1) == 0
    teach(controller, outcome(0, 0))
    assert controller.begin_round(1) is None and drafted_by(controller, 0.99) == 1, (
        "what a draft step costs is not known"
    )
    teach(controller, outcome(1, 1, draft=0.05))
    assert controller.begin_round(1) is None and drafted_by(controller, 0.99) > 2


def test_expects_what_the_calibration_says() -> None:
    controller = CostAwareTS(prior=CalibrationPrior(accept=(0, 0, 1, 0, 0)))
    for steps in (0, 1):
        controller.begin_round(1)
        drafted_by(controller, 0.5)
        teach(controller, outcome(steps, steps))
    controller.begin_round(1)
    depth = drafted_by(controller, 0.8, longest=64)
    found = controller.expected_tokens(depth)
    assert depth > 1 and found == pytest.approx(sum(0.8**k for k in range(depth + 1)), rel=0.1)
    assert controller.expected_tokens(0) == 1 and controller.expected_tokens(depth + 1) is None


def test_drafts_longer_when_drafting_is_cheaper() -> None:
    lengths = []
    for draft_cost in (0.02, 0.1, 0.4):
        controller = CostAwareTS(seed=1)
        random = np.random.default_rng(0)
        drafted = []
        for _ in range(600):
            count = drafted_by(controller, 0.8) if controller.begin_round(1) != 0 else 0
            accepted = min(count, int(random.geometric(0.2)) - 1)
            teach(controller, outcome(count, accepted, draft_cost))
            drafted.append(count)
        lengths.append(np.median(drafted[200:]))
    assert lengths[0] > lengths[1] + 1 > lengths[2] + 2


def test_drafts_one_token_where_no_draft_pays() -> None:
    """Nothing is ever accepted, so the controller drafts as little as possible. Only the guard
    stops drafting."""
    controller = CostAwareTS()
    drafted = []
    for _ in range(300):
        count = drafted_by(controller, 0.6) if controller.begin_round(1) != 0 else 0
        teach(controller, outcome(count, 0, draft=0.5))
        drafted.append(count)
    assert np.mean(np.array(drafted[100:]) == 1) > 0.9


def test_prior_comes_with_the_manifest(engine_copy: Path) -> None:
    """Drafting starts from the calibration of the exit head, or from the default. If the
    calibration is damaged, the error message says so."""
    file = engine_copy / "manifest.json"
    manifest = json.loads(file.read_text())

    def write(calibration: object) -> None:
        exit_head = manifest["exit_head"] | {"calibration": calibration}
        file.write_text(json.dumps(manifest | {"exit_head": exit_head}))

    for entry, expected in (
        (None, CalibrationPrior()),
        (dataclasses.asdict(CalibrationPrior(shift=0.5)), CalibrationPrior(shift=0.5)),
    ):
        write(entry)
        drafter = load(engine_copy, speculation=Speculation("cost-aware-ts")).drafting.drafter
        assert drafter is not None
        controller = drafter.controller
        assert (
            isinstance(controller, CostAwareTS)
            and controller.accept.covariance[0] == expected.shift**2
        )
    write(dataclasses.asdict(CalibrationPrior()) | {"accept": [1.0]})
    with pytest.raises(EESDError, match="damaged"):
        load(engine_copy)
