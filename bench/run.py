"""The measurement: every prompt plainly and in each configuration in turn, so that drift of the machine hits all alike."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from eesd.bench.calls import Scattered, call_overhead, rounds_of, sweep
from eesd.bench.results import Configuration, Result, Run, Sweep, Tuning
from eesd.bench.stats import acceptance_by_depth
from eesd.bench.tasks import Prompt
from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS
from eesd.controllers import CONTROLLERS, Controller, make_controller
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.compare import first_divergence
from eesd.runtime.decoding.guard import Guard
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.llm import LLM, Speculation, load

T = TypeVar("T")

SAMPLINGS = ("greedy", "coupled", "rejection")
CANDIDATES = {
    "fixed": tuple(f"fixed:k={k}" for k in (1, 2, 3, 4, 6, 8)),
    "threshold": tuple(f"threshold:p={p}" for p in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)),
}
"""Controllers that, named without options, are tuned: the fastest of these on the tuning prompts is measured."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Options:
    """What to measure. ``per_task`` and ``tuning_per_task`` are prompts of each task; ``guard`` rests drafting where it does
    not pay, as in use, and so blurs what the controllers are worth. ``budgeted`` are those of ``widths`` that are measured
    with a tree budget, too. Raises :class:`EESDError` for values that cannot be.
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

    def __post_init__(self) -> None:
        for name in self.samplings:
            if name not in SAMPLINGS:
                raise EESDError(f"There is no sampling {name!r}; there are {', '.join(SAMPLINGS)}.")
        for spec in self.controllers:
            make_controller(spec)
        if not (self.samplings and self.controllers and self.widths):
            raise EESDError("Samplings, controllers and tree widths need at least one value each.")
        if not set(self.budgeted) <= set(self.widths):
            raise EESDError("--budgeted has widths that --tree-widths has not; add them there.")
        if not 0 < self.temperature < 100:
            raise EESDError(f"temperature is {self.temperature}; it must be above 0 and below 100 (greedy is a sampling).")
        if min(self.max_new_tokens, self.per_task, self.tuning_per_task) < 1:
            raise EESDError("max_new_tokens and the numbers of prompts must be at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """As it reads in the result's JSON."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def sampling(self, name: str, seed: int) -> Sampling:
        if name == "greedy":
            return Sampling()
        return Sampling(temperature=self.temperature, seed=self.seed + seed, method=name)


class Encoded(NamedTuple):
    """A prompt as token ids; ``number`` is its place in the set, which seeds its noise and rotates the order."""

    number: int
    id: str
    tokens: list[int]


class Generated(NamedTuple):
    """New tokens, statistics, and how many rounds had which shape (draft steps, drafted nodes)."""

    tokens: list[int]
    stats: Stats
    rounds: Counter[tuple[int, int]]


class Drafting(NamedTuple):
    """What an :class:`LLM` takes on to draft in one configuration."""

    speculation: Speculation
    controller: Controller
    guard: Guard | None
    budget: TreeBudget | None


