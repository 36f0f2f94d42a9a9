"""What is shown on a terminal: tables, progress bars, coloured text.

Text is shown as it is: ``[red]`` in a model's name or a path is no style, and ``:smile:`` no
picture. Only this module uses rich. ``NO_COLOR`` (no-color.org) and ``TERM=dumb`` switch colours
off.
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
"""Seconds between two lines about a long step, where no bar can be shown."""


class Console(rich.console.Console):
    """A console that reads nothing into text."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Let the command end as it does when other output is cut off. (rich would exit with code
        1.)"""
        raise BrokenPipeError


def progress() -> Progress:
    """Progress bars on stderr, which disappear at the end. Shows nothing if stderr is not a
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
    """One progress bar; gives a function that advances it. Where stderr is not a terminal, a line
    says every :data:`SILENCE` how far it is.

    Args:
        label: What runs.
        total: The number at the end; None if it is not known.
        announce: Whether a line says that it begins, if stderr is not a terminal.
    """
    with progress() as bar:
        task = bar.add_task(label, total=total)
        began = monotonic()

        def tell() -> None:
            done = int(bar.tasks[task].completed)
            click.echo(f"{label}: {progress_text(done, total, monotonic() - began)}", err=True)

        if announce and bar.disable:
            click.echo(f"{label} ...", err=True)
        with calling(tell) if bar.disable else nullcontext():
            yield lambda count: bar.advance(task, count)


@contextmanager
def calling(tell: Callable[[], None]) -> Iterator[None]:
    """Call a function every :data:`SILENCE`, in another thread."""
    ended = Event()

    def repeat() -> None:
        while not ended.wait(SILENCE):
            tell()

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def progress_text(done: int, total: int | None, seconds: float) -> str:
    """How far a step is after so many seconds, and the time that is left if that is known."""
    if not total:
        return f"{done} done in {seconds:.0f} s"
    left = f", {seconds * max(total / done - 1, 0):.0f} s left" if done else ""
    return f"{min(done / total, 1):.0%} in {seconds:.0f} s{left}"


def notice(text: str) -> None:
    """A line on stderr for what the user should know, in yellow."""
    click.echo(coloured(text, "yellow"), err=True)


def coloured(text: str, colour: str) -> str:
    """Text in a colour. (click removes it if the output is not a terminal.)"""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return text if plain else click.style(text, fg=colour)
