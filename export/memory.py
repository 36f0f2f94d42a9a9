"""Compute the memory of each device. This module splits the verify graph into stages, and estimates
the memory that a directory needs to run.

Everything is computed from geometry and manifest, without torch or the weights.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, draft_columns
from eesd.common.manifest import Manifest
from eesd.common.quantization import BITS, Quantizations, Shape
from eesd.common.weights import (
    StoredWeight,
    graph_shapes,
    layer_shapes,
    split_side,
    stored_weight,
    weights_of,
)

_BUILD_FACTOR = 2.7
_BUILD_BASE = 600_000_000
"""Estimate of the host memory of a build. The first number is a factor for the bytes of the
weights, and the second is a constant. A measurement with TensorRT-RTX 1.7 on 1.8 GB of weights gave
2.6 bytes of memory per byte of weights, including the mapped file of weights."""


def split_layers(
    geometry: Geometry,
    exit_config: ExitConfig,
    dtype: str,
    quantization: Quantizations,
    stages: int,
) -> list[range]:
    """Split the layers of the verify graph into stages so that the largest number of weight bytes
    on any device is as small as possible.

    The first device also runs the draft on the same caches, so the first stage has at least the N
    layers before the exit.

    Args:
        geometry: Geometry of the base model.
        exit_config: Configuration of the exit head.
        dtype: Element type of the engines.
        quantization: Quantization of the weights.
        stages: Number of stages.

    Returns:
        The layers of each stage.

    Raises:
        EESDError: The model cannot be split into that many stages.
    """
    layers = geometry.num_layers
    before_exit = exit_config.layer
    if exit_config.read_layers and stages > 1:
        raise EESDError(
            f"--stages {stages} cannot be used with this head: it reads states after the layers "
            f"{', '.join(map(str, exit_config.read_layers))}, which another device would "
            "have; give a head without deep layers."
        )
    if stages > 1 and not geometry.has_stages:
        raise EESDError(
            f"--stages {stages} cannot be used with {geometry.architecture}: its layers share keys "
            "and values, or read the tokens; leave --stages out."
        )
    if stages > 1 and exit_config.is_whole(geometry):
        raise EESDError(
            f"--stages {stages} cannot be used with --exit-head quantized, whose draft runs "
            "all layers on one device; give "
            "--exit-head DIR, or leave --stages out."
        )
    most = layers - before_exit + 1
    if not 1 <= stages <= most:
        raise EESDError(
            f"--stages must be between 1 and {most} for this {layers}-layer model with its "
            f"exit after layer {before_exit} "
            f"(the first stage holds what the draft uses); {stages} was given."
        )

    if stages == 1:
        return [range(layers)]

    def nbytes(shapes: Mapping[str, Shape]) -> int:
        wide = geometry.wide_norms
        return sum(
            stored_weight(name, shape, dtype, quantization, wide_norms=wide).nbytes
            for name, shape in shapes.items()
        )

    def graph(layers: range, draft: bool) -> dict[str, Shape]:
        # Rotary tables are on every device, so they are not counted.
        return graph_shapes(geometry, exit_config, 0, layers, draft, dtype, quantization)

    # Layers may differ a little in size if single tensors have other levels, so the mean is used.
    layer = nbytes(layer_shapes(geometry, range(layers))) // layers
    prefix = range(before_exit)
    other = [0] * stages  # These bytes are on each device in addition to the layers.
    other[0] = nbytes(graph(prefix, draft=True) | graph(prefix, draft=False)) - before_exit * layer
    other[-1] += nbytes(graph(range(layers - 1, layers), draft=False)) - layer
    counts = [before_exit] + [1] * (stages - 1)
    # Layers have one size, so giving each to the emptiest device is optimal.
    for _ in range(layers - sum(counts)):
        counts[min(range(stages), key=lambda stage: other[stage] + counts[stage] * layer)] += 1
    borders = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(*pair) for pair in pairwise(borders)]


@dataclass(frozen=True)
class DeviceMemory:
    """Number of bytes of memory of the device that runs one stage of the verify graph. The draft
    runs on the first device.

    Attributes:
        graphs: Files of the graphs on the device.
        layers: First and last layer of the stage.
        draft_weights: Weights of the draft.
        verify_weights: Weights of the stage.
        shared_weights: Weights that both graphs share. Both numbers above include them.
        kv_cache: The caches of the stage when they are full.
        round_buffers: Memory for the mask, the activations and the logits of a verify pass over a
            full round.
        prefill_buffers: Memory for the mask and the activations of a prefill call of one sequence,
            and for the logits of one token.
        build_host_memory: Estimate of the host memory for building the plan of the device's largest
            graph.
    """

    graphs: tuple[str, ...]
    layers: tuple[int, int]
    draft_weights: int
    verify_weights: int
    shared_weights: int
    kv_cache: int
    round_buffers: int
    prefill_buffers: int
    build_host_memory: int

    @property
    def total(self) -> int:
        """Memory of the device if the draft graph and the verify graph share weights. Rounds and
        prefill use the same buffers."""
        weights = self.draft_weights + self.verify_weights - self.shared_weights
        return weights + self.kv_cache + max(self.round_buffers, self.prefill_buffers)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the total for JSON."""
        return asdict(self) | {"total": self.total}


