"""The comparison: all contestants of a group wait side by side, and decode each prompt one after
another."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eesd.bench.measure.run import rotated
from lab.peers.contestants import EESD, PEERS, Contestant, grouped
from lab.peers.process import PeerError, Process, busy_threads
from lab.peers.quality import measure_quality, reference_of
from lab.peers.results import Load, Prompt, Quality, Result, Run

REST_SECONDS = 0.2
"""Pause before each run: threads of the contestant before may still spin."""
WARM_UP_TOKENS = 4
COUNTED_SECONDS = 1.0
"""Processor time from which the threads are counted; the system counts in hundredths of a
second."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        new_tokens: Tokens to generate behind each prompt.
        short, long, longest: Number and length of the prompts of each kind.
        processes: Fresh processes of each contestant.
        threads: CPU threads of each.
        window: Tokens of a window of the held-out text.
        prompts_file, quality_file: Where the prompts and the held-out text come from.
        quality_tokens: Most tokens of the held-out text.
    """

    new_tokens: int
    short: tuple[int, int]
    long: tuple[int, int]
    processes: int
    threads: int
    prompts_file: str
    quality_file: str | None = None
    quality_tokens: int = 4096
    window: int = 512
    longest: tuple[int, int] = (0, 1)

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values."""
        return {
            name: [*value] if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @property
    def slots(self) -> int:
        """Most tokens of a prompt and its text."""
        lengths = [
            length + self.new_tokens
            for count, length in (self.short, self.long, self.longest)
            if count
        ]
        return max(*lengths, self.window, WARM_UP_TOKENS) + 1


@dataclass
class Comparison:
    """Measures what a result lacks, and saves it after each step.

    Attributes:
        result: Everything measured so far.
        options: What to measure.
        pythons: Interpreter by peer.
        seconds: Longest time of one answer.
        path: Where to save.
        report: Called with a line for each step.
    """

    result: Result
    options: Options
    pythons: dict[str, str]
    seconds: float
    path: Path
    report: Callable[[str], None]

    def run(self, windows: list[list[int]], others: Iterable[Contestant] = ()) -> None:
        """Measure the speed of every group, and the quality if there are windows of held-out text.

        One of ``others`` can be the reference of the quality without taking part.
        """
        for name in [
            name
            for name in self.result.skipped
            if name in {c.name for c in self.result.contestants}
        ]:
            del self.result.skipped[name]  # a contestant that failed gets another chance
        for process in range(self.options.processes):
            for group, members in grouped(self.result.contestants).items():
                self._measure_group(process, group, members)
        if windows:
            self._measure_quality(windows, others)
        self.result.complete = not any(
            c.name in self.result.skipped for c in self.result.contestants
        )
        self.result.save(self.path)

    def _measure_group(self, process: int, group: str, members: list[Contestant]) -> None:
        """Run all prompts that are missing in one process of each contestant."""
        names = {c.name for c in members}
        missing = [
            p
            for p in self.result.prompts
            if not self.result.has_round(process, p.id, names - {*self.result.skipped})
        ]
        if not missing:
            return
        with ExitStack() as stack:
            running: dict[str, Process] = {}
            before: dict[str, dict[str, float]] = {}
            for contestant in members:
                if contestant.name in self.result.skipped:
                    continue
                try:
                    found, load = self._load(stack, contestant, process)
                except PeerError as error:
                    self._skip(contestant.name, str(error))
                    continue
                running[contestant.name] = found
                before[contestant.name] = found.thread_seconds()
                self._replace_load(load)
            for prompt in missing:
                self._measure_round(process, group, prompt, running)
                for load in [
                    load
                    for load in self.result.loads
                    if load.process == process and load.contestant in running
                ]:
                    member = running[load.contestant]
                    try:
                        threads = self._count_threads(
                            before[load.contestant], member.thread_seconds()
                        )
                    except PeerError as error:
                        self._exclude(load.contestant, str(error))
                        del running[load.contestant]
                        continue
                    self._replace_load(
                        Load(
                            load.contestant,
                            process,
                            load.seconds,
                            **member.memory(),
                            threads=threads,
                        )
                    )
                self.result.save(self.path)

    def _count_threads(self, before: dict[str, float], now: dict[str, float]) -> int | None:
        """Threads that computed since ``before``; None if too little was computed to tell, or where
        the system does not say.

        Raises:
            PeerError: They are not as many as were asked for.
        """
        if sum(now.values()) - sum(before.values()) < COUNTED_SECONDS:
            return None
        found = busy_threads(before, now)
        if found != self.options.threads:
            raise PeerError(f"computed with {found} threads instead of {self.options.threads}")
        return found

    def _load(self, stack: ExitStack, contestant: Contestant, number: int) -> tuple[Process, Load]:
        """Start a contestant, load it, and run it on prompts that no other prompt begins like."""
        process = stack.enter_context(self._started(contestant))
        seconds = self._ask_load(process, contestant)
        for kind in {prompt.kind: prompt for prompt in self.result.prompts}.values():
            process.ask(
                "generate",
                prompt=kind.tokens[::-1],
                count=min(WARM_UP_TOKENS, self.options.new_tokens),
            )
        return process, Load(contestant.name, number, seconds)

    def _measure_round(
        self, process: int, group: str, prompt: Prompt, running: dict[str, Process]
    ) -> None:
        """Let everybody decode one prompt, in an order that rotates from prompt to prompt."""
        names = [*running]
        turn = process * len(self.result.prompts) + self.result.prompts.index(prompt)
        found: list[Run] = []
        for name in rotated(names, turn):
            time.sleep(REST_SECONDS)
            try:
                answer = running[name].ask(
                    "generate", prompt=prompt.tokens, count=self.options.new_tokens
                )
            except PeerError as error:
                self._skip(name, str(error))
                del running[name]
                continue
            first = answer["seconds"][0]
            last = answer["seconds"][-1]
            found.append(Run(name, process, prompt.id, first, last - first, answer["tokens"]))
        self.result.runs = [
            r
            for r in self.result.runs
            if (r.process, r.prompt) != (process, prompt.id) or r.contestant not in running
        ]
        self.result.runs += found
        rates = ", ".join(f"{run.contestant} {run.rate:.0f}" for run in found)
        self.report(f"process {process + 1}, {group}, {prompt.id} (tokens/s): {rates}")

    def _measure_quality(self, windows: list[list[int]], others: Iterable[Contestant]) -> None:
        members = [c for c in self.result.contestants if c.name not in self.result.skipped]
        reference = reference_of([*members, *others])
        if self.result.quality_reference != reference.name:
            self.result.quality_reference = reference.name
            self.result.qualities = []

        def note(name: str, found: Quality | str) -> None:
            if isinstance(found, str):
                self._skip(name, f"quality: {found}")
                return
            self.result.qualities.append(found)
            self.report(
                f"quality, {name}: KL {found.divergence:.4g}, same top token {found.agreement:.1%}"
            )
            self.result.save(self.path)

        done = {quality.contestant for quality in self.result.qualities}
        measure_quality(members, reference, windows, self._loaded, done, note)

    @contextmanager
    def _loaded(self, contestant: Contestant) -> Iterator[Process]:
        with self._started(contestant) as process:
            self._ask_load(process, contestant)
            yield process

    @contextmanager
    def _started(self, contestant: Contestant) -> Iterator[Process]:
        python = self.pythons[contestant.peer]
        with closing(
            Process(python, contestant.worker, self.options.threads, self.seconds)
        ) as process:
            self.result.packages[contestant.peer] = process.package()
            yield process

    def _ask_load(self, process: Process, contestant: Contestant) -> float:
        sizes = {"threads": self.options.threads, "slots": self.options.slots}
        settings = {"variant": contestant.variant, "mode": contestant.mode, **sizes}
        return float(process.ask("load", path=contestant.path, options=settings)["seconds"])

    def _replace_load(self, load: Load) -> None:
        """Put in one load of a contestant and process. A resumed process keeps the larger peak of
        its two runs."""
        key = (load.contestant, load.process)
        self.result.loads = [
            old for old in self.result.loads if (old.contestant, old.process) != key
        ] + [load]

    def _exclude(self, name: str, reason: str) -> None:
        """Go on without a contestant whose measurements are worth nothing."""
        self.result.runs = [run for run in self.result.runs if run.contestant != name]
        self.result.loads = [load for load in self.result.loads if load.contestant != name]
        self._skip(name, reason)

    def _skip(self, name: str, reason: str) -> None:
        """Go on without a contestant."""
        self.result.skipped[name] = reason
        self.report(f"{name}: {reason}")


def interpreters(python: str, own: str) -> dict[str, str]:
    """Interpreter by peer: EESD runs in the benchmark's own."""
    return {name: own if name == EESD else python for name in PEERS}
