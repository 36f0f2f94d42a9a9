"""Tests of the metrics for Prometheus and of the log."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.serving import Held, Served, eventually, served

import eesd
from eesd.runtime.batch.scheduler import BatchOptions
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


TIMES = (
    *("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"),
    *("request_prefill_time", "request_decode_time", "request_inference_time"),
    "request_time_per_output_token",
)


def test_every_number_is_recounted(engine: Path) -> None:
    """The test computes the numbers again from the answers of all routes. Some requests have
    several choices or prompts, and some score a prompt."""
    with served(engine, batch=BatchOptions(levels=3)) as server:
        expected = asked(server)
        server.idle()
        found = samples(server.http.get("/metrics").text)
    durations = {
        name: value
        for name, value in found.items()
        if name.startswith(tuple(f"vllm:{time}_seconds" for time in TIMES))
    }
    counts = {name: value for name, value in durations.items() if name.endswith("_count")}
    texts = expected["vllm:request_generation_tokens_count"]
    assert len(counts) == len(TIMES) and all(value >= 0 for value in durations.values())
    several = sum(1 for tokens in expected.pop("lengths") if tokens > 1)
    assert counts.pop("vllm:request_time_per_output_token_seconds_count") == several
    between = counts.pop("vllm:inter_token_latency_seconds_count")
    assert set(counts.values()) == {texts}
    updates = found.pop("vllm:iteration_tokens_total_count")
    assert between > 0
    assert updates >= found.pop("eesd:rounds_total") > 0
    assert found.pop("eesd:drafted_levels") >= 0
    cached = found["vllm:prefix_cache_hits_total"]
    assert found["vllm:prompt_tokens_cached_total"] == cached > 0
    computed = found["vllm:prefix_cache_queries_total"] - cached
    # A scored prompt is not looked up in the cache. If a prompt is only scored, the token is
    # dropped.
    scored = expected.pop("scored")
    tokens = expected["vllm:generation_tokens_total"]
    assert found["vllm:iteration_tokens_total_sum"] == computed + scored + tokens + 1
    rest = found.keys() - durations.keys() - expected.keys()
    assert rest == {
        "vllm:iteration_tokens_total_sum",
        *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        "vllm:prompt_tokens_cached_total",
    }
    assert {name: found[name] for name in expected} == expected


def samples(text: str) -> dict[str, float]:
    """Returns the values in /metrics by their names and labels. The values of the process, the
    buckets and the creation times are left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name.startswith("process_") or one.name.endswith(("_bucket", "_created")):
                continue
            more = {k: v for k, v in one.labels.items() if k not in ("model_name", "engine")}
            name = one.name + "".join(f" {label}={value}" for label, value in sorted(more.items()))
            found[name] = one.value
            if one.name.startswith("vllm:"):
                assert one.labels["engine"] == "0"
    return found


def asked(server: Served) -> dict[str, Any]:
    """Send requests on all routes. Return the expected values of /metrics."""
    hi: Any = [{"role": "user", "content": "Hi"}]
    short = {"temperature": 0, "ignore_eos": True}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "abcabc" * 12, "max_tokens": 30}),
        ("/v1/completions", {"prompt": "abcabc" * 12, "max_tokens": 20}),
        ("/v1/completions", {"prompt": "import os", "n": 3, "max_tokens": 7, "seed": 1}),
        ("/v1/completions", {"prompt": ["a b", "import"], "n": 2, "max_tokens": 9}),
        ("/v1/completions", {"prompt": "def f", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": "def f", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": hi, "max_tokens": 12}),
        ("/v1/responses", {"input": "Hi there", "max_output_tokens": 12}),
        ("/v1/messages", {"messages": hi, "max_tokens": 5}),
    ]
    answers = [(path, body, server.post(path, {**short, **body}).json()) for path, body in bodies]
    assert server.post("/v1/completions", {"prompt": []}).status_code == 400
    assert server.post("/v1/nothing", {}).status_code == 404
    prompts = list[int]()
    lengths = list[int]()
    limits = list[int]()
    longest = list[int]()
    choices = list[int]()
    drafting = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
    for _, body, answer in answers:
        usage = answer["usage"]
        n = body.get("n", 1)
        groups = 1 if isinstance(body.get("prompt", ""), str) else len(body["prompt"])
        inputs = usage.get("prompt_tokens", usage.get("input_tokens"))
        inputs += usage.get("cache_read_input_tokens", 0)
        outputs = usage.get("completion_tokens", usage.get("output_tokens"))
        prompts += [inputs] * n if groups == 1 else [len("a b"), len("import")] * n
        # These texts run to their limit.
        lengths += [outputs // (n * groups)] * n * groups
        longest += [outputs // (n * groups)] * groups
        limits += [max(outputs // (n * groups), 1)] * n * groups
        choices += [n] * groups
        for name, value in answer["metrics"]["speculative_decoding"].items():
            if name in drafting:
                drafting[name] += value
    routes = [path for path, _, _ in answers]
    spec = "vllm:spec_decode_num"
    positions = {
        f"{spec}_accepted_tokens_per_pos_total position={at}": float(
            sum(
                sum(answer["metrics"]["speculative_decoding"]["acceptance_histogram"][at + 1 :])
                for _, _, answer in answers
            )
        )
        for at in range(3)
    }
    sums = {
        "request_prompt_tokens": prompts,
        "request_generation_tokens": lengths,
        "request_max_num_generation_tokens": longest,
        "request_params_max_tokens": limits,
        "request_params_n": choices,
    }
    return {
        **{f"vllm:{name}_sum": float(sum(values)) for name, values in sums.items()},
        **{f"vllm:{name}_count": float(len(values)) for name, values in sums.items()},
        "vllm:prompt_tokens_total": float(sum(prompts)),
        "vllm:generation_tokens_total": float(sum(lengths)),
        f"{spec}_drafts_total": float(drafting["num_spec_steps"]),
        f"{spec}_draft_tokens_total": float(drafting["num_draft_tokens"]),
        f"{spec}_accepted_tokens_total": float(drafting["num_accepted_draft_tokens"]),
        **{name: value for name, value in positions.items() if value},
        "vllm:request_success_total finished_reason=length": float(len(lengths)),
        **{
            f"eesd:http_requests_total route={path} status=200": float(routes.count(path))
            for path in set(routes)
        },
        **{
            f"http_requests_total handler={path} method=POST status=2xx": float(routes.count(path))
            for path in set(routes)
        },
        "eesd:http_requests_total route=/v1/completions status=400": 1.0,
        "eesd:http_requests_total route=other status=404": 1.0,
        "http_requests_total handler=/v1/completions method=POST status=4xx": 1.0,
        "http_requests_total handler=other method=POST status=4xx": 1.0,
        f"eesd:build_info version={eesd.__version__}": 1.0,
        "vllm:engine_sleep_state sleep_state=awake": 1.0,
        (
            "vllm:cache_config_info block_size=1 enable_prefix_caching=True "
            f"num_gpu_blocks={server.serving.service.slots}"
        ): 1.0,
        "vllm:num_requests_running": 0.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:num_requests_waiting_by_reason reason=capacity": 0.0,
        "vllm:kv_cache_usage_perc": 0.0,
        "vllm:num_preemptions_total": 0.0,
        "lengths": lengths,
        "scored": len("def f") - 1,
    }


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

    # uvicorn's lines have the id, too, if their level is enabled.
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
