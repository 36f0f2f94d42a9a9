"""Read JSON from outside, such as files and lines that anybody may have written, edited or damaged.

The result is always a value or an :class:`EESDError`. Input is refused before use if it is too
large, is nested too deeply, or has a number with thousands of digits. A byte order mark is
accepted. A line of JSON lines ends only at ``\\n``, because strings may hold Unicode's other line
separators.
"""

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from eesd.common.checks import as_float, shown
from eesd.common.errors import EESDError

T = TypeVar("T")
MAX_BYTES = 1 << 28
"""Largest file that is read as JSON or text. The largest real files are tokenizers and prompts, and
have around ten megabytes."""
MAX_DEPTH = 64
"""Deepest nesting of objects and lists. Real files nest about ten deep."""


def parse_json(text: str, name: str, remedy: str) -> Any:
    """Parse JSON.

    Args:
        text: The JSON text.
        name: Name of the text. It is used in the error message.
        remedy: Advice for the error message, in case the text cannot be used.

    Raises:
        EESDError: The text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise EESDError(f"{name} is nested too deeply; {remedy}.") from None
    except ValueError as error:  # a JSONDecodeError, or a number of too many digits
        raise EESDError(
            f"{name} is not valid JSON ({str(error).partition('; use')[0]}); {remedy}."
        ) from None
    if _depth_exceeds(value, MAX_DEPTH):
        raise EESDError(f"{name} is nested too deeply; {remedy}.")
    return value


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return False
        level = []
        for item in containers:
            level += item.values() if isinstance(item, dict) else item
    return True


def read_text(path: Path, remedy: str) -> str:
    """Read a UTF-8 text file.

    Args:
        path: The file.
        remedy: Advice for the error message, in case the file cannot be used.

    Raises:
        EESDError: The file is larger than :data:`MAX_BYTES`, or is not UTF-8.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise EESDError(f"{path} has more than {MAX_BYTES >> 20} MiB; {remedy}.")
    return decode(data, str(path), remedy)


def decode(data: bytes, name: str, remedy: str) -> str:
    """Text of UTF-8 bytes, without a byte order mark. Raises :class:`EESDError` for other bytes."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise EESDError(f"{name} is not UTF-8 text; {remedy}.") from None


def read_json(path: Path, remedy: str) -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        remedy: Advice for the error message, in case the file cannot be used.

    Raises:
        EESDError: The file is missing, unreadable, too large, not UTF-8, not JSON, or nested too
            deeply.
    """
    if not path.exists():
        raise EESDError(f"{path} is missing; {remedy}.")
    if not path.is_file():  # reading a pipe without a writer would never return
        raise EESDError(f"{path} is not a file; {remedy}.")
    try:
        text = read_text(path, remedy)
    except OSError as error:
        raise EESDError(f"{path} cannot be read ({error.strerror}); {remedy}.") from None
    return parse_json(text, str(path), remedy)


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises the errors of :func:`read_json`, and
    :class:`EESDError` if the value is not an object."""
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise EESDError(f"{path} does not hold a JSON object; {remedy}.")
    return value


def json_lines(text: str, name: str, remedy: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not blank.

    Args:
        text: One JSON value per line.
        name: Name of the text. It is used in the error message.
        remedy: Advice for the error message, in case a line cannot be used.

    Raises:
        EESDError: A line is not JSON, or is nested too deeply.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, parse_json(line, f"{name}, line {number}", remedy)


def from_json(kind: type[T], value: Any) -> T:
    """Make a dataclass from a JSON object. The object must have exactly the fields of the
    dataclass, and their values must have the annotated types.

    Args:
        kind: The dataclass. Its fields are plain types, dataclasses, tuples of any length, or dicts
            with text keys. Any of these may be optional.
        value: The parsed JSON.

    Raises:
        ValueError: A field is missing, unknown or of another type, or a dataclass refuses a value.
    """
    made: T = _converted(kind, value, "")
    return made


def _converted(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is UnionType:
        return value if type(value) in arguments else _converted(arguments[0], value, where)
    if is_dataclass(kind) and type(value) is dict:
        hints = _hints(cast(type, kind))
        if value.keys() != hints.keys():
            odd = min(map(str, value.keys() ^ hints.keys()))
            raise ValueError(f"{where}{shown(odd)} is missing or unknown")
        return kind(
            **{
                name: _converted(hints[name], item, f"{where}{name}.")
                for name, item in value.items()
            }
        )  # type: ignore[operator]
    if origin is tuple and type(value) is list:
        return tuple(
            _converted(arguments[0], item, f"{where}{index}.") for index, item in enumerate(value)
        )
    if origin is dict and type(value) is dict:
        return {
            name: _converted(arguments[1], item, f"{where}{shown(name)}.")
            for name, item in value.items()
        }
    if kind is float and type(value) is int:
        return as_float(value)
    if type(value) is not kind:  # isinstance would accept True as an integer
        raise ValueError(
            f"{where.removesuffix('.') or 'it'} is {shown(value)}, which has the wrong type"
        )
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The annotated types of a dataclass. Cached, because a manifest has hundreds of values of a
    few classes."""
    return get_type_hints(kind)
