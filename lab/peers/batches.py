"""Measures many requests at once. EESD and other runtimes that batch are compared by the throughput
and the latency of their batches at several concurrencies.

Each contestant is a separate process, and waits while another runs. At concurrency n, n clients
request one text after another. All contestants take a turn, and this is repeated.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from eesd.bench.measure.results import describe_machine, shown_machine
from eesd.bench.measure.tasks import load_tasks
from eesd.common.markdown import table
from eesd.runtime.llm import load
from lab.peers.contestants import EESD, LLAMA_CPP, WORKERS, Contestant
from lab.peers.process import PeerError, Process

KIND = "batches"
BATCH_WORKERS = {
    EESD: "eesd_peer.py",
    LLAMA_CPP: "llama_cpp_peer.py",
    "OpenVINO": "openvino_peer.py",
}
"""Runtimes that batch. llama.cpp's server is in the package xllamacpp."""
MODES = ("automatic", "always", "never")
"""The modes of EESD's batch. Drafting depends on the load, or is done in every round, or is never
done."""
ROWS = 16
"""Maximum number of requests that a contestant runs at the same time."""


@dataclass(frozen=True)
class Options:
    """Options of a measurement.

    Attributes:
        concurrency: The numbers of clients in the order in which they are measured.
        new_tokens, shortest: Number of tokens of the longest text and of the shortest text.
        prompt_tokens: Maximum number of tokens of a prompt.
        rounds: Repetitions.
        levels: Number of levels that EESD drafts in the mode ``always``.
        threads: CPU threads of each contestant.
    """

    concurrency: tuple[int, ...]
    new_tokens: int
    shortest: int
    prompt_tokens: int
    rounds: int
    levels: int
    threads: int


def entries(contestants: Sequence[Contestant]) -> dict[str, tuple[Contestant, str]]:
    """Return the contestants and their modes by name. EESD has three modes, and each of the other
    runtimes that batch has one."""
    found = {}
    for one in contestants:
        if one.is_plain and one.peer in BATCH_WORKERS:
            for mode in MODES if one.peer == EESD else ("plain",):
                found[f"{one.peer}, {mode}" if one.peer == EESD else one.peer] = (one, mode)
    return found


