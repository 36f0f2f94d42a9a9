"""Tests of the server's operation and of attacks on it. They cover hosts, logs, metrics, keys and
configuration."""

import asyncio
import http.client
import json
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml  # type: ignore[import-untyped]
from support.command import assert_refused, run
from support.serving import Served, eventually, served

from eesd import Sampling, load
from eesd.common.errors import EESDError
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.text import TextCodec
from eesd.serve import cli as serve_cli
from eesd.serve.app import make_app
from eesd.serve.http.observe import TextFormatter
from eesd.serve.http.options import ServeOptions

KEYS = ("first-secret-key", "second-secret-key")
BEGINNING = "abcdefgh" * 8
EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "serving"


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    """A server that has keys, open metrics, two hosts, two model names, and one allowed origin of
    pages."""
    hosts = ("127.0.0.1", "Api.Example.com")
    origins = ("https://chat.example.com",)
    options = ServeOptions(
        api_keys=KEYS,
        metrics_open=True,
        allowed_hosts=hosts,
        allowed_origins=origins,
        model_name="one",
        aliases=("gpt-4o",),
    )
    with served(engine, options, BatchOptions(max_rows=2, max_queue=3, levels=3)) as running:
        yield running


def bearer(key: str = KEYS[0], **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(server: Served, key: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model="one", prompt="abc", max_tokens=2).choices
    with server.http as http:
        assert http.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
        assert (
            http.get(
                "/v1/models", headers={"x-api-key": key, "Authorization": "Bearer x"}
            ).status_code
            == 200
        )
        wrong = http.post("/v1/messages", headers={"x-api-key": f"{key}4"})
    assert wrong.status_code == 401 and wrong.json()["type"] == "error"


PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/x",
)
WRONG = (
    *(
        None,
        "",
        "Bearer",
        "Bearer x",
        "Bearer first-secret-ke",
        "Bearer first-secret-keys",
        "Basic first-secret-key",
    ),
    *("first-secret-key", "Bearer first-secret-key,second-secret-key", "Bearer \xff\xfe"),
)


@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_everything_is_closed(server: Served, path: str) -> None:
    with server.http as http:
        for authorization, method in product(WRONG, ("GET", "POST", "OPTIONS")):
            headers = (
                {} if authorization is None else {b"Authorization": authorization.encode("latin-1")}
            )
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert not any("access-control" in name for name in response.headers)


def test_a_body_without_a_key_is_not_read(server: Served) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65536

    # The server closes while the client still sends.
    with server.http as http, suppress(httpx2.TransportError):
        assert http.post("/v1/completions", content=endless()).status_code == 401


def test_the_schema_says_that_there_are_keys(server: Served) -> None:
    with server.http as http:
        schema = http.get("/openapi.json", headers=bearer()).json()
    assert schema["security"] == [{"bearer": []}]


def test_keys_are_not_shown(server: Served) -> None:
    assert not any(key in repr(server.serving) for key in KEYS)


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one-key-1\n\n two-key-2 \n")
    monkeypatch.setenv("EESD_API_KEY", "three-key-3,four-key-4")
    assert serve_cli.api_keys(file) == ("one-key-1", "two-key-2") and serve_cli.api_keys(None) == (
        "three-key-3",
        "four-key-4",
    )
    monkeypatch.delenv("EESD_API_KEY")
    assert serve_cli.api_keys(None) == ()
    file.write_text("\n")
    with pytest.raises(EESDError, match="no API key"):
        serve_cli.api_keys(file)
    for bad in ("short", "with\nline", "ümlaut-key-1"):
        with pytest.raises(EESDError, match="API key"):
            ServeOptions(api_keys=(bad,))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("API.example.com:8000", 200),
        ("evil.example", 400),
        ("evil.example:80", 400),
        ("api.example.com.evil.example", 400),
        ("[::1", 400),
        ("", 400),
    ],
)
def test_a_request_for_another_host_is_refused(server: Served, host: str, status: int) -> None:
    """A page of another site can make its name resolve to this server (DNS rebinding), and the
    browser treats the server as the same origin."""
    response = server.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=bearer(Host=host)
    )
    assert response.status_code == status
    if status == 400:
        assert (
            response.json()["error"]["code"] == "unknown_host"
            and "Api.Example.com" in response.json()["error"]["message"]
        )


