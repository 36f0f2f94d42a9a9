"""``eesd-run``: generate with a model or an engine directory."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.json_input import MAX_BYTES, decode, json_lines, read_text
from eesd.common.manifest import SAMPLING_OPTIONS
from eesd.common.terminal import Console, Table, coloured
from eesd.controllers import CONTROLLERS
from eesd.runtime.compare import Comparison, LogitComparison, compare
from eesd.runtime.decoding.drafting import DRAFTERS
from eesd.runtime.decoding.sampling import METHODS, Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engine_options import engine_dir_of, engine_options
from eesd.runtime.engines.backends import ACTIVATIONS, BACKENDS
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES
from eesd.runtime.llm import GENERATION_CONFIGS, LLM, Options, Prompt, Speculation, load
from eesd.runtime.request import Constraint, check_lengths

AUTO = (
    "Backend to run on. auto selects plans on a GPU if there are any, else torch on a "
    "GPU, else ort."
)
MODELS_SAMPLING = (
    "Whether to take defaults of the sampling options from the model's generation_config.json."
)
EXACT = "logits are the same bits for every number of tokens in a call"
BITS = (
    "Make sure that drafting changes no bit of a logit, even in trees and on a GPU. "
    "--no-exact is faster on a GPU, but other requests may then change the last bits of "
    "a logit.  [default: exact if it is cheap]"
)
ROUNDED = "Type of the activations in products with quantized weights on the CPU.  [default: int8]"
CACHED = (
    "Type of the KV cache on the CPU. Compared with float32, float16 takes half the "
    "memory and reading time, and int8 a quarter.  [default: float32]"
)
DRAFTED = "Source of drafts: the exit head, repeated text, or both."
DEEPEST = 8
"""Deepest draft level whose acceptance is shown."""


drafting_options = cli.options(
    click.option(
        "--drafter",
        type=click.Choice([*DRAFTERS]),
        default=Speculation.drafter,
        show_default=True,
        help=DRAFTED,
    ),
    click.option(
        "--controller",
        default=Speculation.controller,
        help=f"Rule for draft lengths: {', '.join(CONTROLLERS)}. Give options as in fixed:k=4.",
    ),
    click.option(
        "--tree",
        type=int,
        default=0,
        help="Number of nodes in a level of the draft tree. 0 drafts a chain.",
    ),
    click.option(
        "--no-draft", is_flag=True, help="Decode plainly, without loading the draft engine."
    ),
    click.option(
        "--no-guard", is_flag=True, help="Keep drafting even if it is slower than plain decoding."
    ),
)
"""Command-line options for drafting; see :func:`speculation_of`."""


loading_options = cli.options(
    click.option(
        "--generation-config",
        type=click.Choice(GENERATION_CONFIGS),
        default="auto",
        help=MODELS_SAMPLING,
    ),
    click.option("--backend", type=click.Choice(BACKENDS), default="auto", help=AUTO),
    click.option(
        "--threads",
        type=int,
        help=(
            "Number of CPU threads.  [default: number of processors, minus one if there are more "
            "than four]"
        ),
    ),
    click.option("--exact/--no-exact", default=None, help=BITS),
    click.option("--activations", type=click.Choice(ACTIVATIONS), help=ROUNDED),
    click.option("--kv-cache-dtype", type=click.Choice(KV_CACHE_DTYPES), help=CACHED),
    click.option(
        "--nvtx",
        is_flag=True,
        help=(
            "On a GPU, mark prefill, draft, verify and accept with NVTX ranges for Nsight Systems."
        ),
    ),
)
"""Command-line options for loading engines; see :func:`load_as_asked`."""


def speculation_of(options: dict[str, Any]) -> Speculation | None:
    """Return the drafting options of a command, or None with ``--no-draft``.

    Raises:
        EESDError: A value cannot be used, or ``--no-draft`` is given together with an option that
            needs drafting.
    """
    if options.get("comparing") and options["no_draft"]:
        raise EESDError("--compare needs drafting; leave --no-draft out.")
    names = ("drafter", "controller", "tree")
    seed = options.get("seed", Speculation.seed)
    speculation = Speculation(
        guard=not options["no_guard"], seed=seed, **{name: options[name] for name in names}
    )
    return None if options["no_draft"] else speculation


@cli.command()
@engine_options
@click.option(
    "-p",
    "--prompt",
    "prompts",
    multiple=True,
    help="Prompt; repeatable. - reads the prompt from stdin.",
)
@click.option(
    "--prompt-file",
    type=cli.PATH,
    help="Text file with one prompt, or .jsonl file with one prompt per line.",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Send prompts as chat messages. Without a prompt, chat in the terminal.",
)
@click.option("-n", "--max-new-tokens", type=int, default=256, help="Maximum number of new tokens.")
@click.option(
    "--temperature",
    type=float,
    help="Sampling temperature. 0 decodes greedily.  [default: the model's, else 0]",
)
@click.option(
    "--top-k",
    type=int,
    help=(
        "Sample from the k most likely tokens only. 0 turns this off."
        "  [default: the model's, else 0]"
    ),
)
@click.option(
    "--top-p",
    type=float,
    help=(
        "Sample from the most likely tokens with a total probability "
        "of p. 1 turns this off.  [default: the model's, else 1]"
    ),
)
@click.option(
    "--min-p",
    type=float,
    help=(
        "Minimum probability of a token, relative to that of the most"
        " likely token. 0 turns this off.  [default: the model's, else 0]"
    ),
)
@click.option(
    "--repetition-penalty",
    type=float,
    help=(
        "Penalty for tokens that the text already contains. 1 turns t"
        "his off.  [default: the model's, else 1]"
    ),
)
@click.option(
    "--seed",
    type=int,
    default=0,
    help="Random seed. The seeds of further prompts are derived from it.",
)
@click.option(
    "--sampling",
    "method",
    type=click.Choice(METHODS),
    default="coupled",
    help="Method for verifying drafts when sampling.",
)
@click.option("--stop", multiple=True, help="Stop before this text; repeatable.")
@click.option("--min-tokens", type=int, default=0, help="Minimum number of new tokens.")
@click.option(
    "--json-schema",
    type=cli.PATH,
    metavar="FILE",
    help="Generate JSON that matches the schema in this file.",
)
@click.option("--regex", help="Generate text that matches this regular expression.")
@click.option(
    "--grammar",
    type=cli.PATH,
    metavar="FILE",
    help="Generate text that matches the grammar in this file, in Lark or GBNF form.",
)
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json, report the log-probability of each token and of N alternatives.",
)
@click.option(
    "--ignore-eos", is_flag=True, help="Do not stop at the EOS token. Useful for benchmarks."
)
@drafting_options
@loading_options
@click.option("--show-drafts", is_flag=True, help="Colour the drafted tokens (in a terminal).")
@click.option(
    "--compare",
    "comparing",
    is_flag=True,
    help="Run with and without drafting, and compare speed, tokens and bits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
@click.option("--stats/--no-stats", default=True, help="Print a table of statistics on stderr.")
def main(prompts: tuple[str, ...], prompt_file: Path | None, **options: Any) -> None:
    """Generate text with a model or an engine directory. A model is exported first."""
    chosen = {
        name: options[name]
        for name in (*SAMPLING_OPTIONS, "seed", "method")
        if options[name] is not None
    }
    # Refuse bad options before anything is loaded.
    Sampling(**chosen)
    check_lengths(options["min_tokens"], options["max_new_tokens"])
    constraint = _constraint_of(options)
    speculation = speculation_of(options)
    engine_dir = engine_dir_of(options)
    llm = load_as_asked(engine_dir, options, speculation)
    options["make_constraint"] = _compiled(constraint, llm)
    sampling = replace(llm.default_sampling, **chosen)
    on_terminal = (
        options["chat"] and not prompts and prompt_file is None and sys.stdin and sys.stdin.isatty()
    )
    found = [] if on_terminal else read_prompts(prompts, prompt_file, options["chat"])
    if options["generation_config"] == "auto":
        _show_sampling(llm, sampling, chosen)
    if options["comparing"]:
        _compare(llm, found, sampling, options)
    else:
        for number, prompt in enumerate(found):
            _run(llm, prompt, sampling.of_text(number), options)
    if on_terminal:
        _chat(llm, sampling, options)


def _constraint_of(options: dict[str, Any]) -> tuple[str, str] | None:
    """Return the kind and the value of the constraint in the options.

    Raises:
        EESDError: The options have several constraints, or exclude each other.
    """
    kinds = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
    given = [name for name in kinds if options[name] is not None]
    if len(given) > 1:
        raise EESDError(
            "--json-schema, --regex and --grammar each constrain the text; give one of them."
        )
    if options["logprobs"] is not None and not options["as_json"]:
        raise EESDError("--logprobs needs --json; add it.")
    if options["comparing"] and (given or options["logprobs"] is not None or options["min_tokens"]):
        raise EESDError(
            "--compare cannot be used with a constraint, --logprobs or --min-tokens; "
            "leave them out."
        )
    if not given:
        return None
    value = options[given[0]]
    return kinds[given[0]], value if given[0] == "regex" else read_text(value, "give UTF-8 text")


def _compiled(constraint: tuple[str, str] | None, llm: LLM) -> Callable[[], Constraint | None]:
    """Return a function that makes each request's constraint. Refuse an invalid constraint now."""
    if constraint is None:
        return lambda: None
    from eesd.runtime.constraint import make_constraint, of_grammar  # needs an optional package

    grammar = make_constraint(*constraint, llm).grammar
    return lambda: of_grammar(grammar, llm)


