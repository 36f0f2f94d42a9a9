"""Clients that leave a running server, such as the one on Ray Serve, free their rows.

python -m lab.leaving http://127.0.0.1:8000 [times]     # nothing else may use the server
"""

import re
import sys
import time
from typing import Any

import click
import httpx2

LONG: dict[str, Any] = {
    "max_tokens": 1500,
    "max_output_tokens": 1500,
    "ignore_eos": True,
    "stream": True,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell a story"}]}
BODIES = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Tell a story"},
}


def numbers(client: httpx2.Client) -> tuple[float, float, float]:
    """Read the numbers of rows in use, of aborted texts, and of generated tokens from /metrics."""
    text = client.get("/metrics").text
    names = ("num_requests_running{", 'request_success_total{.*"abort"', "generation_tokens_total{")
    running, aborted, tokens = (
        sum(map(float, re.findall(f"^vllm:{name}.* (.*)$", text, re.MULTILINE))) for name in names
    )
    return running, aborted, tokens


def leave(client: httpx2.Client, path: str) -> str:
    """Leave a stream after five events. Return a description of the failure, or '' if there was
    none."""
    _, before, _ = numbers(client)
    with client.stream("POST", path, json=LONG | BODIES[path]) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data"))
        for _ in range(5):
            next(events)
    deadline = time.monotonic() + 10
    while numbers(client)[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    running, aborted, tokens = numbers(client)
    time.sleep(1)
    later = numbers(client)[2] - tokens
    if running or later or aborted != before + 1:
        return f"{path}: {running:.0f} rows run, {aborted - before:.0f} aborted, {later:.0f} tokens"
    return ""


@click.command()
@click.argument("url")
@click.argument("times", default=1)
def main(url: str, times: int) -> None:
    """Leave streams of the server at URL, and check that the rows become free."""
    with httpx2.Client(base_url=url, timeout=120) as client:
        failures = [leave(client, path) for _ in range(times) for path in BODIES]
    found = [failure for failure in failures if failure]
    print(
        *found,
        f"{len(failures) - len(found)} of {len(failures)} clients freed their rows",
        sep="\n",
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
