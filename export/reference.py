"""Run standard graphs on the CPU with ONNX Runtime's operators, which serve as the reference.

16-bit weights and caches are widened to float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.manifest import MASKED, GraphInfo, Manifest
from eesd.export.widened import Widened, widen

TOLERANCE = 1e-3
"""Largest acceptable difference of a float32 logit. It is relative to the largest logit. A
different order of additions can cause such a difference."""

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """Difference between the logits of a graph and those of the torch module.

    Attributes:
        largest: Largest absolute difference.
        scale: Largest absolute logit.
    """

    largest: float
    scale: float

    @property
    def acceptable(self) -> bool:
        """Whether rounding explains the difference. False for NaN."""
        return self.largest <= TOLERANCE * max(1.0, self.scale)


def run_chain(
    directory: Path,
    stages: Sequence[GraphInfo],
    tokens: list[int],
    slot: int,
    caches: Mapping[int, Array],
) -> tuple[Array, dict[int, Array]]:
    """Run consecutive tokens from ``slot`` on. Returns logits [n, V] and the written caches."""
    positions = np.arange(slot, slot + len(tokens))
    hidden = np.arange(caches[0].shape[3]) > positions[:, None]
    feeds = {
        "position_ids": positions[None],
        "write_indices": np.array([slot]),
        "attn_mask": np.where(hidden, np.float32(MASKED), np.float32(0))[None, None],
    }
    logits, written = run_stages(directory, stages, np.array([tokens]), feeds, caches)
    return logits[0], written


def empty_cache(manifest: Manifest, slots: int) -> Array:
    """The keys and values of one cache, with shape [2, B, KV, S, D]."""
    return np.zeros(
        (2, 1, manifest.geometry.num_kv_heads, slots, manifest.geometry.head_dim), np.float32
    )


def run_stages(
    directory: Path,
    stages: Sequence[GraphInfo],
    x: NDArray[Any],
    feeds: Mapping[str, NDArray[Any]],
    caches: Mapping[int, Array],
) -> tuple[Array, dict[int, Array]]:
    """Run a graph, or the chain of its stages.

    Args:
        directory: Engine directory.
        stages: The draft graph, or the stages of the verify graph.
        x: Token ids [B, n].
        feeds: The inputs that all stages share. Every token gets logits.
        caches: Keys and values [2, B, KV, S, D] by the index of the cache.

    Returns:
        Logits [B, n, V], and the written caches of all stages.
    """
    written: dict[int, Array] = {}
    for graph in stages:
        own = {
            f"{part}_{i}": caches[i][n]
            for i in graph.caches
            for n, part in enumerate(("key", "value"))
        }
        given = {**feeds, **own, "logit_rows": np.arange(x.shape[1]), graph.inputs[0].name: x}
        outputs = _run_widened(
            directory / graph.file, {info.name: given[info.name] for info in graph.inputs}
        )
        x = outputs[graph.results[0].name]
        written |= {
            i: np.stack([outputs[f"{part}_{i}_out"] for part in ("key", "value")])
            for i in graph.caches
        }
    return x, written


def _run_widened(path: Path, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Run a graph with ONNX Runtime on the CPU, widened to float32."""
    options = ort.SessionOptions()
    # A check needs copies of the caches, so ONNX Runtime's warnings about them are hidden.
    options.log_severity_level = 3
    # A check runs once, so dequantized and packed copies of all weights are not worth their memory.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    # int4 and int8 kernels would round differently.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    weights: Widened = {}
    model = widen(path, options, weights)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def rows_of_slots(cache: Array, first: int, stop: int) -> Array:
    """Returns the slots ``first`` to ``stop`` of keys or values [B, KV, S, D], with one row for
    each slot."""
    return cache[0, :, first:stop].swapaxes(0, 1).reshape(stop - first, -1)


def least_cosine(a: Array, b: Array) -> float:
    """Returns the lowest cosine between corresponding rows of two matrices. Rows with NaN count as
    0."""
    a = a.astype(np.float64)
    b = b.astype(np.float64)
    cosines = (a * b).sum(1) / np.maximum(
        np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30
    )
    return float(np.nan_to_num(cosines).min())
