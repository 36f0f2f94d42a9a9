"""Replays as Markdown with plots."""

from eesd.bench.replay.replay import OFF, Ratio
from eesd.bench.replay.simulation import CLAIRVOYANT, HINDSIGHT, OPTIMAL, Comparison, RegretCurve, Row, Simulation
from eesd.bench.report import plots
from eesd.bench.report.plots import PlotWriter

DEFAULT_CONTROLLER = "cost-aware-ts"


def replay_section(simulation: Simulation, plot_writer: PlotWriter, name: str) -> list[str]:
    """The section of one simulation.

    Args:
        simulation: The simulation.
        plot_writer: Writes the regret curves.
        name: Prefix of the plots' names.

    Returns:
        Lines of Markdown.
    """
    lines = [f"## Replayed traces: {simulation.origin['model']}, {simulation.origin['dtype']}", "", *_setting(simulation)]
    for found in simulation.replays:
        lines += [f"### Costs: {found.costs.name}", "", _costs(found), "", *_table(found), *_by_task(found)]
        panel = {"": _curves(found.regret)}
        lines += plot_writer.embed(
            f"{name}-regret-{found.name}", "Regret by tokens decoded", plots.regret, panel, "the best fixed length"
        )
    return lines + _streams(simulation, plot_writer, name)


def _setting(simulation: Simulation) -> list[str]:
    origin, options, machine = simulation.origin, simulation.options, simulation.machine
    sampling = origin["samplings"][0]
    heat = "" if sampling == "greedy" else f" at temperature {origin['temperature']}"
    return [
        f"{sum(simulation.prompts.values())} prompts ({', '.join(simulation.prompts)}) with {origin['max_new_tokens']} new "
        f"tokens each, {sampling}{heat}; {origin['depth']} tokens were drafted from every position. Every controller was "
        "replayed on these traces. Fixed lengths, thresholds and AdaEDL's options were tuned on "
        f"{sum(simulation.tuning_prompts.values())} other prompts; controllers that learn ran with {options['seeds']} seeds. "
        f"Each controller pays for its own time, measured on {machine['CPU']}. The speed is the total time of plain decoding "
        "over the total time of drafting, with its 95 % bootstrap interval over prompts. The clairvoyant drafts exactly the "
        "tokens that will be accepted; no real controller can.",
        "",
    ]


def _costs(found: Comparison) -> str:
    calls, plain = found.costs.calls, found.costs.plain_seconds
    draft = ", ".join(f"{steps}: {calls.draft_cost(steps):.2f}" for steps in (1, 2, 4, 8))
    verify = ", ".join(f"{nodes}: {calls.verify_cost(nodes):.2f}" for nodes in (2, 4, 8, 16))
    return (
        f"A plain step takes {plain * 1e3:.1f} ms. Costs in plain steps: a round's draft by steps {draft}; "
        f"a verify pass by nodes {verify}."
    )


def _table(found: Comparison) -> list[str]:
    lines = [
        "| controller | speed over plain (95 %) | over best fixed in hindsight (95 %) | share of the clairvoyant's speed "
        "| tokens per round | own time per round |",
        "|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        own = f"{row.own_microseconds:.0f} us" if row.controller not in (OFF, HINDSIGHT, CLAIRVOYANT) else ""
        lines.append(
            f"| {_label(row)} | {_speed(row.speedup)} | {_gain(row.over_best_fixed) if row.controller != HINDSIGHT else ''} "
            f"| {row.of_ceiling.value:.0%} | {row.tokens_per_round:.2f} | {own} |"
        )
    return [*lines, ""]


def _by_task(found: Comparison) -> list[str]:
    """The default controller against the best fixed length of each task."""
    lines = [f"| task | best fixed length in hindsight | `{DEFAULT_CONTROLLER}` over it (95 %) |", "|---|---|---|"]
    for task, ratio in found.row(DEFAULT_CONTROLLER).by_task.items():
        lines.append(f"| {task} | `{found.best_by_task[task]}` | {_gain(ratio)} |")
    return [*lines, ""]


def _streams(simulation: Simulation, plot_writer: PlotWriter, name: str) -> list[str]:
    if not simulation.streams:
        return []
    options = simulation.options["streams"]
    lines = [
        "### Synthetic streams",
        "",
        f"Synthetic text with known chances of acceptance (mean about .8). Costs: {simulation.streams[0].costs.name}. The "
        "table shows the share of the optimal policy's speed; the optimal policy knows the chances. "
        f"{options['runs']} streams of {options['tokens']} tokens; every controller starts anew on each, and its own time is "
        "not charged.",
        "",
        f"| controller | {' | '.join(found.name for found in simulation.streams)} |",
        "|---" * (1 + len(simulation.streams)) + "|",
    ]
    for rows in zip(*(found.rows for found in simulation.streams), strict=True):
        if rows[0].controller not in (OFF, OPTIMAL):
            shares = " | ".join(f"{row.of_ceiling.value:.1%}" for row in rows)
            lines.append(f"| {rows[0].controller} | {shares} |")
    panels = {found.name: _curves(found.regret) for found in simulation.streams}
    return [
        *lines,
        "",
        *plot_writer.embed(f"{name}-regret-streams", "Regret on synthetic streams", plots.regret, panels, "the optimal policy"),
    ]


def _curves(curves: list[RegretCurve]) -> list[tuple[str, list[int], list[float]]]:
    return [(curve.controller, curve.tokens, curve.regret) for curve in curves]


def _label(row: Row) -> str:
    return row.controller if row.spec == row.controller else f"{row.controller}: `{row.spec}`"


def _speed(ratio: Ratio) -> str:
    return f"**{ratio.value:.2f}x** ({ratio.low:.2f} to {ratio.high:.2f})"


def _gain(ratio: Ratio) -> str:
    value, low, high = (f"{100 * (x - 1):+.1f}" for x in (ratio.value, ratio.low, ratio.high))
    return f"{value} % ({low} to {high})"
