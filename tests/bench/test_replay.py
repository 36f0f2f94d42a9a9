"""Traces and replays, compared with formulas, and with real sessions round by round."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.harness import Harness, RandomStop, finish

from eesd.bench.replay.costs import BUNDLED, COST_MODELS, CallCosts, CostModel
from eesd.bench.replay.replay import (
    Clairvoyant,
    Replay,
    fastest,
    replay,
    replay_fixed_lengths,
    replay_seeds,
    speed_ratio,
)
from eesd.bench.replay.simulation import compare_on_trace
from eesd.bench.replay.streams import SyntheticStream
from eesd.bench.replay.traces import ChainDrafter, Trace, TracedRequest, record
from eesd.common.errors import EESDError
from eesd.controllers import DraftStep, RoundOutcome, make_controller
from eesd.controllers.base import Fixed
from eesd.controllers.calibration import CostAwareTS
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation, load

# By acceptance, for c = .05, .1, .2, .3: the best length and its speed, flat verify (Leviathan et
# al. 2023).
GOLDEN = {
    0.6: [(4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23)],
    0.7: [(6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37)],
    0.8: [(8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55)],
}
CEILING = {
    0.6: [2.33, 2.17, 1.92, 1.72],
    0.7: [2.99, 2.70, 2.27, 1.96],
    0.8: [4.17, 3.57, 2.78, 2.27],
}


STREAMS = (
    SyntheticStream("constant", (0.8,), 0.0),
    SyntheticStream("narrow", (0.7, 0.75, 0.8, 0.85, 0.9), 0.0),
    SyntheticStream("correlated", (0.5, 0.65, 0.8, 0.95, 0.99), 0.8),
    SyntheticStream("persistent", (0.5, 0.65, 0.8, 0.95, 0.99), 0.99),
)
"""Streams with a mean acceptance of about .8. It is constant; varies a little; is similar within a
round; is similar for about 100 tokens."""


def flat(draft: float) -> CostModel:
    return CostModel("flat", CallCosts({1: draft}, {1: 1.0}), 3e-3)


@pytest.mark.parametrize("acceptance", GOLDEN)
def test_fixed_lengths_and_clairvoyant_have_the_speed_of_their_formulas(acceptance: float) -> None:
    trace = SyntheticStream("constant", (acceptance,), 0.0).trace(1000, 20, seed=0, depth=24)
    for draft, (length, best), ceiling in zip(
        (0.05, 0.1, 0.2, 0.3), GOLDEN[acceptance], CEILING[acceptance], strict=True
    ):
        runs = replay_fixed_lengths(trace, flat(draft))
        assert (
            runs[length].speed == pytest.approx(best, rel=0.03)
            and fastest(runs).speed < 1.02 * runs[length].speed
        )
        speed = replay("clairvoyant", Clairvoyant(), trace, flat(draft)).speed
        exact = 1 / (1 - acceptance + draft * acceptance)
        assert exact == pytest.approx(ceiling, abs=0.006) and speed == pytest.approx(
            exact, rel=0.03
        )


@pytest.mark.parametrize(
    ("stream", "gain"), list(zip(STREAMS, (0.98, 0.98, 1.05, 1.05), strict=True))
)
def test_cost_aware_is_near_the_best_length_and_above_it_where_confidence_tells(
    stream: SyntheticStream, gain: float
) -> None:
    trace = stream.trace(500, 30, seed=1)
    found = replay("cost-aware-ts", CostAwareTS(seed=0), trace, BUNDLED, charge=False)
    assert found.speed > gain * fastest(replay_fixed_lengths(trace, BUNDLED)).speed


@pytest.mark.parametrize("stream", STREAMS[2:], ids=lambda stream: stream.name)
def test_calibration_beats_beta_where_confidence_is_informative(stream: SyntheticStream) -> None:
    trace = stream.trace(500, 30, seed=2)
    calibrated, beta = (
        replay_seeds(name, trace, flat(0.1), seeds=2) for name in ("calibration-ts", "beta-ts")
    )
    assert speed_ratio(calibrated, beta).low > 1.01


def spent(run: Replay) -> NDArray[np.float64]:
    """Cost up to and including each token."""
    return np.repeat(run.rounds[:, 3] / run.rounds[:, 1], run.rounds[:, 1].astype(int)).cumsum()


def test_regret_against_the_best_length_grows_ever_slower() -> None:
    """That of cost-aware-ts, at a constant acceptance. beta-ts draws a coin after every token: its
    regret grows linearly."""
    trace = STREAMS[0].trace(500, 24, seed=3)
    costs = COST_MODELS["70b"]
    best = fastest(replay_fixed_lengths(trace, costs))
    lost = {}
    for spec in ("cost-aware-ts", "beta-ts"):
        made = (make_controller(spec, seed) for seed in range(3))
        runs = [replay(spec, controller, trace, costs, charge=False) for controller in made]
        curve = np.mean([spent(run) for run in runs], axis=0) - spent(best)
        lost[spec] = (curve[1999], (curve[-1] - curve[5999]) / 3)
    assert lost["cost-aware-ts"][1] < 0.7 * lost["cost-aware-ts"][0], lost
    assert lost["beta-ts"][1] > 0.8 * lost["beta-ts"][0], lost


def test_drafts_get_short_when_acceptance_falls() -> None:
    """Acceptance falls from .95 to .3 while the confidence stays the same; drafts are short within
    60 rounds."""
    easy, hard = (
        SyntheticStream("s", (p,), 0.0).trace(400, 1, seed=4).requests[0] for p in (0.95, 0.3)
    )
    blind = [
        TracedRequest(
            "s", np.full_like(r.logprob, np.log(0.8)), np.full_like(r.margin, 1.4), r.accepted
        )
        for r in (easy, hard)
    ]
    run = replay(
        "cost-aware-ts",
        CostAwareTS(seed=0),
        Trace((blind[0],) * 3 + (blind[1],), {}),
        flat(0.1),
        charge=False,
    )
    before, after = (run.rounds[run.rounds[:, 0] == request, 2] for request in (2, 3))
    assert before[:20].mean() > 8 and after[60:90].mean() < 4


def test_speed_ratio_is_paired_over_requests() -> None:
    trace = STREAMS[2].trace(200, 20, seed=5)
    slow = replay_fixed_lengths(trace, flat(0.1))[0]
    fast = fastest(replay_fixed_lengths(trace, flat(0.1)))
    assert speed_ratio(slow, slow).low == speed_ratio(slow, slow).high == 1
    ratio = speed_ratio(fast, slow)
    assert ratio.low < ratio.value < ratio.high and ratio.value == pytest.approx(fast.speed)
    some = np.arange(20) < 5
    assert speed_ratio(fast, slow, some).value == pytest.approx(
        fast.tokens[some].sum() / fast.cost[some].sum()
    )


def test_plain_decoding_costs_one_step_a_token_and_own_time_is_charged() -> None:
    trace = STREAMS[0].trace(50, 3, seed=6)
    off = replay_fixed_lengths(trace, flat(0.1))[0]
    assert off.speed == 1 and off.tokens.sum() == 150
    slow_machine = CostModel("flat", flat(0.1).calls, 1e-5)
    free, charged = (
        replay("c", CostAwareTS(), trace, slow_machine, charge=charge).cost.sum()
        for charge in (False, True)
    )
    assert charged > free


def test_a_comparison_has_every_controller_and_task() -> None:
    trace = Trace(
        STREAMS[2].trace(60, 4, 0, 12).requests + STREAMS[3].trace(60, 4, 1, 12).requests, {}
    )
    found = compare_on_trace(
        "70b", trace, STREAMS[2].trace(60, 4, 2, 12), COST_MODELS["70b"], seeds=1
    )
    rows = {row.controller: row for row in found.rows}
    speeds = {name: row.speedup.value for name, row in rows.items()}
    assert {
        "off",
        "best fixed in hindsight",
        "fixed, tuned",
        "beta-ts",
        "cost-aware-ts",
        "clairvoyant",
    } <= speeds.keys()
    assert all(
        row.by_task.keys() == found.best_by_task.keys() == {"correlated", "persistent"}
        for row in found.rows
    )
    assert (
        max(speeds, key=speeds.__getitem__) == "clairvoyant"
        and rows["clairvoyant"].of_ceiling.value == 1
    )
    best = rows["best fixed in hindsight"]
    assert best.over_best_fixed.value == 1 and best.spec.startswith("fixed:k=")
    assert all(best.by_task[task].value <= 1 for task in best.by_task)
    assert speeds["fixed, tuned"] <= speeds["best fixed in hindsight"]


def test_cost_models_interpolate_round_trip_and_refuse_bad_costs() -> None:
    model = CostModel("m", CallCosts({1: 0.3, 2: 0.5}, {1: 1.0, 4: 1.3, 8: 1.5}), 1e-3)
    assert [model.calls.verify_cost(n) for n in (1, 3, 4, 6, 12)] == pytest.approx(
        [1, 1.2, 1.3, 1.4, 1.7]
    )
    assert model.chain_costs(3) == pytest.approx([1, 0.3 + 1.1, 0.5 + 1.2, 0.7 + 1.3])
    measured = CostModel.from_seconds(
        "m", CallCosts({1: 3e-4, 2: 5e-4}, {1: 1e-3, 4: 1.3e-3, 8: 1.5e-3})
    )
    assert (
        measured.chain_costs(9) == pytest.approx(model.chain_costs(9))
        and measured.plain_seconds == 1e-3
    )
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    for verify in ({2: 1.0}, {}):
        with pytest.raises(EESDError, match="node counts from 1"):
            CostModel("bad", CallCosts({1: 0.1}, verify), 1e-3)
    with pytest.raises(EESDError, match="not above 0"):
        CostModel("bad", CallCosts({1: 0.1, 2: 0.0}, {1: 1.0}), 1e-3)


def test_an_outcome_has_the_draft_seconds_of_its_steps() -> None:
    """The first step of a round costs more than a later one, and the controller learns it."""
    outcomes = []

    class Listening(Fixed):
        def observe(self, outcome: RoundOutcome) -> None:
            outcomes.append(outcome)

    replay(
        "listening",
        Listening(3),
        STREAMS[0].trace(40, 1, seed=0),
        CostModel("m", CallCosts({1: 0.3, 2: 0.4}, {1: 1.0}), 1e-3),
    )
    assert {o.steps: o.draft_seconds for o in outcomes}[3] == pytest.approx(5e-4)
    assert all(o.verify_seconds == pytest.approx(1e-3) for o in outcomes)


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return load(
        bundled, speculation=Speculation("fixed:k=3", guard=False, drafter="exit"), threads=1
    )


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, seed=3)], ids=["greedy", "coupled"]
)
def test_a_replay_has_the_rounds_of_a_session(bundled: Path, llm: LLM, sampling: Sampling) -> None:
    prompt = "class Stack:\n    def push(self, item):\n"
    trace = Trace((record(llm, "t", prompt, sampling, new_tokens=40, depth=32),), {})
    assert trace.requests[0].tokens == 40
    for spec in ("fixed:k=3", "beta-ts", "calibration-ts"):
        rounds = replay(
            spec, make_controller(spec, 1, llm.manifest.exit_head.calibration), trace, BUNDLED
        ).rounds
        with load(
            bundled, speculation=Speculation(spec, guard=False, seed=1, drafter="exit"), threads=1
        ).session(prompt, sampling, max_new_tokens=40, ignore_eos=True) as session:
            assert [len(r.tokens) for r in finish(session)] == rounds[:, 1].astype(int).tolist()
            assert session.stats.draft_tokens == rounds[:, 2].sum()


class Seeing(RandomStop):
    """Drafts four tokens, and keeps its observations."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        self.steps: list[DraftStep] = []

    def keep_drafting(self, step: DraftStep) -> bool:
        self.steps.append(step)
        return step.depth < 4


def test_a_chain_drafter_drafts_what_a_round_would_and_commits_nothing(harness: Harness) -> None:
    sampling = Sampling(temperature=0.9, seed=7)
    prompt = [5, 9, 3]
    seeing = Seeing()
    workspace = harness.workspace()
    session = harness.session(prompt, sampling, seeing, workspace=workspace)
    undisturbed = harness.session(prompt, sampling, Seeing(), workspace=harness.workspace())
    session.prefill()
    drafter = ChainDrafter(session, workspace.draft, sampling, harness.manifest.geometry.vocab_size)
    while session.finish_reason is None:
        before = asdict(session.stats), list(session.tokens)
        room = 40 - session.stats.new_tokens - 1
        tokens, steps = drafter.draft(min(4, room))
        assert (asdict(session.stats), session.tokens) == before
        seeing.steps.clear()
        result = session.step()
        assert len(tokens) == len(steps) >= len(seeing.steps)
        assert all(
            tuple(one) == pytest.approx(tuple(other))
            for one, other in zip(steps, seeing.steps, strict=False)
        )
        assert result.tokens[: result.num_accepted] == tokens[: result.num_accepted]
    finish(undisturbed)
    assert session.tokens == undisturbed.tokens
