"""The exit head: predicts the next token from the hidden state after layer N.

It consists of E decoder blocks, a norm, and the base model's LM head or its own. With a draft
vocabulary it predicts only Vd of the V tokens. It is stored in a checkpoint of its own:
``exit_head_file.py``. Without blocks it has no caches: that is the early exit of models that were
trained for it (LayerSkip, arXiv 2404.16710).

A head may also know something of the deep layers. Verify has run all layers: it projects the states
after some of them to a *deep state*, 2 KV D numbers for each token, and writes it into the token's
slot of the deep cache, as if these were keys and values. A draft step reads the deep state of the
token before its first one, adds it, projected back, after the head's last attention, and copies it
into the slots of its own tokens. So all steps of a round read the deep state of the token before
the root, the last one that verify had seen, and need to be told nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eesd.common.geometry import ExitConfig, Geometry, draft_columns
from eesd.common.weights import DRAFT_VOCAB
from eesd.model.decoder import KV, Block, Inputs, make_norm, write_cache


class DeepState(nn.Module):
    """What one deep layer adds to the deep state."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.norm = make_norm(geometry)
        self.state_proj = nn.Linear(
            geometry.hidden_size, 2 * geometry.num_kv_heads * geometry.head_dim, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, 2 KV D] for the hidden state x [B, n, hidden] after the layer."""
        state: Tensor = self.state_proj(self.norm(x))
        return state


def deep_states(projections: nn.ModuleList, hidden: Sequence[Tensor]) -> Tensor:
    """The deep states [B, n, 2 KV D] of tokens, from their hidden states after each deep layer,
    each [B, n, hidden]."""
    state: Tensor
    state, *others = [project(x) for project, x in zip(projections, hidden, strict=True)]
    for other in others:
        state = state + other
    return state


def write_states(states: Tensor, inputs: Inputs, caches: Sequence[KV]) -> list[KV]:
    """Write states [B, n, 2 C KV D] of tokens into their slots of C caches: keys, then values, of
    one cache after another."""
    kv_heads, size = caches[0][0].shape[1], caches[0][0].shape[3]
    parts = torch.split(states.view(*states.shape[:2], -1, size).transpose(1, 2), kv_heads, 1)
    tensors = [tensor for cache in caches for tensor in cache]
    written = [
        write_cache(tensor, part, inputs.write_indices)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
    return list(zip(written[::2], written[1::2], strict=True))


def carry_deep_states(inputs: Inputs, cache: KV) -> tuple[Tensor, KV]:
    """Read the deep state before the first of n tokens, and copy it into their slots.

    Returns:
        The deep state [B, 1, 2 KV D], zero where there is no token before, and the written caches.
    """
    is_there = inputs.write_indices > 0
    before = (inputs.write_indices - is_there.long())[:, None, None, None]
    is_there = is_there.to(cache[0].dtype)[:, None, None, None]
    found = [
        torch.gather(part, 2, before.expand(-1, part.shape[1], 1, part.shape[3])) * is_there
        for part in cache
    ]
    every = (inputs.position_ids * 0).to(cache[0].dtype)[:, None, :, None]  # [B, 1, n, 1]
    keys, values = (
        write_cache(part, one + every, inputs.write_indices)
        for part, one in zip(cache, found, strict=True)
    )
    return torch.cat(found, 1).transpose(1, 2).flatten(2), (keys, values)


class ExitHead(nn.Module):
    """The modules of an exit head. Each block has a pair of caches, like a base layer.

    Attributes:
        draft_vocab: Ids of the draft vocabulary [Vd], int64, ascending: column i of the logits is
            for the token with the i-th id. None: for token i.
    """

    draft_vocab: Tensor | None

    def __init__(self, geometry: Geometry, exit_config: ExitConfig) -> None:
        super().__init__()
        self.exit_config = exit_config
        self.blocks = nn.ModuleList(
            Block(geometry.dense, kind) for kind in geometry.head_kinds(exit_config.blocks)
        )
        self.norm = make_norm(geometry)
        columns = draft_columns(geometry, exit_config)
        self.lm_head = (
            nn.Linear(geometry.hidden_size, columns, bias=False)
            if exit_config.own_lm_head
            else None
        )
        ids = (
            torch.zeros(exit_config.draft_vocab, dtype=torch.int64)
            if exit_config.draft_vocab
            else None
        )
        self.register_buffer(DRAFT_VOCAB, ids)
        self.deep = nn.ModuleList(DeepState(geometry) for _ in exit_config.deep)
        width = 2 * geometry.num_kv_heads * geometry.head_dim
        self.deep_in_proj: nn.Module | None = (
            nn.Linear(width, geometry.hidden_size, bias=False) if exit_config.deep else None
        )

    def forward(
        self, x: Tensor, inputs: Inputs, caches: list[KV], lm_head: nn.Linear
    ) -> tuple[Tensor, list[KV]]:
        """Predict from the hidden state x [B, n, hidden] after layer N, with the caches of the
        head.

        ``lm_head`` is the base model's; a head with its own does not use it. Returns logits
        [B, n, V], with a draft vocabulary [B, n, Vd], and the written caches.
        """
        state, carried = None, []
        if self.exit_config.deep:
            state, cache = carry_deep_states(inputs, caches[-1])
            carried.append(cache)
        x, written = self.lm_head_input(x, inputs, caches[: len(self.blocks)], state)
        if self.lm_head is not None:
            return self.lm_head(x), written + carried
        if self.draft_vocab is None:
            return lm_head(x), written + carried
        return linear(x, self.rows_of(lm_head.weight)), written + carried

    def rows_of(self, lm_head: Tensor) -> Tensor:
        """The rows of an LM head's weight [V, hidden] that the head's logits are made from: those
        of the draft vocabulary."""
        return lm_head if self.draft_vocab is None else lm_head[self.draft_vocab]

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids for columns of the logits."""
        if self.draft_vocab is None:
            return columns
        return self.draft_vocab[columns]

    def columns(self, tokens: Tensor) -> Tensor:
        """Columns of the logits for token ids; -1 for tokens that the draft vocabulary does not
        have."""
        if self.draft_vocab is None:
            return tokens
        columns = torch.searchsorted(self.draft_vocab, tokens.long().contiguous()).clamp_max(
            len(self.draft_vocab) - 1
        )
        return torch.where(self.draft_vocab[columns] == tokens, columns, -1)

    def lm_head_input(
        self, x: Tensor, inputs: Inputs, caches: list[KV], state: Tensor | None = None
    ) -> tuple[Tensor, list[KV]]:
        """Run blocks and norm. Returns the input of the LM head [B, n, hidden] and the written
        caches.

        With deep layers, ``state`` [B, n, 2 KV D], or [B, 1, 2 KV D], is the deep state before each
        token's root. It is added behind the last attention, so no key or value depends on it:
        verify, which does not know it, writes the same ones.
        """
        x, written = self.attend(x, inputs, caches)
        return self.finish(x, state), written

    def attend(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> tuple[Tensor, list[KV]]:
        """Run all that needs the other tokens: up to behind the last attention, for x
        [B, n, hidden]."""
        if not self.blocks:
            return x, []
        written = []
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        x, cache = self._last.attend(x, inputs, caches[-1])
        return x, [*written, cache]

    def finish(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Run the rest, for each token alone: x and the deep state before its root, both with the
        same leading dimensions."""
        if self.deep_in_proj is not None and state is not None:
            x = x + self.deep_in_proj(state)
        features: Tensor = self.norm(self._last.feed_forward(x) if self.blocks else x)
        return features

    @property
    def _last(self) -> Block:
        last = self.blocks[-1]
        assert isinstance(last, Block)
        return last

    def write_kv(self, x: Tensor, inputs: Inputs, caches: list[KV]) -> list[KV]:
        """Write the caches of all blocks for x [B, n, hidden], without predicting.

        The first E - 1 blocks run; the last one only computes its keys and values. The verify pass
        calls this with its hidden state after layer N, so that the draft finds filled caches.
        """
        if not self.blocks:
            return []
        written = []
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            x, cache = block(x, inputs, cache)
            written.append(cache)
        return [*written, self._last.write_kv(x, inputs, caches[-1])]

    def write_states(
        self, embedded: Tensor, hidden: Sequence[Tensor], inputs: Inputs, caches: list[KV]
    ) -> list[KV]:
        """Write what verify knows of the layers that the head reads: here the deep cache. Verify
        calls this.

        Args:
            embedded: The embeddings of the tokens [B, n, hidden], for heads that read them.
            hidden: Their states after each of the layers, [B, n, hidden].
            inputs: Shared inputs.
            caches: The head's caches that are not written yet.
        """
        return write_states(deep_states(self.deep, hidden), inputs, caches[-1:])
