"""A fake machine with GPUs. It has streams that run late, CUDA graphs, and memory that is reused.

It answers the runtime's calls to ``torch.cuda``, so tests run the same code as a GPU does.

* A stream is a queue. Its work is done later, in order, and a seed determines how it is interleaved
  with the work of other streams.
* A host that reads results before it has waited for them reads garbage.
* A CUDA graph repeats the captured work at the captured addresses.
* Device memory begins as garbage. Freed memory is overwritten in the order of its stream, because
  torch's allocator may reuse it from then on.

``device_tensors.py`` has the tensors on the devices. Calls are written to a log, which
``call_rules.py`` checks.

Threads take turns (``turns.py``). Each thread has its own current device, its own streams and its
own capture.

The fake does not cover captures that several streams join, the order of kernels within one pass of
an engine, and the waits of CUDA's default stream. Here the default stream is a stream like all
others.
"""

import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memset
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from support.turns import Turns

GARBAGE = 0xFF
"""Fills memory with undefined content, which reads as NaN or -1."""
ALIGNMENT = 512
"""The alignment of torch's allocator in bytes."""
REUSE = 0.6
"""The chance that an allocation gets freed memory of its size if there is any."""
Work = Callable[[], object]


class Call(NamedTuple):
    """A call to the library or the driver.

    Attributes:
        name: Name of the call.
        device: The current device.
        stream: Handle of the call's stream, or None if the call has no stream.
        capturing: Whether work was being captured.
        collector: Whether Python's garbage collector was on.
        subject: Number of the context or graph of the call, or 0 if there is none.
        of: Device of a context's engine.
    """

    name: str
    device: int
    stream: int | None
    capturing: bool
    collector: bool
    subject: int = 0
    of: int = -1


@dataclass
class Event:
    """A marker in a stream. The work before the last marker is done when ``reached`` equals
    ``recorded``."""

    recorded: int = 0
    reached: int = 0


@dataclass
class Item:
    """Work in a queue, and the work that it waits for."""

    work: Work
    ready: Callable[[], bool] = lambda: True


class Stream:
    """A ``torch.cuda.Stream``."""

    def __init__(self, machine: "Machine", device: int, handle: int) -> None:
        self.machine = machine
        self.device_index = device
        self.cuda_stream = handle
        self.device = torch.device("cuda", device)
        self.queue: deque[Item] = deque()
        self.graph: Graph | None = None

    def synchronize(self) -> None:
        self.machine.write("synchronize", self.cuda_stream)
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.machine.finish(self)

    def record_event(self, event: Event) -> None:
        event.recorded += 1
        self.machine.enqueue(self, lambda ticket=event.recorded: setattr(event, "reached", ticket))  # type: ignore[misc]

    def wait_event(self, event: Event) -> None:
        ticket = event.recorded
        self.machine.enqueue(self, lambda: None, lambda: event.reached >= ticket)


@dataclass(eq=False)
class Graph:
    """Replaces ``torch.cuda.CUDAGraph``. It has the captured work, and the host memory that each
    piece of work writes."""

    machine: "Machine"
    number: int
    device: int = -1
    body: list[tuple[Work, Tensor | None]] = field(default_factory=list)

    def replay(self) -> None:
        machine = self.machine
        stream = machine.own.current[machine.own.device]
        machine.write("replay", stream.cuda_stream, self.number)
        if stream.graph is not None or machine.own.device != self.device:
            raise RuntimeError(
                "a CUDA graph is replayed while another is captured, or on another device"
            )
        for _, host in self.body:
            spoil(host)
        machine.enqueue(stream, lambda: [work() for work, _ in self.body])


class Block:
    """Memory of a device. It is freed when no Python object refers to it any more, even if queued
    work does."""

    def __init__(self, machine: "Machine", offset: int, size: int, owner: Any) -> None:
        self.machine = machine
        self.offset = offset
        self.size = size
        self.owner = owner

    def __del__(self) -> None:
        self.machine.release(self)


