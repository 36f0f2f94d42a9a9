"""The API of the real TensorRT modules, which is read from the files that ``trt_signatures.py``
wrote. This module can check that a call fits the API."""

import json
from dataclasses import dataclass
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any

from support.trt_signatures import DATA

VERSIONS = {
    "tensorrt": ("tensorrt-10.15.1.29", "tensorrt-11.4.0.106"),
    "tensorrt-rtx": ("rtx-1.7.1.116",),
}
"""The files of each flavour, from the oldest version to the newest."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method. It has a name and a pybind11 type, and may be optional."""

    name: str
    type: str
    optional: bool


class Api:
    """The API of one version."""

    def __init__(self, path: Path) -> None:
        raw = json.loads(path.read_text())
        self.version: str = raw["version"]
        self.classes: dict[str, dict[str, list[str]]] = raw["classes"]
        self.enums: dict[str, list[str]] = {
            name: members.split() for name, members in raw["enums"].items()
        }

    def has(self, cls: str, member: str) -> bool:
        return member in self.classes.get(cls, {})

    def is_property(self, cls: str, member: str) -> bool:
        return "property -> " in self.classes[cls][member][0]

    def is_settable(self, cls: str, member: str) -> bool:
        return self.has(cls, member) and self.classes[cls][member][0].startswith("settable ")

    def check_call(
        self, cls: str, member: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise TypeError, as pybind11 does, unless an overload takes these arguments."""
        overloads = self.classes[cls][member]
        if not any(_accepts(parameters(text), args, kwargs) for text in overloads):
            raise TypeError(
                f"{cls}.{member}() of {self.version} is {' or '.join(overloads)}; it was "
                f"called with {args} {kwargs}"
            )


@cache
def load(name: str) -> Api:
    """Returns the API that a file contains. ``name`` is the name of the file without ``.json``."""
    return Api(DATA / f"{name}.json")


@cache
def parameters(signature: str) -> list[Parameter]:
    """Returns the parameters of a signature without ``self``."""
    inside = signature[1 : signature.rindex(")")]
    return [_parameter(text) for text in _split(inside)[1:]]


def _parameter(text: str) -> Parameter:
    name, _, rest = text.partition(": ")
    kind, equals, _ = rest.partition(" = ")
    return Parameter(name.strip(), kind.strip(), bool(equals))


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _accepts(wanted: list[Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) > len(wanted):
        return False
    given = dict(zip((one.name for one in wanted), args, strict=False))
    if given.keys() & kwargs.keys() or kwargs.keys() - {one.name for one in wanted}:
        return False
    given |= kwargs
    return all(_fits(given[one.name], one) if one.name in given else one.optional for one in wanted)


def _fits(value: Any, wanted: Parameter) -> bool:
    """Returns whether pybind11 can convert a value to the type of a parameter."""
    kind = wanted.type
    if kind in ("buffer", "Buffer"):
        return isinstance(value, bytes | bytearray | memoryview | mmap)
    if kind in ("int", "SupportsInt"):
        return isinstance(value, int)
    if kind == "Dims":
        return isinstance(value, tuple | list)
    if kind in ("str", "bool", "tuple", "list"):
        return any(base.__name__ == kind for base in type(value).__mro__)
    return any(base.__name__ == kind.rpartition(".")[2] for base in type(value).__mro__) or (
        value is None and wanted.optional
    )
