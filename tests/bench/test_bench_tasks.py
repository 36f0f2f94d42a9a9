"""Prompts of eesd-bench: public benchmarks as published, and the fixed split into tuning prompts
and reported prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from eesd.bench.measure.tasks import TaskPrompt, load_tasks, read_texts, split_prompts
from eesd.common.errors import EESDError

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
    """Every prompt has one purpose, whatever numbers are asked for, and the tasks alternate."""
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
