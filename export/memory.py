"""What an engine directory takes to run, device by device, computed from its manifest alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from eesd.export.manifest import BITS, PREFILL_CHUNK, GraphInfo, Manifest, linear_bytes

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
    kv_slab: int
    round_buffers: int
    prefill_buffers: int
    build_host_memory: int

    @property
    def total(self) -> int:
        """Everything at once, shared weights once; of the two kinds of calls the larger."""
        weights = self.draft_weights + self.verify_weights - self.shared_weights
        return weights + self.kv_slab + max(self.round_buffers, self.prefill_buffers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}


def slot_bytes(manifest: Manifest, caches: int) -> int:
    """Keys and values of one token in so many caches."""
    return 2 * caches * manifest.num_kv_heads * manifest.head_dim * BITS[manifest.dtype] // 8


def plan_memory(manifest: Manifest, batch: int) -> list[DeviceMemory]:
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
                kv_slab=batch * manifest.max_seq_len * slot_bytes(manifest, len(stage.caches)),
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
    """Bytes of the weights that a graph uses, by what they are; what two graphs share has the same name in both."""
    exits = range(manifest.num_layers, manifest.num_caches)
    is_draft, is_last = graph == manifest.draft, graph == manifest.verify[-1]
    element = BITS[manifest.dtype] // 8
    kv, rest = _block(manifest)
    table = manifest.vocab_size * manifest.hidden_size * element
    lm_head = _linear(manifest, manifest.hidden_size, manifest.vocab_size)
    parts = {"rotary tables": manifest.max_seq_len * manifest.head_dim * element}
    if graph.inputs[0].name == "input_ids":
        parts["embeddings"] = table
    for cache in graph.caches:
        parts[f"keys and values {cache}"] = kv
        if is_draft or cache != exits[-1]:  # verify takes no more of the last exit block than its keys and values
            parts[f"block {cache}"] = rest
    if is_draft:
        parts["exit norm"] = manifest.hidden_size * element
    elif is_last:
        parts["norm"] = manifest.hidden_size * element
    if is_draft and manifest.exit_own_lm_head:
        parts["exit LM head"] = lm_head
    elif (is_draft or is_last) and manifest.tied_embeddings:
        parts["embeddings"] = table
    elif is_draft or is_last:
        parts["LM head"] = lm_head
    return parts


def _linear(manifest: Manifest, inputs: int, outputs: int) -> int:
    return linear_bytes(inputs, outputs, manifest.dtype, manifest.quantization)


def _block(manifest: Manifest) -> tuple[int, int]:
    """Bytes of a block's weights: those that make its keys and values, and the others."""
    hidden, inner, head = manifest.hidden_size, manifest.intermediate_size, manifest.head_dim
    width, kv_width = manifest.num_heads * head, manifest.num_kv_heads * head
    element = BITS[manifest.dtype] // 8
    kv = (hidden + 2 * kv_width * manifest.qkv_bias + head * manifest.qk_norm) * element
    rest = (hidden + width * manifest.qkv_bias + hidden * manifest.output_bias + head * manifest.qk_norm) * element
    rest += (2 * inner + hidden) * manifest.mlp_bias * element
    kv += 2 * _linear(manifest, hidden, kv_width)
    rest += _linear(manifest, hidden, width) + _linear(manifest, width, hidden)
    return kv, rest + 2 * _linear(manifest, hidden, inner) + _linear(manifest, inner, hidden)


def _buffers(manifest: Manifest, tokens: int, logits: bool) -> int:
    """Mask, hidden states in and out, and the widest moment between, as if no kernel fused attention (scores in float32)."""
    element, hidden, slots = BITS[manifest.dtype] // 8, manifest.hidden_size, manifest.max_seq_len
    heads = (manifest.num_heads + manifest.num_kv_heads) * manifest.head_dim
    attention = (2 * hidden + 2 * heads) * element + 4 * manifest.num_heads * slots
    mlp = (2 * hidden + 3 * manifest.intermediate_size) * element
    head = (hidden + manifest.vocab_size) * element + 4 * manifest.vocab_size if logits else 0
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
        f"KV slab, {slots}": [size(device.kv_slab) for device in devices],
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
