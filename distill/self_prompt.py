"""Let the model write its own prompts. It continues the beginning of the user turn in its chat
template (Magpie, Xu et al. 2024, arXiv 2406.08464)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np

from eesd.common.errors import EESDError
from eesd.distill.continuing import Writer, Writing, continue_prompts
from eesd.distill.generate import STREAM
from eesd.distill.options import digest
from eesd.distill.stored import saved_whole
from eesd.runtime.decoding.sampling import philox
from eesd.runtime.text import TextCodec

MARK = "eesd-user-turn"
SHARD_TRIES = 32
"""Number of attempts to write a prompt for one file."""
MAX_TOKENS = 256
"""Maximum number of tokens in a turn. Longer turns are dropped, because the model does not end
them."""
MAX_FAILURES = 8
"""After this number of consecutive files without a prompt, the model is assumed to write no
prompts."""


@dataclass(frozen=True)
class SelfPromptOptions:
    """Options that determine the prompts.

    Attributes:
        prompts: Minimum number of prompts.
        starts: Beginnings of the user turns. They are used in rotation.
        seed: Seed of sampling.
        base: Fingerprint of the model.
        max_positions: Maximum number of positions of the model.
    """

    prompts: int
    starts: tuple[str, ...]
    seed: int
    base: str
    max_positions: int


def self_prompts(
    writer: Writer,
    codec: TextCodec,
    options: SelfPromptOptions,
    directory: Path,
    eos_token_ids: Sequence[int],
    advance: Callable[[int], None],
    rows: int,
    needed: int,
) -> list[Path]:
    """Write the missing JSON lines files of prompts.

    Each file is a function of the options and of its number, so a stopped run continues where it
    stopped.

    Args:
        writer: The model.
        codec: The tokenizer and chat template.
        options: Options of the prompts.
        directory: Directory of the files.
        eos_token_ids: Tokens that end a turn. The template's first token after a turn also ends it.
        advance: Called with the number of prompts of each file.
        rows: Prompts in a batch.
        needed: Minimum number of prompts needed now.

    Returns:
        The first files. Their lines have ``messages``.

    Raises:
        EESDError: The model has no chat template, or writes no prompts.
    """
    key = digest(asdict(options))[:16]
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    found = 0
    failures = 0
    for number in count():
        path = directory / f"self-prompts-{key}-{number:05}.jsonl"
        if not path.exists():
            turns = _user_turns(writer, codec, options, number, eos_token_ids, rows)
            lines = (
                json.dumps({"messages": [{"role": "user", "content": turn}]}) + "\n"
                for turn in turns
            )
            with saved_whole(path) as temporary:
                temporary.write_text("".join(lines))
        written = path.read_bytes().count(b"\n")
        failures = 0 if written else failures + 1
        paths += [path] if written else []
        advance(min(written, needed - found))
        found += written
        if found >= needed:
            return paths
        if failures == MAX_FAILURES:
            raise EESDError(
                "The model writes no user turns by itself; give prompts with --self-generate."
            )
    raise AssertionError


def around_turns(codec: TextCodec) -> tuple[str, str]:
    """Return the text that the chat template puts before and after a user's turn. Raises
    :class:`EESDError` if there is none."""
    opening, _, closing = codec.render([{"role": "user", "content": MARK}]).partition(MARK)
    return opening, closing


def _user_turns(
    writer: Writer,
    codec: TextCodec,
    options: SelfPromptOptions,
    number: int,
    eos_token_ids: Sequence[int],
    rows: int,
) -> list[str]:
    """Return the distinct user turns of one file, without the turns that the model did not end."""
    opening, closing = around_turns(codec)
    encode = codec.tokenizer.encode
    ends = {*eos_token_ids, *encode(closing, add_special_tokens=False).ids[:1]}
    starts = [options.starts[i % len(options.starts)] for i in range(SHARD_TRIES)]
    prompts = [encode(opening + start, add_special_tokens=False).ids for start in starts]
    limits = [min(len(prompt) + MAX_TOKENS, options.max_positions) for prompt in prompts]

    def numbers(text: int) -> np.random.Generator:
        return philox(options.seed, STREAM + 1, number * SHARD_TRIES + text)

    writing = Writing(prompts, limits, [1.0] * len(prompts), numbers, tuple(ends), rows)
    turns: dict[str, None] = {}
    for start, prompt, text in zip(starts, prompts, continue_prompts(writer, writing), strict=True):
        turn = (start + codec.decode(text[len(prompt) : -1])).strip()
        if text[-1] in ends and len(text) > len(prompt) + 1 and turn:
            turns[turn] = None
    return list(turns)
