"""``eesd-run``: generate from an engine directory."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from eesd.common.cli import one_line_errors
from eesd.common.errors import EESDError
from eesd.controllers import CONTROLLERS
from eesd.runtime import report
from eesd.runtime.compare import compare
from eesd.runtime.decoding.sampling import METHODS, Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.backends import BACKENDS
from eesd.runtime.llm import LLM, Prompt, Speculation, load

HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.command(context_settings=HELP)
@click.option("--engine-dir", type=click.Path(path_type=Path), required=True, help="Directory made by eesd-export.")
@click.option("-p", "--prompt", "prompts", multiple=True, help="Prompt; may be given several times. - reads stdin.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Text file (one prompt) or .jsonl (one a line).")
@click.option("--chat", is_flag=True, help="Prompts are chat messages; without one, talk on the terminal.")
@click.option("-n", "--max-new-tokens", type=int, default=256)
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="0 is off.")
@click.option("--top-p", type=float, default=1.0)
@click.option("--min-p", type=float, default=0.0)
@click.option("--repetition-penalty", type=float, default=1.0)
@click.option("--seed", type=int, default=0)
@click.option("--sampling", "method", type=click.Choice(METHODS), default="coupled", help="How drafts are verified.")
@click.option("--stop", multiple=True, help="Stop before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on at EOS (for measuring).")
@click.option("--controller", default=Speculation.controller, help=f"{', '.join(CONTROLLERS)}; options as in fixed:k=4.")
@click.option("--tree-width", type=int, default=1, help="Nodes of a level of the token tree; 1 drafts a chain.")
@click.option("--tree-budget", is_flag=True, help="Verify what is worth it of all that the draft proposes.")
@click.option("--no-draft", is_flag=True, help="Plain decoding; the draft engine is not even loaded.")
@click.option("--no-guard", is_flag=True, help="Draft even where it is slower than plain decoding.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", help="auto: torch if it sees a GPU, else ort.")
@click.option("--threads", type=int, help="CPU threads of an engine.  [default: the processors of this process]")
@click.option("--verify", is_flag=True, help="Hash the engine's files again before loading.")
@click.option("--show-drafts", is_flag=True, help="Colour the tokens that were drafted (on a terminal).")
@click.option("--compare", "comparing", is_flag=True, help="Run with and without drafting; speed-up and equality.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
@click.option("--stats/--no-stats", default=True, help="Table of statistics on stderr.")
@one_line_errors
def main(engine_dir: Path, prompts: tuple[str, ...], prompt_file: Path | None, **options: Any) -> None:
    """Generate text with the engines of a directory: with torch on a GPU, if it sees one, else with ONNX Runtime on the CPU."""
    sampling = Sampling(
        temperature=options["temperature"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        repetition_penalty=options["repetition_penalty"],
        seed=options["seed"],
        method=options["method"],
    )
    if options["comparing"] and options["no_draft"]:
        raise EESDError("--compare needs drafting; leave --no-draft out.")
    names = ("controller", "tree_width", "seed", "tree_budget")
    speculation = Speculation(guard=not options["no_guard"], **{name: options[name] for name in names})
    llm = load(
        engine_dir,
        options["backend"],
        speculation=None if options["no_draft"] else speculation,
        threads=options["threads"],
        verify_hashes=options["verify"],
    )
    if options["chat"] and not prompts and prompt_file is None and sys.stdin.isatty():
        _talk(llm, sampling, options)
        return
    for prompt in read_prompts(prompts, prompt_file, options["chat"]):
        if options["comparing"]:
            comparison = compare(llm, prompt, sampling, options["max_new_tokens"], options["stop"], options["ignore_eos"])
            report.show_comparison(comparison, options["as_json"])
        elif options["as_json"]:
            _run_json(llm, prompt, sampling, options)
        else:
            _, stats = _run_streaming(llm, prompt, sampling, options)
            if options["stats"]:
                report.show_stats(stats, llm)


def read_prompts(prompts: Sequence[str], file: Path | None, chat: bool) -> list[Prompt]:
    """Prompts from the options, a file, or stdin; as chat messages when asked for."""
    found: list[Any] = [_text_of(sys.stdin, "stdin") if text == "-" else text for text in prompts]
    if file is not None:
        with file.open(encoding="utf-8") as stream:
            text = _text_of(stream, str(file))
        found += _json_lines(text, file) if file.suffix == ".jsonl" else [text]
    elif not found:
        found = [_text_of(sys.stdin, "stdin")]
    if not found:
        raise EESDError(f"{file} has no prompts; give at least one line.")
    if chat:
        found = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in found]
    if any(len(prompt) == 0 for prompt in found):
        raise EESDError("The prompt is empty; give some text.")
    return found


def _text_of(stream: TextIO, name: str) -> str:
    try:
        return stream.read()
    except UnicodeDecodeError:
        raise EESDError(f"{name} is not UTF-8 text.") from None


def _json_lines(text: str, file: Path) -> list[Any]:
    """Each line a string, or an object with ``prompt`` (text or token ids) or ``messages``."""
    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            raise EESDError(f"{file}, line {number} is not JSON.") from None
        if isinstance(value, dict):
            value = value.get("prompt", value.get("messages"))
        if not isinstance(value, str | list):
            raise EESDError(f"{file}, line {number} has neither a prompt nor messages.")
        prompts.append(value)
    return prompts


def _run_streaming(llm: LLM, prompt: Prompt, sampling: Sampling, options: dict[str, Any]) -> tuple[str, Stats]:
    """Print text as it comes; the whole text and the statistics."""
    stream = llm.stream(
        prompt,
        sampling,
        max_new_tokens=options["max_new_tokens"],
        stop=options["stop"],
        ignore_eos=options["ignore_eos"],
    )
    text: list[str] = []
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            click.echo()
            return "".join(text), end.value[1]
        text.append(piece.text)
        coloured = click.style(piece.text, fg="green") if options["show_drafts"] and piece.drafted else piece.text
        click.echo(coloured, nl=False)
        sys.stdout.flush()


def _run_json(llm: LLM, prompt: Prompt, sampling: Sampling, options: dict[str, Any]) -> None:
    completion = llm.generate(
        prompt,
        sampling,
        max_new_tokens=options["max_new_tokens"],
        stop=options["stop"],
        ignore_eos=options["ignore_eos"],
    )
    result = {
        "prompt": prompt,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.to_dict(),
    }
    click.echo(json.dumps(result, ensure_ascii=False))


def _talk(llm: LLM, sampling: Sampling, options: dict[str, Any]) -> None:
    """A conversation on the terminal, until end of input."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        text, stats = _run_streaming(llm, messages, sampling, options)
        messages.append({"role": "assistant", "content": text})
        if options["stats"]:
            report.show_stats(stats, llm)


if __name__ == "__main__":
    main()
