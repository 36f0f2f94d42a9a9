"""Terminal output, such as tables, progress bars and coloured text.

Text is shown unchanged. For example, ``[red]`` in a model's name or a path is not treated as a
style, and ``:smile:`` is not treated as an emoji. Only this module uses rich. ``NO_COLOR``
(no-color.org) and ``TERM=dumb`` disable colours.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from time import monotonic

import click
import rich.console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Progress
from rich.table import Table as Table

SILENCE = 20.0
"""Number of seconds between two progress lines of a long step. The lines are printed if no bar can
be shown."""


class Console(rich.console.Console):
    """A console that does not interpret text."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """End the command as after any closed pipe (rich would exit with code 1)."""
        raise BrokenPipeError


def progress() -> Progress:
    """Progress bars on stderr that disappear at the end. Nothing is shown if stderr is not a
    terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<44.44}", markup=False),
        BarColumn(),
        TaskProgressColumn("{task.percentage:>3.0f}%", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def progress_bar(
    label: str, total: int | None, announce: bool = False
) -> Iterator[Callable[[int], None]]:
    """One progress bar. Yields a function that advances it. If stderr is not a terminal, a line
    reports the progress every :data:`SILENCE` seconds.

    Args:
        label: Name of the step.
        total: The number at which the step is complete, or None if it is unknown.
        announce: Whether to print a line at the start, if stderr is not a terminal.
    """
    with progress() as bar:
        task = bar.add_task(label, total=total)
        began = monotonic()

        def report() -> None:
            done = int(bar.tasks[task].completed)
            click.echo(f"{label}: {progress_text(done, total, monotonic() - began)}", err=True)

        if announce and bar.disable:
            click.echo(f"{label} ...", err=True)
        with calling(report) if bar.disable else nullcontext():
            yield lambda count: bar.advance(task, count)


@contextmanager
def calling(report: Callable[[], None]) -> Iterator[None]:
    """Call a function every :data:`SILENCE` seconds, in another thread."""
    ended = Event()

    def repeat() -> None:
        while not ended.wait(SILENCE):
            report()

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def progress_text(done: int, total: int | None, seconds: float) -> str:
    """Describe the progress of a step after ``seconds``. If ``total`` is known, the text includes
    the remaining time."""
    if not total:
        return f"{done} done in {seconds:.0f} s"
    left = f", {seconds * max(total / done - 1, 0):.0f} s left" if done else ""
    return f"{min(done / total, 1):.0%} in {seconds:.0f} s{left}"


def notice(text: str) -> None:
    """Print a yellow line on stderr, about something that the user should know."""
    click.echo(coloured(text, "yellow"), err=True)


def coloured(text: str, colour: str) -> str:
    """Text in a colour. (click removes colours if the output is not a terminal.)"""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return text if plain else click.style(text, fg=colour)
