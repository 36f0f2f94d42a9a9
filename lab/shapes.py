"""Measure engine calls of an engine directory, and compare them with the memory bandwidth.

    python -m lab.shapes plans/ --backend tensorrt --gpu h100
    python -m lab.shapes plans/ --backend ort --nodes "1 2 4 6 8" \\
        --behind "64 512 2048"

It times draft steps, verify passes, and the time to the first token. If --gpu is given, it also
shows predictions.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from eesd.bench.measure.results import describe_machine
from eesd.bench.measure.stats import Interval, bootstrap
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.machine import torch_sees_gpu
from eesd.common.manifest import Manifest, load_manifest
from eesd.common.markdown import table
from eesd.export.predict import GPUS, Hardware, bytes_of_pass, call_seconds
from eesd.runtime.engines.backends import (
    BACKENDS,
    EngineOptions,
    Engines,
    default_threads,
    open_engines,
)
from eesd.runtime.engines.base import Call, Engine
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES
from eesd.runtime.llm import LLM

PROMPT = 512
MEMORY_BYTES = 1 << 29
"""Number of bytes that are copied or read to measure the bandwidth. This is more than any cache
holds."""


def timed(calls: dict[Any, Callable[[], object]], repeats: int) -> dict[Any, Interval]:
    """Return the median seconds of synchronous calls. Each call is warmed up twice. Calls take
    turns, so that other load affects all calls alike."""
    seconds: dict[Any, list[float]] = {key: [] for key in calls}
    for repeat in range(repeats + 2):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat >= 2:
                seconds[key].append(time.perf_counter() - started)
    return {key: bootstrap(found) for key, found in seconds.items()}


def bandwidth(on_gpu: bool, threads: int, repeats: int) -> float:
    """Measure the bandwidth of the engines' memory in bytes per second. On a GPU, this is done with
    a large copy, and the bytes read and written are added. On a CPU, ``threads`` threads read
    memory."""
    if not on_gpu:
        numbers = np.ones((threads, MEMORY_BYTES // 8 // threads), np.int64)
        with ThreadPoolExecutor(threads) as pool:
            return (
                numbers.nbytes
                / timed({"": lambda: list(pool.map(np.sum, numbers))}, repeats)[""].median
            )
    import torch

    source = torch.ones(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * MEMORY_BYTES / timed({"": copy}, repeats)[""].median


def time_passes(
    manifest: Manifest,
    engines: Engines,
    repeats: int,
    per_second: float,
    hardware: Hardware | None,
    counts: Sequence[int],
    behind: Sequence[int],
) -> dict[str, Any]:
    """Measure draft steps and verify passes for each number of nodes after contexts of several
    lengths.

    For each kind of call, this function returns the ``seconds`` with their interval and the
    ``predicted`` seconds. It also returns the ``share`` of the seconds that reading the weights and
    the cache takes at ``per_second`` bytes per second.
    """
    assert engines.draft is not None
    [kv_cache] = engines.verify.new_kv_caches()
    counts = [count for count in counts if count <= manifest.max_tree_nodes + 1]
    kv_cache.reserve(max(behind) + max(counts))
    given: dict[tuple[int, int], tuple[Engine, Call]] = {}
    for context in behind:
        for count in counts:
            tokens = [7] * count
            positions = range(context, context + count)
            given[context, count] = engines.verify, Call(kv_cache, tokens, positions, context)
        given[context, 0] = engines.draft, Call(kv_cache, [7], [context], context)
    calls: dict[tuple[int, int], Callable[[], object]] = {
        key: partial(engine.forward, [call]) for key, (engine, call) in given.items()
    }

    def row(context: int, count: int, seconds: Interval) -> dict[str, Any]:
        engine, call = given[context, count]
        graphs = manifest.verify if count else (manifest.draft,)
        floor = sum(bytes_of_pass(manifest, graph, context) for graph in graphs) / per_second
        slots = int(engine.work([call]).slots)
        predicted = (
            call_seconds(manifest, graphs, hardware, slots, max(count, 1)) if hardware else None
        )
        return {
            "behind": context,
            "nodes": count,
            "seconds": seconds,
            "share": floor / seconds.median,
            "predicted": predicted,
        }

    found = [
        row(context, count, seconds) for (context, count), seconds in timed(calls, repeats).items()
    ]
    return {
        "verify": [row for row in found if row["nodes"]],
        "draft": [row for row in found if not row["nodes"]],
    }


def time_first_tokens(
    directory: Path, manifest: Manifest, engines: Engines, lengths: Sequence[int], repeats: int
) -> list[Any]:
    """Return the seconds to the first token for prompts of these lengths. Decoding is plain."""
    llm = LLM(directory, manifest, engines, None)

    def first(length: int) -> None:
        with llm.session([7] * length, max_new_tokens=1, ignore_eos=True) as session:
            session.step()

    found = timed({length: partial(first, length) for length in lengths}, max(repeats // 10, 3))
    return [{"tokens": length, "seconds": seconds} for length, seconds in found.items()]


def measure(
    directory: Path,
    backend: str,
    threads: int | None,
    repeats: int,
    hardware: Hardware | None,
    counts: Sequence[int],
    behind: Sequence[int],
    kv_cache_dtype: str | None = None,
) -> dict[str, Any]:
    """Measure one engine directory with ``repeats`` calls of each kind.

    ``hardware`` is the device for predictions, ``counts`` are numbers of nodes of verify passes,
    and ``behind`` are numbers of tokens before a pass, which are also the lengths of prompts whose
    first token is timed.
    """
    manifest = load_manifest(directory)
    behind = [context for context in behind if context + max(counts) <= manifest.max_seq_len]
    if not behind:
        raise EESDError(
            f"{directory} has a KV cache of {manifest.max_seq_len} slots; give --behind fewer "
            "tokens."
        )
    threads = threads or default_threads()
    per_second = bandwidth(torch_sees_gpu(), threads, max(repeats // 3, 3))
    engines = open_engines(
        directory, manifest, EngineOptions(backend, threads, True, kv_cache_dtype=kv_cache_dtype)
    )
    return {
        "bandwidth": per_second,
        "machine": describe_machine(),
        "threads": threads,
        "passes": time_passes(manifest, engines, repeats, per_second, hardware, counts, behind),
        "first": time_first_tokens(directory, manifest, engines, behind, repeats),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result of :func:`measure` as Markdown tables."""
    machine = result["machine"]
    lines = [
        f"Bandwidth: {result['bandwidth'] / 1e9:.1f} GB/s. {machine['CPU']}; GPU: "
        f"{machine['GPU']}; "
        f"{result['threads']} threads. Medians, with their 95 % bootstrap interval.",
        "",
    ]
    rows = list[list[str]]()
    for row in result["passes"]["draft"] + result["passes"]["verify"]:
        name = f"verify {row['nodes']}" if row["nodes"] else "draft step"
        predicted = "" if row["predicted"] is None else f"{row['predicted'] * 1e3:.3f}"
        rows.append(
            [
                f"{name} after {row['behind']}",
                row["seconds"].shown(".3f", 1e3, bold=False),
                f"{row['share']:.0%}",
                predicted,
            ]
        )
    rows += [
        [f"first token of {row['tokens']}", row["seconds"].shown(".1f", 1e3, bold=False), "", ""]
        for row in result["first"]
    ]
    return "\n".join([*lines, *table(["pass", "ms", "share of bandwidth", "predicted ms"], rows)])


