"""What is decoded and judged, as token ids: the same for everybody."""

from pathlib import Path
from typing import Any

from eesd.bench.measure.tasks import read_texts
from eesd.common.errors import EESDError
from lab.peers.results import Prompt


def read_encoder(engines: list[Path]) -> Any:
    """The tokenizer of the model, which lies beside its engines."""
    from tokenizers import Tokenizer

    path = next(
        (path for directory in engines if (path := directory / "tokenizer.json").exists()), None
    )
    if path is None:
        raise EESDError(
            "No engine directory of EESD has a tokenizer.json; convert the GGUF file for "
            "EESD, or give --eesd."
        )
    return Tokenizer.from_file(str(path))


def encoded_texts(path: Path, encoder: Any) -> list[list[int]]:
    """Token ids of the first part of each text of a file; see
    :func:`~eesd.bench.measure.tasks.read_texts`."""
    return [encoder.encode(parts[0], add_special_tokens=False).ids for _, parts in read_texts(path)]


def choose_prompts(
    texts: list[list[int]], wanted: dict[str, tuple[int, int]], source: Path
) -> list[Prompt]:
    """Prompts of exactly the wanted lengths.

    Short prompts are the beginnings of the first texts that are long enough. The others are pieces,
    one behind another, of the texts behind those, which then go on from the first. So no prompt
    begins like another, and a peer that keeps prefixes of prompts gains nothing.

    Args:
        texts: Token ids.
        wanted: Number and length of the prompts of each kind, ``short`` first.
        source: The file, for the message.

    Raises:
        EESDError: There is not enough text.
    """
    count, length = wanted["short"]
    fitting = [index for index, text in enumerate(texts) if len(text) >= length]
    if len(fitting) < count:
        raise EESDError(
            f"{source} has {len(fitting)} texts of at least {length} tokens, fewer than the "
            f"{count} wanted."
        )
    prompts = [
        Prompt(f"short-{n + 1}", "short", texts[index][:length])
        for n, index in enumerate(fitting[:count])
    ]
    start = fitting[count - 1] + 1 if count else 0
    rest = [token for text in texts[start:] + texts[:start] for token in text]
    for kind, (count, length) in wanted.items():
        if kind == "short":
            continue
        if len(rest) < count * length:
            raise EESDError(
                f"{source} has {len(rest)} tokens left, too few for {count} prompts of {length}."
            )
        prompts += [
            Prompt(f"{kind}-{n + 1}", kind, rest[n * length : (n + 1) * length])
            for n in range(count)
        ]
        rest = rest[count * length :]
    return prompts


def read_windows(path: Path, encoder: Any, count: int, window: int) -> list[list[int]]:
    """Held-out text in whole windows.

    Args:
        path: A text, or JSON lines.
        encoder: The tokenizer.
        count: Most tokens to use.
        window: Tokens of a window.

    Raises:
        EESDError: There is less than one window.
    """
    tokens = [token for text in encoded_texts(path, encoder) for token in text][:count]
    if len(tokens) < window:
        raise EESDError(f"{path} has {len(tokens)} tokens; a window needs {window}.")
    return [tokens[start : start + window] for start in range(0, len(tokens) - window + 1, window)]
