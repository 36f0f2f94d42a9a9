"""The engine directory of a model that a command is to run: found in the cache, or exported into it first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from eesd.common.errors import EESDError
from eesd.common.files import remove_leftovers
from eesd.common.manifest_reader import load_manifest
from eesd.common.turns import turn
from eesd.export import cache
from eesd.export.make import NOT_STORED, Choices, make_engines
from eesd.model.hub import find_head, find_model


def engine_directory(model: str, options: Mapping[str, Any], cache_dir: Path | None) -> Path:
    """The engine directory of a model. What is shown of its export goes to stderr.

    Args:
        model: Directory, GGUF file, Hugging Face id or short name.
        options: Options of the export by their names in :class:`~eesd.export.make.Choices`; None: the default.
        cache_dir: The cache; None: this user's.

    Raises:
        EESDError: The model cannot be found or exported, or there is no place for a cache.
    """
    choices = Choices(model, **options)
    directory = cache.cache_directory(cache_dir)
    place = _place(directory, choices, options)
    if not _is_whole(place):
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        with turn(place, lambda: _say(f"Another process exports {model}; waiting for it.")):
            if not _is_whole(place):
                _export(place, choices, options)
    cache.note_use(place)
    return place


def _place(directory: Path, choices: Choices, options: Mapping[str, Any]) -> Path:
    """Where the engine directory lies. A model or head that is named by an id is fetched."""
    try:
        head = None if choices.exit_head in (None, *NOT_STORED) else find_head(str(choices.exit_head))
        return cache.place_of(directory, choices.model, find_model(choices.model), options, head)
    except ImportError as error:
        raise EESDError(f"Fetching needs {error.name}; install it with: pip install 'eesd[export]'.") from None


def _is_whole(place: Path) -> bool:
    """Whether the engine directory is there, with all of its files."""
    try:
        return cache.is_marked(place) and bool(load_manifest(place))
    except EESDError:
        return False


def _export(place: Path, choices: Choices, options: Mapping[str, Any]) -> None:
    kept = cache.discard(place) if place.exists() else ""  # it is damaged, or of somebody else
    if kept:
        raise EESDError(f"{place} cannot be used, and is not replaced: {kept}; move it away.")

    def finish(directory: Path) -> None:
        if _place(place.parent, choices, options) != place:
            raise EESDError(f"The files of {choices.model} changed while it was exported; start again when they do not.")
        cache.mark(directory, place, choices.model, options)

    _say(f"Exporting {choices.model} to {place}. Later starts use it from there.")
    make_engines(choices, place, _say, lambda step: _say(f"{step} ..."), finish)


def _say(line: str) -> None:
    click.echo(line, err=True)
