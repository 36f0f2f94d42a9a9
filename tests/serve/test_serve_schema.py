"""Tests that the OpenAPI schema describes the server. schemathesis sends requests that the schema
allows, and requests that the schema forbids."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from support.serving import Served, served

from eesd.serve.http.options import ServeOptions

CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Served]:
    with served(engine, ServeOptions(max_n=4)) as running:
        yield running


OPERATIONS = [
    *(
        ("POST", path)
        for path in (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/tokenize",
            "/detokenize",
        )
    ),
    *(("POST", path) for path in ("/v1/messages", "/v1/messages/count_tokens")),
    *(
        ("GET", path)
        for path in (
            "/v1/models",
            "/v1/models/{model}",
            "/tokenizer_info",
            "/health",
            "/ready",
            "/metrics",
        )
    ),
]
PATIENCE = 300
"""The time limit for an answer in seconds. It is long because a machine may be busy."""
THOROUGH = int(os.environ.get("SCHEMA_CASES", 600))
"""Number of requests for each operation in the slow test."""


def ask(server: Served, method: str, path: str, examples: int) -> None:
    load_all_checks()
    checks = [CHECKS.get_one(name) for name in CHECKED]
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]
    cases = st.one_of([operation.as_strategy(mode) for mode in GenerationMode])

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def one(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=PATIENCE)

    one()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_server_does_what_its_schema_says(server: Served, method: str, path: str) -> None:
    ask(server, method, path, 25)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS[:7])
def test_the_server_does_what_its_schema_says_many_times(
    server: Served, method: str, path: str
) -> None:
    ask(server, method, path, THOROUGH)


def test_every_operation_declares_its_errors(server: Served) -> None:
    with server.http as http:
        schema = http.get("/openapi.json").json()
    found = {
        (method.upper(), path) for path, methods in schema["paths"].items() for method in methods
    }
    assert found == set(OPERATIONS)
    for method, path in OPERATIONS[:7]:
        responses = schema["paths"][path][method.lower()]["responses"]
        assert responses.keys() == {
            "200",
            "400",
            "401",
            "404",
            "408",
            "413",
            "415",
            "429",
            "500",
            "503",
        }
        for status, response in responses.items():
            wanted = "ErrorBody" if status != "200" else ""
            assert wanted in response["content"]["application/json"]["schema"]["$ref"]


def test_the_batch_lives_on(server: Served) -> None:
    """The requests of schemathesis did no harm."""
    server.idle()
    assert (
        server.complete("abc", max_tokens=8)["choices"][0]["text"]
        == server.llm.generate("abc", max_new_tokens=8).text
    )
