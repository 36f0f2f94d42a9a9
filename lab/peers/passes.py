"""Measures single passes of several runtimes. A pass computes one or several tokens after a filled
cache, or a whole prompt. The machine's peaks are measured in the same run."""

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from eesd.bench.measure.results import Saved, describe_machine, shown_machine
from eesd.bench.measure.run import rotated
from eesd.bench.measure.stats import bootstrap
from eesd.common.errors import EESDError
from eesd.common.markdown import table
from lab.peers.contestants import EESD, LLAMA_CPP, Contestant
from lab.peers.process import Process

TAKERS = (EESD, LLAMA_CPP)
"""Peers that can run a pass over several tokens."""
PEAKS = Path(__file__).with_name("peaks.cpp")
MEMORY = "memory"
"""The name of plain memory reads. They are measured in turn with the passes."""
READ_BYTES = 1 << 28
TURN = 4
"""Number of passes, or reads, in a contestant's turn. An additional pass before these passes warms
up."""
PROMPT_TURNS = 3
REST_SECONDS = 0.05
"""The pause before a turn, because threads of the previous contestant may still spin."""


@dataclass(frozen=True)
class Pass:
    """Passes of one contestant.

    Attributes:
        contestant: Its name, or :data:`MEMORY` for reading alone.
        threads: CPU threads.
        behind: Number of tokens in the cache.
        rows: Number of tokens in a pass. Each of them gets logits. If the cache is empty, it is the
            number of tokens in a prompt, of which only the last gets logits.
        seconds: Seconds of each pass.
        bytes: Number of bytes of the weights, keys and values that a pass reads.
    """

    contestant: str
    threads: int
    behind: int
    rows: int
    seconds: list[float]
    bytes: int


@dataclass
class Passes(Saved):
    """Everything that one run measured.

    Attributes:
        model: Name of the model.
        options: Measurements that were made.
        weights, products: The results of :func:`tensor_sizes`.
        machine, packages: Description of the machine, and the versions of the peers.
        peaks: Maximum number of 8-bit products per second in a run, for each number of threads and
            for each kind of kernels.
        passes: The measurements.
    """

    model: str
    options: dict[str, Any]
    weights: int
    products: int
    machine: dict[str, str] = field(default_factory=describe_machine)
    packages: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, dict[str, float]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    schema: int = 3

    WHAT: ClassVar = "a file of passes; measure them again"
    ROWS: ClassVar[dict[str, type]] = {"passes": Pass}


def tensor_sizes(file: Path) -> tuple[int, int]:
    """Return the number of bytes of the tensors that a pass reads, and the number of elements of
    the layers' matrices.

    An embedding table is read only if it is the LM head as well.
    """
    from eesd.model.gguf_file import read_gguf

    tensors = dict(read_gguf(file).tensors)
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight")
    matrices = (
        tensor
        for name, tensor in tensors.items()
        if name.startswith("blk.") and len(tensor.shape) == 2
    )
    return (
        sum(tensor.nbytes for tensor in tensors.values()),
        sum(prod(tensor.shape) for tensor in matrices),
    )


def takers(contestants: Iterable[Contestant], kernels: Sequence[str]) -> list[Contestant]:
    """Return the contestants whose passes can be timed. EESD occurs once for each of these kernels.
    If no kernels are given, it has the fastest kernels."""
    able = [one for one in contestants if one.peer in TAKERS and one.is_plain]
    return [
        replace(one, mode=mode)
        for one in able
        for mode in (kernels if one.peer == EESD and kernels else [one.mode])
    ]


