"""What is decoded and judged, as token ids: the same for everybody."""

from pathlib import Path
from typing import Any

from eesd.bench.tools.peers.results import Prompt
from eesd.common.errors import EESDError
from eesd.common.json_input import json_lines, read_json, read_text

REMEDY = "give a text, or JSON lines with prompt, turns or tokens"


def read_encoder(model: Path, engines: list[Path]) -> Any:
    """The checkpoint's tokenizer. That of a GGUF file is beside its engines."""
    from tokenizers import Tokenizer

    paths = [directory / "tokenizer.json" for directory in ([model] if not model.is_file() else engines)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise EESDError(f"{model} has no tokenizer.json; give one that has it, or convert the GGUF file for EESD.")
    return Tokenizer.from_file(str(path))


def read_texts(path: Path, encoder: Any) -> list[list[int]]:
    """Token ids of each text of a file: JSON lines with ``prompt``, ``turns`` or ``tokens``, or one text.

    Raises:
        EESDError: The file holds nothing of these.
    """
    if not path.is_file():
        raise EESDError(f"{path} is no file; {REMEDY}.")
    if path.suffix != ".jsonl":
        return [encoder.encode(read_text(path, REMEDY), add_special_tokens=False).ids]
    found = []
    for number, row in json_lines(read_text(path, REMEDY), str(path), REMEDY):
        value = next((row[key] for key in ("tokens", "prompt", "turns") if key in row), None) if isinstance(row, dict) else None
        if isinstance(value, list) and value and isinstance(value[0], str):
            value = value[0]
        if isinstance(value, str):
            value = encoder.encode(value, add_special_tokens=False).ids
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise EESDError(f"{path}, line {number}, has no prompt; {REMEDY}.")
        found.append(value)
    return found


def choose_prompts(texts: list[list[int]], wanted: dict[str, tuple[int, int]], source: Path) -> list[Prompt]:
    """Prompts of exactly the wanted lengths.

    Short prompts are the beginnings of the first texts that are long enough. The others are pieces, one behind another, of the
    texts behind those, which then go on from the first. So no prompt begins like another, and a peer that keeps prefixes of
    prompts gains nothing.

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
        raise EESDError(f"{source} has {len(fitting)} texts of at least {length} tokens, fewer than the {count} wanted.")
    prompts = [Prompt(f"short-{n + 1}", "short", texts[index][:length]) for n, index in enumerate(fitting[:count])]
    start = fitting[count - 1] + 1 if count else 0
    rest = [token for text in texts[start:] + texts[:start] for token in text]
    for kind, (count, length) in wanted.items():
        if kind == "short":
            continue
        if len(rest) < count * length:
            raise EESDError(f"{source} has {len(rest)} tokens left, too few for {count} prompts of {length}.")
        prompts += [Prompt(f"{kind}-{n + 1}", kind, rest[n * length : (n + 1) * length]) for n in range(count)]
        rest = rest[count * length :]
    return prompts


def read_windows(path: Path, encoder: Any, count: int, window: int) -> list[list[int]]:
    """Held-out text in whole windows.

    Args:
        path: A text, JSON lines, or a JSON list of token ids.
        encoder: The tokenizer.
        count: Most tokens to use.
        window: Tokens of a window.

    Raises:
        EESDError: There is less than one window.
    """
    if path.suffix == ".json":
        tokens = read_json(path, "give a list of token ids")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise EESDError(f"{path} is not a list of token ids; give one, or a text.")
    else:
        tokens = [token for text in read_texts(path, encoder) for token in text]
    tokens = tokens[:count]
    if len(tokens) < window:
        raise EESDError(f"{path} has {len(tokens)} tokens; a window needs {window}.")
    return [tokens[start : start + window] for start in range(0, len(tokens) - window + 1, window)]
