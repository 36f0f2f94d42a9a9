"""Tests of Anthropic's ``/v1/messages``. Its answers equal the answers of chat completions."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.constrained import TOO_MUCH, with_new_lines
from support.serving import Served, served

from eesd.runtime.decoding.sampling import Sampling

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
}
TOOLS = [{"name": "weather", "input_schema": WEATHER}]
HI: Any = [{"role": "user", "content": "Hi"}]
PATH = "/v1/messages"


def ask(lined: Served, **body: Any) -> dict[str, Any]:
    response = lined.post(PATH, {"messages": HI, "max_tokens": 12, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def stream(lined: Served, **body: Any) -> list[dict[str, Any]]:
    return lined.events(PATH, {"messages": HI, "max_tokens": 12, "temperature": 0, **body})


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the answer that a client assembles from the events of a stream."""
    answer: dict[str, Any] = events[0]["message"]
    assert (
        events[0]["type"] == "message_start"
        and answer["content"] == []
        and events[-1]["type"] == "message_stop"
    )
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(answer["content"])
            answer["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block = answer["content"][event["index"]]
            delta = event["delta"]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["json"] += delta.get("partial_json", "")
        else:
            assert event["type"] == "content_block_stop"
    assert events[-2]["type"] == "message_delta"
    return {**answer, **events[-2]["delta"], "output": events[-2]["usage"]["output_tokens"]}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_an_answer_is_that_of_generate(lined: Served, sampling: Sampling) -> None:
    chat = [{"role": "system", "content": "be brief"}, *HI]
    expected = lined.llm.generate(chat, sampling, max_new_tokens=12)
    body: dict[str, Any] = {
        "system": "be brief",
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }
    answer = ask(lined, **body)
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    assert (answer["type"], answer["role"], answer["model"]) == (
        "message",
        "assistant",
        lined.serving.model_name,
    )
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    assert (
        answer["stop_reason"] == reasons[expected.finish_reason] and answer["stop_sequence"] is None
    )
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(lined.llm.encode(chat))
    assert usage["output_tokens"] == len(expected.tokens)
    found = rebuilt(stream(lined, **body))
    assert (
        found["content"][0]["text"] == expected.text
        and found["stop_reason"] == answer["stop_reason"]
    )
    assert found["output"] == usage["output_tokens"]
    parts = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    assert ask(lined, **{**body, "system": parts})["content"] == answer["content"]


def test_a_stop_sequence_is_named(lined: Served) -> None:
    text = lined.llm.generate(HI, max_new_tokens=12).text
    for answer in (
        ask(lined, stop_sequences=[text[5]]),
        rebuilt(stream(lined, stop_sequences=[text[5]])),
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[5])
        assert answer["content"][0]["text"] == text[: text.index(text[5])]


def test_a_tool_is_used_and_answered(lined: Served) -> None:
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = {"tools": TOOLS, "max_tokens": 200, "seed": 4, "temperature": 1.0}
    answer = ask(lined, tool_choice=choice, **body)
    (use,) = answer["content"]
    assert (answer["stop_reason"], use["type"], use["name"]) == ("tool_use", "tool_use", "weather")
    Draft202012Validator(WEATHER).validate(use["input"])
    assert (
        json.loads(rebuilt(stream(lined, tool_choice=choice, **body))["content"][0]["json"])
        == use["input"]
    )
    several = ask(lined, tool_choice={"type": "any"}, **{**body, "max_tokens": 120})
    assert several["content"][0]["type"] == "tool_use" and several["stop_reason"] in (
        "max_tokens",
        "tool_use",
    )
    result = {
        "type": "tool_result",
        "tool_use_id": use["id"],
        "content": [{"type": "text", "text": "20"}],
    }
    turns = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    chat: list[Any] = [*HI, {"role": "assistant", "content": ""}]
    chat[1]["tool_calls"] = [
        {
            "id": use["id"],
            "type": "function",
            "function": {"name": "weather", "arguments": use["input"]},
        }
    ]
    chat += [
        {"role": "tool", "tool_call_id": use["id"], "content": "20"},
        {"role": "user", "content": "So?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    count = lined.post(f"{PATH}/count_tokens", {"messages": turns, "tools": TOOLS}).json()
    assert count == {"input_tokens": len(lined.llm.codec.encode(chat, tools))}


def test_a_last_message_of_the_assistant_goes_on(lined: Served) -> None:
    said = [*HI, {"role": "assistant", "content": "Well"}]
    found = lined.post(
        "/v1/chat/completions", {"messages": said, "continue_final_message": True, "max_tokens": 12}
    ).json()
    assert (
        ask(lined, messages=said)["content"][0]["text"] == found["choices"][0]["message"]["content"]
    )


def test_a_form_of_the_output(lined: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = ask(
        lined, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=40
    )
    assert json.loads(answer["content"][0]["text"]) == {"a": 1}


def counted(server: Served, **body: Any) -> int:
    response = server.post(f"{PATH}/count_tokens", {"messages": HI, **body})
    assert response.status_code == 200, response.text
    found: int = response.json()["input_tokens"]
    return found


def test_the_line_of_claude_code_that_changes_leaves_kept_prefixes(lined: Served) -> None:
    """The digits of this line differ in each request, and the line precedes all other text."""
    salt = {"cache_salt": "billing", "max_tokens": 1}
    rest = {"type": "text", "text": "be brief " * 20}
    lines = [f"x-anthropic-billing-header: cc_version=2.1; cch={n};" for n in ("0a1b2", "fffff")]
    usages = [
        ask(lined, system=[{"type": "text", "text": line}, rest], **salt)["usage"] for line in lines
    ]
    assert usages[0]["cache_read_input_tokens"] == 0
    assert usages[1]["cache_read_input_tokens"] > 8 * usages[1]["input_tokens"]
    plain = counted(lined, system=rest["text"])
    assert counted(lined, system=[{"type": "text", "text": lines[0]}, rest]) == plain
    assert counted(lined, system=f"{lines[0]}\n{rest['text']}") == plain
    assert counted(lined, system=lines[0]) == counted(lined)


def test_context_management_clears_thoughts(engine: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.reasoning_content | default('') }};{% endfor %}"
    )
    answers = [
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "b"}],
        }
        for thought in ("hm", "hmm")
    ]
    turns = [*HI, answers[0], *HI, answers[1], *HI]
    with served(with_new_lines(engine, tmp_path / "plans", template)) as server:

        def texts(keep: Any) -> int:
            edit = {"type": "clear_thinking_20251015", **keep}
            return counted(server, messages=turns, context_management={"edits": [edit]})

        every = counted(server, messages=turns)
        one = {"type": "thinking_turns", "value": 1}
        assert texts({"keep": "all"}) == texts({"keep": {**one, "value": 2}}) == every
        assert texts({}) == texts({"keep": one}) == every - len("hm")
        assert texts({"keep": {**one, "value": 0}}) == every - len("hmhmm")
        body = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}
        assert ask(server, messages=turns, **body)["usage"]["input_tokens"] == every - len("hm")


