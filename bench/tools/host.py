"""What the host does in a round: microseconds and calls of functions beside the engines' passes,
which compute nothing here.

    python -m eesd.bench.tools.host plans/
    python -m eesd.bench.tools.host plans/ --megabytes 70

The runtime is the real one, with ``ort`` on the CPU. In place of ONNX Runtime's sessions run
stand-ins that write the choices of a text with repetitions. The runtime's clock goes on by fixed
seconds a pass, so tokens, decisions, and calls of functions are the same in every run: the last
column has a checksum of tokens and statistics. With ``--megabytes`` each pass reads so much memory,
as weights are read, and takes the processor's caches from the host's code.
"""

import ctypes
import random
import sys
import time
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from numpy.typing import NDArray

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.markdown import table
from eesd.runtime.batch.scheduler import BatchOptions, Scheduler
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.llm import LLM, Speculation, load
from eesd.runtime.request import Generation, Update

PROMPT, WARM, ROUNDS = 256, 64, 256
"""Tokens of the prompt; rounds before the measured ones; rounds that count calls, and as many that
are timed."""
LEAST_SLOTS = 4096
"""Slots of the KV cache in which all rounds have room."""
FRESH = 0.6
"""Share of the text's pieces that are new. The others are phrases, which come again and again."""
RIGHT = 0.65
"""Share of positions where the draft knows the verifier's token."""
DRAFT_SECONDS, VERIFY_SECONDS, NODE_SECONDS = 0.0008, 0.0030, 0.0001
"""Of a pass over one node, and of each further node."""
WAYS: dict[str, Speculation | None] = {
    "plain": None,
    "fixed:k=4": Speculation("fixed:k=4", guard=False, drafter="exit"),
    "the default": Speculation(),
    "a tree of width 4 with budget": Speculation(tree=4),
}


class Passes:
    """What the passes of all stand-ins share.

    Attributes:
        seconds: Of the runtime's clock.
        host: Seconds of this thread outside passes, while one is measured.
        calls: Functions that were called outside passes, while they are counted.
    """

    def __init__(self, length: int, vocab_size: int, megabytes: int) -> None:
        chance = random.Random(1)
        phrases = [
            [chance.randrange(3, vocab_size) for _ in range(chance.randrange(4, 12))]
            for _ in range(60)
        ]
        self.text: list[int] = []
        while len(self.text) <= length:
            fresh = [chance.randrange(3, vocab_size) for _ in range(chance.randrange(4, 24))]
            self.text += fresh if chance.random() < FRESH else chance.choice(phrases)
        self.right = [chance.random() < RIGHT for _ in range(len(self.text) + 1)]
        self.seconds = self.host = 0.0
        self.calls = 0
        self._weights = np.ones(megabytes << 17, np.int64)

    def clock(self) -> float:
        return self.seconds

    def measured(self, action: Callable[[], object]) -> float:
        """Seconds of this thread outside passes that ``action`` takes."""
        self.host = -time.thread_time()
        action()
        return self.host + time.thread_time()

    def counted(self, action: Callable[[], object]) -> int:
        """Functions that ``action`` calls outside passes."""
        self.calls = 0
        sys.setprofile(self._count)
        action()
        sys.setprofile(None)
        return self.calls

    def _count(self, _: object, event: str, __: object) -> None:
        self.calls += event in ("call", "c_call")

    def run(self, write: Callable[[], None], seconds: float) -> None:
        """A pass, which the host's seconds and calls leave out."""
        started, profiler = time.thread_time(), sys.getprofile()
        sys.setprofile(None)
        self._weights.sum()
        write()
        self.seconds += seconds
        self.host -= time.thread_time() - started
        sys.setprofile(profiler)


class StandIn:
    """Has the part of a session of ONNX Runtime that an engine uses."""

    def __init__(self, session: Any, passes: Passes, drafts: bool) -> None:
        self.get_inputs = session.get_inputs
        self.io_binding = Binding
        self._passes, self._drafts = passes, drafts
        self._written: list[NDArray[np.float32]] = []

    def run_with_iobinding(self, binding: "Binding") -> None:
        nodes = len(binding.arrays["tokens"])
        if self._drafts:
            self._passes.run(
                lambda: self._draft(**binding.arrays), DRAFT_SECONDS + NODE_SECONDS * nodes
            )
        else:
            self._passes.run(
                lambda: self._verify(**binding.arrays), VERIFY_SECONDS + NODE_SECONDS * nodes
            )

    def _verify(
        self,
        tokens: NDArray[np.int64],
        logit_rows: NDArray[np.int64],
        logits: NDArray[np.float32],
        **_: object,
    ) -> None:
        for logit in self._written:
            logit[:] = 0
        chosen = [self._passes.text[position + 1] for position in tokens[logit_rows, 1]]
        self._written = [
            logit[token : token + 1] for token, logit in zip(chosen, logits, strict=True)
        ]
        for logit in self._written:
            logit[:] = 9

    def _draft(
        self,
        tokens: NDArray[np.int64],
        topk_ids: NDArray[np.int64],
        topk_logprobs: NDArray[np.float32],
        **_: object,
    ) -> None:
        for row, position in enumerate(tokens[:, 1]):
            right = self._passes.right[position]
            topk_ids[row] = np.arange(topk_ids.shape[1])
            topk_ids[row, 0 if right else 1] = self._passes.text[position + 1]
            topk_logprobs[row] = -2.0 - np.arange(topk_ids.shape[1])
            topk_logprobs[row, 0] = -(0.1 if right else 0.7) * (1 + position % 7 / 4)


