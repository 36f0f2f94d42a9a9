"""The age of a drafted token, and what a head with deep layers knows at it.

All draft steps of a round read the deep state of the token before the root. So what a position
computes depends on its *age*, the number of drafted tokens before it in the round. Training gives
each position of a row a root, with rounds of random lengths; validation computes each age where
rounds reach it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.model.decoder import ExitHead

AGES = 8
"""Ages that are told apart: in training most drafts are shorter, and validation replays rounds of
so many drafts."""
MEAN_ROUND = 3.0
"""Tokens of a training round on average: about what rounds commit, so most roots are where they
matter."""


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


def states_before(head: ExitHead, hidden: Sequence[Tensor], roots: Tensor) -> Tensor:
    """The deep state [B, T, 2 KV D] that each position reads: that of the token before its root,
    zero if there is none.

    Args:
        head: A head with deep layers.
        hidden: Hidden states after each deep layer, [B, T, hidden].
        roots: Root of each position [B, T], or [1, T].
    """
    states = head.deep_states(hidden)
    roots = roots.expand(states.shape[:2])[..., None]
    return torch.gather(states, 1, (roots - 1).clamp_min(0).expand_as(states)) * (roots > 0)
