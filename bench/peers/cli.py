"""``python -m eesd.bench.peers``: EESD side by side with other runtimes."""

import sys
from pathlib import Path
from typing import Any

import click

from eesd.bench.peers.contestants import EESD, GROUPS, PEERS, chosen
from eesd.bench.peers.convert import Work, convert, directory_bytes, exit_layer, variants
from eesd.bench.peers.measure import Comparison, Options, interpreters
from eesd.bench.peers.results import KINDS, Result
from eesd.bench.peers.table import markdown
from eesd.bench.peers.texts import choose_prompts, read_encoder, read_texts, read_windows
from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.machine import cores

COUNT = click.IntRange(1, 10**6)
NUMBER = click.IntRange(0, 10**6)
PROMPTS = Path("examples/pycode/prompts.jsonl")
ONLY = "Only those whose name matches, with * for any text; repeatable."
PYTHON = "Python interpreter that has the peers."


@cli.group()
def main() -> None:
    """Compare EESD with llama.cpp, OpenVINO GenAI, onnxruntime-genai and transformers on one checkpoint."""


def pairs(name: str, given: tuple[str, ...], keys: tuple[str, ...] = ()) -> dict[str, str]:
    """``KEY=VALUE`` options as a dictionary. Raises :class:`EESDError` for other text, and for unknown keys."""
    found = {}
    for item in given:
        key, _, value = item.partition("=")
        if not key or not value:
            raise EESDError(f"{name} {item!r} must be NAME=PATH.")
        if keys and key not in keys:
            raise EESDError(f"{name} {item!r}: there is no {key}; there are {', '.join(keys)}.")
        found[key] = value
    return found


@main.command("convert", context_settings=cli.HELP)
@click.option("--model", type=cli.PATH, required=True, help="Directory with a checkpoint and tokenizer.json, or GGUF file.")
@click.option("-o", "--output", type=cli.PATH, required=True, help="Work directory; what it has already is kept.")
@click.option("--peer-python", type=cli.NAME, default=sys.executable, show_default=False, help=f"{PYTHON}  [default: this one]")
@click.option(
    "--convert-python", "pythons", multiple=True, metavar="PEER=PATH", help="Another interpreter to convert for one peer."
)
@click.option("--exit-head", type=cli.PATH, help="Directory of a trained exit head.  [default: the model directory]")
@click.option("--exit-layer", type=COUNT, help="Layers before the exit.  [default: of the exit head, or a quarter]")
@click.option("--max-seq-len", type=click.IntRange(2, 10**6), help="Slots of EESD's KV cache, as in eesd-export.")
@click.option("--only", multiple=True, help=f"{ONLY} Such as 'llama.cpp*'.")
@click.option("--timeout", type=COUNT, default=3600, help="Seconds of one conversion.")
def convert_command(model: Path, output: Path, peer_python: str, pythons: tuple[str, ...], **given: Any) -> None:
    """Write one checkpoint in the forms that the peers read."""
    layer, export = exit_layer(model, given["exit_layer"], given["exit_head"])
    if given["max_seq_len"]:
        export += ["--max-seq-len", str(given["max_seq_len"])]
    wanted = chosen(variants(model), given["only"])
    output.mkdir(parents=True, exist_ok=True)
    work = Work(str(model.resolve()), peer_python, layer)
    if (output / "work.json").exists():
        found = Work.load(output)
        if found.model != work.model or found.exit_layer != work.exit_layer:
            raise EESDError(f"{output} is of {found.model} with an exit after layer {found.exit_layer}; give another --output.")
        work.made, work.skipped = found.made, found.skipped
    work.save(output)
    own = pairs("--convert-python", pythons, tuple(PEERS))
    convert(work, output, own, export, wanted, given["timeout"], click.echo)


