"""The measurement. Every prompt is decoded plainly and in each configuration in turn, so drift of
the machine affects all configurations alike."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eesd.bench.measure.latency import RandomLengths, measure_latency, timed_rounds
from eesd.bench.measure.results import (
    CallLatency,
    Configuration,
    Result,
    Run,
    Tuning,
    acceptance_by_depth,
)
from eesd.bench.measure.tasks import TaskPrompt
from eesd.common.checks import check_choice
from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS_FILE
from eesd.controllers import CONTROLLERS, make_controller
from eesd.runtime.compare import first_divergence
from eesd.runtime.decoding.drafting import DRAFTERS, Speculation
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.llm import LLM, load

T = TypeVar("T")

SAMPLINGS = ("greedy", "coupled", "rejection")
LENGTHS = tuple(f"fixed:k={k}" for k in (1, 2, 3, 4, 6, 8))
"""Candidate lengths for ``fixed`` without options. The length that is fastest on the tuning prompts
is measured."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Options:
    """Options of a measurement. Raises :class:`EESDError` for invalid values.

    Attributes:
        widths: The tree widths. A tree of width 1 is a chain.
        samplings: Some of ``SAMPLINGS``.
        temperature: Temperature of all samplings except greedy.
        per_task, tuning_per_task: Maximum number of reported prompts and of tuning prompts of each
            task.
        guard: Whether the guard may pause drafting. In normal use it may, but pauses hide
            differences between controllers.
        chat: Whether prompts are sent as chat messages.
        threads: Number of CPU threads of an engine, or None for the backend's default.
        tasks: Files with prompts. If empty, the bundled prompts are used.
        budgeted: The ``widths`` that are also measured with a tree budget.
        drafter: ``exit``, ``text`` or ``both``. The text hides differences between controllers.
        kv_cache_dtype: See :func:`eesd.load`.
    """

    controllers: tuple[str, ...] = tuple(CONTROLLERS)
    widths: tuple[int, ...] = (1, 3)
    samplings: tuple[str, ...] = SAMPLINGS
    temperature: float = 0.7
    max_new_tokens: int = 64
    per_task: int = 6
    tuning_per_task: int = 2
    guard: bool = False
    chat: bool = False
    seed: int = 0
    backend: str = "auto"
    threads: int | None = None
    tasks: tuple[str, ...] = ()
    budgeted: tuple[int, ...] = ()
    drafter: str = "exit"
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in self.samplings:
            if name not in SAMPLINGS:
                raise EESDError(f"There is no sampling {name!r}; there are {', '.join(SAMPLINGS)}.")
        for spec in self.controllers:
            make_controller(spec)
        if not (self.samplings and self.controllers and self.widths):
            raise EESDError("Samplings, controllers and tree widths need at least one value each.")
        check_choice("drafter", self.drafter, DRAFTERS)
        if not set(self.budgeted) <= set(self.widths):
            raise EESDError(
                "--budgeted has a width that --tree-widths lacks; add it to --tree-widths."
            )
        if not 0 < self.temperature < 100:
            raise EESDError(
                f"temperature is {self.temperature}; it must be above 0 and below 100 (for 0 "
                "use greedy)."
            )
        if min(self.max_new_tokens, self.per_task, self.tuning_per_task) < 1:
            raise EESDError("max_new_tokens and the numbers of prompts must be at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def sampling(self, name: str, number: int) -> Sampling:
        """Return the sampling ``name`` for the prompt with this number. Each prompt has a different
        seed."""
        if name == "greedy":
            return Sampling()
        return Sampling(temperature=self.temperature, seed=self.seed + number, method=name)


class EncodedPrompt(NamedTuple):
    """A prompt as token ids. ``number`` is its index among the prompts, which seeds the noise and
    rotates the order of runs."""

    number: int
    id: str
    tokens: list[int]


class Generation(NamedTuple):
    """The new tokens of a run and its statistics. ``rounds`` counts the rounds for each (draft
    steps, drafted nodes)."""

    tokens: list[int]
    stats: Stats
    rounds: Counter[tuple[int, int]]


class Bench:
    """The engines of one directory. All configurations share them and the KV cache."""

    def __init__(
        self, directory: Path, backend: str, threads: int | None, kv_cache_dtype: str | None = None
    ) -> None:
        self.llm = load(directory, backend, threads=threads, kv_cache_dtype=kv_cache_dtype)
        self.manifest = self.llm.manifest

    def describe(self) -> dict[str, Any]:
        """Return a description for :attr:`Result.engines`. It has the model, and a hash that
        identifies the engine directory."""
        manifest = self.manifest
        return {
            "model": manifest.model,
            "architecture": manifest.geometry.architecture,
            "dtype": manifest.dtype,
            "num_layers": manifest.geometry.num_layers,
            "exit_layer": manifest.exit_head.layer,
            "exit_blocks": manifest.exit_head.blocks,
            "exit_trained": manifest.exit_head.trained,
            "max_tree_nodes": manifest.max_tree_nodes,
            "weights_sha256": None if manifest.is_packed else manifest.files[WEIGHTS_FILE].sha256,
        }

    def check_widths(self, widths: Iterable[int]) -> None:
        """Raise :class:`EESDError` for a tree width that the engine does not allow."""
        widest = min(self.manifest.draft_top_k, self.manifest.max_tree_nodes)
        for width in widths:
            if not 1 <= width <= widest:
                raise EESDError(f"A tree width is {width}; this engine allows 1 to {widest}.")

    def encode(self, prompts: Sequence[TaskPrompt], options: Options) -> list[EncodedPrompt]:
        """Encode the prompts. Prompts that leave no room for the new tokens are skipped, because
        truncated texts would measure less.

        Raises :class:`EESDError` if no prompt is left.
        """
        found: list[EncodedPrompt] = []
        for prompt in prompts:
            text = [{"role": "user", "content": prompt.text}] if options.chat else prompt.text
            tokens = self.llm.encode(text)
            if len(tokens) + options.max_new_tokens <= self.manifest.max_seq_len:
                found.append(EncodedPrompt(len(found), prompt.id, tokens))
        if not found:
            raise EESDError(
                f"No prompt leaves room for {options.max_new_tokens} new tokens in "
                f"{self.manifest.max_seq_len} slots; "
                "give shorter prompts or fewer new tokens."
            )
        return found

    def drafting_llm(self, configuration: Configuration, options: Options) -> LLM | None:
        """Return an LLM for a configuration. It has a new controller and, if configured, a guard.
        For plain decoding, None is returned."""
        c = configuration
        if c.controller is None:
            return None
        return self._drafting(
            Speculation(c.controller, c.width, options.guard, options.seed, options.drafter),
            c.budget,
        )

    def _drafting(self, speculation: Speculation, budget: bool = False) -> LLM:
        """Return an LLM with these drafting options. Without a ``budget``, it verifies every
        drafted token."""
        llm = self.llm.with_speculation(speculation)
        if not budget:
            llm.drafting = llm.drafting.with_drafter(budget=None)
        return llm

    def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        drafting: LLM | None,
        new_tokens: int,
        ignore_eos: bool = True,
    ) -> Generation:
        """Generate exactly ``new_tokens`` after a prompt. Generation continues past any EOS, so
        that every configuration does the same work.

        ``drafting`` comes from :meth:`drafting_llm`, or is None to decode plainly. If
        ``ignore_eos`` is False, an EOS ends the text.
        """
        llm = drafting or self.llm
        draft = drafting is not None
        with llm.session(
            tokens, sampling, max_new_tokens=new_tokens, draft=draft, ignore_eos=ignore_eos
        ) as session:
            rounds = Counter((timing.steps, timing.nodes) for timing in timed_rounds(session))
            return Generation(session.tokens[len(tokens) :], session.stats, rounds)

    def warm_up(
        self,
        engine: str,
        prompt: EncodedPrompt,
        configurations: Sequence[Configuration],
        options: Options,
    ) -> None:
        """Run every configuration and rounds of every depth, because engines prepare a call when
        its size first occurs."""
        for width in options.widths:
            for depth in range(1, self.manifest.max_tree_nodes // width + 1):
                fixed = Configuration(engine, "greedy", f"fixed:k={depth}", width)
                drafting = self.drafting_llm(fixed, replace(options, drafter="exit"))
                self.generate(prompt.tokens[:2], Sampling(), drafting, depth + 2)
        for configuration in configurations:
            sampling = options.sampling(configuration.sampling, 0)
            drafting = self.drafting_llm(configuration, options)
            self.generate(
                prompt.tokens, sampling, drafting, min(WARM_UP_TOKENS, options.max_new_tokens)
            )
        self.latencies(engine, prompt, options)

    def latencies(self, engine: str, prompt: EncodedPrompt, options: Options) -> list[CallLatency]:
        """Measure the latency of calls after this prompt, for each tree width."""
        found = []
        room = self.manifest.max_seq_len - len(prompt.tokens)
        for width in options.widths:
            llm = self._drafting(Speculation(tree=width, guard=False, drafter="exit"))
            controller = RandomLengths(self.manifest.max_tree_nodes // width)
            llm.drafting = llm.drafting.with_drafter(controller=controller)
            with llm.session(prompt.tokens, max_new_tokens=room, ignore_eos=True) as session:
                found.append(
                    CallLatency(engine, prompt.id, width, *measure_latency(session, controller))
                )
        return found


def tune(
    bench: Bench, engine: str, prompts: Sequence[EncodedPrompt], options: Options, result: Result
) -> Iterator[None]:
    """Find the fastest fixed length for each sampling and width. This is done only if ``fixed`` is
    named without options.

    Adds the tunings for ``engine`` that ``result`` lacks. Yields after each prompt of a sampling
    and width.
    """
    for sampling, width in untuned(engine, options, result):
        drafting = {
            spec: bench.drafting_llm(Configuration(engine, sampling, spec, width), options)
            for spec in LENGTHS
        }
        stats: dict[str, list[Stats]] = {spec: [] for spec in LENGTHS}
        for prompt in prompts:
            for spec in rotated(LENGTHS, prompt.number):
                chosen = options.sampling(sampling, prompt.number)
                generation = bench.generate(
                    prompt.tokens, chosen, drafting[spec], options.max_new_tokens
                )
                stats[spec].append(generation.stats)
            yield
        seconds = {spec: sum(s.decode_seconds for s in stats[spec]) for spec in LENGTHS}
        acceptance = {
            spec: acceptance_by_depth(
                (s.accepted_at_depth, s.verified_at_depth) for s in stats[spec]
            )
            for spec in LENGTHS
        }
        fastest = min(seconds, key=seconds.__getitem__)
        result.tunings.append(
            Tuning(engine, sampling, width, "fixed", seconds, acceptance, fastest)
        )


def untuned(engine: str, options: Options, result: Result) -> list[tuple[str, int]]:
    """Return the samplings and widths whose fixed length is still to be found."""
    known = {(t.sampling, t.width) for t in result.tunings if t.engine == engine}
    pairs = product(options.samplings if "fixed" in options.controllers else (), options.widths)
    return [pair for pair in pairs if pair not in known]


def chosen_configurations(
    engine: str, options: Options, tunings: Sequence[Tuning]
) -> list[Configuration]:
    """Return the configurations to measure. Each sampling has plain decoding, and every controller
    with every width. Tuned controllers use their best setting."""
    tuned = {(t.engine, t.sampling, t.width, t.controller): t.chosen for t in tunings}
    found = []
    for sampling in options.samplings:
        found.append(Configuration(engine, sampling, None, 1))
        for width in options.widths:
            names = [
                tuned.get((engine, sampling, width, name), name) for name in options.controllers
            ]
            for budget in (False, True) if width in options.budgeted else (False,):
                found += [
                    Configuration(engine, sampling, name, width, budget)
                    for name in dict.fromkeys(names)
                ]
    return found


def measure(
    bench: Bench,
    engine: str,
    prompts: Sequence[EncodedPrompt],
    configurations: Sequence[Configuration],
    options: Options,
    result: Result,
) -> Iterator[None]:
    """Run every prompt in every configuration. The order of the configurations rotates from prompt
    to prompt.

    Adds the runs and call latencies for ``engine`` that ``result`` lacks. Plain decoding must be
    among the configurations of each sampling. Yields after each prompt.
    """
    drafting = {
        configuration: bench.drafting_llm(configuration, options)
        for configuration in configurations
    }
    for prompt in prompts:
        if result.has_runs(engine, prompt.id):
            continue
        runs = []
        for sampling in options.samplings:
            chosen = options.sampling(sampling, prompt.number)
            group = [
                configuration
                for configuration in configurations
                if configuration.sampling == sampling
            ]
            generations = {
                configuration: bench.generate(
                    prompt.tokens, chosen, drafting[configuration], options.max_new_tokens
                )
                for configuration in rotated(group, prompt.number)
            }
            plain = generations[Configuration(engine, sampling, None, 1)].tokens
            runs += [
                _run(bench, prompt, c, result.index_of(c), generations[c], plain) for c in group
            ]
        latencies = bench.latencies(engine, prompt, options)
        result.runs += runs
        result.sweeps += latencies
        yield


def _run(
    bench: Bench,
    prompt: EncodedPrompt,
    configuration: Configuration,
    index: int,
    generation: Generation,
    plain: list[int],
) -> Run:
    stats = generation.stats
    equal = None
    index_of_first = None
    gap = None
    if configuration.sampling != "rejection":
        divergence = first_divergence(bench.llm, prompt.tokens, plain, generation.tokens)
        equal = divergence is None
        if divergence:
            index_of_first = divergence.index
            gap = divergence.logit_gap
    return Run(
        prompt=prompt.id,
        configuration=index,
        new_tokens=stats.new_tokens,
        rounds=[[*shape, count] for shape, count in sorted(generation.rounds.items())],
        prefill_seconds=stats.prefill_seconds,
        draft_seconds=stats.draft_seconds,
        verify_seconds=stats.verify_seconds,
        host_seconds=stats.host_seconds,
        offered=stats.verified_at_depth,
        accepted=stats.accepted_at_depth,
        guard_rests=stats.guard_pauses,
        equal=equal,
        divergence=index_of_first,
        logit_gap=gap,
    )


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Return the items rotated to the left by ``by`` places."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]
