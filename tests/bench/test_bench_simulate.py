"""eesd-bench simulate: traces are recorded once, can be replayed without an engine, and give one
JSON file for reports."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result as Finished
from support.command import assert_refused, listing, run, succeed

from eesd.bench.cli import main
from eesd.bench.replay.simulation import Comparison, Row, Simulation
from eesd.bench.replay.traces import Trace, load_trace
from eesd.common.errors import EESDError

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
    """Output of a simulation that recorded its traces."""
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
