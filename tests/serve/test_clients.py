"""Tests of unchanged third-party clients with the real server. Each client receives the texts of
``generate``.

They run in separate environments, which ``tests/environments`` lists.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import environments
from support.bundled import with_turns
from support.serving import Served, served

from eesd.runtime.decoding.sampling import Sampling

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).parent
PROGRAMS = {
    "clients": {
        "openai": "chat stream object responses",
        "anthropic": "chat stream function object",
        "anthropic as Claude Code": "answered function",
        "litellm": "chat stream function object responses completion",
        "langchain-openai": "chat stream function object completion",
        "langchain-openai by responses": "chat stream function object",
        "instructor": "object function",
        "pydantic-ai": "chat stream function object",
        "pydantic-ai by responses": "chat stream function object",
    },
    "agents": {
        "openai-agents": "chat stream function object function_or_object",
        "openai-agents by responses": "function object function_or_object",
    },
    "frameworks": {
        "llama-index": "chat stream function object completion responses",
        "dspy": "chat object responses",
    },
    "npm": {
        "openai of npm": "chat stream usage function streamed_function object responses",
        "anthropic of npm": "chat stream usage function streamed_function object",
        "ai": "chat stream usage function streamed_function object",
        "ai by responses": "chat stream usage function streamed_function object",
    },
}
"""For each program, the clients that it uses and the calls that each client makes."""
COUNT = 16


@pytest.fixture(scope="module")
def server(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(with_turns(bundled, tmp_path_factory.mktemp("clients") / "plans")) as running:
        yield running


def ask(command: list[Path | str], server: Served, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the result of each call of each client."""
    arguments = [*map(str, command), f"{server.url}/v1", server.serving.model_name]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=300, env=environment or None
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        found.setdefault(line["client"], {})[line["call"]] = line.get("found", line.get("error"))
    return found


def check(found: dict[str, dict[str, Any]], server: Served, program: str) -> None:
    """The texts and their lengths equal those of ``generate``. The objects and the arguments of
    functions fit their schemas."""
    assert {client: set(calls) for client, calls in found.items()} == {
        client: {*calls.split()} for client, calls in PROGRAMS[program].items()
    }
    said = server.llm.generate(
        [{"role": "user", "content": "import os"}], Sampling(), max_new_tokens=COUNT
    )
    written = server.llm.generate("def f(x):", Sampling(), max_new_tokens=COUNT).text
    assert said.text and written
    wanted = {"completion": written, "usage": len(said.tokens), "answered": True}
    for client, calls in found.items():
        for call, value in calls.items():
            if "function" in call or "object" in call:
                assert isinstance(value, dict) and value.keys() == {"name", "big"}, (
                    client,
                    call,
                    value,
                )
                assert len(value["name"]) <= 4 and isinstance(value["big"], bool)
            else:
                assert value == wanted.get(call, said.text), (client, call)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("clients", "clients.py"),
        ("agents", "clients_agents.py"),
        ("frameworks", "clients_frameworks.py"),
    ],
)
def test_clients_for_python(server: Served, name: str, file: str) -> None:
    try:
        python = environments.make(name)
    except environments.Unavailable as reason:
        pytest.skip(f"no clients here: {reason}")
    # litellm fetches a list of models, unless it may use the list that it contains.
    variables = environments.variables(python, LITELLM_LOCAL_MODEL_COST_MAP="True")
    check(ask([python, CLIENTS / file], server, **variables), server, name)


def test_clients_for_javascript(server: Served) -> None:
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("no clients here: node and npm are not installed")
    try:
        directory = environments.make_npm("clients")
    except environments.Unavailable as reason:
        pytest.skip(f"no clients here: {reason}")
    # A module finds packages in its directory.
    script = shutil.copy(CLIENTS / "clients.mjs", directory)
    check(ask(["node", script], server), server, "npm")
