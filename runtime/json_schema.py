"""JSON schemas as llguidance reads them: without what changes nothing, and refused with the place
of what cannot be followed.

JSON Schema 2020-12 (https://json-schema.org/draft/2020-12). ``python -m eesd.bench.tools.schemas``
runs its test suite.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from eesd.common.errors import EESDError

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Blanks in JSON: at most one behind ``,`` and ``:``. A model that may write blanks for ever
sometimes does."""
OPTIONS = "x-guidance"
"""Where a schema has llguidance's options."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_SINGLE = (
    "items",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    *_UNEVALUATED,
)
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_SHORT_FRACTION = r"^[^.]*(\.[0-9]{1,9}([^0-9.].*)?)?$"
"""Of times. The format allows endless digits, and some models write them."""
_TRIALS = 200
"""Most schemas that are read to find the place of a mistake."""


def read_schema(
    schema: Mapping[str, Any] | bool, lenient: bool, place: tuple[str, ...] = ()
) -> tuple[Any, str]:
    """A JSON schema in llguidance's form, and its grammar.

    Args:
        schema: The schema, which is plain JSON.
        lenient: Whether keywords that are not supported are ignored; otherwise they are refused.
        place: Names that lead to the schema, for messages.

    Raises:
        EESDError: It cannot be followed. The message names the place.
    """
    ready = _prepared(schema, lenient, place)
    grammar, mistake = _read(ready, lenient)
    if mistake is not None:
        raise _refusal((*place, *_place(ready, mistake, lenient)), mistake)
    return ready, grammar


def _prepared(schema: Any, lenient: bool, place: tuple[str, ...]) -> Any:
    """A schema without keywords that change nothing, and if it is ``lenient`` without patterns that
    cannot be read.

    Raises:
        EESDError: It has open keys of which several must come. Texts could have the same key
            several times.
    """
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value for key, value in schema.items() if not _changes_nothing(key, value, schema)
    }
    found |= {
        key: int(found[key])
        for key in _COUNTS
        if isinstance(found.get(key), float) and found[key].is_integer()
    }
    if not lenient and _keys_may_be_equal(found):
        message = (
            "minProperties counts keys that may be equal; list the properties, or set "
            "additionalProperties to false"
        )
        raise EESDError(
            f"The JSON schema cannot be used: {_shown((*place, 'minProperties'))}: {message}."
        )
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = _pattern(pattern)
    elif found.get("format") in ("date-time", "time"):
        found["pattern"] = _SHORT_FRACTION
    if isinstance(named := found.get("patternProperties"), dict):
        found["patternProperties"] = {_pattern(key): value for key, value in named.items()}
    if lenient:
        found = _without_what_fails(found)
    for key, value in found.items():
        inside = (*place, key)
        if key in _NAMED and isinstance(value, dict):
            found[key] = {
                name: _prepared(inner, lenient, (*inside, name)) for name, inner in value.items()
            }
        elif key in _LISTED and isinstance(value, list):
            found[key] = [
                _prepared(inner, lenient, (*inside, str(at))) for at, inner in enumerate(value)
            ]
        elif key in _SINGLE:
            found[key] = _prepared(value, lenient, inside)
    return found


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas in a schema, each with the keys that lead to it."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from (((key, str(at)), inner) for at, inner in enumerate(value))
        elif key in _SINGLE:
            yield (key,), value


def _changes_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a schema says the same without a keyword."""
    if key == "format":
        # 2020-12, 7.2.1: an annotation.
        return isinstance(value, str) and not _is_known_format(value)
    if key == "propertyNames":
        return value is True or (isinstance(value, dict) and value in ({}, {"type": "string"}))
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    if key in ("then", "else"):
        return "if" not in schema
    if key == "if":
        return "then" not in schema and "else" not in schema
    none = {
        "uniqueItems": False,
        "dependencies": {},
        "dependentRequired": {},
        "dependentSchemas": {},
        "not": False,
    }
    return (key in none and value == none[key]) or (
        key in _UNEVALUATED and (value is True or value == {})
    )


