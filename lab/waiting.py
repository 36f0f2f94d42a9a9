"""Compare two checkouts by the time to the first token of short and long prompts in one batch.

    python -m lab.waiting --engine-dir plans/ --against OTHER/src

Sixteen clients take requests from one list. Both checkouts run the same list in turn, and must give
the same tokens. Each run is in a new process with one thread. All times are processor times, so
other work on the machine changes them little.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import click
import numpy as np

KINDS = {"short": (16, 64), "middle": (200, 300), "long": (1000, 1400)}
"""For each kind of prompt, the range of its number of tokens."""
SHARES = (0.6, 0.2, 0.2)
NEW = (16, 64)
"""The range of the number of new tokens of a request."""
CLIENTS = 16


def requests(count: int, tokens: Sequence[int], seed: int) -> list[tuple[str, list[int], int]]:
    """Return the kind, the prompt and the number of new tokens of each request. The prompts are cut
    out of one text."""
    random = np.random.default_rng(seed)
    found = []
    for kind in random.choice([*KINDS], count, p=SHARES):
        length = int(random.integers(*KINDS[kind]))
        start = int(random.integers(0, len(tokens) - length))
        found.append((str(kind), list(tokens[start : start + length]), int(random.integers(*NEW))))
    return found


def work(engine_dir: str, count: int, seed: int) -> dict[str, Any]:
    """Run the list. Returns the times to first tokens by kind, the times between the rounds of a
    request, the tokens per second, and the tokens of each request."""
    import eesd
    from eesd.runtime.batch.scheduler import BatchOptions
    from eesd.runtime.request import Request

    llm = eesd.load(engine_dir, threads=1)
    text = "\n".join(path.read_text() for path in sorted(Path("docs").glob("*.md")))
    given = requests(count, llm.encode(text[:400_000]), seed)
    service = eesd.Service(llm, BatchOptions(max_rows=CLIENTS, prefix_memory=0))
    told = SimpleQueue[tuple[int, float, Any]]()
    begun = dict[int, float]()
    first = dict[int, float]()
    last = dict[int, float]()
    pauses = list[float]()
    tokens: list[list[int]] = [[] for _ in given]

    def submit(number: int) -> None:
        _, prompt, new = given[number]
        begun[number] = time.process_time()
        request = Request(tokens=prompt, max_new_tokens=new, ignore_eos=True)
        service.submit(request, lambda update: told.put((number, time.process_time(), update)))

    started = time.process_time()
    for number in range(min(CLIENTS, count)):
        submit(number)
    next_one = CLIENTS
    ended = 0
    while ended < count:
        number, now, update = told.get()
        tokens[number] += [output.token for output in update.tokens]
        if update.tokens:
            first.setdefault(number, now)
            pauses += [now - last[number]] if number in last else []
            last[number] = now
        if update.finish_reason:
            ended += 1
            if next_one < count:
                submit(next_one)
                next_one += 1
    seconds = time.process_time() - started
    service.close()
    waits: dict[str, list[float]] = {kind: [] for kind in KINDS} | {"rounds": pauses}
    for number, (kind, _, _) in enumerate(given):
        waits[kind].append(first[number] - begun[number])
    total = sum(len(prompt) + new for _, prompt, new in given)
    return {"waits": waits, "tokens a second": total / seconds, "tokens": tokens}


def run(source: str, *arguments: object) -> dict[str, Any]:
    """Run :func:`work` in a process with the packages of another checkout."""
    command = [sys.executable, __file__, "--worker", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shown(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the quantiles over all runs and the median tokens per second."""
    found: dict[str, Any] = {}
    for kind in runs[0]["waits"]:
        waits = [wait for one in runs for wait in one["waits"][kind]]
        found[kind] = {
            "count": len(waits),
            **{
                f"p{share}": round(float(np.percentile(waits, share)), 3)
                for share in (50, 75, 95, 100)
            },
        }
    found["tokens a second"] = round(median(one["tokens a second"] for one in runs), 1)
    return found


@click.command()
@click.option("--engine-dir", required=True, help="Engines that both checkouts run.")
@click.option("--against", help="Folder with the package eesd of another checkout.")
@click.option("--requests", "count", default=64, help="Length of the list.")
@click.option("--repeat", default=2, help="Runs of each checkout.")
@click.option("--seed", default=0, help="Seed of the list; runs use the next ones.")
@click.option("--worker", is_flag=True, help="Run the list once, and print JSON.")
def main(engine_dir: str, against: str, count: int, repeat: int, seed: int, worker: bool) -> None:
    """Compare two checkouts, and print times to the first token in seconds."""
    if worker:
        print(json.dumps(work(engine_dir, count, seed)))
        return
    sources = {"this": str(Path(__file__).parents[1] / "src")}
    if against:
        sources["other"] = against
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for number in range(repeat):
        options = ("--engine-dir", engine_dir, "--requests", count, "--seed", seed + number)
        for name in [*sources][:: (-1) ** number]:
            found[name].append(run(sources[name], *options))
        texts = [runs[-1].pop("tokens") for runs in found.values()]
        assert all(text == texts[0] for text in texts), "the checkouts give different tokens"
    for name, runs in found.items():
        print(json.dumps({"checkout": name, **shown(runs)}))


if __name__ == "__main__":
    main()
