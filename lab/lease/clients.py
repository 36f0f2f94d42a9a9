"""Clients of the server in a separate process, so that they do not slow down the server's Python.

It needs only the server's packages, because a machine that is lent for minutes has few packages.
"""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from statistics import median
from typing import Any


def streamed(address: str, clients: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the results of clients that ask for the same completion at once. All of them must get
    the same tokens. Tokens per second are summed over all clients."""
    command = [sys.executable, __file__, address.partition("//")[2], str(clients), json.dumps(body)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return found


def _ask(
    address: str, body: dict[str, Any], together: threading.Barrier
) -> tuple[float, float, float, list[int]]:
    """Return the times at which a request starts, gets its first token and ends, and the tokens of
    the request."""
    connection = HTTPConnection(address, timeout=120)
    tokens = list[int]()
    first = 0.0
    connection.connect()
    together.wait()
    began = time.perf_counter()
    asked = json.dumps(body | {"stream": True, "return_token_ids": True})
    connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            tokens += [
                token
                for choice in json.loads(line[6:])["choices"]
                for token in choice.get("token_ids") or ()
            ]
            first = first or (time.perf_counter() if tokens else 0.0)
    return began, first, time.perf_counter(), tokens


def main(address: str, clients: int, body: dict[str, Any]) -> None:
    with ThreadPoolExecutor(clients) as pool:
        asked = list(
            pool.map(
                partial(_ask, address, body), [threading.Barrier(clients, timeout=60)] * clients
            )
        )
    began, first, ended, texts = zip(*asked, strict=True)
    assert all(text == texts[0] for text in texts), "clients got different tokens"
    waits = [brought - start for brought, start in zip(first, began, strict=True)]
    speed = sum(map(len, texts)) / (max(ended) - min(began))
    print(
        json.dumps(
            {
                "tokens a second": speed,
                "seconds to the first token": median(waits),
                "tokens": texts[0],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
