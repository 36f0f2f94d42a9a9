"""Answer the questions of Spec-Bench (Xia et al., Findings of ACL 2024, arXiv 2401.07851), or other
questions, plainly and with drafting.

    python -m lab.spec_bench --questions question.jsonl --engine-dir plans/ \\
        --method text --method both

The file is in https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl, Apache-2.0),
not in this project. Methods take turns, so that drift of the machine affects all methods alike. A
method may use the draft of another directory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.resumable import announce_resume, run_with_progress
from eesd.bench.measure.run import Bench, Generation, rotated
from eesd.bench.measure.tasks import read_texts
from eesd.bench.replay.costs import COST_MODELS
from eesd.common import cli
from eesd.common.checks import check_choice
from eesd.common.errors import EESDError
from eesd.runtime.chat_template import Message
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.backends import ACTIVATIONS, BACKENDS, default_threads
from eesd.runtime.llm import LLM, Speculation
from eesd.runtime.prefix_cache import PrefixCache
from lab.counted import CountedClock
from lab.exactness import open_with
from lab.spec_bench_table import PLAIN, Answer, Result, markdown

MULTI_TURN = "multi-turn"
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
"""Categories of MT-bench. Spec-Bench reports these categories together as multi-turn
conversation."""
SAMPLINGS = {"greedy": 0.0, "coupled": 0.7, "coupled-1": 1.0}
"""Temperatures. Spec-Bench decodes greedily, and MT-bench uses 0.7 for most of its categories."""
WARM_UP_TOKENS = 48
COUNT = click.IntRange(1, 10**6)
KEPT_BYTES = 1 << 28
"""Number of bytes of keys and values that are kept from prompts. This is enough for the turns of a
question."""


@dataclass(frozen=True)
class Question:
    """A question. ``turns`` has the user's messages. Each message follows the answer to the
    previous message. ``category`` comes from the file."""

    id: int
    category: str
    turns: tuple[str, ...]


def read_questions(paths: Sequence[Path]) -> list[Question]:
    """Read all questions of the files. Their numbers continue from file to file."""
    texts = enumerate(chain.from_iterable(map(read_texts, paths)), 1)
    return [
        Question(number, MULTI_TURN if name in MT_BENCH else name, tuple(turns))
        for number, (name, turns) in texts
    ]


def choose(questions: Sequence[Question], per_category: int) -> list[Question]:
    """Return at most ``per_category`` questions of each category. They are spread evenly over the
    file. Categories alternate."""
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.category, []).append(question)
    chosen = [_spread(questions, per_category) for questions in found.values()]
    return [
        questions[i]
        for i in range(max(map(len, chosen)))
        for questions in chosen
        if i < len(questions)
    ]


def _spread(questions: list[Question], count: int) -> list[Question]:
    """Return at most ``count`` questions at even distances, because neighbours in Spec-Bench are
    alike."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


@dataclass(frozen=True)
class Method:
    """A way to draft. It has an engine directory and a name in results. If ``speculation`` is
    None, decoding is plain."""

    name: str
    directory: Path
    speculation: Speculation | None


def parse_method(text: str, default: Path) -> Method:
    """Parse ``[DIR:]DRAFTER[,tree=NODES][,CONTROLLER]``, such as ``both,tree=1`` or
    ``plans/:exit,fixed:k=3``.

    Raises:
        EESDError: A part is unknown.
    """
    whole, *parts = text.split(",")
    directory, _, drafter = whole.rpartition(":")
    name = ",".join(
        (f"{Path(directory).resolve().name}:{drafter}" if directory else drafter, *parts)
    )
    tree = "0"
    controller = Speculation().controller
    for part in parts:
        if part.startswith("tree="):
            tree = part.removeprefix("tree=")
        else:
            controller = part
    if not tree.isascii() or not tree.isdigit():
        raise EESDError(f"{text!r} is not a method: {tree!r} is not a number of nodes.")
    speculation = Speculation(controller, int(tree), drafter=drafter)
    return Method(name, Path(directory) if directory else default, speculation)


Turns = list[tuple[Generation, bytes]]


