"""Tests of the statistics of eesd-bench, and of reports that can be generated again from the
JSON."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.command import assert_refused, run, succeed

from eesd.bench.cli import main
from eesd.bench.measure.results import (
    CallLatency,
    Configuration,
    Result,
    Run,
    Tuning,
    acceptance_by_depth,
)
from eesd.bench.measure.stats import bootstrap
from eesd.bench.replay.costs import CallCosts, mean_call_costs
from eesd.bench.report.charts import draw_result
from eesd.bench.report.stats import best_fixed_lengths, predicted_seconds, summarize
from eesd.common.errors import EESDError
from lab.results import main as draw

EXAMPLE = Path(__file__).parent.parent / "data/bench_result.json"
"""A small result of the bundled model, written by eesd-bench."""
RUN = Run("a", 0, 10, [[0, 0, 1], [2, 2, 3]], 0.1, 0.3, 0.5, 0.2, [3, 2], [2, 1], 0, True)


def test_bootstrap_intervals_cover_the_median() -> None:
    """The median of 150 samples is known. Of the 95 % intervals, 90 to 99 % contain it."""
    random = np.random.Generator(np.random.PCG64(0))
    intervals = [
        bootstrap(np.exp(random.normal(0.3, 0.4, size=30)).tolist(), seed) for seed in range(150)
    ]
    covered = sum(interval.low <= np.exp(0.3) <= interval.high for interval in intervals)
    assert 0.90 <= covered / len(intervals) <= 0.99


def test_bootstrap_is_deterministic_and_exact_for_equal_values() -> None:
    assert bootstrap([1.5] * 4) == (1.5, 1.5, 1.5)
    assert bootstrap([1.0, 2.0, 4.0]) == bootstrap([1.0, 2.0, 4.0])


def test_costs_of_rounds_predict_their_seconds() -> None:
    """``test_bench_simulate.py`` tests how costs are interpolated."""
    costs = CallCosts({1: 0.2, 2: 0.3}, {1: 1.0, 2: 1.1, 4: 1.5})
    assert predicted_seconds(RUN, costs) == pytest.approx(1.0 + 3 * 1.6 + 0.2)


def test_costs_are_trimmed_means_over_prompts() -> None:
    latencies = [
        CallLatency("m", str(i), 1, [[1, 0.1 * i], [2, 0.5]], [[1, 1.0 * i], [2, 2.0]])
        for i in (1, 2, 9)
    ]
    costs = mean_call_costs(latencies)["m", 1]
    assert costs.draft == pytest.approx({1: 0.4, 2: 0.5}) and costs.verify == {1: 4.0, 2: 2.0}
    outliers = (
        replace(latencies[0], verify=[[1, 1000.0]]),
        replace(latencies[0], verify=[[1, 0.0]]),
    )
    assert mean_call_costs([*latencies * 3, *outliers])["m", 1].verify[1] == 4.0, (
        "a tenth at either end does not count"
    )


def test_acceptance_by_depth_is_summed_over_runs() -> None:
    assert acceptance_by_depth([([2, 1], [3, 2]), ([1], [1])]) == [[3, 4], [1, 2]]
    assert acceptance_by_depth([]) == []


def result_with(seconds: dict[str | None, list[float]]) -> Result:
    """Returns a result whose runs take the given decode seconds. Each controller has a list with
    the seconds of each prompt."""
    result = Result(
        "run",
        {},
        {"m": {}},
        [{"id": str(i), "task": "t", "tokens": 5} for i in range(len(seconds[None]))],
    )
    for controller, values in seconds.items():
        index = result.index_of(Configuration("m", "greedy", controller, 1))
        for prompt, value in enumerate(values):
            result.runs.append(
                replace(
                    RUN,
                    prompt=str(prompt),
                    configuration=index,
                    draft_seconds=0.0,
                    verify_seconds=value - 0.2,
                )
            )
    return result


def test_speedups_are_paired_within_prompts() -> None:
    """The times of the prompts differ by a factor of a hundred. The ratio within each prompt is
    constant, so the interval has no width."""
    plain = [1.0, 10.0, 100.0]
    result = result_with(
        {None: plain, "fixed:k=2": [s / 2 for s in plain], "beta-ts": [s / 3 for s in plain]}
    )
    fixed, beta = summarize(result)
    assert fixed.speedup == pytest.approx((2, 2, 2)) and fixed.against_fixed is None
    assert beta.speedup == pytest.approx((3, 3, 3)) and beta.against_fixed == pytest.approx(
        (1.5, 1.5, 1.5)
    )
    assert [*beta.by_task] == ["t"] and beta.by_task["t"] == pytest.approx((3, 3, 3))
    assert beta.equal == beta.prompts == 3
    assert beta.predicted is None


def test_without_tuning_the_best_fixed_length_in_hindsight_is_taken() -> None:
    seconds: dict[str | None, list[float]] = {
        None: [1.0],
        "fixed:k=1": [0.9],
        "fixed:k=2": [0.5],
        "fixed:k=4": [0.7],
        "beta-ts": [0.3],
    }
    result = result_with(seconds)
    assert best_fixed_lengths(result) == {("m", "greedy", 1): "fixed:k=2"}
    result.tunings.append(Tuning("m", "greedy", 1, "fixed", {"fixed:k=4": 1.0}, {}, "fixed:k=4"))
    assert best_fixed_lengths(result) == {("m", "greedy", 1): "fixed:k=4"}


@pytest.mark.parametrize(
    ("change", "words"),
    [({"schema": 99}, "schema 99"), ({"runs": [{}]}, "damaged"), ({"extra": 1}, "damaged")],
    ids=["schema", "run", "key"],
)
def test_damaged_results_are_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | change))
    with pytest.raises(EESDError, match=words):
        Result.load(path)


def test_docs_show_the_results_in_bench_results(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    succeed(draw, root / "bench/results", "--output", tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == (root / "docs/results.md").read_text(), (
        "generate docs/results.md again"
    )


def test_reports_of_other_files_are_refused(tmp_path: Path) -> None:
    output = ("--output", tmp_path / "results.md")
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert_refused(
        run(main, "report", tmp_path / "other.json", *output), "other.json", "result.json"
    )
    (tmp_path / "text.json").write_text("hello")
    assert_refused(run(main, "report", tmp_path / "text.json", *output), "not valid JSON")
    assert_refused(run(main, "report", tmp_path / "missing.json", *output), "missing.json")
    shutil.copy(EXAMPLE, tmp_path / "empty.json")
    empty = Result.load(EXAMPLE)
    empty.runs = []
    empty.save(tmp_path / "empty.json")
    assert_refused(run(main, "report", tmp_path / "empty.json", *output), "no runs")
    assert not (tmp_path / "results.md").exists()


def test_a_result_is_drawn_the_same_each_time_and_foreign_files_stay(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = Result.load(EXAMPLE)
    path = tmp_path / "charts.svg"
    draw_result(result, path)
    first = path.read_text("utf-8")
    draw_result(result, path)
    assert path.read_text("utf-8") == first
    tasks = {prompt["task"] for prompt in result.prompts}
    for label in (*tasks, "all prompts", "Acceptance by depth"):
        assert f">{label}<" in first
    path.write_text("mine")
    with pytest.raises(EESDError, match="did not write it"):
        draw_result(result, path)
    assert path.read_text() == "mine"


def test_charts_without_matplotlib_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "out"
    refused = run(main, "--engine-dir", tmp_path, "--charts", "--output", output)
    assert_refused(refused, "--charts needs matplotlib", "[report]")
    assert not output.exists()
