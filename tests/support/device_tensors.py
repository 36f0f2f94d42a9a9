"""Tensors on the devices of ``fake_cuda.py``. torch's operations on these tensors are put into the
current stream and run later.

The shape of a result is computed at once. Its values are computed later on the CPU, in memory of
the device's arena. A tensor that a stream has not computed yet therefore holds garbage. Views are
made at once, because they compute nothing.

Copies follow CUDA. The host's values are read at the time of the copy from pinned memory, and at
once from other host memory. A non-blocking copy to the host leaves garbage until the host has
waited. A copy between devices makes both streams wait, as in torch. Operations that a GPU refuses
are errors. Examples are operands on two devices, and reading a device's tensor as an array.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from support.fake_cuda import Block, Machine, Stream

ATEN = torch.ops.aten


class DeviceTensor(Tensor):
    """A tensor on a device. ``memory`` is its memory as a CPU tensor, and ``block`` keeps the
    memory allocated."""

    memory: Tensor
    block: Block
    _index: int

    @staticmethod
    def __new__(cls, inner: Tensor, index: int, block: Block) -> "DeviceTensor":
        offset = inner.storage_offset() - block.offset // inner.itemsize
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=offset,
            dtype=inner.dtype,
            device=torch.device("cpu"),
        )
        made.memory = inner
        made.block = block
        made._index = index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def cpu(self) -> Tensor:  # type: ignore[override]
        host: Tensor = ATEN._to_copy.default(self, device=torch.device("cpu"))
        return host

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.dtype} {list(self.shape)} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} on a device that is not installed")


class DeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends operations on a machine's devices to its streams."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        on = {
            one._index for one in tree_flatten((args, kwargs))[0] if isinstance(one, DeviceTensor)
        }
        wanted = kwargs.get("device")
        if not on and (wanted is None or torch.device(wanted).type == "cpu"):
            return self._on_host(func, args, kwargs)
        if func is ATEN.copy_.default:
            return self._copy(*args, **kwargs)
        if func is ATEN._to_copy.default and wanted is not None:
            return self._transfer(*args, **kwargs)
        if wanted is not None:
            on = {torch.device(wanted).index or 0}
        if len(on) > 1 or (
            not wanted and any(_is_host(one) for one in tree_flatten((args, kwargs))[0])
        ):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        return self._on_device(func, args, kwargs, on.pop())

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is ATEN._pin_memory.default:
            return self.machine.pin(args[0])
        if func is ATEN.is_pinned.default:
            return self.machine.is_pinned(args[0])
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        return self.machine.pin(result) if pinned else result

    def _on_device(self, func: Any, args: Any, kwargs: Any, index: int) -> Any:
        stream = self.machine.own.current[index]
        inner, options = tree_map(_inner, (args, kwargs))
        if "device" in options:
            options = {**options, "device": torch.device("cpu"), "pin_memory": False}
        returned = func._schema.returns[0].alias_info
        if returned is not None and returned.is_write:
            self.machine.enqueue(stream, lambda: func(*inner, **options))
            return args[0]
        if returned is not None:
            views = func(*inner, **options)
            # Torch requires that a view has its tensor's class.
            with torch.inference_mode(args[0].is_inference()):
                return tree_map(lambda view: DeviceTensor(view, index, args[0].block), views)
        on_meta = {name: "meta" if name == "device" else one for name, one in options.items()}
        shapes = func(*tree_map(_meta, inner), **on_meta)
        result = tree_map(lambda shape: self.empty(shape, index), shapes)
        if "empty" not in func.name():
            outs = [out.memory for out in tree_flatten(result)[0]]
            self.machine.enqueue(stream, lambda: _fill(outs, func(*inner, **options)))
        return result

    def empty(self, like: Tensor, index: int) -> DeviceTensor:
        """Returns a tensor that has the shape and the type of ``like`` and is filled with
        garbage."""
        block = self.machine.allocate(index, like.nbytes)
        return DeviceTensor(
            self.machine.memory.view(
                block.offset, like.shape, like.contiguous().stride(), like.dtype
            ),
            index,
            block,
        )

    def _transfer(
        self, source: Tensor, *, device: Any, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        target = torch.device(device)
        like = torch.empty(source.shape, dtype=options.get("dtype") or source.dtype, device="meta")
        result: Tensor
        if target.type == "cpu":
            result = torch.empty_like(like, device="cpu")
        else:
            result = self.empty(like, target.index or 0)
        self._copy(result, source, non_blocking)
        return result

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        machine = self.machine
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            self._copy_between(target, source)
        elif isinstance(target, DeviceTensor):
            stream = machine.own.current[target._index]
            out = target.memory
            if not machine.is_pinned(source) and not stream.graph:
                source = source.clone()
            host = self._host(stream, source)
            machine.enqueue(stream, lambda: out.copy_(host))
            self._wait(stream, non_blocking)
        else:
            assert isinstance(source, DeviceTensor)
            stream = machine.own.current[source._index]
            values = source.memory
            host = self._host(stream, target)
            machine.enqueue(stream, lambda: host.copy_(values), host=host)
            self._wait(stream, non_blocking and machine.is_pinned(target))
        return target

    def _copy_between(self, target: DeviceTensor, source: DeviceTensor) -> None:
        """Copy in the current stream of the source's device. It waits for the target's stream,
        which then waits for the copy."""
        machine = self.machine
        out = target.memory
        values = source.memory
        ours = machine.own.current[source._index]
        theirs = machine.own.current[target._index]
        machine.join(ours, theirs)
        machine.enqueue(ours, lambda: out.copy_(values))
        machine.join(theirs, ours)

    def _host(self, stream: Stream, host: Tensor) -> Tensor:
        return self.machine.lasting(host) if stream.graph else host

    def _wait(self, stream: Stream, non_blocking: bool) -> None:
        if not non_blocking:
            stream.synchronize()


class PinnedTensors(TorchFunctionMode):
    """Replaces ``torch.tensor(..., pin_memory=True)``, which calls the driver without the
    dispatcher.

    The function itself is not replaced. At the first ``with torch.device(...)``, torch records the
    functions that make tensors, so it would not recognize its own ``torch.tensor`` in later tests.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.tensor or not (kwargs or {}).get("pin_memory"):
            return func(*args, **(kwargs or {}))
        if isinstance(args[0], np.ndarray):
            # This error was seen on an H200 with torch 2.11.
            raise RuntimeError("Can't pin tensor constructed from numpy")
        return self.machine.pin(func(*args, **{**kwargs, "pin_memory": False}))


@contextmanager
def on_devices(machine: Machine) -> Iterator[None]:
    """Let the calling thread have tensors on a machine's devices."""
    with PinnedTensors(machine), DeviceMode(machine):
        yield


def _fill(outs: list[Tensor], results: Any) -> None:
    for out, result in zip(outs, tree_flatten(results)[0], strict=True):
        out.copy_(result)


def _is_host(one: Any) -> bool:
    return isinstance(one, Tensor) and not isinstance(one, DeviceTensor) and one.dim() > 0


def _inner(one: Any) -> Any:
    return one.memory if isinstance(one, DeviceTensor) else one


def _meta(one: Any) -> Any:
    if isinstance(one, Tensor):
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
    return one