def test_probes_come_for_an_address(server: Served, engine: Path) -> None:
    """kubelet uses the pod's address, and the container's health check uses 127.0.0.1. Prometheus
    may use either address."""
    other = {"Host": "10.1.2.3:8000"}
    with server.http as client:
        assert [
            client.get(path, headers=other).status_code
            for path in ("/health", "/ready", "/metrics")
        ] == [200] * 3
        assert client.get("/v1/models", headers=bearer(**other)).status_code == 400
        assert client.head("/health").status_code == 200 and client.head("/").status_code == 200
        assert (
            client.head("/health").content == b""
            and client.head("/v1/completions", headers=bearer()).status_code == 405
        )
    with (
        served(engine, ServeOptions(api_keys=KEYS, allowed_hosts=("api.example.com",))) as closed,
        closed.http as client,
    ):
        own = {"Host": "api.example.com"}
        assert [
            client.get("/metrics", headers=one).status_code for one in (own, bearer(**own))
        ] == [401, 200]
        # These routes are open to everybody except pages of other sites.
        assert client.get("/metrics", headers=other).status_code == 400
        assert client.get("/health", headers=other).status_code == 200


def test_a_prefix_of_all_paths_changes_nothing(server: Served) -> None:
    """A server that mounts the application under a prefix passes it as ``root_path``."""
    app = make_app(server.serving.service, ServeOptions(api_keys=KEYS, metrics_open=True))

    async def main() -> None:
        transport = httpx2.ASGITransport(app, root_path="/one")
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            for path in ("/health", "/ready", "/metrics", "/"):
                assert (await client.get(f"/one{path}")).status_code == 200, path
            assert (await client.get("/one/v1/models")).status_code == 401
            # The error has Anthropic's form.
            assert (await client.post("/one/v1/messages", json={})).json()["type"] == "error"
            counted = (await client.get("/one/metrics")).text
        assert 'route="/v1/models",status="401"' in counted and 'route="/health"' not in counted

    asyncio.run(main())


@pytest.mark.parametrize(
    "host", ["api.example.com:8443", "", "a b", "http://a.example", "a/b", "[::1]", "*"]
)
def test_a_host_that_could_never_match_is_refused(host: str) -> None:
    with pytest.raises(EESDError, match="is not a host name"):
        ServeOptions(allowed_hosts=(host,))
    assert ServeOptions(allowed_hosts=("::1", "10.1.2.3", "A.example"))
    for origin in ("chat.example.com", "https://chat.example.com/", "https://", "**"):
        with pytest.raises(EESDError, match="allowed origin"):
            ServeOptions(allowed_origins=(origin,))


def test_a_page_of_an_allowed_origin_may_ask(server: Served) -> None:
    """The browser asks for permission first, without the key."""
    page = {"Origin": "https://chat.example.com"}
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with server.http as client:
        permission = client.options("/v1/chat/completions", headers=page | asks)
        assert (
            permission.status_code == 200
            and "authorization" in permission.headers["access-control-allow-headers"].lower()
        )
        body = {"prompt": "a", "max_tokens": 1}
        for key, status in ((KEYS[0], 200), ("wrong-key-1", 401)):
            found = client.post("/v1/completions", json=body, headers=bearer(key, **page))
            assert (
                found.status_code == status
                and found.headers["access-control-allow-origin"] == page["Origin"]
            )
        other = client.options(
            "/v1/chat/completions", headers={"Origin": "https://evil.example", **asks}
        )
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_a_model_has_several_names(server: Served) -> None:
    for name in ("one", "gpt-4o", ""):
        body = {"prompt": "a", "max_tokens": 1, "model": name}
        assert server.post("/v1/completions", body, headers=bearer()).json()["model"] == "one"
    with server.http as client:
        models = client.get("/v1/models", headers=bearer()).json()["data"]
        assert [model["id"] for model in models] == ["one", "gpt-4o"]
        assert client.get("/v1/models/gpt-4o", headers=bearer()).json()["id"] == "gpt-4o"


