"""Tests of ``/v1/chat/completions``, which OpenAI's client calls."""

from pathlib import Path
from typing import Any

import pytest
from support.constrained import SHORT_TEMPLATE, with_new_lines
from support.engine_dirs import record
from support.serving import Served, events, served
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from eesd.runtime.decoding.sampling import Sampling

MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "Hi there"},
]
COUNT = 24


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)])
def test_an_answer_is_that_of_generate(server: Served, sampling: Sampling) -> None:
    expected = server.llm.generate(MESSAGES, sampling, max_new_tokens=COUNT)
    create = server.openai.chat.completions.create
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_completion_tokens": COUNT,
    }
    options |= {
        "model": server.serving.model_name,
        "messages": MESSAGES,
        "extra_body": {"return_token_ids": True},
    }
    answer = create(**options)
    choice: Any = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.token_ids == expected.tokens and choice.finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(server.llm.encode(MESSAGES))
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    assert (
        chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    )
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [*[None] * (len(reasons) - 1), expected.finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_the_raw_stream_begins_with_the_role_and_ends_with_done(server: Served) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": COUNT,
        "stream": True,
        "n": 2,
        "temperature": 0.8,
        "seed": 3,
    }
    with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        *chunks, done = events(stream.iter_lines())
    roles = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(role["index"], role["delta"]) for role in roles] == [
        (n, {"role": "assistant", "content": ""}) for n in range(2)
    ]
    assert done == "[DONE]" and "metrics" in chunks[-1]
    for number in range(2):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == number]
        expected = server.llm.generate(
            MESSAGES, Sampling(temperature=0.8, seed=3).of_text(0, number), max_new_tokens=COUNT
        )
        assert "".join(part["delta"].get("content", "") for part in parts) == expected.text
        assert parts[-1]["delta"] == {} and parts[-1]["finish_reason"] == expected.finish_reason


@pytest.mark.parametrize("content", ["Hi there", [{"type": "text", "text": "Hi there"}]])
def test_a_content_may_have_parts(server: Served, content: Any) -> None:
    found = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": content, "name": None}]}
    ).json()
    expected = server.llm.generate([{"role": "user", "content": "Hi there"}], max_new_tokens=1000)
    assert found["choices"][0]["message"]["content"] == expected.text


def test_log_probabilities_name_each_token_and_its_bytes(server: Served) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": COUNT,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
    }
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]
    content = whole["logprobs"]["content"]
    expected = server.llm.generate(MESSAGES, Sampling(), max_new_tokens=COUNT)
    assert len(content) == len(expected.tokens)
    text = b"".join(bytes(item["bytes"]) for item in content if not item["token"].startswith("<"))
    assert text.decode().replace("</s>", "") == whole["message"]["content"].replace("<", "")
    for item in content:
        assert len(item["top_logprobs"]) == 2 and item["top_logprobs"][0]["token"] == item["token"]
        assert (
            item["logprob"]
            == item["top_logprobs"][0]["logprob"]
            >= item["top_logprobs"][1]["logprob"]
        )
    with server.http.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True}
    ) as stream:
        *chunks, _ = events(stream.iter_lines())
    parts = [(chunk["choices"][0].get("logprobs") or {}).get("content", []) for chunk in chunks]
    assert [item for part in parts for item in part] == content


def test_max_completion_tokens_goes_first(server: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "max_completion_tokens": 3, "ignore_eos": True}
    assert server.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 3


def test_tokenize_shows_what_the_model_sees(server: Served) -> None:
    found = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert found["tokens"] == server.llm.encode(MESSAGES) and found["count"] == len(found["tokens"])
    found = server.post("/tokenize", {"prompt": "Hi there"}).json()
    assert found["tokens"] == server.llm.encode("Hi there")
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Hi there"}


def test_tokenize_sees_tools_and_efforts_as_a_chat_does(engine: Path, tmp_path: Path) -> None:
    template = SHORT_TEMPLATE + "{{ reasoning_effort | default('none') }}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {"messages": MESSAGES, "tools": [tool], "reasoning_effort": "medium"}
    with served(with_new_lines(engine, tmp_path / "plans", template)) as server:
        chat = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()
        found = server.post("/tokenize", {**body, "return_token_strs": True}).json()
        assert found["count"] == chat["usage"]["prompt_tokens"] == len(found["tokens"])
        vocabulary = server.llm.codec.tokenizer
        assert found["token_strs"] == [vocabulary.id_to_token(token) for token in found["tokens"]]
        assert "".join(found["token_strs"]).startswith("[weather]")
        less = server.post("/tokenize", {**body, "tool_choice": "none"}).json()
        assert less["count"] == found["count"] - len("[weather]") and "token_strs" not in less
        response = server.post("/tokenize", {**body, "tools": [{"type": "x"}]})
        assert response.status_code == 400 and "no function" in response.json()["error"]["message"]


def test_a_window_of_penalties_is_neutral_without_penalties(server: Served) -> None:
    """Open WebUI sends Ollama's default window of 64 tokens."""
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    expected = server.post("/v1/chat/completions", body).json()["choices"]
    for window in (64, 0, -1):
        found = server.post("/v1/chat/completions", {**body, "repeat_last_n": window}).json()
        assert found["choices"] == expected
    for penalty in ("repeat_penalty", "presence_penalty", "frequency_penalty"):
        asked = {**body, penalty: 1.1, "repeat_last_n": 64}
        response = server.post("/v1/chat/completions", asked)
        assert response.status_code == 400 and "all tokens" in response.json()["error"]["message"]
        asked["repeat_last_n"] = -1
        assert server.post("/v1/chat/completions", asked).status_code == 200


def test_fields_that_change_nothing_are_named(server: Served) -> None:
    """A header names each ignored field whose name can be written in a header. Supported fields are
    not named."""
    unread = {"user": "u", "verbosity": "low", "metadata": {}, "a\r\nb": 1, "\u00ff": 1, "": 1}
    read = {"tools": [], "response_format": {"type": "text"}, "best_of": 1, "typical_p": 1}
    body = {"messages": MESSAGES, "max_tokens": 1, **unread, **read}
    for more in ({}, {"stream": True}):
        response = server.post("/v1/chat/completions", body | more)
        assert response.headers["x-ignored-fields"] == "user, verbosity, metadata"
    plain = {"prompt": "a", "max_tokens": 1, "tools": [], "guided_regex": "a"}
    response = server.post("/v1/completions", plain)
    assert response.headers["x-ignored-fields"] == "tools"
    del plain["tools"]
    assert "x-ignored-fields" not in server.post("/v1/completions", plain).headers


def test_special_tokens_of_the_tokenizer_can_be_left_out(engine_copy: Path) -> None:
    """lm_eval needs this to cut prompts with the server's tokenizer."""
    file = engine_copy / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(file))
    record(engine_copy, "tokenizer.json")
    with served(engine_copy) as server, server.http as http:
        bos, *rest = server.llm.encode("def")
        assert bos == 1 and len(rest) == 3
        for special, expected in ((False, rest), (True, [bos, *rest]), (None, [bos, *rest])):
            body = {"prompt": "def", "add_special_tokens": special}
            assert server.post("/tokenize", body).json()["tokens"] == expected
            choice = server.complete(**body, return_token_ids=True, max_tokens=1)["choices"][0]
            assert choice["prompt_token_ids"] == expected
        assert http.get("/tokenizer_info").json() == {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": None,
        }
        assert server.post("/tokenize", {"prompt": "</s>", "add_special_tokens": False}).json()[
            "tokens"
        ] == [2]