def _asked(options: dict[str, Any]) -> Options:
    """Make a request's options from the command's options."""
    return {
        "max_new_tokens": options["max_new_tokens"],
        "stop": options["stop"],
        "ignore_eos": options["ignore_eos"],
        "min_tokens": options["min_tokens"],
        "logprobs": options["logprobs"],
        "constraint": options["make_constraint"](),
    }


def _show_sampling(llm: LLM, sampling: Sampling, chosen: dict[str, Any]) -> None:
    """Print a line on stderr with the options of the model's ``generation_config.json`` that change
    tokens, if there are any."""
    names = ("repetition_penalty",) if sampling.greedy else SAMPLING_OPTIONS
    given = llm.manifest.sampling.given
    parts = [f"{name} {given[name]:g}" for name in names if name in given and name not in chosen]
    if parts:
        click.echo(
            (
                f"generation_config.json: {', '.join(parts)} (--generation-config none switches "
                "it off)"
            ),
            err=True,
        )


def load_as_asked(
    engine_dir: Path, options: dict[str, Any], speculation: Speculation | None
) -> LLM:
    """Load an engine directory with the options that commands share."""
    names = (
        "backend",
        "threads",
        "generation_config",
        "exact",
        "activations",
        "kv_cache_dtype",
        "nvtx",
        "plain_content",
    )
    given = {name: options[name] for name in names if name in options}
    return load(engine_dir, speculation=speculation, **given)


