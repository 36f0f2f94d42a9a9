"""``eesd-distill``: train an exit head on what the model itself says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eesd.common.cli import clean_up_on_sigterm, one_line_errors
from eesd.common.errors import EESDError
from eesd.common.weights import DTYPES

if TYPE_CHECKING:  # torch loads only after the options were read
    from eesd.distill.run import Run

FILE = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", required=True, help="Model directory, Hugging Face id, or short name.")
@click.option("--exit-layer", type=int, help="Layers before the exit head (N).")
@click.option("-o", "--output", type=FILE, required=True, help="Where the head and all about its training goes.")
@click.option("--blocks", default=1, help="Decoder blocks of the head (E).")
@click.option("--own-lm-head/--shared-lm-head", default=False, help="Train an LM head of its own.")
@click.option("--init-head", type=FILE, help="Start from this head instead of the model's last layers.")
@click.option("--search-exit-layer", help="Short runs for these exit layers, e.g. 2,3,4,6; recommends one.")
@click.option("--search-blocks", default="1", help="Block counts that the search tries.")
@click.option("--data", type=FILE, multiple=True, help="Train on this: .txt, .jsonl, .npy, .safetensors; repeatable.")
@click.option("--self-generate", type=FILE, multiple=True, help="Train on the model's continuations of these prompts.")
@click.option("--own-text", type=FILE, help="Directory of the generated text.  [default: OUTPUT/own-text]")
@click.option("--own-rows", default=4096, help="Rows to generate.")
@click.option("--own-batch", default=64, help="Rows to generate at a time.")
@click.option("--temperatures", default="0,0.7,1", help="Temperatures of the generated rows, in turn.")
@click.option("--prompt-tokens", default=32, help="Tokens of a prompt that is cut from text.")
@click.option("--mix", type=FILE, multiple=True, help="Ground-truth text to mix in; repeatable.")
@click.option("--mix-share", default=0.25, help="Part of each batch that is mixed in.")
@click.option("--validation", type=FILE, multiple=True, help="Prompts for validation.  [default: taken from the data]")
@click.option("--validation-prompts", default=64)
@click.option("--validation-tokens", default=128)
@click.option("--offline", type=FILE, help="Cache of the teacher's targets: made once, then no teacher is needed.")
@click.option("--ce", default=0.5, help="Weight: cross-entropy on the teacher's likeliest token.")
@click.option("--kl", default=1.0, help="Weight: KL from the teacher's distribution.")
@click.option("--kl-temperature", default=1.0)
@click.option("--top-k", default=64, help="Tokens of the teacher's distribution that are kept.")
@click.option("--text-ce", default=0.0, help="Weight: cross-entropy on the text's next token (no teacher).")
@click.option("--hidden", default=0.0, help="Weight: regression of the teacher's last hidden state.")
@click.option("--unroll", default=1, help="Multi-step training: weigh positions by drafts of so many tokens.")
@click.option("--unroll-decay", default=0.8)
@click.option("--steps", default=4000, help="0: train nothing; evaluate and calibrate the --init-head.")
@click.option("--batch", default=8, help="Rows of a pass on each process.")
@click.option("--accumulate", default=1, help="Passes of a step.")
@click.option("--length", default=256, help="Tokens of a row.")
@click.option("--lr", default=3e-3)
@click.option("--warmup", default=0.01, help="Part of the steps.")
@click.option("--cooldown", default=0.55, help="Part of the steps.")
@click.option("--optimizer", type=click.Choice(["muon", "adamw"]), default="muon")
@click.option("--clip", default=1.0, help="Largest norm of the gradient.")
@click.option("--precision", type=click.Choice(["bf16", "float32"]), default="bf16")
@click.option("--dtype", type=click.Choice(DTYPES), help="The teacher's weights.  [default: float32 on a CPU, else bfloat16]")
@click.option("--log-every", default=50, help="Steps between lines of figures.")
@click.option("--eval-every", default=500, help="Steps between validations.")
@click.option("--save-every", default=500, help="Steps between checkpoints.")
@click.option("--compile/--eager", "compiled", default=False, help="Use torch.compile.")
@click.option("--seed", default=0)
@one_line_errors
def main(**options: Any) -> None:
    """Train the exit head of a frozen model on the model's own text. The same command goes on with a run that was stopped."""
    try:
        import accelerate  # noqa: F401

        from eesd.distill.run import make_run
    except ImportError as error:
        raise EESDError(f"Distilling needs {error.name}; install it with: pip install 'eesd[distill]'.") from None
    clean_up_on_sigterm()
    layers = _numbers("--search-exit-layer", options.pop("search_exit_layer"), int)
    blocks = _numbers("--search-blocks", options.pop("search_blocks"), int)
    options["temperatures"] = _numbers("--temperatures", options["temperatures"], float)
    if options["exit_layer"] is None:
        if not layers:
            raise EESDError("Give --exit-layer N, or --search-exit-layer 2,3,4 to find one.")
        options["exit_layer"] = layers[0]
    run = make_run(options, progress)
    if layers:
        if not run.training.steps:
            raise EESDError("--search-exit-layer trains a head for each layer; give --steps of at least 1.")
        _search(run, layers, blocks)
        return
    if run.training.steps:
        run.train(report if run.is_main else lambda _: None)
    else:
        run.adopt()
    _evaluate(run)


def _search(run: Run, layers: tuple[Any, ...], blocks: tuple[Any, ...]) -> None:
    from eesd.distill.search import search, table

    candidates = search(run, layers, blocks, report if run.is_main else lambda _: None)
    if run.is_main:
        click.echo(table(candidates))


def _evaluate(run: Run) -> None:
    from eesd.distill.calibrate import table

    acceptance, calibration = run.evaluate()
    if not run.is_main:
        return
    depths = " ".join(f"{value:.3f}" for value in acceptance.by_depth)
    click.echo(table(calibration))
    if calibration.prior is None:
        click.echo("The fitted prior is not clearly better: the default stays.")
    else:
        click.echo(f"The fitted prior is written; the spread of requests' offsets is {calibration.prior.request}.")
    click.echo(f"{run.output}: acceptance by depth {depths}, {acceptance.tokens_per_round:.2f} tokens a round of 8 drafts")


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise EESDError(f"{option} takes numbers separated by commas; {text!r} was given.") from None


def report(figures: dict[str, Any]) -> None:
    """One line for training figures or a validation."""
    label = f"{figures['label']}: " if "label" in figures else ""
    if "acceptance" in figures:
        depths = " ".join(f"{value:.3f}" for value in figures["acceptance"])
        click.echo(
            f"{label}step {figures['step']:6}  acceptance by depth {depths}  tokens a round {figures['tokens_per_round']:.3f}"
        )
    else:
        values = "  ".join(f"{name} {figures[name]:.4f}" for name in ("loss", "ce", "kl", "agreement"))
        click.echo(f"{label}step {figures['step']:6}  {values}  {figures['seconds']:.0f} s")


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal; where stderr is none, nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


if __name__ == "__main__":
    main()
