"""Engines whose weights are split over several processes. Rank 0 decodes, and the other ranks
follow.

The processes are started together (``torchrun --nproc-per-node K``). All ranks have the same
engines and caches, each for its part of the model. Rank 0 sends each method call to the other
ranks, which make the same call. Only rank 0 has samplers, controllers and texts, so the ranks do
not need a common clock.

All data goes through ``torch.distributed``. Sums on GPUs use NCCL. All other data goes between
pairs of ranks and uses gloo. Gloo's collectives are not used, because their threads free Python's
tensors some time after a call. If Python has begun to exit by then, C++ aborts the process.
"""

import atexit
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce, wraps
from io import BytesIO
from itertools import accumulate, count
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import P2POp, irecv, isend

from eesd.common.errors import EESDError
from eesd.model.torch_ops import Add
from eesd.runtime.engines.base import Call, KVCache, StepOutputs, Values, Work
from eesd.runtime.engines.device_cache import DeviceKVCache
from eesd.runtime.engines.device_engine import DeviceEngine

PATIENCE = timedelta(minutes=10)
"""All ranks must start within this time."""
FOREVER = timedelta(days=3650)
LEAVING = 60.0
"""Seconds that rank 0 waits for the other ranks to end."""
FIRST = 4096
"""Number of bytes of an order's first message. The whole order fits into this message, unless the
order has a long prompt or keys and values."""
ORDERS, PARTS = range(2)
"""The tags of messages."""
NUMPY = "numpy._core.multiarray"
READ = {
    *((NUMPY, "_reconstruct"), (NUMPY, "scalar"), ("numpy", "ndarray"), ("numpy", "dtype")),
    *(("builtins", "range"), (Call.__module__, "Call")),
}
"""The types that an order may contain, in addition to Python's lists, tuples, strings and
numbers."""
TOLD = {"forward"}
"""The methods that rank 0 may order other ranks to call."""


