"""Predict the time of draft steps and verify passes on a GPU, from bytes, operations and hardware
constants.

docs/predict.md has the formula. It marks constants as published, as measured on an H200 with the
torch backend, or as assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from eesd.common.manifest import GraphInfo, Manifest
from eesd.common.quantization import BITS, LM_HEAD
from eesd.common.weights import (
    EMBEDDINGS,
    HEAD_TABLES,
    ROTARY_TABLES,
    StoredWeight,
    needs_of,
    weights_of,
)
from eesd.export.memory import is_split, rank_bytes, slot_bytes
from eesd.runtime.engines.cpu_build import halved_weights
from eesd.runtime.engines.trt_plans import attended_slots

KERNELS_PER_BLOCK = 13
OTHER_KERNELS = 27
"""Measured numbers of kernels. The first is the number of kernels in a block (norms, products,
rotation, cache updates, attention and activation). The second is the number outside blocks (mask,
embedding, head and copies)."""
MANY_NODES = 33
LEVELS_TAKE = {8: (0.82, 1.15), 4: (0.64, 1.02)}
"""Measured times of a block's products with 8-bit and 4-bit weights, for one node and for
:data:`MANY_NODES`. They are relative to the times with 16-bit weights. By bytes alone they would be
0.52 and 0.28."""
TELLING = 100e-6
"""Assumed number of seconds that rank 0 takes to send a call to the other ranks."""
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Hardware:
    """Properties of a device.

    Attributes:
        name: Name that the tables show.
        bandwidth: Number of bytes of memory that it reads per second.
        operations: Number of operations of dense products per second. A multiply-add counts as two
            operations.
        memory: Number of bytes of memory.
        attained: Share of the bandwidth that a pass attains.
        attained_operations: Share of the operations that a pass attains.
        launch: Seconds that a kernel takes in addition to its work.
        host: Seconds of each call during which the device waits for the host.
        node: Seconds that each node after the first takes in each block.
        link: Bytes per second that a device receives from other devices in its machine.
        gather: Seconds until each device has received a few bytes from all other devices.
    """

    name: str
    bandwidth: float
    operations: float
    memory: float
    attained: float = 0.72
    attained_operations: float = 0.79
    launch: float = 0.93e-6
    host: float = 300e-6
    node: float = 1e-6
    link: float = 64e9
    gather: float = 10e-6


GPUS = {
    "h100": Hardware("H100 SXM", 3.35e12, 989e12, 80e9, link=450e9),
    "h200": Hardware("H200", 4.8e12, 989e12, 141e9, link=450e9),
    "b200": Hardware("B200", 8.0e12, 2250e12, 180e9, link=900e9),
    "rtx5090": Hardware("RTX 5090", 1.792e12, 209.5e12, 32e9, link=64e9, gather=20e-6),
    "l4": Hardware("L4", 0.3e12, 121e12, 24e9, link=32e9, gather=20e-6),
}
"""Devices, with the names that ``--predict`` takes. Bandwidth, operations (16 bits, dense), memory
and link are published. The other values are those of the H200, except ``gather``, which is
assumed."""


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of an engine directory's calls.

    Attributes:
        draft: Seconds of a draft step. It is 0 without a draft, because proposals from the text
            cost nothing.
        verify: Seconds of a verify pass over 1, 2, ... nodes, including the root. The first of
            these is the time of a plain step.
    """

    draft: float
    verify: tuple[float, ...]

    def speed_up(self, acceptance: float, drafted: int) -> float:
        """Returns the speed of decoding with chains of ``drafted`` tokens, relative to plain
        decoding. Each token is accepted with probability ``acceptance`` if all tokens before it
        were."""
        tokens = sum(acceptance**depth for depth in range(drafted + 1))
        return tokens * self.verify[0] / (drafted * self.draft + self.verify[drafted])

    def best_length(self, acceptance: float) -> int:
        """Length of the chain with the largest speed-up."""
        return max(range(len(self.verify)), key=lambda drafted: self.speed_up(acceptance, drafted))

    def to_dict(self) -> dict[str, Any]:
        """The prediction as JSON values."""
        lengths = {acceptance: self.best_length(acceptance) for acceptance in ACCEPTANCES}
        speed_ups = [
            {
                "acceptance": acceptance,
                "drafted": drafted,
                "speed_up": self.speed_up(acceptance, drafted),
            }
            for acceptance, drafted in lengths.items()
        ]
        return {"draft": self.draft, "verify": list(self.verify), "speed_ups": speed_ups}


def slots_read(manifest: Manifest, graph: GraphInfo, text: int) -> int:
    """Returns the number of slots that a plan's attention reads in a round after a text of ``text``
    tokens."""
    stop = min(text + manifest.max_tree_nodes + 1, manifest.gpu_slots)
    return next(slots for slots in attended_slots(manifest, graph) if slots >= stop)


def predict(
    manifest: Manifest,
    hardware: Hardware,
    slots: int,
    draft_slots: int | None = None,
    ranks: int = 1,
) -> Prediction:
    """Predict the calls of an engine directory.

    Args:
        manifest: Its manifest.
        hardware: The device. If the verify graph has several stages, each stage runs on such a
            device.
        slots: Number of slots of the KV cache that the verify graph's attention reads.
        draft_slots: Number of slots that the draft graph's attention reads. The default is
            ``slots``.
        ranks: Number of devices over which the torch engine splits the weights.
    """
    drafting = slots if draft_slots is None else draft_slots
    draft = 0.0
    if manifest.exit_head.can_draft:
        draft = call_seconds(manifest, (manifest.draft,), hardware, drafting, 1, ranks)
    counts = range(1, manifest.max_tree_nodes + 2)
    verify = _seconds(manifest, manifest.verify, hardware, slots, counts, ranks)
    return Prediction(draft, tuple(verify))


