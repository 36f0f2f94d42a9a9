"""What a run will take and bring, said before it begins.

Work is two operations for each weight that a token meets, and six where the weight is trained. Time is work over the rate of
one product of matrices, which is measured, times the part of it that a phase was seen to reach. What a head will know is read
off the head of SmolLM2-135M that was trained on about as much, by tokens seen and by different ones: the same text again and
again brings less.
"""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eesd.common.geometry import Geometry
from eesd.distill.options import TrainingOptions
from eesd.distill.structure import block_weights, head_weights

PROBE = 1536
"""Rows and columns of the matrices that are multiplied."""
WRITING, READING, TRAINING = 0.5, 0.6, 0.45
"""Parts of the product's rate that the phases reach: SmolLM2-135M, two cores of an AMD Zen 5, this project's operators."""


class Known(NamedTuple):
    """What a head of SmolLM2-135M knew.

    Attributes:
        seen: Tokens that training had seen.
        text: Different ones among them.
        first: Part of the first drafts that were right, on prompts that were held out.
        tokens: Tokens a round of 8 drafts.
    """

    seen: float
    text: float
    first: float
    tokens: float


HEADS = (
    Known(0.3e6, 0.76e6, 0.24, 1.30),
    Known(0.9e6, 0.76e6, 0.30, 1.43),
    Known(5.5e6, 1.5e6, 0.407, 1.75),
    Known(7.7e6, 3.1e6, 0.433, 1.77),
    Known(10.8e6, 3.1e6, 0.461, 1.86),
    Known(20.7e6, 3.1e6, 0.477, 1.94),
    Known(48.1e6, 29.7e6, 0.525, 2.22),
    Known(162e6, 70e6, 0.581, 2.45),
)
"""Those of docs/distill.md, on held-out prompts, which were others for each of the last two. The last one is shipped."""


@dataclass(frozen=True)
class Forecast:
    """Tokens and seconds of each phase.

    Attributes:
        written: Tokens that the model writes.
        read: Tokens whose targets the model computes.
        trained: Tokens that training sees, the same ones again and again.
        text: Different ones among them.
        seconds: Of the three phases.
    """

    written: int
    read: int
    trained: int
    text: int
    seconds: tuple[float, float, float]

    def __str__(self) -> str:
        parts = zip((self.written, self.read, self.trained), ("to write", "to read", "to train on"), self.seconds, strict=True)
        phases = [f"{_duration(seconds)} {what} {_millions(tokens)} tokens" for tokens, what, seconds in parts if tokens]
        known = self.nearest()
        return (
            f"About {_duration(sum(self.seconds))}: {', '.join(phases)}. After {_millions(known.seen)} tokens, "
            f"{_millions(known.text)} different ones, a head of SmolLM2-135M had the first token right in {known.first}, and "
            f"{known.tokens} tokens a round."
        )

    def nearest(self) -> Known:
        """The head that was trained on about as much: as many tokens, and as many different ones."""
        trained, text = math.log(max(self.trained, 1)), math.log(max(self.text, 1))
        return min(HEADS, key=lambda known: abs(math.log(known.seen) - trained) + abs(math.log(known.text) - text))


def forecast(
    geometry: Geometry, training: TrainingOptions, written: int, tokens: int, offline: bool, processes: int, rate: float
) -> Forecast:
    """Work out what a run takes.

    Args:
        geometry: Shape of the model.
        training: Options of the training.
        written: Tokens that the model will write.
        tokens: Tokens in all rows.
        offline: Whether targets are computed once for each token, or each time that training sees it.
        processes: Processes that train, each on batches of its own.
        rate: Of one process, as :func:`product_rate` measures it.
    """
    model = geometry.num_layers * block_weights(geometry) + geometry.vocab_size * geometry.hidden_size
    head = head_weights(geometry, training)
    trained = training.steps * training.rows_per_step(processes) * training.length
    read = tokens if offline else trained
    seconds = (2 * model * written / WRITING, 2 * model * read / READING, 6 * head * trained / TRAINING)
    rate *= processes
    return Forecast(written, read, trained, min(tokens, trained), (seconds[0] / rate, seconds[1] / rate, seconds[2] / rate))


def product_rate(device: torch.device, precision: str) -> float:
    """Operations per second of a product of matrices, the best of five."""
    matrix = torch.ones(PROBE, PROBE, dtype=torch.bfloat16 if precision == "bf16" else torch.float32, device=device)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # the number is there when the product is
        best = min(best, time.perf_counter() - started)
    return 2 * PROBE**3 / best


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:.1f} M" if tokens >= 1e5 else f"{int(tokens):,}"
