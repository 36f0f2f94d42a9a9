"""What engines on devices share: places, the KV cache there, and the passes that run over it.

A pass has its inputs at fixed addresses, fills its mask on the device, and brings its few results to the host in one copy
through pinned memory; on a GPU all of that is one CUDA graph. On the CPU the same code runs without graph and pinned memory,
so that all but these two can be tested anywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import MASKED, GraphInfo, Manifest
from eesd.model.decoder import KV
from eesd.runtime.engines.kv_cache import STEP, GrowingKVCache


@contextmanager
def fitting_gpu(what: str) -> Iterator[None]:
    """Say what did not fit the GPU, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise EESDError(f"{what} do not fit the GPU's memory; free some, or export with a smaller --max-seq-len.") from None


@dataclass(frozen=True)
class Place:
    """A device, and on a GPU the stream in which everything there is done."""

    device: torch.device
    stream: torch.cuda.Stream | None = None

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    @property
    def handle(self) -> int:
        """The stream as a number, as TensorRT and ONNX Runtime take it."""
        return 0 if self.stream is None else int(self.stream.cuda_stream)


def device_streams(stages: int, device: str | None = None) -> list[Place]:
    """A place for each stage, spread over the GPUs that torch sees; on the CPU where it sees none, or ``device`` says so."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return [Place(torch.device("cpu"))] * stages
    gpus = torch.cuda.device_count() if name == "cuda" else 1
    first = torch.device(name).index or 0
    used = [torch.device("cuda", first + stage * min(gpus, stages) // stages) for stage in range(stages)]
    streams = {gpu: torch.cuda.Stream(gpu) for gpu in used}  # type: ignore[no-untyped-call]
    return [Place(gpu, streams[gpu]) for gpu in used]


class DeviceKVCache(GrowingKVCache):
    """A kv_cache in the engine's type, with a part at each stage's place.

    Unless it may ``grow``, it has all of its slots at once, because addresses must not change. ``given`` are parts that the
    host of an embedded engine owns.
    """

    parts: list[Tensor]

    def __init__(
        self,
        manifest: Manifest,
        places: Sequence[Place],
        *,
        grow: bool = False,
        slots: int = STEP,
        given: Sequence[Tensor] = (),
    ) -> None:
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)
        self._places = places
        self._given = given
        super().__init__(manifest, slots if grow else manifest.max_seq_len, [stage.caches for stage in manifest.verify])

    @property
    def data(self) -> Tensor:
        """The first part; all caches where there is one stage."""
        return self.parts[0]

    def _zeros(self, part: int, shape: tuple[int, ...]) -> Tensor:
        place = self._places[part]
        if self._given:
            return self._checked(self._given[part], shape, place)
        with fitting_gpu(f"The KV caches of {shape[4]} slots"), place.active():
            return torch.zeros(shape, dtype=self._dtype, device=place.device)

    def _checked(self, given: Tensor, shape: tuple[int, ...], place: Place) -> Tensor:
        found = (tuple(given.shape), given.dtype, given.device.type)
        if found != (shape, self._dtype, place.device.type) or not given.is_contiguous():
            raise EESDError(
                f"The kv_cache given is {list(given.shape)} of {given.dtype} on {given.device}; "
                f"these engines need a contiguous {list(shape)} of {self._dtype} on {place.device}."
            )
        return given

    @torch.inference_mode()
    def compact(self, start: int, sources: list[int]) -> None:
        for place, part in zip(self._places, self.parts, strict=True):
            with place.active():
                index = torch.tensor(sources, pin_memory=place.stream is not None).to(place.device, non_blocking=True)
                part[..., start : start + len(sources), :] = part.index_select(4, index)

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        for place in self._places:
            place.wait()
        keys, values = self.cache(index).float().cpu().numpy().copy()
        return keys, values


@dataclass(frozen=True)
class Call:
    """The inputs of a call of n nodes on one device, at addresses that stay.

    ``x`` is ``input_ids`` [1, n] int64, or the hidden state [1, n, hidden] of the stage before; ``position_ids`` [1, n];
    ``write_indices`` [1]; ``attn_mask`` [1, 1, n, S]; ``caches`` in the order of the graph.
    """

    x: Tensor
    position_ids: Tensor
    write_indices: Tensor
    attn_mask: Tensor
    caches: list[KV]


Run = Callable[[], list[Tensor]]
"""Runs a call: logits [1, n, V] (or a hidden state), from a draft also ids and log-probabilities [1, n, K]. The next run
overwrites them."""


class Program(Protocol):
    """One graph, or one stage of one, loaded at a place."""

    @property
    def place(self) -> Place: ...

    @property
    def caches(self) -> Sequence[int]: ...

    @property
    def capturable(self) -> bool:
        """Whether what was prepared may become part of a CUDA graph."""
        ...

    def prepare(self, call: Call) -> Run: ...


def empty_results(graph: GraphInfo, call: Call) -> list[Tensor]:
    """Memory for what a call of a graph gives besides its caches."""
    count, device = call.position_ids.shape[1], call.position_ids.device
    infos = graph.results
    with fitting_gpu(f"The results of {count} nodes"):
        return [torch.zeros((1, count, int(t.shape[2])), dtype=getattr(torch, t.dtype), device=device) for t in infos]


def named_tensors(graph: GraphInfo, call: Call, results: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and the outputs of a graph by name; the caches are both, in one place."""
    inputs = {graph.inputs[0].name: call.x, "position_ids": call.position_ids}
    inputs |= {"write_indices": call.write_indices, "attn_mask": call.attn_mask}
    outputs = {info.name: result for info, result in zip(graph.outputs, results, strict=False)}
    for index, pair in zip(graph.caches, call.caches, strict=True):
        for part, tensor in zip(("key", "value"), pair, strict=True):
            inputs[f"{part}_{index}"] = outputs[f"{part}_{index}_out"] = tensor
    return inputs, outputs


