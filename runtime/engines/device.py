"""The common parts of the GPU backends, which are streams and the interface of a stage runner.

A backend implements :class:`StageRunner`, which prepares calls of one graph. The inputs of a
prepared call stay at fixed addresses, so that the call can be captured in a CUDA graph.
``device_engine.py`` builds engines from stage runners. All of this code also runs on the CPU,
without CUDA graphs and pinned memory, so tests need no GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import MASKED, GraphInfo
from eesd.model.torch_ops import KV

ALIGNMENT = 256
"""TensorRT requires addresses of inputs, outputs and scratch memory to be multiples of this number
of bytes."""
HOST_ALIGNMENT = 64
"""Alignment, in bytes, of torch's allocations in main memory. Tests run the code for GPUs in main
memory."""


@contextmanager
def explain_out_of_memory(what: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into an :class:`EESDError`. ``what`` is a plural noun for
    the things that did not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise EESDError(
            f"{what} do not fit the GPU's memory; free some, or export with a smaller "
            "--max-seq-len."
        ) from None


@dataclass(frozen=True)
class DeviceStream:
    """A device and, if it is a GPU, the CUDA stream for all work on it.

    Attributes:
        device: The device.
        cuda_stream: None on the CPU.
    """

    device: torch.device
    cuda_stream: torch.cuda.Stream | None = None

    @property
    def on_gpu(self) -> bool:
        return self.cuda_stream is not None

    @property
    def handle(self) -> int:
        """The ``cudaStream_t`` as an integer, for TensorRT and ONNX Runtime."""
        return 0 if self.cuda_stream is None else int(self.cuda_stream.cuda_stream)

    def aligned(self, tensor: Tensor) -> bool:
        """Return whether the address of a tensor's memory has the alignment that libraries
        require."""
        return tensor.data_ptr() % (ALIGNMENT if self.on_gpu else HOST_ALIGNMENT) == 0

    def lies_here(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on this device. A device without an index, such as the CPU,
        matches any device of its type."""
        return tensor.device.type == self.device.type and self.device.index in (
            None,
            tensor.device.index,
        )

    def activate(self) -> AbstractContextManager[Any]:
        """Make the stream torch's current stream."""
        return nullcontext() if self.cuda_stream is None else torch.cuda.stream(self.cuda_stream)

    def synchronize(self) -> None:
        """Wait until all work in the stream is done."""
        if self.cuda_stream is not None:
            self.cuda_stream.synchronize()


