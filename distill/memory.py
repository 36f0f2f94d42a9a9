"""What a run takes of a GPU's memory and of the disk, computed from shapes before there is a model or a GPU.

``tests/distill/test_distill_memory.py`` runs the code, where a model is large on tensors without content, counts them, and
compares.
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from eesd.common.geometry import Geometry
from eesd.common.weights import DRAFT_VOCAB, LM_HEAD, exit_head_shapes, model_shapes
from eesd.distill.device_writer import PREFILL_TOKENS
from eesd.distill.forecast import OWN_ROW, Work
from eesd.distill.options import TrainingOptions
from eesd.distill.structure import head_config
from eesd.distill.teacher import chunk_rows, row_bytes

USABLE = 0.92
"""Part of a GPU's memory that tensors can have: the rest is for CUDA and for what lies between them (assumed)."""
ROWS = tuple(1 << power for power in range(13, -1, -1))
"""Numbers of rows that are tried, the largest one first."""
GPU = torch.device("cuda")


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on each GPU in each phase, at the most.

    Attributes:
        writing: While the model writes.
        reading: While it computes targets for a cache; 0 without one.
        training: While the head is trained, the model beside it if there is no cache of targets.
    """

    writing: int
    reading: int
    training: int

    @property
    def behind_writing(self) -> int:
        """The most of the phases behind the first."""
        return max(self.reading, self.training)


def memory(work: Work) -> Memory:
    """Compute the memory of a run."""
    training, head = work.training, _head(work.geometry, work.training)
    model = sum(map(prod, model_shapes(work.geometry).values())) * work.dtype_bytes
    reading = _teacher_bytes(work.geometry, training)
    before = 4 * head.every if training.accumulate > 1 else 0  # gradients of the batch before
    optimizing = max(4 * head.every + 8 * max(head.muon, default=0), 12 * head.adam)
    passing = before + max(_backward_bytes(work.geometry, training, head), 0 if work.offline else reading)
    return Memory(
        writing=model + _writer_bytes(work) if work.written else 0,
        reading=model + reading if work.offline else 0,
        training=(0 if work.offline else model) + _kept_bytes(work, head) + max(passing, optimizing),
    )


def _writer_bytes(work: Work) -> int:
    """Caches and texts of the rows, a step of all of them (in its graph, and once before), and a prefill."""
    geometry, rows, slots = work.geometry, work.own_batch, work.training.length + 1
    kv = geometry.num_kv_heads * geometry.head_dim
    caches = rows * slots * (2 * geometry.num_layers * kv * work.dtype_bytes + 16)
    step = rows * geometry.vocab_size * 13  # logits and what tokens are chosen from, float32
    tokens = min(PREFILL_TOKENS, rows * work.training.length * 3 // 4)
    heads = geometry.num_heads * geometry.head_dim
    prefill = tokens * (2 * geometry.hidden_size + 4 * geometry.intermediate_size + 3 * (heads + kv)) * work.dtype_bytes
    return caches + step + max(step, prefill)


def _teacher_bytes(geometry: Geometry, training: TrainingOptions) -> int:
    """States that are kept, and the larger one of a block's MLP and of logits: float32, and as much where they are summed."""
    tokens = training.batch * training.length
    chunks = -(-tokens // chunk_rows(geometry.vocab_size, GPU))
    logits = 8 * -(-tokens // chunks) * geometry.vocab_size
    states = 2 * geometry.hidden_size * (len(training.layers) + 1)
    return tokens * states + max(tokens * (2 * geometry.hidden_size + 8 * geometry.intermediate_size), logits)


@dataclass(frozen=True)
class _Head:
    """Numbers of a head's weights: all of them, those of its LM head, those of each matrix that Muon trains."""

    every: int
    lm_head: int
    muon: tuple[int, ...]

    @property
    def adam(self) -> int:
        return self.every - sum(self.muon)


def _head(geometry: Geometry, training: TrainingOptions) -> _Head:
    shapes = exit_head_shapes(geometry, head_config(training))
    trained = {name: shape for name, shape in shapes.items() if name != DRAFT_VOCAB}
    muon = [shape for name, shape in trained.items() if len(shape) == 2 and name != LM_HEAD and training.optimizer == "muon"]
    return _Head(sum(map(prod, trained.values())), prod(trained.get(LM_HEAD, (0,))), tuple(map(prod, muon)))


def _kept_bytes(work: Work, head: _Head) -> int:
    """What is there in all of the training, float32: weights, their mean, momenta, gradients on their way to other processes,
    and the model's LM head, or its rows, if the head has none."""
    training, hidden = work.training, work.geometry.hidden_size
    copies = 1 + (training.cooldown == 0) + (work.processes > 1)
    rows = 0 if head.lm_head else work.geometry.vocab_size + training.draft_vocab
    return 4 * (copies * head.every + sum(head.muon) + 2 * head.adam + rows * hidden)


def _backward_bytes(geometry: Geometry, training: TrainingOptions, head: _Head) -> int:
    """What a pass keeps for its backward pass, and the largest of what comes beside it: the gradients of logits, those of the
    LM head, and those within a block. The factors of ``token`` and ``within`` are bytes that the parts of a block keep or make.
    """
    hidden, deep, tokens = geometry.hidden_size, len(training.deep), training.batch * training.length
    heads, kv = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    inner, normed = geometry.intermediate_size, geometry.qk_norm or geometry.qk_norm_joint
    block = 30 * hidden + 8 * (inner + heads) + 14 * kv + (10 * (heads + kv) if normed else 0)
    token = training.blocks * block + 8 * hidden * deep + 6 * training.top_k
    within = max(16 * hidden, 4 * inner - 4 * hidden) + 4 * hidden * deep
    columns = training.draft_vocab or geometry.vocab_size
    rows = chunk_rows(columns, GPU)
    logits, by_chunk = 4 * columns * min(tokens, rows), 6 * head.lm_head if tokens > rows else 0
    copies = 2 * (head.every + (0 if head.lm_head else columns * hidden))  # in the type of autocast
    beside = max(3 * logits + by_chunk, 2 * logits + tokens * within, 4 * head.lm_head + tokens * within)
    return copies + tokens * token + beside


@dataclass(frozen=True)
class Disk:
    """Bytes on disk: the model's own text, the cache of targets, and two checkpoints while one is written."""

    text: int
    targets: int
    checkpoints: int


def disk(work: Work) -> Disk:
    """Compute what a run writes. Short texts share a row of targets."""
    training, geometry = work.training, work.geometry
    head = sum(map(prod, exit_head_shapes(geometry, head_config(training)).values()))
    target = row_bytes(training.length, geometry.hidden_size, len(training.layers), training.top_k, True)
    means = 0 if training.cooldown else 1
    return Disk(
        text=int(work.written / OWN_ROW * 4),
        targets=-(-work.tokens // training.length) * target if work.offline else 0,
        checkpoints=2 * head * (4 + 4 * means + 8) + 4 * head,
    )


def advice(work: Work, usable: float) -> list[str]:
    """What fits, or what would: one line for each thing to change.

    Args:
        work: The run.
        usable: Bytes of a GPU that tensors can have.
    """

    def with_batch(rows: int) -> Work:
        """Steps of as many rows, in passes of others."""
        training = work.training
        accumulate = max(1, training.batch * training.accumulate // rows)
        return replace(work, training=replace(training, batch=rows, accumulate=accumulate))

    found, lines = memory(work), []
    if work.written:
        most = next((rows for rows in ROWS if memory(replace(work, own_batch=rows)).writing <= usable), 0)
        does = f"{most} does" if most else "nor does 1"
        lines.append(
            f"--own-batch {work.own_batch} fits; so does up to {most}."
            if found.writing <= usable
            else f"--own-batch {work.own_batch} does not fit; {does}."
        )
    most = next((rows for rows in ROWS if memory(with_batch(rows)).behind_writing <= usable), 0)
    training = work.training
    if found.behind_writing <= usable:
        lines.append(f"--batch {training.batch} fits; so does up to {most}.")
    else:
        does = f"--batch {most} --accumulate {with_batch(most).training.accumulate} does" if most else "nor does 1"
        lines.append(f"--batch {training.batch} does not fit; {does}.")
    offline = memory(replace(work, offline=True))
    if found.training > usable >= offline.behind_writing:
        lines.append(
            "With --offline DIR the targets are computed first, and training takes "
            f"{offline.training / 1e9:.1f} GB without the model beside it."
        )
    return lines
