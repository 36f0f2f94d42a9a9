"""The prompts to measure. They are the bundled prompts, or texts of local files. Some prompts are
for tuning, and the others are reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.json_input import json_lines, read_text

BUNDLED = Path(__file__).parent / "tasks.jsonl"
KEYS = ("text", "prompt", "turns", "messages", "question", "document")
"""The keys that texts have in public benchmarks and other files. Spec-Bench and MT-bench use
``turns``, HumanEval uses ``prompt``, and GSM8K uses ``question``."""
REMEDY = f"give a text, or JSON lines with {', '.join(KEYS[:-1])} or {KEYS[-1]}"
TUNING_EVERY = 4
"""Every fourth prompt of a task is used for tuning and never reported."""


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt as text.

    Attributes:
        id: A name that is unique among the prompts of a measurement.
        task: The task under which reports list it.
        text: The prompt.
    """

    id: str
    task: str
    text: str


def read_texts(path: Path) -> list[tuple[str, list[str]]]:
    """Return the task and the parts of each line of a ``.jsonl`` file. The parts are the turns of a
    conversation, or one text. Any other file is one text.

    A line has one of ``KEYS``. The task of the line is its ``task`` or ``category``. If it has
    neither, the task is the name of the file.

    Raises:
        EESDError: The file cannot be read, or a line has no text.
    """
    if path.suffix != ".jsonl":
        return [(path.stem, [read_text(path, REMEDY)])]
    found = []
    for number, line in json_lines(read_text(path, REMEDY), str(path), REMEDY):
        row = line if isinstance(line, dict) else {}
        value: Any = next((row[key] for key in KEYS if key in row), [])
        parts = [part.get("content") if isinstance(part, dict) else part for part in _list(value)]
        texts = [part for part in parts if isinstance(part, str) and part]
        if not texts:
            raise EESDError(f"{path}, line {number}, has no text; {REMEDY}.")
        found.append((str(row.get("task") or row.get("category") or path.stem), texts))
    if not found:
        raise EESDError(f"{path} is empty; {REMEDY}.")
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def load_tasks(files: Sequence[str]) -> list[TaskPrompt]:
    """Return the first part of each text in the files (see :func:`read_texts`). If no files are
    given, the bundled prompts are returned."""
    found = [
        (path, *text) for path in map(Path, files or [str(BUNDLED)]) for text in read_texts(path)
    ]
    return [
        TaskPrompt(f"{path.stem}-{number}", task, parts[0])
        for number, (path, task, parts) in enumerate(found)
    ]


def split_prompts(
    prompts: Sequence[TaskPrompt], tuning: int, reported: int
) -> tuple[list[TaskPrompt], list[TaskPrompt]]:
    """Split prompts into prompts to tune on (at most ``tuning`` of each task) and prompts to report
    (at most ``reported`` of each task). Tasks alternate in both lists.

    Raises:
        EESDError: A task has fewer than two prompts.
    """
    by_task: dict[str, list[TaskPrompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    for task, found in by_task.items():
        if len(found) < 2:
            raise EESDError(
                f"The task {task} has one prompt; it needs at least two, one to tune on and "
                "one to report."
            )
    tune = [found[::TUNING_EVERY][:tuning] for found in by_task.values()]
    report = [
        [p for i, p in enumerate(found) if i % TUNING_EVERY][:reported]
        for found in by_task.values()
    ]
    return _interleaved(tune), _interleaved(report)


def _interleaved(groups: Sequence[Sequence[TaskPrompt]]) -> list[TaskPrompt]:
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]