class Binding:
    """Has the part of an I/O binding that an engine uses: arrays by the names of inputs and
    outputs."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}

    def bind_input(
        self, name: str, _: str, __: int, dtype: type, shape: tuple[int, ...], address: int
    ) -> None:
        memory = memoryview(
            (ctypes.c_char * (prod(shape) * np.dtype(dtype).itemsize)).from_address(address)
        )
        self.arrays[name] = np.frombuffer(memory, np.dtype(dtype)).reshape(shape)

    bind_output = bind_input


def stand_in(llm: LLM, megabytes: int) -> Passes:
    """Let the engines of ``llm`` compute nothing."""
    manifest = llm.manifest
    if manifest.max_seq_len < LEAST_SLOTS:
        slots = manifest.max_seq_len
        raise EESDError(
            f"The engines have {slots} slots, and the rounds need {LEAST_SLOTS}; export with "
            f"--max-seq-len {LEAST_SLOTS}."
        )
    passes = Passes(manifest.max_seq_len, min(manifest.geometry.vocab_size, 8192), megabytes)
    for engine in llm.engines[:2]:
        if not isinstance(engine, CpuEngine) or len(engine.stages) > 1:
            raise EESDError(
                "The host is measured with this project's operators, and verify in one stage."
            )
        drafts = engine is llm.engines.draft
        engine.stages = [
            (graph, StandIn(session, passes, drafts)) for graph, session in engine.stages
        ]
    return passes


def alone(llm: LLM, passes: Passes) -> list[str]:
    """A row of the table: a text alone."""
    with llm.session(passes.text[:PROMPT], max_new_tokens=10**6, ignore_eos=True) as session:
        session.step()
        row = _rounds(passes, session.step)
        return [*row, checksum(session.tokens, [session.stats])]


def together(llm: LLM, passes: Passes, count: int) -> list[str]:
    """A row of the table: ``count`` texts, which are pieces of one."""
    scheduler = Scheduler(llm, BatchOptions(max_rows=count))
    tokens, stats = list[int](), list[Stats]()
    requests = [
        llm.request(passes.text[: PROMPT + row], max_new_tokens=10**6, ignore_eos=True)
        for row in range(count)
    ]

    def note(update: Update) -> None:
        tokens.extend([output.token for output in update.tokens])
        if update.finish_reason:
            stats.append(update.stats)

    for request in requests:
        scheduler.add(Generation(request, note))
    while scheduler.running < count:
        scheduler.step()
    row = _rounds(passes, scheduler.step)
    scheduler.end_all("cancelled")
    return [*row, checksum(tokens, stats)]


def _rounds(passes: Passes, step: Callable[[], object]) -> list[str]:
    """Cells: host microseconds of a round, at best and usually, and calls of functions in it."""
    for _ in range(WARM):
        step()
    calls = [passes.counted(step) for _ in range(ROUNDS)]
    seconds = [passes.measured(step) * 1e6 for _ in range(ROUNDS)]
    return [f"{quantiles(seconds, n=10)[0]:.0f}", f"{median(seconds):.0f}", f"{fmean(calls):.0f}"]


def checksum(tokens: list[int], stats: list[Stats]) -> str:
    """How many tokens there are, and a sum of them and of what the rounds did."""
    return f"{len(tokens)} {zlib.crc32(repr((tokens, stats)).encode()):08x}"


@cli.command()
@click.argument("directory", type=cli.PATH)
@click.option("--rows", default="1 2 4 8", show_default=True, help="Texts at a time.")
@click.option(
    "--megabytes",
    type=click.IntRange(0, 1024),
    default=0,
    show_default=True,
    help="Memory that each pass reads.",
)
def main(directory: Path, rows: str, megabytes: int) -> None:
    """Show what the host does in rounds over the engines of DIRECTORY, which compute nothing."""
    llm = load(directory, backend="ort", speculation=Speculation())
    passes = stand_in(llm, megabytes)
    with patch("time.perf_counter", passes.clock):
        found = [[name, *alone(llm.with_speculation(way), passes)] for name, way in WAYS.items()]
        batch = llm.with_speculation(Speculation())
        found += [
            [f"a batch of {count}", *together(batch, passes, int(count))] for count in rows.split()
        ]
    click.echo(
        "\n".join(table(["a round", "us, 10th percentile", "median", "calls", "tokens"], found))
    )


if __name__ == "__main__":
    main()
