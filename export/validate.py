"""Engines of any backend against a reference: their own graphs in ONNX Runtime on the CPU, widened to float32."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.common.manifest import MASKED, GraphInfo, Manifest
from eesd.export.check import run_widened
from eesd.export.memory import graph_weights
from eesd.runtime.engines.backends import Engines

TOKENS = 12
"""Of the random prompt; the draft then takes one more."""
LEAST_COSINE = {"float32": 0.99999, "float16": 0.999, "bfloat16": 0.99}
"""What rounding to the engine's type leaves. bfloat16 has 8 bits for float16's 11."""

Array = NDArray[np.float32]


def memory_needed(manifest: Manifest) -> int:
    """Bytes that the reference takes: the larger graph's weights in float32, and the session's packed copy of them."""
    wide = replace(manifest, dtype="float32", quantization=None)
    return 2 * max(sum(graph_weights(wide, graph).values()) for graph in wide.graphs)


def validate(engines: Engines, directory: Path, manifest: Manifest) -> dict[str, float]:
    """The least cosine, over tokens, of an engine's logits, keys and values with the reference's, by what was compared.

    ``engines``, draft included, should compute what the graphs in ``directory`` do. Caches are compared for every layer and
    every exit block, each token's heads as one vector.
    """
    assert engines.draft is not None
    count = min(TOKENS, manifest.max_seq_len - 1)
    tokens: list[int] = np.random.default_rng(0).integers(manifest.geometry.vocab_size, size=count + 1).tolist()
    kv_cache = engines.verify.new_kv_cache()
    found: dict[str, float] = {}
    caches = [
        np.zeros((2, 1, manifest.geometry.num_kv_heads, count + 1, manifest.geometry.head_dim), np.float32)
    ] * manifest.num_caches

    def compare(kind: str, engine: Any, stages: Sequence[GraphInfo], first: int, stop: int) -> None:
        logits = engine.bind(kv_cache).forward(tokens[first:stop], range(first, stop), first).logits.copy()
        expected, written = _reference(directory, stages, caches, tokens[first:stop], first)
        found[f"{kind} logits"] = least_cosine(logits, expected)
        for part, name in enumerate(("keys", "values")):
            pairs = [(kv_cache.read(index)[part], cache[part]) for index, cache in written.items()]
            found[f"{kind} {name}"] = min(least_cosine(*(_rows(x, first, stop) for x in pair)) for pair in pairs)
        for index, cache in written.items():
            caches[index] = cache

    compare("verify", engines.verify, manifest.verify, 0, count)
    compare("draft", engines.draft, [manifest.draft], count, count + 1)
    return found


def _reference(
    directory: Path, stages: Sequence[GraphInfo], caches: list[Array], tokens: list[int], slot: int
) -> tuple[Array, dict[int, Array]]:
    """Logits [n, V] of a chain of tokens from ``slot`` on, and the caches [2, B, KV, S, D] that the pass has written."""
    positions = np.arange(slot, slot + len(tokens))
    hidden = np.arange(caches[0].shape[3]) > positions[:, None]
    feeds: dict[str, NDArray[Any]] = {
        "position_ids": positions[None],
        "write_indices": np.array([slot]),
        "attn_mask": np.where(hidden, np.float32(MASKED), np.float32(0))[None, None],
    }
    x: NDArray[Any] = np.array([tokens])
    written: dict[int, Array] = {}
    for graph in stages:
        own = {f"{part}_{i}": caches[i][n] for i in graph.caches for n, part in enumerate(("key", "value"))}
        outputs = run_widened(directory / graph.file, feeds | own | {graph.inputs[0].name: x})
        x = outputs[graph.results[0].name]
        written |= {i: np.stack([outputs[f"{part}_{i}_out"] for part in ("key", "value")]) for i in graph.caches}
    return x[0], written


def _rows(cache: Array, first: int, stop: int) -> Array:
    """The slots ``first`` to ``stop`` of keys or values [B, KV, S, D], as a row each."""
    return cache[0, :, first:stop].swapaxes(0, 1).reshape(stop - first, -1)


def least_cosine(a: Array, b: Array) -> float:
    """The least cosine of two matrices' rows; of what is not a number, 0."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    cosines = (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30)
    return float(np.nan_to_num(cosines).min())
