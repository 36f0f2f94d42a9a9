"""Prompts to measure: bundled ones, or public benchmarks from local files. Some are tuned on, the others are reported."""

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.json_input import MAX_BYTES, decode, json_lines, read_text

BUNDLED = Path(__file__).parent / "tasks.jsonl"
TEXTS = "give a text, or JSON lines with text, prompt, turns or messages"
TUNING_EVERY = 4
"""Every fourth prompt of a task is for tuning and never reported."""


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt as text.

    Attributes:
        id: Unique among the prompts of a measurement.
        task: The task that reports list it under.
        text: The prompt.
    """

    id: str
    task: str
    text: str


def _prompts(row: dict[str, Any], _: int) -> TaskPrompt:
    return TaskPrompt(_text(row, "id"), _text(row, "task"), _text(row, "prompt"))


def _first_turn(row: dict[str, Any]) -> str:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise TypeError("turns")
    return turns[0]


def _spec_bench(row: dict[str, Any], _: int) -> TaskPrompt:
    return TaskPrompt(f"spec-bench-{row['question_id']}", _text(row, "category"), _first_turn(row))


def _mt_bench(row: dict[str, Any], _: int) -> TaskPrompt:
    return TaskPrompt(f"mt-bench-{row['question_id']}", "mt-bench", _first_turn(row))


def _humaneval(row: dict[str, Any], _: int) -> TaskPrompt:
    return TaskPrompt(_text(row, "task_id"), "humaneval", _text(row, "prompt"))


def _gsm8k(row: dict[str, Any], line: int) -> TaskPrompt:
    return TaskPrompt(f"gsm8k-{line}", "gsm8k", f"Question: {_text(row, 'question')}\nAnswer:")


def _xsum(row: dict[str, Any], _: int) -> TaskPrompt:
    return TaskPrompt(f"xsum-{row['id']}", "xsum", f"Article: {_text(row, 'document')}\nSummary:")


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value:
        raise TypeError(key)
    return value


LOADERS: dict[str, tuple[Callable[[dict[str, Any], int], TaskPrompt], str]] = {
    "prompts": (_prompts, "id, task, prompt"),
    "spec-bench": (_spec_bench, "question_id, category, turns"),
    "mt-bench": (_mt_bench, "question_id, turns"),
    "humaneval": (_humaneval, "task_id, prompt"),
    "gsm8k": (_gsm8k, "question"),
    "xsum": (_xsum, "id, document"),
}
"""By ``--task`` name: the function that reads a row, and the keys it needs. Of several turns only the first is used."""


def load_task(spec: str) -> list[TaskPrompt]:
    """Read ``NAME=FILE``: JSON lines in the public format NAME, gzipped if FILE ends in ``.gz``.

    Raises :class:`EESDError` for an unknown name, and for the first line that does not have the format.
    """
    name, _, file = spec.partition("=")
    if name not in LOADERS or not file:
        raise EESDError(f"--task {spec} is not NAME=FILE; NAME must be one of {', '.join(LOADERS)}.")
    path = Path(file)
    read, keys = LOADERS[name]
    prompts = []
    for number, row in json_lines(_read(path), str(path), f"a {name} file has one JSON object per line"):
        try:
            prompts.append(read(row, number))
        except (KeyError, TypeError):
            raise EESDError(f"{path}, line {number} is not a row of {name}: a row needs {keys}.") from None
    if not prompts:
        raise EESDError(f"{path} has no prompts; it needs at least one line.")
    return prompts


def _read(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path, "give JSON lines")
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_BYTES)  # a bomb unpacks no further
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise EESDError(f"{path} is not a gzip file, as its name says; give JSON lines.") from None
    return decode(data, str(path), "give JSON lines")


def load_tasks(specs: Sequence[str]) -> list[TaskPrompt]:
    """Read all ``specs``; the bundled prompts if there are none. Raises :class:`EESDError` if an id occurs twice."""
    prompts = [prompt for spec in specs or [f"prompts={BUNDLED}"] for prompt in load_task(spec)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise EESDError(f"The prompt id {prompt.id} occurs twice; ids must be unique.")
        seen.add(prompt.id)
    return prompts


def split_prompts(prompts: Sequence[TaskPrompt], tuning: int, reported: int) -> tuple[list[TaskPrompt], list[TaskPrompt]]:
    """Split prompts into those to tune on and those to report.

    Args:
        prompts: All prompts.
        tuning: Largest number of tuning prompts of each task.
        reported: Largest number of reported prompts of each task.

    Returns:
        (tuning prompts, reported prompts), each with the tasks in turn.

    Raises:
        EESDError: A task has fewer than two prompts.
    """
    by_task: dict[str, list[TaskPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    for task, found in by_task.items():
        if len(found) < 2:
            raise EESDError(f"The task {task} has one prompt; it needs at least two, one to tune on and one to report.")
    tune = [found[::TUNING_EVERY][:tuning] for found in by_task.values()]
    report = [[p for i, p in enumerate(found) if i % TUNING_EVERY][:reported] for found in by_task.values()]
    return _interleaved(tune), _interleaved(report)


def _interleaved(groups: Sequence[Sequence[TaskPrompt]]) -> list[TaskPrompt]:
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


def read_texts(path: Path) -> list[tuple[str, list[str]]]:
    """Category and parts (the turns of a conversation, or one text) of each line of a ``.jsonl`` file; another file is one.

    A line has ``text``, ``prompt``, ``turns`` or ``messages``. Without a ``category`` the name of the file counts.

    Raises:
        EESDError: The file cannot be read, or a line has none of these.
    """
    if path.suffix != ".jsonl":
        return [(path.stem, [read_text(path, TEXTS)])]
    found = []
    for number, line in json_lines(read_text(path, TEXTS), str(path), TEXTS):
        row = line if isinstance(line, dict) else {}
        value: Any = next((row[key] for key in ("text", "prompt", "turns", "messages") if key in row), [])
        parts = [
            part.get("content") if isinstance(part, dict) else part for part in (value if isinstance(value, list) else [value])
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if not texts:
            raise EESDError(f"{path}, line {number}, has no text; {TEXTS}.")
        found.append((str(row.get("category", path.stem)), texts))
    if not found:
        raise EESDError(f"{path} is empty; {TEXTS}.")
    return found