def estimate_memory(manifest: Manifest, batch: int, ranks: int = 1) -> list[DeviceMemory]:
    """Estimate the memory of each device.

    Args:
        manifest: Manifest of the engine directory.
        batch: Number of sequences. All of them have full caches.
        ranks: Number of ranks over which the torch engine splits the weights. Several ranks need a
            verify graph with a single stage.

    Returns:
        One entry for each stage. With several ranks, each rank needs this memory.

    Raises:
        EESDError: The model cannot be split over this many ranks.
    """
    part = manifest.on_rank(ranks)
    devices = []
    nodes = manifest.max_tree_nodes + 1
    for stage, layers in zip(manifest.verify, manifest.stage_layers, strict=True):
        last = stage == manifest.verify[-1]
        columns = draft_columns(manifest.geometry, manifest.exit_head)
        if last:
            columns = manifest.geometry.vocab_size
        verify = weights_of(manifest, stage)
        drafts = stage == manifest.verify[0] and manifest.exit_head.can_draft
        draft = weights_of(manifest, manifest.draft) if drafts else {}
        shared = {name: verify[name] for name in verify.keys() & draft.keys()}
        draft_weights, verify_weights, shared_weights = (
            sum(rank_bytes(weight, ranks) for weight in weights.values())
            for weights in (draft, verify, shared)
        )
        devices.append(
            DeviceMemory(
                graphs=(manifest.draft.file, stage.file) if drafts else (stage.file,),
                layers=(layers.start, layers.stop - 1),
                draft_weights=draft_weights,
                verify_weights=verify_weights,
                shared_weights=shared_weights,
                kv_cache=batch * manifest.max_seq_len * slot_bytes(part, len(stage.caches)),
                round_buffers=_buffers(
                    part, batch * nodes, batch * nodes * (drafts or last), columns
                ),
                prefill_buffers=_buffers(part, manifest.gpu_prefill_chunk, int(last), columns),
                build_host_memory=build_memory(max(draft_weights, verify_weights)),
            )
        )
    return devices


def rank_bytes(weight: StoredWeight, ranks: int) -> int:
    """Number of bytes of a weight on each rank. With several ranks, the model runs on the torch
    engine. This engine dequantizes the weights of float32 engines, and weights that its GPU kernels
    do not support."""
    if ranks > 1 and (weight.dtype == "float32" or not weight.keeps_levels(ranks)):
        weight = replace(weight, quantization=None)
    return weight.nbytes // (ranks if is_split(weight) else 1)


def is_split(weight: StoredWeight) -> bool:
    """Whether ranks split a weight. They split the matrices of attention, of MLPs and of the deep
    layers. Each rank has all other weights."""
    return len(weight.shape) == 2 and split_side(weight.name) is not None


def slot_bytes(manifest: Manifest, caches: int) -> int:
    """Bytes of one token's keys and values in ``caches`` caches."""
    return (
        2
        * caches
        * manifest.geometry.num_kv_heads
        * manifest.geometry.head_dim
        * BITS[manifest.dtype]
        // 8
    )


def build_memory(weights: int) -> int:
    """Estimate the bytes of host memory for building a plan from ``weights`` bytes of weights."""
    return _BUILD_BASE + round(_BUILD_FACTOR * weights)


def _buffers(manifest: Manifest, tokens: int, logits: int, columns: int) -> int:
    """Estimate the bytes of the mask, the hidden states in and out, and the largest activations.
    Attention is assumed to be unfused and in float32.

    ``logits`` of the ``tokens`` tokens get logits, with ``columns`` columns each.
    """
    element = BITS[manifest.dtype] // 8
    hidden = manifest.geometry.hidden_size
    slots = manifest.max_seq_len
    latent = manifest.geometry.latent
    size = latent.width if latent else manifest.geometry.head_dim
    heads = (manifest.geometry.num_heads + manifest.geometry.num_kv_heads) * size
    attention = (2 * hidden + 2 * heads) * element + 4 * manifest.geometry.num_heads * slots
    mlp = (2 * hidden + 3 * manifest.geometry.intermediate_size) * element
    head = (hidden + columns) * element + 4 * columns
    return tokens * (slots + 2 * hidden) * element + max(
        tokens * attention, tokens * mlp, logits * head
    )


def format_bytes(count: int) -> str:
    """Format a number of bytes in MB or GB (10^6 or 10^9 bytes). The result is ``-`` for 0."""
    if count == 0:
        return "-"
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.2f} MB"
