"""What is shown on a terminal: tables, progress bars, coloured text.

Text is shown as it is: ``[red]`` in a model's name or a path is no style, and ``:smile:`` no
picture. Only this module uses rich. ``NO_COLOR`` (no-color.org) and ``TERM=dumb`` switch colours
off.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
def progress_bar(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """One progress bar; gives a function that advances it. ``total`` is None if it is not known."""
    with progress() as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def notice(text: str) -> None:
    """A line on stderr for what the user should know, in yellow."""
    click.echo(coloured(text, "yellow"), err=True)


def coloured(text: str, colour: str) -> str:
    """Text in a colour. (click removes it if the output is not a terminal.)"""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return text if plain else click.style(text, fg=colour)
