"""Tests of constrained output and function calling with the real batch and the real server.
Drafting changes no token."""

import json
import logging
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openai import BadRequestError
from support.constrained import SCHEMAS, TOO_MUCH
from support.serving import Served, events

from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.constraint import make_constraint as constraint
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.request import Constraint, Request, Update

WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}},
        "required": ["city"],
    },
}
TOOLS: Any = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
USER: Any = [{"role": "user", "content": "Who?"}]


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=1.5, top_p=0.9, seed=6),
]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(schema=SCHEMAS, sampling=st.sampled_from(SAMPLINGS))
def test_drafting_changes_no_token_of_a_constrained_text(
    lined: Served, schema: dict[str, Any], sampling: Sampling
) -> None:
    llm = lined.serving.service.llm
    service = lined.serving.service
    tokens = llm.encode("Say: ")

    def text(draft: bool) -> list[int]:
        made = constraint("json", schema, llm)
        request = Request(
            tokens=tokens, sampling=sampling, max_new_tokens=400, draft=draft, constraint=made
        )
        completion = service.generate(request)
        assert completion.finish_reason == "stop"
        Draft202012Validator(schema).validate(json.loads(completion.text))
        return completion.tokens

    assert text(draft=True) == text(draft=False)


def test_one_constraint_serves_several_requests_at_once(lined: Served) -> None:
    llm = lined.llm
    service = lined.serving.service
    found = dict[int, list[int]]()
    shared = constraint("json", SCHEMA, llm)
    done = threading.Semaphore(0)

    def request(seed: int, made: Constraint) -> Request:
        sampling = Sampling(temperature=1.0, seed=seed)
        return Request(tokens=llm.encode("x"), sampling=sampling, constraint=made)

    def see(seed: int, update: Update) -> None:
        found.setdefault(seed, []).extend(output.token for output in update.tokens)
        if update.finish_reason:
            done.release()

    for seed in range(3):
        service.submit(request(seed, shared), partial(see, seed))
    assert all(done.acquire(timeout=60) for _ in range(3))
    for seed in range(3):
        alone = service.generate(request(seed, constraint("json", SCHEMA, llm)))
        assert alone.finish_reason == "stop" and found[seed] == alone.tokens
        assert service.generate(request(seed, shared)).tokens == alone.tokens


def test_forced_tokens_are_drafted_and_accepted(lined: Served) -> None:
    """Forced tokens need no draft steps, and hardly any rounds."""
    llm = lined.llm
    # The cost of calls on this machine has no effect.
    service = Service(llm, BatchOptions(max_rows=1, levels=16))
    made = constraint("choice", ["a sentence that can only go on in one way"], llm)
    completion = service.generate(
        Request(tokens=llm.encode("x"), max_new_tokens=100, constraint=made)
    )
    service.close()
    assert completion.text == "a sentence that can only go on in one way"
    assert completion.stats.rounds < len(completion.tokens) / 2


def test_a_constraint_goes_before_min_tokens(lined: Served) -> None:
    """A complete text is not extended with tokens that the constraint forbids."""
    found = lined.complete("x", guided_choice=["yes"], min_tokens=10, max_tokens=20)["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("yes", "stop")
    found = lined.complete("x", guided_regex="[ab]{1,15}", min_tokens=10, max_tokens=20)["choices"][
        0
    ]
    assert 10 <= len(found["text"]) <= 15 and set(found["text"]) <= {"a", "b"}


def test_the_client_gets_json_that_fits_its_schema(lined: Served) -> None:
    for temperature in (0, 1.2):
        found = lined.openai.chat.completions.create(
            model="",
            messages=USER,
            temperature=temperature,
            seed=3,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            },
        )
        choice = found.choices[0]
        assert choice.finish_reason == "stop" and choice.message.content
        Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_reaches_the_client(lined: Served, choice: Any, stream: bool) -> None:
    """The call is the same with and without streaming. Its arguments fit the schema, and the client
    can answer the call."""
    create = lined.openai.chat.completions.create
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": 4,
    }
    if stream:
        name = ""
        arguments = ""
        content = ""
        reason = None
        for chunk in create(model="", messages=USER, stream=True, **options):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or []:
                assert call.index == 0 and call.function
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        found = create(model="", messages=USER, **options).choices[0]
        assert found.message.tool_calls and len(found.message.tool_calls) == 1
        call_made: Any = found.message.tool_calls[0]
        name = call_made.function.name
        arguments = call_made.function.arguments
        content = found.message.content or ""
        reason = found.finish_reason
        answer: Any = {"role": "tool", "tool_call_id": call_made.id, "content": "20"}
        assert create(
            model="", messages=[*USER, found.message, answer], max_tokens=4, tools=TOOLS
        ).choices
    assert reason == "tool_calls" and not content
    assert name in ("weather", "now")
    Draft202012Validator(WEATHER["parameters"] if name == "weather" else {"const": {}}).validate(
        json.loads(arguments)
    )


