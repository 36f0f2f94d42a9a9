"""An engine's calls over one cache."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.engines.base import Call, Engine, KVCache, StepOutputs


class OnCache:
    def __init__(self, engine: Engine, kv_cache: KVCache) -> None:
        self._engine, self._kv_cache = engine, kv_cache

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        context_len: int = 0,
        tree_mask: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        return self._engine.forward([Call(self._kv_cache, tokens, positions, slot, context_len, tree_mask)])[0]

    def prefill(self, tokens: Sequence[int], slot: int) -> None:
        self._engine.forward([Call(self._kv_cache, tokens, range(slot, slot + len(tokens)), slot, logits=False)])

    def draft_chain(self, token: int, slot: int, count: int) -> StepOutputs:
        assert self._engine.draft_chain is not None
        return self._engine.draft_chain(self._kv_cache, token, slot, count)