class Bench:
    """The engines of one directory, the same for every configuration: what differs is handed to the one LLM for each run."""

    def __init__(self, directory: Path, backend: str, threads: int | None) -> None:
        self.llm = load(directory, backend, threads=threads)
        self.manifest = self.llm.manifest

    def facts(self) -> dict[str, Any]:
        """What identifies the engine directory and describes its model."""
        names = ("model", "architecture", "dtype", "num_layers", "exit_layer", "exit_blocks", "exit_trained", "max_tree_nodes")
        found = {name: getattr(self.manifest, name) for name in names}
        return found | {"weights_sha256": self.manifest.files[WEIGHTS].sha256}

    def check_widths(self, widths: Iterable[int]) -> None:
        widest = min(self.manifest.draft_top_k, self.manifest.max_tree_nodes)
        for width in widths:
            if not 1 <= width <= widest:
                raise EESDError(f"A tree width is {width}; this engine allows 1 to {widest}.")

    def encode(self, prompts: Sequence[Prompt], options: Options) -> list[Encoded]:
        """Those prompts that leave room for the new tokens; the ends of texts are not trimmed to fit."""
        found: list[Encoded] = []
        for prompt in prompts:
            text = [{"role": "user", "content": prompt.text}] if options.chat else prompt.text
            tokens = self.llm.encode(text)
            if len(tokens) + options.max_new_tokens <= self.manifest.max_seq_len:
                found.append(Encoded(len(found), prompt.id, tokens))
        if not found:
            raise EESDError(
                f"No prompt leaves room for {options.max_new_tokens} new tokens in {self.manifest.max_seq_len} slots; "
                "give shorter prompts or fewer new tokens."
            )
        return found

    def drafting(self, configuration: Configuration, options: Options) -> Drafting | None:
        """A fresh controller (and guard, if wanted) for a configuration; None for plain decoding."""
        controller, width, budget = configuration.controller, configuration.width, configuration.budget
        if controller is None:
            return None
        speculation = Speculation(controller, width, options.guard, options.seed, budget)
        made = LLM(
            self.llm.directory, self.manifest, self.llm.engines, speculation
        )  # makes no kv_cache before its first session
        assert made.controller is not None
        return Drafting(speculation, made.controller, made.guard, made.budget)

    def generate(self, tokens: list[int], sampling: Sampling, drafting: Drafting | None, new_tokens: int) -> Generated:
        """One prompt, past any EOS, so that every configuration has the same to do."""
        if drafting is not None:
            self._draft_with(drafting)
        drafts = drafting is not None
        with self.llm.session(tokens, sampling, max_new_tokens=new_tokens, draft=drafts, ignore_eos=True) as session:
            rounds = Counter((found.steps, found.nodes) for found in rounds_of(session))
            return Generated(session.tokens[len(tokens) :], session.stats, rounds)

    def warm_up(self, engine: str, prompt: Encoded, configurations: Sequence[Configuration], options: Options) -> None:
        """Every configuration, and rounds of every depth: buffers are bound and graphs captured when a size first occurs."""
        for width in options.widths:
            for depth in range(1, self.manifest.max_tree_nodes // width + 1):
                drafting = self.drafting(Configuration(engine, "greedy", f"fixed:k={depth}", width), options)
                self.generate(prompt.tokens[:2], Sampling(), drafting, depth + 2)
        for configuration in configurations:
            sampling = options.sampling(configuration.sampling, 0)
            drafting = self.drafting(configuration, options)
            self.generate(prompt.tokens, sampling, drafting, min(WARM_UP_TOKENS, options.max_new_tokens))
        self.sweeps(engine, prompt, options)

    def sweeps(self, engine: str, prompt: Encoded, options: Options) -> list[Sweep]:
        """The cost of calls behind this prompt's text, for each tree width."""
        found = []
        for width in options.widths:
            controller = Scattered(self.manifest.max_tree_nodes // width)
            self._draft_with(Drafting(Speculation(tree_width=width, guard=False), controller, None, None))
            room = self.manifest.max_seq_len - len(prompt.tokens)
            with self.llm.session(prompt.tokens, max_new_tokens=room, ignore_eos=True) as session:
                found.append(Sweep(engine, prompt.id, width, *sweep(session, controller)))
        return found

    def _draft_with(self, drafting: Drafting) -> None:
        self.llm.speculation, self.llm.controller, self.llm.guard, self.llm.budget = drafting


def tune(bench: Bench, engine: str, prompts: Sequence[Encoded], options: Options, result: Result) -> Iterator[None]:
    """For each controller that was named without options, the fastest of its candidates on the tuning prompts.

    Yields after every prompt of each sampling x width, of those that ``result`` lacks.
    """
    known = {(t.engine, t.sampling, t.width) for t in result.tunings}
    kinds = [name for name in options.controllers if name in CANDIDATES]
    for sampling in options.samplings if kinds else ():
        for width in options.widths:
            if (engine, sampling, width) in known:
                continue
            specs = [spec for kind in kinds for spec in CANDIDATES[kind]]
            drafting = {spec: bench.drafting(Configuration(engine, sampling, spec, width), options) for spec in specs}
            stats: dict[str, list[Stats]] = {spec: [] for spec in specs}
            for prompt in prompts:
                for spec in _rotated(specs, prompt.number):
                    chosen = options.sampling(sampling, prompt.number)
                    done = bench.generate(prompt.tokens, chosen, drafting[spec], options.max_new_tokens)
                    stats[spec].append(done.stats)
                yield
            for kind in kinds:
                tried = {spec: sum(s.decode_seconds for s in stats[spec]) for spec in CANDIDATES[kind]}
                judged = {
                    spec: acceptance_by_depth((s.accepted_at_depth, s.offered_at_depth) for s in stats[spec]) for spec in tried
                }
                result.tunings.append(Tuning(engine, sampling, width, kind, tried, judged, min(tried, key=tried.__getitem__)))


def chosen_configurations(engine: str, options: Options, tunings: Sequence[Tuning]) -> list[Configuration]:
    """Plain decoding and every controller x width, for each sampling; tuned controllers as they were tuned."""
    tuned = {(t.engine, t.sampling, t.width, t.controller): t.chosen for t in tunings}
    found = []
    for sampling in options.samplings:
        found.append(Configuration(engine, sampling, None, 1))
        for width in options.widths:
            names = [tuned.get((engine, sampling, width, name), name) for name in options.controllers]
            for budget in (False, True) if width in options.budgeted else (False,):
                found += [Configuration(engine, sampling, name, width, budget) for name in dict.fromkeys(names)]
    return found


def measure(
    bench: Bench,
    engine: str,
    prompts: Sequence[Encoded],
    configurations: Sequence[Configuration],
    options: Options,
    result: Result,
) -> Iterator[None]:
    """Run every prompt that ``result`` lacks in every configuration; yields when a prompt is complete."""
    overhead = call_overhead(bench.llm.engines)
    if overhead is not None:
        result.call_overhead[engine] = overhead
    drafting = {configuration: bench.drafting(configuration, options) for configuration in configurations}
    for prompt in prompts:
        if result.done(engine, prompt.id):
            continue
        runs = []
        for sampling in options.samplings:
            chosen = options.sampling(sampling, prompt.number)
            group = [configuration for configuration in configurations if configuration.sampling == sampling]
            done = {
                configuration: bench.generate(prompt.tokens, chosen, drafting[configuration], options.max_new_tokens)
                for configuration in _rotated(group, prompt.number)
            }
            plain = done[Configuration(engine, sampling, None, 1)].tokens
            runs += [_run(bench, prompt, c, result.index(c), done[c], plain) for c in group]
        sweeps = bench.sweeps(engine, prompt, options)
        result.runs += runs
        result.sweeps += sweeps
        yield


def _run(bench: Bench, prompt: Encoded, configuration: Configuration, index: int, done: Generated, plain: list[int]) -> Run:
    stats, equal, divergence = done.stats, None, None
    if configuration.sampling != "rejection":
        divergence = first_divergence(bench.llm, prompt.tokens, plain, done.tokens)
        equal = divergence is None
    return Run(
        prompt=prompt.id,
        configuration=index,
        new_tokens=stats.new_tokens,
        rounds=[[*shape, count] for shape, count in sorted(done.rounds.items())],
        prefill_seconds=stats.prefill_seconds,
        draft_seconds=stats.draft_seconds,
        verify_seconds=stats.verify_seconds,
        host_seconds=stats.host_seconds,
        offered=stats.offered_at_depth,
        accepted=stats.accepted_at_depth,
        guard_rests=stats.guard_rests,
        equal=equal,
        divergence=divergence.index if divergence else None,
        logit_gap=divergence.logit_gap if divergence else None,
    )


def _rotated(items: Sequence[T], by: int) -> list[T]:
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]
