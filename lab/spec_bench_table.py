"""The results of Spec-Bench's questions. They are saved in a file, and a table shows the speed-up
and the mean accepted tokens of each category."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from eesd.bench.measure.results import Saved, describe_machine, shown_machine
from eesd.bench.measure.stats import Interval, bootstrap, bounds, resampled
from eesd.bench.replay.costs import COST_MODELS, CostModel
from eesd.common.markdown import table

PLAIN = "plain"
_RAG = "rag"
"""A category that only Spec-Bench has."""
PUBLISHED = (
    ("SAMD[EAGLE-2]", "Vicuna-7B, RTX 3090", "2.38x", "4.61"),
    ("EAGLE-2", "Vicuna-7B, RTX 3090", "2.19x", "4.35"),
    ("EAGLE", "Vicuna-7B, RTX 3090", "2.03x", "3.57"),
    ("SpS", "Vicuna-7B, RTX 3090", "1.79x", ""),
    ("PLD", "Vicuna-7B, RTX 3090", "1.64x", "1.73"),
    ("Medusa", "Vicuna-7B, RTX 3090", "1.44x", ""),
    ("Lookahead", "Vicuna-7B, RTX 3090", "1.13x", ""),
    ("EAGLE-3", "Vicuna-13B, A100", "3.02x", "5.71"),
)
"""Rows of Spec-Bench's leaderboard. Each has the system, the model and the device, the speed-up,
and the mean accepted tokens."""


@dataclass(frozen=True)
class Answer:
    """The answers to all turns of one question in one configuration.

    Attributes:
        engine: Name of the engine directory that decodes plainly, with the name of the kernels if
            they were chosen.
        sampling: ``greedy``, ``coupled`` (temperature 0.7) or ``coupled-1``.
        method: The drafter and its options, or ``plain`` if nothing is drafted.
        question: Number of the question.
        tokens: Number of tokens that were generated.
        rounds: The number of rounds of each shape, as [draft steps, drafted nodes, number of
            rounds].
        prefill_seconds, decode_seconds: The time of the prompts and the time of the generated
            tokens.
        text_tokens: Number of accepted tokens that were drafted from the text instead of by the
            exit head.
        equal: Whether all tokens are those of plain decoding.
        accepted, judged: Numbers of accepted and of judged draft tokens. A token is judged if all
            tokens before it were accepted. Older results lack these numbers.
        pauses: Number of times that the guard paused drafting.
        bits: Whether all logits are those of plain decoding bit for bit, or None if they were not
            compared.
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
    accepted: int = 0
    judged: int = 0
    pauses: int = 0
    bits: bool | None = None


@dataclass
class Result(Saved):
    """Everything that one run measured.

    Attributes:
        options: Measurements that were made.
        engines: The description of each engine directory by name.
        categories: Category of each question by its number.
        skipped: Number of questions that leave no room for an answer.
        machine: Description of the machine.
        answers: All answers. The answers to one question by one engine and sampling are saved
            together.
        complete: Whether every question was answered.
        kind, schema: Kind and version of the file format.
    """

    options: dict[str, Any]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    categories: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    machine: dict[str, str] = field(default_factory=describe_machine)
    answers: list[Answer] = field(default_factory=list)
    complete: bool = False
    kind: str = "questions"
    schema: int = 1

    WHAT: ClassVar = "a result of spec_bench; measure again"
    ROWS: ClassVar = {"answers": Answer}

    @property
    def costs(self) -> CostModel | None:
        """The cost model that gave the seconds, or None if they were measured."""
        name = self.options.get("costs")
        return COST_MODELS[name] if name else None

    def has(self, engine: str, sampling: str, question: int) -> bool:
        """Return whether a question has been answered already."""
        return any(
            (a.engine, a.sampling, a.question) == (engine, sampling, question) for a in self.answers
        )


Pairs = Sequence[tuple[Answer, Answer]]
"""Pairs of the plain answer and the drafted answer to the same question."""


def speedup(pairs: Pairs, seconds: Callable[[Answer], float]) -> Interval:
    """Return the seconds of plain decoding divided by those of drafting, where both are summed over
    the questions. The interval is paired."""
    above, below = np.array([[seconds(one) for one in pair] for pair in pairs]).T
    chosen = resampled(len(pairs))
    samples = above[chosen].sum(1) / below[chosen].sum(1)
    return Interval(float(above.sum() / below.sum()), *bounds(samples))


