"""Keep a server at saturation, and count what goes wrong: wrong tokens, rows that are not given
back, memory that grows.

    python -m eesd.bench.tools.soak --engine-dir plans/ --minutes 30 -o soak.json

It starts ``eesd-serve`` as a process. Clients send texts of mixed lengths and samplings, hang up at
random points, and send damaged requests. Each complete answer is compared with what its request
gives alone. In the end the server is killed under load and started again.
"""

import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from eesd.bench.measure.results import write_json
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation, load

POOL = 48
"""Different requests. What each gives alone is computed first."""
HANGS_UP, DAMAGED = 0.15, 0.1
"""Shares of the requests."""
DAMAGES: tuple[Any, ...] = (
    b"{",
    b"\xff\xfe",
    b"[]",
    {"prompt": "x", "max_tokens": -1},
    {"prompt": [10**9], "max_tokens": 4},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "\ud800", "max_tokens": 4},
    {"prompt": [1] * 100_000, "max_tokens": 4},
    {"prompt": ["x"] * 10_000},
    {"messages": []},
)
"""Requests that must be answered with a status from 400 to 499."""
LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Gauges that must be 0 when nobody asks for anything."""
PATIENCE = 600.0
"""Seconds that a client waits for a byte. A machine that does other things, too, makes all answers
slow, not wrong."""
WARM_UP = 0.25
"""Share of the time behind which memory may not grow."""


@dataclass(frozen=True)
class Known:
    """A request, and the tokens that it gives alone."""

    body: dict[str, Any]
    tokens: list[int]


@dataclass
class Tally:
    """What happened, how long tokens took, and the first problems; filled by all clients."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, problem: str = "", times: Sequence[float] = ()) -> None:
        with self.lock:
            self.counts[what] += 1
            self.problems += [problem] * (bool(problem) and len(self.problems) < 20)
            self.first += times[:1]
            self.between += [(times[-1] - times[0]) / (len(times) - 1)] if len(times) > 1 else []


def known_requests(llm: LLM, seed: int) -> list[Known]:
    """Requests of mixed lengths and samplings, and what each gives alone."""
    chance, vocab = random.Random(seed), llm.manifest.geometry.vocab_size
    head = llm.with_speculation(Speculation(guard=False, drafter="exit"))
    shared = [chance.randrange(vocab) for _ in range(128)]
    found = []
    for number in range(POOL):
        own = [chance.randrange(vocab) for _ in range(chance.choice([1, 8, 40, 150]))]
        tokens = shared[: chance.choice([0, 0, 64, 128])] + own
        method = chance.choice(["greedy", "coupled", "coupled", "rejection"])
        options: dict[str, Any] = {
            "temperature": 0.0 if method == "greedy" else 0.9,
            "seed": number,
        }
        if chance.random() < 0.3:
            options |= {"top_p": 0.9, "top_k": 50}
        count = min(chance.choice([1, 8, 32, 64, 160]), llm.manifest.max_seq_len - len(tokens))
        draft = method == "rejection"
        sampling = Sampling(**options, method="rejection" if draft else "coupled")
        expected = (head if draft else llm).generate(
            tokens, sampling, max_new_tokens=count, draft=draft
        )
        body = {
            "prompt": tokens,
            "max_tokens": count,
            "stream": True,
            "return_token_ids": True,
            **options,
        }
        found.append(Known(body | ({"sampling_method": method} if draft else {}), expected.tokens))
    return found


