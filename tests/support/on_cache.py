"""Engines whose calls all use one cache."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import load_manifest
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.base import Call, Engine, KVCache, StepOutputs


class OnCache:
    def __init__(self, engine: Engine, kv_cache: KVCache) -> None:
        self.engine = engine
        self._kv_cache = kv_cache

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        context_len: int = 0,
        tree_mask: NDArray[np.bool_] | None = None,
    ) -> StepOutputs:
        return self.engine.forward(
            [Call(self._kv_cache, tokens, positions, slot, context_len, tree_mask)]
        )[0]

    def prefill(self, tokens: Sequence[int], slot: int) -> None:
        self.engine.forward(
            [Call(self._kv_cache, tokens, range(slot, slot + len(tokens)), slot, logits=False)]
        )

    def chain(self, token: int, slot: int, levels: int) -> StepOutputs:
        call = Call(self._kv_cache, [token], [slot], slot, levels=levels)
        return self.engine.forward([call])[0]


def both_on_cache(directory: Path, backend: str, slots: int) -> tuple[OnCache, OnCache, KVCache]:
    """Returns the verify engine and the draft engine of a directory, and the cache of ``slots``
    slots that they share."""
    engines = open_engines(
        directory, load_manifest(directory), EngineOptions(backend, 1, draft=True)
    )
    assert engines.draft is not None
    [cache] = engines.verify.new_kv_caches()
    cache.reserve(slots)
    return OnCache(engines.verify, cache), OnCache(engines.draft, cache), cache
