"""Prepare JSON schemas for llguidance. This removes keywords that have no effect, and refuses
schemas that cannot be followed. The error gives the place of the problem.

Schemas follow JSON Schema 2020-12 (https://json-schema.org/draft/2020-12). ``python -m
lab.schemas`` runs its test suite.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import inf, prod
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from eesd.common.errors import EESDError

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON may have at most one blank after ``,`` and after ``:``. A model that may write endless
blanks sometimes does so."""
OPTIONS = "x-guidance"
"""The key under which a schema has llguidance's options."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values map names to schemas."""
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
"""This pattern limits the number of digits in times. The format allows any number of digits, and
some models write endless digits."""
_TRIALS = 200
"""Maximum number of schemas that are read to find the place of a mistake."""
_MOST_CASES = 32
"""Maximum number of cases into which a schema is split. Its own keywords and the keywords of the
schemas around it can split it. The grammar contains every case."""
_MOST_NAMES = 16
"""If a pattern matches at most this number of names, the names are listed as properties. Properties
that are listed anyway do not count. Listed properties must come in a fixed order, which is too
strict for many names."""
_EVERY_NAME = {"", "^", "$", ".*", "^.*", ".*$"}
"""The patterns that match every name."""
_KEY_COUNTS = {"minProperties", "maxProperties"}
_SHAPE = {"type", "required", "additionalProperties", "patternProperties", *_KEY_COUNTS}
"""The keywords that, together with the properties, decide whether llguidance can count keys."""
_WARNED = {"oneOf": ("oneOf",), "min/maxProperties": ("minProperties", "maxProperties")}
"""Some warnings do not quote keywords. This table has their keywords, by the first word of the
warning."""
_Cases = tuple[Collection[str], list[list[Any]]]
"""Keywords, and the lists of cases that replace them."""
_APPLICATORS = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not"),
    *("dependentSchemas", "dependencies", "contains"),
)
"""Keywords that can evaluate properties or items, in addition to the keywords that list them."""


class Bytes:
    """A vocabulary with a token for each byte, in the form that llguidance requires."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"</s>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = LLTokenizer(TokenizerWrapper(Bytes()), len(Bytes.tokens), [Bytes.eos_token_id])


def read_schema(
    schema: Mapping[str, Any] | bool, lenient: bool, place: tuple[str, ...] = ()
) -> tuple[Any, str, frozenset[str]]:
    """Return a JSON schema in llguidance's form, its grammar, and the keywords that were left out.

    Args:
        schema: The schema, which is plain JSON.
        lenient: Whether to ignore unsupported keywords instead of refusing them. Use
            :func:`ignored_by` to find the keywords that llguidance itself ignores.
        place: Path of keys to the schema, for messages.

    Raises:
        EESDError: The schema cannot be followed. The message gives the place in the schema.
    """
    for split in (_MOST_CASES, 1):  # splitting into cases may make the grammar too large
        ignored = set[str]() if lenient else None
        ready = _prepared(schema, ignored, place, split)
        grammar, mistake = _read(ready, lenient)
        if not mistake:
            return ready, grammar, frozenset(ignored or ())
    raise _refusal((*place, *_place(ready, mistake, lenient)), mistake)


def ignored_by(warnings: Sequence[str]) -> set[str]:
    """Return the keywords that llguidance ignores, according to its warnings."""
    found = set[str]()
    for warning in warnings:
        names = re.findall(r'"([$\w]+)"', warning)
        found.update(names or _WARNED.get(warning.partition(" ")[0], ()))
    return found


def _prepared(schema: Any, ignored: set[str] | None, place: tuple[str, ...], split: int) -> Any:
    """Return the schema in a form that llguidance supports, without keywords that have no effect.

    Args:
        schema: The schema.
        ignored: A set to which the names of keywords are added that are left out because they
            cannot be followed. If it is None, no keyword is left out.
        place: Path of keys to the schema.
        split: Maximum number of cases into which keywords unknown to llguidance may split the
            schema. If schemas are nested, their numbers of cases are multiplied.

    Raises:
        EESDError: The schema requires several open keys, so that a text could repeat the same key.
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
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = _pattern(pattern)
    elif found.get("format") in ("date-time", "time"):
        found["pattern"] = _SHORT_FRACTION
    if isinstance(named := found.get("patternProperties"), dict):
        found["patternProperties"] = {_pattern(key): value for key, value in named.items()}
    _close_evaluated(found)
    _list_names(found)
    split = _split_cases(found, split)
    if _keys_may_be_equal(found):
        if ignored is None:
            message = (
                "minProperties counts keys that may be equal; list the properties, or set "
                "additionalProperties to false"
            )
            raise EESDError(
                f"The JSON schema cannot be used: {_shown((*place, 'minProperties'))}: {message}."
            )
        ignored.add("minProperties")
    if ignored is not None:
        found = _without_what_fails(found, ignored)
    for key, value in found.items():
        inside = (*place, key)
        if key in _NAMED and isinstance(value, dict):
            found[key] = {
                name: _prepared(inner, ignored, (*inside, name), split)
                for name, inner in value.items()
            }
        elif key in _LISTED and isinstance(value, list):
            found[key] = [
                _prepared(inner, ignored, (*inside, str(at)), split)
                for at, inner in enumerate(value)
            ]
        elif key in _SINGLE:
            found[key] = _prepared(value, ignored, inside, split)
    return found


