"""A real server in this process. It uses the real batch and a real socket, and uvicorn runs in a
thread."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray
from openai import OpenAI

import eesd
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.llm import LLM
from eesd.serve.http.options import ServeOptions, Serving
from support.listening import listening

OPTIONS = ServeOptions()
BATCH = BatchOptions()


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        url: The address of the server.
        serving: The state that its routes share.
        llm: An LLM that has loaded the same engines separately, for comparison.
    """

    url: str
    serving: Serving
    llm: LLM

    @property
    def http(self) -> httpx2.Client:
        # The client has no certificates, because reading them is slow.
        return httpx2.Client(base_url=self.url, timeout=60, verify=False)

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        with self.http as http:
            return http.post(path, json=body, **more)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """Returns a completion. The request must succeed."""
        response = self.post("/v1/completions", {"prompt": prompt, **body})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """Returns the events of a stream. The request must succeed. The name of each event is its
        type."""
        found = []
        with self.http.stream("POST", path, json={**body, "stream": True}) as stream:
            assert stream.status_code == 200, stream.read()
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line:
                    found.append(json.loads(line.removeprefix("data: ")))
                    assert found[-1]["type"] == name
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Returns a value of /metrics, or 0 if it does not exist yet."""
        given = {"model_name": self.serving.model_name, "engine": "0", **labels}
        return self.serving.metrics.registry.get_sample_value(name, given) or 0.0

    def idle(self) -> None:
        """Wait until no request runs."""

        def quiet() -> bool:
            load = self.serving.service.load()
            return self.serving.active == load.queued + load.prefilling + load.running == 0

        eventually(quiet)


@contextmanager
def served(
    engine: Path,
    options: ServeOptions = OPTIONS,
    batch: BatchOptions = BATCH,
    plain_content: bool = False,
) -> Iterator[Served]:
    """Serve an engine directory on a free port."""
    service = Service(eesd.load(engine, plain_content=plain_content), batch)
    with listening(service, options) as (url, serving):
        yield Served(url, serving, eesd.load(engine, plain_content=plain_content))


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition holds, or fail."""
    spent = 0.0
    last = monotonic()
    while not condition():
        now = monotonic()
        # Time while this process was stopped does not count.
        spent = spent + min(now - last, 1.0)
        last = now
        assert spent < seconds, "it did not happen"
        sleep(0.01)


def events(lines: Iterator[str]) -> list[Any]:
    """Returns the values of server-sent events. The last value is the string ``[DONE]`` if it was
    sent."""
    found = []
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


class Held:
    """A constraint that allows everything, and blocks the batch after some tokens until it is
    released."""

    def __init__(self, after: int = 1) -> None:
        self._after = after
        self._released = threading.Event()
        self.reached = threading.Event()

    def release(self) -> None:
        self._released.set()

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        if len(tokens) >= self._after:
            self.reached.set()
            assert self._released.wait(60)
        return None

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return ()
