"""Replays as Markdown."""

from eesd.bench.replay.replay import OFF, Ratio
from eesd.bench.replay.simulation import CLAIRVOYANT, HINDSIGHT, Comparison, Simulation
from eesd.common.markdown import table

DEFAULT_CONTROLLER = "cost-aware-ts"


def replay_section(simulation: Simulation) -> list[str]:
    """Return the lines of one simulation."""
    lines = [
        f"## Replayed traces: {simulation.origin['model']}, {simulation.origin['dtype']}",
        "",
        *_setting(simulation),
    ]
    for found in simulation.replays:
        lines += [
            f"### Costs: {found.costs.name}",
            "",
            *_costs(found),
            *_table(found),
            *_by_task(found),
        ]
    return lines


def _setting(simulation: Simulation) -> list[str]:
    origin = simulation.origin
    options = simulation.options
    machine = simulation.machine
    sampling = origin["samplings"][0]
    heat = "" if sampling == "greedy" else f" at temperature {origin['temperature']}"
    return [
        *table(
            ["setting", ""],
            {
                "prompts": f"{sum(simulation.prompts.values())} ({', '.join(simulation.prompts)})",
                "texts": f"{origin['max_new_tokens']} new tokens, {sampling}{heat}",
                "drafts": f"{origin['depth']} tokens at every position",
                **{
                    "tuning prompts": sum(simulation.tuning_prompts.values()),
                    "seeds of learners": options["seeds"],
                },
                **{"controllers' time measured on": machine["CPU"]},
            }.items(),
        ),
        (
            "All controllers are replayed on the same traces, and the time of the "
            "controller counts. Fixed lengths and thresholds are tuned on the tuning "
            "prompts. The speed is the total time of plain decoding divided by that of "
            "drafting. The clairvoyant controller drafts exactly the accepted tokens, "
            "which no real controller can do."
        ),
        "",
    ]


def _costs(found: Comparison) -> list[str]:
    """Return a table that has the seconds of a plain step, and the costs of calls in plain
    steps."""
    calls = found.costs.calls
    plain = found.costs.plain_seconds
    draft = ", ".join(f"{steps}: {calls.draft_cost(steps):.2f}" for steps in (1, 2, 4, 8))
    verify = ", ".join(f"{nodes}: {calls.verify_cost(nodes):.2f}" for nodes in (2, 4, 8, 16))
    columns = ["plain step", "draft by steps, in plain steps", "verify by nodes, in plain steps"]
    return table(columns, [[f"{plain * 1e3:.1f} ms", draft, verify]])


def _table(found: Comparison) -> list[str]:
    columns = [
        "controller",
        "speed relative to plain (95 %)",
        "gain over the best fixed length in hindsight (95 %)",
        "share of the clairvoyant controller's speed",
    ]
    rows = []
    for row in found.rows:
        label = row.controller if row.spec == row.controller else f"{row.controller}: `{row.spec}`"
        speed = f"**{row.speedup.value:.2f}x** ({row.speedup.low:.2f} to {row.speedup.high:.2f})"
        own = (
            f"{row.own_microseconds:.0f} us"
            if row.controller not in (OFF, HINDSIGHT, CLAIRVOYANT)
            else ""
        )
        gain = _gain(row.over_best_fixed) if row.controller != HINDSIGHT else ""
        rows.append(
            [label, speed, gain, f"{row.of_ceiling.value:.0%}", f"{row.tokens_per_round:.2f}", own]
        )
    return table([*columns, "tokens per round", "controller's time per round"], rows)


def _by_task(found: Comparison) -> list[str]:
    """Return a table that compares the default controller with the best fixed length of each
    task."""
    by_task = next(row for row in found.rows if row.controller == DEFAULT_CONTROLLER).by_task
    rows = [
        [task, f"`{found.best_by_task[task]}`", _gain(ratio)] for task, ratio in by_task.items()
    ]
    return table(
        [
            "task",
            "best fixed length in hindsight",
            f"gain of `{DEFAULT_CONTROLLER}` over it (95 %)",
        ],
        rows,
    )


def _gain(ratio: Ratio) -> str:
    value, low, high = (f"{100 * (x - 1):+.1f}" for x in (ratio.value, ratio.low, ratio.high))
    return f"{value} % ({low} to {high})"