def call_seconds(
    manifest: Manifest,
    graphs: tuple[GraphInfo, ...],
    hardware: Hardware,
    slots: int,
    nodes: int,
    ranks: int = 1,
) -> float:
    """Seconds of a call over ``nodes`` nodes through graphs that run one after another."""
    return _seconds(manifest, graphs, hardware, slots, (nodes,), ranks)[0]


def _seconds(
    manifest: Manifest,
    graphs: tuple[GraphInfo, ...],
    hardware: Hardware,
    slots: int,
    counts: Sequence[int],
    ranks: int,
) -> list[float]:
    """Seconds of a call for each number of nodes in ``counts``. This function lists the weights
    only once, because a graph with experts has many weights."""
    seconds = [hardware.host + TELLING * (ranks > 1) for _ in counts]
    for graph in graphs:
        as_read = _bytes_of_16_bits(manifest, graph, slots, ranks)
        few, many = (nbytes / (hardware.bandwidth * hardware.attained) for nbytes in as_read)
        product = operations_of_node(manifest, graph, ranks) / (
            hardware.operations * hardware.attained_operations
        )
        blocks = _blocks(manifest, graph)
        launching = (blocks * KERNELS_PER_BLOCK + OTHER_KERNELS) * hardware.launch
        for place, nodes in enumerate(counts):
            reading = few + (many - few) * min((nodes - 1) / (MANY_NODES - 1), 1)
            seconds[place] += (
                max(reading, nodes * product) + launching + (nodes - 1) * blocks * hardware.node
            )
            seconds[place] += sum_seconds(manifest, graph, hardware, nodes, ranks)
    return seconds


def _bytes_of_16_bits(
    manifest: Manifest, graph: GraphInfo, slots: int, ranks: int
) -> tuple[float, float]:
    """Returns the bytes of 16-bit weights that would take the same time to read as the weights and
    the cache. There are two results, for a pass over one node and for a pass over many.

    Kernels for quantized levels are slower than their bytes suggest. Float32 engines have no such
    kernels on a GPU, so only their bytes count.
    """
    few = many = float(bytes_of_pass(manifest, graph, slots, ranks))
    if manifest.dtype == "float32":
        return few, many
    for weight in _weights_read(manifest, graph):
        if weight.quantization is not None and (ranks == 1 or weight.keeps_levels(ranks)):
            kept = rank_bytes(weight, ranks)
            whole = rank_bytes(replace(weight, quantization=None), ranks)
            for_few, for_many = LEVELS_TAKE[BITS[weight.quantization.weights]]
            few = few + for_few * whole - kept
            many = many + for_many * whole - kept
    return few, many


def sum_seconds(
    manifest: Manifest, graph: GraphInfo, hardware: Hardware, nodes: int, ranks: int
) -> float:
    """Returns the seconds of the sums over ranks in a pass. There are two sums per block. Each rank
    receives the partial sums of all other ranks and adds them."""
    if ranks == 1:
        return 0.0
    received = (ranks - 1) * nodes * manifest.geometry.hidden_size * BITS[manifest.dtype] / 8
    one = (
        hardware.gather
        + received / (hardware.link * hardware.attained)
        + (ranks - 1) * hardware.launch
    )
    return 2 * _blocks(manifest, graph) * one


def bytes_of_pass(manifest: Manifest, graph: GraphInfo, slots: int, ranks: int = 1) -> int:
    """Returns the smallest number of bytes that a pass reads. It reads the cache and the weights.
    The embedding table counts only if it is the LM head.

    Args:
        manifest: The engine directory's manifest.
        graph: The graph that runs.
        slots: Number of slots of the KV cache that attention reads.
        ranks: Number of ranks. The result is for each rank.
    """
    read_weights = _weights_read(manifest, graph)
    weights = sum(rank_bytes(weight, ranks) for weight in read_weights)
    # On a CPU, the draft reads only half of each of these weights.
    if graph == manifest.draft and manifest.dtype == "float32":
        halved = halved_weights(manifest)
        weights -= sum(prod(weight.shape) // 2 for weight in read_weights if weight.name in halved)
    # Only one slot of a state cache is read.
    read = len(needs_of(manifest, graph).attended)
    return weights + slots * slot_bytes(manifest, read) // ranks


def operations_of_node(manifest: Manifest, graph: GraphInfo, ranks: int = 1) -> int:
    """Returns the number of operations of a node's products with weights, for each rank. Excludes
    attention."""
    matrices = [weight for weight in _weights_read(manifest, graph) if len(weight.shape) == 2]
    return sum(2 * prod(weight.shape) // (ranks if is_split(weight) else 1) for weight in matrices)


def _weights_read(manifest: Manifest, graph: GraphInfo) -> list[StoredWeight]:
    """The weights that a pass reads completely."""
    weights = weights_of(manifest, graph)
    head = graph in (manifest.draft, manifest.verify[-1])
    # Without an LM head among the weights, the embedding table is the LM head.
    if not head or any(name.endswith(LM_HEAD) for name in weights):
        weights.pop(EMBEDDINGS, None)
    return [
        weight for name, weight in weights.items() if name not in (*ROTARY_TABLES, *HEAD_TABLES)
    ]


def _blocks(manifest: Manifest, graph: GraphInfo) -> int:
    """The number of blocks with attention."""
    blocks = manifest.exit_head.blocks * (graph == manifest.draft)
    return len(manifest.base_layers(graph)) + blocks
