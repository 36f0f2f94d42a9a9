"""Read rows of tokens from text, JSON lines and token arrays, and choose the rows of each batch
from an endless order.

The order depends only on the seed and the position. A resumed run therefore continues with the same
rows, and needs no stored random state.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from eesd.common.errors import EESDError
from eesd.common.json_input import decode, json_lines
from eesd.runtime.text import TextCodec

MIN_TOKENS = 16
"""Minimum number of tokens in a window. Shorter windows are dropped unless they fill a row."""

Tokens = NDArray[np.int32]
Document = Sequence[int] | NDArray[Any]


@dataclass(frozen=True)
class Prompt:
    """The token ids and the kind of a prompt. The kind is the line's ``kind``, ``category`` or
    ``task``, or else the file's name."""

    tokens: list[int]
    kind: str


@dataclass(frozen=True)
class Rows:
    """Rows to train on.

    Attributes:
        tokens: int32 [R, length + 1], padded at the end.
        lengths: Number of valid tokens in each row [R].
        num_primary: The first ``num_primary`` rows are the generated text or the rows of
            ``--data``. The other rows are mixed in.
    """

    tokens: Tokens
    lengths: NDArray[np.int64]
    num_primary: int

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> "Rows":
        """Return the first ``count`` rows as primary rows."""
        return Rows(self.tokens[:count], self.lengths[:count], count)

    def without(self, count: int) -> "Rows":
        """Return all rows except the first ``count`` rows, which must be primary rows."""
        return Rows(self.tokens[count:], self.lengths[count:], self.num_primary - count)

    def digest(self, count: int | None = None) -> str:
        """Return the SHA-256 of the tokens and lengths of the first ``count`` rows, or of all rows
        if ``count`` is None."""
        return hashlib.sha256(
            self.tokens[:count].tobytes() + self.lengths[:count].tobytes()
        ).hexdigest()


def add_mixed_rows(primary: Rows, mixed: Rows) -> Rows:
    """Append rows that are mixed into the batches of the primary rows."""
    tokens = np.concatenate([primary.tokens, mixed.tokens])
    lengths = np.concatenate([primary.lengths, mixed.lengths])
    return Rows(tokens, lengths, len(primary))


def count_next_tokens(rows: Rows, vocab_size: int) -> NDArray[np.int64]:
    """Count the uses of each token as a training target in the primary rows [V]. All tokens except
    the first of each row are targets."""
    tokens = rows.tokens[: rows.num_primary, 1:]
    lengths = rows.lengths[: rows.num_primary, None] - 1
    return np.bincount(tokens[np.arange(tokens.shape[1]) < lengths], minlength=vocab_size)


def split_documents(documents: Iterable[Document], length: int) -> Rows:
    """Split documents into windows of ``length`` + 1 tokens that overlap by one token. Short
    windows share a row if they fit.

    Args:
        documents: Token ids of each document.
        length: Number of training positions in a row.

    Returns:
        The windows as primary rows. The last window of a document is dropped if it has fewer than
        ``MIN_TOKENS`` tokens, unless it fills a row.
    """
    tokens = []
    lengths = []
    for ids in _joined(documents, length):
        for start in range(0, max(1, len(ids) - 1), length):
            window = ids[start : start + length + 1]
            if len(window) == length + 1 or len(window) >= MIN_TOKENS:
                tokens.append(np.pad(window.astype(np.int32), (0, length + 1 - len(window))))
                lengths.append(len(window))
    if not tokens:
        return Rows(np.zeros((0, length + 1), np.int32), np.zeros(0, np.int64), 0)
    return Rows(np.stack(tokens), np.asarray(lengths), len(tokens))


def _joined(documents: Iterable[Document], length: int) -> Iterator[NDArray[Any]]:
    """Join consecutive documents that fit into a row. The targets remain correct, because the head
    and the teacher see the same preceding tokens."""
    row: list[NDArray[Any]] = []
    for document in documents:
        ids = np.asarray(document)
        if sum(map(len, row)) + len(ids) > length + 1:
            if row:
                yield np.concatenate(row)
            row = []
        row.append(ids)
    if row:
        yield np.concatenate(row)


def read_rows(paths: Sequence[Path], codec: TextCodec | None, vocab_size: int, length: int) -> Rows:
    """Read the rows of all files. No row has text from two files, so another file only adds rows.

    Args:
        paths: ``.txt``, ``.jsonl``, ``.npy`` or ``.safetensors`` files.
        codec: Tokenizer for text, or None if the model has no tokenizer.
        vocab_size: Number of tokens in the model's vocabulary.
        length: Number of training positions in a row.

    Returns:
        The rows, all of which are primary.

    Raises:
        EESDError: A file cannot be read, no text is long enough, or a token is not in the
            vocabulary.
    """
    parts = [split_documents(read_documents(path, codec), length) for path in paths]
    rows = Rows(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        0,
    )
    rows = replace(rows, num_primary=len(rows))
    names = ", ".join(map(str, paths))
    if not len(rows):
        raise EESDError(
            f"There is nothing to train on in {names}; give texts of at least {MIN_TOKENS} tokens."
        )
    _check_vocabulary(rows.tokens, vocab_size, names)
    return rows


