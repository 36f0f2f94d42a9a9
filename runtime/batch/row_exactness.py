"""Whether a row's logits are the same bits whatever runs beside it: checked where it runs, when the batch starts.

Kernels may add in an order that depends on the size of a call. With those that are known they do not
(docs/decisions/0058-rows-do-not-depend-on-each-other.md), but other processors have other kernels.
"""

import numpy as np

from eesd.common.errors import EESDError
from eesd.runtime.engines.base import Call, JointEngine, KVCache, Logits, Part, Rows, RowsBinding, RowsEngine

PROMPTS, NODES = (9, 1, 23), (1, 3)
"""Tokens of the prompts of the rows, and nodes of the calls."""


def check_rows(engine: RowsEngine, rows: Rows, binding: RowsBinding, joint: JointEngine | None, most: int) -> None:
    """Compare calls over several rows, and joint calls, with calls over each row alone. Takes a dozen calls.

    Rows that are fixed run in calls of all rows, whoever is there, and are compared with calls that have nobody beside them.

    Args:
        engine: The verify engine.
        rows: Rows without texts. What they hold is overwritten.
        binding: The engine bound to them.
        joint: The joint engine, if there is one.
        most: Rows that a batch may have; with one there is nothing to compare.

    Raises:
        EESDError: A bit differs.
    """
    if most == 1:
        return
    texts = _texts(engine, most)
    rows.resize(max(map(len, texts)), [])
    caches = [_prefilled(engine, text) for text in texts]

    def take(row: int) -> None:
        rows.take(row, caches[row], len(texts[row]) - max(NODES))

    for count in NODES:
        calls = [_call(text, count) for text in texts]
        alone = []
        for row, call in enumerate(calls):
            take(row)
            output = binding.forward(row, [call])[0] if rows.fixed else engine.bind(caches[row]).forward(*call)
            alone.append(output.logits.copy())
        for row in range(len(calls)):
            take(row)
        together = [output.logits for output in binding.forward(0, calls)]
        if joint is not None:
            parts = [Part(rows, 0, calls[:1]), Part(rows, 1, calls[1:]), Part(caches[-1], 0, calls[-1:])]
            together += [output.logits for part in joint.forward(parts) for output in part]
            alone = [*alone, *alone, alone[-1]]
        if not all(map(_same_bits, together, alone)):
            raise EESDError(
                "On this processor a row's logits depend on the rows beside it, so requests could change each other's "
                "tokens; run one request at a time, with max_rows 1."
            )


def _texts(engine: RowsEngine, most: int) -> list[list[int]]:
    """A text for each row, of a prompt and the nodes of the longest call."""
    random, manifest = np.random.default_rng(0), engine.manifest
    longest = manifest.max_seq_len - max(NODES)
    lengths = [min(length, longest) + max(NODES) for length in PROMPTS[:most]]
    return [random.integers(0, manifest.geometry.vocab_size, length).tolist() for length in lengths]


def _prefilled(engine: RowsEngine, text: list[int]) -> KVCache:
    kv_cache = engine.new_kv_cache()
    kv_cache.reserve(len(text))
    engine.bind(kv_cache).prefill(text[: -max(NODES)], 0)
    return kv_cache


def _call(text: list[int], count: int) -> Call:
    """The first ``count`` tokens behind the prompt."""
    start = len(text) - max(NODES)
    return Call(text[start : start + count], range(start, start + count), start)


def _same_bits(found: Logits, expected: Logits) -> bool:
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())
