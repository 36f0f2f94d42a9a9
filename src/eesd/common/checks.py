"""Checks of arguments at the edge of the API. NumPy numbers count as numbers, but booleans and text
do not."""

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any

from eesd.common.errors import EESDError


def first_fault(faults: Mapping[str, Any]) -> str:
    """The first of these messages whose condition holds, or "" if none does."""
    return next((message for message, holds in faults.items() if holds), "")


def check_integer(name: str, value: Any, least: int, most: int) -> int:
    """Return ``value`` as an int. Raises :class:`EESDError` unless it is an integer from ``least``
    to ``most``."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    bounds = f"between {least} and {most}"
    if most >= 2**63 - 1 and not (isinstance(value, int) and value > most):
        bounds = f"of at least {least}"
    raise EESDError(f"{name} is {shown(value)}; it must be an integer {bounds}.")


def check_number(name: str, value: Any, good: Any, wanted: str) -> float:
    """Return ``value`` as a float. Raises :class:`EESDError` unless it is a finite number for which
    ``good(value)`` holds."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = as_float(value)
        if isfinite(number) and good(number):
            return number
    raise EESDError(f"{name} is {shown(value)}; it must be {wanted}.")


def as_float(value: Real | float) -> float:
    """Return the value as a float. An integer that is too large for a float becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def check_flag(name: str, value: Any) -> bool:
    """``value``. Raises :class:`EESDError` unless it is True or False."""
    if not isinstance(value, bool):
        raise EESDError(f"{name} is {shown(value)}; it must be True or False.")
    return value


def check_type(name: str, value: Any, kind: type | UnionType, wanted: str) -> None:
    """Raise :class:`EESDError` if the value is not of this type."""
    if not isinstance(value, kind):
        raise EESDError(f"{name} is {shown(value)}; it must be {wanted}.")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise :class:`EESDError` unless the value is one of ``choices``."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise EESDError(f"{name} is {shown(value)}; it must be one of {', '.join(known)}.")


def check_path(name: str, value: Any, wanted: str) -> Path:
    """Return ``value`` as a path. Raises :class:`EESDError` for other types, and for text that
    cannot name a file."""
    try:
        text = isinstance(value, str | os.PathLike) and os.fspath(value)
        if isinstance(text, str) and text and b"\0" not in text.encode():
            Path(text).exists()  # raises if a name is too long or a directory cannot be entered
            return Path(text)
    except (UnicodeEncodeError, TypeError):
        pass
    except OSError as error:
        raise EESDError(
            f"{name} {shown(value)} cannot be opened ({error.strerror}); give {wanted}."
        ) from None
    raise EESDError(f"{name} is {shown(value)}; give {wanted}.")


def shown(value: Any) -> str:
    """Format a value for a message. The result is one line, and is shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = type(value).__name__
        if isinstance(value, int):
            text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 40 else f"{text[:40]}..."


def is_file_name(name: str) -> bool:
    """Whether this names a file in a directory. A path that leads out of the directory does not."""
    return (
        name.isprintable()
        and 0 < len(name) < 200
        and name not in (".", "..")
        and not {"/", "\\"} & set(name)
    )
