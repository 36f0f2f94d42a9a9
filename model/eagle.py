"""A head of EAGLE-3 (arXiv 2503.01840): one block that reads a token's embedding and a state of the
token before it.

Of the token before the root that state is what verify knows: hidden states of three layers, fused
by a product. Behind a drafted token it is what the head itself computed there. Both lie in the slot
of the token that they are about, in caches of states. So a draft step reads the slot of the token
that each of its tokens follows, and writes its own; verify writes the fused states over what was
drafted, and the block's keys and values from them. No graph has an input that others do not have,
and whatever moves or keeps caches does the same to states.

The first token of a text follows none, so the published heads have no keys for it: only it sees its
own slot.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from eesd.common.geometry import ExitConfig, Geometry, state_caches
from eesd.common.manifest import MASKED
from eesd.model.decoder import KV, Block, Inputs, RMSNorm, fold_mask, numbers
from eesd.model.exit_head import ExitHead, write_states
from eesd.model.rotary import rotary_tables


class EagleBlock(Block):
    """A decoder block whose attention reads an embedding and a state, each behind a norm, side by
    side."""

    def __init__(self, geometry: Geometry, normed_residual: bool) -> None:
        super().__init__(geometry)
        self.hidden_norm = RMSNorm(geometry.hidden_size, geometry.rms_norm_eps)
        self.normed_residual = normed_residual
        attention = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            layer: nn.Linear = getattr(attention, name)
            setattr(
                attention,
                name,
                nn.Linear(2 * geometry.hidden_size, layer.out_features, bias=geometry.qkv_bias),
            )

    def predict(
        self, embedded: Tensor, state: Tensor, inputs: Inputs, cache: KV
    ) -> tuple[Tensor, KV]:
        """The block's output [B, n, hidden], for embeddings and states [B, n, hidden], and the
        written cache."""
        normed = self.hidden_norm(state)
        attended, cache = self.self_attn(
            torch.cat((self.input_layernorm(embedded), normed), -1), inputs, cache
        )
        return self.feed_forward((normed if self.normed_residual else state) + attended), cache

    def write_keys(self, embedded: Tensor, state: Tensor, inputs: Inputs, cache: KV) -> KV:
        """Write keys and values only."""
        read = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)
        return self.self_attn.write_kv(read, inputs, cache)


class EagleHead(ExitHead):
    """The modules of an EAGLE-3 head. Its caches are those of its block, then those of states.

    Attributes:
        cos, sin: Its rotary tables [S, D/2], float32.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, geometry: Geometry, exit_config: ExitConfig, slots: int) -> None:
        super().__init__(geometry, exit_config)
        eagle, hidden = exit_config.eagle, geometry.hidden_size
        assert eagle is not None
        self.kv_heads, self.group = (
            eagle.block.num_kv_heads,
            eagle.block.num_heads // eagle.block.num_kv_heads,
        )
        joined, norms = len(eagle.layers) * hidden, eagle.fuse_norms
        self.fuse_norm = nn.ModuleList(
            RMSNorm(joined // norms, eagle.block.rms_norm_eps) for _ in range(norms)
        )
        self.fuse_proj = nn.Linear(joined, hidden, bias=False)
        self.normed_output = eagle.normed_output
        self.blocks = nn.ModuleList([EagleBlock(eagle.block, eagle.normed_residual)])
        self.norm = RMSNorm(hidden, eagle.block.rms_norm_eps)
        for name, table in zip(("cos", "sin"), rotary_tables(eagle.block, slots), strict=True):
            self.register_buffer(name, torch.tensor(table))
        self.spare = (
            state_caches(geometry, exit_config) * 2 * geometry.num_kv_heads * geometry.head_dim
            - hidden
        )

    def forward(
        self, x: Tensor, inputs: Inputs, caches: list[KV], lm_head: nn.Linear
    ) -> tuple[Tensor, list[KV]]:
        """Draft from the embeddings x [B, n, hidden]; see :meth:`ExitHead.forward`. It has an LM
        head of its own."""
        state = self._states_before(inputs, caches[1:])
        found, cache = self._block.predict(x, state, self._own_inputs(inputs), caches[0])
        normed = self.norm(found)
        written = write_states(
            pad(normed if self.normed_output else found, (0, self.spare)), inputs, caches[1:]
        )
        assert self.lm_head is not None
        return self.lm_head(normed), [cache, *written]

    def write_states(
        self, embedded: Tensor, hidden: Sequence[Tensor], inputs: Inputs, caches: list[KV]
    ) -> list[KV]:
        """Write the states that verify knows, and the block's keys and values; see
        :meth:`ExitHead.write_states`."""
        joined = torch.cat(list(hidden), -1)
        if self.fuse_norm:
            parts = zip(self.fuse_norm, joined.chunk(len(self.fuse_norm), -1), strict=True)
            joined = torch.cat([norm(part) for norm, part in parts], -1)
        fused = self.fuse_proj(joined)
        written = write_states(pad(fused, (0, self.spare)), inputs, caches[1:])
        state = self._states_before(inputs, written)
        return [
            self._block.write_keys(embedded, state, self._own_inputs(inputs), caches[0]),
            *written,
        ]

    @property
    def _block(self) -> EagleBlock:
        [block] = self.blocks
        assert isinstance(block, EagleBlock)
        return block

    def _own_inputs(self, inputs: Inputs) -> Inputs:
        """The inputs of the block: its own tables, and a mask that hides the first slot from all
        but its own token."""
        mask, slots = inputs.attn_mask, numbers(inputs.attn_mask, 3)
        hidden = (slots == 0) & (_own_slots(inputs) > 0)[:, None, :, None]
        mask = torch.where(hidden, MASKED, mask)
        own = replace(
            inputs,
            cos=self.cos.to(mask.dtype),
            sin=self.sin.to(mask.dtype),
            attn_mask=mask,
            query_mask=None,
            near=None,
        )
        return own if inputs.query_mask is None else fold_mask(own, self.group, self.kv_heads)

    def _states_before(self, inputs: Inputs, caches: Sequence[KV]) -> Tensor:
        """The states [B, n, hidden] of the tokens that each token follows, zeros for one that
        follows none."""
        slots, mask = numbers(inputs.attn_mask, 3), inputs.attn_mask[:, 0]
        before = (mask > MASKED / 2) & (slots < _own_slots(inputs)[:, :, None])
        # exact: slots are far fewer than 2 ** 24.
        parent = torch.where(before, slots.float(), -1.0).amax(-1).long()
        there, at = (parent >= 0).to(mask.dtype)[:, :, None], parent.clamp_min(0)[:, None, :, None]
        found = [
            torch.gather(part, 2, at.expand(-1, part.shape[1], -1, part.shape[3]))
            for cache in caches
            for part in cache
        ]
        states = torch.cat(found, 1).transpose(1, 2).flatten(2)
        return states[:, :, : states.shape[2] - self.spare] * there


def _own_slots(inputs: Inputs) -> Tensor:
    """The slot of each token [B, n]."""
    return inputs.write_indices[:, None] + numbers(inputs.attn_mask, 2)


def make_head(geometry: Geometry, exit_config: ExitConfig, slots: int) -> ExitHead:
    """The modules of a head of either kind, without values; ``slots`` is S, which only EAGLE-3's
    tables need."""
    return (
        EagleHead(geometry, exit_config, slots)
        if exit_config.eagle
        else ExitHead(geometry, exit_config)
    )
