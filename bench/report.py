"""Results as Markdown with plots: every sentence and figure comes from the JSON, so a report can be made again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from eesd.bench import plots
from eesd.bench.costs import costs_of
from eesd.bench.plots import Pictures
from eesd.bench.replay_report import replay_section
from eesd.bench.results import Configuration, Result
from eesd.bench.simulation import Simulation
from eesd.bench.stats import Interval, Summary, references_of, summarize
from eesd.common.errors import EESDError
from eesd.common.files import written_whole

AXIS = "speed-up over plain decoding, with its 95 % interval"
DEEPEST = 8
"""Depths of the acceptance tables."""


def write_report(results: Sequence[Result], simulations: Sequence[Simulation], output: Path, with_plots: bool) -> None:
    """Write Markdown to ``output`` and the plots into a directory beside it that is named after it."""
    lines = ["# Results", "", "Made by `eesd-bench report` from the JSON of `eesd-bench`; not edited by hand.", ""]
    pictures = Pictures(output, with_plots)
    for number, result in enumerate(results):
        if not result.runs:
            raise EESDError("A result has no runs yet; resume the measurement first.")
        lines += _section(result, pictures, f"{result.kind}-{number + 1}")
    for number, simulation in enumerate(simulations):
        lines += replay_section(simulation, pictures, f"replay-{number + 1}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(output) as temporary:
        temporary.write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def _section(result: Result, pictures: Pictures, name: str) -> list[str]:
    references = references_of(result)
    summaries = summarize(result, references)
    body = _ablation if result.kind == "ablation" else _run
    return [
        f"## {'What each part contributes' if result.kind == 'ablation' else 'Speed'}: {_model(result)}",
        "",
        *_setting(result),
        *body(result, summaries, pictures, name),
        *_prediction(summaries, pictures, name),
        *_call_costs(result, pictures, name),
    ]


def _setting(result: Result) -> list[str]:
    """The machine, the model and what was run."""
    options, machine = result.options, result.machine
    engine = next(iter(result.engines.values()))
    measured = len({run.prompt for run in result.runs})
    tasks = ", ".join(dict.fromkeys(prompt["task"] for prompt in result.prompts))
    lines = [
        f"{engine['architecture']} of {engine['num_layers']} layers, exit after layer {engine['exit_layer']}, "
        f"{engine['dtype']}, backend `{options['backend']}`. CPU: {machine['CPU']}, {machine['cores']}; "
        f"GPU: {machine['GPU']}; {machine['system']}; {machine['libraries']}.",
        "",
        f"{measured} prompts ({tasks}) x {options['max_new_tokens']} new tokens, temperature {options['temperature']} where "
        f"sampled, {'with' if options['guard'] else 'without'} the guard; every prompt plainly and in each configuration in "
        "turn, in rotating order. Speed-up: the median over prompts of plain over drafting decode seconds (prefill left out, "
        "controller and host included), with its 95 % bootstrap interval over prompts.",
        "",
    ]
    if not result.complete:
        lines += [f"**Incomplete:** {measured} of {len(result.prompts)} prompts.", ""]
    return lines


def _run(result: Result, summaries: Sequence[Summary], pictures: Pictures, name: str) -> list[str]:
    panels: dict[str, list[tuple[str, str, Interval]]] = {}
    for s in summaries:
        panels.setdefault(s.configuration.sampling, []).append((_kind(s, result), _shape(s.configuration), s.speedup))
    lines = pictures.show(f"{name}-speedup", "Speed-up by controller", plots.dots, panels, AXIS)
    for sampling, group in groupby(summaries, lambda s: s.configuration.sampling):
        found = list(group)
        lines += [f"### {sampling}", "", *_speed_table(found, result), *_equality(found)]
    lines += ["### By task", "", *_by_task(summaries, result)]
    judged = {f"{t.sampling}, {_drafts(t.width)}": t.acceptance[t.longest] for t in result.tunings if t.controller == "fixed"}
    return lines + _acceptance(judged, "with the longest fixed length, on the tuning prompts", pictures, name) + _tuned(result)


def _ablation(result: Result, summaries: Sequence[Summary], pictures: Pictures, name: str) -> list[str]:
    best, last = references_of(result), list(result.engines)[-1]
    rows: list[tuple[str, Summary]] = []
    by_configuration = {summary.configuration: summary for summary in summaries}
    for (engine, sampling, width), controller in best.items():
        summary = by_configuration[Configuration(engine, sampling, controller, width)]
        rows.append((f"{engine}, {_shape(summary.configuration)}, {controller} (hindsight)", summary))
    order = list(result.engines)
    rows.sort(key=lambda row: (order.index(row[1].configuration.engine), row[1].configuration.width))
    others = [s for s in summaries if s.configuration.engine == last and not _is_fixed(s.configuration)]
    rows += [(f"{last}, {_shape(s.configuration)}, {_controller(s, result)}", s) for s in others]
    panels: dict[str, list[tuple[str, str, Interval]]] = {}
    for _, s in rows:
        c = s.configuration
        part = f"{c.engine}, {'fixed in hindsight' if _is_fixed(c) else _kind(s, result)}"
        panels.setdefault(c.sampling, []).append((part, _shape(c), s.speedup))
    lines = pictures.show(f"{name}-parts", "What each part contributes", plots.dots, panels, AXIS)
    lines += ["| part | sampling | speed-up (95 %) | tokens a round | acceptance | equal |", "|---|---|---|---|---|---|"]
    for label, s in rows:
        lines.append(
            f"| {label} | {s.configuration.sampling} | {_interval(s.speedup)} | {s.tokens_per_round:.2f} "
            f"| {s.overall_acceptance:.2f} | {_equal(s)} |"
        )
    longest = max((s.configuration for s in summaries if _is_fixed(s.configuration)), key=lambda c: _length(c), default=None)
    judged: dict[str, list[list[int]]] = {}
    if longest is not None:
        for s in summaries:
            c = s.configuration
            if c == replace(longest, engine=c.engine, width=1, budget=False):
                judged[c.engine] = s.acceptance
        lines += ["", *_acceptance(judged, f"chains, {longest.sampling}, `{longest.controller}`", pictures, name)]
    return [*lines, ""]


def _speed_table(summaries: Sequence[Summary], result: Result) -> list[str]:
    lines = [
        "| controller | drafts | speed-up (95 %) | against best fixed | in total | predicted | tokens/s | acceptance "
        "| tokens a round | draft steps | host | equal |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return [*lines, *(_speed_row(s, result) for s in summaries), ""]


def _speed_row(s: Summary, result: Result) -> str:
    return (
        f"| {_controller(s, result)} | {_shape(s.configuration)} | {_interval(s.speedup)} "
        f"| {_interval(s.against_fixed) if s.against_fixed else ''} | {s.speedup_total:.2f}x | {_predicted(s)} "
        f"| {s.plain_tokens_per_second:.0f} to {s.tokens_per_second:.0f} | {s.overall_acceptance:.2f} "
        f"| {s.tokens_per_round:.2f} | {s.steps_per_round:.2f} | {s.host_share:.1%} | {_equal(s)} |"
    )


def _equality(summaries: Sequence[Summary]) -> list[str]:
    """What the runs say about losslessness."""
    if summaries[0].configuration.sampling == "rejection":
        return [
            "Rejection sampling promises the distribution of plain decoding, not its tokens, so these are not compared.",
            "",
        ]
    runs, equal = sum(s.prompts for s in summaries), sum(s.equal for s in summaries)
    if runs == equal:
        return [f"All {runs} drafting runs gave the tokens of plain decoding.", ""]
    gap = max(s.worst_gap or 0.0 for s in summaries)
    return [f"{runs - equal} of {runs} drafting runs left plain decoding, at a logit gap of at most {gap:.3g}.", ""]


def _by_task(summaries: Sequence[Summary], result: Result) -> list[str]:
    """Median speed-up of each task, a row for each configuration."""
    tasks = list(dict.fromkeys(prompt["task"] for prompt in result.prompts))
    lines = [f"| sampling | drafts | controller | {' | '.join(tasks)} |", "|---" * (3 + len(tasks)) + "|"]
    for s in summaries:
        values = " | ".join(f"{s.by_task[task]:.2f}" if task in s.by_task else "" for task in tasks)
        lines.append(f"| {s.configuration.sampling} | {_shape(s.configuration)} | {_controller(s, result)} | {values} |")
    return [*lines, ""]


def _acceptance(judged: Mapping[str, Sequence[Sequence[int]]], what: str, pictures: Pictures, name: str) -> list[str]:
    """Acceptance by depth as plot and table."""
    if not judged:
        return []
    depth = min(max(map(len, judged.values())), DEEPEST)
    lines = ["### Acceptance by depth", "", f"Of the tokens judged at a depth, how many were accepted; {what}.", ""]
    lines += pictures.show(f"{name}-acceptance", "Acceptance by depth", plots.acceptance, judged)
    lines += [f"| | {' | '.join(map(str, range(1, depth + 1)))} |", "|---" * (1 + depth) + "|"]
    for label, counts in judged.items():
        shown = [f"{a / o:.2f}" if o else "" for a, o in counts[:depth]] + [""] * (depth - len(counts))
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return [*lines, ""]


def _tuned(result: Result) -> list[str]:
    """What was chosen on the tuning prompts."""
    if not result.tunings:
        return []
    lines = ["### Tuned on other prompts", "", "| sampling | drafts | controller | chosen of |", "|---|---|---|---|"]
    for t in result.tunings:
        tried = ", ".join(spec.partition(":")[2].partition("=")[2] for spec in t.seconds)
        lines.append(f"| {t.sampling} | {_drafts(t.width)} | `{t.chosen}` | {tried} |")
    return [*lines, ""]


def _prediction(summaries: Sequence[Summary], pictures: Pictures, name: str) -> list[str]:
    """How far the predicted speed-ups lie from the measured ones."""
    differences = [s.predicted / s.speedup_total - 1 for s in summaries if s.predicted]
    if not differences:
        return []
    worst, within = max(differences, key=abs), sum(abs(d) <= 0.05 for d in differences)
    return [
        "### Predicted against measured",
        "",
        "Predicted: each round's draft steps and verify pass at what they cost in rounds of all lengths, measured after "
        "every prompt, and the host's time as it was; all prompts together. "
        f"{within} of {len(differences)} configurations agree within 5 %; the largest "
        f"difference is {worst:+.1%}.",
        "",
        *pictures.show(f"{name}-predicted", "Predicted against measured speed-up", plots.predicted, summaries),
    ]


def _call_costs(result: Result, pictures: Pictures, name: str) -> list[str]:
    """The cost curves, prefill and the host's part, for the last engine."""
    engine = list(result.engines)[-1]
    curves = {
        _drafts(width): costs for (of, width), costs in costs_of(result.sweeps).items() if of == engine and 1 in costs.verify
    }
    if not curves:
        return []
    lines = ["### What a call costs", "", *pictures.show(f"{name}-costs", "Cost of a verify pass", plots.costs, curves)]
    lines += [
        "| drafts | plain step | draft by steps, in plain steps | verify by nodes, in plain steps |",
        "|---|---|---|---|",
    ]
    for label, costs in curves.items():
        plain = costs.verify[1]
        verify = ", ".join(f"{nodes}: {seconds / plain:.2f}" for nodes, seconds in costs.verify.items() if nodes > 1)
        draft = ", ".join(f"{steps}: {seconds / plain:.2f}" for steps, seconds in costs.draft.items())
        lines.append(f"| {label} | {plain * 1e3:.2f} ms | {draft} | {verify} |")
    plain_runs = [r for r in result.runs if _is_plain(result.configurations[r.configuration], engine)]
    tokens = {prompt["id"]: prompt["tokens"] for prompt in result.prompts}
    speed = sum(tokens[r.prompt] - 1 for r in plain_runs) / max(sum(r.prefill_seconds for r in plain_runs), 1e-9)
    lines += ["", f"Prefill: {speed:.0f} tokens/s."]
    if engine in result.call_overhead:
        lines[-1] += f" Our code adds {result.call_overhead[engine] * 1e6:.0f} microseconds to a call of the raw session."
    return [*lines, ""]


