"""What a draft vocabulary costs and saves: the share of a text's tokens that it has, and the time of a draft step."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.draft_vocab import most_used
from eesd.common.errors import EESDError
from eesd.common.json_input import json_lines, read_text
from eesd.common.manifest_reader import load_manifest
from eesd.runtime.engines.backends import open_engines
from eesd.runtime.engines.base import Call, Engine
from eesd.runtime.text import TextCodec

REMEDY = "give a text, or JSON lines with text, prompt, turns or messages"
CONTEXT, STEPS = 64, 8
"""Tokens behind which draft steps are timed, and steps in a row of one engine."""

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


def time_draft_steps(directories: Sequence[Path], threads: int, rounds: int) -> str:
    """Time draft steps of one token of several engine directories in turn, with ONNX Runtime on the CPU.

    A first step after another engine's finds its weights outside of the caches, so it does not count.

    Args:
        directories: The engine directories.
        threads: CPU threads of an engine.
        rounds: Turns of each engine.

    Returns:
        A Markdown table.
    """
    manifests = [load_manifest(directory) for directory in directories]
    steps: list[tuple[Engine, Call]] = []
    for directory, manifest in zip(directories, manifests, strict=True):
        engine = open_engines(directory, manifest, "ort", threads, draft=True).draft
        assert engine is not None
        [kv_cache] = engine.new_kv_caches()
        kv_cache.reserve(CONTEXT + 1)
        steps.append((engine, Call(kv_cache, [1], [CONTEXT], CONTEXT)))
    seconds: list[list[float]] = [[] for _ in directories]
    for _ in range(rounds):
        for step, times in zip(steps, seconds, strict=True):
            times += _timed(*step)[1:]
    lines = ["| engine directory | draft vocabulary | LM head | draft step, ms |", "|---|---|---|---|"]
    for directory, manifest, times in zip(directories, manifests, seconds, strict=True):
        columns = manifest.draft.results[0].shape[-1]
        one = manifest.quantization.draft
        kind = manifest.dtype if one is None else one.weights
        lines.append(f"| {directory} | {columns} | {kind} | {1000 * median(times):.2f} |")
    return "\n".join(lines)


def _timed(engine: Engine, step: Call) -> list[float]:
    """Seconds of ``STEPS`` draft steps."""
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.forward([step])
        times.append(time.perf_counter() - started)
    return times