def _close_evaluated(schema: dict[str, Any]) -> None:
    """Replace ``unevaluatedProperties`` and ``unevaluatedItems`` if no other keyword can evaluate
    properties or items."""
    if any(key in schema for key in _APPLICATORS) or isinstance(schema.get("items"), list):
        return
    for key, plain in zip(_UNEVALUATED, ("additionalProperties", "items"), strict=True):
        if key in schema:
            schema.setdefault(plain, schema.pop(key))
            schema.pop(key, None)


def _by_name(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    """Return the entries of a keyword by name. The result is empty if the keyword's value is not an
    object."""
    value = schema.get(keyword)
    return dict(value) if isinstance(value, dict) else {}


def _list_names(schema: dict[str, Any]) -> None:
    """Turn patterns that match few names into listed properties. A listed key occurs only once, so
    the object ends when all keys have occurred. If every name is forbidden, no key is allowed."""
    known = isinstance(schema.get("properties", {}), dict)
    if not known or not isinstance(schema.get("patternProperties"), dict):
        return
    listed = _by_name(schema, "properties")
    others = dict[str, Any]()
    most = _MOST_NAMES + len({*listed, *_required(schema)})
    for pattern, inner in _by_name(schema, "patternProperties").items():
        names = _names_of(pattern, most)
        if names is None:
            others[pattern] = inner
        for name in names or ():
            listed[name] = {"allOf": [listed[name], inner]} if name in listed else inner
    if any(others.get(pattern) is False for pattern in _EVERY_NAME):
        schema |= {"properties": {}, "patternProperties": {}, "additionalProperties": False}
    else:
        schema |= {"properties": listed, "patternProperties": others}


@lru_cache(1000)
def _names_of(pattern: str, most: int) -> tuple[str, ...] | None:
    """Return the names that match a pattern. Return None if there are more than ``most`` names, or
    if the pattern cannot be read."""
    grammar, mistake = _read({"type": "string", "pattern": pattern}, lenient=False)
    if mistake:
        return None
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    names = list[str]()
    begun = [list[int]()]
    while begun:
        if len(names) + len(begun) > most:
            return None
        tokens = begun.pop()
        matcher.reset()
        matcher.consume_tokens(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_accepting():
            names.append(json.loads(bytes(tokens)))
        elif not matcher.is_error():
            mask = np.unpackbits(bits, count=len(Bytes.tokens), bitorder="little")
            begun += [[*tokens, int(token)] for token in np.flatnonzero(mask)[::-1]]
    return tuple(dict.fromkeys(names))


def _required(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the required keys, without duplicates."""
    required = schema.get("required")
    listed = required if isinstance(required, list) else []
    return list(dict.fromkeys(name for name in listed if isinstance(name, str)))


def _without(names: Sequence[str]) -> dict[str, Any]:
    """Return a schema for objects that have none of these keys."""
    return {"properties": dict.fromkeys(names, False)}


def _split_cases(schema: dict[str, Any], most: int) -> int:
    """Replace rules for keys by lists of cases. At least one case of each list must hold. Returns
    the maximum number of cases for the inner schemas."""
    rules = schema.get("allOf", [])
    if not isinstance(rules, list):
        return most
    for keywords, choices in [*_dependent(schema), *_counted(schema)]:
        if (count := prod(map(len, choices))) <= most:
            most //= count
            for keyword in keywords:
                del schema[keyword]
            schema["allOf"] = rules = [*rules, *({"anyOf": choice} for choice in choices)]
    return most


def _dependent(schema: Mapping[str, Any]) -> Iterator[_Cases]:
    """Yield the rules of dependent keys. Such a rule says that either the key is absent, or its
    dependencies hold."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        choices = []
        for name, needs in _by_name(schema, keyword).items():
            rest = {"required": [name, *needs]} if isinstance(needs, list) else {"allOf": [needs]}
            choices.append([_without([name]), {"required": [name], **rest}])
        if choices:
            yield [keyword], choices


def _counted(schema: Mapping[str, Any]) -> Iterator[_Cases]:
    """Yield the rules for the number of keys. There is a case for each allowed set of optional
    properties."""
    counts = {key: schema[key] for key in schema.keys() & _KEY_COUNTS}
    optional = _optional(schema)
    required = _required(schema)
    few = 0 < len(optional) < _MOST_CASES.bit_length()
    whole = all(isinstance(count, int) for count in counts.values())
    if not (counts and whole and few) or schema.get("type") != "object":
        return
    # At most one key that is not listed may be added, because two could be equal.
    least = counts.get("minProperties", 0) - _is_open(schema)
    most = counts.get("maxProperties", inf)
    cases = [
        {
            "required": [*required, *names],
            **_without([name for name in optional if name not in names]),
            **(counts if _is_open(schema) else {}),
        }
        for size in range(len(optional) + 1)
        if least <= len(required) + size <= most
        for names in combinations(optional, size)
    ]
    if cases:
        yield counts, [cases]


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Return whether keys that are not listed are allowed."""
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _optional(schema: Mapping[str, Any]) -> list[str]:
    """The optional properties."""
    required = _required(schema)
    return [
        name
        for name, inner in _by_name(schema, "properties").items()
        if inner is not False and name not in required
    ]


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas inside a schema. Each comes with the keys that lead to it."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from (((key, str(at)), inner) for at, inner in enumerate(value))
        elif key in _SINGLE:
            yield (key,), value


def _changes_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema means the same without a keyword."""
    if key == "format":
        # An unknown format is only an annotation (2020-12, 7.2.1).
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
    """Return whether at least two keys that are not listed are required. A text could then repeat
    the same key. The grammar counts every member, but a JSON parser keeps only one of several equal
    keys."""
    kinds = schema.get("type")
    least = schema.get("minProperties")
    is_object = (
        kinds is None or kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    )
    more = isinstance(least, int) and least - len(_required(schema)) > 1
    return is_object and _is_open(schema) and more


def _pattern(text: str) -> str:
    """Return a pattern in Rust's syntax. JavaScript's blanks include the byte order mark, which
    Rust's do not."""
    return re.sub(
        r"(?s)\\(.)", lambda found: r"[^\s\x{FEFF}]" if found[1] == "S" else found[0], text
    )


def _without_what_fails(schema: dict[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Return a schema without the keywords that fail. These are patterns that cannot be read (for
    example because of look-ahead), and counts that cannot be enforced. The names of these keywords
    are added to ``ignored``."""
    found = dict(schema)
    if (counts := found.keys() & _KEY_COUNTS) and (optional := _optional(found)):
        shape: dict[str, Any] = {key: found[key] for key in found.keys() & _SHAPE}
        if _read(shape | {"properties": dict.fromkeys(optional, True)}, lenient=False)[1]:
            ignored.update(counts)
            found = {key: value for key, value in found.items() if key not in counts}
    if isinstance(found.get("pattern"), str) and not _is_readable(found["pattern"]):
        ignored.add("pattern")
        del found["pattern"]
    named = _by_name(found, "patternProperties")
    readable = {pattern: inner for pattern, inner in named.items() if _is_readable(pattern)}
    if len(readable) < len(named):
        ignored.add("patternProperties")
        found["patternProperties"] = readable
    return found


@lru_cache
def _is_known_format(name: str) -> bool:
    return "format" not in _read({"type": "string", "format": name}, lenient=False)[1]


@lru_cache(1000)
def _is_readable(pattern: str) -> bool:
    return not _read({"type": "string", "pattern": pattern}, lenient=False)[1]


def options_of(lenient: bool) -> Any:
    """Return the value of :data:`OPTIONS` in a schema."""
    return {**ONE_LINE, "lenient": lenient}


def _read(schema: Any, lenient: bool) -> tuple[str, str]:
    """Return the grammar of a schema, and the message about its mistake. The message is "" if the
    schema has no mistake."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides=options_of(lenient)
        )
    except ValueError as error:  # a number beyond 64-bit floats
        return "", sentence(str(error))
    return grammar, sentence(mistake) if (mistake := LLMatcher.validate_grammar(grammar)) else ""


def _place(schema: Any, mistake: str, lenient: bool) -> tuple[str, ...]:
    """Return the place of a mistake, which is the innermost schema that has the mistake by
    itself."""
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
                schema = inner
                place = (*place, *path)
                break
        else:
            return place
    return place


def _shown(place: tuple[str, ...]) -> str:
    return "/".join(place)[:200]


def _refusal(place: tuple[str, ...], mistake: str) -> EESDError:
    where = f"{_shown(place)}: " if place else ""
    mistake = mistake.partition(". Enable")[0]  # this text is about an option of the library
    remedy = 'leave that out, or give response_format or the tool without "strict": true'
    return EESDError(f"The JSON schema cannot be used: {where}{mistake}; {remedy}.")


def sentence(message: str) -> str:
    """Return a message of llguidance as one line, without its excerpt of the grammar."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    text = next(
        (line for line in reversed(lines) if line.startswith("error:")),
        next(filter(None, lines), "unknown error"),
    )
    return text.removeprefix("error:").strip()[:200].rstrip(".:")
