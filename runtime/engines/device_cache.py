"""KV caches on devices. The sequences that a call may run together have one memory, with a row for
each sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Values
from eesd.runtime.engines.device import ALIGNMENT, DeviceStream, explain_out_of_memory
from eesd.runtime.engines.kv_cache import STEP, grown


class RowMemory:
    """The keys and values [L+E, 2, B, KV, S, D] of B sequences in the engines' element type.

    If the verify stages run on several devices, each device has a shard with the layers of its
    stage.

    Attributes:
        shards: Tensors [layers, 2, B, KV, S, D].
        rows: B.
        fixed: Whether S is large enough for the longest text from the beginning, because a captured
            CUDA graph needs fixed addresses.
        limit: Maximum number of slots of a text.
        version: Number of times that ``shards`` were replaced. Calls must be bound again after each
            replacement.
    """

    def __init__(
        self,
        manifest: Manifest,
        streams: Sequence[DeviceStream],
        rows: int = 1,
        *,
        grow: bool = False,
        slots: int = STEP,
        spare: int = 0,
        given: Sequence[Tensor] = (),
    ) -> None:
        """Allocate the memory, and fill it with zeros.

        Args:
            manifest: Manifest of the engine directory.
            streams: The stream of each stage.
            rows: B.
            grow: Whether the memory begins with few slots and grows with the longest text. If
                False, all ``gpu_slots`` of the manifest are allocated.
            slots: Initial number of slots if the memory grows.
            spare: Number of spare slots after the slots that tokens may use, if the memory grows.
                The spare slots are for nodes that only fill a call.
            given: Memory that the caller owns. It is a tensor for each shard, or a tensor [2, B,
                KV, S, D] for each layer. By default, torch allocates the memory.

        Raises:
            EESDError: The memory does not fit the GPU, or ``given`` has the wrong number of
                tensors, or a tensor of another shape, type or device.
        """
        self.rows = rows
        self.fixed = not grow
        self.limit = manifest.max_seq_len
        self.version = 0
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)
        layers = [stage.caches for stage in manifest.verify]
        if given and given[0].dim() == 5:
            streams = [stream for stream, group in zip(streams, layers, strict=True) for _ in group]
            layers = [(layer,) for group in layers for layer in group]
            given = [buffer[None] for buffer in given]
        if given and len(given) != len(layers):
            raise EESDError(
                f"{len(given)} tensors are given as kv_cache, and these engines need "
                f"{len(layers)} of their shape."
            )
        self.streams = streams
        self._given = given
        self._places = {
            layer: (shard, at)
            for shard, group in enumerate(layers)
            for at, layer in enumerate(group)
        }
        self._first = min(slots, self.limit) if grow else self.limit
        self._spare = spare if grow else manifest.gpu_slots - self.limit
        geometry = manifest.geometry
        self._shapes = [
            (len(group), 2, rows, geometry.num_kv_heads, geometry.head_dim) for group in layers
        ]
        self._reserved = [0] * rows
        self.shards = self._allocate(self._first)

    @property
    def slots(self) -> int:
        """Current S, including spare slots."""
        return int(self.shards[0].shape[4])

    def layer(self, index: int, first: int, rows: int) -> Tensor:
        """Return a view [2, rows, KV, S, D] of the keys and values of one layer, for ``rows`` rows
        from ``first`` on."""
        shard, at = self._places[index]
        return self.shards[shard][at, :, first : first + rows]

    def stream_of(self, index: int) -> DeviceStream:
        """Return the stream of a layer's stage."""
        return self.streams[self._places[index][0]]

    def active_shards(self) -> Iterator[Tensor]:
        """Yield each shard while its stream is torch's current stream."""
        for stream, shard in zip(self.streams, self.shards, strict=True):
            with stream.activate():
                yield shard

    def caches(self) -> "list[DeviceKVCache]":
        """The cache of each sequence."""
        return [DeviceKVCache(self, row) for row in range(self.rows)]

    def reserve(self, row: int, slots: int) -> None:
        """Make room for at least this number of slots of a row. Raises :class:`EESDError` if the
        limit is exceeded."""
        capacity = self.slots - self._spare
        if slots > min(capacity, self.limit):
            self._resize(grown(capacity, slots, self.limit), capacity)
        self._reserved[row] = max(self._reserved[row], slots)

    @torch.inference_mode()
    def reset(self, row: int) -> None:
        """Let a row begin another sequence. Memory that can grow shrinks, so that short texts do
        not pay for an earlier long text.

        The slots are cleared because a hidden slot with an infinite value would add 0 x infinity,
        which is NaN, to the sequence.
        """
        self._reserved[row] = 0
        used = max(self._reserved)
        capacity = self.slots - self._spare
        most = max(used, self._first)
        # Do not copy the other rows if that would save little memory.
        if not self.fixed and capacity > most + (STEP if used else 0):
            self._resize(most, used)
        for shard in self.active_shards():
            shard[:, :, row].zero_()

    def _resize(self, slots: int, used: int) -> None:
        """Change the number of slots for tokens. The first ``used`` slots are kept."""
        old = self.shards
        self.shards = self._allocate(slots)
        for mine, before in zip(self.active_shards(), old, strict=True):
            mine[..., :used, :] = before[..., :used, :]
        self.version += 1

    def _allocate(self, slots: int) -> list[Tensor]:
        shapes = [(*shape[:4], slots + self._spare, shape[4]) for shape in self._shapes]
        return [self._zeros(shard, shape) for shard, shape in enumerate(shapes)]

    def _zeros(self, shard: int, shape: tuple[int, ...]) -> Tensor:
        stream = self.streams[shard]
        if self._given:
            return self._checked(self._given[shard], shape, stream)
        if stream.device.type == "cpu":
            return _lazy_zeros(shape, self._dtype)
        caches = "The KV caches" if self.rows == 1 else f"The KV caches of {self.rows} rows"
        with explain_out_of_memory(f"{caches} of {shape[4]} slots"), stream.activate():
            return torch.zeros(shape, dtype=self._dtype, device=stream.device)

    def _checked(self, memory: Tensor, shape: tuple[int, ...], stream: DeviceStream) -> Tensor:
        fits = (tuple(memory.shape), memory.dtype) == (
            shape,
            self._dtype,
        ) and memory.is_contiguous()
        if not fits or not stream.lies_here(memory) or not stream.aligned(memory):
            raise EESDError(
                f"The kv_cache given is {list(memory.shape)} of {memory.dtype} on "
                f"{memory.device} at {memory.data_ptr():#x}; "
                f"these engines need a contiguous {list(shape)} of {self._dtype} on "
                f"{stream.device}, at a multiple of "
                f"{ALIGNMENT} bytes."
            )
        with stream.activate(), torch.inference_mode():
            return memory.zero_()  # a hidden slot with NaN would add 0 x NaN


