"""Ablation: what each exit head contributes, and, with the last head, what trees and controllers contribute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from eesd.bench.measure.results import read_json
from eesd.bench.measure.resumable import ResumableRun
from eesd.bench.measure.run import CANDIDATES, Bench
from eesd.bench.measure.tasks import TaskPrompt
from eesd.common.errors import EESDError
from eesd.common.files import scratch_directory
from eesd.common.manifest import DEFAULT_SLOTS, MANIFEST_FILE

EXIT_HEAD = "exit_head.json"


class Part(NamedTuple):
    """A head to measure.

    Attributes:
        name: Name in the report.
        directory: Directory of an exit head, or an engine directory. None: an initialised head without training.
    """

    name: str
    directory: Path | None

    @property
    def is_engine(self) -> bool:
        return self.directory is not None and (self.directory / MANIFEST_FILE).exists()


def parse_head(spec: str) -> Part:
    """Parse ``NAME`` or ``NAME=DIR``. Raises :class:`EESDError` if DIR is neither an exit head nor an engine directory."""
    name, equals, path = spec.partition("=")
    directory = Path(path)
    if not name or (equals and not (path and any((directory / file).exists() for file in (MANIFEST_FILE, EXIT_HEAD)))):
        raise EESDError(f"--head {spec} is not NAME or NAME=DIR; DIR must have {EXIT_HEAD} or {MANIFEST_FILE}.")
    return Part(name, directory if equals else None)


def ablate(run: ResumableRun, parts: Sequence[Part], model: str | None, dtype: str, prompts: Sequence[TaskPrompt]) -> None:
    """Measure every head with all fixed lengths on chains, and the last head also with trees and the other controllers.

    Args:
        run: Receives the measurements.
        parts: The heads.
        model: Base model of the heads that must be exported.
        dtype: Element type to export with.
        prompts: Prompts to tune on and to report.

    Raises:
        EESDError: Two heads have the same name, or a head must be exported and there is no model for it.
    """
    if len({part.name for part in parts}) < len(parts):
        raise EESDError("Two heads have the same name; names must be unique.")
    if model is None and not all(part.is_engine for part in parts):
        raise EESDError("--model is missing; heads are exported together with their base model.")
    options = run.options
    lengths = CANDIDATES["fixed"]
    for number, part in enumerate(parts):
        others = [name for name in options.controllers if name != "fixed"] if number == len(parts) - 1 else []
        widths, budgeted = (options.widths, options.budgeted) if others else (options.widths[:1], ())
        with _engine_directory(part, parts, model, dtype) as directory:
            bench = Bench(directory, options.backend, options.threads, options.kv_cache_dtype)
            measured = replace(options, controllers=(*lengths, *others), widths=widths, budgeted=budgeted)
            run.measure_engine(part.name, bench, prompts, measured)
            del bench  # its files are about to be deleted


@contextmanager
def _engine_directory(part: Part, parts: Sequence[Part], model: str | None, dtype: str) -> Iterator[Path]:
    """The head's engine directory. An exit head is exported into a temporary directory."""
    if part.is_engine:
        assert part.directory is not None
        yield part.directory
        return
    assert model is not None
    with scratch_directory("eesd-ablation") as temporary:
        output = temporary / "plans"
        _export(part, parts, model, dtype, output)
        yield output


def _export(part: Part, parts: Sequence[Part], model: str, dtype: str, output: Path) -> None:
    """Export like ``eesd-export`` with its default sizes."""
    try:
        from eesd.export.engine_dir import export, stored_head, untrained_head
        from eesd.export.onnx_graph import ExportOptions
        from eesd.model.checkpoint import Checkpoint
        from eesd.model.hub import find_model
    except ImportError as error:
        raise EESDError(f"Exporting needs {error.name}; install it with: pip install 'eesd[export]'.") from None
    checkpoint = Checkpoint(find_model(model))
    head = stored_head(checkpoint, part.directory) if part.directory else untrained_head(checkpoint, _exit_layer(parts))
    options = ExportOptions(dtype, min(checkpoint.config.max_positions, DEFAULT_SLOTS))
    export(checkpoint, head, options, output)


def _exit_layer(parts: Sequence[Part]) -> int:
    """Exit layer of the first head that has a directory. Initialised heads use it, too."""
    for part in parts:
        if part.directory is not None:
            if part.is_engine:
                return int(read_json(part.directory / MANIFEST_FILE)["exit_head"]["layer"])
            return int(read_json(part.directory / EXIT_HEAD)["layer"])
    raise EESDError("Every head is only initialised; give at least one head with a directory.")
