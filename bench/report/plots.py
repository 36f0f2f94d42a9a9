"""Plots as small PNGs: transparent, for light and dark pages, with colours that colour-blind readers can tell apart."""

from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from eesd.bench.measure.stats import Interval
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
        """Call ``draw`` with ``data`` and the path of ``name``. Returns Markdown lines that show it; none if not wanted."""
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
def regret(lines: Sequence[tuple[str, Sequence[int], Sequence[float]]], path: Path) -> None:
    """Draw plain steps lost against the best fixed length, by tokens decoded. Names are at the ends of the lines.

    Args:
        lines: (name, tokens, regret) of each line.
        path: PNG to write.
    """
    figure, (axis,) = _figure(6.0, 3.6)
    axis.axhline(0, color=INK, linewidth=1, linestyle="--")
    for number, (_, tokens, lost) in enumerate(reversed(lines)):
        axis.plot(tokens, lost, color=COLOURS[number % len(COLOURS)], linewidth=1.2)
    axis.set_xlim(0, max(tokens[-1] for _, tokens, _ in lines))
    axis.set_xlabel("tokens decoded")
    axis.set_ylabel("plain steps lost against the best fixed length")
    low, high = axis.get_ylim()
    place = -float("inf")
    ends = [(lost[-1], number, name) for number, (name, _, lost) in enumerate(reversed(lines))]
    for end, number, name in sorted(ends):
        place = max(end, place + 0.062 * (high - low))  # names whose lines end close together are moved apart
        colour = COLOURS[number % len(COLOURS)]
        axis.text(1.03, place, name, transform=axis.get_yaxis_transform(), color=colour, fontsize=8.5, va="center")
    _save(figure, path)