class Arena:
    """Addresses that are never returned to the system, so that a mistake reads garbage instead of
    crashing the process."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.full((size,), GARBAGE, dtype=torch.uint8)
        self._top = -self.bytes.data_ptr() % ALIGNMENT
        self._views: dict[torch.dtype, Tensor] = {}
        self._free: dict[tuple[Any, int], list[int]] = {}

    def take(self, size: int, owner: Any, order: random.Random) -> tuple[int, int]:
        """Returns the offset and the rounded size of free memory. The memory is new, or ``owner``
        has freed it."""
        size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        unused = self._free.get((owner, size))
        if unused and order.random() < REUSE:
            return unused.pop(order.randrange(len(unused))), size
        self._top += size
        assert self._top <= len(self.bytes), "the arena is too small for this test"
        return self._top - size, size

    def give(self, offset: int, size: int, owner: Any) -> None:
        self._free.setdefault((owner, size), []).append(offset)

    def view(self, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """Returns memory as a tensor that does not keep the memory allocated."""
        if dtype not in self._views:
            self._views[dtype] = self.bytes.view(dtype)
        return self._views[dtype].as_strided(shape, stride, offset // dtype.itemsize)


class _Thread(threading.local):
    """The state of each thread, which consists of its device, the stream of each device, and its
    capture."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.device = 0
        self.current = [*streams]
        self.capturing: tuple[Stream, Any] | None = None


