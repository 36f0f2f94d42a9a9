"""``python -m lab.peers``: the commands that compare EESD with other runtimes."""

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.resumable import announce_resume
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.machine import cores
from lab.peers import batches, passes, tokens
from lab.peers.contestants import EESD, F32, GGUF, LLAMA_CPP, Contestant, chosen
from lab.peers.convert import Work, convert, directory_bytes, variants
from lab.peers.measure import Comparison, Options, interpreters
from lab.peers.process import Process
from lab.peers.results import Result
from lab.peers.table import markdown
from lab.peers.texts import choose_prompts, encoded_texts, read_codec, read_windows
from lab.shapes import numbers

COUNT = click.IntRange(1, 10**6)
NUMBER = click.IntRange(0, 10**6)
PROMPTS = Path(__file__).with_name("prompts.jsonl")
ONLY = (
    "Use only contestants whose name matches this pattern, where * stands for any text; repeatable."
)
PYTHON = "Python interpreter in which the other runtimes are installed."


@cli.group()
def main() -> None:
    """Compare EESD with llama.cpp, ik_llama.cpp, OpenVINO GenAI and onnxruntime-genai on one GGUF
    file."""


@main.command("convert", context_settings=cli.HELP)
@click.option("--model", type=cli.PATH, required=True, help="GGUF file to convert.")
@click.option(
    "-o",
    "--output",
    type=cli.OUTPUT,
    required=True,
    help="Work directory. Forms that it already has are kept.",
)
@click.option(
    "--peer-python",
    type=cli.NAME,
    default=sys.executable,
    show_default=False,
    help=f"{PYTHON}  [default: this one]",
)
@click.option("--exit-head", type=cli.NAME, help="See eesd-export.")
@click.option("--max-seq-len", type=click.IntRange(2, 10**6), default=4096, help="See eesd-export.")
@click.option("--only", multiple=True, help=f"{ONLY} For example: 'EESD*'.")
@click.option(
    "--timeout", type=COUNT, default=3600, help="Maximum time of one conversion, in seconds."
)
def convert_command(
    model: Path,
    output: Path,
    peer_python: str,
    exit_head: str | None,
    max_seq_len: int,
    only: tuple[str, ...],
    timeout: int,
) -> None:
    """Write one model in the forms that the peers read."""
    if not model.is_file():
        raise EESDError(f"{model} is not a file; give a GGUF file.")
    output.mkdir(parents=True, exist_ok=True)
    options = ["--max-seq-len", str(max_seq_len)]
    if exit_head is not None:
        options += ["--exit-head", exit_head]
    wanted = chosen(variants(), only)
    work = Work(str(model.resolve()), peer_python)
    if (output / "work.json").exists():
        found = Work.load(output)
        if found.model != work.model:
            raise EESDError(f"{output} belongs to {found.model}; give another --output.")
        work.made = found.made
        work.skipped = found.skipped
    work.save(output)
    names = [name for name in variants() if name in wanted]
    convert(work, output, options, names, timeout, click.echo)


WORK = click.option(
    "--work", type=cli.OUTPUT, required=True, help="Work directory that convert wrote."
)
PEER_PYTHON = click.option(
    "--peer-python", type=cli.NAME, help=f"{PYTHON}  [default: as for convert]"
)
PROMPTS_FILE = click.option(
    "--prompts",
    "file",
    type=cli.PATH,
    default=PROMPTS,
    show_default=False,
    help=(
        "JSON lines file of prompts, each with a task.  [default: bundled code, "
        "chat, fim and summary prompts]"
    ),
)
THREADS = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Number of CPU threads per contestant.  [default: number of processors]",
)
KIND = click.option(
    "--kind", "kinds", multiple=True, help="Task from which to take prompts; repeatable."
)