def test_a_request_with_two_lengths_is_refused(server: Served) -> None:
    """A proxy that uses Content-Length would treat the second request as part of the first
    request's body."""
    second = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    ).encode()
    head += (
        b"Content-Type: application/json\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n\r\n" + second)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 400 ") and received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ((), serve_cli.LOOPBACK),
        (("--host", "localhost"), serve_cli.LOOPBACK),
        (("--host", "0.0.0.0"), ()),
        (
            ("--allowed-host", "a.example", "--allowed-host", "b.example"),
            ("a.example", "b.example", *serve_cli.LOOPBACK),
        ),
    ],
)
def test_who_listens_on_this_machine_alone_answers_for_it_alone(
    engine: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], hosts: tuple[str, ...]
) -> None:
    assert (
        started(monkeypatch, "--engine-dir", engine, "--port", 0, *options).allowed_hosts == hosts
    )


def started(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> ServeOptions:
    """Returns the server options that a command results in."""
    found: list[ServeOptions] = []

    def noted(app: Any, *_: Any) -> None:
        found.append(app.state.serving.options)
        app.state.serving.service.close()

    monkeypatch.setattr("eesd.serve.http.run.serve", noted)
    monkeypatch.setattr("eesd.serve.http.observe.log_to_stderr", lambda _: None)
    result = run(serve_cli.main, *arguments)
    assert result.exit_code == 0, result.stderr
    return found[0]


def test_options_come_from_the_environment_and_a_file(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command line overrides the environment, which overrides the file."""
    file = tmp_path / "serve.toml"
    file.write_text(
        'max-n = 5\nmodel-name = "file"\nbody-timeout = 3.5\nport = 0\nallowed-host = '
        '["a.example"]\n'
    )
    monkeypatch.setenv("EESD_SERVE_ENGINE_DIR", str(engine))
    monkeypatch.setenv("EESD_SERVE_MODEL_NAME", "environment")
    monkeypatch.setenv("EESD_SERVE_BODY_TIMEOUT", "7")
    monkeypatch.setenv("EESD_SERVE_METRICS_OPEN", "1")
    found = started(monkeypatch, "--config", file, "--body-timeout", 9)
    assert (found.max_n, found.model_name, found.body_timeout) == (5, "environment", 9.0)
    assert found.allowed_hosts == ("a.example", *serve_cli.LOOPBACK) and found.metrics_open
    monkeypatch.setenv("EESD_SERVE_ALLOWED_HOST", "b.example c.example")
    monkeypatch.setenv("EESD_SERVE_MODEL_NAME", "one two")
    found = started(monkeypatch, "--config", file)
    assert found.allowed_hosts[:2] == ("b.example", "c.example") and (
        found.model_name,
        found.aliases,
    ) == ("one", ("two",))
    monkeypatch.setenv("EESD_SERVE_PROT", "1")
    assert_refused(
        run(serve_cli.main, "--config", file),
        "EESD_SERVE_PROT does not belong to any option",
        "--help",
    )
    monkeypatch.delenv("EESD_SERVE_PROT")
    for option in serve_cli.main.params:
        assert f"--{str(option.name).replace('_', '-')}" in option.opts, (
            "its variable has another name"
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", ("not TOML", "port = 8080")),
        ("prot = 1", ("no option prot", "--help")),
        ('config = "x"', ("no option config",)),
        ("port = [1]", ("port must be a single value",)),
        ('allowed-host = "a:1"', ("allowed host 'a:1' is not a host name",)),
        ("port = -1", ("--port",)),
        ("[port]", ("port must be a single value",)),
    ],
)
def test_a_bad_configuration_file_is_refused(
    engine: Path, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert_refused(run(serve_cli.main, "--engine-dir", engine, "--config", file), *words)


def test_a_path_cannot_forge_a_line_of_the_log(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A path in the log cannot send control codes to a terminal either."""
    with caplog.at_level(logging.INFO, "eesd.serve"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request(
            "GET",
            "/foo%0a2026-11-23%20INFO%20POST%20/v1/completions%20200%1b%5b31m",
            headers=bearer(),
        )
        assert connection.getresponse().status == 404
        eventually(lambda: bool(caplog.records))
    lines = [TextFormatter().format(record) for record in caplog.records]
    assert len(lines) == 1 and lines[0].isprintable() and "%0a2026" in lines[0]
    forged = logging.makeLogRecord({"msg": "one\ntwo\x1b[31m", "levelname": "INFO"})
    assert TextFormatter().format(forged).endswith(r"one\ntwo\x1b[31m")


def test_the_log_says_who_asked(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The log shows the client's address, and a name for the key that does not reveal the key."""
    with caplog.at_level(logging.INFO, "eesd.serve"):
        for key in (*KEYS, "a-wrong-key"):
            server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=bearer(key))
        eventually(lambda: len(caplog.records) == 3)
    facts = [record.__dict__["facts"] for record in caplog.records]
    assert all(one["client"] == "127.0.0.1" for one in facts) and "key" not in facts[2]
    names = [one["key"] for one in facts[:2]]
    assert len(set(names)) == 2 and all(re.fullmatch("[0-9a-f]{8}", name) for name in names)


def answers(server: Served, route: str, status: int) -> float:
    return server.metric("eesd:http_requests_total", route=route, status=str(status))


def test_refusals_are_counted_too(server: Served) -> None:
    """Refusals are counted by path and status. All paths that clients make up are counted
    together."""
    asked = [
        ("/v1/completions", 401),
        ("/v1/completions", 400),
        ("/v1/completions", 200),
        ("other", 404),
        ("other", 404),
    ]
    asked += [("other", 400)]
    before = {one: answers(server, *one) for one in asked}
    server.post("/v1/completions", {"prompt": "a"})
    server.post("/v1/completions", {"prompt": []}, headers=bearer())
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=bearer())
    for path in ("/v1/embeddings", "/wp-login.php"):
        response = server.post(path, {}, headers=bearer())
        assert (
            response.status_code == 404 and "/openapi.json" in response.json()["error"]["message"]
        )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"this is no HTTP\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    eventually(
        lambda: all(answers(server, *one) == before[one] + asked.count(one) for one in set(asked))
    )


def test_a_full_queue_is_counted_and_what_never_fits_is_a_400(engine: Path) -> None:
    """For a request that can never fit, a Retry-After header would be wrong."""
    with served(engine, ServeOptions(), BatchOptions(max_rows=1, max_queue=1)) as server:
        response = server.post("/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 1})
        assert response.status_code == 400 and "2 places" in response.json()["error"]["message"]
        assert "Retry-After" not in response.headers
        assert len(server.complete("a", n=2, max_tokens=1)["choices"]) == 2


def test_queue_prefill_and_lengths_are_measured(server: Served) -> None:
    names = ("queue_time_seconds", "prefill_time_seconds", "prompt_tokens", "generation_tokens")

    def found(kind: str) -> list[float]:
        return [server.metric(f"vllm:request_{name}_{kind}") for name in names]

    counts = found("count")
    sums = found("sum")
    body = {"prompt": list(range(1, 12)), "max_tokens": 5, "ignore_eos": True}
    assert server.post("/v1/completions", body, headers=bearer()).status_code == 200
    eventually(lambda: found("count") == [count + 1 for count in counts])
    queue, prefill, prompt, text = (
        now - then for now, then in zip(found("sum"), sums, strict=True)
    )
    assert (prompt, text) == (11, 5) and 0 <= queue < 60 and 0 < prefill < 60


def test_prometheus_needs_no_users_key_and_finds_what_rules_and_dashboard_name(
    server: Served,
) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body, headers=bearer()).status_code == 200
    with server.http as client:
        assert client.get("/v1/models").status_code == 401
        response = client.get("/metrics")
    text = response.text
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    assert re.search(r'^eesd:build_info\{.*version="[^"]+".*\} 1.0$', text, re.MULTILINE)
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    expressions = (
        [rule["expr"] for rule in rules],
        [one["expr"] for panel in panels for one in panel.get("targets", ())],
    )
    named, drawn = ({*re.findall(r"(?:eesd|vllm):\w+", " ".join(found))} for found in expressions)
    assert len(rules) >= 5 and named and len(drawn) >= 14
    for name in named:
        assert re.search(
            rf"^# TYPE {re.sub('_(total|bucket)$', '', name)}(_total)? ", text, re.MULTILINE
        ), name
    for name in drawn:
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE), name
    assert "--metrics-open" in (EXAMPLES / "kubernetes.yaml").read_text()