def test_a_model_that_need_not_call_answers_in_words(lined: Served) -> None:
    found = lined.openai.chat.completions.create(
        model="", messages=USER, tools=TOOLS, max_tokens=8
    ).choices[0]
    assert (
        found.message.content and not found.message.tool_calls and found.finish_reason == "length"
    )


def bodies(choice: str) -> dict[str, dict[str, Any]]:
    """Returns a request that has tools and a schema for the answer, for each API."""
    strict = {"name": "person", "schema": SCHEMA, "strict": True}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    anthropic = [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters")}
        for tool in TOOLS
    ]
    kind = {"required": "any"}.get(choice, choice)
    return {
        "/v1/chat/completions": {
            "messages": USER,
            "tools": TOOLS,
            "tool_choice": choice,
            "response_format": {"type": "json_schema", "json_schema": strict},
        },
        "/v1/responses": {
            "input": "Who?",
            "tools": flat,
            "tool_choice": choice,
            "text": {"format": {"type": "json_schema", **strict}},
        },
        "/v1/messages": {
            "messages": USER,
            "max_tokens": 600,
            "tools": anthropic,
            "tool_choice": {"type": kind},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    }


def parts(answer: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """Returns the text and the calls of an answer from any API."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        return message["content"] or "", [
            (call["name"], json.loads(call["arguments"])) for call in calls
        ]
    items = answer["output"] if "output" in answer else answer["content"]
    calls = [
        (item["name"], item["input"] if "input" in item else json.loads(item["arguments"]))
        for item in items
        if item["type"] in ("function_call", "tool_use")
    ]
    texts = [part for item in items for part in [item, *item.get("content", ())] if "text" in part]
    return "".join(part["text"] for part in texts), calls


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_with_tools_and_a_schema_an_answer_is_calls_or_fits(lined: Served, choice: str) -> None:
    """The rule is the same in each API. ``required`` allows only calls, and ``none`` allows only
    the schema."""
    kinds = set[bool]()
    (mark,) = lined.llm.encode("<")
    for seed in range(4):
        for path, body in bodies(choice).items():
            asked = {**body, "temperature": 1.4, "seed": seed, "parallel_tool_calls": False}
            if choice == "auto" and seed % 2:  # the model would call each time
                asked["logit_bias"] = {str(mark): -100}
            answer = lined.post(path, asked).json()
            assert parts(lined.post(path, {**asked, "draft": False}).json()) == parts(answer)
            text, calls = parts(answer)
            kinds.add(bool(calls))
            for name, arguments in calls:
                wanted = WEATHER["parameters"] if name == "weather" else {"maxProperties": 0}
                Draft202012Validator(wanted).validate(arguments)
            if calls:
                assert not text
            else:
                Draft202012Validator(SCHEMA).validate(json.loads(text))
    assert kinds == {"auto": {True, False}, "required": {True}, "none": {False}}[choice]


def test_a_stream_tells_the_same_calls_and_answers(lined: Served) -> None:
    body = {**bodies("auto")["/v1/chat/completions"], "temperature": 1.4}
    for seed in range(6):
        text, calls = parts(lined.post("/v1/chat/completions", {**body, "seed": seed}).json())
        with lined.http.stream(
            "POST", "/v1/chat/completions", json={**body, "seed": seed, "stream": True}
        ) as response:
            chunks = events(response.iter_lines())[:-1]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        told = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
        assert [call["name"] for call in told if "name" in call] == [name for name, _ in calls]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_answer_says_which_keywords_were_ignored(
    lined: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ignored keywords are named in the answer's body, in a header, and in the log."""
    caplog.set_level(logging.INFO, "eesd.serve")
    schema = {"enum": ["a"], "not": {"const": "b"}, "uniqueItems": True}
    wanted = {"json_schema": {"name": "x", "schema": schema}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"response_format": {"type": "json_schema", **wanted}},
        "/v1/responses": {
            "input": "x",
            "text": {"format": {"type": "json_schema", **wanted["json_schema"]}},
        },
        "/v1/messages": {
            "max_tokens": 9,
            "tools": [
                {"name": "f", "input_schema": {"type": "object", "not": {}, "uniqueItems": True}}
            ],
            "tool_choice": {"type": "any"},
        },
    }
    body = bodies[path] if path == "/v1/responses" else {**bodies[path], "messages": USER}
    response = lined.post(path, body)
    assert response.json()["ignored_keywords"] == ["not", "uniqueItems"]
    assert response.headers["x-ignored-keywords"] == "not, uniqueItems"
    with lined.http.stream("POST", path, json={**body, "stream": True}) as stream:
        assert stream.headers["x-ignored-keywords"] == "not, uniqueItems"
        assert '"ignored_keywords":["not","uniqueItems"]' in stream.read().decode()
    lined.idle()
    # Another test's last request may be logged late.
    facts = [record.facts for record in caplog.records if hasattr(record, "facts")]
    told = [fact.get("ignored_keywords") for fact in facts]
    assert told.count(["not", "uniqueItems"]) == 2
    assert "x-ignored-keywords" not in lined.post("/v1/completions", {"prompt": "a"}).headers


def test_a_text_that_no_token_can_write_is_an_error(lined: Served) -> None:
    for stream in (False, True):  # nothing has been sent yet, so a stream has a status, too
        response = lined.post(
            "/v1/completions", {"prompt": "a", "guided_choice": ["é"], "stream": stream}
        )
        assert response.status_code == 400 and "no tokens" in response.json()["error"]["message"]


def test_a_constraint_that_takes_too_much_on_the_way_is_a_400(lined: Served) -> None:
    with pytest.raises(BadRequestError, match="too expensive") as refused:
        lined.openai.chat.completions.create(
            model="", messages=USER, extra_body={"guided_regex": TOO_MUCH}
        )
    assert (
        refused.value.type == "invalid_request_error" and refused.value.code == "constraint_failed"
    )
    assert isinstance(refused.value.body, dict) and refused.value.body.keys() == {
        "message",
        "type",
        "param",
        "code",
    }
    lined.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_whose_constraint_takes_too_much_ends_with_the_error(
    lined: Served, path: str
) -> None:
    body = {
        "prompt": "a",
        "messages": USER,
        "guided_regex": TOO_MUCH,
        "max_tokens": 400,
        "stream": True,
    }
    with lined.http as http, http.stream("POST", path, json=body) as response:
        *chunks, last = events(response.iter_lines())
    assert response.status_code == 200 and len(chunks) > 2
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert last.keys() == {"error"} and "too expensive" in last["error"]["message"]
    assert (last["error"]["type"], last["error"]["code"]) == (
        "invalid_request_error",
        "constraint_failed",
    )


def test_the_others_go_on_where_a_constraint_fails(
    lined: Served, caplog: pytest.LogCaptureFixture
) -> None:
    llm = lined.serving.service.llm
    service = lined.serving.service
    failed = list[Update]()
    other = list[Update]()
    done = threading.Barrier(3)

    def submit(updates: list[Update], request: Request) -> None:
        def see(update: Update) -> None:
            updates.append(update)
            if update.finish_reason:
                threading.Thread(target=done.wait).start()

        service.submit(request, see)

    made = constraint("regex", TOO_MUCH, llm)
    submit(failed, Request(tokens=llm.encode("a"), max_new_tokens=400, constraint=made))
    submit(other, Request(tokens=llm.encode("b"), max_new_tokens=200, ignore_eos=True))
    done.wait(60)
    assert failed[-1].finish_reason == "error" and failed[-1].refused
    wanted = lined.llm.generate("b", max_new_tokens=200, ignore_eos=True).tokens
    assert [output.token for update in other for output in update.tokens] == wanted
    assert all(record.levelno < logging.WARNING for record in caplog.records), (
        "a client's mistake is no failure of the server"
    )
