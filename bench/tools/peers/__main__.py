"""``python -m eesd.bench.tools.peers``: EESD side by side with other runtimes."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.results import refuse_existing, write_json
from eesd.bench.measure.tasks import read_texts
from eesd.bench.tools.peers import batches, passes, table
from eesd.bench.tools.peers.contestants import EESD, GGUF, GROUPS, LLAMA_CPP, PEERS, TYPES, chosen
from eesd.bench.tools.peers.convert import Work, convert, directory_bytes, exit_options
from eesd.bench.tools.peers.measure import Comparison
from eesd.bench.tools.peers.results import Prompt, Result
from eesd.bench.tools.shapes import numbers
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.machine import cores

COUNT = click.IntRange(1, 10**6)
PROMPTS = Path("examples/pycode/prompts.jsonl")
WORK = click.option("--work", type=cli.PATH, required=True, help="Work directory that convert made.")
PYTHON = click.option("--peer-python", type=cli.NAME, help="Python interpreter that has the peers.  [default: as for convert]")
THREADS = click.option("--threads", type=click.IntRange(1, 1024), default=cores, help="CPU threads of each.")
ONLY = click.option("--only", multiple=True, help="Only names that match, with * for any text, as '*gguf*'; repeatable.")


def output(name: str) -> Callable[..., Any]:
    """The option for the JSON file to write."""
    return click.option("-o", "--output", type=cli.PATH, default=Path(name), help="JSON to write.")


def timeout(seconds: int, what: str) -> Callable[..., Any]:
    """The option for the longest time of a step."""
    return click.option("--timeout", type=COUNT, default=seconds, help=f"Seconds of one {what}.")


say = partial(click.echo, err=True)


@cli.group()
def main() -> None:
    """Compare EESD with llama.cpp and OpenVINO GenAI on one GGUF file."""


@main.command("convert", context_settings=cli.HELP)
@click.option("--model", type=cli.PATH, required=True, help="GGUF file.")
@click.option("-o", "--output", "work", type=cli.PATH, required=True, help="Work directory; what it has already is kept.")
@click.option("--type", "types", type=click.Choice(TYPES), multiple=True, help="Also make a file of this type; repeatable.")
@click.option("--peer-python", type=cli.NAME, default=sys.executable, help="Python interpreter that has the peers.")
@click.option("--exit-head", type=cli.PATH, help="Directory of a trained exit head.")
@click.option("--exit-layer", type=COUNT, help="Layers before the exit, instead of an exit head.")
@click.option("--max-seq-len", type=click.IntRange(2, 10**6), help="Slots of EESD's KV cache, as in eesd-export.")
@ONLY
@timeout(3600, "conversion")
def convert_command(
    model: Path, work: Path, types: tuple[str, ...], peer_python: str, only: tuple[str, ...], timeout: int, **given: Any
) -> None:
    """Write one model in the forms that the peers read."""
    exits = exit_options(given["exit_head"], given["exit_layer"])
    sizes = ["--max-seq-len", str(given["max_seq_len"])] if given["max_seq_len"] else []
    names = [f"{peer} {group}" for group in (GGUF, *types) for peer in PEERS]
    wanted = chosen(names, only)
    work.mkdir(parents=True, exist_ok=True)
    record = Work(work, str(model.resolve()), peer_python)
    if (work / "work.json").exists():
        found = Work.load(work)
        if found.model != record.model:
            raise EESDError(f"{work} is of {found.model}; give another --output.")
        record.skipped = found.skipped
    record.save()
    convert(record, [name for name in names if name in wanted], exits, sizes, timeout, click.echo)


@main.command(context_settings=cli.HELP)
@WORK
@output("results.json")
@PYTHON
@ONLY
@click.option("--prompts", type=cli.PATH, default=PROMPTS, help="Prompts: JSON lines with prompt or turns, or a text.")
@click.option("--lengths", default="64 64 64 64 512 512", callback=numbers, help="Tokens of each prompt.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(2, 10**6), default=96, help="Tokens behind each prompt.")
@click.option("--processes", type=COUNT, default=3, help="Fresh processes of each contestant.")
@THREADS
@timeout(600, "answer")
@click.option("--overwrite", is_flag=True, help="Replace --output.")
def run(work: Path, output: Path, peer_python: str | None, overwrite: bool, **given: Any) -> None:
    """Let all contestants decode the same prompts, and compare speed and memory."""
    record = Work.load(work)
    if not overwrite:
        refuse_existing(output)
    everybody = record.contestants()
    names = chosen([c.name for c in everybody], given["only"])
    prompts = choose_prompts(
        read_tokens(given["prompts"], [Path(c.path) for c in everybody]), given["lengths"], given["prompts"]
    )
    options = {"new_tokens": given["max_new_tokens"], "processes": given["processes"], "threads": given["threads"]}
    options |= {"prompts_file": str(given["prompts"])}
    result = Result(options, {"name": Path(record.model).name}, [c for c in everybody if c.name in names], prompts)
    result.sizes = {f"{c.peer} {c.variant}": directory_bytes(Path(c.path)) for c in result.contestants}
    result.skipped = {name: f"not converted: {reason}" for name, reason in record.skipped.items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    Comparison(result, peer_python or record.python, given["timeout"], output, say).run()
    click.echo("\n".join(table.markdown(result)))


@main.command("passes", context_settings=cli.HELP)
@WORK
@output("passes.json")
@PYTHON
@ONLY
@click.option("--rows", default="1 4 8", callback=numbers, help="Tokens of a pass.")
@click.option("--behind", default="64 512 2048", callback=numbers, help="Tokens in the cache.")
@click.option("--repeats", type=COUNT, default=20, help="Passes of each kind.")
@THREADS
@timeout(600, "answer")
def passes_command(work: Path, output: Path, peer_python: str | None, only: tuple[str, ...], **given: Any) -> None:
    """Time single passes of EESD and llama.cpp on the same files, and show which share of the memory bandwidth they reach."""
    record = Work.load(work)
    able = [c for c in record.contestants() if c.peer in (EESD, LLAMA_CPP) and c.is_plain]
    names = chosen([c.name for c in able], only)
    members = [c for c in able if c.name in names]
    weights = {c.group: passes.weight_bytes(record.file(c.group)) for c in members}
    options = {"rows": [*given["rows"]], "behind": sorted(given["behind"])}
    options |= {"repeats": given["repeats"], "threads": given["threads"]}
    result = passes.Passes(Path(record.model).name, options, weights)
    passes.measure(result, members, peer_python or record.python, given["timeout"], output, say)
    click.echo("\n".join(passes.markdown(result)))


@main.command("batches", context_settings=cli.HELP)
@WORK
@output("batches.json")
@PYTHON
@click.option("--group", type=click.Choice(GROUPS), default=GGUF, help="Form of the model.")
@click.option("--task", multiple=True, help="Prompts, as eesd-bench takes them; repeatable.  [default: the bundled ones]")
@click.option("--concurrency", default="1 2 4 8 16", callback=numbers, help="Clients, in turn.")
@click.option("--prompts", type=click.IntRange(1, 10_000), default=24, help="Texts at each concurrency.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(2, 100_000), default=64, help="Of each text.")
@click.option("--prompt-tokens", type=click.IntRange(1, 100_000), default=384, help="More are cut off.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=2, help="Repetitions.")
@click.option("--levels", type=click.IntRange(1, 64), default=3, help="Levels that 'always' drafts.")
@THREADS
@timeout(900, "measurement")
def batches_command(work: Path, output: Path, peer_python: str | None, group: str, **given: Any) -> None:
    """Measure batches of EESD, and of other runtimes beside it: throughput and latency by the number of clients."""
    record = Work.load(work)
    members = [c for c in record.contestants() if c.group == group]
    own = next((c for c in members if c.peer == EESD), None)
    if own is None:
        raise EESDError(f"{work} has no EESD {group}; convert it.")
    count, most = given["max_new_tokens"], given["prompt_tokens"]
    prompts = batches.choose_prompts(Path(own.path), given["task"], given["prompts"], most)
    options = {"threads": given["threads"], "rows": batches.ROWS, "slots": 2 * most + count, "levels": given["levels"]}
    options |= {"prompts": len(prompts), "max_new_tokens": count, "rounds": given["rounds"]}
    python, seconds = peer_python or record.python, given["timeout"]
    results = batches.measure(members, prompts, given["concurrency"], options, python, seconds, say)
    write_json(output, results)
    click.echo("\n".join(batches.markdown(results)))


def read_tokens(path: Path, engines: list[Path]) -> list[list[int]]:
    """Token ids of each text of a file, by the tokenizer that is beside an engine. Of several turns only the first counts."""
    from tokenizers import Tokenizer

    file = next((file for engine in engines if (file := engine / "tokenizer.json").exists()), None)
    if file is None:
        raise EESDError("No engine directory has a tokenizer.json; convert the GGUF file for EESD.")
    encoder = Tokenizer.from_file(str(file))
    return [encoder.encode(parts[0], add_special_tokens=False).ids for _, parts in read_texts(path)]


def choose_prompts(texts: list[list[int]], lengths: Sequence[int], source: Path) -> list[Prompt]:
    """Prompts of exactly these lengths: pieces of the texts, one behind another, of which none begins like another.

    So a peer that keeps the beginnings of prompts gains nothing. A prompt begins a text if one is long enough.

    Raises:
        EESDError: There is not enough text.
    """
    prompts, waiting = list[Prompt](), list(texts)
    for number, length in enumerate(lengths):
        fitting = next((index for index, text in enumerate(waiting) if len(text) >= length), None)
        tokens = waiting.pop(fitting) if fitting is not None else []
        while len(tokens) < length and waiting:
            tokens = tokens + waiting.pop(0)
        if len(tokens) < length:
            raise EESDError(f"{source} has too few tokens for prompts of {' '.join(map(str, lengths))}; give more text.")
        prompts.append(Prompt(f"{length}-{number + 1}", str(length), tokens[:length]))
    return prompts


if __name__ == "__main__":
    main(prog_name="python -m eesd.bench.tools.peers")
