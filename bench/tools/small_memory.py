"""What a server loses whose memory is a third of what its chats need.

    python -m eesd.bench.tools.small_memory --engine-dir plans/ -o small-memory.json

Clients send long and short texts to two servers in turn: one has memory for the keys and values of all that run at once, the
other a third of it. Nothing may be refused, all tokens must be equal, and their tokens a second are compared.
"""

import json
import signal
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.results import describe_machine
from eesd.bench.measure.tasks import load_tasks
from eesd.bench.tools.soak import Server, end_with
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.runtime.llm import load

PART = 3
"""The smaller memory is this part of what is needed."""
SLOWEST = 0.9
"""Tokens a second with the smaller memory, over those with enough."""
LENGTHS = ((20, 200), (60, 100), (200, 400), (900, 300))
"""Tokens of prompts, and new ones."""


def bodies_of(count: int, texts: Sequence[Sequence[int]], longest: int) -> list[dict[str, Any]]:
    """Requests of all lengths in turn. Each prompt is the end of some texts, one behind another."""
    found = []
    for number in range(count):
        prompt, new = (min(length, longest // 2) for length in LENGTHS[number % len(LENGTHS)])
        tokens = list[int]()
        for text in islice(cycle(texts), number % len(texts), None):
            if len(tokens) >= prompt:
                break
            tokens += text
        found.append({"prompt": tokens[-prompt:], "max_tokens": new, "seed": number, "temperature": 0.8})
    return found


def ask_all(server: Server, bodies: list[dict[str, Any]], clients: int) -> tuple[float, list[list[int]]]:
    """Tokens a second of all requests, and the tokens of each. Raises :class:`EESDError` if one is refused."""

    def ask(body: dict[str, Any]) -> list[int]:
        with server.asked("POST", "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}) as response:
            text = response.read().decode()
        if response.status != 200:
            raise EESDError(f"A request was refused with the status {response.status}: {text[:200]}")
        tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return tokens

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(ask, bodies))
    return sum(map(len, found)) / (time.perf_counter() - started), found


def report_of(rates: dict[str, list[float]], wrong: int, pauses: float) -> dict[str, Any]:
    """Rates in tokens a second, their medians' ratio, and whether all is as it should be."""
    ratio = statistics.median(rates["a third"]) / statistics.median(rates["enough"])
    clean = not wrong and pauses > 0 and ratio >= SLOWEST
    return {"tokens_per_second": rates, "ratio": ratio, "wrong": wrong, "pauses": pauses, "clean": clean}


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export.")
@click.option("--clients", type=click.IntRange(2, 256), default=12, help="Texts at once.")
@click.option("--texts", type=click.IntRange(4, 10_000), default=48, help="Texts in each round.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, help="Rounds of each server, in turn.")
@click.option("--task", multiple=True, help="Prompts, as eesd-bench takes them; repeatable.  [default: the bundled ones]")
@click.option("-o", "--output", type=cli.OUTPUT, required=True, help="JSON file with the report.")
def main(engine_dir: Path, clients: int, texts: int, rounds: int, task: tuple[str, ...], output: Path) -> None:
    """Compare a server that has a third of the memory that its texts need with one that has enough."""
    llm = load(engine_dir, "ort", speculation=None)
    prompts = [llm.encode(prompt.text) for prompt in load_tasks(task)]
    bodies = bodies_of(texts, prompts, llm.manifest.max_seq_len)
    slot_bytes = llm.engines.verify.new_kv_caches(1)[0].slot_bytes
    lengths = [len(body["prompt"]) + body["max_tokens"] for body in bodies]
    needed = int(sum(lengths) / len(lengths) * clients * slot_bytes)
    options = ["--prefix-memory", "0", "--max-rows", str(clients)]
    servers = {name: Server(engine_dir, [*options, "--kv-memory", str(size)]) for name, size in
               (("enough", 2 * needed), ("a third", needed // PART))}  # fmt: skip
    rates, wrong = {name: list[float]() for name in servers}, 0
    try:
        for _ in range(rounds):
            rounds_tokens = []
            for name, server in servers.items():
                rate, tokens = ask_all(server, bodies, clients)
                rates[name].append(rate)
                rounds_tokens.append(tokens)
            wrong += sum(one != other for one, other in zip(*rounds_tokens, strict=True))
        pauses = servers["a third"].metric("vllm:num_preemptions_total")
    finally:
        for server in servers.values():
            server.end(signal.SIGTERM)
    report = {"machine": describe_machine(), "needed_bytes": needed, **report_of(rates, wrong, pauses)}
    words = "Texts differ, nothing was paused, or the smaller memory costs more than a tenth: see the report."
    end_with(report, output, report["clean"], words)


if __name__ == "__main__":
    main()
