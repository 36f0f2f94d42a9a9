"""Write the model's own text, which consists of shards of continued prompts. A stopped run
continues from these shards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from eesd.common.errors import EESDError
from eesd.common.json_input import read_json_object
from eesd.distill.continuing import Writer, Writing, continue_prompts, padded
from eesd.distill.data import shard_name
from eesd.distill.options import first_difference
from eesd.distill.stored import damaged, load_tensors, saved_whole
from eesd.runtime.decoding.sampling import philox

SHARD_BATCHES = 2
"""Number of batches of texts in a shard. Large shards keep rows busy, because near the end of a
shard, fewer and fewer rows have texts."""

LONGEST_ECHO = 64
LEAST_ECHO = 16
"""Two lengths in tokens. The first is the maximum length of a passage whose repetition at the end
of a text is detected. The second is the minimum length of such a repetition (an echo)."""
STREAM = 2
"""Random stream of the model's own text. Prompts that the model writes use the next stream."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options that determine the generated text. They are stored as ``generation.json`` next to the
    shards.

    Attributes:
        rows: Number of rows.
        batch: Rows generated at a time.
        length: Number of training positions in a row. A row has at most ``length`` + 1 tokens.
        temperatures: Temperatures of the rows, which use them in rotation. 0 is greedy.
        seed: Seed of the prompt order and of sampling.
        prompts: Digest of the prompts.
        base: Fingerprint of the model.
    """

    rows: int
    batch: int
    length: int
    temperatures: tuple[float, ...]
    seed: int
    prompts: str
    base: str

    @property
    def shard_rows(self) -> int:
        """Rows in a shard."""
        return SHARD_BATCHES * self.batch


def self_generate(
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    directory: Path,
    eos_token_ids: Sequence[int],
    advance: Callable[[int], None],
    process: int = 0,
    processes: int = 1,
) -> list[Path]:
    """Write the shards that are missing.

    A shard depends only on the options and on its number. A stopped run therefore continues where
    it stopped, and several processes can share the work.

    Args:
        writer: The model.
        prompts: Token ids of the prompt of each row. The last rows may be missing.
        options: Options of the text.
        directory: Directory of the shards.
        eos_token_ids: Tokens that end a row.
        advance: Called with the number of existing rows.
        process: Number of this process.
        processes: Number of processes that call this function.

    Returns:
        The shards of these rows.

    Raises:
        EESDError: The directory has text that was generated with other options.
    """
    _check_stored_options(directory, options)
    paths = []
    for number, start in enumerate(range(0, len(prompts), options.shard_rows)):
        chosen = prompts[start : start + options.shard_rows]
        count = len(chosen)
        path = directory / shard_name(number)
        paths.append(path)
        if number % processes == process and not path.exists():
            temperatures = [
                options.temperatures[(start + i) % len(options.temperatures)] for i in range(count)
            ]
            numbers = partial(_random_numbers, options.seed, start)
            limits = [options.length + 1] * count
            writing = Writing(chosen, limits, temperatures, numbers, eos_token_ids, options.batch)
            texts = [
                without_echo(text[: options.length + 1], len(prompt))
                for text, prompt in zip(
                    continue_prompts(writer, writing, advance), chosen, strict=True
                )
            ]
            tokens, lengths = padded(texts, options.length + 1)
            shard = {
                "tokens": tokens.int(),
                "lengths": lengths,
                "temperatures": torch.tensor(temperatures),
            }
            with saved_whole(path) as temporary:
                save_file(shard, temporary)
        else:
            if number % processes == process:
                _check_shard(path, count)
            advance(count)
    return paths


def without_echo(text: list[int], start: int) -> list[int]:
    """Return the text without the repetition at its end. The repeated passage is kept once.

    Args:
        text: Prompt and continuation.
        start: Number of tokens in the prompt, which is kept.
    """
    written = np.asarray(text[start:])
    for period in range(1, min(LONGEST_ECHO, len(written) // 3) + 1):
        differ = np.flatnonzero(written[period:] != written[:-period])
        echo = len(written) - period - (int(differ[-1]) + 1 if len(differ) else 0)
        if echo >= max(2 * period, LEAST_ECHO):
            return text[: len(text) - echo]
    return text


def _random_numbers(seed: int, start: int, text: int) -> np.random.Generator:
    """Return the random numbers of a text, given the index of the text in the shard and the index
    ``start`` of the shard's first text."""
    return philox(seed, STREAM, start + text)


def _check_shard(path: Path, count: int) -> None:
    """Raise :class:`EESDError` if an earlier run's shard does not have this number of rows."""
    shard = load_tensors(path)
    tokens = shard.get("tokens")
    lengths = shard.get("lengths")
    if (
        tokens is None
        or lengths is None
        or tokens.ndim != 2
        or len(tokens) != count
        or lengths.shape != (count,)
    ):
        raise damaged(path)


def _check_stored_options(directory: Path, options: GenerationOptions) -> None:
    """Store the options next to the shards, or compare them with the options of an earlier run."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "generation.json"
    entries = json.loads(json.dumps(asdict(options)))
    if path.exists():
        stored = read_json_object(path, f"delete {directory}, or give another --own-text")
        changed = first_difference(stored, entries)
        if changed:
            raise EESDError(
                f"{directory} has text generated with other options ({changed}); give another "
                "--own-text."
            )
    with saved_whole(path) as temporary:
        temporary.write_text(json.dumps(entries, indent=2) + "\n")
