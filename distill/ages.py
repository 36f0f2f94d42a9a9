"""The age of a drafted token determines which deep state a head with deep layers reads.

All draft steps of a round read the deep state of the token before the root. The result at a
position therefore depends on its *age*, the number of drafted tokens before it in the round.
In training, rounds of random lengths give each position of a row a root. Validation computes each
age at the positions where rounds reach it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.model.decoder import ExitHead

AGES = 8
"""Number of distinct ages. Most drafts in training are shorter, and validation replays rounds of
this length."""
MEAN_ROUND = 3.0
"""Mean number of tokens in a training round. It is close to the number that a round commits, so
that most roots are at realistic distances."""


def random_roots(batch: int, tokens: int, seed: int, number: int) -> Tensor:
    """Return the root of each position [B, T] for rounds of random lengths.

    Args:
        batch: B.
        tokens: T.
        seed: Seed of the training.
        number: Number of the batch. The same number gives the same roots.
    """
    random = np.random.default_rng([seed, number, AGES])
    begins: NDArray[np.bool_] = random.random((batch, tokens)) < 1 / MEAN_ROUND
    begins[:, 0] = True
    positions = np.arange(tokens)
    roots = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    return torch.from_numpy(np.maximum(roots, positions - AGES + 1))


def states_before(head: ExitHead, hidden: Sequence[Tensor], roots: Tensor) -> Tensor:
    """Return the deep state that each position reads [B, T, 2 KV D]. It is the state of the token
    before the position's root, or zero if there is no such token.

    Args:
        head: A head with deep layers.
        hidden: Hidden states after each deep layer, [B, T, hidden].
        roots: Root of each position [B, T], or [1, T].
    """
    states = head.deep_states(hidden)
    roots = roots.expand(states.shape[:2])[..., None]
    return torch.gather(states, 1, (roots - 1).clamp_min(0).expand_as(states)) * (roots > 0)
