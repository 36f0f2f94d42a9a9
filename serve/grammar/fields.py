"""Reads the output constraint of a request from the request's fields."""

from collections.abc import Mapping
from typing import Any

from eesd.common.errors import EESDError
from eesd.runtime.constraint import GrammarConstraint, make_constraint
from eesd.runtime.llm import LLM

_FIELDS = {
    **{
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
    },
    **{"json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar"},
}
"""Older fields of vLLM, and fields of llama.cpp and SGLang. Each field is mapped to the kind of its
constraint."""
FIELDS = {*_FIELDS, "response_format", "guided_json_object", "format", "structured_outputs"}
"""All fields of a request that constrain its output."""
_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
"""The entries of vLLM's ``structured_outputs`` that define the allowed output."""
_IGNORED = ("disable_any_whitespace", "disable_fallback")
"""Entries of ``structured_outputs`` that have no effect here."""
_OBJECT = {"type": "object"}


def constraint_of(body: Mapping[str, Any], llm: LLM) -> GrammarConstraint | None:
    """Return the constraint of a request. It may be given as OpenAI's ``response_format``, as
    vLLM's ``structured_outputs`` or ``guided_*``, as Ollama's ``format``, or as ``json_schema``,
    ``regex``, ``grammar`` or ``ebnf`` (llama.cpp and SGLang).

    Args:
        body: The request's JSON.
        llm: The model.

    Returns:
        None if the request has no constraint.

    Raises:
        EESDError: The request has several constraints, or a constraint that cannot be used.
    """
    asked = _of_response_format(body.get("response_format"))
    asked += [
        (kind, body[name], False)
        for name, kind in _FIELDS.items()
        if body.get(name) not in (None, "")
    ]
    if body.get("guided_json_object") is True:
        asked.append(("json", _OBJECT, False))
    asked += _of_format(body.get("format"))
    asked += _of_structured_outputs(body.get("structured_outputs"))
    if len(asked) > 1:
        raise EESDError("The request has several constraints for the output; give one of them.")
    return make_constraint(asked[0][0], asked[0][1], llm, lenient=asked[0][2]) if asked else None


def _of_response_format(given: Any) -> list[tuple[str, Any, bool]]:
    if given is None:
        return []
    if not isinstance(given, Mapping) or given.get("type") not in (
        "text",
        "json_object",
        "json_schema",
    ):
        raise EESDError(
            'response_format is unknown; give {"type": "json_schema", ...}, or the type '
            "json_object or text."
        )
    if given["type"] == "text":
        return []
    # with llama.cpp and other servers, the schema is next to the type
    beside = given.get("schema")
    if given["type"] == "json_object":
        return [("json", _OBJECT if beside is None else beside, False)]
    inner = given.get("json_schema") if beside is None else given
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise EESDError(
            'response_format has no schema; give {"type": "json_schema", "json_schema": '
            '{"schema": {...}}}.'
        )
    return [("json", inner["schema"], inner.get("strict") is not True)]


def _of_format(given: Any) -> list[tuple[str, Any, bool]]:
    if given in (None, ""):
        return []
    if given != "json" and not isinstance(given, Mapping):
        raise EESDError('format is unknown; give "json", or a JSON schema.')
    return [("json", _OBJECT if given == "json" else given, False)]


def _of_structured_outputs(given: Any) -> list[tuple[str, Any, bool]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise EESDError(
            "structured_outputs is not an object; give one with "
            f"{', '.join(_OUTPUTS[:4])} or {_OUTPUTS[4]}."
        )
    present = {
        name: value
        for name, value in given.items()
        if value is not None and value is not False and name not in _IGNORED
    }
    for name in present:
        if name not in _OUTPUTS:
            raise EESDError(
                f"structured_outputs has {name!r}, which is not supported; give one of "
                f"{', '.join(_OUTPUTS)}."
            )
    return [
        ("json", _OBJECT, False) if name == "json_object" else (name, value, False)
        for name, value in present.items()
    ]