def read_prompts(
    paths: Sequence[Path],
    codec: TextCodec | None,
    vocab_size: int,
    count: int,
    prompt_tokens: int,
    max_tokens: int,
    seed: int,
) -> list[Prompt]:
    """Read at most ``count`` prompts. They are the lines of ``.jsonl`` files and random passages of
    other files.

    Args:
        paths: ``.txt``, ``.jsonl``, ``.npy`` or ``.safetensors`` files.
        codec: Tokenizer for text, or None if the model has no tokenizer.
        vocab_size: Number of tokens in the model's vocabulary.
        count: Maximum number of prompts.
        prompt_tokens: Number of tokens in a prompt that is cut from text.
        max_tokens: Longer lines of ``.jsonl`` files keep only their last ``max_tokens`` tokens.
        seed: Seed of the selection.

    Returns:
        The prompts.

    Raises:
        EESDError: A file cannot be read, it has no prompts, or a token is not in the vocabulary.
    """
    prompts: list[Prompt] = []
    rng = np.random.default_rng(seed)
    for path in paths:
        if path.suffix == ".jsonl":
            prompts += [
                Prompt(ids[-max_tokens:], kind)
                for ids, kind in _read_lines(path, codec, answer=True)
            ]
            continue
        documents = [np.asarray(document) for document in read_documents(path, codec)]
        documents = [document for document in documents if len(document) >= prompt_tokens]
        sizes = np.asarray([len(document) for document in documents], np.float64)
        for index in rng.choice(len(documents), count, p=sizes / sizes.sum()) if documents else ():
            start = int(rng.integers(0, len(documents[index]) - prompt_tokens + 1))
            prompts.append(
                Prompt(documents[index][start : start + prompt_tokens].tolist(), path.stem)
            )
    prompts = [prompt for prompt in prompts if prompt.tokens]
    if not prompts:
        raise EESDError(
            f"There are no prompts in {', '.join(map(str, paths))}; give JSON lines or longer "
            "texts."
        )
    every = np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int32)
    _check_vocabulary(every, vocab_size, ", ".join(map(str, paths)))
    chosen = rng.permutation(len(prompts))[:count] if len(prompts) > count else range(len(prompts))
    return [prompts[int(index)] for index in chosen]


def prompts_of_rows(rows: Rows, count: int, prompt_tokens: int) -> list[list[int]]:
    """Return the first ``prompt_tokens`` tokens of each of the first ``count`` rows."""
    sizes = np.minimum(rows.lengths, prompt_tokens)
    return [rows.tokens[row, : sizes[row]].tolist() for row in range(count)]


def prompt_order(rows: int, given: int, own: int, seed: int) -> NDArray[np.int64]:
    """Choose the prompt of each of the first rows.

    The given prompts come in a random order, which changes with each pass over them. The model's
    own prompts keep their order and are spread evenly among the given prompts, so the first rows
    need only the first of the model's prompts.

    Args:
        rows: Number of rows.
        given: Number of given prompts.
        own: Number of prompts that the model writes.
        seed: Seed of the random orders.

    Returns:
        The indices [rows] of the prompts. The given prompts have the first indices, and the model's
        own prompts follow.
    """
    times, places = np.divmod(np.arange(rows), given + own)
    before = places * own // (given + own)
    is_own = (places + 1) * own // (given + own) > before
    order = given + before
    for row in np.flatnonzero(~is_own):
        shuffled = _permutation(seed, int(times[row]), given)
        order[row] = shuffled[places[row] - before[row]]
    return order


def _check_vocabulary(tokens: Tokens, vocab_size: int, name: str) -> None:
    """Refuse token ids that are not in the model's vocabulary."""
    smallest = int(tokens.min())
    largest = int(tokens.max())
    if smallest < 0 or largest >= vocab_size:
        raise EESDError(
            f"{name} contains token {min(smallest, 0) or largest}, but the model's vocabulary "
            f"has {vocab_size} tokens; "
            "give data of the model's tokenizer."
        )


def read_documents(path: Path, codec: TextCodec | None) -> Iterator[Document]:
    """Yield the documents of one file. A document is a line of a ``.jsonl`` file, a row of a token
    array, or a whole text."""
    if path.suffix == ".npy":
        yield from np.atleast_2d(_load_npy(path))
    elif path.suffix == ".safetensors":
        yield from _load_safetensors(path)
    elif path.suffix == ".jsonl":
        yield from (ids for ids, _ in _read_lines(path, codec, answer=False))
    else:
        yield _needed(codec, path).encode(
            decode(path.read_bytes(), str(path), "give text, .jsonl, .npy or .safetensors")
        )


def _needed(codec: TextCodec | None, path: Path) -> TextCodec:
    if codec is None:
        raise EESDError(
            f"{path} is text and the model directory has no tokenizer.json; give token arrays."
        )
    return codec


