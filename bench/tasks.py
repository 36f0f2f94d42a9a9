"""Prompts to measure with: the bundled ones and those of public benchmarks from local files, split for tuning and reporting."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError

BUNDLED = Path(__file__).parent / "tasks.jsonl"
TUNING_EVERY = 4
"""Of each task's prompts, in their order, every fourth is for tuning and never reported."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as text; ``id`` is unique in a set, ``task`` is what it is reported under."""

    id: str
    task: str
    text: str


def _own(row: dict[str, Any], _: int) -> Prompt:
    return Prompt(_text(row, "id"), _text(row, "task"), _text(row, "prompt"))


def _turns(row: dict[str, Any]) -> str:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise TypeError("turns")
    return turns[0]


def _spec_bench(row: dict[str, Any], _: int) -> Prompt:
    return Prompt(f"spec-bench-{row['question_id']}", _text(row, "category"), _turns(row))


def _mt_bench(row: dict[str, Any], _: int) -> Prompt:
    return Prompt(f"mt-bench-{row['question_id']}", "mt-bench", _turns(row))


def _humaneval(row: dict[str, Any], _: int) -> Prompt:
    return Prompt(_text(row, "task_id"), "humaneval", _text(row, "prompt"))


def _gsm8k(row: dict[str, Any], line: int) -> Prompt:
    return Prompt(f"gsm8k-{line}", "gsm8k", f"Question: {_text(row, 'question')}\nAnswer:")


def _xsum(row: dict[str, Any], _: int) -> Prompt:
    return Prompt(f"xsum-{row['id']}", "xsum", f"Article: {_text(row, 'document')}\nSummary:")


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value:
        raise TypeError(key)
    return value


LOADERS: dict[str, tuple[Callable[[dict[str, Any], int], Prompt], str]] = {
    "prompts": (_own, "id, task, prompt"),
    "spec-bench": (_spec_bench, "question_id, category, turns"),
    "mt-bench": (_mt_bench, "question_id, turns"),
    "humaneval": (_humaneval, "task_id, prompt"),
    "gsm8k": (_gsm8k, "question"),
    "xsum": (_xsum, "id, document"),
}
"""By the name that ``--task`` takes: what reads a row, and the keys that it must have. Of several turns the first is taken."""


def load_task(spec: str) -> list[Prompt]:
    """Prompts of ``NAME=FILE``, in the public format of that name: JSON lines, gzipped if the file ends in ``.gz``.

    Raises :class:`EESDError` for an unknown name and for the first line that is not of the format.
    """
    name, _, file = spec.partition("=")
    if name not in LOADERS or not file:
        raise EESDError(f"--task {spec} is not NAME=FILE with a NAME of {', '.join(LOADERS)}.")
    path = Path(file)
    read, keys = LOADERS[name]
    prompts = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(read(json.loads(line), number))
        except json.JSONDecodeError:
            raise EESDError(f"{path}, line {number} is not JSON; {name} files have one JSON object a line.") from None
        except (KeyError, TypeError):
            raise EESDError(f"{path}, line {number} is no row of {name}: it needs {keys}.") from None
    if not prompts:
        raise EESDError(f"{path} has no prompts; give at least one line.")
    return prompts


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError):
        raise EESDError(f"{path} is not UTF-8 text (gzipped where its name ends in .gz).") from None


def load_tasks(specs: Sequence[str]) -> list[Prompt]:
    """Prompts of all ``specs``, or the bundled ones if there are none. Raises :class:`EESDError` when an id occurs twice."""
    prompts = [prompt for spec in specs or [f"prompts={BUNDLED}"] for prompt in load_task(spec)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise EESDError(f"The prompt id {prompt.id} occurs twice; give each prompt its own.")
        seen.add(prompt.id)
    return prompts


def split(prompts: Sequence[Prompt], tuning: int, reported: int) -> tuple[list[Prompt], list[Prompt]]:
    """(for tuning, to report), at most so many of each task, the tasks in turn.

    Raises :class:`EESDError` when a task has too few prompts for both.
    """
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    for task, found in by_task.items():
        if len(found) < 2:
            raise EESDError(f"The task {task} has one prompt; it needs two, one to tune on and one to report.")
    tune = [found[::TUNING_EVERY][:tuning] for found in by_task.values()]
    report = [[p for i, p in enumerate(found) if i % TUNING_EVERY][:reported] for found in by_task.values()]
    return _in_turn(tune), _in_turn(report)


def _in_turn(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]
