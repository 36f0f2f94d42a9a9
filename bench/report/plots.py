"""Regret curves as small PNGs: transparent, for light and dark pages, with colours that colour-blind readers can tell apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.files import written_whole

INK = "#7a828e"
"""Colour of text and axes, legible on white and on black."""
COLOURS = ("#1b80c4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8a8a00")
"""Close to Okabe and Ito's palette, ordered so that neighbours also differ in lightness."""
STYLE: Any = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **{"axes.grid": True, "grid.alpha": 0.2, "font.size": 9.5, "lines.linewidth": 1.2},
}


def check_plots(wanted: bool) -> None:
    """Raise :class:`EESDError` if plots are wanted and matplotlib is missing. Call it before a long measurement."""
    try:
        if wanted:
            import matplotlib  # noqa: F401
    except ImportError:
        raise EESDError("Plots need matplotlib; install it with: pip install 'eesd[bench]', or give --no-plots.") from None


def regret(lines: Sequence[tuple[str, Sequence[int], Sequence[float]]], path: Path) -> None:
    """Draw plain steps lost against the best fixed length, by tokens decoded. Names are at the ends of the lines.

    Args:
        lines: (name, tokens, regret) of each line.
        path: PNG to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axis = figure.subplots()
        axis.axhline(0, color=INK, linestyle="--")
        colours = dict(zip((name for name, _, _ in reversed(lines)), COLOURS, strict=False))
        for name, tokens, lost in lines:
            axis.plot(tokens, lost, color=colours[name])
        axis.set_xlim(0, max(tokens[-1] for _, tokens, _ in lines))
        axis.set_xlabel("tokens decoded")
        axis.set_ylabel("plain steps lost against the best fixed length")
        low, high = axis.get_ylim()
        place = -float("inf")
        for name, _, lost in sorted(lines, key=lambda line: line[2][-1]):
            place = max(lost[-1], place + 0.062 * (high - low))  # names whose lines end close together are moved apart
            axis.text(1.03, place, name, transform=axis.get_yaxis_transform(), color=colours[name], fontsize=8.5, va="center")
        with written_whole(path) as temporary:
            figure.savefig(temporary, format="png", dpi=130)
