"""Tests of ``/v1/responses``, which OpenAI's client calls. Its answers equal the answers of chat
completions."""

import json
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from support.constrained import TOO_MUCH
from support.serving import Served

from eesd.runtime.decoding.sampling import Sampling

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
COUNT = 12


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2, 3]


@pytest.fixture
def client(lined: Served) -> OpenAI:
    return lined.openai


def raw_events(lined: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream, after a check that they are numbered."""
    found = lined.events("/v1/responses", body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Returns the types of the events without their common prefix. Several deltas in a row become
    one entry."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [
        name
        for at, name in enumerate(names)
        if not (name.endswith("delta") and names[at - 1] == name)
    ]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_a_response_is_the_answer_of_a_chat(
    lined: Served, client: OpenAI, sampling: Sampling
) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hi there"}]
    expected = lined.llm.generate(messages, sampling, max_new_tokens=COUNT)
    options: dict[str, Any] = {
        "model": lined.serving.model_name,
        "input": "Hi there",
        "instructions": "be brief",
        "max_output_tokens": COUNT,
        "temperature": sampling.temperature,
        "metadata": {"team": "a"},
        "extra_body": {"seed": sampling.seed, "top_k": 0, "sampling_method": "coupled"},
    }
    found = client.responses.create(**options)
    assert (
        found.output_text == expected.text
        and found.metadata == {"team": "a"}
        and found.store is False
    )
    assert found.usage is not None and found.usage.output_tokens == len(expected.tokens)
    assert (
        found.usage.input_tokens == len(lined.llm.encode(messages))
        and found.usage.input_tokens_details.cached_tokens >= 0
    )
    assert found.temperature == sampling.temperature and found.instructions == "be brief"
    if expected.finish_reason == "length":
        assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
    with client.responses.stream(**options) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert text == expected.text


def test_a_stream_has_openais_events_in_their_order(lined: Served) -> None:
    body = {"input": "Hi", "guided_choice": ["yes it is"], "temperature": 0}
    events = raw_events(lined, body)
    item = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
    ]
    assert kinds(events) == ["created", "in_progress", *item, "output_item.done", "completed"]
    assert [event["response"]["status"] for event in events if "response" in event] == [
        "in_progress",
        "in_progress",
        "completed",
    ]
    last = events[-1]["response"]
    assert (
        last["output"] == [events[-2]["item"]]
        and last["output"][0]["content"][0]["text"] == "yes it is"
    )
    assert (
        last["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
        and "speculative_decoding" in last["metrics"]
    )
    for event in events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event, strict=True)
    assert last["id"] == events[0]["response"]["id"] and events[0]["response"]["output"] == []
    whole = lined.post("/v1/responses", body).json()
    Response.model_validate(whole, strict=True)
    assert (
        whole["output"][0]["content"] == last["output"][0]["content"]
        and whole.keys() == last.keys()
    )


def test_a_text_that_is_cut_off_is_incomplete(lined: Served) -> None:
    events = raw_events(lined, {"input": "Hi", "max_output_tokens": 3, "ignore_eos": True})
    assert kinds(events)[-1] == "incomplete"
    last = events[-1]["response"]
    assert (last["status"], last["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert last["output"][0]["status"] == "incomplete" and last["usage"]["output_tokens"] == 3


def test_parse_gives_an_object(client: OpenAI) -> None:
    found = client.responses.parse(model="", input="Who?", text_format=Person, temperature=1.0)
    assert isinstance(found.output_parsed, Person)
    with client.responses.stream(model="", input="Who?", text_format=Person) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Person) and final.status == "completed"


def test_any_object_can_be_asked_for(client: OpenAI) -> None:
    grammar = {"structured_outputs": {"regex": "[0-9]{3}"}}
    assert client.responses.create(model="", input="x", extra_body=grammar).output_text.isdigit()
    found = client.responses.create(
        model="", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=30
    )
    assert found.output_text.startswith("{")
    assert client.responses.create(
        model="", input="x", text={"format": {"type": "text"}}, max_output_tokens=2
    ).output


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_reaches_the_client_and_can_be_answered(
    client: OpenAI, choice: Any, stream: bool
) -> None:
    options: dict[str, Any] = {
        "model": "",
        "input": "Who?",
        "tools": TOOLS,
        "parallel_tool_calls": False,
    }
    options |= {"temperature": 1.0, "extra_body": {"seed": 4}, "tool_choice": choice}
    if stream:
        with client.responses.stream(**options) as events:
            told = [
                event.delta
                for event in events
                if event.type == "response.function_call_arguments.delta"
            ]
            found: Any = events.get_final_response()
        assert "".join(told) == found.output[0].arguments
    else:
        found = client.responses.create(**options)
    (call,) = found.output
    assert call.type == "function_call" and call.status == found.status == "completed"
    Draft202012Validator(WEATHER if call.name == "weather" else {"const": {}}).validate(
        json.loads(call.arguments)
    )
    answered: Any = [
        {"role": "user", "content": "Who?"},
        call.model_dump(exclude={"parsed_arguments"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "20"},
    ]
    assert client.responses.create(
        model="", input=answered, tools=TOOLS, max_output_tokens=4
    ).output


def test_a_stream_of_calls_has_openais_events(lined: Served) -> None:
    grammar = (
        'start: "ab" "\\n<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"city\\": '
        '\\"x\\"}}\\n</tool_call>"'
    )
    events = raw_events(
        lined, {"input": "Who?", "tools": TOOLS, "guided_grammar": grammar, "temperature": 0}
    )
    text = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    begins = ["output_item.added", "content_part.added"]
    assert kinds(events) == [
        "created",
        "in_progress",
        *begins,
        *text,
        "output_item.added",
        *call,
        "completed",
    ]
    message, made = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == "ab" and (made["name"], made["arguments"]) == (
        "weather",
        '{"city": "x"}',
    )
    assert [event["output_index"] for event in events if "output_index" in event][-1] == 1
    for event in events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event, strict=True)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("Hi", [{"role": "user", "content": "Hi"}]),
        (
            [
                {"role": "developer", "content": "a"},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "b"}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "c"},
                        {"type": "input_text", "text": "d"},
                    ],
                },
            ],
            [
                {"role": "system", "content": "a"},
                {"role": "user", "content": "b"},
                {"role": "user", "content": "c\nd"},
            ],
        ),
        (
            [
                {"role": "user", "content": "a"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "b", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "call_id": "1",
                    "name": "f",
                    "arguments": '{"city": "x"}',
                },
                {
                    "type": "function_call",
                    "call_id": "2",
                    "name": "g",
                    "arguments": '{"city": "y"}',
                },
                {"type": "function_call_output", "call_id": "1", "output": "c"},
                {
                    "type": "function_call_output",
                    "call_id": "2",
                    "output": [{"type": "input_text", "text": "d"}],
                },
            ],
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "b",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": {"city": "x"}}},
                        {"function": {"name": "g", "arguments": {"city": "y"}}},
                    ],
                },
                {"role": "tool", "content": "c"},
                {"role": "tool", "content": "d"},
            ],
        ),
    ],
)
def test_items_are_messages(lined: Served, given: Any, messages: Any) -> None:
    found = lined.post(
        "/v1/responses", {"input": given, "max_output_tokens": 2, "temperature": 0}
    ).json()
    assert found["usage"]["input_tokens"] == len(lined.llm.encode(messages))
    expected = lined.llm.generate(messages, Sampling(), max_new_tokens=2)
    assert found["output"][0]["content"][0]["text"] == expected.text


def test_log_probabilities_of_all_tokens(lined: Served) -> None:
    body: dict[str, Any] = {
        "input": "Hi",
        "max_output_tokens": COUNT,
        "ignore_eos": True,
        "temperature": 0,
        "top_logprobs": 2,
    }
    body["include"] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    whole = lined.post("/v1/responses", body).json()["output"][0]["content"][0]["logprobs"]
    assert len(whole) == COUNT and all(len(token["top_logprobs"]) == 2 for token in whole)
    events = raw_events(lined, body)
    (done,) = [
        event["logprobs"] for event in events if event["type"] == "response.output_text.done"
    ]
    told = [
        token
        for event in events
        if event["type"] == "response.output_text.delta"
        for token in event["logprobs"]
    ]
    assert done == whole and told == done[: len(told)] and told


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"previous_response_id": "resp_1"}, "keeps no responses"),
        ({"conversation": "conv_1"}, "keeps no conversations"),
        ({"background": True}, "background is not supported"),
        ({"prompt": {"id": "p"}}, "no stored prompts"),
        ({"truncation": "auto"}, "truncation 'auto'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "file_search"}},
            "tool_choice of type 'file_search'",
        ),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "guided_regex": "a",
            },
            "give one",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "'input_image'.*text only",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "'input_file'.*text only",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "store: false"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "type 'web_search_call'"),
        ({"input": [{"type": "message", "content": "x"}]}, "item 1 has no role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "without call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "without call_id"),
        ({"input": [{"role": "user"}]}, "without content"),
        ({"input": []}, "input cannot be used"),
        ({"n": 2}, "n is not supported"),
        ({"n_predict": []}, "max_tokens cannot be used"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "no schema"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]},
            "format of type 'grammar'",
        ),
        ({"input": [{"type": "custom_tool_call", "name": "a"}]}, "without call_id, name or input"),
        ({"reasoning": {"effort": "much"}}, "reasoning cannot be used"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_what_cannot_be_done_is_a_clear_400(
    client: OpenAI, body: dict[str, Any], words: str
) -> None:
    for stream in (False, True):
        given: Any = {"model": "", "input": "Hi", "stream": stream}
        with pytest.raises(BadRequestError, match=words) as refused:
            client.responses.create(**given, extra_body=body)
        assert refused.value.type == "invalid_request_error"


def test_a_custom_tool_is_called_with_text(lined: Served) -> None:
    """The custom tools are defined in the way that Codex defines them. The model sees a function
    with one text parameter."""
    tools = [{"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}}]
    choice = {"type": "custom", "name": "patch"}
    body = {"input": "Hi", "tools": tools, "tool_choice": choice, "temperature": 1.0, "seed": 1}
    limits = {"max_output_tokens": 300, "guided_regex": None}
    events = raw_events(lined, {**body, **limits})
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "patch")
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    for event in events:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event, strict=True)
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == call["input"] == events[-3]["input"]
    whole = lined.post("/v1/responses", {**body, **limits}).json()["output"][0]
    assert whole["input"] == call["input"] and whole["status"] == call["status"]
    cut = lined.post("/v1/responses", {**body, "max_output_tokens": 48}).json()["output"][0]
    assert (cut["status"], cut["input"]) == ("incomplete", "")


def test_calls_of_custom_tools_come_back(lined: Served) -> None:
    """The prompt equals the prompt of a function that is called with the same text."""
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'}
    arguments = json.dumps({"input": 'a "b"'})
    function = {"type": "function_call", "call_id": "c", "name": "patch", "arguments": arguments}
    prompts = []
    for call, result in (
        (custom, output),
        (function, {**output, "type": "function_call_output"}),
    ):
        turns = [{"role": "user", "content": "Hi"}, call, result]
        response = lined.post("/v1/responses", {"input": turns, "max_output_tokens": 1})
        assert response.status_code == 200, response.text
        prompts.append(response.json()["usage"]["input_tokens"])
    assert prompts[0] == prompts[1]


def test_what_changes_nothing_is_named(lined: Served) -> None:
    body = {
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "k",
    }
    response = lined.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1, **body})
    assert response.status_code == 200, response.text
    named = set(response.headers["x-ignored-fields"].split(", "))
    assert named == {"text.verbosity", "include", "reasoning.summary", "prompt_cache_key"}


def test_what_changes_nothing_is_accepted(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "store": True,
        "truncation": "disabled",
        "user": "u",
        "service_tier": "auto",
        "background": False,
    }
    options |= {
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "medium"},
        "include": [],
        "prompt_cache_key": "k",
    }
    found = client.responses.create(model="", input="Hi", max_output_tokens=2, **options)
    assert (
        found.store is False
        and found.user == "u"
        and found.truncation == "disabled"
        and found.output
    )


def test_a_failure_is_an_error_or_the_end_of_the_stream(lined: Served, client: OpenAI) -> None:
    failing: Any = {"guided_regex": TOO_MUCH, "max_output_tokens": 400}
    with pytest.raises(BadRequestError, match="too expensive"):
        client.responses.create(model="", input="Who?", extra_body=failing)
    events = raw_events(lined, {"input": "Who?", **failing})
    assert kinds(events)[-2:] == ["error", "failed"] and "output_text.delta" in kinds(events)
    error = events[-2]
    last = events[-1]["response"]
    assert error["code"] == "constraint_failed" and "too expensive" in error["message"]
    assert (
        last["status"] == "failed"
        and last["error"]["code"] == "invalid_prompt"
        and last["output"][0]["content"][0]["text"]
    )
    for event in events[-2:]:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event, strict=True)
    lined.idle()
