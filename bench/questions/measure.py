"""Answer questions plainly and with every method in turn, so that drift of the machine affects all."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from eesd.bench.measure.run import Bench, Generation, rotated
from eesd.bench.questions.questions import Question
from eesd.bench.questions.results import PLAIN, Answer, Result
from eesd.common.errors import EESDError
from eesd.runtime.chat_template import Message
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation

SAMPLINGS = {"greedy": 0.0, "coupled": 0.7}
"""Temperatures. Spec-Bench is answered greedily; 0.7 is MT-bench's for most of its categories."""
WARM_UP_TOKENS = 48


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
    """The questions, asked of one engine directory.

    Args:
        directory: The engine directory.
        backend: Of its engines.
        threads: CPU threads of an engine; None for the backend's default.
        methods: Names of methods, see :func:`parse_method`.
        samplings: Some of ``SAMPLINGS``.
        max_new_tokens: Tokens of an answer, at most.
    """

    def __init__(
        self,
        directory: Path,
        backend: str,
        threads: int | None,
        methods: Sequence[str],
        samplings: Sequence[str],
        max_new_tokens: int,
    ) -> None:
        self.bench = Bench(directory, backend, threads)
        self.name = directory.resolve().name
        self._methods: dict[str, Speculation | None] = {PLAIN: None} | {name: parse_method(name) for name in methods}
        self._samplings, self._max_new_tokens = samplings, max_new_tokens
        for speculation in filter(None, self._methods.values()):
            self.bench.llm.with_speculation(speculation)  # refuses a width before the long work

    def ask(self, questions: Sequence[Question], result: Result) -> Iterator[None]:
        """Ask the questions that ``result`` has no answers to.

        Yields:
            After each question.
        """
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
        return tokens <= self.bench.manifest.max_seq_len

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
