"""Tests that a constraint allows exactly the texts of its schema, expression or grammar, and that
it allows EOS where a text may end."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer, TokenizerWrapper
from support.constrained import (
    LIMITED_OBJECTS,
    SCHEMAS,
    TOO_MUCH,
    allowed,
    random_text,
    with_new_lines,
)
from tokenizers import Tokenizer, decoders, models

from eesd.common.errors import EESDError
from eesd.runtime.constraint import GrammarConstraint, _Tokens
from eesd.runtime.constraint import make_constraint as constraint
from eesd.runtime.json_schema import BYTES, read_schema
from eesd.runtime.llm import LLM, load
from eesd.runtime.request import ConstraintError
from eesd.runtime.text import TextCodec
from eesd.serve.grammar.fields import constraint_of
from eesd.serve.grammar.token_filter import TokenFilter
from lab.schemas import EOS, JSON_TOKENS
from lab.schemas import random_text as random_bytes

LOOK_AHEAD = "^(?!.*b)[a-c]{1,3}$"
WORD = {"type": "string", "maxLength": 4}


@pytest.fixture(scope="module")
def llm(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(
        with_new_lines(engine, tmp_path_factory.mktemp("lines") / "plans"),
        "ort",
        speculation=None,
        threads=1,
    )


@settings(derandomize=True, deadline=None, max_examples=150)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_every_text_fits_its_schema(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    text = random_text(constraint("json", schema, llm), llm, seed)
    Draft202012Validator(schema).validate(json.loads(text))
    assert "\n" not in text


@settings(derandomize=True, deadline=None, max_examples=100)
@given(schema=st.one_of(LIMITED_OBJECTS, SCHEMAS), lenient=st.booleans())
def test_no_text_dies_and_each_fits_unless_keywords_are_ignored(
    schema: dict[str, Any], lenient: bool
) -> None:
    for seed in range(3):
        try:
            _, grammar, left_out = read_schema(schema, lenient)
            made = GrammarConstraint(grammar, BYTES, [EOS], JSON_TOKENS)
        except EESDError:
            return
        text = random_bytes(made, random.Random(seed))
        if text is not None and not left_out | made.ignored:
            Draft202012Validator(schema).validate(json.loads(text))


ONE = {"const": 1}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("more", "texts"),
    [
        # keys that are used up
        (
            {
                "properties": {"a": ONE, "b": ONE},
                "required": ["a", "b"],
                "patternProperties": {"^(a|b)$": {}},
            },
            ['{"a":1,"b":1}'],
        ),
        ({"required": ["a"], "patternProperties": {"^a$": ONE}}, ['{"a":1}']),
        ({"patternProperties": {"^(a|b)$": ONE}, "minProperties": 2}, ['{"a":1,"b":1}']),
        ({"properties": {"a": {}}, "patternProperties": {"^a$": ONE}}, ["{}", '{"a":1}']),
        (
            {"properties": {"a": ONE}, "allOf": [{"patternProperties": {"^a$": {}}}]},
            ["{}", '{"a":1}'],
        ),
        (
            {
                "additionalProperties": True,
                "properties": {"a": ONE},
                "patternProperties": {".*": False, "^a$": {}},
            },
            ["{}"],
        ),
        # rules between keys
        (
            {"properties": {"a": ONE, "b": ONE}, "dependentRequired": {"a": ["b"]}},
            ["{}", '{"b":1}', '{"a":1,"b":1}'],
        ),
        (
            {"properties": {"a": ONE, "b": ONE}, "minProperties": 1, "maxProperties": 1},
            ['{"a":1}', '{"b":1}'],
        ),
        (
            {"additionalProperties": True, "unevaluatedProperties": False, "maxProperties": 0},
            ["{}"],
        ),
    ],
)
def test_the_texts_of_rules_for_keys(more: dict[str, Any], texts: list[str]) -> None:
    """The grammar allows all texts that fit, and no other texts."""
    grammar = read_schema({**CLOSED, **more}, lenient=False)[1]
    made = GrammarConstraint(grammar, BYTES, [EOS], JSON_TOKENS)
    found = {random_bytes(made, random.Random(seed)) for seed in range(40)}
    assert {str(text).replace(" ", "") for text in found} == set(texts)


def test_keys_that_are_not_evaluated_are_forbidden() -> None:
    schema = {"type": "object", "properties": {"a": ONE}, "unevaluatedProperties": False}
    assert read_schema(schema, False)[0] == {**CLOSED, "properties": {"a": ONE}}
    with pytest.raises(EESDError, match="unevaluatedProperties"):
        read_schema({**schema, "anyOf": [{"properties": {"b": ONE}}, {}]}, lenient=False)


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "array", "contains": {}, "uniqueItems": True}, {"contains", "uniqueItems"}),
        ({"items": {"pattern": LOOK_AHEAD}}, {"pattern"}),
        ({"patternProperties": {LOOK_AHEAD: {}}}, {"patternProperties"}),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, {"oneOf"}),
        ({"minProperties": 2}, {"minProperties"}),
        (
            {"type": "object", "properties": dict.fromkeys("abcdefg", True), "maxProperties": 2},
            {"maxProperties"},
        ),
        ({"$defs": {"unused": {"not": {}}}, "format": "password", "title": "x"}, set()),
    ],
)
def test_ignored_keywords_are_known(llm: LLM, schema: dict[str, Any], ignored: set[str]) -> None:
    made = constraint_of(by_schema(schema), llm)
    assert made is not None and made.ignored == ignored
    assert TokenFilter(97, None, [], made).ignored == ignored


@pytest.mark.parametrize("pattern", ["[ab]{2,4}", "(ab|a)b?", "a*b{0,2}"])
def test_eos_is_allowed_exactly_where_the_text_may_end(llm: LLM, pattern: str) -> None:
    (eos,) = llm.manifest.eos_token_ids
    made = constraint("regex", pattern, llm)
    texts = [""]
    while texts:
        text = texts.pop()
        tokens = llm.encode(text)
        found = allowed(made, tokens)
        assert (eos in found) == bool(re.fullmatch(pattern, text)), text
        after = {llm.codec.decode([token]) for token in found if token != eos}
        assert all(re.fullmatch("[ab]", letter) for letter in after)
        assert allowed(made, [*tokens, eos]) == [eos]
        if len(text) < 6:
            texts += [text + letter for letter in sorted(after)]


def test_paths_may_come_in_any_order(llm: LLM) -> None:
    """One object is used for the committed tokens and for all drafted paths. Each answer equals the
    answer of a new object."""
    schema = {
        "type": "object",
        "properties": {"a": WORD, "b": {"type": "integer"}},
        "required": ["a"],
    }
    made = constraint("json", schema, llm)
    draw = random.Random(0)
    committed = list[int]()
    for _ in range(40):
        # These paths are never committed, and some are not allowed.
        for _ in range(draw.randrange(4)):
            path = [*committed, *draw.choices(range(97), k=draw.randrange(4))]
            assert allowed(made, path) == allowed(constraint("json", schema, llm), path)
        path = list(committed)
        for _ in range(draw.randrange(6)):
            path.append(draw.choice(allowed(made, path)))
            assert list(made.forced(path, 9)) == list(
                constraint("json", schema, llm).forced(path, 9)
            )
        committed.append(draw.choice(allowed(made, committed)))
        if committed[-1] in llm.manifest.eos_token_ids:
            committed = []


def test_tokens_that_are_not_allowed_are_followed_by_eos_alone(llm: LLM) -> None:
    made = constraint("regex", "ab", llm)
    assert allowed(made, llm.encode("x")) == list(llm.manifest.eos_token_ids)
    assert made.forced(llm.encode("x"), 4) == []
    assert allowed(made, llm.encode("a")) == llm.encode("b")


def test_forced_tokens_are_what_must_follow(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"const": "Bo"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    made = constraint("json", schema, llm)
    tokens = list[int]()
    eos = llm.manifest.eos_token_ids[0]
    while eos not in tokens:
        forced = made.forced(tokens, 3)
        assert len(forced) <= 3
        for token in forced:
            assert allowed(made, tokens) == [token]
            tokens.append(token)
        if not forced:
            tokens.append(allowed(made, tokens)[0])
    assert json.loads(llm.codec.decode(tokens)) == {"name": "Bo"}
    assert made.forced(tokens, 3) == []


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (
            {"response_format": {"type": "json_object"}},
            lambda text: isinstance(json.loads(text), dict),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"const": 1}},
                }
            },
            "1".__eq__,
        ),
        ({"guided_json": {"enum": ["a", "b"]}}, ['"a"', '"b"'].__contains__),
        ({"guided_json": '{"const": "a"}'}, '"a"'.__eq__),
        ({"guided_regex": "a[bc]d", "guided_json": None}, ["abd", "acd"].__contains__),
        (
            {"guided_choice": ["yes", "y e\ns", '"', "\\n", "/x/"]},
            ["yes", "y e\ns", '"', "\\n", "/x/"].__contains__,
        ),
        ({"guided_grammar": 'start: "a" (b | "c")\nb: "bb"'}, ["abb", "ac"].__contains__),
        ({"guided_grammar": 'root ::= "a" b\nb ::= "b" | "c"'}, ["ab", "ac"].__contains__),
        ({"structured_outputs": {"choice": ["x"]}}, "x".__eq__),
        ({"grammar": 'root ::= "ab"'}, "ab".__eq__),
        ({"ebnf": 'root ::= "ab"', "regex": ""}, "ab".__eq__),
        ({"regex": "ab"}, "ab".__eq__),
        ({"json_schema": {"const": "a"}}, '"a"'.__eq__),
        ({"format": {"const": "a"}}, '"a"'.__eq__),
        ({"format": "json"}, lambda text: isinstance(json.loads(text), dict)),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "1".__eq__),
        ({"response_format": {"type": "json_schema", "schema": {"const": 1}}}, "1".__eq__),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            lambda text: isinstance(json.loads(text), dict),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_constraints_of_requests(
    llm: LLM, body: dict[str, Any], fits: Callable[[str], bool]
) -> None:
    most = 4000  # objects without a schema may become long
    for seed in range(5):
        made = constraint_of(body, llm)
        assert made is not None
        assert fits(random_text(made, llm, seed, most))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
    ],
)
def test_requests_without_constraint(llm: LLM, body: dict[str, Any]) -> None:
    assert constraint_of(body, llm) is None


def by_schema(schema: Any, **more: bool) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, **more},
        }
    }


def test_a_schema_that_is_not_strict_may_have_unknown_keywords(llm: LLM) -> None:
    """The schema may also have unsupported patterns. A schema without ``strict`` is not strict, as
    with OpenAI."""
    unknown = {"type": "array", "items": {"const": 1}, "maxItems": 2, "uniqueItems": True}
    pattern = {"type": "string", "pattern": LOOK_AHEAD, "maxLength": 3}
    counted = {"type": "object", "properties": dict.fromkeys("abcdefg", True), "maxProperties": 2}
    for schema, name in (
        (unknown, "uniqueItems"),
        (pattern, "look-ahead"),
        (counted, "min/maxProperties"),
    ):
        for inner in (
            schema,
            {"type": "object", "properties": {"a/b": {"anyOf": [{"const": 1}, schema]}}},
        ):
            for more in ({}, {"strict": False}):
                assert constraint_of(by_schema(inner, **more), llm) is not None
            place = "" if inner is schema else "properties/a/b/anyOf/1: "
            for body in (by_schema(inner, strict=True), {"guided_json": inner}):
                with pytest.raises(EESDError, match=f"cannot be used: {place}.*{name}.*strict"):
                    constraint_of(body, llm)


@pytest.mark.parametrize(
    "more",
    [
        {"propertyNames": {"type": "string"}},
        {
            "properties": {
                "a": {"type": "array", "uniqueItems": False, "items": {"const": 1}, "maxItems": 2}
            }
        },
        {"properties": {"a": {"type": "string", "format": "password", "maxLength": 3}}},
        {"properties": {"a": {"type": "string", "format": "uri-reference", "maxLength": 3}}},
        {
            "minContains": 0,
            "dependencies": {},
            "dependentRequired": {},
            "unevaluatedProperties": True,
            "then": {},
            "not": False,
        },
        {"maxProperties": 2.0, "required": ["a"]},
    ],
)
def test_keywords_that_change_nothing_are_taken(llm: LLM, more: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "additionalProperties": False,
        **more,
    }
    made = constraint_of(by_schema(schema, strict=True), llm)
    assert made is not None
    Draft202012Validator(schema).validate(json.loads(random_text(made, llm, 0)))


OPEN = {"type": "object", "additionalProperties": {"const": 1}}


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({**OPEN, "minProperties": 2}, False),
        ({**OPEN, "minProperties": 1}, True),
        ({**OPEN, "minProperties": 3, "properties": {"a": {"const": 1}}, "required": ["a"]}, False),
        (
            {
                **OPEN,
                "minProperties": 2,
                "properties": {"a": {"const": 1}},
                "required": ["a"],
                "maxProperties": 4,
            },
            True,
        ),
        (
            {
                **OPEN,
                "additionalProperties": False,
                "patternProperties": {"^s_": {"const": 1}},
                "minProperties": 2,
            },
            False,
        ),
        (
            {
                **OPEN,
                "additionalProperties": False,
                "properties": {"a": {"const": 1}},
                "required": ["a"],
                "minProperties": 1,
            },
            True,
        ),
        ({"minProperties": 2}, False),
        ({"type": "array", "maxItems": 1, "minProperties": 2}, True),
    ],
)
def test_a_text_that_would_need_equal_keys_is_refused(
    llm: LLM, schema: dict[str, Any], taken: bool
) -> None:
    """The grammar counts the members of an object. If several keys are equal, a parser keeps only
    one of them, and then the object has too few members."""
    nested = {
        "type": "object",
        "properties": {"map": schema},
        "required": ["map"],
        "additionalProperties": False,
    }
    if not taken:
        with pytest.raises(EESDError, match=r"properties/map/minProperties: .*may be equal"):
            constraint_of(by_schema(nested, strict=True), llm)
    made = constraint_of(by_schema(nested, strict=taken), llm)
    assert made is not None
    if taken and "additionalProperties" in schema:
        Draft202012Validator(nested).validate(json.loads(random_text(made, llm, 1, 4000)))


def may_begin(made: GrammarConstraint, llm: LLM, text: str) -> bool:
    """Returns whether a constraint allows all tokens of a text."""
    tokens = llm.encode(text)
    return all(made.allowed(tokens[:at])[token] for at, token in enumerate(tokens))


def test_a_key_cannot_be_spelled_in_another_way(llm: LLM) -> None:
    """If a key is spelled with an escape, the grammar would treat it as another key. A parser would
    treat it as the same key, and the value of that key must be a number."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    made = constraint("json", schema, llm)
    assert may_begin(made, llm, '{"a": 1, "b": "\\n') and not may_begin(made, llm, '{"\\u')
    assert may_begin(constraint("json", {"type": "object"}, llm), llm, '{"a":"\\"')
    assert not may_begin(constraint("json", {"type": "object"}, llm), llm, '{"a":"\\u')
    only = constraint("json", {"const": "\x07"}, llm)  # can be written only as an escape
    assert may_begin(only, llm, '"\\u0007"')
    assert may_begin(constraint("regex", '"\\\\u00e9"', llm), llm, '"\\u00e9"')  # not our grammar


