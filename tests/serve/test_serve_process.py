"""Tests that run ``eesd-serve`` as a process. They check its start, SIGTERM, the state that a
restart keeps, and that bad options are refused in one sentence."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.command import assert_refused, run
from support.serving import events, eventually

from eesd.common.cli import BYTES
from eesd.serve.cli import main

LONG = {
    "prompt": ["abc"] * 32,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 5,
}
"""A request whose stream is larger than all buffers between the server and the client. The stream
therefore cannot end before the client reads it."""


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    url: str
    log: list[str]

    def get(self, path: str) -> int:
        return httpx2.get(f"{self.url}{path}", timeout=30).status_code

    def begin(self, body: Any) -> socket.socket:
        """Open a connection with a small buffer and send a request."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection


@contextmanager
def started(engine: Path, *options: object, within: Sequence[str] = ()) -> Iterator[Running]:
    program = [*within, sys.executable, "-m", "eesd.serve.cli"]
    command = [*program, "--engine-dir", str(engine), "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        log: list[str] = []
        while not (found := re.search(r"on (http://[\d.:]+)", log[-1] if log else "")):
            line = process.stderr.readline()
            assert line, log
            log.append(line)
        yield Running(process, found[1], log)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def rest(connection: socket.socket, found: bytes = b"") -> str:
    """The body of a response whose beginning was received."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    while piece := connection.recv(1 << 16):
        found += piece
    return found.decode().partition("\r\n\r\n")[2]


def test_sigterm_lets_running_requests_finish(engine: Path) -> None:
    with started(engine, "--drain-seconds", 300) as server:
        assert server.get("/ready") == 200
        with server.begin(LONG) as connection:
            first = connection.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: server.get("/ready") == 503)
            assert server.get("/health") == 200
            refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
            *chunks, done = events(iter(rest(connection, first).splitlines()))
        assert done == "[DONE]"
        ends = [
            choice["finish_reason"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert ends == ["length"] * 32
        assert server.process.wait(30) == 0


def test_who_is_not_done_in_time_is_cancelled(engine: Path) -> None:
    with started(engine, "--drain-seconds", 0.2) as server, server.begin(LONG) as connection:
        assert connection.recv(100)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert "[DONE]" not in rest(connection)


def test_an_idle_server_ends_at_once(engine: Path) -> None:
    with started(engine, "--tree", 2, "--log-format", "json") as server:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert server.process.stderr
        lines = [json.loads(line) for line in [*server.log, *server.process.stderr]]
        assert [line["completion_tokens"] for line in lines if "completion_tokens" in line] == [200]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-n", "0"], ["max_n"]),
        (["--request-timeout", "nan"], ["request_timeout"]),
        (["--max-body-bytes", "5"], ["max_body_bytes"]),
        (["--max-rows", "0"], ["max_rows"]),
        (["--kv-memory", "5 parsecs"], ["--kv-memory", "5GiB"]),
        (["--levels", "-1"], ["levels"]),
        (["--api-key-file", os.devnull], ["no API key"]),
        (["--host", "256.1.1.1"], ["256.1.1.1", "--host"]),
        (["--port", "70000"], ["--port"]),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], words: list[str]) -> None:
    """Bad options are refused before anything is loaded."""
    assert_refused(run(main, "--engine-dir", "no-engines", *options), *words)


@pytest.mark.parametrize(
    ("given", "size"),
    [("5GiB", 5 << 30), ("5GB", 5 * 10**9), ("0.5 g", 5 * 10**8), ("7kib", 7168), ("12b", 12)],
)
def test_sizes_have_units(given: str, size: int) -> None:
    assert BYTES.convert(given, None, None) == size == BYTES.convert(size, None, None)


def test_too_little_memory_is_refused_at_the_start(engine: Path) -> None:
    result = run(main, "--engine-dir", engine, "--port", 0, "--kv-memory", 5)
    assert_refused(result, "kv_memory is 5 bytes, but the shortest text needs", "such as 2GiB")


def test_a_port_that_is_taken_is_one_sentence(engine: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(run(main, "--engine-dir", engine, "--port", port), str(port), "give another")
    assert_refused(run(main, "--engine-dir", tmp_path / "none", "--port", 0), "none")


def test_without_its_packages_the_command_says_what_to_install(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.startswith("eesd.serve.") and name != "eesd.serve.cli"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert_refused(run(main, "--engine-dir", engine), "fastapi", "[serve]'")


class Collector(BaseHTTPRequestHandler):
    """An OpenTelemetry collector that stores the spans that it receives."""

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


@pytest.mark.skipif(
    find_spec("opentelemetry.instrumentation") is None,
    reason="opentelemetry-distro is not installed",
)
def test_opentelemetry_instruments_the_command_unchanged(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has one span below the client's span, whether it is streamed or not. Probes have
    none."""
    instrument = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "mine"}
    body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "stream": True}
    Collector.spans = []
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}"
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        for other in ("METRICS", "LOGS"):
            monkeypatch.setenv(f"OTEL_{other}_EXPORTER", "none")
        with started(engine, within=[sys.executable, "-c", instrument]) as server:
            assert httpx2.post(
                f"{server.url}/v1/completions", json=body, headers=headers
            ).text.endswith("[DONE]\n\n")
            secret = f"{server.url}/v1/completions?secret=hidden"
            assert httpx2.post(secret, json={}).status_code == 400
            assert server.get("/health") == 200
            server.process.terminate()
            assert server.process.wait(30) == 0
        collector.shutdown()
    assert [span.name for span in Collector.spans] == ["POST /v1/completions"] * 2
    found, refused = (
        {item.key: item.value for item in span.attributes} for span in Collector.spans
    )
    assert (Collector.spans[0].trace_id.hex(), Collector.spans[0].parent_span_id.hex()) == (
        trace,
        parent,
    )
    assert found["eesd.request_id"].string_value == "mine"
    assert found["gen_ai.usage.output_tokens"].int_value == 20
    assert found["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert (found["eesd.status"].int_value, refused["eesd.status"].int_value) == (200, 400)
    model = json.loads((engine / "manifest.json").read_text())["model"]
    named = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "eesd",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
    assert {name: found[name].string_value for name in named} == named
    assert found["gen_ai.response.id"].string_value.startswith("cmpl-")
    assert found["gen_ai.request.max_tokens"].int_value == 20
    for time in (
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_in_model_prefill",
    ):
        assert 0 <= found[time].double_value < 60
    assert found["gen_ai.response.time_to_first_chunk"].double_value > 0
    assert "hidden" not in str(Collector.spans)
    assert refused["http.route"].string_value == "/v1/completions"