def read_prompts(prompts: Sequence[str], file: Path | None, chat: bool) -> list[Prompt]:
    """Read prompts from the options, a file, or stdin. If ``chat`` is True, they become chat
    messages."""
    found: list[Any] = [_stdin() if text == "-" else text for text in prompts]
    if file is not None:
        text = read_text(file, "give UTF-8 text")
        if file.suffix == ".jsonl":
            found += _json_lines(text, file)
        else:
            found.append(text)
    elif not found:
        found = [_stdin()]
    if not found:
        raise EESDError(f"{file} has no prompts; add at least one line.")
    if chat:
        found = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in found]
    if any(len(prompt) == 0 for prompt in found):
        raise EESDError("The prompt is empty; give some text.")
    return found


def _stdin() -> str:
    """Read all of stdin as text."""
    if sys.stdin is None:
        raise EESDError("There is no prompt: stdin is closed; give --prompt or --prompt-file.")
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise EESDError(f"stdin has more than {MAX_BYTES >> 20} MiB; give a shorter prompt.")
    return decode(data, "stdin", "give UTF-8 text")


def _json_lines(text: str, file: Path) -> list[Any]:
    """Read prompts from JSON lines. Each line is a string, or an object with ``prompt`` (text or
    token ids) or ``messages``."""
    prompts = []
    for number, value in json_lines(text, str(file), "give one JSON value a line"):
        if isinstance(value, dict):
            value = value.get("prompt", value.get("messages"))
        if not isinstance(value, str | list):
            raise EESDError(f"{file}, line {number} has neither a prompt nor messages.")
        prompts.append(value)
    return prompts


def _run(llm: LLM, prompt: Prompt, sampling: Sampling, options: dict[str, Any]) -> None:
    """Generate from one prompt, and print the result in the form that the options choose."""
    if options["as_json"]:
        _print_json(llm, prompt, sampling, options)
    else:
        _, stats = _stream(llm, prompt, sampling, options)
        if options["stats"]:
            _show_stats(stats, llm)