def measure(
    contestants: Sequence[Contestant],
    prompts: list[list[int]],
    options: Options,
    pythons: dict[str, str],
    seconds: float,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all contestants and return the content of the JSON file. A contestant that cannot be
    loaded is left out.

    Args:
        contestants: The contestants that read the GGUF file.
        prompts: Token ids.
        options: Measurements to make.
        pythons: The interpreter of each peer.
        seconds: Longest time of one measurement.
        report: A function that is called with a line for each measurement.
    """
    who = entries(contestants)
    count = options.new_tokens
    settings = {
        "threads": options.threads,
        "rows": ROWS,
        "slots": 2 * options.prompt_tokens + count,
        "levels": options.levels,
    }
    samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
    skipped = dict[str, str]()
    packages = dict[str, str]()
    counts = [
        options.shortest + 37 * number % (count + 1 - options.shortest)
        for number in range(len(prompts))
    ]
    lengths = count if options.shortest == count else f"{options.shortest} to {count}"
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for name, (one, mode) in who.items():
            worker = WORKERS / BATCH_WORKERS[one.peer]
            process = stack.enter_context(
                closing(Process(pythons[one.peer], worker, options.threads, seconds))
            )
            try:
                packages[one.peer] = process.package()
                process.ask(
                    "load",
                    path=one.path,
                    options={**settings, "mode": mode, "variant": one.variant},
                )
                # The first use of memory costs time, so each process uses the memory that it needs
                # before anything is measured.
                process.ask(
                    "serve",
                    prompts=prompts,
                    counts=[min(8, n) for n in counts],
                    concurrency=max(options.concurrency),
                )
            except PeerError as error:
                skipped[name] = str(error)
                report(f"{name}: {error}")
            else:
                processes[name] = process
                samples[name] = {clients: [] for clients in options.concurrency}
        for clients, (name, process) in product(
            options.concurrency * options.rounds, processes.items()
        ):
            found = process.ask("serve", prompts=prompts, counts=counts, concurrency=clients)
            samples[name][clients].append(found)
            report(f"{name}, {clients} at a time: {_rate(found):.1f} tokens/s")
    return {
        "kind": KIND,
        "machine": describe_machine(),
        "packages": packages,
        "options": {
            **settings,
            "prompts": len(prompts),
            "max_new_tokens": lengths,
            "rounds": options.rounds,
        },
        "prompt_tokens": sum(map(len, prompts)),
        "results": {
            name: {str(clients): _summary(found) for clients, found in by.items()}
            for name, by in samples.items()
        },
        "tokens_equal": _agreement(samples),
        "skipped": skipped,
    }


def is_batches(raw: Any) -> bool:
    """Return whether a JSON value is a result of :func:`measure`."""
    return isinstance(raw, dict) and raw.get("kind") == KIND


def choose_prompts(
    engine_dir: Path, tasks: Sequence[str], count: int, most: int
) -> list[list[int]]:
    """Return the token ids of prompts that are spread evenly over the tasks. If the model has a
    chat template, the prompts are chats."""
    llm = load(engine_dir, "ort", speculation=None)
    texts = [task.text for task in load_tasks(tasks)]
    chosen = [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]
    chat = llm.codec.chat_template is not None
    return [
        llm.encode([{"role": "user", "content": text}] if chat else text)[:most] for text in chosen
    ]


def _rate(found: dict[str, Any]) -> float:
    """Return the tokens per second of all texts together."""
    return float(sum(len(request["times"]) for request in found["requests"]) / found["seconds"])


def _summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median rate over the repetitions, and percentiles of the latencies over all
    requests."""
    requests = [request for one in found for request in one["requests"]]
    first = sorted(request["times"][0] for request in requests)
    between = sorted(
        (times[-1] - times[0]) / (len(times) - 1)
        for request in requests
        if (times := request["times"])
    )
    return {
        "tokens_per_second": statistics.median(map(_rate, found)),
        "each": [round(_rate(one), 2) for one in found],
        "first_token_seconds": {"p50": _percentile(first, 0.5), "p99": _percentile(first, 0.99)},
        "token_seconds": {"p50": _percentile(between, 0.5), "p99": _percentile(between, 0.99)},
    }


def _percentile(values: Sequence[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


def _agreement(samples: dict[str, dict[int, list[dict[str, Any]]]]) -> dict[str, float]:
    """Return, for each contestant, the share of texts that equal those of EESD's plain decoding
    with one client."""
    never = samples.get(f"{EESD}, {MODES[2]}")
    if never is None:
        return {}
    wanted = [request["tokens"] for request in next(iter(never.values()))[0]["requests"]]
    shares = {}
    for name, by in samples.items():
        texts = [
            (request["tokens"], expected)
            for found in by.values()
            for one in found
            for request, expected in zip(one["requests"], wanted, strict=True)
            if request["tokens"] is not None
        ]
        if texts:
            shares[name] = sum(tokens == expected for tokens, expected in texts) / len(texts)
    return shares


def markdown(results: dict[str, Any], level: str = "#") -> list[str]:
    """Return the lines of the report. They show the tokens per second, the time to the first token
    and the time between tokens for each contestant and number of clients."""
    by = results["results"]
    options = results["options"]
    counts = list(next(iter(by.values())))
    rows = []
    for name, found in by.items():
        equal = results["tokens_equal"].get(name)
        rows.append(
            [
                name,
                *(_cell(found[count]) for count in counts),
                "" if equal is None else f"{equal:.0%}",
            ]
        )
    return [
        f"{level} Batches",
        "",
        *table(
            ["setting", ""],
            {
                "machine": shown_machine(results["machine"]),
                "versions": ", ".join(results["packages"].values()),
                "threads": options["threads"],
                "texts": f"{options['prompts']} of {options['max_new_tokens']} tokens each, greedy",
                "prompts": f"{results['prompt_tokens']} tokens in total",
                "rounds": options["rounds"],
            }.items(),
        ),
        (
            "A cell shows the tokens per second of all clients together, followed by the "
            "median time to the first token and the median time between tokens. `same "
            "texts` is the share of texts that are equal to plain decoding by EESD, one "
            "text at a time."
        ),
        "",
        *table(["", *(f"{count} at a time" for count in counts), "same texts"], rows),
        *(f"* {name}: {reason}" for name, reason in results["skipped"].items()),
        "",
    ]


def _cell(one: dict[str, Any]) -> str:
    first = one["first_token_seconds"]["p50"]
    between = one["token_seconds"]["p50"]
    return f"{one['tokens_per_second']:.0f} ({first:.2f} s, {between * 1e3:.0f} ms)"
