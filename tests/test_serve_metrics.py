"""What Prometheus, the log and a trace are told."""

import gzip
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.serving import Held, Served, eventually, served

from eesd.serve.http.observe import JSONFormatter, TextFormatter
from eesd.serve.openai import params

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "examples/serving/grafana.json"
BODY = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    with served(engine) as running:
        yield running


def test_counters_agree_with_answers(server: Served) -> None:
    names = (
        "prompt_tokens",
        "generation_tokens",
        *(f"spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens")),
    )
    before = {name: server.metric(f"vllm:{name}_total") for name in names}
    answers = [server.complete(prompt, **BODY) for prompt in ("abc", ["a b", "a b"], "import")]
    found = {name: server.metric(f"vllm:{name}_total") - before[name] for name in names}
    spec = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert found == {
        "prompt_tokens": sum(answer["usage"]["prompt_tokens"] for answer in answers),
        "generation_tokens": sum(answer["usage"]["completion_tokens"] for answer in answers),
        "spec_decode_num_drafts": sum(one["num_spec_steps"] for one in spec),
        "spec_decode_num_draft_tokens": sum(one["num_draft_tokens"] for one in spec),
        "spec_decode_num_accepted_tokens": sum(one["num_accepted_draft_tokens"] for one in spec),
    }
    assert found["spec_decode_num_accepted_tokens"] > 0
    positions = [server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(40)]
    assert sum(positions) == server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert positions == sorted(positions, reverse=True)


def test_each_request_is_timed_and_ends_once(server: Served) -> None:
    def count(name: str) -> float:
        return server.metric(f"vllm:{name}_seconds_count")

    before = [count(name) for name in ("time_to_first_token", "e2e_request_latency")]
    length, stop = (server.metric("vllm:request_success_total", finished_reason=reason) for reason in ("length", "stop"))
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
        assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
        with http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True, **BODY}) as stream:
            assert held.reached.wait(30)
            assert server.metric("vllm:num_requests_running") == 1 and server.metric("vllm:kv_cache_usage_perc") > 0
            held.release()
            stream.read()
        server.idle()
        assert server.metric("vllm:num_requests_running") == 0


def test_the_text_has_every_metric_of_the_dashboard(server: Served) -> None:
    server.complete("abc", **BODY)
    with server.http as http:
        response = http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", ())
    ]
    wanted = {name for expression in expressions for name in re.findall(r"(?:vllm|eesd):\w+", expression)}
    assert len(wanted) >= 14
    for name in wanted:
        assert re.search(rf"^{name}[{{ ]", response.text, re.MULTILINE), name


def test_the_log_has_a_line_for_a_request(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eesd.serve")
    caplog.handler.setFormatter(JSONFormatter())
    response = server.post("/v1/completions", {"prompt": "abc", **BODY}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"

    def lines() -> list[dict[str, Any]]:  # uvicorn's lines have the id, too, where their level lets them through
        every = map(json.loads, caplog.text.splitlines())
        return [line for line in every if line["logger"] == "eesd.serve" and line.get("request_id") == "mine-1"]

    eventually(lambda: bool(lines()))  # the line is written when the answer has been sent
    (line,) = lines()
    assert line["level"] == "info" and line["finish_reasons"] == ["length"]
    facts = {name: line[name] for name in ("path", "status", "prompt_tokens", "completion_tokens")}
    assert facts == {"path": "/v1/completions", "status": 200, "prompt_tokens": 3, "completion_tokens": 200}
    hostile = server.post("/v1/completions", {}, headers={"X-Request-Id": "a b\x7f"})
    assert re.fullmatch("[0-9a-f]{32}", hostile.headers["x-request-id"])
    caplog.handler.setFormatter(TextFormatter())


class Collector(BaseHTTPRequestHandler):
    """An OpenTelemetry collector that keeps what it gets."""

    spans: list[Any]

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_trace_goes_to_the_collector_that_the_environment_names(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Collector.spans = []
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        with served(engine) as server:
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            server.post("/v1/completions", {"prompt": "abc", **BODY}, headers=headers)
        collector.shutdown()
        thread.join()
    (span,) = Collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (trace, parent, "POST /v1/completions")
    attributes = {item.key: item.value for item in span.attributes}
    assert attributes["eesd.completion_tokens"].int_value == 200 and attributes["eesd.status"].int_value == 200


def test_tracing_without_its_packages_is_a_warning(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with served(engine) as server:
        assert server.complete("abc", **BODY)["choices"]
    assert "pip install 'eesd[otel]'" in caplog.text
