"""Single passes side by side: 1 or several tokens behind a filled cache, and the share of the memory bandwidth."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from eesd.bench.measure.results import Saved, describe_machine, shown_machine
from eesd.bench.measure.run import rotated
from eesd.bench.measure.stats import bootstrap
from eesd.bench.tools.peers.contestants import EESD, LLAMA_CPP, Contestant, grouped
from eesd.bench.tools.peers.process import Process, started
from eesd.bench.tools.shapes import bandwidth
from eesd.common.markdown import table

TAKERS = (EESD, LLAMA_CPP)
"""Peers that can be asked for a pass over several tokens."""
TURN = 4
"""Passes of a contestant in its turn; one more before them warms up."""
REST_SECONDS = 0.05
"""Pause before a turn: threads of the contestant before may still spin."""


@dataclass(frozen=True)
class Pass:
    """Passes of one contestant.

    Attributes:
        contestant, group: Its name and group.
        peer: Its runtime.
        behind: Tokens in the cache.
        rows: Tokens of a pass, each with its logits.
        seconds: Of each pass.
        cache_bytes: Keys and values that a pass reads.
    """

    contestant: str
    group: str
    peer: str
    behind: int
    rows: int
    seconds: list[float]
    cache_bytes: int


@dataclass
class Passes(Saved):
    """Everything that one run measured.

    Attributes:
        model: Name of the model.
        options: What was measured.
        weights: By group, the bytes of weights that a pass reads, as the file has them.
        machine, packages: Where, and with what.
        bandwidth: Bytes a second that as many threads read, measured before each group.
        passes: The measurements.
    """

    model: str
    options: dict[str, Any]
    weights: dict[str, int]
    machine: dict[str, str] = field(default_factory=describe_machine)
    packages: dict[str, str] = field(default_factory=dict)
    bandwidth: dict[str, float] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    schema: int = 1

    WHAT: ClassVar = "a file of passes; measure them again"
    ROWS: ClassVar[dict[str, type]] = {"passes": Pass}


def weight_bytes(file: Path) -> int:
    """Bytes of a GGUF file's tensors that a pass reads: all, without an embedding table that is not the LM head as well."""
    from eesd.model.gguf_file import read_gguf

    tensors = {name: tensor.nbytes for name, tensor in read_gguf(file).tensors.items()}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight")
    return sum(tensors.values())


def measure(
    result: Passes, members: Sequence[Contestant], pythons: dict[str, str], seconds: float, path: Path,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Measure all groups, and save the result behind each.

    Args:
        result: Receives the measurements.
        members: Plain contestants of :data:`TAKERS`.
        pythons: Interpreter by peer.
        seconds: Longest time of one answer.
        path: Where to save.
        report: Called with a line for each group and context.
    """
    options = result.options
    rows, behind, threads = options["rows"], options["behind"], options["threads"]
    settings = {"mode": "plain", "threads": threads, "slots": max(behind) + max(rows) + 1}
    for group, everybody in grouped(members).items():
        result.bandwidth[group] = bandwidth(False, threads, 7)
        with ExitStack() as stack:
            running: dict[Contestant, Process] = {}
            for contestant in everybody:
                process = stack.enter_context(started(pythons[contestant.peer], contestant.worker, threads, seconds))
                result.packages[contestant.peer] = process.package()
                process.ask("load", path=contestant.path, options={**settings, "variant": contestant.variant})
                running[contestant] = process
            for start, stop in zip([0, *behind], behind, strict=False):
                tokens = [(7 * position) % 251 + 3 for position in range(start, stop)]
                slots = {c: process.ask("prefill", tokens=tokens, start=start) for c, process in running.items()}
                taken = _in_turn(running, rows, stop, options["repeats"])
                for (contestant, count), found in taken.items():
                    cache = slots[contestant]["slot_bytes"] * stop
                    result.passes.append(Pass(contestant.name, group, contestant.peer, stop, count, found, cache))
                    report(f"{contestant.name}, {count} behind {stop}: {bootstrap(found).median * 1e3:.2f} ms")
                result.save(path)


def _in_turn(
    running: dict[Contestant, Process], rows: Sequence[int], behind: int, repeats: int
) -> dict[tuple[Contestant, int], list[float]]:
    """Seconds of passes by contestant and number of tokens, in an order that rotates."""
    found: dict[tuple[Contestant, int], list[float]] = {(c, count): [] for count in rows for c in running}
    for turn in range(-(-repeats // TURN)):
        for contestant, count in rotated([*found], turn):
            time.sleep(REST_SECONDS)
            found[contestant, count] += running[contestant].ask("passes", rows=count, behind=behind, count=TURN)["seconds"]
    return found


def markdown(result: Passes, level: str = "#") -> list[str]:
    """Lines: a table with the groups of a context below each other, and what is needed to read it."""
    options = result.options
    rows = [count for count in options["rows"] if count > 1]
    columns = [
        "",
        "weights, MB",
        "GB/s",
        "cached tokens",
        "EESD, ms",
        "llama.cpp, ms",
        "ratio",
        "share, EESD",
        "share, llama.cpp",
    ]
    columns += [f"{count} rows, {peer}" for peer in TAKERS for count in rows]
    shapes = dict.fromkeys((one.group, one.behind) for one in result.passes)
    return [
        f"{level} Single passes: {result.model}",
        "",
        *table(
            ["setting", ""],
            {
                "machine": shown_machine(result.machine),
                "versions": ", ".join(result.packages.values()),
                "threads": options["threads"],
                "repeats": options["repeats"],
            }.items(),
        ),
        "Medians of passes in turn, and the ratio with its 95 % bootstrap interval. A pass gives the logits of all its rows. "
        "Its time includes the call from Python. Share: the bytes of weights, keys and values over the time, as a part of the "
        "bandwidth. The bandwidth is that of the same threads reading 512 MB in the same run. Several rows: over one.",
        "",
        *table(columns, (_row(result, group, behind, rows) for group, behind in shapes)),
    ]


def _row(result: Passes, group: str, behind: int, rows: Sequence[int]) -> list[str]:
    weights, per_second = result.weights[group], result.bandwidth[group]
    by = {(p.peer, p.rows): p for p in result.passes if (p.group, p.behind) == (group, behind)}
    medians = {key: bootstrap(one.seconds).median for key, one in by.items()}
    times, shares = [], []
    for peer in TAKERS:
        one = by.get((peer, 1))
        times.append(f"{medians[peer, 1] * 1e3:.2f}" if one else "")
        shares.append(f"{(weights + one.cache_bytes) / medians[peer, 1] / per_second:.0%}" if one else "")
    ratio = ""
    if all((peer, 1) in by for peer in TAKERS):  # turn by turn, as they were measured
        pairs = zip(by[LLAMA_CPP, 1].seconds, by[EESD, 1].seconds, strict=True)
        ratio = bootstrap([theirs / ours for theirs, ours in pairs]).shown()
    more = [f"{medians[peer, n] / medians[peer, 1]:.2f}" if (peer, n) in by else "" for peer in TAKERS for n in rows]
    return [group, f"{weights / 1e6:.0f}", f"{per_second / 1e9:.1f}", str(behind), *times, ratio, *shares, *more]