def _model(result: Result) -> str:
    engine = next(iter(result.engines.values()))
    return f"{engine['model']}, {engine['dtype']}"


def _is_fixed(configuration: Configuration) -> bool:
    return (configuration.controller or "").startswith("fixed:")


def _is_plain(configuration: Configuration, engine: str) -> bool:
    return configuration.controller is None and configuration.engine == engine


def _length(configuration: Configuration) -> int:
    return int((configuration.controller or "").rpartition("=")[2])


def _is_tuned(summary: Summary, result: Result) -> bool:
    c = summary.configuration
    return any(
        (t.engine, t.sampling, t.width, t.chosen) == (c.engine, c.sampling, c.width, c.controller) for t in result.tunings
    )


def _controller(summary: Summary, result: Result) -> str:
    return f"{summary.configuration.controller}{' (tuned)' if _is_tuned(summary, result) else ''}"


def _kind(summary: Summary, result: Result) -> str:
    """The controller without the option that was tuned, which differs from column to column."""
    name = str(summary.configuration.controller)
    return f"{name.partition(':')[0]}, tuned" if _is_tuned(summary, result) else name


def _shape(configuration: Configuration) -> str:
    return f"{_drafts(configuration.width)}{', budget' if configuration.budget else ''}"


def _drafts(width: int) -> str:
    return "chain" if width == 1 else f"tree of {width}"


def _interval(interval: Interval) -> str:
    return f"**{interval.median:.2f}x** ({interval.low:.2f} to {interval.high:.2f})"


def _predicted(summary: Summary) -> str:
    if summary.predicted is None:
        return ""
    return f"{summary.predicted:.2f}x ({summary.predicted / summary.speedup_total - 1:+.1%})"


def _equal(summary: Summary) -> str:
    return "" if summary.configuration.sampling == "rejection" else f"{summary.equal}/{summary.prompts}"
