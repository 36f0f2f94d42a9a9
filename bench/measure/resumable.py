"""A benchmark that saves its result after every prompt, so that it can be interrupted and resumed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eesd.bench.measure.results import Result, describe_machine
from eesd.bench.measure.run import Bench, Options, chosen_configurations, measure, tune
from eesd.bench.measure.tasks import TaskPrompt, split_prompts
from eesd.common.errors import EESDError
from eesd.common.terminal import progress_bar

RESULT_FILE = "result.json"


def refuse_existing(*paths: Path) -> None:
    """Raise :class:`EESDError` if one of these files exists."""
    if path := next(filter(Path.exists, paths), None):
        raise EESDError(f"{path} exists; give --resume, --overwrite or another --output.")


def run_with_progress(label: str, steps: Iterable[None], after_step: Callable[[], None] = lambda: None) -> None:
    """Take all steps and show a progress bar.

    Args:
        label: Label of the bar.
        steps: Does the work of one step for each item.
        after_step: Called after every step.
    """
    with progress_bar(label, None) as advance:
        for _ in steps:
            after_step()
            advance(1)


class ResumableRun:
    """One benchmark, and its result in ``output/result.json``.

    Attributes:
        path: The result file.
        options: What to measure.
        result: Everything measured so far.
    """

    def __init__(self, kind: str, options: Options, output: Path, resume: bool, overwrite: bool) -> None:
        """Begin a benchmark, or continue the one in ``output``.

        Args:
            kind: ``run`` or ``ablation``.
            options: What to measure.
            output: Directory of the result.
            resume: Continue from the result in ``output``, if there is one.
            overwrite: Replace the result in ``output``.

        Raises:
            EESDError: There is a result, and it is neither to be resumed nor overwritten; or the result to resume has
                other options, or is from another machine.
        """
        self.path = output / RESULT_FILE
        self.options = options
        self.result = Result(kind, options.to_dict(), {}, [], describe_machine())
        if self.path.exists() and resume:
            found = Result.load(self.path)
            for what in ("kind", "options", "machine"):
                if getattr(found, what) != getattr(self.result, what):
                    raise EESDError(f"{self.path} was measured with another {what}, so it cannot be resumed; use --overwrite.")
            self.result = found
        elif not overwrite:
            refuse_existing(self.path)
        output.mkdir(parents=True, exist_ok=True)

    def measure_engine(self, name: str, bench: Bench, prompts: Sequence[TaskPrompt], options: Options) -> None:
        """Tune on one engine directory, then run every configuration on every reported prompt.

        Args:
            name: Name of the engine directory in the result.
            bench: Its engines.
            prompts: Prompts to tune on and to report.
            options: What to measure on this engine.

        Raises:
            EESDError: A tree width is not allowed, no prompt fits, or the result to resume has other engines or prompts.
        """
        bench.check_widths(options.widths)
        tuning, reported = split_prompts(prompts, options.tuning_per_task, options.per_task)
        tuned_on, encoded = bench.encode(tuning, options), bench.encode(reported, options)
        tasks = {prompt.id: prompt.task for prompt in prompts}
        rows = [{"id": p.id, "task": tasks[p.id], "tokens": len(p.tokens)} for p in encoded]
        result, description = self.result, bench.describe()
        if result.engines.setdefault(name, description) != description or (result.prompts or rows) != rows:
            raise EESDError(f"{self.path} was measured on other engines or prompts, so it cannot be resumed; use --overwrite.")
        result.prompts = rows
        if all(result.has_runs(name, prompt.id) for prompt in encoded):
            return
        bench.warm_up(name, encoded[0], chosen_configurations(name, options, ()), options)
        run_with_progress(f"{name}: tuning", tune(bench, name, tuned_on, options, result), self._save)
        configurations = chosen_configurations(name, options, result.tunings)
        steps = measure(bench, name, encoded, configurations, options, result)
        run_with_progress(f"{name}: {len(encoded)} prompts", steps, self._save)

    def finish(self) -> None:
        """Mark the result as complete."""
        self.result.complete = True
        self._save()

    def _save(self) -> None:
        self.result.save(self.path)
