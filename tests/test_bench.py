"""eesd-bench measures every configuration, keeps what it measured, and reports it. The tests do not check speeds."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result as Finished
from support.bundled import EXAMPLE
from support.command import assert_refused, export_engine, listing, run, succeed

from eesd.bench.cli import main
from eesd.bench.measure.results import CallLatency, Configuration, Result
from eesd.bench.measure.resumable import ResumableRun
from eesd.bench.measure.run import Bench, EncodedPrompt, Options
from eesd.bench.measure.tasks import TaskPrompt
from eesd.common.geometry import ExitConfig
from eesd.model import exit_head, exit_head_file
from eesd.model.checkpoint import Checkpoint

FEW = ("--per-task", 1, "--tuning-per-task", 1, "-n", 6, "--threads", 1)
PROMPTS = [
    TaskPrompt(f"{task}-{number}", task, f"{task} {number}: 1, 2, 3") for task in ("count", "list") for number in range(4)
]


def run_bench(engine: Path, output: Path, *options: object) -> Finished:
    return run(main, "--engine-dir", engine, "--output", output, *options)


def own_prompts(path: Path) -> str:
    path.write_text("".join(json.dumps({"id": p.id, "task": p.task, "prompt": p.text}) + "\n" for p in PROMPTS))
    return f"prompts={path}"


def test_all_configurations_give_the_tokens_of_plain_decoding_and_are_reported(bundled: Path, tmp_path: Path) -> None:
    """Controllers on chains and trees, with and without a tree budget, in every sampling."""
    output = tmp_path / "out"
    options = ("--controllers", "beta-ts fixed threshold:p=0.6", "--task", own_prompts(tmp_path / "prompts.jsonl"), *FEW)
    succeed(main, "--engine-dir", bundled, "--output", output, *options, "--budgeted", 1)
    result = Result.load(output / "result.json")
    assert result.complete and result.kind == "run"
    assert [(p["id"], p["task"]) for p in result.prompts] == [("count-1", "count"), ("list-1", "list")]
    assert len(result.configurations) == 3 * (1 + 3 * 3) and sum(c.budget for c in result.configurations) == 3 * 3
    assert len(result.runs) == len(result.prompts) * len(result.configurations)
    for done in result.runs:
        assert done.equal is (None if result.configurations[done.configuration].sampling == "rejection" else True)
        assert done.new_tokens == 6
    assert {t.chosen.partition(":")[0] for t in result.tunings} == {"fixed"}
    report = (output / "report.md").read_text()
    for part in (
        "against best fixed",
        "### By task",
        "### Acceptance by depth",
        "Prefill",
        "draft steps",
        "tree of 3",
        "budget",
    ):
        assert part in report
    assert "All 18 drafting runs gave the tokens of plain decoding." in report
    assert "run-1-speedup.png" in listing(output / "report")


def test_rounds_by_shape_add_up_to_the_statistics(engine: Path) -> None:
    bench = Bench(engine, "ort", 1)
    drafting = bench.drafting_llm(Configuration("", "greedy", "fixed:k=3", 2), Options())
    generation = bench.generate([5, 6, 7], Options().sampling("greedy", 0), drafting, 20)
    assert sum(generation.rounds.values()) == generation.stats.rounds
    assert sum(steps * count for (steps, _), count in generation.rounds.items()) == generation.stats.draft_steps
    assert sum(nodes * count for (_, nodes), count in generation.rounds.items()) == generation.stats.draft_tokens
    assert max(generation.rounds) == (3, 6)
    assert len(generation.tokens) == 20


def test_latencies_cover_all_node_counts_of_a_round(engine: Path) -> None:
    latencies = Bench(engine, "ort", 1).latencies("", EncodedPrompt(0, "a", [5, 6, 7]), Options(widths=(1, 3)))
    assert [latency.width for latency in latencies] == [1, 3]
    chain, tree = ([int(nodes) for nodes, _ in latency.verify] for latency in latencies)
    assert chain == [1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 33]
    assert tree == [1, 4, 7, 10, 13, 16, 19, 25]
    assert all(seconds > 0 for latency in latencies for _, seconds in latency.verify)


class InterruptedBench(Bench):
    """Raises KeyboardInterrupt at the second prompt."""

    def latencies(self, engine: str, prompt: EncodedPrompt, options: Options) -> list[CallLatency]:
        if prompt.number == 1:
            raise KeyboardInterrupt
        return super().latencies(engine, prompt, options)


def test_an_interrupted_run_is_resumed(engine: Path, tmp_path: Path) -> None:
    options = Options(("beta-ts", "fixed"), (1,), ("greedy",), max_new_tokens=4, per_task=2, tuning_per_task=1)
    first = ResumableRun("run", options, tmp_path, resume=False, overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        first.measure_engine("model", InterruptedBench(engine, "ort", 1), PROMPTS, options)
    kept = Result.load(tmp_path / "result.json")
    assert [run.prompt for run in kept.runs] == ["count-1"] * 3 and not kept.complete

    again = ResumableRun("run", options, tmp_path, resume=True, overwrite=False)
    again.measure_engine("model", Bench(engine, "ort", 1), PROMPTS, options)
    again.finish()
    whole = Result.load(tmp_path / "result.json")
    assert whole.complete and whole.runs[:3] == kept.runs and whole.tunings == kept.tunings
    assert [run.prompt for run in whole.runs[::3]] == ["count-1", "list-1", "count-2", "list-2"]
    assert listing(tmp_path) == ["result.json"]


def test_results_are_neither_overwritten_nor_mixed_with_another_measurement(engine: Path, tmp_path: Path) -> None:
    task = own_prompts(tmp_path / "prompts.jsonl")
    options = ("--task", task, *FEW, "--samplings", "greedy", "--tree-widths", 1, "--controllers", "beta-ts", "--no-plots")
    assert run_bench(engine, tmp_path / "out", *options).exit_code == 0
    before = (tmp_path / "out/result.json").read_bytes()
    assert_refused(run_bench(engine, tmp_path / "out", *options), "--resume", "--overwrite")
    assert_refused(run_bench(engine, tmp_path / "out", *options, "--seed", 1, "--resume"), "another options")
    assert (tmp_path / "out/result.json").read_bytes() == before
    assert (
        "tokens of plain decoding"
        in succeed(main, "--engine-dir", engine, "--output", tmp_path / "out", *options, "--resume").stdout
    )


def test_ablation_of_one_head_given_in_three_ways(text_model: Path, tmp_path: Path) -> None:
    """An initialised head, the same head in a directory, and the same head in an engine directory draft the same tokens."""
    engine = export_engine(text_model, tmp_path / "plans", "--quantize-draft", "none")
    checkpoint = Checkpoint(text_model)
    made = exit_head.initialise(checkpoint.decoder(), ExitConfig(1, base=checkpoint.fingerprint()))
    exit_head_file.save(made.requires_grad_(False), tmp_path / "head", torch.float32)
    heads = ("--head", "none", "--head", f"stored={tmp_path / 'head'}", "--head", f"engines={engine}")
    task = own_prompts(tmp_path / "prompts.jsonl")
    options = ("--controllers", "beta-ts", "--tree-widths", "1 2", "--model", text_model, "--output", tmp_path, "--task", task)
    succeed(main, "ablation", *heads, *options, *FEW)
    result = Result.load(tmp_path / "result.json")
    assert list(result.engines) == ["none", "stored", "engines"]
    drafting = [c for c in result.configurations if c.controller]
    assert {c.engine for c in drafting if c.width == 2 or c.controller == "beta-ts"} == {"engines"}
    assert all(done.equal for done in result.runs)
    rounds: dict[str, list[list[list[int]]]] = {}
    for done in result.runs:
        c = result.configurations[done.configuration]
        if c.width == 1 and c.controller != "beta-ts":
            rounds.setdefault(c.engine, []).append(done.rounds)
    assert rounds["none"] == rounds["stored"] == rounds["engines"] and len(rounds["none"]) == 2 * (1 + 6)
    report = (tmp_path / "report.md").read_text()
    assert "| none, chain, fixed:k=" in report and "| engines, tree of 2, beta-ts | greedy |" in report


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--controllers", "nonesuch"], ["nonesuch", "beta-ts"]),
        (["--controllers", "fixed:k=0"], ["fixed:k=0"]),
        (["--samplings", "hot"], ["hot", "greedy"]),
        (["--tree-widths", "two"], ["two", "whole numbers"]),
        (["--tree-widths", "99"], ["99", "allows 1 to"]),
        (["--budgeted", "2"], ["--budgeted", "--tree-widths"]),
        (["--budgeted", "one"], ["one", "whole numbers"]),
        (["-n", "0"], ["--max-new-tokens"]),
        (["-n", "5000"], ["5000", "slots"]),
        (["--temperature", "0"], ["temperature"]),
        (["--task", "prompts=missing.jsonl"], ["missing.jsonl"]),
        (["--controllers", ""], ["at least one"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_options_are_refused(engine: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    assert_refused(run_bench(engine, tmp_path / "out", *options), *words)
    assert not (tmp_path / "out/result.json").exists()


def test_bad_commands_are_refused(engine: Path, tmp_path: Path) -> None:
    assert_refused(run(main), "--engine-dir")
    assert_refused(run_bench(tmp_path, tmp_path / "out"), "manifest.json")
    head = ("ablation", "--output", tmp_path / "out", "--controllers", "beta-ts", "--head")
    assert_refused(run(main, *head, f"a={tmp_path}"), "exit_head.json")
    assert_refused(run(main, *head, "a"), "--model")
    assert_refused(run(main, *head, f"a={engine}", "--head", f"a={engine}"), "same name")
    assert_refused(run(main, *head, "a", "--model", EXAMPLE / "model"), "only initialised")
    assert_refused(
        run(main, "ablation", "--output", tmp_path / "out", "--head", f"a={engine}", "--controllers", "x-ts"), "x-ts"
    )
