"""``python -m lab.exactness DIR...``: check that every way to compute a text gives the same bits.

For each engine directory and kind of activations, the fastest kernels decode each prompt plainly
with one thread. This gives the expected bits. Then every kernel of this processor decodes it with
two threads, and the fastest kernels also with one thread. Each decodes it plainly, then with draft
chains, draft trees and a tree budget, then with other chunk sizes for the prompt, and finally in
batches with and without kept prefixes. All logits after each committed token are compared. In a
batch, the tokens and their most likely alternatives are compared, with log-probabilities. Prompts
are random tokens, so every part of the vocabulary occurs."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from eesd.bench.measure.results import describe_machine, read_json, shown_machine
from eesd.common.cli import OUTPUT, PATH, command
from eesd.common.files import written_whole
from eesd.common.manifest import load_manifest
from eesd.common.markdown import table
from eesd.runtime.batch.scheduler import BatchOptions, Scheduler
from eesd.runtime.compare import LogitRecord
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import operators
from eesd.runtime.engines.backends import ACTIVATIONS, EngineOptions, Engines, open_engines
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.llm import LLM, Speculation
from eesd.runtime.request import MAX_LOGPROBS, Generation, Request, Update

KIND = "exactness"
PROMPTS = (7, 129)
"""Lengths of the prompts in tokens."""
CHUNKS = (7, 64)
"""Sizes of prompt chunks (in tokens) that are checked in addition to the default."""
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=1))
WAYS: dict[str, list[Speculation | None]] = {
    "plain": [None],
    "chain": [Speculation(name, guard=False) for name in ("fixed:k=4", "cost-aware-ts")],
    "tree": [Speculation("fixed:k=4", tree=3, guard=False)],
    "budget": [Speculation("cost-aware-ts", guard=False, tree=1)],
}
SHARED = 64
"""Length (in tokens) of the beginning that a batch's prompts have in common."""
BATCH = 4
"""Number of requests in a batch."""


@dataclass(frozen=True)
class Row:
    """The comparisons of one kind with one engine.

    Attributes:
        directory, activations, kernels, threads: The engine that ran.
        kind: ``calls`` (calls of all sizes, with varied caches, chunks and trees), a key of
            :data:`WAYS`, ``chunks``, ``batch`` or ``prefix``. For ``calls``, a run is a call of the
            engine.
        runs: Number of texts or calls that were compared.
        different: Number of runs in which a bit differs.
        positions: Number of tokens at which logits were compared.
    """

    directory: str
    activations: str
    kernels: str
    threads: int
    kind: str
    runs: int
    different: int
    positions: int


def label(directory: Path) -> str:
    """Return the name of an engine directory in the results. It has the last two folders of the
    path, because directories of different models may have the same name."""
    return "/".join(directory.absolute().parts[-2:])


def open_with(directory: Path, backend: str, kernels: str, threads: int, activations: str) -> LLM:
    """Load an engine directory. ``kernels`` is a name such as ``avx2``, or ``avx2:int8`` to choose
    the type of caches as well. It is "" for a backend that has no such choice."""
    manifest = load_manifest(directory)
    if not kernels:
        return LLM(
            directory,
            manifest,
            open_engines(directory, manifest, EngineOptions(backend, threads, True)),
            None,
        )
    from eesd.runtime.engines.cpu_build import built_for_cpu
    from eesd.runtime.engines.cpu_engine import CpuEngine

    build = built_for_cpu(directory, manifest)
    name, _, cache = kernels.partition(":")
    options = threads, activations == "int8", name, cache or "float32"
    verify = CpuEngine(build, manifest, manifest.verify, *options)
    stages = [manifest.draft] if manifest.exit_head.can_draft else []
    draft = CpuEngine(build, manifest, stages, *options) if stages else None
    return LLM(directory, manifest, Engines(verify, draft, exact=True, exact_trees=True), None)


def combinations(backend: str) -> list[tuple[str, int]]:
    """Return the kernels and numbers of threads to compare. The first combination gives the
    expected bits."""
    if backend != "ort" or operators.missing():
        return [("", 1), ("", 2)]
    fastest, *others = operators.supported()
    return [(fastest, 1), (fastest, 2), *((name, 2) for name in others)]