def device_streams(stages: int, device: str | None = None) -> list[DeviceStream]:
    """Assign a stream to each verify stage. Stages on one GPU share its stream.

    Args:
        stages: Number of stages.
        device: ``cuda`` spreads the stages over all GPUs that torch sees, ``cuda:1`` uses one GPU,
            and ``cpu`` uses no GPU. Default: ``cuda`` if torch sees a GPU, ``cpu`` if not.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return [DeviceStream(torch.device("cpu"))] * stages
    num_gpus = torch.cuda.device_count() if name == "cuda" else 1
    first = torch.device(name).index or 0
    gpus = [
        torch.device("cuda", first + stage * min(num_gpus, stages) // stages)
        for stage in range(stages)
    ]
    streams = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}  # type: ignore[no-untyped-call]
    return [DeviceStream(gpu, streams[gpu]) for gpu in gpus]


class AttentionMask:
    """Describes which of the first s slots each node of a call sees.

    Attributes:
        outline: A tensor that has the shape of the mask [B, 1, n, s], but no memory for it.
        tree: Two tensors for a tree, or None for a chain, whose nodes see the slots up to their own
            slot. The first tensor [B] has a slot below which every node sees all slots. The second
            tensor [B, n, width] is for the slots from this slot on. It has 1 for each slot that a
            node sees, and 0 for the other slots.
    """

    def __init__(
        self,
        keys: Tensor,
        count: int,
        slots: int,
        slot: Tensor,
        tree: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Describe which slots ``count`` nodes see in caches like ``keys`` [B, KV, S, D]. Only the
        first ``slots`` slots are read (0 means all slots). The first node is in ``slot`` [B]. All
        tensors are on the device."""
        self.outline = slot[:, None, None, None].expand(-1, 1, count, slots or keys.shape[2])
        self.tree = tree
        self._slot = slot
        self._dtype = keys.dtype
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The additive mask. :meth:`update` computes it only after a graph has read this
        attribute."""
        if self._tensor is None:
            (*_, count, slots) = self.outline.shape
            device = self._slot.device
            self._slots = torch.arange(slots, device=device)
            self._nodes = torch.arange(count, device=device)[:, None]
            self._tensor = torch.zeros(self.outline.shape, dtype=self._dtype, device=device)
        return self._tensor

    def update(self) -> None:
        """Compute the mask, if a graph reads it, from the current values of the other tensors."""
        if self._tensor is None:
            return
        mask = self._tensor[:, 0]
        if self.tree is None:
            hidden = self._slots > self._nodes + self._slot[:, None, None]
        else:
            below, tree = self.tree
            column = (self._slots - below[:, None])[:, None].expand(mask.shape)
            hidden = (tree.gather(2, column.clamp(0, tree.shape[2] - 1)) == 0) | (
                column >= tree.shape[2]
            )
            hidden &= column >= 0
        mask.copy_(hidden)
        mask.mul_(MASKED)


@dataclass(frozen=True)
class StepInputs:
    """The inputs, on one device, of a call with n nodes for each of B sequences. The contents of
    the inputs change, but their addresses stay the same.

    Attributes:
        x: The ``input_ids`` [B, n] int64, or the hidden state [B, n, hidden] of the previous stage.
        position_ids: Positions [B, n].
        write_indices: The slot [B] of each sequence's first node.
        mask: The mask [B, 1, n, s]. Attention reads the first s slots of the caches.
        logit_rows: The nodes [R] of each sequence that get logits from the verify graph. The draft
            graph ignores them.
        caches: The layer caches that the graph uses, in the order of its inputs.
    """

    x: Tensor
    position_ids: Tensor
    write_indices: Tensor
    mask: AttentionMask
    logit_rows: Tensor
    caches: list[KV]


PreparedCall = Callable[[], list[Tensor]]
"""A function that runs a graph on the inputs for which it was prepared. A verify stage returns
logits [B, R, V] or a hidden state. A draft returns logits [B, n, V], ids [B, n, K] and
log-probabilities [B, n, K]. Instead, the function may return logits of any type and the result of
``pack_results`` in ``device_results.py``. The next run overwrites the results."""


class StageRunner(Protocol):
    """A graph that is loaded on a device. It is the draft graph or a verify stage."""

    @property
    def graph(self) -> GraphInfo: ...

    @property
    def stream(self) -> DeviceStream: ...

    @property
    def capturable(self) -> bool:
        """Whether the calls prepared so far can be captured in a CUDA graph."""

    def prepare(self, inputs: StepInputs) -> PreparedCall:
        """Bind a call to the addresses of its inputs."""


class ResultMemory:
    """Memory for the outputs of a graph that are not caches.

    Calls of all node counts share the memory, because logits are large, and only the last call's
    results are used.
    """

    def __init__(self, graph: GraphInfo, device: torch.device, largest: int) -> None:
        """Calls of ``largest`` or more nodes have separate memory. Nothing is allocated yet."""
        self._graph = graph
        self._device = device
        self._largest = largest
        self._shared: list[Tensor] = []
        self._batch = 0

    def tensors(self, inputs: StepInputs) -> list[Tensor]:
        """Return the outputs of a call. If there are more sequences than before, new memory is
        allocated. Earlier outputs stay valid."""
        batch, count = inputs.position_ids.shape
        rows = len(inputs.logit_rows)
        if count > self._largest:
            return self._allocate(batch, count, rows)
        shapes = [info.sized(B=batch, n=count, R=rows) for info in self._graph.results]
        if batch > self._batch:
            self._batch = batch
            self._shared = [
                memory.flatten() for memory in self._allocate(batch, self._largest, self._largest)
            ]
        return [
            memory[: prod(shape)].view(shape)
            for memory, shape in zip(self._shared, shapes, strict=True)
        ]

    def _allocate(self, batch: int, count: int, rows: int) -> list[Tensor]:
        with explain_out_of_memory(f"The results of {batch * count} nodes"):
            return [
                torch.zeros(
                    info.sized(B=batch, n=count, R=rows),
                    dtype=getattr(torch, info.dtype),
                    device=self._device,
                )
                for info in self._graph.results
            ]


def tensors_by_name(
    graph: GraphInfo, inputs: StepInputs, results: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the input tensors and the output tensors of a call by name. A cache is both an input
    and an output, because the graph updates it in place."""
    given = {
        graph.inputs[0].name: inputs.x,
        "position_ids": inputs.position_ids,
        "write_indices": inputs.write_indices,
        "attn_mask": inputs.mask.tensor,
        "logit_rows": inputs.logit_rows,
    }
    named = {info.name: given[info.name] for info in graph.inputs[: -2 * len(graph.caches)]}
    outputs = {info.name: result for info, result in zip(graph.results, results, strict=True)}
    for index, pair in zip(graph.caches, inputs.caches, strict=True):
        for kind, tensor in zip(("key", "value"), pair, strict=True):
            named[f"{kind}_{index}"] = outputs[f"{kind}_{index}_out"] = tensor
    return named, outputs
