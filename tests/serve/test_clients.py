"""Third-party clients, unchanged, against the real server: each receives the texts of ``generate``.

They run in separate environments: Python's from ``tests/environments/clients.txt``, npm's from the
directory beside it.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest
from support import environments
from support.bundled import with_turns
from support.serving import Served, served

from eesd.runtime.decoding.sampling import Sampling

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).parent
CALLS = {
    "openai": "chat stream object responses",
    "anthropic": "chat stream function object",
    "litellm": "chat stream function object responses completion",
    "langchain-openai": "chat stream function object completion",
    "langchain-openai by responses": "chat stream function object",
    "instructor": "object function",
    "pydantic-ai": "chat stream function object",
    "pydantic-ai by responses": "chat stream function object",
    "openai of npm": "chat stream usage function streamed_function object responses",
    "anthropic of npm": "chat stream usage function streamed_function object",
    "ai": "chat stream usage function streamed_function object",
    "ai by responses": "chat stream usage function streamed_function object",
}
"""The calls of each client. The clients of npm are the JavaScript clients."""
JAVASCRIPT = {name for name in CALLS if "npm" in name or name.partition(" ")[0] == "ai"}
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


def check(found: dict[str, dict[str, Any]], server: Served, names: Set[str]) -> None:
    """Texts and their lengths equal those of ``generate``; objects and arguments of functions fit
    their schemas."""
    assert {client: set(calls) for client, calls in found.items()} == {
        name: {*CALLS[name].split()} for name in names
    }
    said = server.llm.generate(
        [{"role": "user", "content": "import os"}], Sampling(), max_new_tokens=COUNT
    )
    written = server.llm.generate("def f(x):", Sampling(), max_new_tokens=COUNT).text
    assert said.text and written
    wanted = {"completion": written, "usage": len(said.tokens)}
    for client, calls in found.items():
        for call, value in calls.items():
            if "function" in call or call == "object":
                assert isinstance(value, dict) and value.keys() == {"name", "big"}, (
                    client,
                    call,
                    value,
                )
                assert len(value["name"]) <= 4 and isinstance(value["big"], bool)
            else:
                assert value == wanted.get(call, said.text), (client, call)


def test_clients_for_python(server: Served) -> None:
    try:
        python = environments.make("clients")
    except environments.Unavailable as reason:
        pytest.skip(f"no clients here: {reason}")
    found = ask([python, CLIENTS / "clients.py"], server, **environments.variables(python))
    check(found, server, CALLS.keys() - JAVASCRIPT)


def test_clients_for_javascript(server: Served) -> None:
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("no clients here: node and npm are not installed")
    try:
        directory = environments.make_npm("clients")
    except environments.Unavailable as reason:
        pytest.skip(f"no clients here: {reason}")
    # A module finds packages in its directory.
    script = shutil.copy(CLIENTS / "clients.mjs", directory)
    check(ask(["node", script], server), server, JAVASCRIPT)
