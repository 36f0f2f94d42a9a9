"""From raw runs to figures: paired bootstrap intervals, acceptance by depth, and the speed-up that costs and counts predict."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eesd.bench.costs import Costs, costs_of
from eesd.bench.results import Configuration, Result, Run

RESAMPLES = 10_000
LEVEL = 0.95


class Interval(NamedTuple):
    """A median and its bootstrap interval."""

    median: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of one value for each prompt with its 95 % percentile bootstrap interval (Efron 1979) over prompts.

    Paired when each value compares two runs of the same prompt.
    """
    data = np.asarray(values, dtype=np.float64)
    rows = np.random.Generator(np.random.PCG64(seed)).integers(len(data), size=(RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[rows], axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.median(data)), float(low), float(high))


def predicted_seconds(run: Run, costs: Costs) -> float:
    """What a run should take: its rounds by the cost of their calls, and the host's measured time as a term of its own."""
    return sum(costs.of_round(steps, nodes) * count for steps, nodes, count in run.rounds) + run.host_seconds


@dataclass(frozen=True)
class Summary:
    """One configuration over all prompts, against plain decoding of the same prompts.

    ``speedup`` is the median ratio of decode seconds, ``speedup_total`` (and ``predicted``, what it should be) that of the sums
    over all prompts, ``against_fixed`` the speed relative to ``reference``, the fixed draft length of the same sampling and
    width, where there is one.
    """

    configuration: Configuration
    speedup: Interval
    speedup_total: float
    against_fixed: Interval | None
    by_task: Mapping[str, float]
    predicted: float | None
    plain_tokens_per_second: float
    tokens_per_second: float
    acceptance: list[list[int]]
    """[accepted, offered] by depth."""
    tokens_per_round: float
    steps_per_round: float
    host_share: float
    equal: int
    prompts: int
    worst_gap: float | None

    @property
    def overall_acceptance(self) -> float:
        """The probability that a drafted token was accepted, of those that were judged."""
        return sum(a for a, _ in self.acceptance) / max(sum(o for _, o in self.acceptance), 1)


def summarize(result: Result, references: Mapping[tuple[str, str, int], str]) -> list[Summary]:
    """A summary of each drafting configuration; ``references`` names the fixed length by (engine, sampling, width)."""
    runs: dict[Configuration, dict[str, Run]] = {}
    for run in result.runs:
        runs.setdefault(result.configurations[run.configuration], {})[run.prompt] = run
    costs, tasks = costs_of(result.sweeps), {prompt["id"]: prompt["task"] for prompt in result.prompts}
    found = []
    for configuration, own in runs.items():
        if configuration.controller is None:
            continue
        engine, sampling, width = configuration.engine, configuration.sampling, configuration.width
        plain = runs[Configuration(engine, sampling, None, 1)]
        fixed = Configuration(engine, sampling, references.get((engine, sampling, width)), width)
        reference = runs.get(fixed) if fixed.controller and fixed != configuration else None
        found.append(_summary(configuration, own, plain, reference, costs, tasks))
    return found


def _summary(
    configuration: Configuration,
    own: Mapping[str, Run],
    plain: Mapping[str, Run],
    reference: Mapping[str, Run] | None,
    costs: Mapping[tuple[str, int], Costs],
    tasks: Mapping[str, str],
) -> Summary:
    runs, plains = list(own.values()), [plain[prompt] for prompt in own]
    ratios = {prompt: plain[prompt].decode_seconds / run.decode_seconds for prompt, run in own.items()}
    by_task: dict[str, list[float]] = {}
    for prompt, ratio in ratios.items():
        by_task.setdefault(tasks[prompt], []).append(ratio)
    rounds = sum(run.round_count for run in runs)
    gaps = [abs(run.logit_gap) for run in runs if run.logit_gap is not None]
    return Summary(
        configuration=configuration,
        speedup=bootstrap(list(ratios.values())),
        speedup_total=sum(run.decode_seconds for run in plains) / sum(run.decode_seconds for run in runs),
        against_fixed=bootstrap([reference[p].decode_seconds / own[p].decode_seconds for p in own]) if reference else None,
        by_task={task: statistics.median(values) for task, values in by_task.items()},
        predicted=_predicted(configuration, runs, plains, costs),
        plain_tokens_per_second=statistics.median(run.new_tokens / run.decode_seconds for run in plains),
        tokens_per_second=statistics.median(run.new_tokens / run.decode_seconds for run in runs),
        acceptance=acceptance_by_depth((run.accepted, run.offered) for run in runs),
        tokens_per_round=sum(run.new_tokens for run in runs) / rounds,
        steps_per_round=sum(run.draft_steps for run in runs) / rounds,
        host_share=sum(run.host_seconds for run in runs) / sum(run.decode_seconds for run in runs),
        equal=sum(run.equal is True for run in runs),
        prompts=len(runs),
        worst_gap=max(gaps, default=None),
    )


def _predicted(
    configuration: Configuration, runs: Sequence[Run], plains: Sequence[Run], costs: Mapping[tuple[str, int], Costs]
) -> float | None:
    """Predicted seconds of plain decoding over those of drafting, all prompts together; None where costs were not measured."""
    own = costs.get((configuration.engine, configuration.width))
    if own is None:
        return None
    return sum(predicted_seconds(run, own) for run in plains) / sum(predicted_seconds(run, own) for run in runs)


def acceptance_by_depth(runs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """[accepted, offered] at each depth, over all runs: what was judged there, everything before it accepted."""
    total: list[list[int]] = []
    for accepted, offered in runs:
        total += [[0, 0] for _ in range(len(offered) - len(total))]
        for sums, *counts in zip(total, accepted, offered, strict=False):
            sums[:] = [a + b for a, b in zip(sums, counts, strict=True)]
    return total


def references_of(result: Result) -> dict[tuple[str, str, int], str]:
    """The best fixed length by (engine, sampling, width): as tuned, or in an ablation the best in hindsight."""
    if result.kind == "run":
        return {(t.engine, t.sampling, t.width): t.chosen for t in result.tunings if t.controller == "fixed"}
    seconds: dict[Configuration, float] = {}
    for run in result.runs:
        configuration = result.configurations[run.configuration]
        seconds[configuration] = seconds.get(configuration, 0.0) + run.decode_seconds
    best: dict[tuple[str, str, int], str] = {}
    for c in sorted(seconds, key=seconds.__getitem__, reverse=True):
        if c.controller and c.controller.startswith("fixed:") and not c.budget:
            best[c.engine, c.sampling, c.width] = c.controller
    return best
