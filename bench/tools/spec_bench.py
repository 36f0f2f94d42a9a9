"""Spec-Bench (Xia et al., Findings of ACL 2024, arXiv 2401.07851): its questions, answered plainly and with drafting.

    python -m eesd.bench.tools.spec_bench --questions question.jsonl --engine-dir plans/ --method text --method both

The file is in https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl, Apache-2.0); this project lacks it. Every
method answers in turn, so that drift of the machine affects all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from eesd.bench.cli import announce_resume
from eesd.bench.measure.resumable import run_with_progress
from eesd.bench.measure.run import Bench, Generation, rotated
from eesd.bench.measure.tasks import read_texts
from eesd.bench.replay.costs import COST_MODELS
from eesd.bench.replay.counted import CountedClock
from eesd.bench.tools.spec_bench_table import PLAIN, Answer, Result, markdown
from eesd.common import cli
from eesd.common.checks import check_choice
from eesd.common.errors import EESDError
from eesd.runtime.chat_template import Message
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.backends import BACKENDS
from eesd.runtime.llm import LLM, Speculation

MULTI_TURN = "multi-turn"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench, which Spec-Bench reports as one: multi-turn conversation."""
SAMPLINGS = {"greedy": 0.0, "coupled": 0.7}
"""Temperatures. Spec-Bench is answered greedily; 0.7 is MT-bench's for most of its categories."""
WARM_UP_TOKENS = 48


@dataclass(frozen=True)
class Question:
    """What the user says, turn by turn; each follows the answer to the one before. ``category`` is Spec-Bench's."""

    id: int
    category: str
    turns: tuple[str, ...]


def read_questions(path: Path, per_category: int) -> list[Question]:
    """Read questions, of each category at most ``per_category``, evenly spread over the file."""
    found: dict[str, list[Question]] = {}
    for number, (category, turns) in enumerate(read_texts(path), 1):
        name = MULTI_TURN if category in MT_BENCH else category
        found.setdefault(name, []).append(Question(number, name, tuple(turns)))
    chosen = [_spread(questions, per_category) for questions in found.values()]
    return [questions[i] for i in range(max(map(len, chosen))) for questions in chosen if i < len(questions)]


def _spread(questions: list[Question], count: int) -> list[Question]:
    """At most ``count`` of the questions, at even distances: neighbours are alike in Spec-Bench."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def parse_method(text: str) -> Speculation:
    """What ``DRAFTER[,budget][,tree=WIDTH][,CONTROLLER]`` means, such as ``both,budget`` or ``exit,fixed:k=3``.

    Raises:
        EESDError: A part is unknown.
    """
    drafter, *parts = text.split(",")
    width, controller = "1", Speculation().controller
    for part in parts:
        if part.startswith("tree="):
            width = part.removeprefix("tree=")
        elif part != "budget":
            controller = part
    if not width.isascii() or not width.isdigit():
        raise EESDError(f"{text!r} is not a method: {width!r} is no tree width.")
    return Speculation(controller, int(width), drafter=drafter, tree_budget="budget" in parts)


class Questioning:
    """The questions, asked of one engine directory with the command's options."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        self.bench = Bench(directory, options["backend"], options["threads"])
        self.name = directory.resolve().name
        methods = {name: parse_method(name) for name in options["methods"]}
        self._methods: dict[str, Speculation | None] = {PLAIN: None} | methods
        self._samplings: list[str] = options["samplings"]
        self._max_new_tokens: int = options["max_new_tokens"]
        for speculation in filter(None, self._methods.values()):
            self.bench.llm.with_speculation(speculation)  # refuses a width before the long work

    def ask(self, questions: Sequence[Question], result: Result) -> Iterator[None]:
        """Ask the questions that ``result`` has no answers to. Yields after each."""
        result.engines.setdefault(self.name, self.bench.describe())
        self._warm_up(questions[0])
        for sampling in self._samplings:
            llms = self._llms()
            for number, question in enumerate(questions):
                if not result.has(self.name, sampling, question.id):
                    result.answers += self._answers(question, sampling, llms, number)
                yield

    def fits(self, question: Question) -> bool:
        """Whether all turns leave room for answers, which may have all their tokens."""
        messages: list[Message] = []
        for turn in question.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        tokens = len(self.bench.llm.encode(messages[:-1])) + len(question.turns) * self._max_new_tokens
        return bool(tokens <= self.bench.manifest.max_seq_len)

    def _llms(self) -> dict[str, LLM | None]:
        """An LLM for each method, whose controllers learn from question to question as in a service; None: plain decoding."""
        llm = self.bench.llm
        return {name: None if one is None else llm.with_speculation(one) for name, one in self._methods.items()}

    def _warm_up(self, question: Question) -> None:
        """Let engines prepare calls of the sizes that methods use."""
        tokens = self.bench.llm.encode([{"role": "user", "content": question.turns[0]}])
        for llm in self._llms().values():
            self.bench.generate(tokens, Sampling(), llm, WARM_UP_TOKENS, ignore_eos=False)

    def _answers(self, question: Question, sampling: str, llms: dict[str, LLM | None], number: int) -> list[Answer]:
        """All turns with every method. The conversation goes on with the plain answers, so that all do the same work."""
        turns: dict[str, list[Generation]] = {name: [] for name in llms}
        messages: list[Message] = []
        for place, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            tokens = self.bench.llm.encode(messages)
            chosen = Sampling(temperature=SAMPLINGS[sampling], seed=1000 * place + number)
            for name, llm in rotated([*llms.items()], number):
                turns[name].append(self.bench.generate(tokens, chosen, llm, self._max_new_tokens, ignore_eos=False))
            messages.append({"role": "assistant", "content": self.bench.llm.codec.decode(turns[PLAIN][-1].tokens)})
        plain = [turn.tokens for turn in turns[PLAIN]]
        return [self._answer(question, sampling, name, found, plain) for name, found in turns.items()]

    def _answer(
        self, question: Question, sampling: str, method: str, turns: list[Generation], plain: list[list[int]]
    ) -> Answer:
        rounds: Counter[tuple[int, int]] = sum((turn.rounds for turn in turns), Counter())
        return Answer(
            engine=self.name,
            sampling=sampling,
            method=method,
            question=question.id,
            tokens=sum(turn.stats.new_tokens for turn in turns),
            rounds=[[*shape, count] for shape, count in sorted(rounds.items())],
            prefill_seconds=sum(turn.stats.prefill_seconds for turn in turns),
            decode_seconds=sum(turn.stats.decode_seconds for turn in turns),
            text_tokens=sum(turn.stats.accepted_text_tokens for turn in turns),
            equal=[turn.tokens for turn in turns] == plain,
        )


