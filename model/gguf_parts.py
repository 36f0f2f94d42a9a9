"""The names of the parts of a model that is split into several GGUF files, as llama.cpp's splitter
names them: ``NAME-00001-of-00003.gguf`` and so on."""

import re
from pathlib import Path

_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


def part_of(path: Path, number: int, count: int) -> Path:
    """Where a part lies beside another one; ``number`` counts from 1. A file with another name
    counts as ``NAME.gguf``."""
    found = _NAME.fullmatch(path.name)
    name = found[1] if found else path.stem
    return path.with_name(f"{name}-{number:05d}-of-{count:05d}.gguf")


def parts_beside(path: Path) -> list[Path]:
    """The files that hold a model, by the name of one: all parts beside it, or it alone."""
    found = _NAME.fullmatch(path.name)
    count = int(found[2]) if found else 1
    parts = (part_of(path, number, count) for number in range(1, count + 1))
    return [part for part in parts if part.is_file()] if found else [path]
