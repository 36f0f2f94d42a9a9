"""The comparison: all contestants of a group wait side by side, and decode each prompt one after another."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from eesd.bench.measure.run import rotated
from eesd.bench.tools.peers.contestants import Contestant, grouped, python_of
from eesd.bench.tools.peers.process import PeerError, Process, busy_threads, loaded
from eesd.bench.tools.peers.results import Load, Prompt, Result, Run

REST_SECONDS = 0.2
"""Pause before each run: threads of the contestant before may still spin."""
WARM_UP_TOKENS = 4
COUNTED_SECONDS = 1.0
"""Processor time from which the threads are counted; the system counts in hundredths of a second."""


@dataclass
class Comparison:
    """Fills a result, and saves it after each prompt.

    Attributes:
        result: Who decodes what; receives the measurements.
        python: The interpreter that has the peers.
        seconds: Longest time of one answer.
        path: Where to save.
        report: Called with a line for each step.
    """

    result: Result
    python: str
    seconds: float
    path: Path
    report: Callable[[str], None]

    def run(self) -> None:
        """Measure every group, in fresh processes each time."""
        for number in range(self.result.options["processes"]):
            for group, members in grouped(self.result.contestants).items():
                with ExitStack() as stack:
                    self._measure_group(stack, number, group, members)
        self.result.complete = not any(c.name in self.result.skipped for c in self.result.contestants)
        self.result.save(self.path)

    def _measure_group(self, stack: ExitStack, number: int, group: str, members: list[Contestant]) -> None:
        running: dict[str, Process] = {}
        loads: dict[str, float] = {}
        for one in members:
            if one.name not in self.result.skipped:
                with self._left_out(one.name, running):
                    running[one.name], loads[one.name] = self._load(stack, one)
        before = {name: process.thread_seconds() for name, process in running.items()}
        for turn, prompt in enumerate(self.result.prompts, number * len(self.result.prompts)):
            found: list[Run] = []
            for name in rotated([*running], turn):
                with self._left_out(name, running):
                    found.append(self._decode(running[name], name, number, prompt))
            self.result.runs += found
            rates = ", ".join(f"{run.contestant} {run.rate:.0f}" for run in found)
            self.report(f"process {number + 1}, {group}, {prompt.id} (tokens/s): {rates}")
            self.result.save(self.path)
        for name, process in [*running.items()]:
            with self._left_out(name, running):
                threads = self._count_threads(name, before[name], process.thread_seconds())
                self.result.loads.append(Load(name, number, loads[name], **process.memory(), threads=threads))

    def _load(self, stack: ExitStack, one: Contestant) -> tuple[Process, float]:
        """Start a contestant, load it, and run it on prompts that no other prompt begins like. Gives the seconds of loading."""
        options, prompts = self.result.options, self.result.prompts
        slots = max(len(prompt.tokens) for prompt in prompts) + max(options["new_tokens"], WARM_UP_TOKENS) + 1
        settings = {"variant": one.variant, "mode": one.mode, "threads": options["threads"], "slots": slots}
        process, answer = loaded(stack, python_of(one.peer, self.python), one.worker, one.path, settings, self.seconds)
        self.result.packages[one.peer] = answer["package"]
        for prompt in {prompt.kind: prompt for prompt in prompts}.values():
            process.ask("generate", prompt=prompt.tokens[::-1], count=min(WARM_UP_TOKENS, options["new_tokens"]))
        return process, answer["seconds"]

    def _decode(self, process: Process, name: str, number: int, prompt: Prompt) -> Run:
        time.sleep(REST_SECONDS)
        answer = process.ask("generate", prompt=prompt.tokens, count=self.result.options["new_tokens"])
        first, last = answer["seconds"][0], answer["seconds"][-1]
        return Run(name, number, prompt.id, first, last - first, answer["tokens"])

    def _count_threads(self, name: str, before: dict[str, float], now: dict[str, float]) -> int | None:
        """Threads that computed since ``before``; None if too little was computed to tell, or where the system does not say.

        Raises:
            PeerError: They are not as many as were asked for. The contestant's measurements are worth nothing, and dropped.
        """
        if sum(now.values()) - sum(before.values()) < COUNTED_SECONDS:
            return None
        found = busy_threads(before, now)
        if found != self.result.options["threads"]:
            self.result.runs = [run for run in self.result.runs if run.contestant != name]
            self.result.loads = [load for load in self.result.loads if load.contestant != name]
            raise PeerError(f"computed with {found} threads instead of {self.result.options['threads']}")
        return found

    @contextmanager
    def _left_out(self, name: str, running: dict[str, Process]) -> Iterator[None]:
        """Go on without a contestant that fails inside the block."""
        try:
            yield
        except PeerError as error:
            running.pop(name, None)
            self.result.skipped[name] = str(error)
            self.report(f"{name}: {error}")