def test_a_key_learns_nothing_of_what_others_asked(server: Served) -> None:
    """``cached_tokens`` reveals nothing about the requests of other keys. With a salt, a client can
    also separate its own prompts."""

    def cached(key: str, **more: str) -> int:
        body = {"prompt": BEGINNING, "max_tokens": 1, **more}
        usage = server.post("/v1/completions", body, headers=bearer(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[1]) == 0, "the other key's prompt was kept"
    assert cached(KEYS[0]) == cached(KEYS[1]) == 32
    assert cached(KEYS[0], cache_salt="mine") == 0 and cached(KEYS[0], cache_salt="mine") == 32


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing megabytes takes seconds of processor time."""
    monkeypatch.setattr(
        TextCodec, "tokenizer", property(lambda _: pytest.fail("it is tokenized")), raising=False
    )
    most = server.llm.manifest.max_seq_len
    longest = server.llm.codec._longest
    text = "a" * (longest * (most + 1))
    for path, body in (("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text})):
        response = server.post(path, body, headers=bearer())
        assert (
            response.status_code == 400
            and f"the model accepts {most}" in response.json()["error"]["message"]
        )


def test_negative_seeds_are_seeds(server: Served) -> None:
    def text(seed: int) -> Any:
        body = {
            "prompt": "a",
            "max_tokens": 12,
            "temperature": 1.0,
            "seed": seed,
            "ignore_eos": True,
        }
        return server.post("/v1/completions", body, headers=bearer()).json()["choices"][0]["text"]

    assert text(-1) == text(-1) and len({text(seed) for seed in (-1, -2, 1, 2)}) > 1


def test_chats_share_little_memory(engine: Path) -> None:
    """The texts of the chats need three times the memory. No request limits its length, and no text
    is refused or changed."""
    slot = load(engine).engines.verify.new_kv_caches()[0].slot_bytes
    with served(engine, ServeOptions(), BatchOptions(max_rows=6, kv_memory=330 * slot)) as server:
        prompts = [f"text {number} " * (1 + 3 * (number % 4)) for number in range(8)]
        bodies = [
            {"prompt": prompt, "ignore_eos": True, "max_tokens": 150, "temperature": 0.8, "seed": 4}
            for prompt in prompts
        ]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: server.post("/v1/completions", body), bodies))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.status_code == 200, answer.text
            expected = server.llm.generate(
                prompt, Sampling(temperature=0.8, seed=4), max_new_tokens=150, ignore_eos=True
            )
            assert answer.json()["choices"][0]["text"] == expected.text
        assert server.metric("vllm:num_preemptions_total") > 0
        longest = server.post(
            "/v1/completions", {"prompt": "a", "max_tokens": None, "ignore_eos": True}
        )
        room = server.serving.service.longest
        assert longest.json()["usage"]["total_tokens"] == room < server.serving.max_model_len
        asked = server.post("/v1/completions", {"prompt": "a", "max_tokens": room + 10})
        assert (
            asked.status_code == 400
            and "the memory for keys and values" in asked.json()["error"]["message"]
        )