class Repeated:
    """Work on a device that is done many times: a CUDA graph where it can be one."""

    def __init__(self, body: Callable[[], None], place: Place, pool: Any) -> None:
        """``pool`` is the memory that the graph shares with others; None where nothing is to be recorded."""
        self._body = body
        self._place = place
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def prepared(self) -> bool:
        return self._pool is None or self._graph is not None

    def prepare(self) -> None:
        """Do it once, because libraries set themselves up in a first run, and then record it."""
        self._body()
        self._place.wait()
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's mistakes may spoil the recording: the host's other threads go on using the GPU.
        with torch.cuda.graph(self._graph, self._pool, self._place.stream, capture_error_mode="thread_local"):
            self._body()

    def __call__(self) -> None:
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()


class Mask:
    """Fills the additive mask [1, 1, n, S] on the device, from numbers that are there already."""

    def __init__(self, mask: Tensor, slot: Tensor, base: Tensor | None = None, visible: Tensor | None = None) -> None:
        """``slot`` [1] is that of the first node of a chain; for a tree ``base`` [1] and ``visible`` [n, w] are as in
        :meth:`Binding.forward`, with w columns of which those behind m are 0."""
        self._mask, self._slot, self._base, self._visible = mask[0, 0], slot, base, visible
        count, slots = self._mask.shape
        self._slots = torch.arange(slots, device=mask.device)
        self._rows = torch.arange(count, device=mask.device)[:, None]

    def fill(self) -> None:
        if self._visible is None or self._base is None:
            hidden = self._slots > self._rows + self._slot
        else:
            column = self._slots - self._base
            width = self._visible.shape[1]
            hidden = (self._visible[:, column.clamp(0, width - 1)] == 0) | (column >= width)
            hidden &= column >= 0
        self._mask.copy_(hidden)
        self._mask.mul_(MASKED)