class Questioning:
    """Gives the questions to the engines of one directory, and of other directories of the same
    model. The command's options apply."""

    def __init__(self, directory: Path, kernels: str, options: dict[str, Any]) -> None:
        self.name = f"{directory.resolve().name} {kernels}".strip()
        self._options = options
        self._kernels = kernels
        self.benches: dict[Path, Bench] = {}
        self.bench = self._open(directory)
        self._methods = [
            Method(PLAIN, directory, None),
            *(parse_method(text, directory) for text in options["methods"]),
        ]
        self._llms = cache(self._make_llms)
        self._llms("")  # refuses a width before the long work

    def _open(self, directory: Path) -> Bench:
        bench = Bench(directory, self._options["backend"], self._options["threads"])
        if self.benches and bench.manifest.geometry != self.bench.manifest.geometry:
            raise EESDError(
                f"{directory} has another model than {self.name}; give directories of one model."
            )
        if self._kernels:
            threads = self._options["threads"] or default_threads()
            bench.llm = open_with(directory, "ort", self._kernels, threads, ACTIVATIONS[0])
        if self._options.get("bits"):
            bench.llm.prefixes = PrefixCache(KEPT_BYTES)
        return self.benches.setdefault(directory, bench)

    def ask(
        self, questions: Sequence[Question], result: Result, fewer: set[int], first: bool
    ) -> Iterator[None]:
        """Ask the questions that have no answer in ``result``. Questions in ``fewer`` are asked
        with all samplings. Other questions are asked only with the first sampling and on the
        ``first`` kernels. Yields after each question."""
        for directory, bench in self.benches.items():
            result.engines.setdefault(directory.resolve().name, bench.describe())
        self._warm_up(questions[0])
        for number, question in enumerate(questions):
            for index, sampling in enumerate(self._options["samplings"]):
                asked = question.id in fewer or (first and not index)
                if asked and not result.has(self.name, sampling, question.id):
                    result.answers += self._answers(question, sampling, number)
            yield

    def fits(self, question: Question) -> bool:
        """Return whether all turns leave room for answers of the full length."""
        messages: list[Message] = []
        for turn in question.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        tokens = (
            len(self._encode(messages[:-1])) + len(question.turns) * self._options["max_new_tokens"]
        )
        return bool(tokens <= self.bench.manifest.max_seq_len)

    def _encode(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation. If there is no chat template, these are the tokens
        of its concatenated texts."""
        llm = self.bench.llm
        return llm.encode(
            messages
            if llm.codec.chat_template
            else "".join(str(one["content"]) for one in messages)
        )

    def _make_llms(self, sampling: str) -> dict[str, tuple[Bench, LLM | None]]:
        """Make a bench and an LLM for each method. Plain decoding has no LLM. Controllers learn
        from question to question, as in a service. Each ``sampling`` has separate LLMs."""
        benches = [
            (of, self.benches.get(of.directory) or self._open(of.directory)) for of in self._methods
        ]
        return {
            of.name: (bench, bench.llm.with_speculation(of.speculation) if of.speculation else None)
            for of, bench in benches
        }

    def _warm_up(self, question: Question) -> None:
        """Let engines prepare calls of the sizes that methods use."""
        tokens = self._encode([{"role": "user", "content": question.turns[0]}])
        for bench, llm in self._make_llms("").values():
            bench.generate(tokens, Sampling(), llm, WARM_UP_TOKENS, ignore_eos=False)

    def _answers(self, question: Question, sampling: str, number: int) -> list[Answer]:
        """Answer all turns with every method. The conversation continues with the plain answers, so
        that all methods do the same work."""
        llms = self._llms(sampling)
        messages = list[Message]()
        turns: dict[str, Turns] = {name: [] for name in llms}
        for place, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            tokens = self._encode(messages)
            chosen = Sampling(temperature=SAMPLINGS[sampling], seed=1000 * place + number)
            for name, (bench, llm) in rotated([*llms.items()], number):
                turns[name].append(self._generate(bench, llm, tokens, chosen))
            plain = turns[PLAIN][-1][0].tokens
            messages.append({"role": "assistant", "content": self.bench.llm.codec.decode(plain)})
        return [
            self._answer(question, sampling, name, found, turns[PLAIN])
            for name, found in turns.items()
        ]

    def _generate(
        self, bench: Bench, llm: LLM | None, tokens: list[int], sampling: Sampling
    ) -> tuple[Generation, bytes]:
        """Return an answer and, if bits are compared, the logits that chose its tokens."""
        rows: list[bytes] = []
        if self._options.get("bits"):
            bench, bench.llm, llm = copy(bench), copy(bench.llm), llm and copy(llm)
            (llm or bench.llm).observer = lambda _, logits: rows.append(logits.tobytes())
        return bench.generate(
            tokens, sampling, llm, self._options["max_new_tokens"], ignore_eos=False
        ), b"".join(rows)

    def _answer(
        self, question: Question, sampling: str, method: str, turns: Turns, plain: Turns
    ) -> Answer:
        rounds: Counter[tuple[int, int]] = sum((turn.rounds for turn, _ in turns), Counter())
        stats = [turn.stats for turn, _ in turns]
        return Answer(
            engine=self.name,
            sampling=sampling,
            method=method,
            question=question.id,
            tokens=sum(one.new_tokens for one in stats),
            rounds=[[*shape, count] for shape, count in sorted(rounds.items())],
            prefill_seconds=sum(one.prefill_seconds for one in stats),
            decode_seconds=sum(one.decode_seconds for one in stats),
            text_tokens=sum(one.accepted_text_tokens for one in stats),
            equal=[turn.tokens for turn, _ in turns] == [turn.tokens for turn, _ in plain],
            accepted=sum(sum(one.accepted_at_depth) for one in stats),
            judged=sum(sum(one.verified_at_depth) for one in stats),
            pauses=sum(one.guard_pauses for one in stats),
            bits=[logits for _, logits in turns] == [logits for _, logits in plain]
            if self._options.get("bits")
            else None,
        )


@cli.command()
@click.option(
    "--questions",
    type=cli.PATH,
    multiple=True,
    required=True,
    help="File of questions, such as Spec-Bench's question.jsonl; repeatable.",
)
@click.option(
    "--engine-dir",
    "directories",
    type=cli.PATH,
    multiple=True,
    required=True,
    help="Engine directory to measure; repeatable.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("exit", "text", "both", "both,tree=1"),
    metavar="[DIR:]DRAFTER[,tree=N][,CONTROLLER]",
    help=("Drafting method; repeatable. DIR is another engine directory of the same model."),
)
@click.option(
    "--samplings",
    default="greedy",
    help=("Samplings, separated by spaces: greedy, coupled (temperature 0.7), coupled-1."),
)
@click.option(
    "--kernels",
    multiple=True,
    default=("",),
    help="CPU kernels to use, such as avx2; repeatable.  [default: the fastest]",
)
@click.option(
    "--per-category", type=COUNT, default=80, help="Maximum number of questions per category."
)
@click.option(
    "--others",
    type=COUNT,
    help=(
        "Maximum number of questions per category, except with the first sampling "
        "and kernels.  [default: as --per-category]"
    ),
)
@click.option(
    "--bits",
    is_flag=True,
    help="Also compare logits, and prefill each prompt only once for all methods.",
)
@click.option(
    "-n", "--max-new-tokens", type=COUNT, default=256, help="Maximum number of tokens in an answer."
)
@click.option(
    "--costs",
    type=click.Choice(list(COST_MODELS)),
    help="Simulate the call costs of this device, instead of timing calls here.",
)
@click.option("--backend", type=click.Choice(BACKENDS), default="auto")
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help=(
        "Number of CPU threads.  [default: number of processors, minus one if there "
        "are more than four]"
    ),
)
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("spec-bench.json"), help="JSON file to write."
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing result.")
def main(
    questions: tuple[Path, ...], directories: tuple[Path, ...], output: Path, **given: Any
) -> None:
    "Answer questions with and without drafting, and print a table."
    resume = given.pop("resume")
    overwrite = given.pop("overwrite")
    given |= {"samplings": given["samplings"].split()} | {
        name: [*given[name]] for name in ("methods", "kernels")
    }
    for sampling in given["samplings"]:
        check_choice("A sampling", sampling, SAMPLINGS)
    for method in given["methods"]:
        parse_method(method, directories[0])
    chosen = choose(read_questions(questions), given["per_category"])
    fewer = {question.id for question in choose(chosen, given["others"] or len(chosen))}
    result = Result(given).begun(output, resume, overwrite)
    with announce_resume(output):
        for directory in directories:
            all_asked = [
                Questioning(directory, kernels, result.options)
                for kernels in result.options["kernels"]
            ]
            fitting = [question for question in chosen if all_asked[0].fits(question)]
            if not fitting:
                raise EESDError(
                    f"No question leaves room for an answer in {directory}; export with a "
                    "larger --max-seq-len."
                )
            result.categories |= {str(question.id): question.category for question in fitting}
            result.skipped = len(chosen) - len(fitting)
            with ExitStack() as timing:
                if result.costs:
                    clock = CountedClock(result.costs)
                    for bench in chain.from_iterable(asked.benches.values() for asked in all_asked):
                        timing.enter_context(clock.timing(bench.llm))
                steps = zip_longest(
                    *(asked.ask(fitting, result, fewer, not i) for i, asked in enumerate(all_asked))
                )
                run_with_progress(
                    directory.resolve().name, (None for _ in steps), lambda: result.save(output)
                )
    result.complete = True
    result.save(output)
    click.echo("\n".join(markdown(result)))


if __name__ == "__main__":
    main()
