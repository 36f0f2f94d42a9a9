"""Prompts of eesd-bench: public formats as published, and the fixed split into tuning prompts and reported prompts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eesd.bench.measure.tasks import TaskPrompt, load_task, load_tasks, split_prompts
from eesd.common.errors import EESDError

ROWS: dict[str, dict[str, Any]] = {
    "spec-bench": {
        "question_id": 81,
        "category": "writing",
        "turns": ["Compose a travel blog post.", "Rewrite it."],
        "reference": [],
    },
    "mt-bench": {
        "question_id": 101,
        "category": "reasoning",
        "turns": ["Who is last?", "Who is first?"],
        "reference": ["B", "A"],
    },
    "humaneval": {
        "task_id": "HumanEval/53",
        "prompt": "def add(x: int, y: int):\n",
        "entry_point": "add",
        "canonical_solution": "    return x + y\n",
        "test": "def check(candidate):\n    assert candidate(0, 1) == 1\n",
    },
    "gsm8k": {"question": "How many eggs are left?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"},
    "xsum": {"document": "The river rose.\nRoads were closed.", "summary": "A flood.", "id": "35232142"},
}
FOUND = {
    "spec-bench": TaskPrompt("spec-bench-81", "writing", "Compose a travel blog post."),
    "mt-bench": TaskPrompt("mt-bench-101", "mt-bench", "Who is last?"),
    "humaneval": TaskPrompt("HumanEval/53", "humaneval", "def add(x: int, y: int):\n"),
    "gsm8k": TaskPrompt("gsm8k-1", "gsm8k", "Question: How many eggs are left?\nAnswer:"),
    "xsum": TaskPrompt("xsum-35232142", "xsum", "Article: The river rose.\nRoads were closed.\nSummary:"),
}


@pytest.mark.parametrize("name", ROWS)
def test_public_formats_are_read_plain_and_gzipped(name: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n\n")
    assert load_task(f"{name}={file}") == [FOUND[name]]
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert load_task(f"{name}={packed}") == [FOUND[name]]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_another_format_is_refused_with_the_keys_it_needs(name: str, tmp_path: Path) -> None:
    other = ROWS["gsm8k" if name != "gsm8k" else "xsum"]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n" + json.dumps(other) + "\n")
    with pytest.raises(EESDError, match=f"line 2 is not a row of {name}: a row needs"):
        load_task(f"{name}={file}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no prompts"),
        (b"{\n", "line 1 is not valid JSON"),
        (b"[1]\n", "line 1 is not a row"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b'{"question_id": 1, "category": "a", "turns": []}\n', "line 1 is not a row"),
        (b'{"question_id": 1, "category": "a", "turns": [3]}\n', "line 1 is not a row"),
    ],
)
def test_bad_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_bytes(content)
    with pytest.raises(EESDError, match=words):
        load_task(f"spec-bench={file}")


def test_bad_specs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl.gz"
    file.write_text("not packed")
    with pytest.raises(EESDError, match="not a gzip file"):
        load_task(f"gsm8k={file}")
    for spec in ("humaneval", "nonesuch=file", "gsm8k="):
        with pytest.raises(EESDError, match="NAME=FILE"):
            load_task(spec)
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(json.dumps(ROWS["gsm8k"]) + "\n")
    with pytest.raises(EESDError, match="twice"):
        load_tasks([f"gsm8k={file}", f"gsm8k={file}"])
    with pytest.raises(EESDError, match="needs at least two"):
        split_prompts(load_tasks([f"gsm8k={file}"]), 1, 1)


def test_there_are_16_bundled_prompts_of_each_of_five_tasks() -> None:
    prompts = load_tasks([])
    tasks = {prompt.task for prompt in prompts}
    assert len(tasks) == 5 and all(sum(p.task == task for p in prompts) == 16 for task in tasks)


def test_tuning_prompts_are_never_reported() -> None:
    """Every prompt has one purpose, whatever numbers are asked for, and the tasks alternate."""
    prompts = load_tasks([])
    tuning, reported = split_prompts(prompts, 99, 99)
    assert len(tuning) == 20 and len(reported) == 60 and not {p.id for p in tuning} & {p.id for p in reported}
    few, some = split_prompts(prompts, 2, 3)
    assert set(few) <= set(tuning) and set(some) <= set(reported) and (len(few), len(some)) == (10, 15)
    assert len({p.task for p in some[:5]}) == 5
