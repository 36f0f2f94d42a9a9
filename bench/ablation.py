"""What each part contributes: exit heads one after another, then with the last of them trees and controllers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from eesd.bench.campaign import Campaign
from eesd.bench.results import read_json
from eesd.bench.run import CANDIDATES, Bench
from eesd.bench.tasks import Prompt
from eesd.common.errors import EESDError
from eesd.common.manifest import NAME as MANIFEST
from eesd.common.manifest import SLOTS

EXIT_HEAD = "exit_head.json"


class Part(NamedTuple):
    """A head of the ablation: an exit head's directory, an engine directory, or None for one that is only initialised."""

    name: str
    directory: Path | None

    @property
    def is_engine(self) -> bool:
        return self.directory is not None and (self.directory / MANIFEST).exists()


def parse_head(spec: str) -> Part:
    """``NAME`` or ``NAME=DIR``. Raises :class:`EESDError` when DIR is neither an exit head nor an engine directory."""
    name, given, place = spec.partition("=")
    directory = Path(place)
    if not name or (given and not any((directory / file).exists() for file in (MANIFEST, EXIT_HEAD))):
        raise EESDError(f"--head {spec} is not NAME=DIR with a DIR that has {EXIT_HEAD} or {MANIFEST}.")
    return Part(name, directory if given else None)


def ablate(campaign: Campaign, parts: Sequence[Part], model: str | None, dtype: str, prompts: Sequence[Prompt]) -> None:
    """Measure every part; only the last with more than fixed lengths on chains. Each against plain decoding of its own."""
    if len({part.name for part in parts}) < len(parts):
        raise EESDError("Two heads have the same name; give each its own.")
    if model is None and not all(part.is_engine for part in parts):
        raise EESDError("--model is missing; the heads must be exported with the model that they belong to.")
    options = campaign.options
    lengths = CANDIDATES["fixed"]
    for number, part in enumerate(parts):
        others = [name for name in options.controllers if name != "fixed"] if number == len(parts) - 1 else []
        widths, budgeted = (options.widths, options.budgeted) if others else (options.widths[:1], ())
        with _engine_directory(part, parts, model, dtype) as directory:
            bench = Bench(directory, options.backend, options.threads)
            own = replace(options, controllers=(*lengths, *others), widths=widths, budgeted=budgeted)
            campaign.add(part.name, bench, prompts, own)
            del bench  # its files are about to vanish


@contextmanager
def _engine_directory(part: Part, parts: Sequence[Part], model: str | None, dtype: str) -> Iterator[Path]:
    """The part's engines: where they are, or exported into a temporary directory."""
    if part.is_engine:
        assert part.directory is not None
        yield part.directory
        return
    assert model is not None
    with TemporaryDirectory(prefix="eesd-ablation-") as temporary:
        output = Path(temporary) / "plans"
        _export(part, parts, model, dtype, output)
        yield output


def _export(part: Part, parts: Sequence[Part], model: str, dtype: str, output: Path) -> None:
    """As ``eesd-export`` does, with its default sizes."""
    try:
        from eesd.export.engine_dir import export, stored_head, untrained_head
        from eesd.export.graph import ExportOptions
        from eesd.model.checkpoint import Checkpoint
        from eesd.model.hub import find_model
    except ImportError as error:
        raise EESDError(f"Exporting needs {error.name}; install it with: pip install 'eesd[export]'.") from None
    checkpoint = Checkpoint(find_model(model))
    head = stored_head(checkpoint, part.directory) if part.directory else untrained_head(checkpoint, _exit_layer(parts))
    options = ExportOptions(dtype, min(checkpoint.config.max_positions, SLOTS))
    export(checkpoint, head, options, output, lambda _: None, lambda *_: None, lambda *_: None)


def _exit_layer(parts: Sequence[Part]) -> int:
    """A head that is only initialised leaves after the layer of the first one that is trained."""
    for part in parts:
        if part.directory is not None:
            key = "exit_layer" if part.is_engine else "layer"
            return int(read_json(part.directory / (MANIFEST if part.is_engine else EXIT_HEAD))[key])
    raise EESDError("Every head is only initialised; give at least one with a directory.")
