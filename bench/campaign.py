"""A measurement that is kept on disk as it goes: begun, interrupted, resumed."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from eesd.bench.results import Result, describe_machine
from eesd.bench.run import Bench, Options, chosen_configurations, measure, tune
from eesd.bench.tasks import Prompt, split
from eesd.common.errors import EESDError

NAME = "result.json"


def check_new(*paths: Path) -> None:
    """Raise :class:`EESDError` for the first of these files that is there."""
    if path := next(filter(Path.exists, paths), None):
        raise EESDError(f"{path} is there already; give --resume, --overwrite or another --output.")


def follow(label: str, steps: Iterable[None], each: Callable[[], None] = lambda: None) -> None:
    """Take all steps behind a progress bar, and do ``each`` after every one."""
    with click.progressbar(steps, label=label, file=sys.stderr) as bar:
        for _ in bar:
            each()


class Campaign:
    """The result of one benchmark in the directory ``output``, saved whenever a prompt is complete.

    Raises :class:`EESDError` when there is one already and it is neither to be resumed nor overwritten, or is of another
    measurement than the one to resume.
    """

    def __init__(self, kind: str, options: Options, output: Path, resume: bool, overwrite: bool) -> None:
        self.path = output / NAME
        self.options = options
        self.result = Result(kind, options.to_dict(), {}, [], describe_machine())
        if self.path.exists() and resume:
            found = Result.load(self.path)
            for what in ("kind", "options", "machine"):
                if getattr(found, what) != getattr(self.result, what):
                    raise EESDError(f"{self.path} was measured with another {what}, so it cannot be resumed; use --overwrite.")
            self.result = found
        elif not overwrite:
            check_new(self.path)
        output.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, bench: Bench, prompts: Sequence[Prompt], options: Options) -> None:
        """Measure one engine directory under ``name``: tune, then every configuration on every reported prompt."""
        bench.check_widths(options.widths)
        tuning, reported = split(prompts, options.tuning_per_task, options.per_task)
        tuned_on, encoded = bench.encode(tuning, options), bench.encode(reported, options)
        tasks = {prompt.id: prompt.task for prompt in prompts}
        rows = [{"id": p.id, "task": tasks[p.id], "tokens": len(p.tokens)} for p in encoded]
        result = self.result
        if result.engines.setdefault(name, bench.facts()) != bench.facts() or (result.prompts or rows) != rows:
            raise EESDError(f"{self.path} was measured on other engines or prompts, so it cannot be resumed; use --overwrite.")
        result.prompts = rows
        if all(result.done(name, prompt.id) for prompt in encoded):
            return
        bench.warm_up(name, encoded[0], chosen_configurations(name, options, ()), options)
        follow(f"{name}: tuning", tune(bench, name, tuned_on, options, result), self._save)
        configurations = chosen_configurations(name, options, result.tunings)
        steps = measure(bench, name, encoded, configurations, options, result)
        follow(f"{name}: {len(encoded)} prompts", steps, self._save)

    def _save(self) -> None:
        self.result.save(self.path)

    def finish(self) -> None:
        """Note that nothing is missing."""
        self.result.complete = True
        self._save()