def measure(
    result: Passes,
    members: Sequence[Contestant],
    pythons: dict[str, str],
    seconds: float,
    path: Path,
    report: Callable[[str], None],
) -> None:
    """Measure the contestants from :func:`takers`, and save after each context.

    ``pythons`` are interpreters by peer, ``seconds`` is the longest time of one answer, and
    ``report`` receives a line for each measurement.
    """
    slots = (
        max(*result.options["behind"], result.options["prompt"]) + max(result.options["rows"]) + 1
    )
    with TemporaryDirectory(prefix="eesd-peaks-") as scratch:
        program = _compiled(Path(scratch))
        for threads in result.options["threads"]:
            with ExitStack() as stack:
                running: dict[str, Process] = {}
                for one in members:
                    process = stack.enter_context(
                        closing(Process(pythons[one.peer], one.worker, threads, seconds))
                    )
                    result.packages[one.peer] = process.package()
                    settings = {
                        "mode": one.mode,
                        "threads": threads,
                        "slots": slots,
                        "variant": one.variant,
                    }
                    process.ask("load", path=one.path, options=settings)
                    running[one.name] = process
                read = partial(_read, program, threads, result.peaks.setdefault(str(threads), {}))
                for found in _passes(running, threads, result.weights, result.options, read):
                    result.passes.append(found)
                    shown = (
                        f"{found.rows} after {found.behind}: "
                        f"{bootstrap(found.seconds).median * 1e3:.2f} ms"
                    )
                    report(f"{found.contestant}, {threads} threads, {shown}")
                    result.save(path)