def test_results_of_tools_are_not_cleared(lined: Served) -> None:
    """If the input is below the trigger, there is nothing to clear. If the input exceeds the
    trigger, the request is refused."""
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    turns = [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ]

    def asked(trigger: dict[str, Any] | None) -> int:
        edit = {"type": "clear_tool_uses_20250919", "trigger": trigger}
        body = {"messages": [*HI, *turns], "context_management": {"edits": [edit]}}
        response = lined.post(PATH, {"max_tokens": 1, **body})
        assert response.status_code == 200 or "would clear" in response.json()["error"]["message"]
        return response.status_code

    assert asked(None) == asked({"type": "input_tokens", "value": 10_000}) == 200
    assert asked({"type": "tool_uses", "value": 1}) == 200
    assert asked({"type": "tool_uses", "value": 0}) == 400
    assert asked({"type": "input_tokens", "value": 3}) == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "text only",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
            "no id, name or input",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "deny WebSearch"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "input_schema"),
        ({"context_management": {"edits": [{"type": "compact_2026"}]}}, "compact_2026"),
        ({"context_management": {"edits": [{}]}}, "context_management cannot be used"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "a",
                                "content": [{"type": "image", "source": {}}],
                            }
                        ],
                    }
                ]
            },
            "A result of a tool has a block of type 'image'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "not in tools"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"n": 2}, "n and return_token_ids"),
        ({"think": []}, "reasoning_effort cannot be used"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"guided_regex": "("}, "unclosed group"),
    ],
)
def test_what_cannot_be_done_is_a_clear_400(
    lined: Served, body: dict[str, Any], words: str
) -> None:
    response = lined.post(PATH, {"messages": HI, "max_tokens": 4, **body})
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert (
        words in response.json()["error"]["message"]
        and response.json()["error"]["type"] == "invalid_request_error"
    )


def test_a_stream_that_fails_ends_with_the_error(lined: Served) -> None:
    *events, last = stream(lined, guided_regex=TOO_MUCH, max_tokens=400)
    assert (
        len(events) > 2 and last["type"] == "error" and "too expensive" in last["error"]["message"]
    )
    assert last["error"]["type"] == "invalid_request_error"
    lined.idle()
