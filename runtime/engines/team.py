"""Engines whose weights are split over processes: rank 0 decodes, and the others do what it says.

The processes are started together (``torchrun --nproc-per-node K``). Rank 0 sends each call of an engine and each change of a
KV cache as JSON, and then all ranks run it on their parts. What they add in between is in ``model/parallel.py``. Samplers,
controllers and texts are rank 0's alone, so ranks need no clock in common.
"""

import atexit
import json
import signal
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from eesd.model.parallel import Split, add_in_order
from eesd.runtime.engines.base import Call, DraftChain, KVCache, StepOutputs, Values, Work
from eesd.runtime.engines.device_cache import DeviceKVCache
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.ranks import Ranks


class Team:
    """The ranks, as one of them sees them."""

    def __init__(self, device: torch.device) -> None:
        """Meet the others. ``device`` is where this rank computes; GPUs add their parts with NCCL.

        Raises:
            EESDError: A model is split over these processes already, or they do not find each other.
        """
        self._line = Ranks()
        self.rank, self.ranks = self._line.rank, self._line.count
        self._forgotten: list[int] = []
        if device.type == "cuda":
            dist.init_process_group("nccl", store=self._line.store, rank=self.rank, world_size=self.ranks)
            self._line.at_end = dist.destroy_process_group  # all ranks do that together

    @property
    def split(self) -> Split:
        return Split(self.ranks, (self.rank,), self._add)

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        """Add the parts of all ranks in their order: each rank gets all of them."""
        own = parts[0].contiguous()
        if own.is_cuda:
            found = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(found, own)
        else:
            gathered = self._line.gather(own.view(torch.uint8).numpy().tobytes())
            found = [torch.frombuffer(one, dtype=own.dtype).view(own.shape) for one in gathered]
        return add_in_order(found)

    def watch(self) -> None:
        """From now on this process ends when another rank does."""
        self._line.watch()

    def send(self, what: str, **values: Any) -> None:
        """Tell the other ranks what comes."""
        forgotten, self._forgotten = self._forgotten, []
        self._line.send(json.dumps({"what": what, "forget": forgotten} | values).encode())

    def receive(self) -> dict[str, Any]:
        """What rank 0 sent."""
        found: dict[str, Any] = json.loads(self._line.receive())
        return found

    def gathered(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """An array of each rank, all of one shape."""
        gathered = self._line.gather(values.tobytes())
        return [np.frombuffer(one, values.dtype).reshape(values.shape) for one in gathered]

    def share(self, values: NDArray[Any]) -> None:
        """Send rank 0's array to the others, which know its type and shape."""
        self._line.send(values.tobytes())

    def shared(self, kind: str, shape: Sequence[int]) -> NDArray[Any]:
        """The array that rank 0 shares."""
        return np.frombuffer(self._line.receive(), kind).reshape(shape)

    def leave(self) -> None:
        """End the other ranks. For rank 0."""
        self._line.leave()

    def forget(self, number: int) -> None:
        """Let the other ranks free a cache with the next call. Python may call this at any time."""
        self._forgotten.append(number)

    def part(self, values: Values) -> Values:
        """This rank's KV heads of keys and values."""
        return np.ascontiguousarray(np.split(values, self.ranks, 2)[self.rank])


class TeamCache:
    """The KV cache of one sequence, whose heads are spread over the ranks: rank 0's handle of it."""

    def __init__(self, team: Team, own: DeviceKVCache, number: int) -> None:
        self.team, self.own, self.number = team, own, number
        weakref.finalize(self, team.forget, number)

    @property
    def slot_bytes(self) -> int:
        return self.own.slot_bytes * self.team.ranks

    @property
    def fixed_bytes(self) -> int:
        return self.own.fixed_bytes * self.team.ranks

    def reserve(self, slots: int) -> None:
        self._all("reserve", slots)

    def reset(self) -> None:
        self._all("reset")

    def compact(self, start: int, sources: list[int]) -> None:
        self._all("compact", start, [int(source) for source in sources])

    def clear(self, start: int, stop: int | None = None) -> None:
        self._all("clear", start, stop)

    def _all(self, method: str, *values: Any) -> None:
        self.team.send("cache", cache=self.number, method=method, values=values)
        getattr(self.own, method)(*values)

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.team.send("read", cache=self.number, index=index)
        keys, values = (np.concatenate(self.team.gathered(part), 1) for part in self.own.read(index))
        return keys, values

    def values(self, start: int, stop: int) -> Values:
        self.team.send("values", cache=self.number, start=start, stop=stop)
        return np.concatenate(self.team.gathered(self.own.values(start, stop)), 2)

    def fill(self, start: int, values: Values) -> None:
        self.team.send("fill", cache=self.number, start=start, shape=values.shape, type=str(values.dtype))
        self.team.share(values)
        self.own.fill(start, self.team.part(values))


class TeamEngine:
    """An engine that runs on all ranks: rank 0's handle of it."""

    def __init__(self, team: Team, own: DeviceEngine, numbers: "list[int]") -> None:
        """``numbers`` has the number of the last cache, which both engines count on."""
        self.team, self.own, self._numbers = team, own, numbers
        self.manifest, self.prefill_chunk = own.manifest, own.prefill_chunk
        self.last_positions = own.last_positions

    @property
    def chooses(self) -> bool:
        return self.own.chooses

    @property
    def draft_chain(self) -> DraftChain | None:
        return self._chain

    def new_kv_caches(self, count: int = 1) -> Sequence[KVCache]:
        first = self._numbers[0]
        self._numbers[0] += count
        self.team.send("caches", engine=self.own.is_draft, count=count, first=first)
        return [TeamCache(self.team, own, first + at) for at, own in enumerate(self.own.new_kv_caches(count))]

    def prepare(self, kv_caches: Sequence[KVCache]) -> None:
        caches = [_of_team(kv_cache) for kv_cache in kv_caches]
        self.team.send("prepare", engine=self.own.is_draft, caches=[cache.number for cache in caches])
        self.own.prepare([cache.own for cache in caches])

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        self.team.send("forward", engine=self.own.is_draft, calls=[_to_json(call) for call in calls])
        return self.own.forward([call._replace(kv_cache=_of_team(call.kv_cache).own) for call in calls])

    def work(self, calls: Sequence[Call]) -> Work:
        return self.own.work([call._replace(kv_cache=_of_team(call.kv_cache).own) for call in calls])

    def _chain(self, kv_cache: KVCache, token: int, slot: int, count: int) -> StepOutputs:
        cache = _of_team(kv_cache)
        self.team.send("chain", cache=cache.number, token=int(token), slot=int(slot), count=int(count))
        return self.own.draft_chain(cache.own, token, slot, count)


def lead(team: Team, verify: DeviceEngine, draft: DeviceEngine | None) -> tuple[TeamEngine, TeamEngine | None]:
    """Rank 0's engines. When its process ends, so do the others."""
    team.watch()
    atexit.register(team.leave)
    numbers = [0]
    return TeamEngine(team, verify, numbers), None if draft is None else TeamEngine(team, draft, numbers)


def follow(team: Team, verify: DeviceEngine, draft: DeviceEngine | None) -> NoReturn:
    """Do what rank 0 says, until that ends, and this process with it.

    Signals are for rank 0 to answer: torchrun, and a terminal, send them to all ranks, and rank 0 may have something to finish.
    """
    with suppress(ValueError):  # only the main thread may do that
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    team.watch()
    caches: dict[int, DeviceKVCache] = {}
    while True:
        order = team.receive()
        for number in order["forget"]:
            caches.pop(number, None)
        engine = draft if order.get("engine") else verify
        assert engine is not None
        what = order["what"]
        if what == "caches":
            caches |= dict(enumerate(engine.new_kv_caches(order["count"]), order["first"]))
        elif what == "prepare":
            engine.prepare([caches[number] for number in order["caches"]])
        elif what == "forward":
            engine.forward([_from_json(call, caches) for call in order["calls"]])
        elif what == "chain":
            assert draft is not None
            draft.draft_chain(caches[order["cache"]], order["token"], order["slot"], order["count"])
        else:
            _change(team, caches[order["cache"]], order)


def _change(team: Team, cache: DeviceKVCache, order: dict[str, Any]) -> None:
    """Change a cache, or give rank 0 what it holds."""
    what = order["what"]
    if what == "cache":
        getattr(cache, order["method"])(*order["values"])
    elif what == "read":
        for part in cache.read(order["index"]):
            team.gathered(part)
    elif what == "values":
        team.gathered(cache.values(order["start"], order["stop"]))
    elif what == "fill":
        cache.fill(order["start"], team.part(team.shared(order["type"], order["shape"])))


def _of_team(kv_cache: KVCache) -> TeamCache:
    assert isinstance(kv_cache, TeamCache)
    return kv_cache


def _to_json(call: Call) -> dict[str, Any]:
    return {
        "cache": _of_team(call.kv_cache).number,
        "tokens": [int(token) for token in call.tokens],
        "positions": [int(position) for position in call.positions],
        "slot": int(call.slot),
        "context_len": int(call.context_len),
        "tree_mask": None if call.tree_mask is None else call.tree_mask.astype(int).tolist(),
        "logits": call.logits,
    }


def _from_json(call: dict[str, Any], caches: dict[int, DeviceKVCache]) -> Call:
    mask = None if call["tree_mask"] is None else np.asarray(call["tree_mask"], np.bool_)
    rest = {name: call[name] for name in ("tokens", "positions", "slot", "context_len", "logits")}
    return Call(caches[call["cache"]], tree_mask=mask, **rest)