def _compiled(directory: Path) -> Path:
    """Compile the program that measures peaks. Raises :class:`EESDError` if there is no
    compiler."""
    program = directory / "peaks"
    try:
        subprocess.run(
            ["c++", "-O3", "-pthread", "-o", program, PEAKS], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise EESDError(
            f"{PEAKS} cannot be compiled ({error}); install a C++ compiler as c++."
        ) from None
    return program


def _read(program: Path, threads: int, most: dict[str, float]) -> list[float]:
    """Return the seconds of reads of :data:`READ_BYTES` with this number of threads. ``most``
    receives the largest product rates."""
    found = json.loads(
        subprocess.run([program, str(threads)], check=True, capture_output=True).stdout
    )
    most |= {
        kernels: max(most.get(kernels, 0.0), products)
        for kernels, products in found["products"].items()
    }
    return [*found["reads"]]


def _passes(
    running: Mapping[str, Process],
    threads: int,
    weights: int,
    options: Mapping[str, Any],
    read: Callable[[], list[float]],
) -> Iterator[Pass]:
    """Measure the contestants. Each runs a prompt first, and then passes after each context.
    ``read`` returns the seconds of memory reads."""

    def prefill(name: str, start: int, stop: int) -> list[float]:
        tokens = [(7 * position) % 251 + 3 for position in range(start, stop)]
        return [running[name].ask("prefill", tokens=tokens, start=start)["seconds"]]

    def passes(name: str, count: int, behind: int) -> list[float]:
        return [*running[name].ask("passes", rows=count, behind=behind, count=TURN)["seconds"]]

    prompt = options["prompt"]
    rows = options["rows"]
    if prompt:
        calls = {(name, prompt): partial(prefill, name, 0, prompt) for name in running}
        for (name, count), seconds in _in_turn(calls, PROMPT_TURNS).items():
            yield Pass(name, threads, 0, count, seconds, weights)
    for start, behind in zip([0, *options["behind"]], options["behind"], strict=False):
        sizes = {MEMORY: READ_BYTES}
        for name, process in running.items():
            prefill(name, start, behind)
            sizes[name] = weights + process.ask("slot_bytes")["bytes"] * behind
        timed = {
            (name, count): partial(passes, name, count, behind)
            for count in rows
            for name in running
        }
        for (name, count), seconds in _in_turn(
            {**timed, (MEMORY, 0): read}, -(-options["repeats"] // TURN)
        ).items():
            yield Pass(name, threads, behind, count, seconds, sizes[name])


def _in_turn(
    calls: Mapping[tuple[str, int], Callable[[], list[float]]], turns: int
) -> dict[tuple[str, int], list[float]]:
    """Make the calls, and collect the seconds that they return. The order of the calls rotates."""
    found: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for turn in range(turns):
        for key in rotated([*calls], turn):
            time.sleep(REST_SECONDS)
            found[key] += calls[key]()
    return found


def markdown(result: Passes, level: str = "#") -> list[str]:
    """Return the lines of the report. They have an explanation, and a table for each number of
    threads."""
    by: dict[int, list[Pass]] = {}
    for one in result.passes:
        by.setdefault(one.threads, []).append(one)
    settings = {
        "machine": shown_machine(result.machine),
        "versions": ", ".join(result.packages.values()),
        "repeats": result.options["repeats"],
    }
    lines = [
        f"{level} Single passes: {result.model}",
        "",
        *table(["setting", ""], settings.items()),
        (
            "Contestants take turns, and times are medians over passes. A pass computes "
            "the logits of all its rows, and its time includes the call from Python. "
            "`ratio` is the time relative to the first contestant, paired by pass, with "
            "its 95 % bootstrap interval. `share` is the rate at which weights, keys and "
            "values are read, as a share of the memory bandwidth. The bandwidth is "
            "measured in turn with the passes, by the same number of threads. Columns "
            "for several rows show the time relative to one row."
        ),
        "",
    ]
    for threads, found in by.items():
        lines += [f"{level}# {threads} thread{'s' * (threads > 1)}", "", *_table(found)]
        lines += _prompts(found, result.products, result.peaks.get(str(threads), {}))
    return lines


def _table(found: Sequence[Pass]) -> list[str]:
    """Return a table with a row for each context and contestant."""
    rows: list[list[str]] = []
    several = sorted({one.rows for one in found if one.behind and one.rows > 1})
    for behind in dict.fromkeys(one.behind for one in found if one.behind):
        by = {(one.contestant, one.rows): one for one in found if one.behind == behind}
        memory = by.pop((MEMORY, 0))
        per_second = memory.bytes / bootstrap(memory.seconds).median
        first = next(one.seconds for (_, count), one in by.items() if count == 1)
        for name in dict.fromkeys(name for name, _ in by):
            one = by[name, 1]
            median = bootstrap(one.seconds).median
            read = [
                f"{one.bytes / 1e6:.0f}",
                f"{per_second / 1e9:.1f}",
                f"{one.bytes / median / per_second:.0%}",
            ]
            more = [
                f"{bootstrap(by[name, n].seconds).median / median:.2f}" if (name, n) in by else ""
                for n in several
            ]
            rows.append(
                [str(behind), name, f"{median * 1e3:.2f}", _ratio(one.seconds, first), *read, *more]
            )
    columns = [
        "cached tokens",
        "",
        "ms",
        "ratio",
        "MB",
        "GB/s",
        "share",
        *(f"{n} rows" for n in several),
    ]
    return table(columns, rows) if rows else []


def _prompts(found: Sequence[Pass], products: int, peaks: Mapping[str, float]) -> list[str]:
    """Return a table with a row for each contestant. It shows the rate of matrix products in the
    layers as a share of each peak."""
    prompts = [one for one in found if not one.behind]
    rows = []
    for one in prompts:
        median = bootstrap(one.seconds).median
        shares = [f"{one.rows * products / median / peak:.0%}" for peak in peaks.values()]
        rows.append(
            [
                one.contestant,
                f"{median * 1e3:.0f}",
                _ratio(one.seconds, prompts[0].seconds),
                *shares,
            ]
        )
    if not rows:
        return []
    shown = [f"share of {kernels}, {peak / 1e9:.0f} G/s" for kernels, peak in peaks.items()]
    return table([f"prompt of {prompts[0].rows}", "ms", "ratio", *shown], rows)


def _ratio(seconds: Sequence[float], first: Sequence[float]) -> str:
    """Return the ratio to the first contestant. It is empty for the first contestant."""
    if seconds is first:
        return ""
    return bootstrap([one / other for one, other in zip(seconds, first, strict=True)]).shown()