class DeviceKVCache:
    """The keys and values of one sequence, which are a row of a :class:`RowMemory`."""

    def __init__(self, memory: RowMemory, row: int) -> None:
        self.memory = memory
        self.row = row

    @property
    def slot_bytes(self) -> int:
        return sum(shard[:, :, 0, :, 0].nbytes for shard in self.memory.shards)

    @property
    def fixed_bytes(self) -> int:
        return self.memory.slots * self.slot_bytes if self.memory.fixed else 0

    def reserve(self, slots: int) -> None:
        self.memory.reserve(self.row, slots)

    def reset(self) -> None:
        self.memory.reset(self.row)

    @torch.inference_mode()
    def compact(self, start: int, sources: list[int]) -> None:
        for cache in self._shards():
            index = torch.tensor(sources, pin_memory=cache.is_cuda).to(
                cache.device, non_blocking=True
            )
            cache[..., start : start + len(sources), :] = cache.index_select(3, index)

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        with self.memory.stream_of(index).activate():
            keys, values = self.memory.layer(index, self.row, 1).float().cpu().numpy().copy()
        return keys, values

    @torch.inference_mode()
    def values(self, start: int, stop: int) -> Values:
        """Return keys and values in host memory. 16-bit values are represented by their bits,
        because NumPy does not have bfloat16."""
        gathered = torch.cat([cache[..., start:stop, :].cpu() for cache in self._shards()])
        values: Values = (
            gathered.view(torch.int16) if gathered.itemsize == 2 else gathered
        ).numpy()
        return values

    @torch.inference_mode()
    def fill(self, start: int, values: Values) -> None:
        first = 0
        stop = start + values.shape[3]
        for cache in self._shards():
            given = torch.from_numpy(values[first : first + len(cache)])
            cache[..., start:stop, :] = given.view(cache.dtype).to(cache.device)
            first += len(cache)

    @torch.inference_mode()
    def copy_from(self, other: "DeviceKVCache", start: int, stop: int) -> None:
        """Copy the slots from ``start`` to ``stop - 1`` of another cache on the same devices."""
        for mine, theirs in zip(self._shards(), other.memory.shards, strict=True):
            mine[..., start:stop, :] = theirs[:, :, other.row, :, start:stop]

    @torch.inference_mode()
    def clear(self, start: int, stop: int | None = None) -> None:
        for cache in self._shards():
            cache[..., start:stop, :] = 0

    @contextmanager
    def kept(self, start: int, stop: int) -> Iterator[None]:
        """Restore the slots from ``start`` to ``stop - 1`` when the block ends."""
        before = [cache[..., start:stop, :].clone() for cache in self._shards()]
        yield
        for cache, values in zip(self._shards(), before, strict=True):
            cache[..., start:stop, :] = values

    def _shards(self) -> Iterator[Tensor]:
        """Yield the row [layers, 2, KV, S, D] of each shard while the shard's stream is torch's
        current stream."""
        return (shard[:, :, self.row] for shard in self.memory.active_shards())


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return aligned zeros in main memory. Pages that are not touched take no memory. The alignment
    may affect the bits of products."""
    size = prod(shape) * dtype.itemsize
    memory: NDArray[Any] = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
