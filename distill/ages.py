"""A head with deep layers in one parallel pass, although each round makes its committed tokens deep.

A token drafted behind the root r attends to the tokens before r with the keys and values that verify wrote of their deep
states, and from r on with those of the draft. So what it computes depends on its *age*, the number of drafted tokens before it.
A pass gives each position a root of its own, and so one age: it costs one attention over both kinds of keys.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.model.decoder import Block, Inputs, attend, rotate
from eesd.model.exit_head import ExitHead

AGES = 8
"""Ages that are told apart: in training most drafts are shorter, and validation replays rounds of so many drafts."""
MEAN_ROUND = 3.0
"""Tokens of a training round on average: about what rounds commit, so most roots are where they matter."""


def fixed_roots(tokens: int, age: int) -> Tensor:
    """The root of each position [T] at one age; the first positions are younger."""
    return (torch.arange(tokens) - age).clamp_min(0)


def random_roots(batch: int, tokens: int, seed: int, number: int) -> Tensor:
    """The root of each position [B, T], with rounds of random lengths.

    Args:
        batch: B.
        tokens: T.
        seed: Seed of the training.
        number: Number of the batch; the same one gives the same roots.
    """
    random = np.random.default_rng([seed, number, AGES])
    begins: NDArray[np.bool_] = random.random((batch, tokens)) < 1 / MEAN_ROUND
    begins[:, 0] = True
    positions = np.arange(tokens)
    roots = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    return torch.from_numpy(np.maximum(roots, positions - AGES + 1))


def aged_lm_head_input(head: ExitHead, x: Tensor, deep: Sequence[Tensor], roots: Tensor, inputs: Inputs) -> Tensor:
    """The input of the LM head [B, T, hidden] at every position.

    Args:
        head: A head with deep layers.
        x: States after layer N [B, T, hidden].
        deep: States after each deep layer, the same shape.
        roots: Root of each position [B, T] or [T].
        inputs: Of a causal pass over T slots.
    """
    [block] = head.blocks
    assert isinstance(block, Block)
    attention = block.self_attn
    q, k, v = attention.project(block.input_layernorm(x))
    deep_k, deep_v = attention.heads(head.committed_kv((x, *deep)), (1, 1))
    keys = torch.cat([rotate(attention.k_norm(part), inputs) for part in (k, deep_k)], 2)
    y = attend(rotate(attention.q_norm(q), inputs), keys, torch.cat([v, deep_v], 2), _aged(inputs, roots, x.shape[1]))
    x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
    normed: Tensor = head.norm(x + block.mlp(block.post_attention_layernorm(x)))
    return normed


def _aged(inputs: Inputs, roots: Tensor, tokens: int) -> Inputs:
    """Inputs whose mask [B, 1, T, 2 T] shows the draft's keys from the root on, and those of verify before it."""
    slots = torch.arange(tokens, device=roots.device)
    before = slots < roots[..., None]
    drafted = ~before & (slots <= slots[:, None])
    mask = torch.where(torch.cat([drafted, before], -1), 0.0, -30000.0).to(inputs.attn_mask.dtype)
    return Inputs(inputs.cos, inputs.sin, inputs.position_ids, inputs.write_indices, mask.view(-1, 1, tokens, 2 * tokens))