@dataclass(frozen=True)
class Split:
    """One of the ranks that share a model by tensor parallelism (Shoeybi et al. 2019, arXiv
    1909.08053).

    Each rank has some heads of every attention layer and some columns of every MLP or expert, with
    the sizes of :meth:`~eesd.common.geometry.Geometry.on_rank`. So each rank computes a part of the
    sum that attention or MLP adds to x. The parts are added in the order of the ranks. Embeddings,
    norms, routers and LM heads are on every rank.

    Attributes:
        ranks: Number of ranks.
        rank: Index of this rank.
        add: Adds the parts of all ranks.
    """

    ranks: int
    rank: int
    add: Add

    def ranges(self, sizes: Sequence[int]) -> list[slice]:
        """Return this rank's share of each of several consecutive ranges. ``sizes`` has the sizes
        of the ranges."""
        rank = self.rank
        ranks = self.ranks
        begins = accumulate(sizes, initial=0)
        return [
            slice(begin + size * rank // ranks, begin + size * (rank + 1) // ranks)
            for begin, size in zip(begins, sizes, strict=False)
        ]


class Team:
    """The ranks, as seen by this rank."""

    def __init__(self, device: torch.device) -> None:
        """Connect to the other ranks. ``device`` is this rank's device.

        Raises:
            EESDError: A model is already split over these processes, or they cannot connect.
        """
        if dist.is_initialized():
            raise EESDError(
                "These processes already share a model; start other processes for another model."
            )
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # other machines cannot connect
        try:
            dist.init_process_group("gloo", timeout=PATIENCE)
            # An interrupted message may break all other connections of its group, so the watch uses
            # a separate group.
            self._life = dist.new_group(backend="gloo")
            self._sums = dist.new_group(backend="nccl") if device.type == "cuda" else None
        except (ValueError, RuntimeError) as error:
            raise EESDError(
                f"The ranks cannot connect to each other ({str(error)[:200]}); start them "
                "with torchrun."
            ) from None
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._others = [rank for rank in range(self.ranks) if rank != self.rank]
        self._watches: list[threading.Thread] = []
        self._leaving = False
        self._ending = threading.Lock()
        self._numbers = count()
        self._shared = dict[int, Any]()
        self._forgotten = list[int]()

    @property
    def split(self) -> Split:
        return Split(self.ranks, self.rank, self._add)

    def _add(self, part: Tensor) -> Tensor:
        """Gather the parts of all ranks on each rank, and add them in the order of the ranks."""
        own = part.contiguous()
        if self._sums is None:
            return reduce(torch.add, self._gather(own))
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own, self._sums)
        return reduce(torch.add, found)

    def gathered(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Gather the arrays of all ranks. They must have the same shape."""
        return [
            part.numpy() for part in self._gather(torch.from_numpy(np.ascontiguousarray(values)))
        ]

    def _gather(self, own: Tensor) -> list[Tensor]:
        found = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.ranks)]
        sent = [P2POp(isend, own, rank, tag=PARTS) for rank in self._others]
        self._exchange(
            *sent, *(P2POp(irecv, found[rank], rank, tag=PARTS) for rank in self._others)
        )
        return found

    def number(self, shared: "TeamEngine | TeamCache") -> int:
        """Return the number of an engine or a cache. It is the same on all ranks. Rank 0 announces
        when the object is no longer needed."""
        number = next(self._numbers)
        if self.rank:
            self._shared[number] = shared
        else:
            weakref.finalize(shared, self._forgotten.append, number)  # may run at any time
        return number

    def tell(self, whose: "TeamEngine | TeamCache", method: str, *values: Any) -> None:
        """Order the other ranks to call a method. Does nothing on ranks that follow orders."""
        if self.rank:
            return
        forgotten = [self._forgotten.pop() for _ in range(len(self._forgotten))]
        file = BytesIO()
        _Pickler(file, protocol=4).dump((forgotten, whose, method, values))
        data = (len(file.getbuffer()).to_bytes(8, "little") + file.getbuffer()).ljust(FIRST, b"\0")
        for piece in filter(None, (data[:FIRST], data[FIRST:])):
            message = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            self._exchange(*(P2POp(isend, message, rank, tag=ORDERS) for rank in self._others))

    def obey(self) -> None:
        """Carry out the orders of rank 0."""
        data = self._received(FIRST)
        size = int.from_bytes(data[:8], "little")
        if size > FIRST - 8:
            data += self._received(size - FIRST + 8)
        forgotten, whose, method, values = _Unpickler(BytesIO(data[8:]), self._shared).load()
        for number in forgotten:
            del self._shared[number]
        if method not in TOLD:
            raise pickle.UnpicklingError(f"no order: {method}")
        getattr(whose, method)(*values)

    def _received(self, size: int) -> bytes:
        message = torch.empty(size, dtype=torch.uint8)
        self._exchange(P2POp(irecv, message, 0, tag=ORDERS))
        return message.numpy().tobytes()

    def _exchange(self, *messages: P2POp) -> None:
        """Send and receive messages. If another rank has ended, end this process."""
        try:
            for work in dist.batch_isend_irecv(list(messages)):
                _wait(work)
        except RuntimeError:
            for watch in self._watches:  # a watch reports the rank that has ended
                watch.join()
            raise

    def watch(self) -> None:
        """From now on, end this process when another process ends. A sum that needs both processes
        would wait forever."""
        for other in [0] if self.rank else self._others:
            self._watches.append(
                threading.Thread(target=self._watch, args=(other,), name="eesd-ranks", daemon=True)
            )
            self._watches[-1].start()

    def _watch(self, other: int) -> None:
        """Wait until another process ends, or rank 0 orders this process to end."""
        with suppress(RuntimeError):
            _wait(irecv(torch.empty(1), other, self._life))
            self._leaving = True
        if self.rank or not self._leaving:
            self._end(other)

    def leave(self) -> None:
        """On rank 0, end the other processes with exit code 0, whatever they are doing. Then wait
        until they have ended."""
        self._leaving = True
        for other in self._others:
            with suppress(RuntimeError):
                _wait(isend(torch.empty(1), other, self._life), timedelta(seconds=LEAVING))
        self._end_sums()
        for watch in self._watches:
            watch.join(LEAVING)

    def _end(self, other: int) -> NoReturn:
        """End this process. May be called from any thread. The process exits at once, because other
        threads may wait in a library that no exception reaches."""
        self._ending.acquire()
        if self._leaving:
            threading.Timer(LEAVING / 2, os._exit, (0,)).start()  # in case a sum never ends
            self._end_sums()
        else:
            print(
                f"error: Rank {other} has ended; see its output, and start all ranks again.",
                file=sys.stderr,
            )
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0 if self._leaving else 1)

    def _end_sums(self) -> None:
        """End the sums. All ranks call this together."""
        if self._sums is not None:
            dist.destroy_process_group(self._sums)


def _wait(message: "dist.Work | None", longest: timedelta = FOREVER) -> None:
    """Wait for a message. The message is never None, because torch returns None only to processes
    outside the group."""
    assert message is not None
    message.wait(longest)


class _Pickler(pickle.Pickler):
    """Writes engines and caches as their numbers, without their contents."""

    def persistent_id(self, value: Any) -> int | None:
        return value.number if isinstance(value, TeamCache | TeamEngine) else None


class _Unpickler(pickle.Unpickler):
    """Reads only numbers, arrays, calls, engines and caches, so that the bytes of a message cannot
    run other code."""

    def __init__(self, file: BytesIO, shared: "dict[int, TeamEngine | TeamCache]") -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> "TeamEngine | TeamCache":
        return self._shared[number]

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy.core", "numpy._core"), name) not in READ:
            raise pickle.UnpicklingError(f"no part of an order: {module}.{name}")
        return super().find_class(module, name)


Method = TypeVar("Method", bound=Callable[..., Any])


def told(method: Method) -> Method:
    """Decorate a method so that, when rank 0 calls it, the other ranks call it, too."""

    TOLD.add(method.__name__)

    @wraps(method)
    def tell_and_call(self: "TeamEngine | TeamCache", *values: Any) -> Any:
        self.team.tell(self, method.__name__, *values)
        return method(self, *values)

    return cast(Method, tell_and_call)


class TeamCache:
    """The KV cache of one sequence, whose heads are spread over the ranks."""

    def __init__(self, team: Team, own: DeviceKVCache) -> None:
        self.team, self.own, self.number = team, own, team.number(self)

    @property
    def slot_bytes(self) -> int:
        return self.own.slot_bytes * self.team.ranks

    @property
    def fixed_bytes(self) -> int:
        return self.own.fixed_bytes * self.team.ranks

    @told
    def reserve(self, slots: int) -> None:
        self.own.reserve(slots)

    @told
    def reset(self) -> None:
        self.own.reset()

    @told
    def compact(self, start: int, sources: list[int]) -> None:
        self.own.compact(start, sources)

    @told
    def clear(self, start: int, stop: int | None = None) -> None:
        self.own.clear(start, stop)

    @told
    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        keys, values = (
            np.concatenate(self.team.gathered(part), 1) for part in self.own.read(index)
        )
        return keys, values

    @told
    def values(self, start: int, stop: int) -> Values:
        return np.concatenate(self.team.gathered(self.own.values(start, stop)), 2)

    @told
    def fill(self, start: int, values: Values) -> None:
        self.own.fill(
            start, np.ascontiguousarray(np.split(values, self.team.ranks, 2)[self.team.rank])
        )


class TeamEngine:
    """An engine whose weights are spread over the ranks."""

    def __init__(self, team: Team, own: DeviceEngine) -> None:
        self.team, self.own, self.number = team, own, team.number(self)
        self.manifest = own.manifest
        self.prefill_chunk = own.prefill_chunk
        self.last_positions = own.last_positions

    @property
    def chooses(self) -> bool:
        return self.own.chooses

    @told
    def new_kv_caches(self, count: int = 1) -> Sequence[KVCache]:
        return [TeamCache(self.team, own) for own in self.own.new_kv_caches(count)]

    @told
    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        self.own.prepare([_own(kv_cache) for kv_cache in kv_caches])

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        # Only rank 0 chooses tokens.
        self.team.tell(self, "forward", [call._replace(choose=None) for call in calls])
        return self.own.forward([call._replace(kv_cache=_own(call.kv_cache)) for call in calls])

    def work(self, calls: Sequence[Call]) -> Work:
        return self.own.work([call._replace(kv_cache=_own(call.kv_cache)) for call in calls])


def _own(kv_cache: KVCache) -> DeviceKVCache:
    assert isinstance(kv_cache, TeamCache)
    return kv_cache.own


def lead(
    team: Team, verify: DeviceEngine, draft: DeviceEngine | None
) -> tuple[TeamEngine, TeamEngine | None]:
    """Provide the engines of rank 0. When the process of rank 0 ends, the other processes end,
    too."""
    team.watch()
    atexit.register(team.leave)
    return TeamEngine(team, verify), None if draft is None else TeamEngine(team, draft)


def follow(team: Team, verify: DeviceEngine, draft: DeviceEngine | None) -> NoReturn:
    """Follow the orders of rank 0. When rank 0 ends, this process ends, too.

    This process ignores signals, because torchrun and terminals send them to all ranks, but rank 0
    may have work to finish.
    """
    with suppress(ValueError):  # only the main thread may set handlers
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for engine in (verify, draft):
        if engine is not None:
            TeamEngine(team, engine)
    team.watch()
    while True:
        team.obey()
