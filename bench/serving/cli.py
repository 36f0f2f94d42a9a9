"""Throughput and latency of batches, side by side.

    python -m eesd.bench.serving --engine-dir plans/ --task spec-bench=question.jsonl -o serving.json
    python -m eesd.bench.serving --engine-dir plans/ --task spec-bench=question.jsonl -o serving.json \\
        --peer-python peers/bin/python --llama-cpp model-f32.gguf --openvino openvino-fp32/

Each contestant is a process of its own and waits while another runs. For each concurrency, so many clients ask for one text
after another; all contestants in turn, then again.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.results import describe_machine
from eesd.bench.measure.tasks import load_tasks
from eesd.bench.peers.process import Process, started
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.runtime.engines.backends import default_threads
from eesd.runtime.llm import load

WORKERS = Path(__file__).parent / "workers"
ROWS = 16
"""Requests that a contestant runs at the same time at most."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part: a name, its worker, the interpreter that has it, what it loads, and how it drafts."""

    name: str
    worker: str
    python: str
    path: str
    mode: str


def contestants(engine_dir: Path, python: str, llama_cpp: Path | None, openvino: Path | None) -> list[Contestant]:
    """EESD in three modes, and the peers that are given."""
    own = [Contestant(f"EESD, {mode}", "eesd_batch.py", sys.executable, str(engine_dir), mode) for mode in MODES]
    peers = [("llama.cpp", "llama_cpp_server.py", llama_cpp), ("OpenVINO", "openvino_batch.py", openvino)]
    return own + [Contestant(name, worker, python, str(path), "plain") for name, worker, path in peers if path]


MODES = ("automatic", "always", "never")


@cli.command()
@click.option("--engine-dir", type=cli.PATH, required=True, help="Output directory of eesd-export.")
@click.option("--task", multiple=True, help="Prompts, as eesd-bench takes them; repeatable.  [default: the bundled ones]")
@click.option("-o", "--output", type=cli.PATH, required=True, help="JSON file with the results.")
@click.option("--concurrency", default="1,2,4,8,16", help="Clients, in turn.")
@click.option("--prompts", type=click.IntRange(1, 10_000), default=24, help="Texts at each concurrency.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(2, 100_000), default=64, help="Of each text.")
@click.option("--prompt-tokens", type=click.IntRange(1, 100_000), default=384, help="More are cut off.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=2, help="Repetitions.")
@click.option("--levels", type=click.IntRange(1, 64), default=3, help="Levels that 'always' drafts.")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads of each.  [default: as eesd-run]")
@click.option("--peer-python", default=sys.executable, help="Interpreter that has the peers.  [default: this one]")
@click.option("--llama-cpp", type=cli.PATH, help="The model as a GGUF file in float32, for llama.cpp.")
@click.option("--openvino", type=cli.PATH, help="The model as OpenVINO IR in float32.")
@click.option("--timeout", type=click.IntRange(1, 100_000), default=900, help="Seconds of one measurement.")
def main(
    engine_dir: Path, task: tuple[str, ...], output: Path, concurrency: str, prompts: int, max_new_tokens: int,
    prompt_tokens: int, rounds: int, levels: int, threads: int | None, peer_python: str, llama_cpp: Path | None,
    openvino: Path | None, timeout: int,
) -> None:  # fmt: skip
    """Measure batches of EESD, and of other runtimes beside it."""
    counts = _counts(concurrency)
    ids = _prompts(engine_dir, task, prompts, prompt_tokens)
    options = {"threads": threads or default_threads(), "rows": ROWS, "slots": 2 * prompt_tokens + max_new_tokens}
    who = contestants(engine_dir, peer_python, llama_cpp, openvino)
    samples: dict[str, dict[int, list[dict[str, Any]]]] = {one.name: {count: [] for count in counts} for one in who}
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for one in who:
            process = stack.enter_context(started(one.python, WORKERS / one.worker, options["threads"], timeout))
            process.ask("load", path=one.path, options={**options, "mode": one.mode, "levels": levels})
            # Memory that a process touches first costs time: each has touched what it needs before anything is measured.
            process.ask("serve", prompts=ids, count=min(8, max_new_tokens), concurrency=max(counts))
            processes[one.name] = process
        for _ in range(rounds):
            for count in counts:
                for one in who:
                    found = processes[one.name].ask("serve", prompts=ids, count=max_new_tokens, concurrency=count)
                    samples[one.name][count].append(found)
                    click.echo(f"{one.name}, {count} at a time: {_rate(found):.1f} tokens/s", err=True)
    results = {
        "machine": describe_machine(),
        "options": {**options, "prompts": len(ids), "max_new_tokens": max_new_tokens, "levels": levels, "rounds": rounds},
        "prompt_tokens": sum(map(len, ids)),
        "results": {name: {str(count): _summary(found) for count, found in by.items()} for name, by in samples.items()},
        "tokens_equal": _agreement(samples),
    }
    with written_whole(output) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    click.echo(table(results))


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > 1024:
        raise EESDError(f"--concurrency {text[:40]!r} is no list of numbers such as 1,2,4.")
    return counts


def _prompts(engine_dir: Path, tasks: Sequence[str], count: int, most: int) -> list[list[int]]:
    """Token ids of prompts, spread evenly over the tasks; as chats where the model has a template."""
    llm = load(engine_dir, "ort", speculation=None)
    texts = [task.text for task in load_tasks(tasks)]
    chosen = [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]
    chat = llm.codec.chat_template is not None
    return [llm.encode([{"role": "user", "content": text}] if chat else text)[:most] for text in chosen]


def _rate(found: dict[str, Any]) -> float:
    """Tokens per second of all texts together."""
    return float(sum(len(request["times"]) for request in found["requests"]) / found["seconds"])


def _summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repetitions of the rate; percentiles of latencies over all requests."""
    requests = [request for one in found for request in one["requests"]]
    first = sorted(request["times"][0] for request in requests)
    between = sorted((times[-1] - times[0]) / (len(times) - 1) for request in requests if (times := request["times"]))
    return {
        "tokens_per_second": statistics.median(map(_rate, found)),
        "each": [round(_rate(one), 2) for one in found],
        "first_token_seconds": {"p50": _percentile(first, 0.5), "p99": _percentile(first, 0.99)},
        "token_seconds": {"p50": _percentile(between, 0.5), "p99": _percentile(between, 0.99)},
    }


def _percentile(values: Sequence[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


def _agreement(samples: dict[str, dict[int, list[dict[str, Any]]]]) -> dict[str, float]:
    """By contestant, the share of texts that equal those of EESD's plain decoding with one client."""
    never = samples[f"EESD, {MODES[2]}"]
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


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: tokens a second, and times to the first and between tokens."""
    by = results["results"]
    counts = list(next(iter(by.values())))
    head = "| | " + " | ".join(f"{count} at a time" for count in counts) + " |"
    lines = [head, "|---|" + "---|" * len(counts)]
    for name, found in by.items():
        cells = [_cell(found[count]) for count in counts]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    note = "Tokens a second of all clients together (median time to the first token, and between tokens)."
    return "\n".join([*lines, "", note])


def _cell(one: dict[str, Any]) -> str:
    first, between = one["first_token_seconds"]["p50"], one["token_seconds"]["p50"]
    return f"{one['tokens_per_second']:.0f} ({first:.2f} s, {between * 1e3:.0f} ms)"
