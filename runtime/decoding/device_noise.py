"""The Gumbel noise of :class:`~eesd.runtime.decoding.sampling.GumbelNoise`, made on a device.

Philox4x64-10 (Salmon et al. 2011) maps a counter and a key to four random numbers of 64 bits. torch has no arithmetic of
unsigned numbers, but sums and products of int64 wrap, so their bits are the same. Only a product's upper 64 bits are made of
its parts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 16
"""Positions whose noise is made together: about 250 small kernels, however many positions there are."""
ROUNDS = 10
LOW = 0xFFFFFFFF


def _signed(value: int) -> int:
    """The int64 with the lower 64 bits of ``value``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


class DeviceNoise:
    """The noise of each position of one request on one device."""

    def __init__(self, seed: int, size: int, device: torch.device) -> None:
        """``size`` is V."""
        self._seed, self._size, self._device = seed, size, device
        self._blocks: dict[int, Tensor] = {}
        """By number of the block: noise [BLOCK, V]."""

    def rows(self, positions: list[int], first: int) -> Tensor:
        """g [n, V] float64 for the tokens at ``positions``. None before ``first`` will be asked for again."""
        self._blocks = {number: block for number, block in self._blocks.items() if number >= first // BLOCK}
        return torch.stack([self._block(position // BLOCK)[position % BLOCK] for position in positions])

    def _block(self, number: int) -> Tensor:
        if number not in self._blocks:
            bits = random_bits(self._seed, number * BLOCK, BLOCK, self._size, self._device)
            self._blocks[number] = -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-52))
        return self._blocks[number]


def random_bits(seed: int, first: int, count: int, size: int, device: torch.device) -> Tensor:
    """The 52 random bits of each token at ``count`` positions from ``first`` on, [count, size] int64.

    They are those of ``numpy.random.Philox(key=[seed, 0], counter=[0, 0, position, 0])``, whose counter is one higher when the
    first numbers are made.
    """
    groups = -(-size // 4)
    shape = (count, groups)
    index = torch.arange(1, groups + 1, device=device).expand(shape)
    position = torch.arange(first, first + count, device=device)[:, None].expand(shape)
    even, odd = torch.stack((index, position)), torch.zeros((2, *shape), dtype=torch.int64, device=device)
    key = [seed, 0]
    for _ in range(ROUNDS):
        high, low = _products(even)
        even, odd = high.flip(0) ^ odd ^ _pair(key, device), low.flip(0)
        key = [part + step for part, step in zip(key, KEY_STEPS, strict=True)]
    numbers = torch.stack((even[0], odd[0], even[1], odd[1]), -1).reshape(count, 4 * groups)[:, :size]
    return (numbers >> 12) & (2**52 - 1)


def _pair(values: Sequence[int], device: torch.device) -> Tensor:
    """Two numbers of 64 bits as int64 [2, 1, 1]. Filled on the device: a copy from the host would wait."""
    return torch.stack([torch.full((1, 1), _signed(value), dtype=torch.int64, device=device) for value in values])


def _products(factors: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of the products of ``factors`` [2, ...] and the two multipliers."""
    device = factors.device
    own_high, own_low = factors >> 32 & LOW, factors & LOW
    high, low = _pair([value >> 32 for value in MULTIPLIERS], device), _pair([value & LOW for value in MULTIPLIERS], device)
    middle = own_high * low + (own_low * low >> 32 & LOW)
    other = own_low * high + (middle & LOW)
    upper = own_high * high + (middle >> 32 & LOW) + (other >> 32 & LOW)
    return upper, factors * _pair(MULTIPLIERS, device)
