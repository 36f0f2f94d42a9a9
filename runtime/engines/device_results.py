"""Copy a call's results from a device to the host."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.runtime.engines.device import DeviceStream


def no_logits() -> NDArray[np.float32]:
    raise AssertionError("a chain that the device drafted has no logits")


def pack_results(results: Sequence[Tensor]) -> Tensor:
    """Return the results that the host always needs, as one float32 tensor. float32 represents
    every id below 2^24 exactly.

    Args:
        results: The results of a :data:`~eesd.runtime.engines.device.PreparedCall`.

    Returns:
        For a draft call, the ids and then the log-probabilities of the candidates, [2 B, n, K]. For
        a verify call, the most likely tokens [B, R, 1].
    """
    if len(results) == 2:  # a kernel has packed the results
        return results[1]
    if len(results) == 1:
        return results[0].argmax(-1, keepdim=True).float()
    return torch.cat((results[1].float(), results[2]))


def to_host(tensor: Tensor | None, stream: DeviceStream) -> Tensor | None:
    """Begin to copy a tensor to the host, in the current stream. On the CPU nothing is copied."""
    if tensor is None or not stream.on_gpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def fetch(make: Callable[[], Tensor], stream: DeviceStream) -> NDArray[np.float32]:
    """Make a float32 tensor in a stream, and copy it to the host. On the CPU, the array shares the
    memory of the tensor."""
    with stream.activate():
        tensor = to_host(make(), stream)
    stream.synchronize()
    assert tensor is not None
    array: NDArray[np.float32] = tensor.numpy()
    return array