@main.command(context_settings=cli.HELP)
@WORK
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("results.json"), help="JSON file to write."
)
@PEER_PYTHON
@click.option("--only", multiple=True, help=f"{ONLY} For example: 'EESD*'.")
@PROMPTS_FILE
@KIND
@click.option("--per-kind", type=NUMBER, default=3, help="Number of prompts per task.")
@click.option(
    "--temperature",
    "temperatures",
    type=float,
    multiple=True,
    help="Sampling temperature; repeatable.  [default: 0 and 0.7]",
)
@click.option("--lengths", default="512 2048", help="Numbers of tokens in long prompts.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(9, 10**6), default=96)
@click.option("--processes", type=COUNT, default=2, help="Number of processes per contestant.")
@THREADS
@click.option(
    "--quality-text",
    type=cli.PATH,
    help="File of held-out text, or JSON lines, for measuring quality.",
)
@click.option(
    "--quality-tokens", type=COUNT, default=4096, help="Maximum number of tokens of --quality-text."
)
@click.option(
    "--window",
    type=click.IntRange(2, 10**6),
    default=512,
    help="Number of tokens in a window of --quality-text.",
)
@click.option("--timeout", type=COUNT, default=600, help="Maximum time of one answer, in seconds.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --output.")
@click.option("--overwrite", is_flag=True, help="Replace an existing result in --output.")
def run(
    work: Path,
    output: Path,
    peer_python: str | None,
    only: tuple[str, ...],
    file: Path,
    resume: bool,
    overwrite: bool,
    **given: Any,
) -> None:
    """Let all contestants decode the same prompts, and compare their speed, memory and quality."""
    record = Work.load(work)
    everybody = record.contestants(work)
    able = [one for one in everybody if one.variant == GGUF]
    names = chosen([*(one.name for one in able), *record.skipped], only)
    codec = read_codec(_engines(everybody))
    lengths = [int(length) for length in given["lengths"].split()]
    texts = encoded_texts(file, codec) if given["per_kind"] or lengths else []
    prompts = choose_prompts(
        texts,
        given["per_kind"],
        given["temperatures"] or (0.0, 0.7),
        given["max_new_tokens"],
        lengths,
        given["kinds"],
    )
    text = given["quality_text"]
    window = given["window"]
    windows = [] if text is None else read_windows(text, codec, given["quality_tokens"], window)
    options = Options(
        given["processes"],
        given["threads"] or cores(),
        None if text is None else str(text),
        given["quality_tokens"],
        window,
    )
    members = [one for one in able if one.name in names]
    result = Result(asdict(options), {"name": Path(record.model).name}, members, prompts)
    result.sizes = {f"{one.peer} {one.variant}": directory_bytes(Path(one.path)) for one in members}
    result.skipped = {
        name: f"not converted: {reason}" for name, reason in record.skipped.items() if name in names
    }
    result = result.begun(output, resume, overwrite)
    pythons = interpreters(peer_python or record.python, sys.executable)
    with announce_resume(output):
        Comparison(result, options, pythons, given["timeout"], output, click.echo).run(
            windows, [one for one in everybody if one.variant == F32]
        )
    click.echo("\n".join(markdown(Result.load(output))))


@main.command("tokens", context_settings=cli.HELP)
@WORK
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("tokens.json"), help="JSON file to write."
)
@PEER_PYTHON
@PROMPTS_FILE
@KIND
@click.option("--per-kind", type=COUNT, default=10, help="Number of prompts per task.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(9, 10**6), default=64)
@THREADS
@click.option("--timeout", type=COUNT, default=600, help="Maximum time of one answer, in seconds.")
def tokens_command(
    work: Path,
    output: Path,
    peer_python: str | None,
    file: Path,
    kinds: tuple[str, ...],
    per_kind: int,
    max_new_tokens: int,
    threads: int | None,
    timeout: int,
) -> None:
    """Compare greedy tokens with llama.cpp's, and show the margins of first differences."""
    record = Work.load(work)
    plain = {
        one.peer: one for one in record.contestants(work) if one.is_plain and one.variant == GGUF
    }
    texts = encoded_texts(file, read_codec(_engines([*plain.values()])))
    prompts = choose_prompts(texts, per_kind, (0.0,), max_new_tokens, (), kinds)
    slots = max(len(prompt.tokens) + prompt.count for prompt in prompts) + 1
    count = threads or cores()
    settings = {"mode": "plain", "variant": GGUF, "threads": count, "slots": slots}
    pythons = interpreters(peer_python or record.python, sys.executable)
    with ExitStack() as stack:
        running: list[Process] = []
        for name in (EESD, LLAMA_CPP):
            if name not in plain:
                raise EESDError(f"{work} lacks {name}; convert it.")
            one = plain[name]
            process = Process(pythons[name], one.worker, count, timeout)
            running.append(stack.enter_context(closing(process)))
            process.ask("load", path=one.path, options=settings)
        found = tokens.compare_tokens(prompts, running, lambda line: click.echo(line, err=True))
    with written_whole(output) as temporary:
        temporary.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    click.echo("\n".join(tokens.markdown(found)))


def _engines(contestants: list[Contestant]) -> list[Path]:
    """Return the engine directories that contestants load."""
    return [Path(one.path) for one in contestants if one.peer == EESD]


@main.command("passes", context_settings=cli.HELP)
@WORK
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("passes.json"), help="JSON file to write."
)
@PEER_PYTHON
@click.option("--only", multiple=True, help=f"{ONLY} For example: '*gguf'.")
@click.option(
    "--rows", default="1 2 4 8 16 33", callback=numbers, help="Numbers of tokens in a pass."
)
@click.option(
    "--behind",
    default="64 512 2048",
    callback=numbers,
    help="Numbers of tokens in the cache before a pass.",
)
@click.option(
    "--prompt",
    type=NUMBER,
    default=2048,
    help="Number of tokens in a prompt. 0 measures no prompt.",
)
@click.option(
    "--kernels",
    default="",
    help=("Kernels of EESD to measure, such as 'avx512 avx2 avx2:int8'.  [default: the fastest]"),
)
@click.option("--repeats", type=COUNT, default=20, help="Number of passes of each kind.")
@click.option(
    "--threads",
    default=str(cores()),
    callback=numbers,
    help="Numbers of CPU threads per contestant, such as '2 1'.",
)
@click.option("--timeout", type=COUNT, default=600, help="Maximum time of one answer, in seconds.")
def passes_command(
    work: Path,
    output: Path,
    peer_python: str | None,
    only: tuple[str, ...],
    kernels: str,
    timeout: int,
    **given: Any,
) -> None:
    """Measure passes of EESD and llama.cpp, and show their share of the memory bandwidth."""
    record = Work.load(work)
    able = passes.takers(
        [one for one in record.contestants(work) if one.variant == GGUF], kernels.split()
    )
    names = chosen([c.name for c in able], only)
    members = [c for c in able if c.name in names]
    weights, products = passes.tensor_sizes(Path(record.model))
    options = given | {"rows": sorted({1, *given["rows"]}), "behind": sorted(given["behind"])}
    result = passes.Passes(Path(record.model).name, options, weights, products)
    passes.measure(
        result,
        members,
        interpreters(peer_python or record.python, sys.executable),
        timeout,
        output,
        click.echo,
    )
    click.echo("\n".join(passes.markdown(result)))


