"""Tests of ``eesd-bench simulate``. Traces are recorded once, can be replayed without an engine,
and give one JSON file for reports. The replays are compared with formulas. They are also compared,
round by round, with sessions."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result as Finished
from numpy.typing import NDArray
from support.command import assert_refused, listing, run, succeed
from support.harness import Harness, RandomStop, finish

from eesd.bench.cli import main
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
from eesd.bench.replay.simulation import Comparison, Row, Simulation, compare_on_trace
from eesd.bench.replay.traces import ChainDrafter, Trace, TracedRequest, load_trace, record
from eesd.common.errors import EESDError
from eesd.controllers import DraftStep, RoundOutcome, make_controller
from eesd.controllers.base import Fixed
from eesd.controllers.calibration import CostAwareTS
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation, load
from lab.streams import SyntheticStream

FEW = (
    "-n",
    16,
    "--depth",
    6,
    "--per-task",
    2,
    "--tuning-per-task",
    1,
    "--threads",
    1,
    "--backend",
    "ort",
)
CONTROLLERS = [
    "off",
    "best fixed in hindsight",
    "fixed, tuned",
    "threshold, tuned",
    "beta-ts",
    "calibration-ts",
    "cost-aware-ts",
    "clairvoyant",
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {"id": f"{t}-{i}", "task": t, "prompt": f"{t} {i}: 1, 2"}
        for t in ("count", "list")
        for i in range(3)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def recorded(engine: Path, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a simulation that recorded its traces."""
    output = tmp_path_factory.mktemp("recorded") / "out"
    finished = succeed(
        main, "simulate", "--engine-dir", engine, "--task", prompts, "--output", output, *FEW
    )
    assert "| cost-aware-ts |" in finished.stdout
    return output


def replay_recorded(recorded: Path, output: Path, *options: object) -> Finished:
    pair = ("--trace", recorded / "trace.npz", "--tuning-trace", recorded / "tuning.npz")
    return run(main, "simulate", *pair, "--output", output, *options)


def rows(comparison: Comparison) -> dict[str, Row]:
    return {row.controller: row for row in comparison.rows}


def test_every_comparison_is_saved_and_reported(recorded: Path) -> None:
    assert listing(recorded) == ["report.md", "simulation.json", "trace.npz", "tuning.npz"]
    found = Simulation.load(recorded / "simulation.json")
    assert [comparison.name for comparison in found.replays] == ["measured", "70b"]
    assert found.prompts == {"count": 2, "list": 2} and found.tuning_prompts == {
        "count": 1,
        "list": 1,
    }
    trace = load_trace(recorded / "trace.npz")
    assert trace.costs and found.replays[0].costs.chain_costs(6) == pytest.approx(
        trace.costs.chain_costs(6), rel=1e-4
    )
    for comparison in found.replays:
        assert [row.controller for row in comparison.rows] == CONTROLLERS
        assert all(row.by_task.keys() == {"count", "list"} for row in comparison.rows)
    report = (recorded / "report.md").read_text()
    assert "| prompts | 4 (count, list) |" in report and "| 16 new tokens, greedy |" in report


def test_replaying_recorded_traces_without_an_engine_gives_the_same_decisions(
    recorded: Path, tmp_path: Path
) -> None:
    """Speeds differ only by the controllers' own time, which is measured again."""
    assert replay_recorded(recorded, tmp_path / "out").exit_code == 0
    first, again = (
        Simulation.load(path / "simulation.json") for path in (recorded, tmp_path / "out")
    )
    assert again.origin == first.origin and again.options == first.options
    for one, other in zip(first.replays, again.replays, strict=True):
        assert (one.costs, one.best_by_task) == (other.costs, other.best_by_task)
        assert [(r.controller, r.spec, r.tokens_per_round) for r in one.rows] == [
            (r.controller, r.spec, r.tokens_per_round) for r in other.rows
        ]
        for name in ("off", "best fixed in hindsight", "clairvoyant"):
            assert rows(one)[name].speedup == rows(other)[name].speedup
    assert listing(tmp_path / "out") == ["report.md", "simulation.json"]


def test_traces_are_float16_and_cover_exactly_what_a_request_may_draft(recorded: Path) -> None:
    for request in load_trace(recorded / "trace.npz").requests:
        assert request.logprob.dtype == np.float16 and request.logprob.shape == (16, 6)
        assert np.isnan(request.logprob[-1]).all() and not np.isnan(request.logprob[0]).any()
        assert request.accepted[-1] == 0 and (request.accepted <= 6).all()


