"""What a run holds in memory, by running its code and counting tensors: real ones, or for large models ones without content."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from eesd.common.geometry import Geometry
from eesd.distill import device_writer, losses, teacher, trainer
from eesd.distill.ages import random_roots
from eesd.distill.continuing import Writing
from eesd.distill.data import Rows
from eesd.distill.losses import Student
from eesd.distill.options import TrainingOptions
from eesd.distill.structure import head_config
from eesd.model.decoder import Decoder
from eesd.model.exit_head import ExitHead

LLAMA = Geometry(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, tied_embeddings=False, rope_theta=5e5, rope_scaling=None,
)  # fmt: skip
SHAPES = {
    "135M": replace(
        LLAMA, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, tied_embeddings=True,
    ),
    "1B": replace(LLAMA, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tied_embeddings=True),
    "3B": replace(LLAMA, hidden_size=3072, intermediate_size=8192, num_layers=28, num_heads=24, tied_embeddings=True),
    "8B": LLAMA,
    "Qwen3-8B": replace(LLAMA, vocab_size=151936, intermediate_size=12288, num_layers=36, qk_norm=True),
    "small": replace(
        LLAMA, vocab_size=4096, hidden_size=256, intermediate_size=704, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64
    ),
}  # fmt: skip
"""Models by their sizes; Llama's, if their names say no other."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operators have made and that still exist.

    Attributes:
        now: Bytes now.
        peak: The most since it was set to ``now``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), made=False)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.logsumexp.default:  # it makes a tensor of its own, which no operator shows
            self.peak = max(self.peak, self.now + args[0].numel() * args[0].element_size())
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage, made: bool = True) -> None:
        if storage._cdata in self._sizes:
            return
        size = storage.nbytes() if made else 0
        self._sizes[storage._cdata] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, address: int) -> None:
        self.now -= self._sizes.pop(address)

    def most(self, work: Callable[[], object]) -> int:
        """The most bytes during some work, without what is there before it."""
        before = self.peak = self.now
        work()
        return self.peak - before


class _Fused(torch.autograd.Function):
    """What attention keeps on a GPU: its inputs, its result and a number for each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, result, torch.empty(q.shape[:3], device=q.device))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(torch.empty_like, ctx.saved_tensors[:3])
        return q, k, v


class _FusedAttention(TorchFunctionMode):
    """Torch's attention is that of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            return torch.empty_like(args[0])
        return _Fused.apply(*args)  # type: ignore[no-untyped-call]


@contextmanager
def without_content() -> Iterator[None]:
    """Tensors have shapes and no content; attention is that of a GPU."""
    try:
        losses._loss_weights.cache_clear()  # what it keeps would have no content later
        with FakeTensorMode(allow_non_fake_inputs=True), _FusedAttention():
            yield
    finally:
        losses._loss_weights.cache_clear()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole passes and the chunks of a GPU, on the CPU."""
    whole = teacher.full_sequence_inputs
    for module in (teacher, trainer):
        monkeypatch.setattr(module, "full_sequence_inputs", partial(whole, whole=True))
    monkeypatch.setattr(teacher, "LOGITS_PER_CHUNK", teacher.LOGITS_PER_CHUNK * teacher.DEVICE_CHUNKS)
    monkeypatch.setattr(teacher, "DEVICE_CHUNKS", 1)


def decoder_of(geometry: Geometry) -> Decoder:
    """A model in bfloat16 with random weights."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Decoder(geometry).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(default)


def some_rows(training: TrainingOptions) -> Rows:
    tokens = np.random.default_rng(0).integers(0, 97, (4 * training.batch, training.length + 1)).astype(np.int32)
    return Rows(tokens, np.full(len(tokens), training.length + 1), len(tokens))


def writing_bytes(decoder: Decoder, rows: int, length: int) -> int:
    """Of the writer for GPUs: what its rows have, a step in a graph's own memory, and a step or a prefill beside it."""
    meter = Meter()
    with meter, torch.inference_mode():
        writer = device_writer.DeviceWriter(decoder)
        before = meter.now
        writing = Writing([[1]], [length + 1], [0.7], np.random.default_rng, (2,))
        state = device_writer._Rows(decoder, writer._layers, rows, writing)
        held = meter.now - before
        texts = max(1, min(rows, device_writer.PREFILL_TOKENS // (length * 3 // 4)))
        ids = torch.zeros(texts, length * 3 // 4, dtype=torch.int64)
        prefill = meter.most(lambda: state._prefill(torch.arange(texts), ids))
        step = meter.most(state._step)
    return held + step + max(step, prefill)


def reading_bytes(decoder: Decoder, training: TrainingOptions) -> int:
    """Of a pass of the teacher."""
    reader = teacher.Teacher(decoder, training.layers, training.top_k, training.precision)
    meter = Meter()
    with meter:
        return meter.most(lambda: reader(torch.zeros(training.batch, training.length, dtype=torch.int64)))


def training_bytes(decoder: Decoder, training: TrainingOptions, steps: int = 2) -> int:
    """Of two steps of the training beside a teacher, with all that the trainer holds but the teacher's weights."""
    geometry, rows = decoder.geometry, some_rows(training)
    reader = teacher.Teacher(decoder, training.layers, training.top_k, training.precision)
    source = teacher.OnlineTargets(rows, reader, torch.device("cpu"))
    meter = Meter()
    with meter:
        head = ExitHead(geometry, head_config(training))
        lm_head = torch.zeros(0 if training.own_lm_head else geometry.vocab_size, geometry.hidden_size)
        columns = head.rows_of(lm_head) if head.lm_head is None else lm_head
        student, optimizers = Student(head, training.losses, training.precision), trainer.make_optimizers(head, training)
        means = [] if training.cooldown else [value.detach().clone() for value in student.parameters()]
        inputs, caches = teacher.full_sequence_inputs(
            geometry, training.batch, training.length, len(head.blocks), torch.bfloat16, torch.device("cpu")
        )

        def step() -> None:  # as Trainer._train_step, which asks for numbers that tensors without content lack
            for _ in range(training.accumulate):
                batch = source.batch(np.arange(training.batch), training.layers)
                roots = random_roots(training.batch, training.length, 0, 0) if training.deep else None
                student(batch, roots, columns, inputs, caches)[0].backward()
            del batch
            torch.nn.utils.clip_grad_norm_(student.parameters(), training.clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for mean, value in zip(means, student.parameters(), strict=False):
                    mean.lerp_(value, 0.5)

        meter.peak = meter.now
        for _ in range(steps):
            step()
        return meter.peak


def trainers_bytes(run_trainer: Callable[[], Sequence[Any]]) -> int:
    """The same of the trainer itself, which ``run_trainer`` makes and runs; what it returns is kept until then."""
    meter = Meter()
    with meter:
        kept = run_trainer()
        del kept
        return meter.peak