def check_directory(
    directory: Path, backend: str, new_tokens: int, report: Callable[[Row], None]
) -> Iterator[Row]:
    """Compare everything on one directory. Yields each row and passes it to ``report``."""
    chosen = load_manifest(directory).quantization
    quantized = chosen.layers or chosen.head or chosen.tensors
    kinds = ACTIVATIONS if quantized and combinations(backend)[0][0] else ("float32",)
    for activations in kinds:
        calls = Exactness(load_manifest(directory))
        texts = _Texts(new_tokens)
        batches = _Batches(new_tokens)
        for kernels, threads in combinations(backend):
            llm = open_with(directory, backend, kernels, threads, activations)
            before = _counts(calls)
            calls.check(llm.engines.verify)
            found = {"calls": _counts(calls) - before} | texts.compare(llm) | batches.compare(llm)
            for kind, counts in found.items():
                numbers = counts["runs"], counts["different"], counts["positions"]
                row = Row(label(directory), activations, kernels, threads, kind, *numbers)
                report(row)
                yield row


def _counts(exactness: Exactness) -> Counter[str]:
    """Return the numbers of calls compared so far, of rows of logits that differ, and of rows
    compared."""
    both = exactness.chains, exactness.trees
    names = {"runs": "calls", "different": "differing", "positions": "positions"}
    return Counter({key: sum(getattr(one, name) for one in both) for key, name in names.items()})


class _Texts:
    """Compares plain and drafted texts with the plain texts of the first engine."""

    def __init__(self, new_tokens: int) -> None:
        self._new_tokens = new_tokens
        self._expected: dict[tuple[int, Sampling], LogitRecord] = {}

    def compare(self, llm: LLM) -> dict[str, Counter[str]]:
        """Return the numbers of runs, of runs that differ, and of positions compared, for each
        kind."""
        found: dict[str, Counter[str]] = {}
        for length in PROMPTS:
            prompt = random_tokens(llm, length)
            for sampling in SAMPLINGS:
                expected = self._expected.get((length, sampling))
                if expected is None:
                    expected = self._expected[length, sampling] = LogitRecord(whole=False)
                    self._run(llm, prompt, sampling, expected)
                for kind, speculation, chunk in _ways():
                    record = LogitRecord(expected)
                    usual = llm.engines.verify.prefill_chunk
                    llm.engines.verify.prefill_chunk = chunk or usual
                    self._run(llm.with_speculation(speculation), prompt, sampling, record)
                    llm.engines.verify.prefill_chunk = usual
                    wrong = record.result.differing > 0 or record.tokens != expected.tokens
                    counts = Counter(
                        runs=1, different=int(wrong), positions=record.result.positions
                    )
                    found.setdefault(kind, Counter()).update(counts)
        return found

    def _run(self, llm: LLM, prompt: list[int], sampling: Sampling, record: LogitRecord) -> None:
        llm.observer = record
        llm.generate(prompt, sampling, max_new_tokens=self._new_tokens, ignore_eos=True)


def _ways() -> Iterator[tuple[str, Speculation | None, int]]:
    """Yield the kind, the speculation, and the number of tokens in a chunk of the prompt (0 for the
    default)."""
    for kind, speculations in WAYS.items():
        yield from ((kind, speculation, 0) for speculation in speculations)
    yield from (("chunks", None, chunk) for chunk in CHUNKS)


