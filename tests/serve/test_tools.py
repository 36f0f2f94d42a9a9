"""Tests of function calling. They cover the tools in the prompt, required calls, and the parser
that finds calls in answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.chat_templates import TEMPLATES
from support.constrained import random_text, with_new_lines
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from eesd.common.errors import EESDError
from eesd.runtime.constraint import make_constraint
from eesd.runtime.llm import LLM, load
from eesd.runtime.request import Request, TokenOutput, Update
from eesd.runtime.text import TextCodec
from eesd.serve.grammar.harmony import MARKS, HarmonyParser
from eesd.serve.grammar.tool_calls import (
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    ToolDelta,
    ToolFormat,
    ToolParser,
)
from eesd.serve.grammar.tools import Tools, _in_words, _told, encode_chat, tools_of
from eesd.serve.openai.chat import Reader
from eesd.serve.openai.generations import Progress

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a city",
        "parameters": {
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
USER: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TURNS: list[dict[str, Any]] = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "20"},
]
FORMATS = [HERMES, LLAMA, MISTRAL]
CALL_TEXTS = {
    HERMES: (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "}</tool_call>\\""}}\n</tool_call>'
    ),
    LLAMA: ' {"name": "weather", "parameters": {"city": "}</tool_call>\\""}}',
    MISTRAL: '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "}</tool_call>\\""}}]',
}


@pytest.fixture(scope="module")
def llm(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(
        with_new_lines(engine, tmp_path_factory.mktemp("lines") / "plans"),
        "ort",
        speculation=None,
        threads=1,
    )


def codec_of(directory: Path, template: str, special: Sequence[str] = ()) -> TextCodec:
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": "</s>",
        "bos_token": "<s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(directory)


NAMED = {"type": "function", "function": {"name": "g"}}
FLAT = {"type": "function", "name": "h"}


def answer(parser: ToolParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content, and the name and the arguments of each call. They are assembled as a
    client would do it."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    return put_together(deltas)


def put_together(deltas: Sequence[ToolDelta]) -> tuple[str, list[tuple[str, str]]]:
    content = ""
    calls = list[dict[str, Any]]()
    for delta in (delta.to_dict() for delta in deltas):
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"arguments": "", **call["function"]})
            else:
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return content, [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("qwen25", HERMES),
        ("llama3_tools_date", LLAMA),
        ("mistral_v3", MISTRAL),
        ("smollm2", HERMES),
    ],
)
def test_the_format_is_that_of_the_template(
    tmp_path: Path, template: str, format: ToolFormat
) -> None:
    tools = tools_of({"tools": TOOLS}, codec_of(tmp_path, TEMPLATES[template]))
    assert tools is not None and tools.format is format and tools.choice == "auto"


@pytest.mark.parametrize(
    ("choice", "chosen", "names"),
    [
        ("any", "required", "fgh"),
        ({"type": "any"}, "required", "fgh"),
        ({"type": "auto"}, "auto", "fgh"),
        ({"type": "function", "name": "g"}, "g", "fgh"),
        ({"type": "tool", "name": "g"}, "g", "fgh"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [NAMED, FLAT]},
            },
            "required",
            "gh",
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, "auto", "g"),
        ({"type": "allowed_tools", "tools": []}, "has no tools", ""),
        ({"type": "allowed_tools", "tools": [NAMED], "mode": "never"}, "another mode", ""),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
            "not in tools",
            "",
        ),
        ({"type": "custom", "name": "f"}, "give none, auto, required", ""),
    ],
)
def test_choices_of_tools_in_the_forms_of_others(
    tmp_path: Path, choice: Any, chosen: str, names: str
) -> None:
    given = {
        "tools": [{"type": "function", "function": {"name": name}} for name in "fgh"],
        "tool_choice": choice,
    }
    codec = codec_of(tmp_path, TEMPLATES["qwen25"])
    if not names:
        with pytest.raises(EESDError, match=chosen):
            tools_of(given, codec)
        return
    tools = tools_of(given, codec)
    assert tools is not None and (tools.choice, "".join(tools.functions)) == (chosen, names)
    # If a required call is cut off, the answer has a part of a call, with and without streaming.
    cut = '<tool_call>\n{"name": "g", "arguments": {"a'
    found = answer(tools.parser(codec, streaming=False), [cut])
    assert found == (("", [("g", '{"a')]) if chosen != "auto" else (cut, []))


@pytest.mark.parametrize("template", ["qwen25", "llama3_tools_date", "mistral_v3"])
def test_calls_and_results_are_rendered_as_transformers_does(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send the arguments as text, but templates expect them as JSON."""
    codec = codec_of(tmp_path, TEMPLATES[template])
    rendered: list[str] = []
    monkeypatch.setattr(
        codec, "encode", lambda messages, tools, *_: rendered.append(codec.render(messages, tools))
    )
    as_json: dict[str, Any] = {
        **CALL,
        "function": {"name": "weather", "arguments": {"city": "Bern"}},
    }
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (tools_of({"tools": TOOLS}, codec), None):
        encode_chat(TURNS, tools, codec)
        expected = reference.apply_chat_template(
            [USER[0], {**TURNS[1], "tool_calls": [as_json]}, TURNS[2]],
            tools=TOOLS if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert rendered.pop() == expected


def test_a_model_whose_template_has_no_tools_is_told_in_words(tmp_path: Path) -> None:
    tools = tools_of({"tools": TOOLS}, codec_of(tmp_path, TEMPLATES["smollm2"]))
    call = {"id": "x", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "content": "20"},
        {"role": "tool", "content": [{"type": "text", "text": "21"}]},
    ]
    system, user, assistant, results = _told(_in_words(turns), tools)
    assert (
        system["content"].startswith("Be brief.\n\n")
        and json.dumps(WEATHER["function"]) in system["content"]
    )
    assert user == USER[0]
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"Wait.\n{written}"}
    expected = "<tool_response>\n20\n</tool_response>\n<tool_response>\n21\n</tool_response>"
    assert results == {"role": "user", "content": expected}
    assert _told(_in_words(USER), tools)[0]["role"] == "system"


