"""Check an export within seconds. A few layers and the head of the model run twice.

Their standard graphs run on ONNX Runtime's operators, and their build for the CPU runs on this
project's operators. Both use float32 activations. Both read the checkpoint's weights through the
code of the full export. So a fault in packing or in a graph shows as a difference of the logits.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy as np

from eesd.common.architecture import LM_HEAD, LOGIT_BIAS
from eesd.common.geometry import Eagle, ExitConfig, Geometry
from eesd.common.manifest import WEIGHTS_FILE, GraphInfo, Manifest
from eesd.common.quantization import UNQUANTIZED
from eesd.common.weights import EMBEDDINGS, lm_head_name, model_shapes, weight_bytes
from eesd.export.engine_dir import ComputedTensor, Head, Prepared, prepared
from eesd.export.onnx_graph import ExportOptions
from eesd.export.weights import TensorSource, write_weights
from eesd.export.widened import reference
from eesd.model.arrays import Array
from eesd.model.checkpoint import Checkpoint
from eesd.model.family import rows_of
from eesd.model.gguf_file import GgufTensor
from eesd.model.packed import PackedTensor
from eesd.model.safetensors_file import CheckpointTensor
from eesd.runtime.engines.backends import default_threads
from eesd.runtime.engines.base import Call, Engine
from eesd.runtime.engines.cpu_build import halved_weights
from eesd.runtime.engines.cpu_engine import CpuEngine

Source = TypeVar("Source", bound=TensorSource)
LAYERS = 2
COLUMNS = 2048
SLOTS = 64
NODES = 16
"""Sizes of the small model. They are the smallest number of layers, the largest number of rows of
vocabulary tables, the number of slots, and the maximum number of drafted nodes."""
TOKENS = 12
DRAFTED = 3
"""Number of tokens of the verify call, and number of tokens of the draft call after it."""
UNIT = 2.0**-24
"""Largest relative error of a float32 operation."""
SAFETY = 4
"""Factor by which an error may exceed its estimate. It is needed because only the average error
grows as the square root of the number of terms."""


class QuickCheck:
    """Holds the small model, and compares its two engines."""

    def __init__(self, checkpoint: Checkpoint, head: Head, options: ExportOptions) -> None:
        self._engines = _smaller(checkpoint, head, options)

    @property
    def memory(self) -> int:
        """Number of bytes of memory for the check. They hold the session's weights and their packed
        copies in float32."""
        wide = replace(self._engines.manifest, dtype="float32", quantization=UNQUANTIZED)
        return 2 * sum(weight_bytes(wide, graph) for graph in wide.graphs)

    def differences(self) -> dict[str, float]:
        """Differences of the verify and draft logits, relative to the largest difference that
        rounding explains."""
        manifest = self._engines.manifest
        with TemporaryDirectory(prefix="eesd-check-") as name:
            directory = Path(name)
            place = directory / "build"
            place.mkdir()
            self._engines.pack(place)
            self._engines.write_graphs(directory)
            write_weights(
                directory / WEIGHTS_FILE,
                self._engines.layout,
                self._engines.sources,
                lambda *_: None,
            )
            threads = default_threads()
            own = partial(CpuEngine, place, manifest, threads=threads, int8_activations=False)
            found = _logits(manifest, own)
            standard = partial(reference, directory, manifest, threads=threads)
            expected = _logits(manifest, standard)
        return {
            kind: _difference(found[kind], logits) / _bound(manifest, logits)
            for kind, logits in expected.items()
        }


def _difference(found: Array, expected: Array) -> float:
    """Take the largest difference of logits [n, V] in each row, and return the median over the
    rows.

    A fault in packing or in a graph changes every row. A single row may differ a lot without a
    fault, because rounding errors grow where a norm divides by a small number.
    """
    return float(np.median(np.abs(found - expected).max(axis=1)))


def _bound(manifest: Manifest, logits: Array) -> float:
    """The largest difference of logits that a different order of additions explains.

    A sum of K products has an error of about ``sqrt(K) * UNIT`` times the size of its result. A
    block has four products in sequence, and the LM head is one more. All these errors add up.
    """
    geometry = manifest.geometry
    widest = max(geometry.hidden_size, geometry.intermediate_size)
    products = 4 * (geometry.num_layers + manifest.exit_head.blocks) + 1
    return SAFETY * products * sqrt(widest) * UNIT * max(1.0, float(np.abs(logits).max()))


def _tokens(manifest: Manifest) -> list[int]:
    random = np.random.default_rng(0)
    found: list[int] = random.integers(manifest.geometry.vocab_size, size=TOKENS + DRAFTED).tolist()
    return found


def _logits(
    manifest: Manifest, engine_of: Callable[[Sequence[GraphInfo]], Engine]
) -> dict[str, Array]:
    """Returns the logits of the verify call. If the draft is compared, the logits of the draft call
    after it follow."""
    tokens = _tokens(manifest)
    found = dict[str, Array]()
    kv_cache = None
    for kind, stages, first, stop in _steps(manifest):
        engine = engine_of(stages)
        if kv_cache is None:
            [kv_cache] = engine.new_kv_caches()
            kv_cache.reserve(TOKENS + DRAFTED)
        call = Call(kv_cache, tokens[first:stop], range(first, stop), first)
        found[kind] = engine.forward([call])[0].logits.copy()
    return found


class _Step(NamedTuple):
    """Describes a call by its graphs in order, its first token, and its end."""

    kind: str
    stages: Sequence[GraphInfo]
    first: int
    stop: int


def _steps(manifest: Manifest) -> list[_Step]:
    steps = [_Step("verify", manifest.verify, 0, TOKENS)]
    # A packed draft that reads half of each level is not compared, because its logits differ by
    # design.
    if manifest.exit_head.can_draft and not halved_weights(manifest):
        steps.append(_Step("draft", [manifest.draft], TOKENS, TOKENS + DRAFTED))
    return steps


def _smaller(checkpoint: Checkpoint, head: Head, options: ExportOptions) -> Prepared:
    """The first layers of a model, its head, and the first rows of its vocabulary tables."""
    config = _smaller_config(checkpoint.geometry, head.config)
    geometry = _smaller_geometry(checkpoint.geometry, head.config)
    small = copy(checkpoint)
    small.geometry = geometry
    small.config = replace(checkpoint.config, geometry=geometry)
    tables = EMBEDDINGS, lm_head_name(geometry), f"{LOGIT_BIAS}.weight"
    small.tensors = _with_rows(checkpoint.tensors, tables, geometry.vocab_size)
    sources = _with_rows(head.sources, (f"{LM_HEAD}.weight",), geometry.vocab_size)
    needed = model_shapes(geometry)
    own = {name: one for name, one in options.quantization.tensors.items() if name in needed}
    smaller = replace(
        options,
        max_seq_len=SLOTS,
        max_tree_nodes=min(options.max_tree_nodes, NODES),
        draft_top_k=min(options.draft_top_k, geometry.vocab_size),
        stages=1,
        link_weights=False,
        quantization=replace(options.quantization, tensors=own),
    )
    return prepared(small, Head(config, sources), smaller)


def _smaller_geometry(geometry: Geometry, head: ExitConfig) -> Geometry:
    read = len(head.eagle.layers) if head.eagle else 1 + len(head.deep)
    attends = geometry.attention_layers[: max(head.blocks, 1)]
    layers = min(geometry.num_layers, max(LAYERS, read, *(layer + 1 for layer in attends)))
    columns = min(geometry.vocab_size, head.draft_vocab or geometry.vocab_size, COLUMNS)
    return replace(geometry, num_layers=layers, vocab_size=columns)


def _smaller_config(geometry: Geometry, head: ExitConfig) -> ExitConfig:
    small = _smaller_geometry(geometry, head)
    layer = small.num_layers if head.is_whole(geometry) else min(head.layer, 1)
    deep = tuple(range(layer + 1, layer + 1 + len(head.deep)))
    return replace(head, layer=layer, draft_vocab=0, deep=deep, eagle=_smaller_eagle(head, small))


def _smaller_eagle(head: ExitConfig, small: Geometry) -> Eagle | None:
    if head.eagle is None:
        return None
    block = replace(head.eagle.block, vocab_size=small.vocab_size)
    return replace(head.eagle, layers=tuple(range(1, len(head.eagle.layers) + 1)), block=block)


def _with_rows(
    tensors: Mapping[str, Source], names: tuple[str, ...], count: int
) -> dict[str, Source]:
    """The tensors. Tensors with these names are cut to their first rows."""
    return dict(tensors) | {name: _rows(tensors[name], count) for name in names if name in tensors}


def _rows(tensor: Any, count: int) -> Any:
    """The first rows of a tensor. Tensors of a GGUF file keep their levels."""
    if isinstance(tensor, CheckpointTensor | PackedTensor | GgufTensor):
        return rows_of(tensor, 0, count)
    return ComputedTensor(lambda: tensor.read()[:count])
