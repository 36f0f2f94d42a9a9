"""Spec-Bench's questions: ``question.jsonl`` of https://github.com/hemingkx/Spec-Bench, which this project does not contain."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.json_input import json_lines, read_text

MULTI_TURN = "multi-turn"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench, which Spec-Bench reports as one: multi-turn conversation."""
REMEDY = "give Spec-Bench's question.jsonl: a line has question_id, category and turns"


@dataclass(frozen=True)
class Question:
    """The user's turns of a conversation.

    Attributes:
        id: Its number.
        category: As in Spec-Bench's table.
        turns: What the user says; each turn follows the answer to the one before.
    """

    id: int
    category: str
    turns: tuple[str, ...]


def read_questions(path: Path, per_category: int) -> list[Question]:
    """Read questions, of each category at most ``per_category``, evenly spread over the file.

    Raises:
        EESDError: A line is not a question, or a number occurs twice.
    """
    found: dict[str, list[Question]] = {}
    seen: set[int] = set()
    for number, row in json_lines(read_text(path, REMEDY), str(path), REMEDY):
        try:
            question = _question(row)
        except (KeyError, TypeError):
            raise EESDError(f"{path}, line {number} is not a question; {REMEDY}.") from None
        if question.id in seen:
            raise EESDError(f"{path}, line {number} has the question_id {question.id} again; {REMEDY}.")
        seen.add(question.id)
        found.setdefault(question.category, []).append(question)
    if not found:
        raise EESDError(f"{path} has no questions; {REMEDY}.")
    chosen = [_spread(questions, per_category) for questions in found.values()]
    return [questions[i] for i in range(max(map(len, chosen))) for questions in chosen if i < len(questions)]


def _question(row: Any) -> Question:
    category, turns = row["category"], row["turns"]
    if type(row["question_id"]) is not int or not isinstance(category, str) or not isinstance(turns, list) or not turns:
        raise TypeError
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise TypeError
    return Question(row["question_id"], MULTI_TURN if category in MT_BENCH else category, tuple(turns))


def _spread(questions: list[Question], count: int) -> list[Question]:
    """At most ``count`` of the questions, at even distances: neighbours are alike in Spec-Bench."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]