def _read_lines(
    path: Path, codec: TextCodec | None, answer: bool
) -> Iterator[tuple[list[int], str]]:
    """Yield the token ids and the kind of each line of a ``.jsonl`` file. If ``answer`` is true,
    chats end where the model answers."""
    codec = _needed(codec, path)
    for line in _read_json_lines(path):
        kind = next(
            (line[key] for key in ("kind", "category", "task") if isinstance(line.get(key), str)),
            path.stem,
        )
        yield _encode_line(path, line, codec, answer), kind


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    remedy = "give one JSON object a line"
    for number, value in json_lines(
        decode(path.read_bytes(), str(path), remedy), str(path), remedy
    ):
        if not isinstance(value, dict):
            raise EESDError(f"{path}, line {number} is not a JSON object; {remedy}.")
        yield value


def _encode_line(path: Path, line: dict[str, Any], codec: TextCodec, answer: bool) -> list[int]:
    """Return the token ids of a line's ``prompt``, ``text`` or ``messages`` (through the chat
    template)."""
    for key in ("prompt", "text"):
        if isinstance(line.get(key), str):
            return codec.encode(line[key])
    if isinstance(line.get("messages"), list):
        return codec.ids(codec.render(line["messages"], answer=answer), special=False)
    raise EESDError(
        f"A line of {path} has no prompt, text or messages; give one of them in each line."
    )


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EESDError(
            f"{path} is not an array of tokens ({error}); give integers in one or two dimensions."
        ) from None
    if (
        not isinstance(array, np.ndarray)
        or array.ndim not in (1, 2)
        or array.dtype.kind not in "iu"
    ):
        raise EESDError(
            f"{path} is not an array of tokens; give integers in one or two dimensions."
        )
    return array


def _load_safetensors(path: Path) -> Iterator[NDArray[Any]]:
    """Yield the rows of a shard of generated text, or of any safetensors file with a tensor
    ``tokens``."""
    try:
        stored = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise EESDError(
            f"{path} is not a safetensors file ({error}); give one with a tensor `tokens`."
        ) from None
    tokens = stored.get("tokens")
    if tokens is None or tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu":
        raise EESDError(
            f"{path} has no tensor `tokens`; give integers in one or two dimensions under "
            "this name."
        )
    tokens = np.atleast_2d(tokens)
    lengths = stored.get("lengths", np.full(len(tokens), tokens.shape[1]))
    if lengths.shape != (len(tokens),) or lengths.dtype.kind not in "iu":
        raise EESDError(
            f"{path} has `lengths` that do not fit its `tokens`; give one integer for each "
            "row, or none."
        )
    for row, length in zip(tokens, lengths, strict=True):
        yield row[:length]


def shard_name(number: int) -> str:
    """Return the file name of one shard of generated rows or of cached targets."""
    return f"shard-{number:05}.safetensors"


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch, size]).permutation(size)


def shuffled_indices(size: int, start: int, count: int, seed: int) -> NDArray[np.int64]:
    """Return a part of an endless sequence. The sequence runs through ``size`` rows again and
    again, each time in a new random order.

    Args:
        size: Number of rows.
        start: First position in the sequence.
        count: Number of positions.
        seed: Seed of the random orders.

    Returns:
        Row indices [count].
    """
    return np.asarray(
        [_permutation(seed, at // size, size)[at % size] for at in range(start, start + count)],
        np.int64,
    )


def batch_indices(
    rows: Rows, batch: int, mix_share: float, number: int, seed: int
) -> NDArray[np.int64]:
    """Choose the rows of one batch.

    Args:
        rows: All rows.
        batch: Rows in a batch.
        mix_share: Fraction of the batch that comes from the mixed-in rows, if there are such rows.
        number: Number of the batch, from 0.
        seed: Seed of the order.

    Returns:
        The row indices [batch]. The primary rows come first.
    """
    num_mixed_rows = len(rows) - rows.num_primary
    mixed = round(batch * mix_share) if num_mixed_rows else 0
    primary = shuffled_indices(rows.num_primary, number * (batch - mixed), batch - mixed, seed)
    if not mixed:
        return primary
    return np.concatenate(
        [
            primary,
            rows.num_primary + shuffled_indices(num_mixed_rows, number * mixed, mixed, seed + 1),
        ]
    )


def most_used(counts: NDArray[np.int64], size: int, always: Iterable[int]) -> NDArray[np.int64]:
    """Choose a draft vocabulary.

    Args:
        counts: Number of uses of each token [V].
        size: Vd, the number of tokens to choose, at most V.
        always: Tokens that are always included. These are the tokens that end a text.

    Returns:
        The ids [Vd] in ascending order. Among tokens with equal counts, the lowest ids are chosen.
    """
    ranked = counts.copy()
    ranked[[token for token in always if token < len(counts)]] = counts.max(initial=0) + 1
    return np.sort(np.argsort(-ranked, kind="stable")[:size])
