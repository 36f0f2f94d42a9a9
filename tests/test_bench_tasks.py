"""Prompts for eesd-bench: the public formats as they are published, and the fixed split of tuning and reported prompts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eesd.bench.tasks import Prompt, load_task, load_tasks, split
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
    "spec-bench": Prompt("spec-bench-81", "writing", "Compose a travel blog post."),
    "mt-bench": Prompt("mt-bench-101", "mt-bench", "Who is last?"),
    "humaneval": Prompt("HumanEval/53", "humaneval", "def add(x: int, y: int):\n"),
    "gsm8k": Prompt("gsm8k-1", "gsm8k", "Question: How many eggs are left?\nAnswer:"),
    "xsum": Prompt("xsum-35232142", "xsum", "Article: The river rose.\nRoads were closed.\nSummary:"),
}


@pytest.mark.parametrize("name", ROWS)
def test_public_formats(name: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n\n")
    assert load_task(f"{name}={file}") == [FOUND[name]]
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert load_task(f"{name}={packed}") == [FOUND[name]]


@pytest.mark.parametrize("name", ROWS)
def test_every_needed_key_is_asked_for(name: str, tmp_path: Path) -> None:
    """A row of another format is refused by line, with what the format needs."""
    other = ROWS["gsm8k" if name != "gsm8k" else "xsum"]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(ROWS[name]) + "\n" + json.dumps(other) + "\n")
    with pytest.raises(EESDError, match=f"line 2 is no row of {name}: it needs"):
        load_task(f"{name}={file}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no prompts"),
        (b"{\n", "line 1 is not JSON"),
        (b"[1]\n", "line 1 is no row"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b'{"question_id": 1, "category": "a", "turns": []}\n', "line 1 is no row"),
        (b'{"question_id": 1, "category": "a", "turns": [3]}\n', "line 1 is no row"),
    ],
)
def test_bad_files(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_bytes(content)
    with pytest.raises(EESDError, match=words):
        load_task(f"spec-bench={file}")


def test_bad_specs(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl.gz"
    file.write_text("not packed")
    with pytest.raises(EESDError, match="gzipped"):
        load_task(f"gsm8k={file}")
    for spec in ("humaneval", "nonesuch=file", "gsm8k="):
        with pytest.raises(EESDError, match="NAME=FILE"):
            load_task(spec)
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(json.dumps(ROWS["gsm8k"]) + "\n")
    with pytest.raises(EESDError, match="twice"):
        load_tasks([f"gsm8k={file}", f"gsm8k={file}"])
    with pytest.raises(EESDError, match="needs two"):
        split(load_tasks([f"gsm8k={file}"]), 1, 1)


def test_the_bundled_prompts() -> None:
    prompts = load_tasks([])
    tasks = {prompt.task for prompt in prompts}
    assert len(tasks) == 5 and all(sum(p.task == task for p in prompts) == 16 for task in tasks)


def test_tuning_prompts_are_never_reported() -> None:
    """Whatever is asked for, a prompt is on one side; and both sides change tasks from prompt to prompt."""
    prompts = load_tasks([])
    tuning, reported = split(prompts, 99, 99)
    assert len(tuning) == 20 and len(reported) == 60 and not {p.id for p in tuning} & {p.id for p in reported}
    few, some = split(prompts, 2, 3)
    assert set(few) <= set(tuning) and set(some) <= set(reported) and (len(few), len(some)) == (10, 15)
    assert len({p.task for p in some[:5]}) == 5