def test_messages_without_tools_are_encoded_as_ever(llm: LLM) -> None:
    assert encode_chat(USER, None, llm.codec) == llm.encode(USER)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"weather", "now"}), ("weather", {"weather"})]
)
def test_required_calls_fit_their_parameters(
    llm: LLM, format: ToolFormat, choice: str, names: set[str]
) -> None:
    tools = Tools(tuple(TOOLS), choice, True, format)
    called = set()
    for seed in range(12):
        made = tools.constraint(llm)
        assert made is not None
        content, calls = answer(
            tools.parser(llm.codec, streaming=False), [random_text(made, llm, seed)]
        )
        assert not content and calls
        assert len(calls) == 1 or (choice == "required" and format is not LLAMA)
        for name, arguments in calls:
            called.add(name)
            parameters = tools.functions[name].get(
                "parameters", {"type": "object", "maxProperties": 0}
            )
            Draft202012Validator(parameters).validate(json.loads(arguments))
    assert called == names


def test_parallel_calls_can_be_forbidden(llm: LLM) -> None:
    tools = Tools(tuple(TOOLS), "required", False, HERMES)
    for seed in range(8):
        made = tools.constraint(llm)
        assert made is not None
        text = random_text(made, llm, seed)
        assert text.count("<tool_call>") == 1
        doubled = answer(tools.parser(llm.codec, streaming=False), [text + text])
        assert len(doubled[1]) == 1 and "<tool_call>" in doubled[0]


