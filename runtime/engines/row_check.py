"""Check whether the rows of a batch change each other's logits."""

from collections.abc import Sequence

import numpy as np

from eesd.common.errors import EESDError
from eesd.runtime.engines.base import Call, Engine, KVCache

PROMPTS = (9, 1, 23)
NODES = (1, 3)
"""The number of tokens of each row's prompt, and the numbers of nodes of the rows' calls."""


def check_rows(engine: Engine, kv_caches: Sequence[KVCache]) -> None:
    """Compare calls over several rows with calls over each row alone. This takes a dozen calls.

    A kernel may add numbers in an order that depends on the size of a call. The known kernels do
    not (docs/decisions/0058-rows-do-not-depend-on-each-other.md), but other processors have other
    kernels.

    Args:
        engine: The verify engine.
        kv_caches: The caches of all rows of a batch. No text may use them, because their contents
            are overwritten.

    Raises:
        EESDError: A bit differs.
    """
    if len(kv_caches) == 1:
        return
    random = np.random.default_rng(0)
    manifest = engine.manifest
    texts = list[tuple[KVCache, list[int], int]]()
    for kv_cache, prompt in zip(kv_caches, PROMPTS, strict=False):
        start = min(prompt, manifest.max_seq_len - max(NODES))
        tokens = random.integers(0, manifest.geometry.vocab_size, start + max(NODES)).tolist()
        kv_cache.reserve(len(tokens))
        engine.forward([Call(kv_cache, tokens[:start], range(start), 0, logits=False)])
        texts.append((kv_cache, tokens, start))
    for count in NODES:
        calls = [
            Call(cache, tokens[at : at + count], range(at, at + count), at)
            for cache, tokens, at in texts
        ]
        alone = [engine.forward([call])[0].logits.copy() for call in calls]
        for output, own in zip(engine.forward(calls), alone, strict=True):
            if (output.logits.view(np.uint32) != own.view(np.uint32)).any():
                raise EESDError(
                    "On this processor, the logits of a row depend on the other rows of the "
                    "batch, so requests could change each other's tokens; run one request at a "
                    "time, with max_rows 1."
                )
    for kv_cache, _, _ in texts:
        kv_cache.reset()