def _stream(
    llm: LLM, prompt: Prompt, sampling: Sampling, options: dict[str, Any]
) -> tuple[str, Stats]:
    """Print text as it comes. Returns the whole text and the statistics."""
    stream = llm.stream(prompt, sampling, **_asked(options))
    text: list[str] = []
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            click.echo()
            return "".join(text), end.value[1]
        text.append(piece.text)
        drafted = options["show_drafts"] and piece.from_draft
        click.echo(coloured(piece.text, "green") if drafted else piece.text, nl=False)
        sys.stdout.flush()


def _print_json(llm: LLM, prompt: Prompt, sampling: Sampling, options: dict[str, Any]) -> None:
    completion = llm.generate(prompt, sampling, **_asked(options))
    result = {
        "prompt": prompt,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stats": completion.stats.to_dict(),
    }
    if completion.logprobs is not None:
        result["logprobs"] = [asdict(one) for one in completion.logprobs]
    click.echo(json.dumps(result, ensure_ascii=False))


def _chat(llm: LLM, sampling: Sampling, options: dict[str, Any]) -> None:
    """Hold a conversation on the terminal until the end of the input."""
    # Refuse a model without a chat template before the user types anything.
    llm.encode([{"role": "user", "content": "Hello"}])
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        text, stats = _stream(llm, messages, sampling, options)
        messages.append({"role": "assistant", "content": text})
        if options["stats"]:
            _show_stats(stats, llm)


def _show_stats(stats: Stats, llm: LLM) -> None:
    """Print a small table of statistics on stderr."""
    table = Table(show_header=False)
    for name, value in _rows(stats, llm):
        table.add_row(name, value)
    Console(stderr=True).print(table)


def _rows(stats: Stats, llm: LLM) -> list[tuple[str, str]]:
    speed = (
        f"{stats.new_tokens} tokens in {stats.decode_seconds:.2f} s, "
        f"{stats.tokens_per_second:.1f} tokens/s"
    )
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens in {stats.prefill_seconds * 1e3:.0f} ms"),
        ("generated", speed),
    ]
    if stats.drafting_rounds:
        by_depth = _acceptance_by_depth([stats])
        rows += [
            ("rounds", f"{stats.rounds}, {stats.tokens_per_round:.2f} tokens each"),
            (
                "draft tokens",
                f"{stats.draft_tokens}, accepted {stats.accepted_tokens}{_from_text(stats, llm)}",
            ),
            ("acceptance", f"{stats.acceptance:.2f}, by depth {by_depth}"),
            ("time", _shares(stats)),
        ]
    if stats.exact:
        rows.append(("exact", EXACT))
    if stats.guard_pauses:
        rows.append(
            (
                "guard",
                f"drafting paused {stats.guard_pauses} times: it was slower than plain decoding",
            )
        )
    if llm.drafting.drafter is not None and not llm.manifest.exit_head.trained:
        rows.append(
            ("exit head", "untrained: acceptance is low until it is trained with eesd-distill")
        )
    return rows


def _acceptance_by_depth(runs: Sequence[Stats]) -> str:
    """Return the share of draft tokens that were accepted at each of the first depths, over several
    runs together."""
    accepted = zip_longest(*(one.accepted_at_depth for one in runs), fillvalue=0)
    judged = zip_longest(*(one.verified_at_depth for one in runs), fillvalue=0)
    pairs = [(sum(good), sum(all_)) for good, all_ in zip(accepted, judged, strict=True)]
    return " ".join(f"{good / all_:.2f}" for good, all_ in pairs[:DEEPEST] if all_)


def _from_text(stats: Stats, llm: LLM) -> str:
    """Describe the accepted tokens that the text proposed, and the rounds without draft steps."""
    if llm.drafting.text is None:
        return ""
    return (
        f" ({stats.accepted_text_tokens} from the text), {stats.text_rounds} rounds without the "
        "draft engine"
    )


def _shares(stats: Stats) -> str:
    total = stats.decode_seconds or 1.0
    parts = (
        ("draft", stats.draft_seconds),
        ("verify", stats.verify_seconds),
        ("host", stats.host_seconds),
    )
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)