@pytest.mark.parametrize(
    ("schema", "begins", "digits"),
    [
        ({"type": "number"}, "-1.", 17),
        ({"type": "number"}, "1e-", 2),
        ({"type": "integer"}, "", 40),
        ({"type": "string", "format": "date-time"}, '"2026-01-02T03:04:05.', 9),
        ({"type": "string", "format": "time"}, '"03:04:05.', 9),
        ({"const": 1.5}, "1.", 1),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0.", 17),
    ],
)
def test_digits_end(llm: LLM, schema: dict[str, Any], begins: str, digits: int) -> None:
    """Some models write zeros for ever where zeros are allowed."""
    made = constraint("json", schema, llm)
    assert may_begin(made, llm, begins + "5" * digits) and not may_begin(
        made, llm, begins + "5" * (digits + 1)
    )
    text = {"type": "array", "items": {"type": "string"}}
    assert may_begin(constraint("json", text, llm), llm, '["1.' + "0" * 99)


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_regex": 5}, "not valid Unicode"),
        ({"guided_regex": "\ud800"}, "not valid Unicode"),
        ({"guided_regex": "(" * 50_000}, "unclosed group|nest"),
        ({"guided_json": "{"}, "not valid JSON"),
        ({"guided_json": []}, "give a JSON schema"),
        ({"guided_json": {"type": "text"}}, "Invalid type"),
        ({"guided_json": {"not": {}}}, "not"),
        ({"guided_json": {"enum": []}}, "Unsatisfiable"),
        ({"guided_json": {"minimum": float("nan")}}, "not plain JSON"),
        ({"guided_json": {"$ref": "http://localhost/schema"}}, "does not fetch"),
        ({"guided_json": nested(80)}, "nested too deeply"),
        ({"guided_json": nested(900)}, "nested too deeply"),
        ({"guided_json": {"type": "integer", "maximum": 10**400}}, "number out of range"),
        ({"guided_json": {"const": 10**400}}, "number out of range"),
        ({"guided_json": f'{{"multipleOf": 1{"0" * 5000}}}'}, "not valid JSON"),
        ({"guided_choice": []}, "at least one text"),
        ({"guided_choice": [1]}, "list of texts"),
        ({"guided_grammar": "start: other"}, "unknown name"),
        ({"guided_grammar": "root ::= ("}, "Lark's or GBNF's"),
        ({"guided_grammar": "root ::= " + "(" * 50_000}, "Lark's or GBNF's"),
        ({"guided_grammar": "start: " + "(" * 50_000}, "nested"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "several constraints"),
        ({"structured_outputs": {"json": {}, "regex": "b"}}, "several constraints"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "whitespace_pattern"),
        ({"structured_outputs": 5}, "not an object"),
        ({"format": "yaml"}, "format is unknown"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "several constraints"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "no schema"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_constraints_that_cannot_be_used_are_refused(
    llm: LLM, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(EESDError, match=words) as refused:
        constraint_of(body, llm)
    assert (
        str(refused.value).endswith(".")
        and "\n" not in str(refused.value)
        and len(str(refused.value)) < 400
    )


@pytest.mark.parametrize(
    ("kind", "value"), [("choice", ["aé"]), ("choice", ["é"]), ("grammar", "start: a\na: b\nb: a")]
)
def test_what_no_token_can_write_is_an_error_and_no_short_text(
    llm: LLM, kind: str, value: Any
) -> None:
    with pytest.raises(EESDError, match=r"no tokens|no text matches"):
        random_text(constraint(kind, value, llm), llm, 0)


class Words:
    """A vocabulary in the form that llguidance needs. It has EOS, and tokens of one to thirty
    letters like those of real vocabularies."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)
    tokens = (b"</s>", *(b"a" * count for count in range(1, 31)))

    def __call__(self, text: str) -> list[int]:
        return [1] * len(text)


def test_a_grammar_that_reads_a_text_in_too_many_ways_is_an_error() -> None:
    """Each mask would take longer than the previous mask, up to seconds, and all requests would
    wait for it."""
    vocabulary = LLTokenizer(TokenizerWrapper(Words()), len(Words.tokens), [0])
    made = GrammarConstraint("start: e\ne: e e | /[a-z]/", vocabulary, [0])
    with pytest.raises(ConstraintError, match="too expensive"):
        for count in range(100):
            made.allowed([1] * count)
    assert count > 10


def test_a_large_schema_is_no_error(llm: LLM) -> None:
    properties = {f"property_{i}": {"type": ["string", "number", "null"]} for i in range(490)}
    made = constraint("json", {"type": "object", "properties": properties}, llm)
    tokens = llm.encode('{"property_1": "hello", "property_77": 12.5, "property_400": null')
    for count in range(len(tokens)):
        assert made.allowed(tokens[:count])[tokens[count]]


def test_what_takes_too_much_is_an_error_wherever_it_is_found_out(llm: LLM) -> None:
    """The limit may be found while a mask is computed or while tokens are read. A failed matcher
    reports that it has stopped, which must not end the text."""
    made = constraint("regex", TOO_MUCH, llm)
    draw = random.Random(0)
    tokens = list[int]()
    with pytest.raises(ConstraintError, match="too expensive"):
        while len(tokens) < 2000:
            tokens.append(draw.choice(allowed(made, tokens)))
    assert 10 < len(tokens) < 2000
    for path in (tokens, tokens[:-1], [*tokens, tokens[0]], []):
        with pytest.raises(ConstraintError, match="too expensive"):
            made.allowed(path)
        with pytest.raises(ConstraintError, match="too expensive"):
            made.forced(path, 4)
    for ask in (GrammarConstraint.allowed, lambda made, path: made.forced(path, 4)):
        with pytest.raises(ConstraintError, match="too expensive"):
            ask(constraint("regex", TOO_MUCH, llm), [*tokens, *llm.encode("ab" * 1000)])


def test_a_long_text_is_read_once(llm: LLM) -> None:
    """Each call continues where the last call ended, so the time is not quadratic in the length of
    the text."""
    made = constraint("regex", "(ab)*", llm)
    tokens = list[int]()
    reads = list[int]()
    matcher = made._matcher

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            reads.append(len(tokens))
            return matcher.try_consume_tokens(tokens)

    made._matcher = Counting()  # type: ignore[assignment]
    for index in range(1500):
        made.allowed(tokens)
        made.allowed([*tokens, *llm.encode("ab"[index % 2])])
        tokens += llm.encode("ab"[index % 2])
    assert sum(reads) <= 2 * 1500


SENTENCEPIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


@pytest.mark.parametrize(
    ("decoder", "names"),
    [
        (SENTENCEPIECE, ["▁", "▁the", "a", "é", "<0xC3>", "<0xA9>", "▁▁"]),
        (decoders.ByteLevel(), ["Ġ", "Ġthe", "a", "Ã©", "Ã", "Ċ"]),
    ],
    ids=["sentencepiece", "byte level"],
)
def test_the_bytes_of_tokens_are_those_that_llguidance_reads_itself(
    tmp_path: Path, decoder: Any, names: list[str]
) -> None:
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(["<s>", "</s>", *names])}, [])
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = LLTokenizer(tokenizer.to_str(), eos_token=1)
    found = _Tokens(TextCodec(tmp_path), tokenizer.get_vocab_size(), 1)
    assert found.special_token_ids == [0, 1]
    assert found.tokens[2:] == [
        expected.decode_bytes([token]) for token in range(2, tokenizer.get_vocab_size())
    ]