def test_coupled_sampling_is_replayed(engine: Path, prompts: str, tmp_path: Path) -> None:
    options = ("--sampling", "coupled", "--temperature", 0.9, "--costs", "8b", *FEW)
    finished = succeed(
        main,
        "simulate",
        "--engine-dir",
        engine,
        "--task",
        prompts,
        "--output",
        tmp_path / "out",
        *options,
    )
    assert "coupled at temperature 0.9" in finished.stdout
    assert [
        comparison.name for comparison in Simulation.load(tmp_path / "out/simulation.json").replays
    ] == ["8b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--costs", "nonesuch"], ["nonesuch", "measured, bundled"]),
        (["--sampling", "rejection"], ["depends on the drafts"]),
        (["--sampling", "hot"], ["hot", "greedy"]),
        (["--depth", "99"], ["99", "allows 1 to"]),
        (["--depth", "0"], ["--depth", "range"]),
        (["--task", "missing.jsonl"], ["missing.jsonl"]),
        (["--task", "/dev/null"], ["has one prompt"]),
        (["--trace", "a.npz", "--tuning-trace", "b.npz"], ["Give --engine-dir"]),
        (["-n", "0"], ["--max-new-tokens"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_recordings_are_refused(
    engine: Path, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    finished = run(
        main,
        "simulate",
        "--engine-dir",
        engine,
        "--output",
        tmp_path / "out",
        "--threads",
        1,
        *options,
    )
    assert_refused(finished, *words)
    assert (
        not (tmp_path / "out/trace.npz").exists()
        and not (tmp_path / "out/simulation.json").exists()
    )


def test_bad_replays_are_refused(recorded: Path, tmp_path: Path) -> None:
    trace = recorded / "trace.npz"
    tuning = recorded / "tuning.npz"
    output = ("--output", tmp_path / "out")
    assert_refused(run(main, "simulate", *output), "--engine-dir", "--tuning-trace")
    assert_refused(
        run(main, "simulate", "--trace", trace, *output), "--engine-dir", "--tuning-trace"
    )
    both = ("--trace", trace, "--tuning-trace", tuning)
    assert_refused(run(main, "simulate", *both, "--depth", 4, *output), "--depth", "--trace")
    (tmp_path / "empty.npz").touch()
    assert_refused(
        run(main, "simulate", "--trace", tmp_path / "empty.npz", "--tuning-trace", tuning, *output),
        "is not a trace",
    )
    for file, word in (
        (recorded / "report.md", "is not a trace"),
        (tmp_path / "none.npz", "no trace"),
    ):
        assert_refused(
            run(main, "simulate", "--trace", file, "--tuning-trace", tuning, *output), word
        )
    assert_refused(
        run(main, "simulate", "--trace", trace, "--tuning-trace", trace, *output), "same prompts"
    )
    other = replace(load_trace(tuning), origin=load_trace(tuning).origin | {"temperature": 0.1})
    other.save(tmp_path / "other.npz")
    assert_refused(
        run(main, "simulate", "--trace", trace, "--tuning-trace", tmp_path / "other.npz", *output),
        "different",
    )
    Trace(load_trace(trace).requests, load_trace(trace).origin).save(tmp_path / "no-costs.npz")
    pair = ("--trace", tmp_path / "no-costs.npz", "--tuning-trace", tuning)
    assert_refused(run(main, "simulate", *pair, *output), "no measured costs")
    assert not (tmp_path / "out").exists()
    assert_refused(replay_recorded(recorded, recorded), "simulation.json", "--overwrite")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 99}, "schema 99"),
        ({"replays": [{}]}, "damaged"),
        ({"extra": 1}, "damaged"),
        ({"replays": None}, "damaged"),
    ],
    ids=["schema", "replays", "key", "none"],
)
def test_damaged_simulations_are_refused(
    recorded: Path, change: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "simulation.json"
    path.write_text(json.dumps(json.loads((recorded / "simulation.json").read_text()) | change))
    with pytest.raises(EESDError, match=words):
        Simulation.load(path)


def test_a_report_of_a_simulation_and_a_measurement_is_the_same_each_time(
    recorded: Path, tmp_path: Path
) -> None:
    measured = Path(__file__).parent.parent / "data/bench_result.json"
    for name in ("a", "b"):
        succeed(
            main,
            "report",
            recorded / "simulation.json",
            measured,
            "--output",
            tmp_path / name / "results.md",
        )
    report = (tmp_path / "a/results.md").read_text()
    assert report.index("## Speed") < report.index("## Replayed traces")
    assert "drafting runs gave the tokens of plain decoding." in report
    assert report == (tmp_path / "b/results.md").read_text()


# Each acceptance rate has the best length and its speed for the draft costs c = .05, .1, .2 and .3.
# A verify pass costs the same for any number of nodes (Leviathan et al. 2023).
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
"""The streams have a mean acceptance of about .8. It is constant, varies a little, is similar
within a round, or is similar for about 100 tokens."""


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
    """Returns the cost up to each token, including the token itself."""
    return np.repeat(run.rounds[:, 3] / run.rounds[:, 1], run.rounds[:, 1].astype(int)).cumsum()


def test_regret_against_the_best_length_grows_ever_slower() -> None:
    """The acceptance is constant, so the regret of cost-aware-ts grows ever more slowly. beta-ts
    flips a coin after every token, so its regret grows linearly."""
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
    """The acceptance falls from .95 to .3 while the confidence stays the same. Drafts become short
    within 60 rounds."""
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
    """The first step of a round costs more than later steps, and the controller learns this."""
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
    """A controller that drafts four tokens, and stores the outcomes that it observes."""

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
