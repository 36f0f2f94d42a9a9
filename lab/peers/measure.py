"""The comparison. The processes of all contestants exist at the same time, and decode each prompt
one after another."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from eesd.bench.measure.run import rotated
from lab.peers.contestants import EESD, PEERS, Contestant
from lab.peers.process import PeerError, Process, busy_threads
from lab.peers.quality import measure_quality, reference_of
from lab.peers.results import Load, Prompt, Quality, Result, Run

REST_SECONDS = 0.2
"""The pause before each run, because threads of the previous contestant may still spin."""
WARM_UP_TOKENS = 4
COUNTED_SECONDS = 1.0
"""Threads are counted only if they took at least this much processor time, because the system
counts in hundredths of a second."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison.

    Attributes:
        processes: Number of fresh processes of each contestant.
        threads: CPU threads of each contestant.
        window: Number of tokens in a window of the held-out text.
        quality_file: A file with held-out text, or None to measure no quality.
        quality_tokens: Maximum number of tokens of the held-out text.
    """

    processes: int
    threads: int
    quality_file: str | None = None
    quality_tokens: int = 4096
    window: int = 512


@dataclass
class Comparison:
    """Makes the missing measurements of a result, and saves it after each step.

    Attributes:
        result: Everything measured so far.
        options: Measurements to make.
        pythons: Interpreter by peer.
        seconds: Longest time of one answer.
        path: File of the result.
        report: A function that is called with a line for each step.
    """

    result: Result
    options: Options
    pythons: dict[str, str]
    seconds: float
    path: Path
    report: Callable[[str], None]

    def run(self, windows: list[list[int]], others: Iterable[Contestant] = ()) -> None:
        """Measure the speed. If there are windows of held-out text, measure the quality as well.

        One of ``others`` can be the reference of the quality without taking part.
        """
        for name in [
            name
            for name in self.result.skipped
            if name in {c.name for c in self.result.contestants}
        ]:
            del self.result.skipped[name]  # a contestant that failed gets another chance
        for process in range(self.options.processes):
            self._measure_process(process)
        if windows:
            self._measure_quality(windows, others)
        self.result.complete = not any(
            c.name in self.result.skipped for c in self.result.contestants
        )
        self.result.save(self.path)

    def _measure_process(self, process: int) -> None:
        """Run all prompts that are missing in one process of each contestant."""
        members = self.result.contestants
        missing = [
            p
            for p in self.result.prompts
            if not self.result.has_round(
                process,
                p.id,
                {c.name for c in members if takes(c, p)} - {*self.result.skipped},
            )
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
                self._measure_round(process, prompt, running)
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
        """Return the number of threads that computed since ``before``. Return None if too little
        was computed to count them, or if the system does not report times.

        Raises:
            PeerError: The number of threads differs from the requested number.
        """
        if sum(now.values()) - sum(before.values()) < COUNTED_SECONDS:
            return None
        found = busy_threads(before, now)
        if found != self.options.threads:
            raise PeerError(f"computed with {found} threads instead of {self.options.threads}")
        return found

    def _load(self, stack: ExitStack, contestant: Contestant, number: int) -> tuple[Process, Load]:
        """Start a contestant, load it, and run it on prompts with unique beginnings."""
        process = stack.enter_context(self._started(contestant))
        seconds = self._ask_load(process, contestant)
        shortest = min(self.result.prompts, key=lambda prompt: len(prompt.tokens))
        process.ask("generate", prompt=shortest.tokens[::-1], count=WARM_UP_TOKENS, temperature=0.0)
        return process, Load(contestant.name, number, seconds)

    def _measure_round(self, process: int, prompt: Prompt, running: dict[str, Process]) -> None:
        """Let every contestant decode one prompt. The order rotates from prompt to prompt."""
        names = [c.name for c in self.result.contestants if c.name in running and takes(c, prompt)]
        turn = process * len(self.result.prompts) + self.result.prompts.index(prompt)
        found: list[Run] = []
        for name in rotated(names, turn):
            time.sleep(REST_SECONDS)
            try:
                answer = running[name].ask(
                    "generate",
                    prompt=prompt.tokens,
                    count=prompt.count,
                    temperature=prompt.temperature,
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
            if (r.process, r.prompt) != (process, prompt.id) or r.contestant not in names
        ]
        self.result.runs += found
        rates = ", ".join(f"{run.contestant} {run.rate:.1f}" for run in found)
        self.report(f"process {process + 1}, {prompt.id} (tokens/s): {rates}")

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
        slots = max([self.options.window, *(len(p.tokens) + p.count for p in self.result.prompts)])
        settings = {
            "variant": contestant.variant,
            "mode": contestant.mode,
            "threads": self.options.threads,
            "slots": slots + 1,
        }
        return float(process.ask("load", path=contestant.path, options=settings)["seconds"])

    def _replace_load(self, load: Load) -> None:
        """Replace the recorded load of a contestant in a process. A resumed process keeps the
        larger peak of its two runs."""
        key = (load.contestant, load.process)
        self.result.loads = [
            old for old in self.result.loads if (old.contestant, old.process) != key
        ] + [load]

    def _exclude(self, name: str, reason: str) -> None:
        """Go on without a contestant whose measurements are invalid."""
        self.result.runs = [run for run in self.result.runs if run.contestant != name]
        self.result.loads = [load for load in self.result.loads if load.contestant != name]
        self._skip(name, reason)

    def _skip(self, name: str, reason: str) -> None:
        """Go on without a contestant."""
        self.result.skipped[name] = reason
        self.report(f"{name}: {reason}")


def takes(contestant: Contestant, prompt: Prompt) -> bool:
    """Return whether a contestant decodes a prompt. Some contestants are not measured with a
    temperature."""
    return contestant.samples or not prompt.temperature


def interpreters(python: str, own: str) -> dict[str, str]:
    """Return the interpreter of each peer. EESD runs in the benchmark's own interpreter."""
    return {name: own if name == EESD else python for name in PEERS}