class Server:
    """An ``eesd-serve`` on a free port of this machine."""

    def __init__(self, engine_dir: Path, options: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._command = [
            sys.executable,
            "-m",
            "eesd.serve.cli",
            "--engine-dir",
            str(engine_dir),
            *options,
        ]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        command = [*self._command, "--port", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            with suppress(OSError), self.asked("GET", "/ready") as response:
                if response.status == 200:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise EESDError("eesd-serve did not start within a minute; run it by hand to see why.")

    @contextmanager
    def asked(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request. Leaving the block hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        with self.asked("GET", "/metrics") as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"{name}{{", f"{name} "))
        )

    def resident(self) -> int:
        """Bytes of memory that it uses."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def end(self, kind: int) -> int:
        """Send a signal, and wait for the end. Returns the exit status."""
        self._process.send_signal(kind)
        return self._process.wait(60)


def send(server: Server, pool: list[Known], tally: Tally, chance: random.Random) -> None:
    """Send one request of the pool, or a damaged one, and judge the answer."""
    draw = chance.random()
    if draw < DAMAGED:
        path = chance.choice(["/v1/completions", "/v1/chat/completions"])
        with server.asked("POST", path, chance.choice(DAMAGES)) as response:
            text = response.read().decode()
            good = 400 <= response.status < 500 and json.loads(text)["error"]["message"]
            tally.add(
                "refused" if good else "wrong refusal",
                "" if good else f"{response.status}: {text[:200]}",
            )
        return
    hang_up = chance.randrange(1, 20) if draw < DAMAGED + HANGS_UP else None
    read_answer(server, chance.choice(pool), tally, hang_up)


def read_answer(server: Server, known: Known, tally: Tally, hang_up: int | None = None) -> None:
    """Send a request, and compare its stream, or hang up behind so many events."""
    tokens, times, complete, started = list[int](), list[float](), False, time.perf_counter()
    with server.asked("POST", "/v1/completions", known.body) as response:
        if response.status != 200:
            tally.add(f"status {response.status}")
            return time.sleep(0.05)
        for number, line in enumerate(line for line in response if line.startswith(b"data: ")):
            if line.startswith(b"data: [DONE]"):
                complete = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                return tally.add("error in a stream", f"{event['error']}")
            new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            tokens += new
            times += [time.perf_counter() - started] * len(new)
            if number == hang_up:
                return tally.add("hung up")
    if not complete and tokens == known.tokens[: len(tokens)]:
        return tally.add("connection refused or broken")
    if tokens == known.tokens:
        return tally.add("equal", times=times)
    at = next(
        (i for i, pair in enumerate(zip(tokens, known.tokens, strict=False)) if pair[0] != pair[1]),
        "the end",
    )
    options = {name: value for name, value in known.body.items() if name != "prompt"}
    return tally.add(
        "WRONG TOKENS",
        (
            f"{len(known.body['prompt'])} tokens, {options}: {len(tokens)} tokens, which differ "
            f"at {at}"
        ),
    )


@contextmanager
def clients(server: Server, pool: list[Known], count: int) -> Iterator[Tally]:
    """So many clients that send requests inside the block. They finish what they wait for."""
    tally, stopping = Tally(), threading.Event()

    def run(seed: int) -> None:
        chance = random.Random(seed)
        while not stopping.is_set():
            try:
                send(server, pool, tally, chance)
            except TimeoutError:
                tally.add(f"nothing came in {PATIENCE:g} seconds")
            except (OSError, http.client.HTTPException):
                tally.add("connection refused or broken")
                time.sleep(0.05)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(count)]
    for one in threads:
        one.start()
    yield tally
    stopping.set()
    for one in threads:
        one.join(PATIENCE)


def run_load(server: Server, pool: list[Known], count: int, seconds: float) -> dict[str, Any]:
    """Saturate the server, and report."""
    memory, end = list[int](), time.monotonic() + seconds
    with clients(server, pool, count) as tally:
        while time.monotonic() < end:
            time.sleep(min(1.0, seconds / 60))
            memory.append(server.resident())
    time.sleep(0.5)
    settled = memory[int(len(memory) * WARM_UP) :]
    quarter = max(len(settled) // 4, 1)
    before, after = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return {
        "seconds": seconds,
        "counts": dict(sorted(tally.counts.items())),
        "problems": tally.problems,
        "first_token_seconds": _percentiles(tally.first),
        "token_seconds": _percentiles(tally.between),
        "resident_bytes": {
            "after_warm_up": before,
            "at_the_end": after,
            "growth": after / before - 1,
        },
        "pauses": server.metric("vllm:num_preemptions_total"),
        "left": {name: server.metric(f"vllm:{name}") for name in LEFT},
    }


def kill_and_restart(server: Server, pool: list[Known], count: int) -> dict[str, Any]:
    """Kill the server under load, start it again, and send three more requests."""
    with clients(server, pool, count) as tally:
        time.sleep(3)
        server.end(signal.SIGKILL)
        time.sleep(1)
    server.start()
    again = Tally()
    for known in pool[:3]:
        read_answer(server, known, again)
    return {
        "under_load": dict(tally.counts),
        "problems": tally.problems,
        "after_restart": dict(again.counts),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    return (
        {f"p{share}": float(np.percentile(values, share)) for share in (50, 99)} if values else {}
    )


def is_clean(report: dict[str, Any]) -> bool:
    """Whether nothing went wrong."""
    counts, left = report["load"]["counts"], report["load"]["left"]
    bad = [name for name in counts if name not in ("equal", "hung up", "refused", "status 429")]
    restarted = (
        report["restart"]["after_restart"] == {"equal": 3} and not report["restart"]["problems"]
    )
    return (
        not bad
        and counts.get("equal", 0) > 0
        and not any(left.values())
        and restarted
        and report["exit_status"] == 0
    )


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export.")
@click.option(
    "--minutes", type=click.FloatRange(0.05, 10_000), default=30.0, help="Time at saturation."
)
@click.option(
    "--clients",
    "count",
    type=click.IntRange(1, 1000),
    default=24,
    help="Clients; more than rows saturate.",
)
@click.option("--max-rows", type=click.IntRange(1, 1000), default=8, help="Rows of the server.")
@click.option(
    "--kv-memory", type=click.IntRange(1), help="Bytes of keys and values.  [default: the server's]"
)
@click.option("-o", "--output", type=cli.OUTPUT, required=True, help="JSON file with the report.")
def main(
    engine_dir: Path, minutes: float, count: int, max_rows: int, kv_memory: int | None, output: Path
) -> None:
    """Keep a server at saturation, and count what goes wrong."""
    pool = known_requests(load(engine_dir, "ort"), seed=0)
    memory = ["--kv-memory", str(kv_memory)] if kv_memory else []
    server = Server(engine_dir, ["--max-rows", str(max_rows), *memory])
    try:
        report: dict[str, Any] = {"load": run_load(server, pool, count, minutes * 60)}
        report["restart"] = kill_and_restart(server, pool, count)
    finally:
        status = server.end(signal.SIGTERM)
    report |= {"exit_status": status}
    report |= {"clean": is_clean(report)}
    write_json(output, report)
    click.echo(json.dumps(report, indent=1))
    if not report["clean"]:
        raise EESDError("Something went wrong: see the report.")


if __name__ == "__main__":
    main()