def markdown(result: Result, heading: str = "#", published: bool = True) -> list[str]:
    """Return the tables of a result under a heading of this level. The tables of the published
    systems follow."""
    engine = next(iter(result.engines.values()))
    answered = len({answer.question for answer in result.answers})
    title = "Spec-Bench" if _RAG in result.categories.values() else "Prompts"
    drafts = [
        "the whole model drafts"
        if of["exit_layer"] == of["num_layers"]
        else f"exit after layer {of['exit_layer']}"
        for of in result.engines.values()
    ]
    lines = [
        f"{heading} {title}: {engine['model']}, {answered} questions, {', '.join(result.engines)}"
        + (", with the call costs of another device" if result.costs else ""),
        "",
        *table(
            ["setting", ""],
            {
                "model": (
                    f"{engine['architecture']} of {engine['num_layers']} layers, "
                    f"{' or '.join(dict.fromkeys(drafts))}"
                ),
                "machine": shown_machine(result.machine),
                "versions": result.machine["libraries"],
                "answers": f"at most {result.options['max_new_tokens']} tokens",
                **{"questions left out": f"{result.skipped} (no room in the KV cache)"},
                **({"costs": result.costs.name} if result.costs else {}),
            }.items(),
        ),
        (
            "Each question is answered with all its turns, through the chat template, "
            "once by plain decoding and once with each method, in rotating order. A cell "
            "shows the speed-up, its 95 % bootstrap interval over questions, and the "
            "tokens per round. The speed-up is the decode time of plain decoding divided "
            "by that of drafting, both summed over the questions."
        ),
        "",
        *_explained(result),
        "",
    ]
    if not result.complete:
        lines += ["**Incomplete.**", ""]
    for name, sampling in dict.fromkeys(
        (answer.engine, answer.sampling) for answer in result.answers
    ):
        lines += [f"{heading}# {name}, {sampling}", "", *_table(result, name, sampling)]
    if published and title == "Spec-Bench":
        columns = ["system", "model, device", "speed-up", "mean accepted tokens"]
        lines += [f"{heading}# Published", "", *table(columns, PUBLISHED)]
    return lines


def _explained(result: Result) -> list[str]:
    """Return paragraphs that explain where the seconds come from and what the other columns
    mean."""
    if result.costs:
        return [
            (
                "Times are simulated, not measured. For each call, the runtime's clock "
                "advances by the cost of the call on the other device. The controllers, the "
                "guard and the text rule use this clock."
            )
        ]
    if result.options.get("bits"):
        return [
            (
                "`median` is the median speed-up of the questions, `acceptance` the share of "
                "judged draft tokens that were accepted, `pauses` the number of times that "
                "the guard paused drafting, `bits` the number of answers with the same "
                "logits as plain decoding, bit for bit, and `equal` the number of answers "
                "with the same tokens."
            )
        ]
    return [
        (
            "`with prefill` is the speed-up including the time of the prompt, as in "
            "Spec-Bench. `equal` is the number of answers with the same tokens as plain "
            "decoding."
        )
    ]


def _table(result: Result, engine: str, sampling: str) -> list[str]:
    methods: dict[str, dict[int, Answer]] = {}
    for answer in result.answers:
        if (answer.engine, answer.sampling) == (engine, sampling):
            methods.setdefault(answer.method, {})[answer.question] = answer
    plain = methods.pop(PLAIN)
    names = dict.fromkeys(result.categories[str(question)] for question in plain)
    bits = bool(result.options.get("bits"))
    more: dict[str, Callable[[Pairs], str]] = {} if result.costs else MEASURED if bits else TIMED
    rows = []
    for method, answers in methods.items():
        pairs = [(plain[question], answer) for question, answer in answers.items()]
        cells = [
            _cell([pair for pair in pairs if result.categories[str(pair[0].question)] == name])
            for name in names
        ]
        equal = f"{sum(answer.equal for answer in answers.values())} of {len(answers)}"
        rows.append(
            [method, *cells, f"**{_cell(pairs)}**", *(cell(pairs) for cell in more.values()), equal]
        )
    if bits:
        step = sum(answer.decode_seconds for answer in plain.values()) / sum(
            answer.tokens for answer in plain.values()
        )
        rows.append(
            [PLAIN, *[""] * len(names), f"{step * 1e3:.2f} ms per token", *[""] * (len(more) + 1)]
        )
    return table(["method", *names, "overall", *more, "equal"], rows)


def _with_prefill(pairs: Pairs) -> str:
    return f"{speedup(pairs, lambda one: one.decode_seconds + one.prefill_seconds).median:.2f}x"


def _median(pairs: Pairs) -> str:
    return bootstrap([plain.decode_seconds / own.decode_seconds for plain, own in pairs]).shown(
        unit="x", bold=False
    )


def _acceptance(pairs: Pairs) -> str:
    return (
        f"{sum(own.accepted for _, own in pairs) / max(sum(own.judged for _, own in pairs), 1):.2f}"
    )


TIMED: dict[str, Callable[[Pairs], str]] = {"with prefill": _with_prefill}
"""Columns that are shown if the seconds were measured."""
MEASURED = {
    "median": _median,
    "acceptance": _acceptance,
    "pauses": lambda pairs: str(sum(own.pauses for _, own in pairs)),
    "bits": lambda pairs: f"{sum(own.bits is True for _, own in pairs)} of {len(pairs)}",
}
"""Columns that are shown if bits were compared."""


def _cell(pairs: Pairs) -> str:
    accepted = sum(own.tokens for _, own in pairs) / sum(
        count for _, own in pairs for _, _, count in own.rounds
    )
    return (
        f"{speedup(pairs, lambda answer: answer.decode_seconds).shown(unit='x', bold=False)}, "
        f"{accepted:.2f}"
    )
