"""Show the steps of an export, with the progress and the time of each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

from eesd.common.terminal import SILENCE, Progress, calling, progress

SECONDS = 2.0
"""Number of seconds between two progress lines of a long step. The lines are logged if no bar can
be shown."""


class Steps:
    """Reports the steps of an export. Made by :func:`shown_steps`."""

    def __init__(self, bar: Progress, log: Callable[[str], None]) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)
        self._log = log
        self._began: list[tuple[str, float]] = []
        self._done = 0
        self._said = 0.0

    def report(self) -> None:
        """Log the time of a step that has run long without progress."""
        step, began = self._began[-1] if self._began else ("", 0.0)
        now = perf_counter()
        if step and now - self._said >= SILENCE:
            self._log(f"{step}, {now - began:.0f} s")

    def begin(self, step: str) -> None:
        """End the previous step, and begin one."""
        now = perf_counter()
        self._began.append((step, now))
        self._done = 0
        self._said = now
        self._bar.reset(self._task, description=step, total=None)
        if self._bar.disable:
            self._log(step)

    def progress(self, text: str, size: int, total: int) -> None:
        """This is the ``progress`` of :func:`~eesd.export.engine_dir.export`. It is called when a
        step begins, or when bytes of a weight were written."""
        if not size:
            self.begin(text)
            return
        self._bar.update(self._task, description=text, advance=size, total=total)
        self._done += size
        if self._bar.disable:
            self._log_progress(total)

    def _log_progress(self, total: int) -> None:
        """Log the completed share and the remaining time, every few seconds."""
        step, began = self._began[-1]
        now = perf_counter()
        if now - self._said < SECONDS or not total:
            return
        self._said = now
        share = min(self._done / total, 1.0)
        left = (now - began) * (1 - share) / share
        self._log(f"{step}: {share:.0%}, {left:.0f} s left")

    def seconds(self) -> str:
        """Describes the seconds of all steps together, and of each step that took at least a
        second."""
        names, times = zip(*self._began, ("", perf_counter()), strict=True)
        took = {
            name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)
        }
        parts = [f"{name} {seconds:.0f}" for name, seconds in took.items() if seconds >= 0.5]
        return f"{times[-1] - times[0]:.0f} s" + (f": {', '.join(parts)}" if parts else "")


@contextmanager
def shown_steps(log: Callable[[str], None]) -> Iterator[Steps]:
    """A progress bar with the remaining time. If stderr is not a terminal, ``log`` is called with
    the name of each step instead."""
    with progress() as bar:
        steps = Steps(bar, log)
        with calling(steps.report) if bar.disable else nullcontext():
            yield steps
