"""What replays showed, as Markdown with plots."""

from eesd.bench import plots
from eesd.bench.plots import Pictures
from eesd.bench.simulate import CLAIRVOYANT, HINDSIGHT, OFF, Ratio
from eesd.bench.simulation import OPTIMAL, Curve, Replays, Row, Simulation

OURS = "cost-aware-ts"


def replay_section(simulation: Simulation, pictures: Pictures, name: str) -> list[str]:
    """Tables and regret curves of one simulation."""
    lines = [f"## Replayed traces: {simulation.origin['model']}, {simulation.origin['dtype']}", "", *_setting(simulation)]
    for replays in simulation.replays:
        lines += [f"### Costs: {replays.costs.name}", "", _costs(replays), "", *_table(replays), *_by_task(replays)]
        panel = {"": _curves(replays.regret)}
        lines += pictures.show(
            f"{name}-regret-{replays.name}", "Regret by tokens decoded", plots.regret, panel, "the best fixed length"
        )
    return lines + _streams(simulation, pictures, name)


def _setting(simulation: Simulation) -> list[str]:
    origin, options, machine = simulation.origin, simulation.options, simulation.machine
    sampling = origin["samplings"][0]
    heat = "" if sampling == "greedy" else f" at temperature {origin['temperature']}"
    return [
        f"{sum(simulation.prompts.values())} prompts ({', '.join(simulation.prompts)}) x {origin['max_new_tokens']} new "
        f"tokens, {sampling}{heat}; {origin['depth']} tokens were drafted from every position, and every controller decided on "
        "these traces. Lengths, thresholds and AdaEDL's options were tuned on "
        f"{sum(simulation.tuning_prompts.values())} other prompts; those that learn ran with {options['seeds']} seeds. Each "
        f"pays for its own time, as it took on {machine['CPU']}. Speed is plain over drafting time, both in total, with its "
        "95 % bootstrap interval over prompts. The clairvoyant drafts exactly what will be accepted, which nobody can.",
        "",
    ]


def _costs(replays: Replays) -> str:
    calls, plain = replays.costs.calls, replays.costs.plain_seconds
    draft = ", ".join(f"{calls.of_draft(steps):.2f} for {steps}" for steps in (1, 2, 4, 8))
    verify = ", ".join(f"{calls.of_verify(nodes):.2f} over {nodes}" for nodes in (2, 4, 8, 16))
    return f"A plain step takes {plain * 1e3:.1f} ms; in plain steps draft steps cost {draft}, a verify pass {verify} nodes."


def _table(replays: Replays) -> list[str]:
    lines = [
        "| controller | speed over plain (95 %) | over best fixed in hindsight (95 %) | of the clairvoyant | tokens a round "
        "| own time a round |",
        "|---|---|---|---|---|---|",
    ]
    for row in replays.rows:
        own = f"{row.own_microseconds:.0f} us" if row.controller not in (OFF, HINDSIGHT, CLAIRVOYANT) else ""
        lines.append(
            f"| {_label(row)} | {_speed(row.speedup)} | {_gain(row.over_best_fixed) if row.controller != HINDSIGHT else ''} "
            f"| {row.of_ceiling.value:.0%} | {row.tokens_per_round:.2f} | {own} |"
        )
    return [*lines, ""]


def _by_task(replays: Replays) -> list[str]:
    """Our controller against the best fixed length of each task."""
    lines = [f"| task | best fixed length in hindsight | `{OURS}` over it (95 %) |", "|---|---|---|"]
    for task, ratio in replays.row(OURS).by_task.items():
        lines.append(f"| {task} | `{replays.best_by_task[task]}` | {_gain(ratio)} |")
    return [*lines, ""]


def _streams(simulation: Simulation, pictures: Pictures, name: str) -> list[str]:
    if not simulation.streams:
        return []
    options = simulation.options["streams"]
    lines = [
        "### Known streams",
        "",
        f"Synthetic text whose chances of acceptance are known (mean about .8), costs: {simulation.streams[0].costs.name}. "
        f"Speed as a share of the optimal policy's, which knows the chances; {options['runs']} streams of {options['tokens']} "
        "tokens each, every controller begins anew on each, its own time is left out.",
        "",
        f"| controller | {' | '.join(replays.name for replays in simulation.streams)} |",
        "|---" * (1 + len(simulation.streams)) + "|",
    ]
    for rows in zip(*(replays.rows for replays in simulation.streams), strict=True):
        if rows[0].controller not in (OFF, OPTIMAL):
            shares = " | ".join(f"{row.of_ceiling.value:.1%}" for row in rows)
            lines.append(f"| {rows[0].controller} | {shares} |")
    panels = {replays.name: _curves(replays.regret) for replays in simulation.streams}
    return [
        *lines,
        "",
        *pictures.show(f"{name}-regret-streams", "Regret on known streams", plots.regret, panels, "the optimal policy"),
    ]


def _curves(curves: list[Curve]) -> list[tuple[str, list[int], list[float]]]:
    return [(curve.controller, curve.tokens, curve.regret) for curve in curves]


def _label(row: Row) -> str:
    return row.controller if row.spec == row.controller else f"{row.controller}: `{row.spec}`"


def _speed(ratio: Ratio) -> str:
    return f"**{ratio.value:.2f}x** ({ratio.low:.2f} to {ratio.high:.2f})"


def _gain(ratio: Ratio) -> str:
    value, low, high = (f"{100 * (x - 1):+.1f}" for x in (ratio.value, ratio.low, ratio.high))
    return f"{value} % ({low} to {high})"
