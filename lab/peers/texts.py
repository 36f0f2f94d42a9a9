"""Prompts to decode and texts to judge. They are token ids, so every contestant has the same
ids."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eesd.bench.measure.tasks import read_texts
from eesd.common.errors import EESDError
from lab.peers.results import Prompt

PROMPT_TOKENS = 8
"""Number of tokens to generate after a long prompt. Only the time of the prompt itself counts."""


def read_codec(engines: Iterable[Path]) -> Any:
    """Read the tokenizer and the chat template of the first of these engine directories."""
    from eesd.runtime.text import TextCodec

    found = next(iter(engines), None)
    if found is None:
        raise EESDError("The work directory has no form of the file for EESD; convert it.")
    return TextCodec(found)


def encoded_texts(path: Path, codec: Any) -> list[tuple[str, list[int]]]:
    """Return the kind and the token ids of each text of a file (see
    :func:`~eesd.bench.measure.tasks.read_texts`). If the model has a chat template, texts of the
    kinds ``chat`` and ``summary`` become requests to an assistant."""
    found = []
    for kind, parts in read_texts(path):
        if kind in ("chat", "summary") and codec.chat_template:
            ids = codec.encode([{"role": "user", "content": parts[0]}])
        else:
            ids = codec.encode(parts[0])
        found.append((kind, ids))
    return found


def choose_prompts(
    texts: Sequence[tuple[str, list[int]]],
    per_kind: int,
    temperatures: Sequence[float],
    new_tokens: int,
    lengths: Sequence[int],
    kinds: Sequence[str] = (),
) -> list[Prompt]:
    """Return the first texts of each kind at each temperature, and prompts that have exactly the
    wanted lengths.

    The long prompts are consecutive pieces of all texts. A peer that keeps prefixes of prompts
    gains nothing, because no two pieces have the same beginning.

    Args:
        texts: The kind and the token ids of each text.
        per_kind: Number of texts of each kind.
        temperatures: The temperatures. A temperature of 0 decodes greedily.
        new_tokens: Number of tokens to generate after a text.
        lengths: Lengths of the long prompts in tokens.
        kinds: The kinds to use. If empty, all kinds are used.

    Raises:
        EESDError: There is not enough text.
    """
    found = []
    for kind in kinds or dict.fromkeys(kind for kind, _ in texts):
        own = [ids for name, ids in texts if name == kind][:per_kind]
        if not own:
            raise EESDError(f"No prompt is of the kind {kind!r}.")
        for temperature in temperatures:
            name = f"{kind}, T={temperature:g}" if temperature else kind
            found += [
                Prompt(f"{name}-{number}", name, ids, new_tokens, temperature)
                for number, ids in enumerate(own, 1)
            ]
    rest = [token for _, ids in reversed(texts) for token in ids]
    for length in lengths:
        if len(rest) < length:
            raise EESDError(f"The prompts have {len(rest)} tokens left; one of {length} is wanted.")
        found.append(
            Prompt(f"prompt-{length}", f"prompt of {length}", rest[:length], PROMPT_TOKENS)
        )
        rest = rest[length:]
    return found


def read_windows(path: Path, codec: Any, count: int, window: int) -> list[list[int]]:
    """Return held-out text in whole windows.

    Args:
        path: A file with a text or JSON lines.
        codec: The tokenizer.
        count: Maximum number of tokens to use.
        window: Number of tokens in a window.

    Raises:
        EESDError: The text is shorter than one window.
    """
    tokens = [token for _, parts in read_texts(path) for token in codec.encode(parts[0])][:count]
    if len(tokens) < window:
        raise EESDError(f"{path} has {len(tokens)} tokens; a window needs {window}.")
    return [tokens[start : start + window] for start in range(0, len(tokens) - window + 1, window)]
