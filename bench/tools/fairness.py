"""How long those who read a stream wait while a long prompt is read beside them.

    python -m eesd.bench.tools.fairness --engine-dir plans/ -o fairness.json

It starts ``eesd-serve`` as a process. Some clients stream; then another one sends a long prompt, again and again. The times
between two events of a stream are compared: those while the prompt is read with those while no prompt is.
"""

import random
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.results import describe_machine
from eesd.bench.tools.soak import Server, end_with
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.manifest_reader import load_manifest

MOST = {"p50": 2.0, "p99": 4.0}
"""How much longer the gaps may be."""


@dataclass
class Gaps:
    """Times of the events of all streams, by stream, and the spans in which a long prompt was read."""

    events: list[list[float]]
    spans: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def split(self) -> tuple[list[float], list[float]]:
        """Seconds between two events of a stream: without a long prompt, and beside one."""
        without, beside = list[float](), list[float]()
        for times in self.events:
            for before, after in pairwise(times):
                shares = [min(after, stop) - max(before, start) for start, stop in self.spans]
                if any(share > 0 for share in shares):
                    beside.append(after - before)
                elif self.spans and before > self.spans[0][0] - 5:
                    without.append(after - before)
        return without, beside


def stream(server: Server, prompt: list[int], count: int, times: list[float], stopping: threading.Event, gaps: Gaps) -> None:
    """Read one stream, and note when its events come. Its text is random: one that repeats itself would soon be complete."""
    body = {
        "prompt": prompt,
        "max_tokens": count,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "temperature": 1,
    }
    with server.asked("POST", "/v1/completions", body) as response:
        if response.status != 200:
            gaps.failed.append(response.read().decode(errors="replace")[:200])
            return
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            if stopping.is_set():
                return


def measure(server: Server, streams: int, prompt: int, again: int, seed: int, vocab: int, longest: int) -> Gaps:
    """Let so many clients stream, and read a long prompt beside them, several times.

    Raises:
        EESDError: A stream ended before the last prompt was read, or was refused.
    """
    chance = random.Random(seed)
    gaps, stopping = Gaps([[] for _ in range(streams)]), threading.Event()
    threads = [
        threading.Thread(
            target=stream,
            args=(server, [chance.randrange(3, vocab) for _ in range(32)], longest - 64, times, stopping, gaps),
            daemon=True,
        )
        for times in gaps.events
    ]
    for one in threads:
        one.start()
    while not all(len(times) > 8 for times in gaps.events) and all(one.is_alive() for one in threads):
        time.sleep(0.05)
    for _ in range(again):
        time.sleep(2)
        body = {"prompt": [chance.randrange(3, vocab) for _ in range(prompt)], "max_tokens": 1, "temperature": 0}
        started = time.perf_counter()
        with server.asked("POST", "/v1/completions", body) as response:
            text = response.read().decode(errors="replace")
            if response.status != 200:
                gaps.failed.append(text[:200])
        gaps.spans.append((started, time.perf_counter()))
    time.sleep(2)
    alive = sum(one.is_alive() for one in threads)
    stopping.set()
    for one in threads:
        one.join(60)
    if gaps.failed or alive < streams:
        reason = gaps.failed[0] if gaps.failed else "their texts were complete"
        raise EESDError(f"{streams - alive} streams ended early ({reason}); send the prompt fewer times, with --again.")
    return gaps


def report_of(gaps: Gaps) -> dict[str, Any]:
    """Medians and 99 % quantiles of the gaps in seconds, and their ratios."""
    without, beside = gaps.split()
    found = {"without": _quantiles(without), "beside": _quantiles(beside)}
    ratios = {name: found["beside"][name] / found["without"][name] for name in MOST}
    return {
        "gaps_seconds": found,
        "counts": {"without": len(without), "beside": len(beside)},
        "ratios": ratios,
        "prompt_seconds": [stop - start for start, stop in gaps.spans],
        "fair": all(ratios[name] <= most for name, most in MOST.items()),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        raise EESDError("The streams brought too little to compare; use a longer prompt, or more streams.")
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export.")
@click.option("--streams", type=click.IntRange(1, 256), default=8, help="Clients that stream.")
@click.option("--prompt-tokens", type=click.IntRange(1, 10**6), default=3500, help="Of the long prompt.")
@click.option("--again", type=click.IntRange(1, 100), default=3, help="How often it is sent.")
@click.option("-o", "--output", type=cli.OUTPUT, required=True, help="JSON file with the report.")
def main(engine_dir: Path, streams: int, prompt_tokens: int, again: int, output: Path) -> None:
    """Measure how long streams wait while a long prompt is read beside them."""
    manifest = load_manifest(engine_dir)
    server = Server(engine_dir, ["--prefix-memory", "0", "--max-rows", str(streams + 1)])
    try:
        gaps = measure(server, streams, prompt_tokens, again, 0, manifest.geometry.vocab_size, manifest.max_seq_len)
    finally:
        server.end(signal.SIGTERM)
    report = {"machine": describe_machine(), "streams": streams, "prompt_tokens": prompt_tokens} | report_of(gaps)
    words = f"Gaps are more than {MOST['p50']:g} (median) or {MOST['p99']:g} (99 %) times as long."
    end_with(report, output, bool(report["fair"]), words)


if __name__ == "__main__":
    main()