class Machine:
    """GPUs, their streams, and a log of the calls.

    Attributes:
        own: State of the calling thread.
        captures: Unfinished captures of all threads.
        turns: May switch threads at every call. None if there is only one thread.
        log: All calls, in order.
        eagerness: Chance that a call of the host advances a queue. If it is 0, work is done only
            when the host waits for it. Set by tests.
        loyalty: Chance that the stream for which the host waits runs first, if it can.
        breaking: Number of captured pieces of work before a piece fails, or None if no piece fails.
    """

    def __init__(self, devices: int = 1, seed: int = 0, size: int = 128 << 20) -> None:
        self.devices = devices
        self.captures = 0
        self.turns: Turns | None = None
        self._handles = count(1000)
        self._numbers = count(1)
        self.own = _Thread([Stream(self, device, next(self._handles)) for device in range(devices)])
        self.streams = {stream.cuda_stream: stream for stream in self.own.current}
        self.log: list[Call] = []
        self.memory = Arena(size)
        self.pinned = Arena(size // 4)
        self.joins = True
        self.loyalty = 0.0
        self.breaking: int | None = None
        self._stuck: set[int] = set()
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Change the order of events from now on."""
        self.random = random.Random(seed)
        self.eagerness = self.random.choice((0, 0.05, 0.3, 0.8))

    # Calls and their log

    def write(self, name: str, stream: int | None = None, subject: int = 0, of: int = -1) -> None:
        if self.turns is not None:
            self.turns.pass_on()
        self.log.append(
            Call(
                name,
                self.own.device,
                stream,
                self.own.capturing is not None,
                gc.isenabled(),
                subject,
                of,
            )
        )

    def number(self) -> int:
        """Returns a number for an object in the log."""
        return next(self._numbers)

    # Streams

    def new_stream(self, device: Any = None) -> Stream:
        if isinstance(device, torch.device):
            device = device.index
        if device is None:
            device = self.own.device
        stream = Stream(self, device, next(self._handles))
        self.streams[stream.cuda_stream] = stream
        return stream

    @contextmanager
    def activate(self, stream: Stream) -> Iterator[None]:
        """Make a stream and its device the current ones, as ``torch.cuda.stream`` does."""
        before = self.own.device, self.own.current[stream.device_index]
        self.own.device = stream.device_index
        self.own.current[stream.device_index] = stream
        try:
            yield
        finally:
            self.own.device, self.own.current[stream.device_index] = before

    def enqueue(
        self,
        stream: Stream,
        work: Work,
        ready: Callable[[], bool] | None = None,
        host: Tensor | None = None,
    ) -> None:
        """Append work to a stream, or to its capture. ``host`` is the host memory that the work
        writes."""
        if stream.graph is not None:
            if ready is not None:
                raise RuntimeError("a capture cannot wait for work outside of it")
            if self.breaking is not None:
                self.breaking -= 1
                if self.breaking < 0:
                    raise RuntimeError(
                        "CUDA error: operation not permitted when stream is capturing"
                    )
            stream.graph.body.append((work, host))
            return
        spoil(host)
        stream.queue.append(Item(work, ready) if ready else Item(work))
        while self.random.random() < self.eagerness and self.step():
            pass

    def step(self, streams: Sequence[Stream] | None = None) -> bool:
        """Do the next piece of work of one of ``streams``, or of any stream. Returns whether there
        was a piece of work."""
        found = [
            stream
            for stream in streams or self.streams.values()
            if stream.queue and stream.queue[0].ready()
        ]
        if not found:
            return False
        with torch.inference_mode():
            self.random.choice(found).queue.popleft().work()
        return True

    def finish(self, stream: Stream) -> None:
        """Do work until a stream is empty."""
        while stream.queue:
            loyal = self.random.random() < self.loyalty and stream.queue[0].ready()
            assert self.step([stream] if loyal else None), "streams wait for each other"

    def join(self, stream: Stream, other: Stream) -> None:
        """Let ``stream`` continue only after ``other`` has done the work that it has so far."""
        if self.joins and stream is not other:
            event = Event()
            other.record_event(event)
            stream.wait_event(event)

    # CUDA graphs

    @contextmanager
    def capture(
        self, graph: Graph, pool: Any, stream: Stream, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Capture work as ``torch.cuda.graph`` does. If work fails, the capture ends, and its pool
        cannot be reused."""
        assert capture_error_mode == "thread_local"
        if self.captures:  # torch waits for the whole GPU before a capture
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if id(pool) in self._stuck:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        for other in self.streams.values():
            self.finish(other)
        with self.activate(stream):
            self.own.capturing = (stream, pool)
            stream.graph = graph
            graph.device = stream.device_index
            self.captures += 1
            self.write("capture", stream.cuda_stream, graph.number)
            try:
                yield
            except RuntimeError as error:
                self.breaking = None
                self._stuck.add(id(pool))
                raise RuntimeError(
                    "CUDA error: operation failed due to a previous error during capture"
                ) from error
            finally:
                self.own.capturing = None
                stream.graph = None
                self.captures -= 1

    # Memory

    def allocate(self, device: int, size: int) -> Block:
        """Returns memory of a device. If possible, memory of the device's current stream or of the
        capture's pool is reused."""
        owner: Any = self.own.current[device]
        if self.own.capturing is not None and self.own.capturing[0] is owner:
            owner = self.own.capturing[1]
        else:
            self.write("allocate", self.own.current[device].cuda_stream)
        return Block(self, *self.memory.take(size, owner, self.random), owner)

    def release(self, block: Block) -> None:
        self.memory.give(block.offset, block.size, block.owner)
        # This work is never captured, because later writes by the next owner are not part of a
        # graph.
        if isinstance(block.owner, Stream):
            address = self.memory.bytes.data_ptr() + block.offset
            size = block.size
            block.owner.queue.append(Item(lambda: memset(address, GARBAGE, size)))

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns a copy in pinned memory. The memory is freed when no tensor and no queued work
        uses it."""
        self.write("pin")
        offset, size = self.pinned.take(tensor.nbytes, "host", self.random)
        data = self.pinned.bytes.numpy()[offset : offset + tensor.nbytes]
        weakref.finalize(data, self._unpin, offset, size)
        copy: Tensor = torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)
        return copy.copy_(tensor)

    def _unpin(self, offset: int, size: int) -> None:
        memset(self.pinned.bytes.data_ptr() + offset, GARBAGE, size)
        self.pinned.give(offset, size, "host")

    def lasting(self, host: Tensor) -> Tensor:
        """Returns pinned memory as a CUDA graph stores it. The graph has only the address, which
        does not keep the memory allocated."""
        offset = host.data_ptr() - self.pinned.bytes.data_ptr()
        if not 0 <= offset < len(self.pinned.bytes):
            raise RuntimeError("a capture copies to or from host memory that is not pinned")
        return self.pinned.view(offset, host.shape, host.stride(), host.dtype)

    def is_pinned(self, host: Tensor) -> bool:
        return 0 <= host.data_ptr() - self.pinned.bytes.data_ptr() < len(self.pinned.bytes)


def spoil(host: Tensor | None) -> None:
    """Overwrite host memory that a pending copy will write."""
    if host is not None:
        array: Any = host.numpy()
        array[...] = np.nan if array.dtype.kind == "f" else -1


ACTIVE: list[Machine] = []
"""The active machine. If there is no active machine, everything runs on the host at once."""


def installed() -> Machine | None:
    return ACTIVE[-1] if ACTIVE else None


@contextmanager
def install(machine: Machine) -> Iterator[Machine]:
    """Activate a machine. It then answers calls to ``torch.cuda``, and tensors can be on its
    devices."""
    from support.device_tensors import on_devices

    with pytest.MonkeyPatch.context() as patch:
        for name, value in _answers(machine).items():
            patch.setattr(torch.cuda, name, value)
        ACTIVE.append(machine)
        try:
            with on_devices(machine):
                yield machine
        finally:
            ACTIVE.pop()


def _answers(machine: Machine) -> dict[str, Any]:
    """Replacements for the functions of ``torch.cuda``."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: machine.devices,
        "Stream": machine.new_stream,
        "stream": machine.activate,
        "current_stream": lambda device: machine.own.current[device.index],
        "CUDAGraph": lambda: Graph(machine, machine.number()),
        "graph": machine.capture,
        "graph_pool_handle": object,
        "_lazy_init": lambda: None,
    }
