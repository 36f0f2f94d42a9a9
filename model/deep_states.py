"""What the draft knows of the deep layers: states of committed tokens, which verify writes into a cache of their own.

Verify has run all layers. It projects the states after some of them to a *deep state*, 2 KV D numbers for each token, and
writes it into the token's slot of the deep cache, as if these were keys and values. A draft step reads the deep state of the
token before its first one, adds it, projected back, behind the head's last attention, and copies it into the slots of its own
tokens. So all steps of a round read the deep state of the token before the root, the last one that verify had seen, and need to
be told nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eesd.common.geometry import Geometry
from eesd.model.decoder import KV, Inputs, make_norm, write_cache


class DeepState(nn.Module):
    """What one deep layer adds to the deep state."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.norm = make_norm(geometry)
        self.state_proj = nn.Linear(geometry.hidden_size, 2 * geometry.num_kv_heads * geometry.head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, 2 KV D] for the hidden state x [B, n, hidden] after the layer."""
        state: Tensor = self.state_proj(self.norm(x))
        return state


def deep_states(projections: nn.ModuleList, hidden: Sequence[Tensor]) -> Tensor:
    """The deep states [B, n, 2 KV D] of tokens, from their hidden states after each deep layer, each [B, n, hidden]."""
    state: Tensor
    state, *others = [project(x) for project, x in zip(projections, hidden, strict=True)]
    for other in others:
        state = state + other
    return state


def write_deep_states(state: Tensor, inputs: Inputs, cache: KV) -> KV:
    """Write deep states [B, n, 2 KV D] into the slots of their tokens."""
    kv_heads, size = cache[0].shape[1], cache[0].shape[3]
    keys, values = torch.split(state.view(*state.shape[:2], 2 * kv_heads, size).transpose(1, 2), kv_heads, 1)
    return write_cache(cache[0], keys, inputs.write_indices), write_cache(cache[1], values, inputs.write_indices)


def carry_deep_states(inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
    """Read the deep state before the first of n tokens, and copy it into their slots.

    Returns:
        The deep state [B, 1, 2 KV D], zero where there is no token before, and the written caches.
    """
    is_there = inputs.write_indices > 0
    before = (inputs.write_indices - is_there.long())[:, None, None, None]
    is_there = is_there.to(cache[0].dtype)[:, None, None, None]
    found = [torch.gather(part, 2, before.expand(-1, part.shape[1], 1, part.shape[3])) * is_there for part in cache]
    every = (inputs.position_ids * 0).to(cache[0].dtype)[:, None, :, None]  # [B, 1, n, 1]
    keys, values = (write_cache(part, one + every, inputs.write_indices) for part, one in zip(cache, found, strict=True))
    return torch.cat(found, 1).transpose(1, 2).flatten(2), (keys, values)
