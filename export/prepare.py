"""Find the engine directory of a model in the cache, or export the model into it.

A separate process exports, so that the command's process has neither torch nor the memory of an
export.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.files import remove_leftovers
from eesd.common.machine import torch_sees_gpu
from eesd.common.manifest import load_manifest
from eesd.common.turns import turn
from eesd.export import cache
from eesd.export.make import NOT_STORED, Choices, lacks, make_engines
from eesd.model.hub import find_head, find_model
from eesd.runtime.engines.cpu_build import find_build
from eesd.runtime.engines.operators import missing

Options = Mapping[str, Any]
"""Options of an export, by their names in :class:`~eesd.export.make.Choices`. An option that is
None selects the default."""


def engine_directory(
    model: str, options: Options, cache_dir: Path | None, backend: str = "auto"
) -> Path:
    """The engine directory of a model. The export writes its messages to stderr.

    On a CPU, the cache holds a model's weights only once. They are packed directly from the
    checkpoint, unless a whole engine directory exists. Other backends need a whole directory.

    Args:
        model: A directory, a GGUF file, a Hugging Face id or a short name.
        options: Options of the export.
        cache_dir: The cache directory, or None for the user's cache directory.
        backend: The backend that will run the model.

    Raises:
        EESDError: The model cannot be found, or there is no place for a cache.
        SystemExit: The model cannot be exported. The exporting process has printed the reason.
    """
    directory = cache.cache_directory(cache_dir)
    packed = _runs_packed(backend)
    place = _place(directory, model, options, packed)
    if packed and not _is_ready(place) and _is_ready(whole := _place(directory, model, options)):
        place = whole
    if not _is_ready(place):
        directory.mkdir(parents=True, exist_ok=True)
        _run(command_of(place, model, options, packed))
    cache.note_use(place)
    return place


def _runs_packed(backend: str) -> bool:
    """Whether this project's operators will run the model."""
    return backend in ("auto", "ort") and not torch_sees_gpu() and not missing()


def command_of(place: Path, model: str, options: Options, packed: bool = False) -> list[str]:
    """The command line of the process that exports."""
    request = json.dumps([str(place), model, dict(options), packed])
    return [sys.executable, "-m", "eesd.export.prepare", request]


def _run(command: list[str]) -> None:
    sys.stdout.flush()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # The process then deletes its output.
            raise
    if code:
        sys.exit(code if code > 0 else 128 - code)


@cli.command()
@click.argument("request")
def main(request: str) -> None:
    """Export a model into the cache for the command that started this one."""
    text, model, options, packed = json.loads(request)
    place = Path(text)
    remove_leftovers(place.parent)
    with turn(place, lambda: _say(f"Another process exports {model}; waiting for it.")):
        if not _is_whole(place) or (packed and not _is_built(place)):
            _export(place, model, options, packed)
        elif not _is_built(place):
            from eesd.export.cpu.build import build_for_cpu

            build_for_cpu(place, load_manifest(place))


def _export(place: Path, model: str, options: Options, packed: bool) -> None:
    kept = cache.discard(place) if place.exists() else ""  # The directory is damaged or foreign.
    if kept:
        raise EESDError(f"{place} cannot be used, and is not replaced: {kept}; move it away.")

    def finish(directory: Path) -> None:
        if _place(place.parent, model, options, packed) != place:
            raise EESDError(
                f"The files of {model} changed while it was exported; start again when they "
                "no longer change."
            )
        cache.mark(directory, place, model, options)

    _say(f"Exporting {model} to {place}. Later starts use it from there.")
    gpu = torch_sees_gpu()
    pack = None if gpu else True
    choices = Choices(model, pack=pack, plans=gpu, packed=packed, **options)
    make_engines(choices, place, _say, lambda step: _say(f"{step} ..."), finish)


def _place(directory: Path, model: str, options: Options, packed: bool = False) -> Path:
    """The path of the engine directory. If a model or head is given as an id, it is fetched."""
    if packed:
        options = {**options, "packed": True}
    head = options["exit_head"]
    try:
        found = None if head is None or head in NOT_STORED else find_head(head)
        return cache.place_of(directory, model, find_model(model), options, found)
    except ImportError as error:
        raise lacks("Fetching", error) from None


def _is_whole(place: Path) -> bool:
    """Whether the engine directory exists and has all its files."""
    try:
        return cache.is_marked(place) and bool(load_manifest(place))
    except EESDError:
        return False


def _is_ready(place: Path) -> bool:
    """Whether the engine directory is ready to run."""
    return _is_whole(place) and _is_built(place)


def _is_built(place: Path) -> bool:
    """Whether a whole engine directory has a build for this machine's CPU, or will not run on the
    CPU."""
    return (
        torch_sees_gpu() or bool(missing()) or find_build(place, load_manifest(place)) is not None
    )


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