def _keys_may_be_equal(schema: Mapping[str, Any]) -> bool:
    """Whether two keys that are not listed must come. The grammar counts members, and a reader
    keeps one of equal keys."""
    kinds, least, required = schema.get("type"), schema.get("minProperties"), schema.get("required")
    is_object = (
        kinds is None or kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    )
    is_open = schema.get("additionalProperties") is not False or bool(
        schema.get("patternProperties")
    )
    listed = (
        {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    )
    return is_object and is_open and isinstance(least, int) and least - len(listed) > 1


def _pattern(text: str) -> str:
    """A pattern in Rust's syntax. JavaScript's blanks include the byte order mark."""
    return re.sub(
        r"(?s)\\(.)", lambda found: r"[^\s\x{FEFF}]" if found[1] == "S" else found[0], text
    )


def _without_what_fails(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without patterns that cannot be read, such as those with look-ahead, and counts that
    cannot be kept."""
    found = dict(schema)
    required = found.get("required")
    if set(found.get("properties") or ()) - set(required if isinstance(required, list) else ()):
        found = {
            key: value
            for key, value in found.items()
            if key not in ("minProperties", "maxProperties")
        }
    if isinstance(found.get("pattern"), str) and not _is_readable(found["pattern"]):
        del found["pattern"]
    if isinstance(found.get("patternProperties"), dict):
        found["patternProperties"] = {
            key: inner for key, inner in found["patternProperties"].items() if _is_readable(key)
        }
    return found


@lru_cache
def _is_known_format(name: str) -> bool:
    mistake = _read({"type": "string", "format": name}, lenient=False)[1]
    return mistake is None or "format" not in mistake


@lru_cache(1000)
def _is_readable(pattern: str) -> bool:
    return _read({"type": "string", "pattern": pattern}, lenient=False)[1] is None


def options_of(lenient: bool) -> Any:
    """What a schema has under :data:`OPTIONS`."""
    return {**ONE_LINE, "lenient": lenient}


def _read(schema: Any, lenient: bool) -> tuple[str, str | None]:
    """The grammar of a schema, and what is wrong with it."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides=options_of(lenient)
        )
    except ValueError as error:  # a number beyond 64-bit floats
        return "", sentence(str(error))
    return grammar, sentence(mistake) if (mistake := LLMatcher.validate_grammar(grammar)) else None


def _place(schema: Any, mistake: str, lenient: bool) -> tuple[str, ...]:
    """Where a mistake is: the innermost schema that has it alone."""
    place: tuple[str, ...] = ()
    shared = {
        key: schema[key]
        for key in ("$defs", "definitions")
        if isinstance(schema, dict) and key in schema
    }
    trials = 0
    while isinstance(schema, dict):
        for path, inner in _inside(schema):
            trials += 1
            alone = {**shared, **inner} if isinstance(inner, dict) else inner
            if trials > _TRIALS:
                return place
            if _read(alone, lenient)[1] == mistake:
                schema, place = inner, (*place, *path)
                break
        else:
            return place
    return place


def _shown(place: tuple[str, ...]) -> str:
    return "/".join(place)[:200]


def _refusal(place: tuple[str, ...], mistake: str) -> EESDError:
    where = f"{_shown(place)}: " if place else ""
    mistake = mistake.partition(". Enable")[0]  # the library's own option
    remedy = 'leave that out, or give response_format or the tool without "strict": true'
    return EESDError(f"The JSON schema cannot be used: {where}{mistake}; {remedy}.")


def sentence(message: str) -> str:
    """What llguidance says, without the excerpt of the grammar, in one line."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    text = next(
        (line for line in reversed(lines) if line.startswith("error:")),
        next(filter(None, lines), "unknown error"),
    )
    return text.removeprefix("error:").strip()[:200].rstrip(".:")
