"""Tests of connections that fail. The clients leave, read slowly, send slowly, send too much, or
never send anything."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from support.serving import Held, Served, events, eventually, served

from eesd.runtime.batch.scheduler import BatchOptions
from eesd.serve.http import streaming
from eesd.serve.http.options import ServeOptions
from eesd.serve.openai import params

BODY_TIMEOUT = 1.0
MOST = 100_000
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    options = ServeOptions(max_body_bytes=MOST, body_timeout=BODY_TIMEOUT, send_timeout=1.0)
    with served(engine, options) as running:
        yield running


def raw(server: Served, path: str, body: Any, receive_buffer: int = 0) -> socket.socket:
    """Open a connection and send a request."""
    content = json.dumps(body).encode()
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def works(server: Served) -> None:
    expected = server.llm.generate("abc", max_new_tokens=8).text
    assert server.complete("abc", max_tokens=8, temperature=0)["choices"][0]["text"] == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_who_leaves_is_cancelled(
    server: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    path: str,
) -> None:
    caplog.set_level(logging.INFO, "eesd.serve")
    held = Held(after=2)
    monkeypatch.setattr(params, "constraint_of", lambda *_: held)
    server.idle()
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    tokens = server.metric("vllm:generation_tokens_total")
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    connection = raw(server, path, {**LONG, **prompt, "stream": stream})
    assert held.reached.wait(30)
    connection.close()
    eventually(lambda: server.serving.active == 0)  # the server has detected it, and has cancelled
    held.release()
    server.idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert server.metric("vllm:generation_tokens_total") < tokens + 100
    eventually(lambda: f"POST {path} 499" in caplog.text)
    assert "ERROR" not in caplog.text
    works(server)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_queue_is_forgotten(
    engine: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    held = Held()
    monkeypatch.setattr(params, "constraint_of", lambda *_: held)
    with served(engine, batch=BatchOptions(max_rows=1)) as server:
        with raw(server, "/v1/completions", LONG) as running:
            assert held.reached.wait(30)
            waiting = raw(server, "/v1/completions", {**LONG, "stream": stream})
            eventually(lambda: server.metric("vllm:num_requests_waiting") == 1)
            waiting.close()
            # The batch is held, and has sent no update for the client that left.
            eventually(lambda: server.serving.active == 1)
            held.release()
            assert running.recv(1000).startswith(b"HTTP/1.1 200 ")
        server.idle()
        assert server.metric("vllm:generation_tokens_total") == LONG["max_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_is_cancelled(
    server: Served, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """The answer is larger than all buffers on its way, so the server has to wait. After a second
    the server closes the connection. Otherwise the client could keep it open for ever."""
    body = {
        "prompt": ["abc"] * 16,
        "max_tokens": 250,
        "ignore_eos": True,
        "stream": stream,
        "logprobs": 5,
    }
    with raw(server, "/v1/completions", body, receive_buffer=4096) as connection:
        eventually(lambda: server.serving.active == 1)
        eventually(lambda: server.serving.active == 0)
        server.idle()
        sleep(1.5)
        found = everything(connection)
    assert (
        found.startswith(b"HTTP/1.1 200")
        and len(found) < 500_000
        and not found.endswith((b"}", b"0\r\n\r\n"))
    )
    assert "ERROR" not in caplog.text
    works(server)


def test_a_slow_body_is_a_408(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"type": "timeout_error"' in answer


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: 1"]
)
def test_a_head_that_is_never_complete_is_dropped(server: Served, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        # The connection has answered a request before, because a kept connection has the same
        # limit.
        if begun:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while not received.endswith(b"ok"):
                received += connection.recv(65536)
        connection.sendall(begun)
        everything(connection)  # ends when the server closes


def everything(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("size", [MOST + 1, 3 * MOST, 400 * MOST])
def test_a_giant_body_is_a_413(server: Served, size: int, declared: bool) -> None:
    def pieces() -> Iterator[bytes]:
        for start in range(0, size, 1 << 16):
            yield b" " * min(1 << 16, size - start)

    headers = {
        "Content-Type": "application/json",
        **({"Content-Length": str(size)} if declared else {}),
    }
    with server.http as http:
        response = http.post("/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413 and str(MOST) in response.json()["error"]["message"]
    works(server)


def test_the_largest_body_passes(server: Served) -> None:
    content = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    with server.http as http:
        response = http.post(
            "/v1/completions",
            content=content.ljust(MOST),
            headers={"Content-Type": "application/json"},
        )
    assert response.status_code == 200


def test_many_idle_connections_do_not_disturb(engine: Path) -> None:
    with served(engine) as server, ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
        works(server)


def test_a_broken_request_line_is_a_400(server: Served) -> None:
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(junk)
            assert everything(connection).startswith(b"HTTP/1.1 400 ")
    works(server)


def test_a_stream_that_waits_says_so(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies close idle connections. The head of the answer is sent with the first comment, and
    the text is unchanged."""
    held = Held()
    monkeypatch.setattr(params, "constraint_of", lambda *_: held)
    monkeypatch.setattr(streaming, "QUIET_SECONDS", 0.2)
    body = {"prompt": "abc", "max_tokens": 8, "stream": True, "temperature": 0}
    with served(engine, batch=BatchOptions(max_rows=1)) as server, server.http as http:
        with raw(server, "/v1/completions", LONG), ExitStack() as stack:
            assert held.reached.wait(30)
            waiting = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            assert waiting.status_code == 200
            lines = waiting.iter_lines()
            assert next(lines) == ": waiting"
            held.release()
            found = events(line for line in lines if not line.startswith(":"))
        expected = server.llm.generate("abc", max_new_tokens=8).text
        assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == expected


def test_a_deadline_gives_what_there_is(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request times out while the batch is held, so it ends with the tokens that it has by
    then."""
    held = Held(after=3)
    monkeypatch.setattr(params, "constraint_of", lambda *_: held)
    with served(engine, ServeOptions(request_timeout=3)) as server, server.http as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            assert held.reached.wait(30)
            sleep(3.1)
            held.release()
            lines = [line for line in stream.iter_lines() if line]
        last = json.loads(lines[-2].removeprefix("data: "))["choices"][0]
        assert (last["finish_reason"], last["stop_reason"], lines[-1]) == (
            "length",
            "deadline",
            "data: [DONE]",
        )
