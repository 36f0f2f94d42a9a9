"""The command ``eesd-distill`` trains an exit head on text that the model generates."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.geometry import LARGEST_SIZE
from eesd.common.machine import pip_install
from eesd.common.quantization import DTYPES
from eesd.common.terminal import progress_bar
from eesd.distill.options import PRECISIONS, STARTS

if TYPE_CHECKING:  # torch loads after the options are parsed, so that --help is fast
    from eesd.distill.run import Run


WEIGHT = cli.Number(0, 1e6)
INTERVAL = click.IntRange(1, 10**9)


@cli.command()
@click.option(
    "--model",
    type=cli.NAME,
    required=True,
    help="Model directory, GGUF file, Hugging Face id, or short name such as llama-70b.",
)
@click.option(
    "--exit-layer",
    type=click.IntRange(1, 10_000),
    help=(
        "Number of model layers before the exit head (N).  [default: 2, or 1 for a model of "
        "two layers]"
    ),
)
@click.option(
    "-o",
    "--output",
    type=cli.OUTPUT,
    required=True,
    help="Directory for the head, checkpoints and metrics.",
)
@click.option(
    "--blocks",
    type=click.IntRange(0, 1000),
    help=(
        "Number of decoder blocks in the head (E). 0, together with --steps 0, uses the "
        "model's own norm and LM head, for models that were trained to exit early.  "
        "[default: 1]"
    ),
)
@click.option(
    "--own-lm-head/--shared-lm-head",
    default=None,
    help=(
        "Whether to train an LM head for the exit head, or to use the model's.  [default: "
        "own with a draft vocabulary, if the head then has at most 10 million weights]"
    ),
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(0, LARGEST_SIZE),
    help=(
        "Let the head predict only this number of tokens, the most frequent in the text. 0 "
        "means the whole vocabulary.  [default: a quarter of a large vocabulary, between "
        "8192 and 16384]"
    ),
)
@click.option(
    "--deep",
    help=(
        "Layers above N whose states the draft also reads, such as 10,20,30, or none.  "
        "[default: the last layer of each third of the model]"
    ),
)
@click.option(
    "--mlp",
    type=click.IntRange(0, LARGEST_SIZE),
    help=(
        "Width of the MLPs in the head's blocks. 0 leaves the MLPs out.  [default: the "
        "model's width, or less to stay within 10 million weights]"
    ),
)
@click.option(
    "--init-head",
    type=cli.NAME,
    help=(
        "Start from this head (a directory or Hugging Face id) and its structure, instead of "
        "the model's last layers."
    ),
)
@click.option(
    "--data",
    type=cli.PATH,
    multiple=True,
    help="File of rows to train on (.txt, .jsonl, .npy or .safetensors); repeatable.",
)
@click.option(
    "--self-generate",
    type=cli.PATH,
    multiple=True,
    help="File of prompts; repeatable. The head is trained on the model's continuations.",
)
@click.option(
    "--self-prompt",
    type=click.IntRange(0, 10**9),
    default=0,
    help=(
        "Number of prompts that the model writes itself.  [default: 0, or half of --own-rows "
        "if there is no other data]"
    ),
)
@click.option(
    "--self-prompt-start",
    default=STARTS,
    multiple=True,
    show_default=False,
    help=(
        "Beginning of the prompts that the model writes; repeatable. Prompts use the "
        "beginnings in turn.  [default: beginnings of common tasks]"
    ),
)
@click.option(
    "--own-text",
    type=cli.OUTPUT,
    help="Directory for the generated text.  [default: OUTPUT/own-text]",
)
@click.option(
    "--own-rows", type=click.IntRange(1, 10**9), default=4096, help="Number of rows to generate."
)
@click.option(
    "--own-batch",
    type=click.IntRange(1, 65536),
    default=16,
    help="Number of rows to generate at a time.",
)
@click.option(
    "--temperatures",
    default="0,0.7,1",
    help="Sampling temperatures. Generated rows use them in turn.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, 10**6),
    default=32,
    help="Number of tokens in a prompt that is cut from text.",
)
@click.option(
    "--mix", type=cli.PATH, multiple=True, help="File of ground-truth text to mix in; repeatable."
)
@click.option(
    "--mix-share",
    type=cli.Number(0, 1, max_open=True),
    default=0.25,
    help="Fraction of each batch that comes from --mix.",
)
@click.option(
    "--validation",
    type=cli.PATH,
    multiple=True,
    help="File of validation prompts; repeatable.  [default: prompts held out from the data]",
)
@click.option(
    "--validation-prompts",
    type=click.IntRange(1, 10**6),
    default=64,
    help="Maximum number of validation prompts.",
)
@click.option(
    "--validation-tokens",
    type=click.IntRange(2, 10**6),
    default=128,
    help="Number of tokens that the model appends to each validation prompt.",
)
@click.option(
    "--offline",
    type=cli.OUTPUT,
    help=(
        "Directory in which to cache the teacher's targets. If the cache is complete, the "
        "teacher is not loaded."
    ),
)
@click.option(
    "--ce",
    type=WEIGHT,
    default=0.5,
    help="Weight of the cross-entropy on the teacher's most likely token.",
)
@click.option(
    "--kl",
    type=WEIGHT,
    default=1.0,
    help="Weight of the KL divergence from the teacher's distribution.",
)
@click.option(
    "--tv",
    type=WEIGHT,
    default=0.0,
    help=(
        "Weight of the total variation distance from the teacher's distribution. Useful for "
        "rejection sampling."
    ),
)
@click.option(
    "--top-k",
    type=click.IntRange(1, 10**6),
    default=64,
    help="Number of most likely tokens to keep of the teacher's distribution.",
)
@click.option(
    "--steps",
    type=click.IntRange(0, 10**9),
    default=4000,
    help=(
        "Number of training steps. 0 only evaluates and calibrates the head of --init-head, "
        "or with --blocks 0 the model's own exit."
    ),
)
@click.option(
    "--batch",
    type=click.IntRange(1, 65536),
    default=8,
    help="Number of rows in a forward pass, per process.",
)
@click.option(
    "--accumulate",
    type=click.IntRange(1, 65536),
    default=1,
    help="Number of forward passes per step.",
)
@click.option(
    "--length", type=click.IntRange(2, 10**6), default=256, help="Number of tokens in a row."
)
@click.option(
    "--lr", type=cli.Number(0, 100, min_open=True), default=3e-3, help="Peak learning rate."
)
@click.option(
    "--warmup",
    type=cli.Number(0, 1),
    default=0.01,
    help="Fraction of the steps in which the learning rate rises.",
)
@click.option(
    "--cooldown",
    type=cli.Number(0, 1),
    default=0.55,
    help="Fraction of the steps in which the learning rate falls.",
)
@click.option(
    "--clip",
    type=cli.Number(0, 1e6, min_open=True),
    default=1.0,
    help="Maximum norm of the gradient.",
)
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="bf16", help="Precision of the training."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Type of the model's weights.  [default: float32 on a CPU, else bfloat16]",
)
@click.option(
    "--log-every", type=INTERVAL, default=50, help="Number of steps between lines of metrics."
)
@click.option(
    "--eval-every", type=INTERVAL, default=500, help="Number of steps between validations."
)
@click.option(
    "--save-every", type=INTERVAL, default=500, help="Number of steps between checkpoints."
)
@click.option(
    "--seed",
    type=cli.SEED,
    default=0,
    help="Random seed for the order of the data, the selection of prompts, and generation.",
)
@click.option(
    "--charts",
    is_flag=True,
    help="Also plot losses and acceptance in training.svg. Needs matplotlib.",
)
def main(charts: bool, **options: Any) -> None:
    """Train an exit head for a frozen model on text that the model generates.

    Without data, the model writes its own prompts. To continue a run that was stopped, run the same
    command again.
    """
    try:
        import accelerate  # noqa: F401

        from eesd.distill.charts import check_training_chart, draw_training
        from eesd.distill.run import make_run
    except ImportError as error:
        raise EESDError(
            f"Distillation needs {error.name}; install it with: {pip_install('distill')}."
        ) from None
    if options["deep"] is not None:
        options["deep"] = (
            () if options["deep"] == "none" else _parse_counts("--deep", options["deep"], 10_000)
        )
    options["temperatures"] = _parse_numbers(
        "--temperatures", options["temperatures"], float, 0, 100
    )
    try:
        run = make_run(options, partial(progress_bar, announce=True))
        if charts:
            check_training_chart(run.output)
        with run.resources:
            _run(run)
        if charts and run.is_main:
            click.echo(draw_training(run.output), err=True)
    except RuntimeError as error:
        # The errors that torch raises on CPUs and on GPUs if there is too little memory.
        if "allocate" not in str(error) and type(error).__name__ != "OutOfMemoryError":
            raise
        raise EESDError(
            "There is not enough memory; reduce --batch, --own-batch or --length."
        ) from None


def _run(run: Run) -> None:
    if run.training.steps:
        if run.is_main:
            run.train(print_metrics, click.echo)
        else:
            run.train(lambda _: None, lambda _: None)
    else:
        run.write_initial_head()
    _evaluate(run)


def _evaluate(run: Run) -> None:
    from eesd.distill.calibrate import table

    acceptance, calibration = run.evaluate()
    if not run.is_main:
        return
    click.echo(table(calibration))
    if calibration.prior is None:
        click.echo(
            "The fitted prior is not significantly better; the head keeps the default prior."
        )
    else:
        std = calibration.prior.request
        click.echo(
            "The fitted prior is written with the head; standard deviation of the request "
            f"offset: {std}."
        )
    depths = " ".join(f"{value:.3f}" for value in acceptance.by_depth)
    tokens = acceptance.tokens_per_round
    click.echo(
        f"{run.output}: acceptance by depth {depths}, {tokens:.2f} tokens per round of "
        f"{len(acceptance.verified)} drafts"
    )


def _parse_numbers(
    option: str, text: str | None, kind: Callable[[str], Any], least: int, most: int
) -> tuple[Any, ...]:
    """Parse numbers separated by commas, from ``least`` to ``most``."""
    try:
        numbers = tuple(kind(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        numbers = (math.nan,)
    if not all(least <= number <= most for number in numbers):  # NaN is not
        raise EESDError(
            f"{option} must be numbers from {least} to {most} separated by commas; {text!r} was "
            "given."
        )
    return numbers


def _parse_counts(option: str, text: str | None, most: int) -> tuple[int, ...]:
    """Parse distinct whole numbers from 1 to ``most``, separated by commas."""
    numbers = _parse_numbers(option, text, int, 1, most)
    if len(set(numbers)) < len(numbers):
        raise EESDError(f"{option} has a number twice ({text}); give each number once.")
    return numbers


def print_metrics(metrics: dict[str, Any]) -> None:
    """Print one line with training metrics or a validation."""
    if "acceptance" in metrics:
        depths = " ".join(f"{value:.3f}" for value in metrics["acceptance"])
        values = f"acceptance by depth {depths}  tokens per round {metrics['tokens_per_round']:.3f}"
        kinds = metrics.get("kinds", {}).items()
        values += "".join(
            f"\n{'':12}{kind:16} first {first:.3f}  tokens per round {tokens:.3f}"
            for kind, (first, tokens) in kinds
        )
    else:
        values = "  ".join(
            f"{name} {metrics[name]:.4f}" for name in ("loss", "ce", "kl", "tv", "agreement")
        )
        values += f"  {metrics['seconds']:.0f} s"
        values += (
            f"  at most {metrics['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in metrics else ""
        )
    click.echo(f"step {metrics['step']:6}  {values}")


if __name__ == "__main__":
    main()
