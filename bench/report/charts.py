"""Draws a measurement as a chart. The chart shows the speed-up for each kind of prompt, and the
acceptance at each depth."""

from pathlib import Path

from eesd.bench.measure.results import Result
from eesd.bench.report.replays import DEFAULT_CONTROLLER
from eesd.bench.report.stats import Summary, summarize
from eesd.common.charts import draw_acceptance, drawn

ALL = "all prompts"
FEWEST = 5
"""A depth is drawn only if at least this number of tokens was judged at it."""


def draw_result(result: Result, path: Path) -> None:
    """Draw the configurations with the default controller, or all configurations if none has it.

    Raises:
        EESDError: matplotlib is missing, or another program wrote the file at ``path``.
    """
    summaries = summarize(result)
    chosen = [one for one in summaries if one.configuration.controller == DEFAULT_CONTROLLER]
    labels = {_label(one, len(result.engines) > 1): one for one in chosen or summaries}
    tasks = [*dict.fromkeys(prompt["task"] for prompt in result.prompts), ALL]
    with drawn(path, ("Speed-up by kind of prompt", "Acceptance by depth")) as (left, right):
        for number, (label, one) in enumerate(labels.items()):
            intervals = one.by_task | {ALL: one.speedup}
            shown = [task for task in tasks if task in intervals]
            offset = (number - (len(labels) - 1) / 2) * 0.6 / len(labels)
            places = [tasks.index(task) + offset for task in shown]
            medians = [intervals[task].median for task in shown]
            below = [intervals[task].median - intervals[task].low for task in shown]
            above = [intervals[task].high - intervals[task].median for task in shown]
            left.errorbar(medians, places, xerr=(below, above), fmt="o", capsize=3, label=label)
        left.axvline(1, color="grey", linewidth=0.8)
        left.set_yticks(range(len(tasks)), tasks)
        left.invert_yaxis()
        left.set_xlabel("times plain decoding: median, 95 % interval")
        by_depth = {
            label: [accepted / judged for accepted, judged in one.acceptance if judged >= FEWEST]
            for label, one in labels.items()
        }
        draw_acceptance(right, by_depth)


def _label(summary: Summary, several: bool) -> str:
    """Return the name of a configuration. It differs from all other names in the chart."""
    c = summary.configuration
    parts = [c.sampling, "chain" if c.width == 1 else f"tree of {c.width}"]
    if c.budget:
        parts.append("budget")
    if c.controller != DEFAULT_CONTROLLER:
        parts.append(str(c.controller))
    if several:
        parts.append(c.engine)
    return ", ".join(parts)
