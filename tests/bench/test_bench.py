"""Tests that eesd-bench reads prompts, measures every configuration, keeps the results, and reports
them. They do not check speeds."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Finished
from support.command import assert_refused, listing, run, succeed

from eesd.bench.cli import main
from eesd.bench.measure.results import CallLatency, Configuration, Result
from eesd.bench.measure.resumable import measure_engine, run_with_progress
from eesd.bench.measure.run import Bench, EncodedPrompt, Options
from eesd.bench.measure.tasks import TaskPrompt, load_tasks, read_texts, split_prompts
from eesd.common import terminal
from eesd.common.errors import EESDError
from eesd.common.terminal import progress_text

FEW = ("--per-task", 1, "--tuning-per-task", 1, "-n", 6, "--threads", 1)
PROMPTS = [
    TaskPrompt(f"{task}-{number}", task, f"{task} {number}: 1, 2, 3")
    for task in ("count", "list")
    for number in range(4)
]


def test_a_long_step_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line about the remaining time is logged if stderr is not a terminal."""
    monkeypatch.setattr(terminal, "SILENCE", 0.01)
    said = list[str]()

    def steps() -> Iterator[None]:
        yield
        while "s left" not in "".join(said):
            said.append(capsys.readouterr().err)
        yield

    run_with_progress("measuring", steps(), total=4)
    assert re.search(r"^measuring \.\.\.\n(.*\n)*measuring: 25% in 0 s, 0 s left\n", "".join(said))
    assert [
        progress_text(*one) for one in ((0, 9, 5.0), (3, 9, 5.0), (9, 9, 5.0), (3, None, 5.0))
    ] == [
        "0% in 5 s",
        "33% in 5 s, 10 s left",
        "100% in 5 s, 0 s left",
        "3 done in 5 s",
    ]


def run_bench(engine: Path, output: Path, *options: object) -> Finished:
    return run(main, "--engine-dir", engine, "--output", output, *options)


def own_prompts(path: Path) -> str:
    path.write_text(
        "".join(json.dumps({"id": p.id, "task": p.task, "prompt": p.text}) + "\n" for p in PROMPTS)
    )
    return str(path)


def test_all_configurations_give_the_tokens_of_plain_decoding_and_are_reported(
    bundled: Path, tmp_path: Path
) -> None:
    """The configurations are controllers on chains and trees, with and without a tree budget, in
    every sampling."""
    output = tmp_path / "out"
    options = (
        "--controllers",
        "beta-ts fixed calibration-ts",
        "--task",
        own_prompts(tmp_path / "prompts.jsonl"),
        *FEW,
    )
    succeed(main, "--engine-dir", bundled, "--output", output, *options, "--budgeted", 1)
    result = Result.load(output / "result.json")
    assert result.complete and result.kind == "run"
    assert [(p["id"], p["task"]) for p in result.prompts] == [
        ("prompts-1", "count"),
        ("prompts-5", "list"),
    ]
    assert (
        len(result.configurations) == 3 * (1 + 3 * 3)
        and sum(c.budget for c in result.configurations) == 3 * 3
    )
    assert len(result.runs) == len(result.prompts) * len(result.configurations)
    for done in result.runs:
        assert done.equal is (
            None if result.configurations[done.configuration].sampling == "rejection" else True
        )
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


def test_rounds_by_shape_add_up_to_the_statistics(engine: Path) -> None:
    bench = Bench(engine, "ort", 1)
    drafting = bench.drafting_llm(Configuration("", "greedy", "fixed:k=3", 2), Options())
    generation = bench.generate([5, 6, 7], Options().sampling("greedy", 0), drafting, 20)
    assert sum(generation.rounds.values()) == generation.stats.rounds
    assert (
        sum(steps * count for (steps, _), count in generation.rounds.items())
        == generation.stats.draft_steps
    )
    assert (
        sum(nodes * count for (_, nodes), count in generation.rounds.items())
        == generation.stats.draft_tokens
    )
    assert max(generation.rounds) == (3, 6)
    assert len(generation.tokens) == 20


def test_latencies_cover_all_node_counts_of_a_round(engine: Path) -> None:
    latencies = Bench(engine, "ort", 1).latencies(
        "", EncodedPrompt(0, "a", [5, 6, 7]), Options(widths=(1, 3))
    )
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
    options = Options(
        ("beta-ts", "fixed"), (1,), ("greedy",), max_new_tokens=4, per_task=2, tuning_per_task=1
    )
    path = tmp_path / "result.json"
    with pytest.raises(KeyboardInterrupt):
        first = Result("run", options.to_dict(), {}, []).begun(path, resume=False, overwrite=False)
        measure_engine(first, path, "model", InterruptedBench(engine, "ort", 1), PROMPTS, options)
    kept = Result.load(path)
    assert [run.prompt for run in kept.runs] == ["count-1"] * 3 and not kept.complete

    again = Result("run", options.to_dict(), {}, []).begun(path, resume=True, overwrite=False)
    measure_engine(again, path, "model", Bench(engine, "ort", 1), PROMPTS, options)
    whole = Result.load(tmp_path / "result.json")
    assert whole.runs[:3] == kept.runs and whole.tunings == kept.tunings
    assert [run.prompt for run in whole.runs[::3]] == ["count-1", "list-1", "count-2", "list-2"]
    assert listing(tmp_path) == ["result.json"]


