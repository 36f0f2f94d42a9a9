"""What the questions took, in each configuration; the file that holds it."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eesd.bench.measure.results import Saved, describe_machine

KIND = "questions"
SCHEMA = 1
PLAIN = "plain"


@dataclass(frozen=True)
class Answer:
    """All turns of one question, answered in one configuration.

    Attributes:
        engine: Name of the engine directory.
        sampling: ``greedy`` or ``coupled``.
        method: What drafts and how; ``plain`` without drafting.
        question: Number of the question.
        tokens: Tokens generated.
        rounds: Rounds by shape: [draft steps, drafted nodes, number of rounds].
        prefill_seconds, decode_seconds: Time of prompts and of generated tokens.
        text_tokens: Accepted tokens that the text proposed, and not the exit head.
        equal: Whether all tokens are those of plain decoding.
    """

    engine: str
    sampling: str
    method: str
    question: int
    tokens: int
    rounds: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    text_tokens: int
    equal: bool

    @property
    def round_count(self) -> int:
        return sum(count for _, _, count in self.rounds)


@dataclass
class Result(Saved):
    """Everything that one run measured.

    Attributes:
        options: What was measured.
        engines: Description of each engine directory by name.
        categories: Category of each question by its number.
        skipped: How many questions leave no room for an answer.
        machine: Where it was measured.
        answers: Those of one question, engine and sampling are saved together.
        complete: Whether every question was answered.
        kind, schema: Of the file.
    """

    options: dict[str, Any]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    categories: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    machine: dict[str, str] = field(default_factory=describe_machine)
    answers: list[Answer] = field(default_factory=list)
    complete: bool = False
    kind: str = KIND
    schema: int = SCHEMA

    def has(self, engine: str, sampling: str, question: int) -> bool:
        """Whether a question is answered already."""
        return any((a.engine, a.sampling, a.question) == (engine, sampling, question) for a in self.answers)

    WHAT: ClassVar = "a result of eesd-bench spec-bench; measure again"
    ROWS: ClassVar[dict[str, type]] = {"answers": Answer}
