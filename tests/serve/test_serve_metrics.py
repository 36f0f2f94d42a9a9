"""What Prometheus and the log are told."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.serving import Held, Served, eventually, served

from eesd.serve.http.observe import JSONFormatter, TextFormatter
from eesd.serve.openai import params

BODY: dict[str, Any] = {
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def test_counters_agree_with_answers(server: Served) -> None:
    names = (
        "prompt_tokens",
        "generation_tokens",
        *(f"spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens")),
    )
    before = {name: server.metric(f"vllm:{name}_total") for name in names}
    lengths = server.metric("vllm:request_generation_tokens_sum")
    answers = [server.complete(prompt, **BODY) for prompt in ("abc", ["a b", "a b"], "import")]
    ids, text = (answers[0]["choices"][0][name] for name in ("token_ids", "text"))
    for at in range(1, 40, 3):  # ends within drafts
        answers.append(server.complete("abc", **BODY | {"stop_token_ids": [ids[at]]}))
        answers.append(server.complete("abc", **BODY | {"stop": text[at : at + 3]}))
        answers.append(server.complete("abc", **BODY | {"max_tokens": at}))
    found = {name: server.metric(f"vllm:{name}_total") - before[name] for name in names}
    assert (
        server.metric("vllm:request_generation_tokens_sum") - lengths == found["generation_tokens"]
    )
    for answer in answers:
        one = answer["metrics"]["speculative_decoding"]
        new = [len(choice["token_ids"]) for choice in answer["choices"]]
        assert one["num_accepted_draft_tokens"] <= sum(new) == answer["usage"]["completion_tokens"]
    spec = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert found == {
        "prompt_tokens": sum(answer["usage"]["prompt_tokens"] for answer in answers),
        "generation_tokens": sum(answer["usage"]["completion_tokens"] for answer in answers),
        "spec_decode_num_drafts": sum(one["num_spec_steps"] for one in spec),
        "spec_decode_num_draft_tokens": sum(one["num_draft_tokens"] for one in spec),
        "spec_decode_num_accepted_tokens": sum(one["num_accepted_draft_tokens"] for one in spec),
    }
    assert found["spec_decode_num_accepted_tokens"] > 0
    positions = [
        server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at))
        for at in range(40)
    ]
    assert sum(positions) == server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert positions == sorted(positions, reverse=True)


def test_each_request_is_timed_and_ends_once(server: Served) -> None:
    def count(name: str) -> float:
        return server.metric(f"vllm:{name}_seconds_count")

    before = [count(name) for name in ("time_to_first_token", "e2e_request_latency")]
    length, stop = (
        server.metric("vllm:request_success_total", finished_reason=reason)
        for reason in ("length", "stop")
    )
    text = server.complete("abc", n=2, **BODY)["choices"][0]["text"]
    server.complete("abc", stop=text[3:5], **BODY)
    after = [count(name) for name in ("time_to_first_token", "e2e_request_latency")]
    assert after == [value + 3 for value in before] and count("inter_token_latency") > 0
    assert server.metric("vllm:request_success_total", finished_reason="length") == length + 2
    assert server.metric("vllm:request_success_total", finished_reason="stop") == stop + 1


def test_gauges_show_what_runs(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(params, "constraint_of", lambda *_: held)
    with served(engine) as server, server.http as http:
        assert (
            server.metric("vllm:num_requests_running")
            == server.metric("vllm:num_requests_waiting")
            == 0
        )
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "abc", "stream": True, **BODY}
        ) as stream:
            assert held.reached.wait(30)
            assert (
                server.metric("vllm:num_requests_running") == 1
                and server.metric("vllm:kv_cache_usage_perc") > 0
            )
            held.release()
            stream.read()
        server.idle()
        assert server.metric("vllm:num_requests_running") == 0


def test_the_log_has_a_line_for_a_request(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eesd.serve")
    caplog.handler.setFormatter(JSONFormatter())
    response = server.post(
        "/v1/completions", {"prompt": "abc", **BODY}, headers={"X-Request-Id": "mine-1"}
    )
    assert response.headers["x-request-id"] == "mine-1"

    # uvicorn's lines have the id, too, where their level lets them through.
    def lines() -> list[dict[str, Any]]:
        every = map(json.loads, caplog.text.splitlines())
        return [
            line
            for line in every
            if line["logger"] == "eesd.serve" and line.get("request_id") == "mine-1"
        ]

    eventually(lambda: bool(lines()))  # the line is written when the answer has been sent
    (line,) = lines()
    assert line["level"] == "info" and line["finish_reasons"] == ["length"]
    facts = {name: line[name] for name in ("path", "status", "prompt_tokens", "completion_tokens")}
    assert facts == {
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 3,
        "completion_tokens": 200,
    }
    hostile = server.post("/v1/completions", {}, headers={"X-Request-Id": "a b\x7f"})
    assert re.fullmatch("[0-9a-f]{32}", hostile.headers["x-request-id"])
    caplog.handler.setFormatter(TextFormatter())