def test_nothing_is_constrained_when_the_model_may_choose(llm: LLM) -> None:
    assert Tools(tuple(TOOLS), "auto", True, HERMES).constraint(llm) is None


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    data=st.data(),
    format=st.sampled_from(FORMATS),
    streaming=st.booleans(),
    before=st.sampled_from(["", "Sure.\n", "a <b> [T"]),
)
def test_calls_are_found_however_the_text_is_cut(
    data: st.DataObject, format: ToolFormat, streaming: bool, before: str
) -> None:
    before = "" if format is LLAMA else before
    text = before + CALL_TEXTS[format]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = ToolParser(format, {"weather"}, streaming=streaming)
    assert answer(parser, pieces) == (
        before.rstrip(),
        [("weather", '{"city": "}</tool_call>\\""}')],
    )
    assert parser.calls == 1


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (
            HERMES,
            '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        (HERMES, '<tool_call>{"name": "f"}</tool_call> x', " x", [("f", "{}")]),
        (
            HERMES,
            (
                '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name": '
                '"g", "arguments": {}}\n</tool_call>'
            ),
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (
            LLAMA,
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": []}}',
            "",
            [("f", "{}"), ("g", '{"a": []}')],
        ),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        (
            MISTRAL,
            'So [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
            "So",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            MISTRAL,
            (
                '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}, '
                '"id": "x"}]'
            ),
            "",
            [("f", "{}"), ("g", "{}")],
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_other_ways_to_write_calls(
    format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]], streaming: bool
) -> None:
    for pieces in ([text], list(text)):
        assert answer(ToolParser(format, {"f", "g"}, streaming=streaming), pieces) == (
            content,
            calls,
        )


BARE = '{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}'
BARE_CALLS = [
    BARE,
    f"\n{BARE}\n",
    f"```json\n{BARE}\n```",
    f"```\n{BARE}\n```\n",
    f"<tools>\n{BARE}\n</tools>",
    f"<function_call> {BARE}",
    f"<json>{BARE}</json>",
    '{"name": "f", "parameters": {"a": 1}}',
]
"""These texts have one call each. Some models write these forms although their instructions ask for
another form."""


@pytest.mark.parametrize("text", [*BARE_CALLS, f"{{{BARE}}}", f"{{{BARE}}}}}"])
@pytest.mark.parametrize("format", [HERMES, MISTRAL], ids=lambda format: format.name)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_is_nothing_but_calls_needs_no_marks(
    format: ToolFormat, text: str, streaming: bool
) -> None:
    for pieces in ([text], list(text)):
        parser = ToolParser(format, {"f", "g"}, streaming=streaming)
        assert answer(parser, pieces) == ("", [("f", '{"a": 1}')])
        assert parser.calls == 1
    both = f'```json\n{BARE}\n{{"name": "g", "arguments": {{}}}}\n```'
    for two in (both, both.replace("}\n{", "},\n{").replace("json\n", "json\n[")):
        parser = ToolParser(format, {"f", "g"}, streaming=streaming)
        assert answer(parser, list(two)) == ("", [("f", '{"a": 1}'), ("g", "{}")])
    content, calls = answer(ToolParser(format, {"f", "g"}, streaming=streaming, most=1), [both])
    assert len(calls) == 1 and content.strip("\n`") == '{"name": "g", "arguments": {}}'


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    data=st.data(),
    text=st.one_of(
        st.sampled_from(BARE_CALLS).flatmap(
            lambda text: st.one_of(
                st.sampled_from([f"{text} is it", f"So: {text}", text.replace('"f"', '"h"')]),
                st.integers(0, text.rindex("}")).map(lambda end: text[:end]),
            )
        ),
        st.text(alphabet='`{}[]<>/:," \njsonametl1f', max_size=40),
    ),
)
def test_other_answers_are_returned_to_the_letter(data: st.DataObject, text: str) -> None:
    """The parser returns the text unchanged, however the text is split into pieces. This holds with
    and without streaming."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for streaming in (False, True):
        assert answer(ToolParser(HERMES, {"f", "g"}, streaming=streaming), pieces) == (text, [])


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    for text, held in {
        "The": "",
        "```python": "```",
        '{"city': '{"',
        '{"name": "fa': '{"name": "f',
        "<tools> No": "<tools> ",
        "``` x": "``` ",
    }.items():
        parser = ToolParser(HERMES, {"f"}, streaming=True)
        told = ["".join(delta.content for delta in parser.push(letter)) for letter in text]
        assert "".join(told[: len(held)]) == "" and told[len(held)] == text[: len(held) + 1]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_and_another_answer_may_come(llm: LLM, format: ToolFormat, parallel: bool) -> None:
    """Some answers have calls in the model's own form, and some have calls without marks. Other
    answers only begin like a call."""
    tools = Tools(tuple(TOOLS), "auto", parallel, format)
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["now", "x"]}, "age": {"const": 1}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    made = tools.constraint(llm, make_constraint("json", schema, llm))
    assert made is not None
    bare = f'{{"name": "weather", "{format.arguments}": {{"city": "Bern", "unit": "C"}}}}'
    for text in ('{"name": "now", "age": 1}', bare, CALL_TEXTS[format].strip()):
        tokens = llm.encode(text.replace("] [", "][").replace('</tool_call>\\"', "x"))
        assert all(made.allowed(tokens[:at])[token] for at, token in enumerate(tokens)), text
    for seed in range(12):
        text = random_text(made, llm, seed)
        content, calls = answer(tools.parser(llm.codec, streaming=False), list(text))
        if not calls:
            Draft202012Validator(schema).validate(json.loads(content))
        assert not (content and calls) and len(calls) <= (16 if parallel else 1)


NO_CALLS = {
    "an unknown function": (HERMES, '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'),
    "no JSON": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> tail'),
    "a missing bracket": (HERMES, 'So: <tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    "cut off": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1'),
    "arguments as a list": (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "words": (HERMES, "<tool_call>call f</tool_call>"),
    "the beginning of a tag": (HERMES, "a < b and <tool"),
    "blanks": (HERMES, " \n x \n "),
    "nothing": (HERMES, ""),
    "words before": (LLAMA, 'I call {"name": "f", "parameters": {}}'),
    "other JSON": (LLAMA, '{"city": "Bern"} is it'),
    "other JSON for Mistral": (MISTRAL, '[TOOL_CALLS] [{"city": "Bern"}]'),
    "words for Mistral": (MISTRAL, "[TOOL_CALLS] f is it"),
    "an unknown function for Mistral": (MISTRAL, '[TOOL_CALLS]h{"a": 1}'),
}


@pytest.mark.parametrize(("format", "text"), NO_CALLS.values(), ids=NO_CALLS)
def test_what_is_no_call_stays_content(format: ToolFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        assert answer(ToolParser(format, {"f", "g"}, streaming=False), pieces) == (text, [])


@pytest.mark.parametrize("pieces", [["\n<tool_call>\n"], ["\n<tool", "_call>"], ["<tool_"], ["\n"]])
@pytest.mark.parametrize("streaming", [True, False])
def test_the_beginning_of_a_forced_call_is_no_content(pieces: list[str], streaming: bool) -> None:
    """The answer was cut off there. If no call is required, the text may be meant as content."""
    assert answer(ToolParser(HERMES, {"f"}, streaming=streaming, forced=True), pieces) == ("", [])
    assert answer(ToolParser(HERMES, {"f"}, streaming=streaming), pieces) == ("".join(pieces), [])
    cut = [*pieces[:1], '<tool_call>{"name": "f", "arg'] if pieces == ["\n"] else [*pieces, '{"na']
    assert "{" in answer(ToolParser(HERMES, {"f"}, streaming=streaming, forced=True), cut)[0], (
        "what was written is not lost"
    )


def test_a_stream_tells_arguments_as_they_come() -> None:
    parser = ToolParser(HERMES, {"f"}, streaming=True)
    assert parser.push('<tool_call>{"name": "f", ') == []
    begin, arguments = parser.push('"arguments": {"a": "x')
    assert begin.name == "f" and begin.id.startswith("call_")
    assert arguments.arguments == '{"a": "x'
    assert [delta.arguments for delta in parser.push('y"}')] == ['y"}']
    assert parser.push("}\n</tool_call>") == [] and parser.finish() == []


def test_ids_are_unlike_and_short_for_mistral() -> None:
    ids = {format.call_id() for format in FORMATS for _ in range(50)}
    assert len(ids) == 150
    assert len(MISTRAL.call_id()) == 9 and MISTRAL.call_id().isalnum()


def test_marks_that_are_special_tokens_are_seen_and_written(tmp_path: Path) -> None:
    """A special token has no text, and no other tokens spell it."""
    codec = codec_of(tmp_path, TEMPLATES["mistral_v3"], special=["[TOOL_CALLS]"])
    tools = tools_of({"tools": TOOLS, "tool_choice": "required"}, codec)
    assert tools is not None and tools._grammar(codec, set()).startswith('start: <[3]> "["')
    reader = Reader(Progress(Request(tokens=[2])), tools, codec, streaming=False)
    deltas = reader.see(
        Update((TokenOutput(3, "", "verify"), TokenOutput(2, '[{"name": "now", "argu', "exit")))
    )
    deltas += reader.see(Update((), held='ments": {}}]', finish_reason="stop"))
    assert put_together(deltas) == ("", [("now", "{}")])


THOUGHT = "<|channel|>analysis<|message|>So < 5 <|"
HARMONY_CALL = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "<|e"}'
)
HARMONY_ANSWERS = {
    THOUGHT: ("So < 5 <|", "", []),
    f"{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>Hi <": ("So < 5 <|", "Hi <", []),
    f"{THOUGHT}<|end|><|start|>assistant{HARMONY_CALL}": (
        "So < 5 <|",
        "",
        [("weather", '{"city": "<|e"}')],
    ),
    f"{HARMONY_CALL}<|call|>": ("", "", [("weather", '{"city": "<|e"}')]),
    " to=functions.now<|channel|>commentary json<|message|>{}": ("", "", [("now", "{}")]),
    f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}": (
        "",
        "I look.",
        [("weather", '{"city": "<|e"}')],
    ),
    "<|channel|>commentary to=functions.other<|message|>{}": ("", "{}", []),
    "no <|channel|> at all": ("", "no <|channel|> at all", []),
}
"""Each answer of gpt-oss has its thoughts, its content and its calls."""


@pytest.mark.parametrize("text", HARMONY_ANSWERS)
@pytest.mark.parametrize("streaming", [True, False])
def test_messages_of_gpt_oss_are_read_however_the_text_is_cut(text: str, streaming: bool) -> None:
    for size in (1, 2, 7, len(text)):
        parser = HarmonyParser({"weather", "now"}, streaming)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in parser.push(piece, last=False)]
        deltas += parser.push("", last=True)
        thought = "".join(delta.thought for delta in deltas)
        said = put_together([delta for delta in deltas if not delta.thought])
        assert (thought, *said) == HARMONY_ANSWERS[text]
        assert parser.calls == len(said[1])


def test_a_call_of_gpt_oss_that_is_cut_off_is_content_of_an_answer() -> None:
    text = f"{HARMONY_CALL[:-1]}"
    parser = HarmonyParser({"weather"}, streaming=False)
    assert put_together(parser.push(text, last=True)) == ('{"city": "<|e"', [])
    assert parser.calls == 0


def test_gpt_oss_thinks_and_calls_with_special_tokens(tmp_path: Path) -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}<|start|><|channel|><|message|>"
    codec = codec_of(tmp_path, template, special=MARKS)
    found = {mark: codec.tokenizer.token_to_id(mark) for mark in MARKS}
    ids = {mark: token for mark, token in found.items() if token is not None}
    tools = tools_of({"tools": TOOLS, "tool_choice": "required"}, codec)
    assert tools is not None and tools.format is HARMONY and tools.most == 1
    begin, constrain, message = (ids[mark] for mark in MARKS[:3])
    rule = (
        f'call_1: <[{begin}]> "commentary to=functions.now " <[{constrain}]> "json" <[{message}]>'
    )
    assert rule in tools._grammar(codec, set())

    def tokens(*parts: str) -> tuple[TokenOutput, ...]:
        known = (
            TokenOutput(ids.get(part, 2), part * (part not in ids), "verify") for part in parts
        )
        return tuple(known)

    reader = Reader(Progress(Request(tokens=[2])), tools, codec, streaming=False)
    said = tokens("<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>")
    deltas = reader.see(Update(said))
    said = tokens("assistant", "<|channel|>", "commentary to=functions.now ", "<|message|>", "{}")
    deltas += reader.see(Update(said, finish_reason="stop"))
    assert deltas[0].thought == "Hm" and put_together(deltas[1:]) == ("", [("now", "{}")])
    assert reader.progress.finish_reason == "tool_calls"


def changed(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**WEATHER["function"], **function}}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": "x"}, "give a list"),
        ({"tools": [5]}, "Tool 1 is no function"),
        ({"tools": [{"type": "web_search"}]}, "Tool 1 is no function"),
        ({"tools": changed(name="a b")}, "Tool 1 has the name"),
        ({"tools": changed(name=None)}, "Tool 1 has the name"),
        ({"tools": changed(parameters=[])}, "parameters that are list"),
        ({"tools": changed(parameters={"type": "string"})}, "schema of an object"),
        ({"tools": [NOW, NOW]}, "same name"),
        ({"tools": [NOW] * 200}, "at most 128"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice is 'maybe'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "names 'x'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "there are no tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(llm: LLM, body: dict[str, Any], words: str) -> None:
    with pytest.raises(EESDError, match=words) as refused:
        tools_of(body, llm.codec)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "none"},
    ],
)
def test_requests_without_tools(llm: LLM, body: dict[str, Any]) -> None:
    assert tools_of(body, llm.codec) is None


def test_a_named_function_must_be_called(llm: LLM) -> None:
    tools = tools_of(
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
        llm.codec,
    )
    assert tools is not None and tools.choice == "now" and tools.most == 1


def test_a_strict_function_may_have_no_unknown_keywords(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (None, False):
        Tools(
            tuple(changed(parameters=schema, strict=strict)), "required", True, HERMES
        ).constraint(llm)
    with pytest.raises(EESDError, match="uniqueItems"):
        Tools(tuple(changed(parameters=schema, strict=True)), "required", True, HERMES).constraint(
            llm
        )


@pytest.mark.parametrize("calls", ["x", [5], [{"id": "x"}], [{"function": {"arguments": "{}"}}]])
def test_calls_that_come_back_damaged_are_refused(llm: LLM, calls: Any) -> None:
    with pytest.raises(EESDError, match="tool_calls"):
        encode_chat([*USER, {"role": "assistant", "tool_calls": calls}], None, llm.codec)


def test_arguments_that_are_no_json_come_back_as_they_were() -> None:
    call = {"id": "x", "function": {"name": "weather", "arguments": '{"city": '}}
    _, told = _in_words([*USER, {"role": "assistant", "tool_calls": [call]}])
    assert json.dumps('{"city": ') in told["content"]
