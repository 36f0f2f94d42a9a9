"""Load a running server with clients that leave, read slowly or send half a request, and compare
all texts.

    eesd-serve --engine-dir plans/ --max-rows 12 --kv-memory 20MB
    python -m lab.load --minutes 15

Each client repeats greedy requests. After the load, the server answers each request again, alone
and with ``"draft": false``. Each text must equal this answer. If the client left, the text must
equal the beginning of the answer.
"""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import click

WAYS = ("whole", "stream", "stream", "leave", "slow", "half")
"""The ways in which a client may behave. One is chosen at random for each request."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


class Load:
    """The clients of a server.

    Attributes:
        counts: Number of requests for each behaviour of the client, and number of errors.
        texts: Maps each request (as JSON) to the texts that were received. Each text is stored with
            whether it is complete.
    """

    def __init__(self, port: int, prompts: list[str]) -> None:
        self._port = port
        self._prompts = prompts
        self.counts = Counter[str]()
        self.texts: dict[str, set[tuple[str, bool]]] = {}

    def client(self, seed: int, minutes: float) -> None:
        """Send requests until the time is over."""
        chance = random.Random(seed)
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends:
            way = chance.choice(WAYS)
            try:
                if way == "half":
                    self._half(chance)
                else:
                    self._ask(way, chance)
                self.counts[way] += 1
            except (OSError, HTTPException, ValueError) as error:
                self.counts[f"{way}: {error!r}"] += 1

    def _half(self, chance: random.Random) -> None:
        """Send a part of a head or of a body, wait, and leave."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            connection.sendall(head + chance.choice([b"", b'\r\n{"prompt": "a']))
            time.sleep(3 * chance.random())

    def _ask(self, way: str, chance: random.Random) -> None:
        """Send a request for a short or a long text, and keep the answer. Some requests ask for
        JSON."""
        body: dict[str, Any] = {
            "prompt": chance.choice(self._prompts)[: chance.choice([40, 40, 200, 400, 1600])],
            "max_tokens": chance.choice([8, 30, 100, 200]),
            "temperature": 0,
        }
        if chance.random() < 0.1:
            body["guided_json"] = SCHEMA
        response = self._post({**body, "stream": way != "whole"})
        with response:
            if way == "whole":
                text = json.load(response)["choices"][0]["text"]
            else:
                text = ""
                left = chance.randint(1, 30)
                for piece in events(response):
                    text += piece
                    left -= 1
                    if way == "leave" and not left:
                        break
                    if way == "slow":
                        time.sleep(0.2)
        complete = way != "leave" or left > 0
        self.texts.setdefault(json.dumps(body), set()).add((text, complete))

    def _post(self, body: dict[str, Any]) -> HTTPResponse:
        """Raises ValueError if the status is not 200."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return response

    def wrong(self) -> list[str]:
        """Return the requests whose text differs from the text of plain decoding without other
        requests."""
        found = []
        for request, texts in self.texts.items():
            alone = {**json.loads(request), "draft": False, "cache_salt": "alone"}
            with self._post(alone) as response:
                expected = json.load(response)["choices"][0]["text"]
            if any(
                text != (expected if complete else expected[: len(text)])
                for text, complete in texts
            ):
                found.append(request)
        return found


def events(response: HTTPResponse) -> Iterator[str]:
    """Yield the texts of a stream. Raises ValueError if an event is an error, or the stream is
    cut."""
    for line in response:
        if line.startswith(b"data: {"):
            value = json.loads(line[6:])
            if "error" in value:
                raise ValueError(value["error"]["message"])
            yield value["choices"][0]["text"]
        elif line.startswith(b"data: [DONE]"):
            return
    raise ValueError("the stream has no end")


def metrics(port: int) -> dict[str, float]:
    """Return the values of ``/metrics`` by name. Labels are left out, so the last value of a name
    counts."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs}


@click.command()
@click.option("--port", default=8000)
@click.option("--minutes", default=15.0)
@click.option("--clients", default=16)
@click.option("--seed", default=0)
def main(port: int, minutes: float, clients: int, seed: int) -> None:
    """Put load on the server, and print counts as JSON. The exit code is 1 if a text is wrong."""
    text = "\n".join(path.read_text() for path in sorted(Path("docs").glob("*.md")))
    chance = random.Random(seed)
    starts = [chance.randrange(len(text) - 2000) for _ in range(24)]
    load = Load(port, [text[start : start + 2000] for start in starts])
    seen = list[dict[str, float]]()
    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(load.client, seed + number, minutes) for number in range(clients)]
        while not all(one.done() for one in running):
            seen.append(metrics(port))
            time.sleep(1)
    for one in running:
        one.result()
    wrong = load.wrong()
    resident = [int(one["process_resident_memory_bytes"]) >> 20 for one in seen]
    found = {
        "requests": load.counts,
        "share of KV memory used, at most": max(one["vllm:kv_cache_usage_perc"] for one in seen),
        "pauses for memory": seen[-1]["vllm:num_preemptions_total"],
        "resident MiB at the start, at most, at the end": [
            resident[0],
            max(resident),
            resident[-1],
        ],
        "texts compared": sum(map(len, load.texts.values())),
        "wrong": len(wrong),
    }
    print(json.dumps(found, indent=1))
    for request in wrong[:5]:
        print(request)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