@main.command(context_settings=cli.HELP)
@click.option("--work", type=cli.PATH, required=True, help="Work directory that convert made.")
@click.option(
    "-o", "--output", type=cli.PATH, default=Path("results.json"), help="JSON to write; a table is written beside it."
)
@click.option("--eesd", multiple=True, metavar="NAME=DIR", help=f"Engine directory; NAME begins with {', '.join(GROUPS)}.")
@click.option("--peer-python", type=cli.NAME, help=f"{PYTHON}  [default: as for convert]")
@click.option("--only", multiple=True, help=f"{ONLY} Such as '*int4*'.")
@click.option("--prompts", type=cli.PATH, default=PROMPTS, help="JSON lines with prompt, turns or tokens, or a text.")
@click.option("--short", type=NUMBER, default=4, help="Number of short prompts.")
@click.option("--short-tokens", type=COUNT, default=64, help="Tokens of a short prompt.")
@click.option("--long", type=NUMBER, default=2, help="Number of long prompts.")
@click.option("--long-tokens", type=COUNT, default=512, help="Tokens of a long prompt.")
@click.option("--longest", type=NUMBER, default=0, help="Number of the longest prompts.")
@click.option("--longest-tokens", type=COUNT, default=2048, help="Tokens of one of the longest prompts.")
@click.option(
    "-n", "--max-new-tokens", type=click.IntRange(2, 10**6), default=96, help="Tokens to generate behind each prompt."
)
@click.option("--processes", type=COUNT, default=3, help="Fresh processes of each contestant.")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads of each.  [default: processors]")
@click.option("--quality-text", type=cli.PATH, help="Held-out text: text, JSON lines, or a JSON list of token ids.")
@click.option("--quality-tokens", type=COUNT, default=4096, help="Most tokens of it.")
@click.option("--window", type=click.IntRange(2, 10**6), default=512, help="Tokens of a window of it.")
@click.option("--timeout", type=COUNT, default=600, help="Seconds of one answer.")
@click.option("--resume", is_flag=True, help="Continue the run in --output.")
@click.option("--overwrite", is_flag=True, help="Replace --output.")
def run(work: Path, output: Path, resume: bool, overwrite: bool, **given: Any) -> None:
    """Let all contestants decode the same prompts, and compare speed, memory and quality."""
    record = Work.load(work)
    if output.exists() and not (resume or overwrite):
        raise EESDError(f"{output} exists; give --resume, --overwrite or another --output.")
    everybody = record.contestants(work, {name: Path(path) for name, path in pairs("--eesd", given["eesd"]).items()})
    names = chosen([c.name for c in everybody], given["only"])
    encoder = read_encoder(Path(record.model), [Path(c.path) for c in everybody if c.peer == EESD])
    lengths = {kind: (given[kind], given[f"{kind}_tokens"]) for kind in KINDS}
    prompts = choose_prompts(read_texts(given["prompts"], encoder), lengths, given["prompts"])
    if not prompts and given["quality_text"] is None:
        raise EESDError("There is nothing to measure; give --short, --long or --quality-text.")
    text, window = given["quality_text"], given["window"]
    windows = read_windows(text, encoder, given["quality_tokens"], window) if text is not None else []
    options = Options(
        given["max_new_tokens"], lengths["short"], lengths["long"], given["processes"], given["threads"] or cores(),
        str(given["prompts"]), str(text) if text is not None else None, given["quality_tokens"], window, lengths["longest"],
    )  # fmt: skip
    model = {"name": Path(record.model).name, "exit_layer": record.exit_layer}
    result = Result(options.to_dict(), model, [c for c in everybody if c.name in names], prompts)
    result.sizes = {f"{c.peer} {c.variant}": directory_bytes(Path(c.path)) for c in result.contestants}
    result.skipped = {name: f"not converted: {reason}" for name, reason in record.skipped.items()}
    if resume and output.exists():
        result = resumed(Result.load(output), result, output)
    pythons = interpreters(given["peer_python"] or record.python, sys.executable)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        Comparison(result, options, pythons, given["timeout"], output, click.echo).run(windows, everybody)
    except KeyboardInterrupt:
        click.echo(f"\n{output} has the results so far; continue with --resume.", err=True)
        raise
    show(output)


def resumed(found: Result, wanted: Result, path: Path) -> Result:
    """The result to continue. Raises :class:`EESDError` if it is of another measurement."""
    for what in ("options", "model", "contestants", "prompts", "machine"):
        if getattr(found, what) != getattr(wanted, what):
            raise EESDError(f"{path} was measured with other {what}, so it cannot be resumed; use --overwrite.")
    return found


@main.command(context_settings=cli.HELP)
@click.argument("results", type=cli.PATH)
def report(results: Path) -> None:
    """Write the table of RESULTS, a file that run wrote, again."""
    show(results)


def show(path: Path) -> None:
    """Write the table of the JSON file at ``path`` beside it, and print it."""
    table = path.with_suffix(".md")
    text = "\n".join(markdown(Result.load(path)))
    table.write_text(text, "utf-8")
    click.echo(text)
    click.echo(f"{path}, {table}", err=True)
