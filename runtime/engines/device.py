"""What the GPU backends share: streams, the KV cache in device memory, and the interface of a stage runner.

A backend implements :class:`StageRunner`, which prepares calls of one graph. The inputs of a prepared call stay at fixed
addresses, so that the call can be captured in a CUDA graph. ``device_engine.py`` builds engines from stage runners. All of it
also runs on the CPU, without CUDA graphs and pinned memory, so tests need no GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import GraphInfo, Manifest
from eesd.model.decoder import KV
from eesd.runtime.engines.base import Values
from eesd.runtime.engines.kv_cache import STEP, GrowingKVCache

ALIGNMENT = 256
"""Bytes. TensorRT requires addresses of inputs, outputs and scratch memory to be multiples of it."""
HOST_ALIGNMENT = 64
"""Bytes. What torch allocates in main memory begins at a multiple of it; tests run the code for GPUs there."""


@contextmanager
def explain_out_of_memory(what: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into an :class:`EESDError`. ``what`` did not fit; it is a plural."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise EESDError(f"{what} do not fit the GPU's memory; free some, or export with a smaller --max-seq-len.") from None


@dataclass(frozen=True)
class DeviceStream:
    """A device and, on a GPU, the CUDA stream for all work on it.

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
        """The ``cudaStream_t`` as an integer, as TensorRT and ONNX Runtime take it."""
        return 0 if self.cuda_stream is None else int(self.cuda_stream.cuda_stream)

    def aligned(self, tensor: Tensor) -> bool:
        """Whether a library can take the address of a tensor's memory."""
        return tensor.data_ptr() % (ALIGNMENT if self.on_gpu else HOST_ALIGNMENT) == 0

    def lies_here(self, tensor: Tensor) -> bool:
        """Whether a tensor is on this device. A device without a number, as the CPU, is any of its kind."""
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    def activate(self) -> AbstractContextManager[Any]:
        """Make the stream torch's current stream."""
        return nullcontext() if self.cuda_stream is None else torch.cuda.stream(self.cuda_stream)

    def synchronize(self) -> None:
        """Wait until everything in the stream is done."""
        if self.cuda_stream is not None:
            self.cuda_stream.synchronize()


def device_streams(stages: int, device: str | None = None) -> list[DeviceStream]:
    """Assign a stream to each stage of verify. Stages on one GPU share its stream.

    Args:
        stages: Number of stages.
        device: ``cuda`` spreads the stages over all GPUs that torch sees, ``cuda:1`` takes one GPU, ``cpu`` none. Default:
            ``cuda`` if torch sees a GPU, else ``cpu``.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return [DeviceStream(torch.device("cpu"))] * stages
    num_gpus = torch.cuda.device_count() if name == "cuda" else 1
    first = torch.device(name).index or 0
    gpus = [torch.device("cuda", first + stage * min(num_gpus, stages) // stages) for stage in range(stages)]
    streams = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}  # type: ignore[no-untyped-call]
    return [DeviceStream(gpu, streams[gpu]) for gpu in gpus]


class DeviceKVCache(GrowingKVCache):
    """A KV cache in the engines' element type, with a shard on the device of each stage."""

    shards: list[Tensor]

    def __init__(
        self,
        manifest: Manifest,
        streams: Sequence[DeviceStream],
        *,
        grow: bool = False,
        slots: int = STEP,
        spare: int = 0,
        memory: Sequence[Tensor] = (),
    ) -> None:
        """Allocate the cache, all zeros.

        Args:
            manifest: Manifest of the engine directory.
            streams: The stream of each stage.
            grow: Begin with few slots and grow. Otherwise all ``gpu_slots`` of the manifest are allocated now, because a
                captured CUDA graph needs fixed addresses.
            slots: First number of slots of a cache that grows.
            spare: Of a cache that grows, the slots behind those that tokens may use, for padding nodes.
            memory: A tensor for each shard, which the caller owns. Default: allocate with torch.

        Raises:
            EESDError: The cache does not fit the GPU, or ``memory`` does not have its shape, type and device.
        """
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)
        self._streams = streams
        self._memory = memory
        layers = [stage.caches for stage in manifest.verify]
        most = manifest.max_seq_len
        super().__init__(manifest, slots if grow else most, layers, spare if grow else manifest.gpu_slots - most)

    def _zeros(self, shard: int, shape: tuple[int, ...]) -> Tensor:
        stream = self._streams[shard]
        if self._memory:
            return self._checked(self._memory[shard], shape, stream)
        with explain_out_of_memory(f"The KV caches of {shape[4]} slots"), stream.activate():
            return torch.zeros(shape, dtype=self._dtype, device=stream.device)

    def _checked(self, memory: Tensor, shape: tuple[int, ...], stream: DeviceStream) -> Tensor:
        fits = (tuple(memory.shape), memory.dtype) == (shape, self._dtype) and memory.is_contiguous()
        if not fits or not stream.lies_here(memory) or not stream.aligned(memory):
            raise EESDError(
                f"The kv_cache given is {list(memory.shape)} of {memory.dtype} on {memory.device} at {memory.data_ptr():#x}; "
                f"these engines need a contiguous {list(shape)} of {self._dtype} on {stream.device}, at a multiple of "
                f"{ALIGNMENT} bytes."
            )
        with stream.activate(), torch.inference_mode():
            return memory.zero_()  # a slot that nobody sees still counts with 0 x NaN

    @torch.inference_mode()
    def values(self, start: int, stop: int) -> Values:
        return to_host([shard[:, :, 0, :, start:stop] for shard in self._active_shards()])

    @torch.inference_mode()
    def fill(self, start: int, values: Values) -> None:
        first, stop = 0, start + values.shape[3]
        for shard in self._active_shards():
            given = torch.from_numpy(values[first : first + len(shard)])
            shard[:, :, 0, :, start:stop] = given.view(shard.dtype).to(shard.device)
            first += len(shard)

    @torch.inference_mode()
    def reset(self) -> None:
        """Begin another sequence. A slot that overflowed to infinity would spoil it: a hidden slot counts with 0 x infinity."""
        super().reset()
        for shard in self._active_shards():
            shard.zero_()

    @contextmanager
    def kept(self, start: int, stop: int) -> Iterator[None]:
        """Undo, when the block ends, what it writes to the slots from ``start`` to ``stop - 1``."""
        before = [shard[..., start:stop, :].clone() for shard in self._active_shards()]
        yield
        for shard, values in zip(self._active_shards(), before, strict=True):
            shard[..., start:stop, :] = values

    def _active_shards(self) -> Iterator[Tensor]:
        return active_shards(self._streams, self.shards)

    @torch.inference_mode()
    def compact(self, start: int, sources: list[int]) -> None:
        for shard in self._active_shards():
            index = torch.tensor(sources, pin_memory=shard.is_cuda).to(shard.device, non_blocking=True)
            shard[..., start : start + len(sources), :] = shard.index_select(4, index)

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        stream = self._streams[self._rows[index][0]]
        with stream.activate():
            keys, values = self.layer(index).float().cpu().numpy().copy()
        return keys, values


