"""Plots as small PNGs: transparent, for light and dark pages, with colours that colour-blind readers can tell apart."""

from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from eesd.bench.replay.costs import CallCosts
from eesd.bench.report.stats import Interval, Summary
from eesd.common.errors import EESDError
from eesd.common.files import written_whole

INK = "#7a828e"
"""Colour of text and axes, legible on white and on black."""
COLOURS = ("#1b80c4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8a8a00")
"""Close to Okabe and Ito's palette, ordered so that neighbours also differ in lightness."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.2,
    "grid.linewidth": 0.6,
    "font.size": 9.5,
    "axes.titlesize": 10,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}
DPI = 130
MIN_JUDGED = 30
"""Depths with fewer judged tokens are not plotted: the acceptance would be too uncertain."""


def check_plots(wanted: bool) -> None:
    """Raise :class:`EESDError` if plots are wanted and matplotlib is missing. Call it before a long measurement."""
    try:
        if wanted:
            import matplotlib  # noqa: F401
    except ImportError:
        raise EESDError("Plots need matplotlib; install it with: pip install 'eesd[bench]', or give --no-plots.") from None


class PlotWriter:
    """Writes a report's plots into a directory beside it. Writes nothing if plots are not wanted."""

    def __init__(self, report: Path, wanted: bool) -> None:
        self._directory = report.with_suffix("")
        self._wanted = wanted

    def embed(self, name: str, caption: str, draw: Any, *data: Any) -> list[str]:
        """Draw a plot.

        Args:
            name: Name of the file, without ``.png``.
            caption: Alternative text.
            draw: A plot function of this module.
            data: Its arguments, without the path.

        Returns:
            Markdown lines that show the plot; none if plots are not wanted.
        """
        if not self._wanted:
            return []
        self._directory.mkdir(parents=True, exist_ok=True)
        draw(*data, self._directory / f"{name}.png")
        return [f"![{caption}]({self._directory.name}/{name}.png)", ""]


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, sharey=True)[0]


def _save(figure: Any, path: Path) -> None:
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)


def _styled(draw: Any) -> Any:
    """Make a plot function use this module's style instead of the process's matplotlib settings."""

    @wraps(draw)
    def wrapped(*args: Any) -> None:
        from matplotlib import rc_context

        with rc_context(STYLE):
            draw(*args)

    return wrapped


@_styled
def intervals(panels: Mapping[str, Sequence[tuple[str, str, Interval]]], xlabel: str, path: Path) -> None:
    """Draw medians as dots with their intervals and values.

    Args:
        panels: (row, series, interval) entries by panel title. The series of a row lie below each other.
        xlabel: Label of the horizontal axis.
        path: PNG to write.
    """
    found = [value for values in panels.values() for value in values]
    series = list(dict.fromkeys(name for _, name, _ in found))
    rows: dict[str, list[str]] = {}
    for row, name, _ in found:
        rows[row] = sorted({name, *rows.get(row, ())}, key=series.index)
    places: dict[tuple[str, str], float] = {}
    height = 0.0  # in inches, like the places
    for row, names in rows.items():
        places |= {(row, name): height + 0.2 * number for number, name in enumerate(names)}
        height += 0.2 * len(names) + 0.14
    figure, axes = _figure(0.075 * max(map(len, rows)) + 2.6 * len(panels), 0.9 + height, len(panels))
    left, right = min(0.95, *(i.low for _, _, i in found)), max(1.0, *(i.high for _, _, i in found))
    margin = 0.04 * (right - left)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.axvline(1, color=INK, linewidth=1, linestyle="--")
        for row, name, interval in values:
            number, place = series.index(name), places[row, name]
            colour = COLOURS[number]
            axis.plot([interval.low, interval.high], [place, place], color=colour)
            axis.plot(interval.median, place, MARKERS[number], color=colour, label=name)
            note = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axis.annotate(f"{interval.median:.2f}", (interval.high, place), xytext=(4, 0), **note)
        axis.set_title(title)
        axis.set_xlim(left - margin, right + 6 * margin)  # room for the values
        axis.grid(False, axis="y")
        axis.set_yticks([places[row, names[0]] + 0.1 * (len(names) - 1) for row, names in rows.items()], rows)
        axis.tick_params(axis="y", length=0)
    axes[0].set_ylim(height - 0.1, -0.16)
    figure.supxlabel(xlabel, fontsize=9.5, color=INK)
    if len(series) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="outside upper right", ncols=len(unique))
    _save(figure, path)


