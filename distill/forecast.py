"""What a run will take and bring, said before it begins.

Work is two operations for each weight that a token meets, and six where the weight is trained. Time is work over the rate of
one product of matrices, times the part of it that a phase was seen to reach; on a GPU writing also reads weights and caches for
each token, and the host must start each operator. What a head will know is read off the head of SmolLM2-135M that was trained
on about as much, by tokens seen and by different ones: the same text again and again brings less.

Each constant names its source: measured, fitted or assumed.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eesd.common.geometry import Geometry
from eesd.distill.options import TrainingOptions
from eesd.distill.structure import head_weights, model_weights
from eesd.export.predict import Hardware

PROBE, DEVICE_PROBE = 1536, 8192
"""Rows and columns of the matrices that are multiplied, on a CPU and on a GPU."""
COPIED = 1 << 28
"""Bytes that are copied to measure a GPU's bandwidth."""
WRITING, READING, TRAINING = 0.5, 0.6, 0.45
"""Parts of the product's rate that the phases reach: SmolLM2-135M, two cores of an AMD Zen 5, this project's operators."""
PRODUCT, COPY = 0.79, 0.86
"""Parts of the published operations and bandwidth that one product and a copy reach: an H200."""
OWN_ROW = 0.5
"""Part of a row that the model's own text fills: many texts end early."""
NEW = 0.6
"""Part of it that is new, and no prompt: .63 and .56 in the two runs of an H200."""
CACHES = 0.32
"""Part of the bandwidth that the attention of rows that write reaches: fitted to SmolLM2-135M on an H200."""
WRITING_KERNELS, OTHER_KERNELS = 21, 52
"""Kernels of a writing step: of a block, and besides."""
TEACHER_OPERATORS, STUDENT_OPERATORS = 50, 700
"""Operators of a block of the teacher, and of the student and its optimizers in a step."""
LAUNCH, OPERATOR = 2e-6, 25e-6
"""Seconds of a kernel in a graph (assumed), and of the host for an operator: fitted to 41 to 74 ms a step, of which an H200
waited for its host."""


class Machine(NamedTuple):
    """What does the work.

    Attributes:
        rate: Operations per second of one product of matrices.
        bandwidth: Bytes per second that a copy moves. CPUs: so many that reading is part of the phases' rates.
        launch: Seconds of a kernel in a graph.
        operator: Seconds of the host for an operator.
    """

    rate: float
    bandwidth: float = math.inf
    launch: float = 0.0
    operator: float = 0.0

    @classmethod
    def of(cls, gpu: Hardware) -> "Machine":
        """A GPU, by what is published about it."""
        return cls(gpu.operations * PRODUCT, gpu.bandwidth * COPY, gpu.launch, OPERATOR)

    @classmethod
    def measured(cls, device: torch.device, precision: str) -> "Machine":
        """The device of this process."""
        rate = product_rate(device, precision)
        return cls(rate) if device.type == "cpu" else cls(rate, _copy_rate(device), LAUNCH, OPERATOR)


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
        phases = [f"{duration(seconds)} {what} {millions(tokens)} tokens" for tokens, what, seconds in parts if tokens]
        return f"About {duration(sum(self.seconds))}: {', '.join(phases)}. {self.knowledge}"

    @property
    def knowledge(self) -> str:
        """What the nearest known head knew."""
        known = self.nearest()
        return (
            f"After {millions(known.seen)} tokens, {millions(known.text)} different ones, a head of SmolLM2-135M had the first "
            f"token right in {known.first}, and {known.tokens} tokens a round."
        )

    def nearest(self) -> Known:
        """The head that was trained on about as much: as many tokens, and as many different ones."""
        trained, text = math.log(max(self.trained, 1)), math.log(max(self.text, 1))
        return min(HEADS, key=lambda known: abs(math.log(known.seen) - trained) + abs(math.log(known.text) - text))


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        geometry: Shape of the model.
        training: Options of the training.
        written: Tokens that the model will write, prompts included.
        tokens: Tokens in all rows.
        own_batch: Rows that write together.
        offline: Whether targets are computed once for each token, or each time that training sees it.
        processes: Processes that train, each on batches of its own.
        dtype_bytes: Bytes of a weight of the model.
    """

    geometry: Geometry
    training: TrainingOptions
    written: int
    tokens: int
    own_batch: int
    offline: bool
    processes: int
    dtype_bytes: int


def own_tokens(rows: int, length: int) -> int:
    """How many tokens the model writes if it fills ``rows`` of ``length`` as far as it usually does."""
    return int(rows * length * OWN_ROW)


def forecast(work: Work, machine: Machine) -> Forecast:
    """Work out what a run takes."""
    training, layers = work.training, work.geometry.num_layers
    step = training.rows_per_step(work.processes) * training.length
    trained = training.steps * step
    read = work.tokens if work.offline else trained
    passes, micro_steps = read / (training.batch * training.length), training.steps * training.accumulate
    on_gpu = machine.bandwidth < math.inf  # where all experts compute
    model, head = model_weights(work.geometry, on_gpu), head_weights(work.geometry, training)
    reading = 2 * model * read / (READING * machine.rate), passes * layers * TEACHER_OPERATORS * machine.operator
    learning = (
        6 * head * trained / (TRAINING * machine.rate),
        micro_steps * work.processes * STUDENT_OPERATORS * machine.operator,
    )
    seconds = _writing_seconds(work, model, machine), max(reading), max(learning)
    each = [one / work.processes for one in seconds]
    return Forecast(work.written, read, trained, min(work.tokens, trained), (each[0], each[1], each[2]))


def _writing_seconds(work: Work, model: int, machine: Machine) -> float:
    """Products of all tokens; and for each new one its caches, and with ``own_batch`` others the weights and the kernels."""
    geometry, new = work.geometry, work.written * NEW
    steps = new / work.own_batch
    slot = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * work.dtype_bytes
    caches = new * OWN_ROW * work.training.length * slot / CACHES
    kernels = steps * (geometry.num_layers * WRITING_KERNELS + OTHER_KERNELS)
    moved = (steps * model * work.dtype_bytes + caches) / machine.bandwidth
    return 2 * model * work.written / (WRITING * machine.rate) + moved + kernels * machine.launch


def product_rate(device: torch.device, precision: str) -> float:
    """Operations per second of a product of matrices, the best of five."""
    size = PROBE if device.type == "cpu" else DEVICE_PROBE
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if precision == "bf16" else torch.float32, device=device)
    return 2 * size**3 / _fastest(lambda: matrix @ matrix)


def _copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, the best of five."""
    source = torch.ones(1, COPIED, dtype=torch.uint8, device=device)
    return 2 * COPIED / _fastest(source.clone)


def _fastest(work: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of five; a number of the result is there when all of it is."""

    def timed() -> float:
        started = time.perf_counter()
        float(work()[0, 0])
        return time.perf_counter() - started

    return min(timed() for _ in range(5))


def duration(seconds: float) -> str:
    """Time in words, not less than a minute."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


def millions(tokens: float) -> str:
    """A number of tokens in words."""
    return f"{tokens / 1e6:.1f} M" if tokens >= 1e5 else f"{int(tokens):,}"