class _Batches:
    """Compares the requests of a batch with the same requests on the first engine, where each
    request runs in a batch of one."""

    def __init__(self, new_tokens: int) -> None:
        self._new_tokens = new_tokens
        self._expected: list[list[Any]] = []

    def compare(self, llm: LLM) -> dict[str, Counter[str]]:
        """Return the numbers of runs, of runs that differ, and of positions compared. They are
        given for a batch and for its repetition with kept beginnings."""
        shared = random_tokens(llm, min(SHARED, llm.manifest.max_seq_len // 4))
        options = BatchOptions(max_rows=BATCH, prefill_tokens=48, levels=3)
        given = [
            Request(
                tokens=[*shared, *range(3, 5 + number)],
                sampling=SAMPLINGS[number % 2],
                max_new_tokens=self._new_tokens,
                ignore_eos=True,
                logprobs=MAX_LOGPROBS,
            )
            for number in range(BATCH)
        ]
        drafting = llm.with_speculation(WAYS["chain"][0])
        if not self._expected:
            alone = Scheduler(drafting, replace(options, max_rows=1, prefix_memory=0, levels=0))
            self._expected = [answer for answer, _ in run_batch(alone, given)]
        scheduler = Scheduler(drafting, options)
        found = {}
        for kind in ("batch", "prefix"):
            answers = run_batch(scheduler, given)
            assert kind == "batch" or all(cached for _, cached in answers), (
                "no beginning of a prompt was kept"
            )
            wrong = sum(
                answer != expected
                for (answer, _), expected in zip(answers, self._expected, strict=True)
            )
            found[kind] = Counter(
                runs=len(given), different=wrong, positions=len(given) * self._new_tokens
            )
        return found


def run_batch(scheduler: Scheduler, requests: Sequence[Request]) -> list[tuple[list[Any], int]]:
    """Run a batch. For each request, return its tokens with log-probabilities, and the number of
    its prompt's tokens that were kept from earlier prompts."""
    updates: list[list[Update]] = [[] for _ in requests]
    for request, own in zip(requests, updates, strict=True):
        generation = Generation(request, own.append)
        scheduler.check(generation)
        scheduler.add(generation)
    while scheduler.waiting or scheduler.running or scheduler.prefilling:
        scheduler.step()
    return [
        ([output.logprob for update in own for output in update.tokens], own[0].cached_tokens)
        for own in updates
    ]


def random_tokens(llm: LLM, count: int) -> list[int]:
    """Return random token ids. They are always the same for a vocabulary and a count."""
    most = min(count, llm.manifest.max_seq_len // 2)
    tokens: list[int] = (
        np.random.default_rng(count).integers(llm.manifest.geometry.vocab_size, size=most).tolist()
    )
    return tokens


def is_exactness(raw: Any) -> bool:
    """Return whether a JSON value is a result of this benchmark."""
    return isinstance(raw, dict) and raw.get("kind") == KIND


def markdown(result: dict[str, Any], level: str = "#") -> list[str]:
    """Return lines that show the numbers of comparisons and differences of each engine
    directory."""
    rows = [Row(**row) for row in result["rows"]]
    engines = list(dict.fromkeys(f"{row.kernels}, {row.threads} threads" for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != "calls"))
    texts, wrong = totals(rows)
    calls = [row for row in rows if row.kind == "calls"]
    count = sum(row.runs for row in calls)
    differ = sum(row.different for row in calls)
    lines = [
        f"{level} Bits",
        "",
        *table(
            ["setting", ""],
            {
                "machine": shown_machine(result["machine"]),
                "engines": "; ".join(engines),
                **{"texts that differ": f"**{wrong} of {texts}** ({', '.join(kinds)})"},
                **{"rows of logits that differ": f"{differ}, in {count} calls of all sizes"},
            }.items(),
        ),
        (
            "All bits are compared with those of plain decoding on the first engine with "
            "the same activations."
        ),
        "",
    ]
    shown = []
    for directory, activations in dict.fromkeys((row.directory, row.activations) for row in rows):
        own = [row for row in rows if (row.directory, row.activations) == (directory, activations)]
        counts = [sum(row.runs for row in own if row.kind == kind) for kind in ("calls", *kinds)]
        cells = [
            directory,
            activations,
            *counts,
            sum(row.positions for row in own),
            sum(row.different for row in own),
        ]
        shown.append(cells)
    return lines + table(
        ["", "activations", "calls", *kinds, "tokens compared", "different"], shown
    )


def totals(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the number of texts that were compared and the number of texts that differ."""
    texts = [row for row in rows if row.kind != "calls"]
    return sum(row.runs for row in texts), sum(row.different for row in texts)


@command()
@click.argument("directories", type=PATH, nargs=-1, required=True)
@click.option(
    "--new-tokens", type=click.IntRange(1), default=24, help="Number of tokens in each text."
)
@click.option("--backend", default="ort")
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    help="JSON file to write. Rows of other directories in it are kept.",
)
def main(directories: tuple[Path, ...], new_tokens: int, backend: str, output: Path | None) -> None:
    "Check that all ways to compute a text give the same bits of logits, on engine DIRECTORIES."

    def report(row: Row) -> None:
        engine = (
            f"{row.directory}, {row.activations} activations, {row.kernels or backend}, "
            f"{row.threads} threads"
        )
        click.echo(
            f"{engine}, {row.kind}: {row.different} of {row.runs} differ ({row.positions} "
            "positions)"
        )

    rows: list[Row] = []
    if output is not None and output.exists():
        names = {label(directory) for directory in directories}
        rows = [
            row for raw in read_json(output)["rows"] if (row := Row(**raw)).directory not in names
        ]
    for directory in directories:
        rows += check_directory(directory, backend, new_tokens, report)
        if output is not None:
            found = [asdict(row) for row in rows]
            value = {"kind": KIND, "machine": describe_machine(), "rows": found}
            with written_whole(output) as temporary:
                temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    texts, wrong = totals(rows)
    click.echo(f"{texts} texts compared, {wrong} differ")


if __name__ == "__main__":
    main()
