"""Spec-Bench's table: speed-up over plain decoding and mean accepted tokens by category, beside the published systems."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from eesd.bench.measure.results import shown_machine
from eesd.bench.questions.results import PLAIN, Answer, Result
from eesd.bench.replay.costs import COST_MODELS, CostModel
from eesd.bench.report.stats import LEVEL, RESAMPLES, Interval

OVERALL = "overall"
REPRICED = ("8b", "70b")
"""Cost models at which the measured rounds are priced again."""
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
"""Of Spec-Bench's leaderboard: system, model and device, speed-up, mean accepted tokens."""

Pairs = Sequence[tuple[Answer, Answer]]
"""Each plain answer with the drafted one to the same question."""


def speedup(pairs: Pairs, seconds: Callable[[Answer], float]) -> Interval:
    """Plain over drafting seconds, each summed over questions, with the paired 95 % bootstrap interval over questions."""
    plain, own = (np.asarray([seconds(pair[i]) for pair in pairs]) for i in (0, 1))
    chosen = np.random.Generator(np.random.PCG64(0)).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.quantile(plain[chosen].sum(1) / own[chosen].sum(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(plain.sum() / own.sum()), float(low), float(high))


def repriced(pairs: Pairs, costs: CostModel) -> float:
    """The speed-up that the same rounds would have at other costs, the host's time left out."""
    plain = sum(answer.tokens for answer, _ in pairs)
    own = sum(costs.calls.round_cost(steps, nodes) * count for _, answer in pairs for steps, nodes, count in answer.rounds)
    return plain / own


def markdown(result: Result, heading: str = "#", published: bool = True) -> list[str]:
    """The tables of a result, under a heading of this level, and those of the published systems."""
    engine = next(iter(result.engines.values()))
    answered = len({answer.question for answer in result.answers})
    lines = [
        f"{heading} Spec-Bench: {engine['model']}, {answered} questions, {', '.join(result.engines)}",
        "",
        f"{engine['architecture']} of {engine['num_layers']} layers, exit after layer {engine['exit_layer']}. "
        f"{shown_machine(result.machine)}; {result.machine['libraries']}.",
        "",
        f"{answered} of Spec-Bench's questions with all their turns, answers of at most "
        f"{result.options['max_new_tokens']} tokens through the chat template; "
        f"{result.skipped} more leave no room for an answer. Each turn is answered plainly and with every method, in an order "
        "that rotates. The speed-up is plain over drafting decode time, each summed over the questions, with its 95 % "
        "bootstrap interval over questions; accepted tokens are those of a round, the bonus token included. With prefill: the "
        "same with the time of the prompt, as Spec-Bench counts. At 8B and 70B costs: the same rounds priced for a GPU "
        "(computed, verify costs the same for all sizes, without the host); the controllers decided at the costs of this CPU.",
        "",
    ]
    if not result.complete:
        lines += ["**Incomplete.**", ""]
    groups = dict.fromkeys((answer.engine, answer.sampling) for answer in result.answers)
    for name, sampling in groups:
        lines += [f"{heading}# {name}, {sampling}", "", *_tables(result, name, sampling)]
    return [*lines, *(_published(heading) if published else [])]


def _tables(result: Result, engine: str, sampling: str) -> list[str]:
    methods: dict[str, dict[int, Answer]] = {}
    for answer in result.answers:
        if (answer.engine, answer.sampling) == (engine, sampling):
            methods.setdefault(answer.method, {})[answer.question] = answer
    plain = methods.pop(PLAIN)
    names = dict.fromkeys(result.categories[str(question)] for question in plain)
    lines = [f"| method | {' | '.join(names)} | {OVERALL} | with prefill | at 8B costs | at 70B costs | equal |"]
    lines.append("|---" * (len(names) + 6) + "|")
    for method, answers in methods.items():
        lines.append(f"| {method} | {' | '.join(_row(result.categories, names, plain, answers))} |")
    return [*lines, ""]


def _row(
    categories: Mapping[str, str], names: Sequence[str] | Mapping[str, None], plain: dict[int, Answer], own: dict[int, Answer]
) -> list[str]:
    """The cells of one method."""
    pairs = [(plain[question], answer) for question, answer in own.items()]
    cells = [_cell([pair for pair in pairs if categories[str(pair[0].question)] == name]) for name in names]
    whole = speedup(pairs, lambda answer: answer.decode_seconds + answer.prefill_seconds)
    costs = [f"{repriced(pairs, COST_MODELS[name]):.2f}x" for name in REPRICED]
    equal = sum(answer.equal for answer in own.values())
    return [*cells, f"**{_cell(pairs)}**", f"{whole.median:.2f}x", *costs, f"{equal} of {len(own)}"]


def _cell(pairs: Pairs) -> str:
    interval = speedup(pairs, lambda answer: answer.decode_seconds)
    accepted = sum(own.tokens for _, own in pairs) / sum(own.round_count for _, own in pairs)
    return f"{interval.median:.2f}x ({interval.low:.2f} to {interval.high:.2f}), {accepted:.2f}"


def _published(heading: str) -> list[str]:
    lines = [f"{heading}# Published", "", "| system | model, device | speed-up | mean accepted tokens |", "|---|---|---|---|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in PUBLISHED), ""]