@_styled
def acceptance(lines: Mapping[str, Sequence[Sequence[int]]], path: Path) -> None:
    """Draw acceptance by depth.

    Args:
        lines: [accepted, judged] tokens by depth, for each line's name.
        path: PNG to write.
    """
    figure, (axis,) = _figure(5.2, 3.2)
    depths = range(1, 1 + max(sum(judged >= MIN_JUDGED for _, judged in counts) for counts in lines.values()))
    for number, (name, counts) in enumerate(lines.items()):
        rates = [accepted / judged for accepted, judged in counts if judged >= MIN_JUDGED]
        axis.plot(depths[: len(rates)], rates, marker=MARKERS[number % 7], color=COLOURS[number % 7], label=name)
    axis.set_xlabel("depth of the draft token")
    axis.set_ylabel("share of judged tokens accepted")
    axis.set_xticks(depths)
    axis.set_ylim(0, 1)
    axis.legend(loc="lower left")
    _save(figure, path)


@_styled
def call_costs(curves: Mapping[str, CallCosts], path: Path) -> None:
    """Draw the cost of verify passes by nodes and of drafts by steps, in plain steps.

    Args:
        curves: Measured costs in seconds, for each curve's name.
        path: PNG to write.
    """
    figure, (axis,) = _figure(5.2, 3.2)
    for number, (name, curve) in enumerate(curves.items()):
        plain = curve.verify[1]
        nodes = [count for count in curve.verify if count > 1 or number == 0]
        colour = COLOURS[number]
        axis.plot(
            nodes, [curve.verify[n] / plain for n in nodes], marker=MARKERS[number], color=colour, label=f"verify, {name}"
        )
        steps = [count for count in curve.draft if count <= max(nodes)]
        axis.plot(steps, [curve.draft[n] / plain for n in steps], color=colour, linestyle=":", label=f"draft steps, {name}")
    axis.set_xlabel("nodes of the verify pass, or draft steps")
    axis.set_ylabel("time in plain steps")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left")
    _save(figure, path)


@_styled
def predicted(summaries: Sequence[Summary], path: Path) -> None:
    """Draw predicted against measured speed-up, with a band of 5 % around equality."""
    figure, (axis,) = _figure(4.2, 4.0)
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        if summary.predicted is not None:
            groups.setdefault(summary.configuration.sampling, []).append(summary)
    values = [v for group in groups.values() for s in group for v in (s.speedup_total, s.predicted or 0.0)]
    low, high = min(values) * 0.93, max(values) * 1.07
    axis.fill_between([low, high], [low * 0.95, high * 0.95], [low * 1.05, high * 1.05], color=INK, alpha=0.15, linewidth=0)
    axis.plot([low, high], [low, high], color=INK, linewidth=1, linestyle="--")
    for number, (name, group) in enumerate(groups.items()):
        measured, expected = [s.speedup_total for s in group], [s.predicted for s in group]
        axis.plot(measured, expected, MARKERS[number], color=COLOURS[number], label=name, alpha=0.9, linestyle="none")
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_aspect("equal")
    axis.set_xlabel("measured speed-up")
    axis.set_ylabel("predicted speed-up (band: 5 %)")
    axis.legend(loc="upper left")
    _save(figure, path)


@_styled
def regret(panels: Mapping[str, Sequence[tuple[str, Sequence[int], Sequence[float]]]], base: str, path: Path) -> None:
    """Draw plain steps lost, by tokens decoded. Lines are labelled at their ends in the last panel.

    Args:
        panels: (name, tokens, regret) lines by panel title.
        base: What the regret is measured against.
        path: PNG to write.
    """
    figure, axes = _figure(1.7 + 3.0 * len(panels) + 1.3 * (len(panels) == 1), 3.6, len(panels))
    names = list(
        dict.fromkeys(name for lines in panels.values() for name, _, _ in reversed(lines))
    )  # a name has one colour in all panels
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color=INK, linewidth=1, linestyle="--")
        for name, tokens, lost in lines:
            axis.plot(tokens, lost, color=COLOURS[names.index(name) % len(COLOURS)], linewidth=1.2)
        axis.set_title(title)
        axis.locator_params(axis="x", nbins=4, prune="upper")
        axis.set_xlim(0, max(tokens[-1] for _, tokens, _ in lines))
    _label_ends(axes[-1], [*panels.values()][-1], names)
    figure.supxlabel("tokens decoded", fontsize=9.5, color=INK)
    axes[0].set_ylabel(f"plain steps lost against {base}")
    _save(figure, path)


def _label_ends(axis: Any, lines: Sequence[tuple[str, Sequence[int], Sequence[float]]], names: Sequence[str]) -> None:
    """Write each line's name at its end. Names whose lines end close together are moved apart."""
    low, high = axis.get_ylim()
    gap, place = 0.062 * (high - low), -float("inf")
    for name, tokens, lost in sorted(lines, key=lambda line: line[2][-1]):
        place = max(lost[-1], place + gap)
        colour = COLOURS[names.index(name) % len(COLOURS)]
        axis.annotate(
            name,
            (tokens[-1], lost[-1]),
            (1.03, place),
            textcoords=axis.get_yaxis_transform(),
            color=colour,
            fontsize=8.5,
            va="center",
            annotation_clip=False,
        )