def active_shards(streams: Sequence[DeviceStream], shards: Sequence[Tensor]) -> Iterator[Tensor]:
    """Each shard, while its stream is torch's current stream."""
    for stream, shard in zip(streams, shards, strict=True):
        with stream.activate():
            yield shard


def to_host(pieces: Sequence[Tensor]) -> Values:
    """Pieces of shards, [layers, ...] each, as one array in host memory; 16-bit ones as their bits: NumPy has no bfloat16."""
    gathered = torch.cat([piece.cpu() for piece in pieces])
    values: Values = (gathered.view(torch.int16) if gathered.itemsize == 2 else gathered).numpy()
    return values


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a call of n nodes of B sequences on one device. Their contents change, their addresses do not.

    Attributes:
        x: ``input_ids`` [B, n] int64, or the hidden state of the previous stage [B, n, hidden].
        position_ids: [B, n].
        write_indices: [B].
        attn_mask: [B, 1, n, s]; attention reads the first s slots of the caches.
        logit_rows: The nodes of each sequence that get logits from verify, [R]. The draft ignores it.
        caches: The layer caches that the graph uses, in the order of its inputs.
    """

    x: Tensor
    position_ids: Tensor
    write_indices: Tensor
    attn_mask: Tensor
    logit_rows: Tensor
    caches: list[KV]


PreparedCall = Callable[[], list[Tensor]]
"""Runs a graph on the inputs it was prepared for. Returns logits [B, R, V] or a hidden state; for a draft logits [B, n, V], ids
[B, n, K] and log-probabilities [B, n, K]. The next run overwrites them."""


class StageRunner(Protocol):
    """A graph, loaded on a device: the draft, or one stage of verify."""

    @property
    def graph(self) -> GraphInfo: ...

    @property
    def stream(self) -> DeviceStream: ...

    @property
    def capturable(self) -> bool:
        """Whether the calls prepared so far can be captured in a CUDA graph."""
        ...

    def prepare(self, inputs: StepInputs) -> PreparedCall:
        """Bind a call to the addresses of its inputs."""
        ...


class ResultMemory:
    """Memory for the outputs of a graph that are not caches.

    Calls of all node counts share it, because only the results of the last call are used: logits are large.
    """

    def __init__(self, graph: GraphInfo, device: torch.device, largest: int) -> None:
        """``largest`` is the node count from which on a call has memory of its own. Nothing is allocated yet."""
        self._graph, self._device, self._largest = graph, device, largest
        self._shared: list[Tensor] = []
        self._batch = 0

    def tensors(self, inputs: StepInputs) -> list[Tensor]:
        """The outputs of a call. Those of more sequences than before take other memory; outputs given out before stay valid."""
        (batch, count), rows = inputs.position_ids.shape, len(inputs.logit_rows)
        if count > self._largest:
            return self._allocate(batch, count, rows)
        shapes = [info.sized(B=batch, n=count, R=rows) for info in self._graph.results]
        if batch > self._batch:
            self._batch = batch
            self._shared = [memory.flatten() for memory in self._allocate(batch, self._largest, self._largest)]
        return [memory[: prod(shape)].view(shape) for memory, shape in zip(self._shared, shapes, strict=True)]

    def _allocate(self, batch: int, count: int, rows: int) -> list[Tensor]:
        with explain_out_of_memory(f"The results of {batch * count} nodes"):
            return [
                torch.zeros(info.sized(B=batch, n=count, R=rows), dtype=getattr(torch, info.dtype), device=self._device)
                for info in self._graph.results
            ]


def tensors_by_name(graph: GraphInfo, inputs: StepInputs, results: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The input tensors and the output tensors of a call by name. A cache is both, because the graph updates it in place."""
    given = {
        graph.inputs[0].name: inputs.x,
        "position_ids": inputs.position_ids,
        "write_indices": inputs.write_indices,
        "attn_mask": inputs.attn_mask,
        "logit_rows": inputs.logit_rows,
    }
    named = {info.name: given[info.name] for info in graph.inputs[: -2 * len(graph.caches)]}
    outputs = {info.name: result for info, result in zip(graph.results, results, strict=True)}
    for index, pair in zip(graph.caches, inputs.caches, strict=True):
        for kind, tensor in zip(("key", "value"), pair, strict=True):
            named[f"{kind}_{index}"] = outputs[f"{kind}_{index}_out"] = tensor
    return named, outputs
