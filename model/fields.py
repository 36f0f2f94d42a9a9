"""Read the fields of a model's JSON files, and check their types."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from eesd.common.checks import as_float, shown


class Fields:
    """The fields of a JSON object. The methods read fields and check their types. :meth:`left`
    names the fields that were not read.

    Raises:
        ValueError: A field has another type, or is out of range.
        KeyError: A required field is missing.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.taken: set[str] = set()

    def take(self, name: str, default: Any = ...) -> Any:
        """Return the value of a field, which can have any type. A default of ``...`` means that the
        field is required."""
        self.taken.add(name)
        return self.raw[name] if default is ... else self.raw.get(name, default)

    def integer(
        self,
        name: str,
        default: Any = ...,
        optional: bool = False,
        least: int = 1,
        most: int = 2**63 - 1,
    ) -> Any:
        """Return an integer from ``least`` to ``most``. It can be None only if ``optional``."""
        value = self.take(name, default)
        if optional and value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            bounds = f"from {least} to {most}"
            if most >= 2**63 - 1 and not (type(value) is int and value > most):
                bounds = f"of at least {least}"
            raise ValueError(f"{name} is {shown(value)}, and must be an integer {bounds}")
        return value

    def number(self, name: str, default: Any = ..., optional: bool = False) -> Any:
        """Return a finite number. It can be None only if ``optional``."""
        value = self.take(name, default)
        if optional and value is None:
            return None
        if type(value) not in (int, float) or not isfinite(as_float(value)):
            raise ValueError(f"{name} is {shown(value)}, and must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.take(name, default)
        if type(value) is not bool:
            raise ValueError(f"{name} is {shown(value)}, and must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a string or None."""
        value = self.take(name, None)
        if not isinstance(value, str | None):
            raise ValueError(f"{name} is {shown(value)}, and must be a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """Return one token id or several, or None if the field is absent."""
        value = self.take(name, None)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int or not -1 <= token < 2**31 for token in ids):
            raise ValueError(f"{name} is {shown(value)}, and must be a token id or a list of them")
        return tuple(ids)

    def changed(self, raw: Mapping[str, Any]) -> "Fields":
        """Return the fields of another object. A field that is read from it also counts as read
        here."""
        made = Fields(raw)
        made.taken = self.taken
        return made

    @property
    def left(self) -> list[str]:
        """The names of the fields that were not read and are not null."""
        return sorted(
            name for name, value in self.raw.items() if name not in self.taken and value is not None
        )
