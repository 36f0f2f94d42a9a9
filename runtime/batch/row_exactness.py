"""Whether a row's logits are the same bits whatever runs beside it: checked where it runs, when the batch starts.

Kernels may add in an order that depends on the size of a call. With those that are known they do not
(docs/decisions/0058-rows-do-not-depend-on-each-other.md), but other processors have other kernels.
"""

from collections.abc import Sequence

import numpy as np

from eesd.common.errors import EESDError
from eesd.runtime.engines.base import Call, Engine, KVCache, Logits

PROMPTS, NODES = (9, 1, 23), (1, 3)
"""Tokens of the prompts of the rows, and nodes of the calls."""


def check_rows(engine: Engine, kv_caches: Sequence[KVCache]) -> None:
    """Compare calls over several rows with calls over each row alone. Takes a dozen calls.

    Args:
        engine: The verify engine.
        kv_caches: Of all rows of a batch, without texts. What they hold is overwritten.

    Raises:
        EESDError: A bit differs.
    """
    if len(kv_caches) == 1:
        return
    rows = list(zip(kv_caches, _texts(engine, len(kv_caches)), strict=False))
    for kv_cache, text in rows:
        kv_cache.reserve(len(text))
        _prefill(engine, kv_cache, text)
    for count in NODES:
        calls = [_call(kv_cache, text, count) for kv_cache, text in rows]
        alone = [engine.forward([call])[0].logits.copy() for call in calls]
        if not all(_same_bits(output.logits, own) for output, own in zip(engine.forward(calls), alone, strict=True)):
            raise EESDError(
                "On this processor a row's logits depend on the rows beside it, so requests could change each other's "
                "tokens; run one request at a time, with max_rows 1."
            )
    for kv_cache, _ in rows:
        kv_cache.reset()


def _texts(engine: Engine, most: int) -> list[list[int]]:
    """A text for each row, of a prompt and the nodes of the longest call."""
    random, manifest = np.random.default_rng(0), engine.manifest
    longest = manifest.max_seq_len - max(NODES)
    lengths = [min(length, longest) + max(NODES) for length in PROMPTS[:most]]
    return [random.integers(0, manifest.geometry.vocab_size, length).tolist() for length in lengths]


def _prefill(engine: Engine, kv_cache: KVCache, text: list[int]) -> None:
    prompt = text[: -max(NODES)]
    engine.forward([Call(kv_cache, prompt, range(len(prompt)), 0, logits=False)])


def _call(kv_cache: KVCache, text: list[int], count: int) -> Call:
    """The first ``count`` tokens behind the prompt."""
    start = len(text) - max(NODES)
    return Call(kv_cache, text[start : start + count], range(start, start + count), start)


def _same_bits(found: Logits, expected: Logits) -> bool:
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())
