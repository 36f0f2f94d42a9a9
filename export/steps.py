"""The steps of an export: shown as they run, and how long each took."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from eesd.common.terminal import Progress, progress


class Steps:
    """Made by :func:`shown_steps`."""

    def __init__(self, bar: Progress, log: Callable[[str], None]) -> None:
        self._bar, self._task, self._log = bar, bar.add_task("", total=None), log
        self._began: list[tuple[str, float]] = []

    def begin(self, step: str) -> None:
        """End the step before, and begin one."""
        self._began.append((step, perf_counter()))
        self._bar.reset(self._task, description=step, total=None)
        if self._bar.disable:
            self._log(step)

    def progress(self, text: str, size: int, total: int) -> None:
        """What :func:`~eesd.export.engine_dir.export` tells: a step begins, or bytes of a weight
        were written."""
        if size:
            self._bar.update(self._task, description=text, advance=size, total=total)
        else:
            self.begin(text)

    def seconds(self) -> str:
        """The seconds of all steps, and of each that took one or more."""
        names, times = zip(*self._began, ("", perf_counter()), strict=True)
        took = {
            name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)
        }
        parts = [f"{name} {seconds:.0f}" for name, seconds in took.items() if seconds >= 0.5]
        return f"{times[-1] - times[0]:.0f} s" + (f": {', '.join(parts)}" if parts else "")


@contextmanager
def shown_steps(log: Callable[[str], None]) -> Iterator[Steps]:
    """A progress bar with the time left; where stderr is no terminal, ``log`` is called with the
    name of each step."""
    with progress() as bar:
        yield Steps(bar, log)
