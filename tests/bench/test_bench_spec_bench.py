"""Tests of tools of the lab. The tool for Spec-Bench answers all turns of every question in every
configuration, and reports them by category. Another tool measures calls. The tests do not check
speeds."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.command import add_tokenizer, assert_refused, export_engine, run, succeed

from eesd.bench.replay.costs import COST_MODELS
from eesd.common.manifest import load_manifest
from eesd.runtime.engines import operators
from lab import shapes
from lab.results import main as draw
from lab.spec_bench import choose, main, read_questions
from lab.spec_bench_table import PLAIN, Answer, Result, speedup

ROWS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["abc abc abc", "and def"]},
    {"question_id": 82, "category": "math", "turns": ["1 + 1", "2 + 2"]},
    {"question_id": 90, "category": "rag", "turns": ["xyz xyz xyz xy"], "reference": "unused"},
    {"question_id": 91, "category": "rag", "turns": ["x" * 2000]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "question.jsonl", ROWS)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_turns_are_answered_reported_and_not_answered_again(
    engine: Path, questions: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "spec.json"
    options: tuple[object, ...] = (
        "--questions",
        questions,
        "--engine-dir",
        engine,
        "-n",
        12,
        "--threads",
        1,
        "-o",
        output,
        "--method",
        "text",
        "--method",
        "exit,fixed:k=2",
        "--samplings",
        "greedy coupled",
    )
    shown = succeed(main, *options).stdout
    result = Result.load(output)
    assert (
        result.complete
        and result.skipped == 1
        and result.categories == {"1": "multi-turn", "2": "multi-turn", "3": "rag"}
    )
    assert len(result.answers) == 3 * 2 * 3 and all(answer.equal for answer in result.answers)
    longest = {
        answer.question: answer.tokens for answer in result.answers if answer.method == PLAIN
    }
    assert longest[1] > 12 >= longest[3], "both turns are answered"
    plain = [answer for answer in result.answers if answer.method == PLAIN]
    assert all(answer.rounds == [[0, 0, answer.tokens]] for answer in plain)
    assert any(
        steps for a in result.answers if a.method.startswith("exit") for steps, _, _ in a.rounds
    )
    for words in (
        "| text |",
        "| exit,fixed:k=2 |",
        "multi-turn",
        "EAGLE-3",
        "| questions left out | 1 ",
    ):
        assert words in shown
    before = output.read_bytes()
    succeed(main, *options, "--resume")
    assert output.read_bytes() == before
    assert_refused(run(main, *options), "--resume")
    assert_refused(run(main, *options, "--resume", "-n", 13), "the options changed")
    report = tmp_path / "results.md"
    succeed(draw, output, "-o", report)
    assert "## Spec-Bench" in report.read_text()


def test_drafts_of_several_directories_are_compared_bit_for_bit(
    engine: Path, quantized_engine: Path, questions: Path, tmp_path: Path
) -> None:
    output = tmp_path / "spec.json"
    others = write(
        tmp_path / "others.jsonl",
        [{"task": "notes", "prompt": "abc abc"}, {"task": "notes", "prompt": "xy xy"}],
    )
    options: tuple[object, ...] = (
        "--questions",
        questions,
        "--questions",
        others,
        "--threads",
        1,
        "-n",
        10,
        "-o",
        output,
        "--engine-dir",
        quantized_engine,
        "--method",
        f"{engine}:exit,fixed:k=2",
        "--method",
        "exit",
        "--method",
        "both",
        "--samplings",
        "greedy coupled-1",
        "--others",
        1,
        "--bits",
    )
    kernels = [] if operators.missing() else operators.supported()[:2]
    for name in kernels:
        options += ("--kernels", name)
    shown = succeed(main, *options).stdout
    result = Result.load(output)
    assert result.complete and set(result.categories.values()) == {"multi-turn", "rag", "notes"}
    assert all(answer.equal and answer.bits for answer in result.answers)
    whole = [a for a in result.answers if a.method == "exit"]
    expected = Counter(
        {("greedy", 0): 5, ("coupled-1", 0): 3}
        | {(s, 1): 3 for s in ("greedy", "coupled-1") if len(kernels) > 1}
    )
    names = list(dict.fromkeys(a.engine for a in whole))
    assert Counter((a.sampling, names.index(a.engine)) for a in whole) == expected
    assert {a.method for a in result.answers} == {PLAIN, "plans:exit,fixed:k=2", "exit", "both"}
    assert all(0 <= a.accepted <= a.judged for a in result.answers)
    assert any(a.judged for a in whole)
    for words in ("the whole model drafts or exit after layer 1", "5 of 5", "acceptance", "pauses"):
        assert words in shown


def test_a_method_needs_the_same_model(engine: Path, questions: Path, tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=2, damping=0.3, seed=0)
    add_tokenizer(model)
    other = export_engine(model, tmp_path / "other")
    given = (
        "--questions",
        questions,
        "--engine-dir",
        engine,
        "--method",
        f"{other}:exit",
        "-o",
        tmp_path / "out.json",
    )
    assert_refused(run(main, *given), "another model")


def test_seconds_are_counted_by_a_cost_model_of_another_device(
    engine: Path, questions: Path, tmp_path: Path
) -> None:
    output = tmp_path / "spec.json"
    options: tuple[object, ...] = (
        "--questions",
        questions,
        "--engine-dir",
        engine,
        "-n",
        12,
        "--threads",
        1,
        "-o",
        output,
        "--method",
        "exit,fixed:k=2",
        "--method",
        "both,tree=2",
        "--costs",
        "8b",
    )
    shown = succeed(main, *options).stdout
    costs = COST_MODELS["8b"]
    answers = Result.load(output).answers
    for answer in answers:
        rounds = sum(
            costs.calls.round_cost(steps, nodes) * count for steps, nodes, count in answer.rounds
        )
        assert answer.decode_seconds == pytest.approx(rounds * costs.plain_seconds) and answer.equal
    plain = {answer.question: answer for answer in answers if answer.method == PLAIN}
    own = [answer for answer in answers if answer.method == "exit,fixed:k=2"]
    ratio = speedup(
        [(plain[answer.question], answer) for answer in own], lambda answer: answer.decode_seconds
    )
    assert f"| **{ratio.shown(unit='x', bold=False)}" in shown
    assert ", with the call costs of another device\n" in shown and costs.name in shown


def test_questions_of_a_category_are_spread_over_the_file(tmp_path: Path) -> None:
    rows = [
        {"question_id": i, "category": "qa" if i < 9 else "stem", "turns": ["t"]} for i in range(12)
    ]
    found = choose(read_questions([write(tmp_path / "q.jsonl", rows)]), 3)
    assert [(question.id, question.category) for question in found] == [
        (1, "qa"),
        (10, "multi-turn"),
        (4, "qa"),
        (11, "multi-turn"),
        (7, "qa"),
        (12, "multi-turn"),
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ("is empty",)),
        ([*ROWS, {"question_id": 1, "category": "qa", "turns": []}], ("line 5",)),
        ([3], ("line 1",)),
    ],
)
def test_other_files_are_refused(
    engine: Path, tmp_path: Path, rows: list[Any], words: tuple[str, ...]
) -> None:
    path = write(tmp_path / "q.jsonl", rows)
    result = run(main, "--questions", path, "--engine-dir", engine, "-o", tmp_path / "out.json")
    assert_refused(result, *words)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "draft"), ("drafter",)),
        (("--method", "exit,tree=x"), ("not a number of nodes",)),
        (("--method", "exit,tree=99"), ("tree is 99",)),
        (("--method", "exit,speed"), ("speed",)),
        (("--samplings", "rejection"), ("sampling",)),
        (("-n", 4000), ("--max-seq-len",)),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    engine: Path,
    questions: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    words: tuple[str, ...],
) -> None:
    given = (
        "--questions",
        questions,
        "--engine-dir",
        engine,
        "-o",
        tmp_path / "out.json",
        *options,
    )
    assert_refused(run(main, *given), *words)


def answer(method: str, rounds: list[list[int]], seconds: float, tokens: int = 12) -> Answer:
    return Answer("e", "greedy", method, 1, tokens, rounds, 1.0, seconds, 0, True)


def test_speed_ups_compare_sums() -> None:
    pairs = [
        (answer(PLAIN, [], 6.0), answer("exit", [[2, 2, 3]], 3.0)),
        (answer(PLAIN, [], 2.0), answer("exit", [[0, 4, 2]], 1.0)),
    ]
    interval = speedup(pairs, lambda one: one.decode_seconds)
    assert interval.median == interval.low == interval.high == 2.0
    uneven = speedup(
        [pairs[0], (answer(PLAIN, [], 3.0), answer("exit", [], 3.0))],
        lambda one: one.decode_seconds,
    )
    assert uneven.median == 1.5 and uneven.low == 1.0 and uneven.high == 2.0


ROOT = Path(__file__).parent.parent.parent
NO_TOOLS = ("__init__", "counted", "machine", "spec_bench_table", "streams")


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_calls_of_a_directory_are_timed(engine: Path, backend: str) -> None:
    longest = load_manifest(engine).max_seq_len
    sizes = ("--nodes", "1 2", "--behind", f"16 {longest}", "--threads", 1, "--repeats", 3)
    shown = succeed(shapes.main, engine, "--backend", backend, *sizes).stdout
    rows = dict(re.findall(r"^\| (.*\d) \| (.*\)) \|", shown, re.MULTILINE))
    # There is no room after the longest text.
    assert [*rows] == [
        "draft step after 16",
        "verify 1 after 16",
        "verify 2 after 16",
        "first token of 16",
    ]
    for cell in rows.values():
        median, low, high = map(float, re.findall(r"[\d.]+", cell))
        assert 0 <= low <= median <= high > 0
    assert float(shown.split()[1]) > 0


@pytest.mark.parametrize(
    "name",
    ["peers", *(path.stem for path in (ROOT / "lab").glob("*.py") if path.stem not in NO_TOOLS)],
)
def test_every_tool_starts_in_one_way(name: str) -> None:
    command = [sys.executable, "-m", f"lab.{name}", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (
        result.returncode == 0
        and "Usage: " in result.stdout
        and result.stdout.count("Options:") == 1
    ), result.stderr
    assert f"python -m lab.{name} " in (ROOT / "docs/bench.md").read_text("utf-8")


def test_lists_of_numbers_are_checked(engine: Path) -> None:
    assert_refused(run(shapes.main, engine, "--nodes", "1 x"), "--nodes '1 x'", "positive integers")
