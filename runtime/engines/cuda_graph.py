"""Capture work on a device in a CUDA graph."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from eesd.runtime.engines.device import DeviceStream

LOGGER = logging.getLogger(__name__)
_ONE_CAPTURE = Lock()
"""A lock that a thread holds while it captures."""


class CapturedGraph:
    """Work on a device that is captured in a CUDA graph and replayed. Without a memory pool, the
    work simply runs each time.

    Callers pass the same work to each method. The graph does not store it, because a reference
    cycle with the owner would hold GPU memory until the garbage collector runs.
    """

    def __init__(self, stream: DeviceStream, pool: Any) -> None:
        """Make a graph of work in ``stream``. ``pool`` is the memory pool that other graphs share.
        If it is None, nothing is captured."""
        self._stream = stream
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def needs_capture(self) -> bool:
        return self._pool is not None and self._graph is None

    def capture(self, work: Callable[[], None]) -> None:
        """Run the work once, because libraries initialize themselves in their first call, and then
        capture it.

        Work that cannot be captured runs without a graph from then on.
        """
        work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads of the process may use the GPU meanwhile without breaking
            # the capture. But a capture first waits for the whole GPU, which is an error while
            # another thread captures.
            with (
                _ONE_CAPTURE,
                collector_off(),
                torch.cuda.graph(
                    graph, self._pool, self._stream.cuda_stream, capture_error_mode="thread_local"
                ),
            ):
                work()
        except RuntimeError as error:
            LOGGER.warning("A call runs without a CUDA graph, so it is slower: %s", error)
            self._pool = None
        else:
            self._graph = graph

    def run(self, work: Callable[[], None]) -> None:
        """Run the work, after capturing it if that is not done yet."""
        if self.needs_capture:
            self.capture(work)
        if self._graph is None:
            work()
        else:
            self._graph.replay()


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running, because freeing GPU memory is an error while
    work is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