@main.command("batches", context_settings=cli.HELP)
@WORK
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("batches.json"), help="JSON file to write."
)
@PEER_PYTHON
@click.option(
    "--task",
    multiple=True,
    help=("JSON lines file of prompts, as in eesd-bench; repeatable.  [default: bundled prompts]"),
)
@click.option(
    "--concurrency", default="1 2 4 8 16", callback=numbers, help="Numbers of clients to measure."
)
@click.option(
    "--prompts",
    type=click.IntRange(1, 10_000),
    default=24,
    help="Number of texts for each number of clients.",
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(2, 100_000),
    default=64,
    help="Number of tokens in the longest text.",
)
@click.option(
    "--shortest",
    type=click.IntRange(2, 100_000),
    help="Number of tokens in the shortest text.  [default: as in the longest]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, 100_000),
    default=384,
    help="Maximum number of prompt tokens. Longer prompts are cut.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=2, help="Number of repetitions.")
@click.option(
    "--levels",
    type=click.IntRange(1, 64),
    default=3,
    help="Number of levels that the mode 'always' drafts in each round.",
)
@THREADS
@click.option(
    "--timeout", type=COUNT, default=900, help="Maximum time of one measurement, in seconds."
)
def batches_command(work: Path, output: Path, peer_python: str | None, **given: Any) -> None:
    """Measure the throughput and the latency of batches of EESD and other runtimes for several
    numbers of clients."""
    record = Work.load(work)
    members = [one for one in record.contestants(work) if one.variant == GGUF]
    own = next((one for one in members if one.peer == EESD), None)
    if own is None:
        raise EESDError(f"{work} has no form of the file for EESD; convert it.")
    most = given["max_new_tokens"]
    threads = given["threads"] or cores()
    shortest = min(given["shortest"] or most, most)
    rounds = given["rounds"]
    options = batches.Options(
        given["concurrency"],
        most,
        shortest,
        given["prompt_tokens"],
        rounds,
        given["levels"],
        threads,
    )
    ids = batches.choose_prompts(
        Path(own.path), given["task"], given["prompts"], options.prompt_tokens
    )
    pythons = interpreters(peer_python or record.python, sys.executable)
    results = batches.measure(
        members, ids, options, pythons, given["timeout"], lambda line: click.echo(line, err=True)
    )
    with written_whole(output) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    click.echo("\n".join(batches.markdown(results)))
