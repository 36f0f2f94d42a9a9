"""What an engine directory takes to run, device by device, computed from its manifest alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from eesd.common.manifest import PREFILL_CHUNK, GraphInfo, Manifest
from eesd.common.weights import BITS

BUILD_FACTOR, BUILD_LEAST = 2.7, 600_000_000
"""Host memory of a build: so much for each byte of weights, besides so much for anything. Measured with TensorRT-RTX 1.7 on
1.8 GB of weights: 2.6, of which one part is the mapped file of weights."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device of one stage of verify; the draft lives with the first.

    ``shared_weights`` are those that the draft and the stage both use, in ``draft_weights`` and in ``verify_weights``.
    ``round_buffers`` and ``prefill_buffers`` hold one call's mask, activations and logits. ``build_host_memory`` is the
    estimate for building the plan of the device's largest graph, in the memory of the host.
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
        """Everything at once, shared weights once; of the two kinds of calls the larger."""
        weights = self.draft_weights + self.verify_weights - self.shared_weights
        return weights + self.kv_cache + max(self.round_buffers, self.prefill_buffers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}


def slot_bytes(manifest: Manifest, caches: int) -> int:
    """Keys and values of one token in so many caches."""
    return 2 * caches * manifest.geometry.num_kv_heads * manifest.geometry.head_dim * BITS[manifest.dtype] // 8


def estimate_memory(manifest: Manifest, batch: int) -> list[DeviceMemory]:
    """One entry for each stage, for full caches of ``batch`` sequences."""
    devices = []
    for number, stage in enumerate(manifest.verify):
        first, last = number == 0, number == len(manifest.verify) - 1
        verify = graph_weights(manifest, stage)
        draft = graph_weights(manifest, manifest.draft) if first else {}
        layers = manifest.stage_layers[number]
        devices.append(
            DeviceMemory(
                graphs=(manifest.draft.file, stage.file) if first else (stage.file,),
                layers=(layers.start, layers.stop - 1),
                draft_weights=sum(draft.values()),
                verify_weights=sum(verify.values()),
                shared_weights=sum(verify[name] for name in verify.keys() & draft.keys()),
                kv_cache=batch * manifest.max_seq_len * slot_bytes(manifest, len(stage.caches)),
                round_buffers=_buffers(manifest, batch * (manifest.max_tree_nodes + 1), logits=first or last),
                prefill_buffers=_buffers(manifest, batch * PREFILL_CHUNK, logits=last),
                build_host_memory=build_memory(max(sum(draft.values()), sum(verify.values()))),
            )
        )
    return devices


def build_memory(weights: int) -> int:
    """Bytes of host memory that building a plan of a graph with so many bytes of weights takes, as an estimate."""
    return BUILD_LEAST + round(BUILD_FACTOR * weights)


def graph_weights(manifest: Manifest, graph: GraphInfo) -> dict[str, int]:
    """Bytes of the weights that a graph uses, by name. What two graphs share has the same name in both."""
    return {name: weight.nbytes for name, weight in manifest.weights_of(graph).items()}


def _buffers(manifest: Manifest, tokens: int, logits: bool) -> int:
    """Mask, hidden states in and out, and the widest moment between, as if no kernel fused attention (scores in float32)."""
    element, hidden, slots = BITS[manifest.dtype] // 8, manifest.geometry.hidden_size, manifest.max_seq_len
    heads = (manifest.geometry.num_heads + manifest.geometry.num_kv_heads) * manifest.geometry.head_dim
    attention = (2 * hidden + 2 * heads) * element + 4 * manifest.geometry.num_heads * slots
    mlp = (2 * hidden + 3 * manifest.geometry.intermediate_size) * element
    head = (hidden + manifest.geometry.vocab_size) * element + 4 * manifest.geometry.vocab_size if logits else 0
    return tokens * ((slots + 2 * hidden) * element + max(attention, mlp, head))


def table(manifest: Manifest, devices: list[DeviceMemory], batch: int) -> Table:
    """The plan as a table, a column for each device, 1 GB = 10^9 bytes."""
    slots = f"{manifest.max_seq_len} slots" + (f" x {batch} sequences" if batch > 1 else "")
    rows: Mapping[str, list[str]] = {
        "graphs": ["\n".join(device.graphs) for device in devices],
        "layers": [f"{first} to {last}" for first, last in (device.layers for device in devices)],
        "weights of the draft": [size(device.draft_weights) for device in devices],
        "weights of verify": [size(device.verify_weights) for device in devices],
        "of these in both (once)": [size(-device.shared_weights) for device in devices],
        f"KV cache, {slots}": [size(device.kv_cache) for device in devices],
        f"a round of {manifest.max_tree_nodes + 1} nodes": [size(device.round_buffers) for device in devices],
        f"or a prefill of {PREFILL_CHUNK} tokens": [size(device.prefill_buffers) for device in devices],
        "total": [size(device.total) for device in devices],
        "with the draft's own copy": [size(device.total + device.shared_weights) for device in devices],
        "host memory to build its plan": [f"~ {size(device.build_host_memory)}" for device in devices],
    }
    columns = Table("", *(f"device {number}" for number in range(len(devices))), box=None, pad_edge=False)
    for column in columns.columns[1:]:
        column.justify = "right"
    for name, cells in rows.items():
        columns.add_row(name, *cells)
    return columns


def size(count: int) -> str:
    """Bytes as people read them."""
    if count == 0:
        return "-"
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.2f} MB"
