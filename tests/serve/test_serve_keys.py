"""API keys, and what a server shows to those who have none."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import openai
import pytest
from support.serving import Served, served

from eesd.common.errors import EESDError
from eesd.serve.cli import api_keys
from eesd.serve.http.options import ServeOptions

KEYS = ("first-key-123", "second-key-456")
PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/metrics", "/openapi.json", "/x")


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    with served(engine, ServeOptions(api_keys=KEYS)) as running:
        yield running


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(server: Served, key: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    assert client.models.list().data
    assert client.completions.create(model=server.serving.model_name, prompt="abc", max_tokens=2).choices
    with server.http as http:
        assert http.get("/metrics", headers={"Authorization": f"bearer {key}"}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": key, "Authorization": "Bearer x"}).status_code == 200
        wrong = http.post("/v1/messages", headers={"x-api-key": f"{key}4"})
    assert wrong.status_code == 401 and wrong.json()["type"] == "error"


WRONG = (
    *(None, "", "Bearer", "Bearer x", "Bearer first-key-12", "Bearer first-key-1234", "Basic first-key-123", "first-key-123"),
    *("Bearer first-key-123,second-key-456", "Bearer \xff\xfe"),
)


@pytest.mark.parametrize("authorization", WRONG)
@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_everything_is_closed(server: Served, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {b"Authorization": authorization.encode("latin-1")}
    with server.http as http:
        for method in ("GET", "POST", "OPTIONS"):
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert not any("access-control" in name for name in response.headers)


def test_probes_need_no_key(server: Served) -> None:
    with server.http as http:
        assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_a_body_without_a_key_is_not_read(server: Served) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65536

    with server.http as http, suppress(httpx2.TransportError):  # the server closes while the client still sends
        assert http.post("/v1/completions", content=endless()).status_code == 401


def test_the_schema_says_that_there_are_keys(server: Served) -> None:
    with server.http as http:
        schema = http.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    assert schema["security"] == [{"bearer": []}]


def test_keys_are_not_shown(server: Served) -> None:
    assert not any(key in repr(server.serving) for key in KEYS)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("one-key-1\n\n two-key-2 \n")
    monkeypatch.setenv("EESD_API_KEY", "three-key-3,four-key-4")
    assert api_keys(file) == ("one-key-1", "two-key-2") and api_keys(None) == ("three-key-3", "four-key-4")
    monkeypatch.delenv("EESD_API_KEY")
    assert api_keys(None) == ()
    file.write_text("\n")
    with pytest.raises(EESDError, match="no API key"):
        api_keys(file)
    for bad in ("short", "with\nline", "ümlaut-key-1"):
        with pytest.raises(EESDError, match="API key"):
            ServeOptions(api_keys=(bad,))
