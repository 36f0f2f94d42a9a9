"""Bad requests: Tests that errors have OpenAI's form and a message of one sentence, and that the
status is never 500."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.serving import Held, Served, events, served

from eesd.runtime.batch.scheduler import BatchOptions
from eesd.serve.http.options import ServeOptions
from eesd.serve.openai import params
from eesd.serve.openai.schemas import CompletionBody

MESSAGES = [{"role": "user", "content": "Hi"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    with served(engine, ServeOptions(max_prompt_tokens=100, max_n=8)) as running:
        yield running


def refused(response: Any, status: int, *words: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["param"] == param
    assert "\n" not in error["message"] and error["message"].endswith("."), error
    for word in words:
        assert word in error["message"], error


@pytest.mark.parametrize(
    ("more", "param", "word"),
    [
        ({"prompt": None}, "prompt", "prompt"),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": [[]]}, "prompt", "prompt"),
        ({"prompt": [1.5]}, "prompt", "integer"),
        ({"prompt": ["a", 1]}, "prompt", "prompt"),
        ({"prompt": [True]}, "prompt", "prompt"),
        ({"prompt": [97]}, "prompt", "97"),
        ({"prompt": [-1]}, "prompt", "greater"),
        ({"prompt": "a" * 101}, None, "at most 100"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": -2}, "max_tokens", "greater"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": 2**70}, "max_tokens", "less"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"temperature": -0.1}, "temperature", "greater"),
        ({"temperature": 1e309}, "temperature", "finite"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater"),
        ({"top_k": -2}, "top_k", "greater"),
        ({"min_p": 1}, "min_p", "less"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater"),
        ({"seed": -(2**70)}, "seed", "greater"),
        ({"n": 0}, "n", "greater"),
        ({"n": 9}, "n", "at most 8"),
        ({"prompt": ["a"] * 3, "n": 3}, "n", "at most 8"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"model": 5}, "model", "string"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less"),
        ({"frequency_penalty": "much"}, "frequency_penalty", "number"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "less"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "pattern"),
        ({"logit_bias": {"97": 1}}, "logit_bias", "97"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"suffix": "x"}, None, "no tokens for filling in the middle"),
        ({"suffix": "x", "prompt": [5]}, "suffix", "text prompts"),
        ({"logit_bias": [[5]]}, "logit_bias", "dictionary"),
        ({"logit_bias": [["Hi", 1]]}, "logit_bias", "pattern"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "least 1"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids", "97"),
        ({"bad_words": "x"}, "bad_words", "list"),
        ({"repeat_penalty": 200}, "repetition_penalty", "less"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "not supported"),
        ({"think": True}, "think", "not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "not supported"),
        ({"options": {"num_ctx": 5}}, "options", "not supported"),
        ({"typical_p": 0.9}, "typical_p", "not supported"),
        ({"mirostat": 2}, "mirostat", "not supported"),
        ({"dry_multiplier": 0.8}, "dry_multiplier", "not supported"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size", "not supported"),
        ({"do_sample": False}, "do_sample", "not supported"),
        ({"extra_body": {"top_k": 1}}, "extra_body", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"stop_token_ids": [97]}, "stop_token_ids", "97"),
        ({"stop_token_ids": 5}, "stop_token_ids", "list"),
        ({"add_special_tokens": 5}, "add_special_tokens", "boolean"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ],
)
def test_a_completion_that_cannot_be_made(
    server: Served, more: dict[str, Any], param: str | None, word: str
) -> None:
    content = json.dumps({"prompt": "a", **more})
    with server.http as http:
        response = http.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
    refused(response, 400, word, param=param)


@pytest.mark.parametrize(
    ("more", "param", "word"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": [{"content": "a"}]}, "messages", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            None,
            "text part without text",
        ),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, None, "at most 100"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"add_special_tokens": True}, "add_special_tokens", "not supported"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "give one",
        ),
        ({"chat_template_kwargs": {"messages": []}}, None, "chat_template_kwargs has messages"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "dictionary"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"web_search_options": {}}, "web_search_options", "not supported"),
        ({"think": "high", "reasoning_effort": "low"}, "think", "not supported"),
        ({"response_format": {"type": "xml"}}, None, "response_format"),
        ({"guided_regex": "("}, None, "unclosed group"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "Tool 1"),
    ],
)
def test_a_chat_that_cannot_be_answered(
    server: Served, more: dict[str, Any], param: str | None, word: str
) -> None:
    refused(server.post(CHAT, {"messages": MESSAGES, **more}), 400, word, param=param)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"5", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "a", "x": ' + b'{"a":' * 100 + b"1" + b"}" * 101, "nested too deeply"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_request(server: Served, content: bytes, word: str) -> None:
    with server.http as http:
        response = http.post(
            COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
        )
    refused(response, 400, word)


@pytest.mark.parametrize("item", ["a", 1.5, [], None])
@pytest.mark.parametrize("good", [1, "b", [1]])
def test_a_list_is_refused_at_its_first_wrong_item(good: Any, item: Any) -> None:
    """If there were a message for each item and each form of a prompt, they would take seconds and
    gigabytes."""
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate(
            {
                "prompt": [*[good] * 1000, item]
                if type(good) is not type(item)
                else [item, {}] * 1000
            }
        )
    assert caught.value.error_count() <= 6


def test_only_json_is_read(server: Served) -> None:
    """A page of another site can make a browser post text, but not JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        with server.http as http:
            response = http.post(
                COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": kind}
            )
        refused(response, 400, "application/json")
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "a, b"])
def test_a_coding_that_is_not_read_is_named(server: Served, coding: str) -> None:
    content = gzip.compress(b'{"prompt": "a"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    with server.http as http:
        refused(http.post(COMPLETIONS, content=content, headers=headers), 415, "Content-Encoding")
        plain = {**headers, "Content-Encoding": "Identity"}
        body = b'{"prompt": "a", "max_tokens": 1}'
        assert http.post(COMPLETIONS, content=body, headers=plain).status_code == 200


def test_other_paths_methods_and_models(server: Served) -> None:
    with server.http as http:
        refused(http.get("/v1/nothing"), 404, "/openapi.json")
        refused(http.get(COMPLETIONS), 405, "Not Allowed")
        refused(http.get("/docs"), 404)
        for path in ("/v1/models/", "/health/"):  # a redirect could lead to plain HTTP
            refused(http.get(path), 404, "/openapi.json")
        refused(http.post(f"{COMPLETIONS}/", json={"prompt": "a"}), 404, "/openapi.json")
        refused(http.get("/v1/models/other"), 404, "'other'", param="model")
    refused(server.post(COMPLETIONS, {"prompt": "a", "model": "gpt"}), 404, "'gpt'", param="model")
    with pytest.raises(openai.NotFoundError):
        server.openai.chat.completions.create(
            model="gpt", messages=[{"role": "user", "content": "a"}]
        )


def test_tokens_that_do_not_exist(server: Served) -> None:
    refused(server.post("/detokenize", {"tokens": [97]}), 400, "97 tokens", param="tokens")
    refused(server.post("/detokenize", {"tokens": [2**70]}), 400, param="tokens")
    for body in ({"prompt": [97]}, {"prompt": [[5], [999_999_999_999, 3]], "echo": True}):
        refused(server.post("/v1/completions", body), 400, "97 tokens", param="prompt")
    refused(server.post("/tokenize", {}), 400, "prompt or messages", param="prompt")


def test_an_error_in_a_stream_has_a_status(server: Served) -> None:
    """Nothing has been sent yet, so a stream that cannot begin is an ordinary error."""
    refused(server.post(COMPLETIONS, {"prompt": "a" * 200, "stream": True}), 400, "at most 100")
    refused(server.post(COMPLETIONS, {"prompt": [97], "stream": True}), 400, "97", param="prompt")


TEXT = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["\ud800", "\x00", "\u202e\u2066", "\ufeff", "a\u0300" * 20]
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(TEXT, TEXT, TEXT)
def test_hostile_unicode_is_text_or_refused(
    server: Served, prompt: str, stop: str, other: str
) -> None:
    body = {
        "prompt": prompt,
        "stop": [stop],
        "max_tokens": 4,
        "echo": True,
        "logprobs": 1,
        "user": other,
        other: other,
    }
    chat = {
        "messages": [{"role": other, "content": prompt, other: stop}],
        "max_tokens": 4,
        "model": other,
    }
    for path, value in ((COMPLETIONS, body), (CHAT, chat), ("/tokenize", {"prompt": prompt})):
        with server.http as http:
            content = json.dumps(value)
            response = http.post(
                path,
                content=content,
                headers={"Content-Type": "application/json", "X-Request-Id": "a b"},
            )
        assert response.status_code in (200, 400, 404), response.text
        response.json()


def test_a_full_queue_is_a_429_with_a_time(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(params, "constraint_of", lambda *_: held)
    body = {"messages": MESSAGES, "max_tokens": 5, "stream": True, "ignore_eos": True}
    with served(engine, batch=BatchOptions(max_rows=1, max_queue=1)) as server, server.http as http:
        with http.stream("POST", CHAT, json=body) as running:
            assert held.reached.wait(30)
            with http.stream("POST", CHAT, json=body) as waiting:
                response = server.post(CHAT, body)
                refused(response, 429)
                assert int(response.headers["retry-after"]) >= 1
                with pytest.raises(openai.RateLimitError):
                    server.openai.completions.create(model="", prompt="a")
                held.release()
                for stream in (running, waiting):
                    assert events(stream.iter_lines())[-1] == "[DONE]"
        assert server.post(CHAT, {**body, "stream": False}).status_code == 200
