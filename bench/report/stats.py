"""Statistics of each configuration compared with plain decoding, and the speed-up that the costs of
calls predict."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from eesd.bench.measure.results import Configuration, Result, Run, acceptance_by_depth
from eesd.bench.measure.stats import Interval, bootstrap
from eesd.bench.replay.costs import CallCosts, mean_call_costs


def predicted_seconds(run: Run, costs: CallCosts) -> float:
    """Predict a run's decode seconds. They are the costs of its rounds plus the host's measured
    time."""
    return (
        sum(costs.round_cost(steps, nodes) * count for steps, nodes, count in run.rounds)
        + run.host_seconds
    )


@dataclass(frozen=True)
class Summary:
    """The figures of one configuration over all prompts. It is compared with plain decoding of the
    same prompts.

    Attributes:
        speedup: Median over the prompts of the decode seconds of plain decoding divided by those of
            drafting.
        speedup_total: The decode seconds of plain decoding divided by those of drafting, where both
            are summed over all prompts.
        against_fixed: Median over the prompts of the decode seconds of the best fixed length
            divided by those of this configuration. Both have the same sampling and width. None if
            there is no fixed length, or if this configuration uses it.
        by_task: The value of ``speedup`` for each task.
        predicted: The value of ``speedup_total`` that :func:`predicted_seconds` predicts, or None
            if the costs of calls were not measured.
        plain_tokens_per_second, tokens_per_second: Medians over the prompts.
        acceptance: The numbers of [accepted, judged] draft tokens at depth 1, 2, ...
        host_share: Share of the decode time outside both engines.
        equal: Number of prompts whose tokens equal those of plain decoding.
        worst_gap: Largest logit gap at which tokens differ, or None if no tokens differ.
    """

    configuration: Configuration
    speedup: Interval
    speedup_total: float
    against_fixed: Interval | None
    by_task: dict[str, Interval]
    predicted: float | None
    plain_tokens_per_second: float
    tokens_per_second: float
    acceptance: list[list[int]]
    tokens_per_round: float
    steps_per_round: float
    host_share: float
    equal: int
    prompts: int
    worst_gap: float | None

    @property
    def overall_acceptance(self) -> float:
        """Share of the judged draft tokens that were accepted."""
        return sum(a for a, _ in self.acceptance) / max(sum(j for _, j in self.acceptance), 1)


def summarize(result: Result) -> list[Summary]:
    """Summarize each drafting configuration."""
    runs: dict[Configuration, dict[str, Run]] = {}
    for run in result.runs:
        runs.setdefault(result.configurations[run.configuration], {})[run.prompt] = run
    costs = mean_call_costs(result.sweeps)
    tasks = {prompt["id"]: prompt["task"] for prompt in result.prompts}
    references = best_fixed_lengths(result)
    found = []
    for configuration, own in runs.items():
        if configuration.controller is None:
            continue
        engine = configuration.engine
        sampling = configuration.sampling
        width = configuration.width
        plain = runs[Configuration(engine, sampling, None, 1)]
        fixed = Configuration(engine, sampling, references.get((engine, sampling, width)), width)
        reference = runs.get(fixed) if fixed.controller and fixed != configuration else None
        found.append(
            _summary(configuration, own, plain, reference, costs.get((engine, width)), tasks)
        )
    return found


def _summary(
    configuration: Configuration,
    own: Mapping[str, Run],
    plain: Mapping[str, Run],
    reference: Mapping[str, Run] | None,
    costs: CallCosts | None,
    tasks: Mapping[str, str],
) -> Summary:
    """Summarize a configuration's runs (by prompt), and compare them with the runs of plain
    decoding and of the fixed length."""
    runs = list(own.values())
    plains = [plain[prompt] for prompt in own]
    ratios = {
        prompt: plain[prompt].decode_seconds / run.decode_seconds for prompt, run in own.items()
    }
    by_task: dict[str, list[float]] = {}
    for prompt, ratio in ratios.items():
        by_task.setdefault(tasks[prompt], []).append(ratio)
    predicted = None
    if costs is not None:
        predicted = sum(predicted_seconds(run, costs) for run in plains) / sum(
            predicted_seconds(run, costs) for run in runs
        )
    rounds = sum(run.round_count for run in runs)
    seconds = sum(run.decode_seconds for run in runs)
    return Summary(
        configuration=configuration,
        speedup=bootstrap(list(ratios.values())),
        speedup_total=sum(run.decode_seconds for run in plains) / seconds,
        against_fixed=bootstrap([reference[p].decode_seconds / own[p].decode_seconds for p in own])
        if reference
        else None,
        by_task={task: bootstrap(values) for task, values in by_task.items()},
        predicted=predicted,
        plain_tokens_per_second=statistics.median(
            run.new_tokens / run.decode_seconds for run in plains
        ),
        tokens_per_second=statistics.median(run.new_tokens / run.decode_seconds for run in runs),
        acceptance=acceptance_by_depth((run.accepted, run.offered) for run in runs),
        tokens_per_round=sum(run.new_tokens for run in runs) / rounds,
        steps_per_round=sum(run.draft_steps for run in runs) / rounds,
        host_share=sum(run.host_seconds for run in runs) / seconds,
        equal=sum(run.equal is True for run in runs),
        prompts=len(runs),
        worst_gap=max(
            (abs(run.logit_gap) for run in runs if run.logit_gap is not None), default=None
        ),
    )


def best_fixed_lengths(result: Result) -> dict[tuple[str, str, int], str]:
    """Return the best fixed length for each (engine, sampling, width). This is the tuned length, or
    the best length in hindsight if no length was tuned."""
    seconds: dict[Configuration, float] = {}
    for run in result.runs:
        configuration = result.configurations[run.configuration]
        seconds[configuration] = seconds.get(configuration, 0.0) + run.decode_seconds
    best: dict[tuple[str, str, int], str] = {}
    for c in sorted(seconds, key=seconds.__getitem__, reverse=True):
        if c.controller and c.controller.startswith("fixed:") and not c.budget:
            best[c.engine, c.sampling, c.width] = c.controller
    return best | {
        (t.engine, t.sampling, t.width): t.chosen for t in result.tunings if t.controller == "fixed"
    }
