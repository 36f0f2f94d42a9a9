"""The names of the parts of a model in several GGUF files. llama.cpp's splitter calls them
``NAME-00001-of-00003.gguf`` and so on."""

import re
from pathlib import Path

_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


def part_of(path: Path, number: int, count: int) -> Path:
    """Return the path of one part of a model, given the path of another part or of a whole file.
    ``number`` counts from 1. The parts of ``NAME.gguf`` are called ``NAME-00001-of-00002.gguf`` and
    so on."""
    found = _NAME.fullmatch(path.name)
    name = found[1] if found else path.stem
    return path.with_name(f"{name}-{number:05d}-of-{count:05d}.gguf")


def parts_beside(path: Path) -> list[Path]:
    """Return the files of a model, given the path of one file. They are all parts that exist, or
    this file alone."""
    found = _NAME.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found[2])
    parts = (part_of(path, number, count) for number in range(1, count + 1))
    return [part for part in parts if part.is_file()]
