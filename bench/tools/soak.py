"""Keep a server at saturation, and count what goes wrong: wrong tokens, rows that are not given back, memory that grows.

    python -m eesd.bench.tools.soak --engine-dir plans/ --minutes 30 -o soak.json

It starts ``eesd-serve`` as a process. Clients send texts of mixed lengths and samplings, hang up at random points, and send
damaged requests. Each complete answer is compared with what its request gives alone. In the end the server is killed under load
and started again.
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
from collections.abc import Iterator
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
"""Seconds that a client waits for a byte. A machine that does other things, too, makes all answers slow, not wrong."""
WARM_UP = 0.25
"""Share of the time behind which memory may not grow."""


@dataclass(frozen=True)
class Known:
    """A request, and the tokens that it gives alone."""

    body: dict[str, Any]
    tokens: list[int]


@dataclass
class Tally:
    """What happened; filled by all clients."""

    counts: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, problem: str = "") -> None:
        with self.lock:
            self.counts[what] += 1
            if problem and len(self.wrong) < 20:
                self.wrong.append(problem)


def known_requests(llm: LLM, seed: int) -> list[Known]:
    """Requests of mixed lengths and samplings, and what each gives alone."""
    chance, vocab = random.Random(seed), llm.manifest.geometry.vocab_size
    fixed = llm.with_speculation(Speculation("fixed:k=2", guard=False, drafter="exit"))
    shared = [chance.randrange(vocab) for _ in range(128)]
    found = []
    for number in range(POOL):
        tokens = shared[: chance.choice([0, 0, 64, 128])] + [
            chance.randrange(vocab) for _ in range(chance.choice([1, 8, 40, 150]))
        ]
        method = chance.choice(["greedy", "coupled", "coupled", "rejection"])
        options: dict[str, Any] = {"temperature": 0.0 if method == "greedy" else 0.9, "seed": number}
        if chance.random() < 0.3:
            options |= {"top_p": 0.9, "top_k": 50}
        count = min(chance.choice([1, 8, 32, 64, 160]), llm.manifest.max_seq_len - len(tokens))
        sampling = Sampling(**options, method="rejection" if method == "rejection" else "coupled")
        expected = (fixed if method == "rejection" else llm).generate(
            tokens, sampling, max_new_tokens=count, draft=method == "rejection"
        )
        body = {"prompt": tokens, "max_tokens": count, "stream": True, "return_token_ids": True, **options}
        if method == "rejection":
            body["sampling_method"] = method
        found.append(Known(body, expected.tokens))
    return found


class Server:
    """An ``eesd-serve`` on a free port of this machine."""

    def __init__(self, engine_dir: Path, options: list[str]) -> None:
        self._command = [sys.executable, "-m", "eesd.serve.cli", "--engine-dir", str(engine_dir), *options]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process = subprocess.Popen(
            [*self._command, "--port", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            with suppress(OSError), self.asked("GET", "/ready") as response:
                if response.status == 200:
                    return
            if self._process.poll() is not None:
                raise EESDError("eesd-serve did not start; run it by hand to see why.")
            time.sleep(0.1)
        raise EESDError("eesd-serve was not ready within a minute; run it by hand to see why.")

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
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(values)

    def resident(self) -> int:
        """Bytes of memory that it uses."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def end(self, kind: int) -> int:
        """Send a signal, and wait for the end. Returns the exit status."""
        assert self._process is not None
        self._process.send_signal(kind)
        return self._process.wait(60)