def numbers(_: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Return the positive integers of an option. They are separated by spaces."""
    words = value.split()
    if not words or not all(word.isdecimal() and 0 < int(word) < 10**6 for word in words):
        raise EESDError(f"--{parameter.name} {value!r} must be positive integers, such as '1 2 4'.")
    return tuple(map(int, words))


@cli.command()
@click.argument("engine_dir", type=cli.PATH)
@click.option("--gpu", type=click.Choice(list(GPUS)), help="Also show predictions for this GPU.")
@click.option("--backend", type=click.Choice(BACKENDS), default="torch")
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help=(
        "Number of CPU threads.  [default: number of processors, minus one if there "
        "are more than four]"
    ),
)
@click.option(
    "--repeats", type=click.IntRange(3, 10**6), default=30, help="Number of calls of each kind."
)
@click.option(
    "--nodes",
    default="1 2 4 8 16 32 64",
    callback=numbers,
    help="Numbers of nodes in verify passes.",
)
@click.option(
    "--behind",
    default=str(PROMPT),
    callback=numbers,
    help="Numbers of tokens before a pass, and in prompts.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(KV_CACHE_DTYPES),
    help="Type of the KV cache, as in eesd-run.",
)
def main(
    engine_dir: Path,
    gpu: str | None,
    backend: str,
    threads: int | None,
    repeats: int,
    nodes: tuple[int, ...],
    behind: tuple[int, ...],
    kv_cache_dtype: str | None,
) -> None:
    """Time engine calls of an engine directory."""
    hardware = GPUS[gpu] if gpu else None
    click.echo(
        markdown(
            measure(engine_dir, backend, threads, repeats, hardware, nodes, behind, kv_cache_dtype)
        )
    )


if __name__ == "__main__":
    main()
