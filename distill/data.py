"""Rows of tokens to train on, from text, JSON lines and token arrays, and the endless order in which they come.

The order is a function of the seed and the position in it: a resumed run needs no random state to go on with the same rows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from eesd.common.errors import EESDError
from eesd.runtime.text import TextCodec

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Rows:
    """``tokens`` [R, length + 1], int32, of which the first ``lengths[r]`` of row r count (the rest is padding).

    The first ``own`` rows are the model's own text (or whatever ``--data`` gave), those behind them are mixed in.
    """

    tokens: Tokens
    lengths: NDArray[np.int64]
    own: int

    def __len__(self) -> int:
        return len(self.tokens)

    def digest(self) -> str:
        """SHA-256 of all tokens: what a cache of these rows is bound to."""
        return hashlib.sha256(self.tokens.tobytes() + self.lengths.tobytes()).hexdigest()


def joined(own: Rows, mixed: Rows | None) -> Rows:
    """Own rows, then the mixed-in ones."""
    if mixed is None:
        return own
    tokens, lengths = np.concatenate([own.tokens, mixed.tokens]), np.concatenate([own.lengths, mixed.lengths])
    return Rows(tokens, lengths, len(own))


def cut(documents: Iterable[Sequence[int] | NDArray[Any]], length: int) -> Rows:
    """Documents in windows of ``length`` + 1 tokens that overlap by one; ends of fewer than 16 tokens are left out."""
    tokens, lengths = [], []
    for document in documents:
        ids = np.asarray(document)
        for start in range(0, max(1, len(ids) - 1), length):
            window = ids[start : start + length + 1]
            if len(window) == length + 1 or len(window) >= 16:
                tokens.append(np.pad(window.astype(np.int32), (0, length + 1 - len(window))))
                lengths.append(len(window))
    if not tokens:
        return Rows(np.zeros((0, length + 1), np.int32), np.zeros(0, np.int64), 0)
    return Rows(np.stack(tokens), np.asarray(lengths), len(tokens))


def read_rows(paths: Sequence[Path], codec: TextCodec | None, vocab_size: int, length: int) -> Rows:
    """The rows of all files; an :class:`EESDError` where there is nothing to train on or a token that the model lacks."""
    rows = cut((document for path in paths for document in documents(path, codec)), length)
    names = ", ".join(map(str, paths))
    if not len(rows):
        raise EESDError(f"There is nothing to train on in {names}: no text of 16 tokens or more.")
    check_vocabulary(rows.tokens, vocab_size, names)
    return rows


def check_vocabulary(tokens: Tokens, vocab_size: int, name: str) -> None:
    """Refuse tokens that the model does not have."""
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab_size:
        raise EESDError(
            f"{name} has the token {min(least, 0) or most}, the model has only {vocab_size}; the data is of another tokenizer."
        )


def documents(path: Path, codec: TextCodec | None) -> Iterator[Sequence[int] | NDArray[Any]]:
    """The documents of one file: lines of a ``.jsonl``, rows of a token array, or the text as one."""
    if path.suffix == ".npy":
        yield from np.atleast_2d(_array(path))
    elif path.suffix == ".safetensors":
        yield from _stored_rows(path)
    elif codec is None:
        raise EESDError(f"{path} is text and the model directory has no tokenizer.json; give token arrays.")
    elif path.suffix == ".jsonl":
        for line in json_lines(path):
            yield encode_line(path, line, codec)
    else:
        try:
            yield codec.encode(path.read_text("utf-8"))
        except UnicodeDecodeError:
            raise EESDError(f"{path} is not UTF-8 text; give text, .jsonl, .npy or .safetensors.") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise EESDError(f"{path} is not UTF-8 text; give JSON lines.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise EESDError(f"Line {number} of {path} is not valid JSON; give one object a line.") from None
        if not isinstance(value, dict):
            raise EESDError(f"Line {number} of {path} is no JSON object; give one object a line.")
        yield value


def encode_line(path: Path, line: dict[str, Any], codec: TextCodec) -> list[int]:
    """Tokens of a line's ``prompt``, ``text`` or ``messages`` (through the chat template)."""
    for key, kind in (("prompt", str), ("text", str), ("messages", list)):
        if isinstance(line.get(key), kind):
            return codec.encode(line[key])
    raise EESDError(f"A line of {path} has neither a prompt nor a text nor messages; give one of them in each.")


def _array(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EESDError(f"{path} is no array of tokens ({error}).") from None
    if not isinstance(array, np.ndarray) or array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise EESDError(f"{path} is no array of tokens: it must hold integers in one or two dimensions.")
    return array


def _stored_rows(path: Path) -> Iterator[NDArray[Any]]:
    """The rows of a shard that self-generation wrote, or of any safetensors file with a tensor ``tokens``."""
    try:
        stored = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise EESDError(f"{path} is no safetensors file ({error}).") from None
    tokens = stored.get("tokens")
    if tokens is None or tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu":
        raise EESDError(f"{path} has no tensor `tokens` of integers in one or two dimensions.")
    tokens = np.atleast_2d(tokens)
    lengths = stored.get("lengths", np.full(len(tokens), tokens.shape[1]))
    for row, length in zip(tokens, lengths, strict=True):
        yield row[:length]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch, size]).permutation(size)


def taken(size: int, start: int, count: int, seed: int) -> NDArray[np.int64]:
    """Entries ``start .. start + count`` of an endless chain of shuffles of ``size`` rows."""
    return np.asarray([_permutation(seed, at // size, size)[at % size] for at in range(start, start + count)], np.int64)


def batch_rows(rows: Rows, batch: int, mix_share: float, number: int, seed: int) -> NDArray[np.int64]:
    """The rows of batch ``number`` (from 0): a fixed part of them mixed in, if there is anything to mix in."""
    others = len(rows) - rows.own
    mixed = round(batch * mix_share) if others else 0
    own = taken(rows.own, number * (batch - mixed), batch - mixed, seed)
    if not mixed:
        return own
    return np.concatenate([own, rows.own + taken(others, number * mixed, mixed, seed + 1)])
