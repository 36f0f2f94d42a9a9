"""Charts as SVG files, drawn with matplotlib, which the extra ``report`` installs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.machine import pip_install
from eesd.common.outputs import check_own

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARK = '<?xml version="1.0" encoding="utf-8"?>\n<!-- Drawn by EESD. Do not edit. -->\n'
"""Beginning of each chart. It lets a command recognize the files that it wrote."""


def check_charts(path: Path) -> None:
    """Raise :class:`EESDError` if no chart can be written to ``path``. This is the case if
    matplotlib is missing, or if another program wrote the file."""
    if find_spec("matplotlib") is None:
        raise EESDError(f"--charts needs matplotlib; install it with: {pip_install('report')}.")
    check_own(path, MARK)


@contextmanager
def drawn(path: Path, titles: Sequence[str]) -> Iterator[Sequence["Axes"]]:
    """Yield axes side by side, one for each title. They are written to an SVG file when the block
    ends.

    The same numbers give the same file. Raises :class:`EESDError` as :func:`check_charts` does.
    """
    check_charts(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[str, object] = {
        "svg.hashsalt": "eesd",
        "svg.fonttype": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style):
        figure = Figure(figsize=(4.6 * len(titles), 3.6), layout="constrained")
        axes = figure.subplots(1, len(titles), squeeze=False)[0]
        for one, title in zip(axes, titles, strict=True):
            one.set_title(title)
        yield axes
        content = StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    with written_whole(path) as temporary:
        temporary.write_text(MARK + content.getvalue().partition("?>\n")[2], "utf-8")
        check_own(path, MARK)


def draw_acceptance(axes: "Axes", by_depth: Mapping[str, Sequence[float]]) -> None:
    """Draw the acceptance by depth. Each label gets a line."""
    for label, values in by_depth.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=label)
    axes.set(xlabel="depth in the draft", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(by_depth) > 1:
        axes.legend(frameon=False, fontsize="small")