def _compare(
    llm: LLM, prompts: Sequence[Prompt], sampling: Sampling, options: dict[str, Any]
) -> None:
    """Run prompts with and without drafting. Show the texts and speeds or, with ``--json``, print
    an object for each prompt."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        chosen = sampling.of_text(number - 1)
        comparison = compare(
            llm, prompt, chosen, options["max_new_tokens"], options["stop"], options["ignore_eos"]
        )
        found.append(comparison)
        if options["as_json"]:
            click.echo(json.dumps(_comparison_object(comparison)))
            continue
        if len(prompts) > 1:
            click.echo(f"{'' if number == 1 else chr(10)}[{number}] {_question(prompt)}")
        click.echo(comparison.text)
    if found and not options["as_json"]:
        _show_comparisons(found)


def _question(prompt: Prompt) -> str:
    """Return a prompt as one line. This is its text or its last message."""
    if isinstance(prompt, str):
        text = prompt
    else:
        last = prompt[-1]
        text = f"{len(prompt)} tokens" if isinstance(last, int) else str(last.get("content", ""))
    return shorten(text, 100, placeholder=" ...")


def _comparison_object(comparison: Comparison) -> dict[str, Any]:
    divergence = comparison.divergence
    found: dict[str, Any] = {
        "speedup": comparison.speedup,
        "equal": divergence is None,
        "divergence": asdict(divergence) if divergence else None,
        "logits": asdict(comparison.logits),
        "plain": comparison.plain.to_dict(),
        "drafting": comparison.drafting.to_dict(),
    }
    if comparison.one_node:
        found["one_node"] = comparison.one_node.to_dict()
    return found


def _show_comparisons(found: Sequence[Comparison]) -> None:
    """Print a table on stderr. It has a row for each prompt and a row for all prompts. The columns
    show speeds, speed-ups, and whether tokens and logits are equal."""
    several = len(found) > 1
    table = Table("tokens/s", "plain", "drafting", "speed-up", "tokens per round", "acceptance")
    for number, comparison in enumerate(found, start=1):
        table.add_row(f"[{number}]" if several else "", *_speeds([comparison]))
    if several:
        table.add_section()
        table.add_row("all", *_speeds(found))
    Console(stderr=True).print(table)
    by_depth = _acceptance_by_depth([comparison.drafting for comparison in found])
    if by_depth:
        click.echo(f"acceptance by depth: {by_depth}", err=True)
    alone = [comparison.one_node for comparison in found if comparison.one_node]
    if alone:
        rate = _rate(alone)
        click.echo(
            (
                "plain decoding with one node per pass (whose rounding may differ): "
                f"{rate:.1f} tokens/s; drafting is "
                f"{_rate([one.drafting for one in found]) / rate:.2f}x as fast"
            ),
            err=True,
        )
    for number, comparison in enumerate(found, start=1):
        divergence = comparison.divergence
        if divergence is not None:
            click.echo(
                f"{f'[{number}] ' if several else ''}tokens differ from new token "
                f"{divergence.index} on "
                f"({divergence.plain_token} without drafting, {divergence.drafting_token} with), "
                f"logit gap {divergence.logit_gap:.2e}",
                err=True,
            )
    if all(comparison.divergence is None for comparison in found):
        click.echo(
            f"tokens are equal ({sum(comparison.plain.new_tokens for comparison in found)})",
            err=True,
        )
    click.echo(str(sum((comparison.logits for comparison in found), LogitComparison())), err=True)


def _rate(runs: Sequence[Stats]) -> float:
    """Return the tokens per second over several runs together."""
    return sum(one.new_tokens for one in runs) / sum(one.decode_seconds for one in runs)


def _speeds(found: Sequence[Comparison]) -> list[str]:
    """Return the cells of a row. They are computed from all tokens, seconds, rounds and judged
    draft tokens of the runs."""
    plain = [one.plain for one in found]
    drafting = [one.drafting for one in found]
    rates = [_rate(plain), _rate(drafting)]
    judged = sum(sum(one.verified_at_depth) for one in drafting)
    accepted = sum(sum(one.accepted_at_depth) for one in drafting)
    a_round = sum(one.new_tokens for one in drafting) / sum(one.rounds for one in drafting)
    speeds = [f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[1] / rates[0]:.2f}x"]
    return [*speeds, f"{a_round:.2f}", f"{accepted / judged:.2f}" if judged else ""]


if __name__ == "__main__":
    main()
