"""Runs ``eesd-distill`` with options for a tiny model, and reads its metrics."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import Result

from eesd.distill.cli import main
from eesd.distill.continuing import TorchWriter, Writing, continue_prompts, padded
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_decoder
from support import tiny_models
from support.command import add_tokenizer, succeed

LENGTH = 24
SMALL: tuple[object, ...] = (
    "--length",
    LENGTH,
    "--batch",
    4,
    "--precision",
    "float32",
    "--top-k",
    16,
    "--log-every",
    1,
    "--eval-every",
    100,
    "--save-every",
    5,
    "--validation-prompts",
    16,
    "--validation-tokens",
    24,
    "--prompt-tokens",
    6,
)


def build(directory: Path) -> tuple[Path, Path]:
    """Build a model whose untrained head is mostly wrong, and 256 rows of the model's output. Half
    of the rows are greedy."""
    model = tiny_models.build(directory / "model", 97, layers=3, damping=1.0, seed=0)
    add_tokenizer(model)
    prompts = torch.randint(3, 97, (256, 6), generator=torch.Generator().manual_seed(0)).tolist()
    writer = TorchWriter(load_decoder(Checkpoint(model)))
    temperatures = [0, 0.7] * 128
    texts = continue_prompts(
        writer, Writing(prompts, [LENGTH + 1] * 256, temperatures, np.random.default_rng, (2,))
    )
    tokens, _ = padded(texts, LENGTH + 1)
    np.save(directory / "own.npy", tokens.numpy().astype(np.uint16))
    return model, directory / "own.npy"


def distill(model: Path, rows: Path, output: Path, *options: object) -> Result:
    """Train a head after the first layer. ``options`` override the small defaults."""
    return succeed(
        main, "--model", model, "--exit-layer", 1, "--data", rows, "-o", output, *SMALL, *options
    )


def end_at(line: str, number: signal.Signals, arguments: Sequence[object]) -> int:
    """Send a signal to a Python program when it prints a line with this beginning. Returns its exit
    code."""
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        next(found for found in process.stdout if found.startswith(line))
        process.send_signal(number)
        return process.wait()


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Returns all lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def read_losses(output: Path) -> dict[int, float]:
    """Returns the loss of each logged step."""
    return {line["step"]: line["loss"] for line in read_metrics(output) if "loss" in line}
