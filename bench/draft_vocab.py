"""What a draft vocabulary costs: the share of a text's tokens that it has."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.draft_vocab import most_used
from eesd.common.errors import EESDError
from eesd.common.json_input import json_lines, read_text
from eesd.runtime.text import TextCodec

REMEDY = "give a text, or JSON lines with text, prompt, turns or messages"

Counts = NDArray[np.int64]


def count_tokens(path: Path, codec: TextCodec, vocab_size: int) -> dict[str, Counts]:
    """How often each category of a file uses each token [V]. Lines without ``category`` count for the name of the file.

    Raises:
        EESDError: The file is no text and no JSON lines.
    """
    if not path.is_file():
        raise EESDError(f"{path} is not a file; {REMEDY}.")
    counts: dict[str, Counts] = {}
    for category, text in _texts(path):
        found = np.bincount(codec.encode(text), minlength=vocab_size)
        counts[category] = counts.get(category, 0) + found
    return counts


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Category and text of each line of JSON, or of the whole file."""
    content = read_text(path, REMEDY)
    if path.suffix != ".jsonl":
        yield path.stem, content
        return
    for number, line in json_lines(content, str(path), REMEDY):
        texts = _strings(line) if isinstance(line, dict) else []
        if not texts:
            raise EESDError(f"{path}, line {number}, has no text; {REMEDY}.")
        yield str(line.get("category", path.stem)), "\n".join(texts)


def _strings(line: Mapping[str, Any]) -> list[str]:
    """The text, the prompt, the turns or the messages of a line."""
    value: Any = next((line[key] for key in ("text", "prompt", "turns", "messages") if key in line), [])
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("content") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def coverage_table(chosen_by: Counts, tested: Mapping[str, Counts], sizes: Sequence[int], eos: Iterable[int]) -> str:
    """A Markdown table: for each text, the share of its tokens that draft vocabularies of several sizes have.

    Args:
        chosen_by: How often the text that the vocabularies are chosen by uses each token [V].
        tested: The same for each tested text.
        sizes: Sizes of the draft vocabularies.
        eos: Tokens that end a text, which every draft vocabulary has.
    """
    eos = tuple(eos)
    ids = [most_used(chosen_by, size, eos) for size in sizes]
    lines = [f"| text | tokens | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 2) + "|"]
    for name, counts in tested.items():
        shares = [f"{counts[chosen].sum() / max(counts.sum(), 1):.1%}" for chosen in ids]
        lines.append(f"| {name} | {counts.sum()} | {' | '.join(shares)} |")
    return "\n".join(lines)
