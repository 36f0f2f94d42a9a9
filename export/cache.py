"""Find the entries of the cache of engine directories, and inspect their content. Commands make
these directories from models.

An entry is named after its model and a key computed from everything that it was made from. A mark
file in the entry records these sources. The modification time of the mark file is the time of the
last use. Only a directory with a mark is ever removed, and only if it holds no foreign file. The
module needs no torch.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from re import fullmatch, sub
from typing import Any

import eesd
from eesd.common.errors import EESDError
from eesd.common.files import is_temporary, remove_leftovers, user_cache
from eesd.common.integrity import link_info, sha256_of
from eesd.common.json_input import read_json
from eesd.common.manifest import FORMAT_VERSION
from eesd.common.outputs import remove_directory, resolved
from eesd.common.turns import turn
from eesd.model.gguf_parts import parts_beside

MARK_FILE = "eesd-cache.json"
_ADDED = (MARK_FILE, "timing.cache")
"""Files that commands add to an engine directory, besides files named after its graphs."""
_BUILD = r"cpu-[0-9a-f]{16}"
_BUILT = r"weights\.bin|(files|sizes)\.json|(draft|verify|verify_[0-9]+|states)\.onnx"
"""Files of a build for the CPU. Older builds list their files in sizes.json, and a distillation
adds states.onnx."""
_READ = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")
"""Files of a directory that an export may read."""
_SMALL = 1 << 26
"""Size of the largest file that is hashed in full. The limit exists because even models of many
gigabytes must start without delay."""
_RULES = 1
"""Version of the export of a model. Increase it if older directories must not be found."""


@dataclass(frozen=True)
class Entry:
    """An engine directory of the cache.

    Attributes:
        path: The directory.
        model: The model as the user named it.
        options: Options of the export that the user gave, such as ``--dtype float32``.
        used: Time of the last use, in seconds since 1970.
        size: Size of its files in bytes.
    """

    path: Path
    model: str
    options: str
    used: float
    size: int


def cache_directory(given: Path | None) -> Path:
    """Returns the directory of the cache. It is ``given``, or the user's cache directory. Raises
    :class:`EESDError` for a user without a home."""
    found = given or user_cache()
    if found is None:
        raise EESDError(
            "This user has no home directory for a cache; give --cache-dir DIR, or set "
            "EESD_CACHE_DIR."
        )
    place = resolved(found.expanduser())
    if place.exists() and not place.is_dir():
        raise EESDError(f"{place} is not a directory; give another place for the cache.")
    return place


def place_of(
    cache: Path, name: str, model: Path, options: Mapping[str, Any], head: Path | None
) -> Path:
    """The path of a model's engine directory.

    Args:
        cache: The cache, from :func:`cache_directory`.
        name: The model as the user named it.
        model: Its directory or GGUF file.
        options: Options of the export.
        head: Directory of the exit head, if it is not in the model's directory.

    Raises:
        OSError: A file cannot be read.
    """
    parts = [
        *(eesd.__version__, FORMAT_VERSION, _RULES),
        *(options, _contents(model), head and _contents(head)),
    ]
    key = sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    # The hub names its directories by hashes.
    named = model.resolve() if Path(name).expanduser().exists() else Path(name)
    readable = sub(r"[^A-Za-z0-9._-]+", "-", named.name.removesuffix(".gguf")).strip("-.")[:80]
    return cache / f"{readable or 'model'}-{key}"


def _contents(path: Path) -> dict[str, Any]:
    """Returns the fingerprints, by name, of a GGUF file and its other parts, or of the files in a
    directory."""
    if path.is_file():
        others = [part for part in parts_beside(path) if part != path]
        return {"": _content(path)} | {part.name: _content(part) for part in others}
    if not any(path.glob("*config.json")) and not any(path.glob("exit_head.json")):
        # The path is neither a model nor a head, and may have very many files. The export will
        # report the problem.
        return {}
    found = {file for pattern in _READ for file in path.glob(pattern) if file.is_file()}
    return {file.relative_to(path).as_posix(): _content(file) for file in found}


def _content(file: Path) -> str | tuple[int, int, str]:
    """Returns the SHA-256 of a small file. For a large file, it returns its size, its modification
    time, and the SHA-256 of samples. An edit outside the samples still changes the modification
    time."""
    if file.stat().st_size <= _SMALL:
        return sha256_of(file)
    info = link_info(file)
    return info.size, info.mtime_ns, info.samples


def mark(directory: Path, place: Path, model: str, options: Mapping[str, Any]) -> None:
    """Write the mark into an engine directory that will be renamed to ``place``."""
    given = " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in options.items()
        if value is not None
    )
    files = sorted(file.name for file in directory.iterdir())
    text = {
        "made_by": f"eesd {eesd.__version__}",
        "name": place.name,
        "model": model,
        "options": given,
        "files": files,
    }
    (directory / MARK_FILE).write_text(json.dumps(text, indent=2) + "\n")


def note_use(place: Path) -> None:
    """Set the time of the last use to now, if the cache is writable."""
    with suppress(OSError):
        os.utime(place / MARK_FILE)


def is_marked(place: Path) -> bool:
    """Whether a command made this directory of the cache."""
    return _mark_of(place, place.name) is not None


def entries(cache: Path) -> Iterator[Entry]:
    """The engine directories that commands made in this cache, by name. Everything else is
    ignored."""
    for path in sorted(cache.iterdir()) if cache.is_dir() else ():
        found = _mark_of(path, path.name)
        if found is not None:
            files = [file.lstat() for file in path.rglob("*")]
            used = (path / MARK_FILE).stat().st_mtime
            yield Entry(
                path,
                str(found.get("model")),
                str(found.get("options")),
                used,
                sum(file.st_size for file in files),
            )


def _mark_of(path: Path, name: str) -> dict[str, Any] | None:
    """Returns the mark of an engine directory with this name in the cache, or None for anything
    else."""
    if (
        is_temporary(name)
        or not fullmatch(r"(?s).+-[0-9a-f]{16}", name)
        or path.is_symlink()
        or not path.is_dir()
    ):
        return None
    if (path / MARK_FILE).is_symlink():
        return None
    with suppress(EESDError):
        found = read_json(path / MARK_FILE, "")
        if (
            isinstance(found, dict)
            and found.get("name") == name
            and str(found.get("made_by")).startswith("eesd ")
        ):
            return found
    return None


def remove(place: Path) -> str:
    """Remove an engine directory of the cache, unless a process is making it. See
    :func:`discard`."""
    with turn(place, None) as mine:
        return discard(place) if mine else "another process is making it"


def discard(place: Path) -> str:
    """Remove an engine directory of the cache, unless it holds a file that no EESD command wrote.

    Returns:
        The reason for keeping it, or "" if it was removed.
    """
    remove_leftovers(place)
    return remove_directory(place, partial(foreign, name=place.name))


def foreign(path: Path, name: str) -> str:
    """Returns the reason not to remove a directory of the cache with this name, or "" if EESD made
    everything in it."""
    found = _mark_of(path, name)
    if found is None:
        return "no command of EESD made it"
    made = found.get("files")
    return other_file(path, made if isinstance(made, list) else ())


def other_file(directory: Path, made: Collection[str]) -> str:
    """Returns the reason not to remove an engine directory. It is "" if all its files are in
    ``made``, or were added by builds and the runtime."""
    graphs = [Path(name).stem for name in made if isinstance(name, str) and name.endswith(".onnx")]
    known = {
        *_ADDED,
        *(stem + suffix for stem in graphs for suffix in (".plan", ".plan.onnx", ".kernels")),
    }
    for file in sorted(directory.iterdir()):
        if is_temporary(file.name):
            return "another process is writing into it"
        if not (
            (file.name in known or file.name in made) and file.is_file() and not file.is_symlink()
        ) and not is_build(file):
            return f"it also holds {file.name}, which EESD did not make"
    return ""


def is_build(path: Path) -> bool:
    """Whether this is a directory of a build for the CPU, without other files."""
    return (
        fullmatch(_BUILD, path.name) is not None
        and not path.is_symlink()
        and path.is_dir()
        and not foreign_build(path)
    )


def foreign_build(path: Path) -> str:
    """Returns the reason not to replace a directory with the name of a build for the CPU, or "" if
    it holds only such a build."""
    other = (
        file.name
        for file in path.iterdir()
        if not (fullmatch(_BUILT, file.name) and file.is_file())
    )
    return next((f"it also holds {name}" for name in other), "")
