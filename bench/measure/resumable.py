"""A benchmark that saves its result after every prompt, so that it can be interrupted and
resumed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from eesd.bench.measure.results import Result
from eesd.bench.measure.run import Bench, Options, chosen_configurations, measure, tune, untuned
from eesd.bench.measure.tasks import TaskPrompt, split_prompts
from eesd.common.errors import EESDError
from eesd.common.terminal import progress_bar


def run_with_progress(
    label: str,
    steps: Iterable[None],
    after_step: Callable[[], None] = lambda: None,
    total: int | None = None,
) -> None:
    """Take all steps, show a progress bar, and call ``after_step`` after each step. ``total`` is
    the number of steps, if it is known."""
    with progress_bar(label, total, announce=True) as advance:
        for _ in steps:
            after_step()
            advance(1)


@contextmanager
def announce_resume(path: Path) -> Iterator[None]:
    """On Ctrl-C, print how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if path.exists():
            click.echo(f"\n{path} has the results so far; continue with --resume.", err=True)
        raise


def measure_engine(
    result: Result,
    path: Path,
    name: str,
    bench: Bench,
    prompts: Sequence[TaskPrompt],
    options: Options,
) -> None:
    """Tune on one engine directory, then run every configuration on every reported prompt. Saves
    the result after each step.

    Args:
        result: Receives the measurements. Measurements that it already has are not repeated.
        path: The result's file.
        name: Name of the engine directory in the result.
        bench: The engines of the directory.
        prompts: The prompts. Some are for tuning, and the others are reported.
        options: Measurements to make.

    Raises:
        EESDError: A tree width is not allowed, no prompt fits, or the result to resume has
            different engines or prompts.
    """
    bench.check_widths(options.widths)
    tuning, reported = split_prompts(prompts, options.tuning_per_task, options.per_task)
    tuned_on = bench.encode(tuning, options)
    encoded = bench.encode(reported, options)
    tasks = {prompt.id: prompt.task for prompt in prompts}
    rows = [{"id": p.id, "task": tasks[p.id], "tokens": len(p.tokens)} for p in encoded]
    description = bench.describe()
    if (
        result.engines.setdefault(name, description) != description
        or (result.prompts or rows) != rows
    ):
        raise EESDError(
            f"{path} was measured with different engines or prompts, so it cannot be "
            "resumed; use --overwrite."
        )
    result.prompts = rows
    if all(result.has_runs(name, prompt.id) for prompt in encoded):
        return

    def save() -> None:
        result.save(path)

    bench.warm_up(name, encoded[0], chosen_configurations(name, options, ()), options)
    to_tune = len(untuned(name, options, result)) * len(tuned_on)
    steps = tune(bench, name, tuned_on, options, result)
    run_with_progress(f"{name}: tuning", steps, save, to_tune)
    configurations = chosen_configurations(name, options, result.tunings)
    steps = measure(bench, name, encoded, configurations, options, result)
    left = [prompt for prompt in encoded if not result.has_runs(name, prompt.id)]
    run_with_progress(f"{name}: {len(left)} prompts", steps, save, len(left))