@cli.command()
@click.option("--questions", type=cli.PATH, required=True, help="Spec-Bench's question.jsonl.")
@click.option("--engine-dir", "directories", type=cli.PATH, multiple=True, required=True, help="Engine directory; repeatable.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("exit", "text", "both", "both,budget"),
    metavar="DRAFTER[,budget][,tree=W][,CONTROLLER]",
    help="What drafts, and how; repeatable.",
)
@click.option("--samplings", default="greedy", help="greedy, coupled (temperature 0.7); separated by spaces.")
@click.option("--per-category", type=click.IntRange(1, 10**6), default=80, help="Largest number of questions of a category.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(1, 10**6), default=256, help="Tokens of an answer, at most.")
@click.option("--costs", type=click.Choice(list(COST_MODELS)), help="Count what calls cost there, instead of timing them here.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads.  [default: processors, one fewer if over four]")
@click.option("-o", "--output", type=cli.PATH, default=Path("spec-bench.json"), help="Result to write.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing result.")
def main(
    questions: Path,
    directories: tuple[Path, ...],
    output: Path,
    resume: bool,
    overwrite: bool,
    threads: int | None,
    **given: Any,
) -> None:
    """Answer Spec-Bench's questions plainly and drafted, and print its table."""
    given |= {"methods": [*given["methods"]], "samplings": given["samplings"].split()}
    for sampling in given["samplings"]:
        check_choice("A sampling", sampling, SAMPLINGS)
    for method in given["methods"]:
        parse_method(method)
    chosen = read_questions(questions, given["per_category"])
    result = Result(given | {"threads": threads}).begun(output, resume, overwrite)
    with announce_resume(output):
        for directory in directories:
            asked = Questioning(directory, result.options)
            fitting = [question for question in chosen if asked.fits(question)]
            if not fitting:
                raise EESDError(f"No question leaves room for an answer in {directory}; export with a larger --max-seq-len.")
            result.categories |= {str(question.id): question.category for question in fitting}
            result.skipped = len(chosen) - len(fitting)
            with CountedClock(result.costs).timing(asked.bench.llm) if result.costs else nullcontext():
                run_with_progress(asked.name, asked.ask(fitting, result), lambda: result.save(output))
    result.complete = True
    result.save(output)
    click.echo("\n".join(markdown(result)))


if __name__ == "__main__":
    main()
