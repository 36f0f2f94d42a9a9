"""``python -m lab.peers``: EESD side by side with other runtimes."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from eesd.bench.measure.resumable import announce_resume
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.machine import cores
from lab.peers import batches, passes
from lab.peers.contestants import EESD, GGUF, GROUPS, TYPES, chosen
from lab.peers.convert import (
    Work,
    convert,
    directory_bytes,
    exit_layer,
    file_of,
    variants,
)
from lab.peers.measure import Comparison, Options, interpreters
from lab.peers.results import KINDS, Result
from lab.peers.table import markdown
from lab.peers.texts import choose_prompts, encoded_texts, read_encoder, read_windows
from lab.shapes import numbers

COUNT = click.IntRange(1, 10**6)
NUMBER = click.IntRange(0, 10**6)
PROMPTS = Path("examples/pycode/prompts.jsonl")
ONLY = "Only those whose name matches, with * for any text; repeatable."
PYTHON = "Python interpreter that has the peers."


@cli.group()
def main() -> None:
    """Compare EESD with llama.cpp, OpenVINO GenAI and onnxruntime-genai on one GGUF file."""


@main.command("convert", context_settings=cli.HELP)
@click.option("--model", type=cli.PATH, required=True, help="GGUF file.")
@click.option(
    "-o",
    "--output",
    type=cli.OUTPUT,
    required=True,
    help="Work directory; what it has already is kept.",
)
@click.option(
    "--type",
    "types",
    type=click.Choice(TYPES),
    multiple=True,
    help="Also make a file of this type; repeatable.",
)
@click.option(
    "--peer-python",
    type=cli.NAME,
    default=sys.executable,
    show_default=False,
    help=f"{PYTHON}  [default: this one]",
)
@click.option("--exit-head", type=cli.PATH, help="Directory of a trained exit head.")
@click.option(
    "--exit-layer", type=COUNT, help="Layers before the exit.  [default: of the exit head]"
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(2, 10**6),
    help="Slots of EESD's KV cache, as in eesd-export.",
)
@click.option("--only", multiple=True, help=f"{ONLY} Such as 'llama.cpp*'.")
@click.option("--timeout", type=COUNT, default=3600, help="Seconds of one conversion.")
def convert_command(
    model: Path, output: Path, types: tuple[str, ...], peer_python: str, **given: Any
) -> None:
    """Write one model in the forms that the peers read."""
    if not model.is_file():
        raise EESDError(f"{model} is not a file; give a GGUF file.")
    layer, head = exit_layer(given["exit_layer"], given["exit_head"])
    output.mkdir(parents=True, exist_ok=True)
    sizes = ["--max-seq-len", str(given["max_seq_len"])] if given["max_seq_len"] else []
    names = variants(types)
    wanted = chosen(names, given["only"])
    work = Work(str(model.resolve()), peer_python, layer)
    if (output / "work.json").exists():
        found = Work.load(output)
        if found.model != work.model or found.exit_layer != work.exit_layer:
            raise EESDError(
                f"{output} is of {found.model} with an exit after layer {found.exit_layer}; "
                "give another --output."
            )
        work.made = found.made
        work.skipped = found.skipped
    work.save(output)
    convert(
        work,
        output,
        head,
        sizes,
        [name for name in names if name in wanted],
        given["timeout"],
        click.echo,
    )


@main.command(context_settings=cli.HELP)
@click.option("--work", type=cli.OUTPUT, required=True, help="Work directory that convert made.")
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("results.json"), help="JSON to write."
)
@click.option(
    "--eesd",
    type=(str, cli.PATH),
    multiple=True,
    help=f"Name and engine directory; names begin with {', '.join(GROUPS)}.",
)
@click.option("--peer-python", type=cli.NAME, help=f"{PYTHON}  [default: as for convert]")
@click.option("--only", multiple=True, help=f"{ONLY} Such as '*gguf*'.")
@click.option(
    "--prompts", type=cli.PATH, default=PROMPTS, help="Prompts, as eesd-bench takes them."
)
@click.option("--short", type=NUMBER, default=4, help="Number of short prompts.")
@click.option("--short-tokens", type=COUNT, default=64, help="Tokens of a short prompt.")
@click.option("--long", type=NUMBER, default=2, help="Number of long prompts.")
@click.option("--long-tokens", type=COUNT, default=512, help="Tokens of a long prompt.")
@click.option("--longest", type=NUMBER, default=0, help="Number of the longest prompts.")
@click.option(
    "--longest-tokens", type=COUNT, default=2048, help="Tokens of one of the longest prompts."
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(2, 10**6),
    default=96,
    help="Tokens to generate behind each prompt.",
)
@click.option("--processes", type=COUNT, default=3, help="Fresh processes of each contestant.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads of each.  [default: processors]"
)
@click.option("--quality-text", type=cli.PATH, help="Held-out text, or JSON lines.")
@click.option("--quality-tokens", type=COUNT, default=4096, help="Most tokens of it.")
@click.option(
    "--window", type=click.IntRange(2, 10**6), default=512, help="Tokens of a window of it."
)
@click.option("--timeout", type=COUNT, default=600, help="Seconds of one answer.")
@click.option("--resume", is_flag=True, help="Continue the run in --output.")
@click.option("--overwrite", is_flag=True, help="Replace --output.")
def run(work: Path, output: Path, resume: bool, overwrite: bool, **given: Any) -> None:
    """Let all contestants decode the same prompts, and compare speed, memory and quality."""
    record = Work.load(work)
    everybody = record.contestants(work, dict(given["eesd"]))
    names = chosen([*(c.name for c in everybody), *record.skipped], given["only"])
    encoder = read_encoder([Path(c.path) for c in everybody if c.peer == EESD])
    lengths = {kind: (given[kind], given[f"{kind}_tokens"]) for kind in KINDS}
    prompts = choose_prompts(encoded_texts(given["prompts"], encoder), lengths, given["prompts"])
    if not prompts and given["quality_text"] is None:
        raise EESDError("There is nothing to measure; give --short, --long or --quality-text.")
    text = given["quality_text"]
    window = given["window"]
    windows = (
        read_windows(text, encoder, given["quality_tokens"], window) if text is not None else []
    )
    options = Options(
        given["max_new_tokens"],
        lengths["short"],
        lengths["long"],
        given["processes"],
        given["threads"] or cores(),
        str(given["prompts"]),
        str(text) if text is not None else None,
        given["quality_tokens"],
        window,
        lengths["longest"],
    )
    model = {"name": Path(record.model).name}
    result = Result(options.to_dict(), model, [c for c in everybody if c.name in names], prompts)
    result.sizes = {
        f"{c.peer} {c.variant}": directory_bytes(Path(c.path)) for c in result.contestants
    }
    result.skipped = {
        name: f"not converted: {reason}" for name, reason in record.skipped.items() if name in names
    }
    result = result.begun(output, resume, overwrite)
    pythons = interpreters(given["peer_python"] or record.python, sys.executable)
    with announce_resume(output):
        Comparison(result, options, pythons, given["timeout"], output, click.echo).run(
            windows, everybody
        )
    click.echo("\n".join(markdown(Result.load(output))))


@main.command("passes", context_settings=cli.HELP)
@click.option("--work", type=cli.OUTPUT, required=True, help="Work directory that convert made.")
@click.option("-o", "--output", type=cli.OUTPUT, default=Path("passes.json"), help="JSON to write.")
@click.option("--peer-python", type=cli.NAME, help=f"{PYTHON}  [default: as for convert]")
@click.option("--only", multiple=True, help=f"{ONLY} Such as '*gguf'.")
@click.option("--rows", default="1 2 4 8 16 33", callback=numbers, help="Tokens of a pass.")
@click.option("--behind", default="64 512 2048", callback=numbers, help="Tokens in the cache.")
@click.option("--prompt", type=NUMBER, default=2048, help="Tokens of a prompt; 0 for none.")
@click.option(
    "--kernels",
    default="",
    help="Kernels of EESD, such as 'avx512 avx2 avx2:int8'.  [default: the fastest]",
)
@click.option("--repeats", type=COUNT, default=20, help="Passes of each kind.")
@click.option(
    "--threads", default=str(cores()), callback=numbers, help="CPU threads of each, such as '2 1'."
)
@click.option("--timeout", type=COUNT, default=600, help="Seconds of one answer.")
def passes_command(
    work: Path,
    output: Path,
    peer_python: str | None,
    only: tuple[str, ...],
    kernels: str,
    timeout: int,
    **given: Any,
) -> None:
    """Time passes of EESD, llama.cpp and ik_llama.cpp, and show which share of the memory bandwidth
    they reach."""
    record = Work.load(work)
    able = passes.takers(record.contestants(work, {}), kernels.split())
    names = chosen([c.name for c in able], only)
    members = [c for c in able if c.name in names]
    sizes = {c.group: passes.tensor_sizes(file_of(record, work, c.group)) for c in members}
    options = given | {"rows": sorted({1, *given["rows"]}), "behind": sorted(given["behind"])}
    result = passes.Passes(Path(record.model).name, options, sizes)
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
@click.option("--work", type=cli.OUTPUT, required=True, help="Work directory that convert made.")
@click.option(
    "-o", "--output", type=cli.OUTPUT, default=Path("batches.json"), help="JSON to write."
)
@click.option("--eesd", type=cli.PATH, help="Engine directory.  [default: that of the group]")
@click.option("--peer-python", type=cli.NAME, help=f"{PYTHON}  [default: as for convert]")
@click.option("--group", type=click.Choice(GROUPS), default=GGUF, help="Form of the model.")
@click.option(
    "--task",
    multiple=True,
    help="Prompts, as eesd-bench takes them; repeatable.  [default: the bundled ones]",
)
@click.option("--concurrency", default="1 2 4 8 16", callback=numbers, help="Clients, in turn.")
@click.option(
    "--prompts", type=click.IntRange(1, 10_000), default=24, help="Texts at each concurrency."
)
@click.option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(2, 100_000),
    default=64,
    help="Of the longest text.",
)
@click.option(
    "--shortest",
    type=click.IntRange(2, 100_000),
    help="Tokens of the shortest text.  [default: as the longest]",
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1, 100_000), default=384, help="More are cut off."
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=2, help="Repetitions.")
@click.option(
    "--levels", type=click.IntRange(1, 64), default=3, help="Levels that 'always' drafts."
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads of each.  [default: processors]"
)
@click.option("--timeout", type=COUNT, default=900, help="Seconds of one measurement.")
def batches_command(
    work: Path, output: Path, eesd: Path | None, peer_python: str | None, group: str, **given: Any
) -> None:
    """Measure batches of EESD, and of other runtimes beside it: throughput and latency by the
    number of clients."""
    record = Work.load(work)
    members = [
        c for c in record.contestants(work, {group: eesd} if eesd else {}) if c.group == group
    ]
    own = next((c for c in members if c.peer == EESD), None)
    if own is None:
        raise EESDError(f"{work} has no EESD {group}; convert it, or give --eesd.")
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