class Client(threading.Thread):
    """Sends requests until it is told to stop."""

    def __init__(self, server: Server, pool: list[Known], tally: Tally, seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.pool, self.tally = server, pool, tally
        self.chance = random.Random(seed)
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                self._ask()
            except TimeoutError:
                self.tally.add(f"nothing came in {PATIENCE:g} seconds")
            except (OSError, http.client.HTTPException):
                self.tally.add("connection refused or broken")
                time.sleep(0.05)

    def _ask(self) -> None:
        draw = self.chance.random()
        if draw < DAMAGED:
            path = self.chance.choice(["/v1/completions", "/v1/chat/completions"])
            with self.server.asked("POST", path, self.chance.choice(DAMAGES)) as response:
                self._judge_refusal(response)
            return
        known = self.chance.choice(self.pool)
        hang_up = self.chance.randrange(1, 20) if draw < DAMAGED + HANGS_UP else None
        started = time.perf_counter()
        with self.server.asked("POST", "/v1/completions", known.body) as response:
            if response.status != 200:
                self.tally.add(f"status {response.status}")
                time.sleep(0.05)
                return
            self._read(response, known, hang_up, started)

    def _judge_refusal(self, response: http.client.HTTPResponse) -> None:
        text = response.read().decode()
        good = 400 <= response.status < 500 and json.loads(text)["error"]["message"]
        self.tally.add("refused" if good else "wrong refusal", "" if good else f"{response.status}: {text[:200]}")

    def _read(self, response: http.client.HTTPResponse, known: Known, hang_up: int | None, started: float) -> None:
        """Read a stream, and compare it."""
        tokens: list[int] = []
        times: list[float] = []
        complete = False
        for number, line in enumerate(line for line in response if line.startswith(b"data: ")):
            if line.startswith(b"data: [DONE]"):
                complete = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                self.tally.add("error in a stream", f"{event['error']}")
                return
            new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            tokens += new
            times += [time.perf_counter() - started] * bool(new)
            if number == hang_up:
                self.tally.add("hung up")
                return
        if not complete and tokens == known.tokens[: len(tokens)]:
            self.tally.add("connection refused or broken")
            return
        equal = tokens == known.tokens
        self.tally.add("equal" if equal else "WRONG TOKENS", "" if equal else _difference(known, tokens))
        with self.tally.lock:
            self.tally.first.append(times[0])
            if len(tokens) > 1:
                self.tally.between.append((times[-1] - times[0]) / (len(tokens) - 1))


def _difference(known: Known, tokens: list[int]) -> str:
    at = next((i for i, pair in enumerate(zip(tokens, known.tokens, strict=False)) if pair[0] != pair[1]), "the end")
    options = {name: value for name, value in known.body.items() if name != "prompt"}
    return f"{len(known.body['prompt'])} tokens, {options}: {len(tokens)} tokens, which differ at {at}"


def clients(server: Server, pool: list[Known], tally: Tally, count: int) -> list[Client]:
    """Start clients."""
    started = [Client(server, pool, tally, seed) for seed in range(count)]
    for one in started:
        one.start()
    return started


def stop(running: list[Client]) -> None:
    """Let clients finish what they wait for."""
    for one in running:
        one.stopping.set()
    for one in running:
        one.join(PATIENCE)


def run_load(server: Server, pool: list[Known], count: int, seconds: float) -> dict[str, Any]:
    """Saturate the server, and report."""
    tally, memory = Tally(), list[int]()
    running = clients(server, pool, tally, count)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, seconds / 60))
        memory.append(server.resident())
    stop(running)
    time.sleep(0.5)
    settled = memory[int(len(memory) * WARM_UP) :]
    quarter = max(len(settled) // 4, 1)
    before, after = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return {
        "seconds": seconds,
        "counts": dict(sorted(tally.counts.items())),
        "problems": tally.wrong,
        "first_token_seconds": _percentiles(tally.first),
        "token_seconds": _percentiles(tally.between),
        "resident_bytes": {"after_warm_up": before, "at_the_end": after, "growth": after / before - 1},
        "left": {name: server.metric(f"vllm:{name}") for name in LEFT},
    }


def kill_and_restart(server: Server, pool: list[Known], count: int) -> dict[str, Any]:
    """Kill the server under load, start it again, and send one more request."""
    tally = Tally()
    running = clients(server, pool, tally, count)
    time.sleep(3)
    server.end(signal.SIGKILL)
    time.sleep(1)
    stop(running)
    server.start()
    again = Tally()
    last = Client(server, pool, again, 99)
    for known in pool[:3]:
        with server.asked("POST", "/v1/completions", known.body) as response:
            last._read(response, known, None, time.perf_counter())
    return {"under_load": dict(tally.counts), "problems": tally.wrong, "after_restart": dict(again.counts)}


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 99)} if values else {}


def is_clean(report: dict[str, Any]) -> bool:
    """Whether nothing went wrong."""
    counts, left = report["load"]["counts"], report["load"]["left"]
    bad = [name for name in counts if name not in ("equal", "hung up", "refused", "status 429")]
    restarted = report["restart"]["after_restart"] == {"equal": 3} and not report["restart"]["problems"]
    return not bad and counts.get("equal", 0) > 0 and not any(left.values()) and restarted and report["exit_status"] == 0


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export.")
@click.option("--minutes", type=click.FloatRange(0.05, 10_000), default=30.0, help="Time at saturation.")
@click.option("--clients", "count", type=click.IntRange(1, 1000), default=24, help="Clients; more than rows saturate.")
@click.option("--max-rows", type=click.IntRange(1, 1000), default=8, help="Rows of the server.")
@click.option("-o", "--output", type=cli.PATH, required=True, help="JSON file with the report.")
def main(engine_dir: Path, minutes: float, count: int, max_rows: int, output: Path) -> None:
    """Keep a server at saturation, and count what goes wrong."""
    llm = load(engine_dir, "ort")
    pool = known_requests(llm, seed=0)
    del llm
    server = Server(engine_dir, ["--max-rows", str(max_rows)])
    server.start()
    try:
        report: dict[str, Any] = {"load": run_load(server, pool, count, minutes * 60)}
        report["restart"] = kill_and_restart(server, pool, count)
    finally:
        status = server.end(signal.SIGTERM)
    report["exit_status"] = status
    report["clean"] = is_clean(report)
    write_json(output, report)
    click.echo(json.dumps(report, indent=1))
    if not report["clean"]:
        raise EESDError("Something went wrong: see the report.")


if __name__ == "__main__":
    main()
