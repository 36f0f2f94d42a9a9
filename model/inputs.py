"""Make the inputs of a pass, which are positions, a causal mask, and empty caches."""

import torch

from eesd.common.geometry import Geometry
from eesd.common.manifest import MASKED
from eesd.model.rotary import rotary_tables
from eesd.model.torch_ops import KV, Inputs


def causal_inputs(
    geometry: Geometry, batch: int, tokens: int, slots: int, start: int = 0
) -> Inputs:
    """Return float32 inputs for consecutive tokens. Each token sees itself and all earlier slots.

    Args:
        geometry: Geometry of the model.
        batch: B.
        tokens: n.
        slots: S, the length of the caches.
        start: Slot and position of the first token.
    """
    cos, sin = map(torch.tensor, rotary_tables(geometry, slots))
    position = torch.arange(start, start + tokens)
    hidden = torch.arange(slots)[None, :] > position[:, None]
    mask = torch.zeros(tokens, slots).masked_fill(hidden, MASKED)
    return Inputs(
        cos,
        sin,
        position.expand(batch, -1),
        torch.full((batch,), start),
        mask.expand(batch, 1, tokens, slots),
    )


def empty_caches(geometry: Geometry, batch: int, slots: int, caches: int | None = None) -> list[KV]:
    """Create zero-filled caches. If ``caches`` is None, the number of caches is the number that the
    base layers need."""
    shape = (batch, geometry.num_kv_heads, slots, geometry.head_dim)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(caches or geometry.num_caches)]