def test_results_are_neither_overwritten_nor_mixed_with_another_measurement(
    engine: Path, tmp_path: Path
) -> None:
    task = own_prompts(tmp_path / "prompts.jsonl")
    options = (
        "--task",
        task,
        *FEW,
        "--samplings",
        "greedy",
        "--tree-widths",
        1,
        "--controllers",
        "beta-ts",
    )
    assert run_bench(engine, tmp_path / "out", *options).exit_code == 0
    before = (tmp_path / "out/result.json").read_bytes()
    assert_refused(run_bench(engine, tmp_path / "out", *options), "--resume", "--overwrite")
    assert_refused(
        run_bench(engine, tmp_path / "out", *options, "--seed", 1, "--resume"),
        "the options changed",
    )
    assert (tmp_path / "out/result.json").read_bytes() == before
    assert (
        "tokens of plain decoding"
        in succeed(
            main, "--engine-dir", engine, "--output", tmp_path / "out", *options, "--resume"
        ).stdout
    )


def test_several_engine_directories_are_measured_alike(engine: Path, tmp_path: Path) -> None:
    """The same engine under two names drafts the same tokens. Only the best fixed length of each
    directory is shown."""
    names = ("one", "two")
    directories = [
        option
        for name in names
        for option in ("--engine-dir", shutil.copytree(engine, tmp_path / name))
    ]
    task = own_prompts(tmp_path / "prompts.jsonl")
    options = (
        "--controllers",
        "fixed:k=1 fixed:k=3 beta-ts",
        "--tree-widths",
        1,
        "--samplings",
        "greedy",
        "--task",
        task,
    )
    report = succeed(main, *directories, "--output", tmp_path / "out", *options, *FEW).stdout
    result = Result.load(tmp_path / "out/result.json")
    assert [*result.engines] == [*names] and all(done.equal for done in result.runs)
    one, two = (
        [
            done.rounds
            for done in result.runs
            if result.configurations[done.configuration].engine == name
        ]
        for name in names
    )
    assert one == two and len(one) == 2 * 4
    assert "## What each part contributes" in report and "| two, greedy, chain |" in report
    speeds = report[report.index("### greedy") : report.index("### By task")]
    assert all(
        speeds.count(f"| {name}, fixed:k=") == speeds.count(f"| {name}, beta-ts |") == 1
        for name in names
    )
    assert_refused(
        run(main, "--engine-dir", engine, "--engine-dir", engine, "--output", tmp_path / "x"),
        "same name",
    )


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
        (["--task", "missing.jsonl"], ["missing.jsonl"]),
        (["--controllers", ""], ["at least one"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_options_are_refused(
    engine: Path, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    assert_refused(run_bench(engine, tmp_path / "out", *options), *words)
    assert not (tmp_path / "out/result.json").exists()


def test_bad_commands_are_refused(tmp_path: Path) -> None:
    assert_refused(run(main), "--engine-dir")
    assert_refused(run_bench(tmp_path, tmp_path / "out"), "manifest.json")


ROWS: list[tuple[dict[str, Any], str, list[str]]] = [
    (
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite it."]},
        "writing",
        ["Compose.", "Rewrite it."],
    ),
    (
        {"task_id": "HumanEval/53", "prompt": "def add(x):\n", "test": "def check(c):\n"},
        "data",
        ["def add(x):\n"],
    ),
    ({"question": "How many eggs are left?", "answer": "13"}, "data", ["How many eggs are left?"]),
    (
        {"document": "The river rose.", "summary": "A flood.", "id": "35232142"},
        "data",
        ["The river rose."],
    ),
    ({"task": "a", "messages": [{"role": "user", "content": "hello"}]}, "a", ["hello"]),
]


@pytest.mark.parametrize(
    ("row", "task", "parts"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_public_formats_are_read(
    row: dict[str, Any], task: str, parts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row) + "\n\n")
    assert read_texts(file) == [(task, parts)]
    assert load_tasks([str(file)]) == [TaskPrompt("data-0", task, parts[0])]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"{\n", "line 1 is not valid JSON"),
        (b"[1]\n", "line 1, has no text"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b'{"prompt": "a"}\n{"turns": []}\n', "line 2, has no text"),
        (b'{"turns": [3]}\n', "line 1, has no text"),
        (b'{"summary": "a"}\n', "line 1, has no text"),
    ],
)
def test_bad_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_bytes(content)
    with pytest.raises(EESDError, match=words):
        load_tasks([str(file)])


def test_a_task_needs_two_prompts_and_ids_are_unique(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("a whole text")
    with pytest.raises(EESDError, match="needs at least two"):
        split_prompts(load_tasks([str(file)]), 1, 1)
    assert [prompt.id for prompt in load_tasks([str(file)] * 2)] == ["own-0", "own-1"]


def test_there_are_16_bundled_prompts_of_each_of_five_tasks() -> None:
    prompts = load_tasks([])
    tasks = {prompt.task for prompt in prompts}
    assert len(tasks) == 5 and all(sum(p.task == task for p in prompts) == 16 for task in tasks)


def test_tuning_prompts_are_never_reported() -> None:
    """Whatever numbers of prompts are requested, each prompt has only one purpose, and the tasks
    alternate."""
    prompts = load_tasks([])
    tuning, reported = split_prompts(prompts, 99, 99)
    assert (
        len(tuning) == 20
        and len(reported) == 60
        and not {p.id for p in tuning} & {p.id for p in reported}
    )
    few, some = split_prompts(prompts, 2, 3)
    assert (
        set(few) <= set(tuning) and set(some) <= set(reported) and (len(few), len(some)) == (10, 15)
    )
    assert len({p.task for p in some[:5]}) == 5
