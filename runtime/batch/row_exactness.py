"""Whether a row's logits are the same bits whatever runs beside it: checked where it runs, when the batch starts.

Kernels may add in an order that depends on the size of a call. With those that are known they do not
(docs/decisions/0058-rows-do-not-depend-on-each-other.md), but other processors have other kernels.
"""

import numpy as np

from eesd.common.errors import EESDError
from eesd.runtime.engines.base import Call, Logits
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_cpu import OrtEngine
from eesd.runtime.engines.ort_rows import OrtRowsBinding
from eesd.runtime.engines.rows import HostRows

PROMPTS, NODES = (9, 1, 23), (1, 3)
"""Tokens of the prompts of the rows, and nodes of the calls."""


def check_rows(engine: OrtEngine, rows: int) -> None:
    """Compare calls over several rows with calls over each alone. Takes a dozen calls.

    Args:
        engine: The verify engine.
        rows: Rows that a batch may have; with one there is nothing to compare.

    Raises:
        EESDError: A bit differs.
    """
    lengths = PROMPTS[:rows]
    random = np.random.default_rng(0)
    vocab, limit = engine.manifest.geometry.vocab_size, engine.manifest.max_seq_len
    texts = [random.integers(0, vocab, min(length, limit - max(NODES)) + max(NODES)).tolist() for length in lengths]
    together = HostRows(engine.manifest, len(texts))
    together.resize(max(map(len, texts)), [])
    alone: list[HostKVCache] = []
    for row, text in enumerate(texts):
        alone.append(engine.new_kv_cache())
        alone[row].reserve(len(text))
        engine.bind(alone[row]).prefill(text[: -max(NODES)], 0)
        together.take(row, alone[row], len(text) - max(NODES))
    binding = OrtRowsBinding(engine, together)
    for count in NODES if len(texts) > 1 else ():
        calls = [_call(text, count) for text in texts]
        outputs = [output.logits.copy() for output in binding.forward(0, calls)]
        for call, cache, found in zip(calls, alone, outputs, strict=True):
            if not _same_bits(found, engine.bind(cache).forward(*call).logits):
                raise EESDError(
                    "On this processor a row's logits depend on the rows beside it, so requests could change each other's "
                    "tokens; run one request at a time, with max_rows 1."
                )


def _call(text: list[int], count: int) -> Call:
    """The first ``count`` tokens behind the prompt."""
    start = len(text) - max(NODES)
    return Call(text[start : start + count], range(start, start + count), start)


def _same_bits(found: Logits, expected: Logits) -> bool:
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())
