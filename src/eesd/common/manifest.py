"""``manifest.json``: the contract between exporting and running an engine directory.

docs/engine-directory.md specifies the format. The module needs no torch.
"""

import json
from dataclasses import asdict, dataclass, replace

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, exit_caches
from eesd.common.weights import Quantizations, StoredWeight, graph_shapes, stored_weight

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
DRAFT_VOCAB_FILE = "draft_vocab.bin"
"""The ids of the draft vocabulary, ascending, as little-endian int64: external data of the draft graph."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that chat templates may use, by their names in tokenizer_config.json."""
DEFAULT_SLOTS, DEFAULT_TREE_NODES, DEFAULT_TOP_K = 4096, 32, 8
"""Defaults of an export for ``max_seq_len`` (or the model's positions, if fewer), ``max_tree_nodes`` and ``draft_top_k``."""
MAX_SLOTS, MAX_TREE_NODES, MAX_TOP_K = 1 << 24, 512, 64
"""Largest ``max_seq_len``, ``max_tree_nodes`` and ``draft_top_k``."""
PREFILL_CHUNK = 128
"""Prompt tokens of one prefill call on the CPU."""
GPU_PREFILL_CHUNK = 512
"""The same on a GPU: each call reads all weights, and up to about this many tokens that takes longer than computing."""
LONG_CACHE = 16384
"""Slots of the largest cache for which TensorRT-RTX has an attention for exactly one node (measured: not for 24576)."""
FEWEST_SLOTS = 1024
"""Attention over fewer slots is not worth kernels of its own: weights are far more to read."""
MASKED = -30000.0
"""Additive mask of a slot that must not be seen. It fits float16, and its softmax weight is exactly zero."""
SLOTS_PROPERTY = "max_seq_len"
"""Metadata property of a graph: the rows of its rotary tables."""
EXACT_NODES = 64
"""Up to this many nodes, reading weights takes a GPU longer than computing, so a call of all of them costs little more."""
FEW_NODES = 3
"""Query heads are folded in calls of B sequences with at most this many times B nodes each; see docs/decisions/0058."""
FLAVOURS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""The flavours of TensorRT plans, and the Python module that builds and runs each."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and element type of an input or output of a graph. ``B``, ``n``, ``S`` and ``R`` in a shape are symbolic."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def sized(self, **sizes: int) -> tuple[int, ...]:
        """The shape with these sizes of its symbolic dimensions."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


@dataclass(frozen=True)
class GraphInfo:
    """One graph of the directory.

    Attributes:
        file: Name of the ONNX file.
        caches: Indices of the caches that the graph reads and writes, in input order. There are L + E caches in all.
        inputs: The inputs in order; the cache tensors come last.
        outputs: The outputs in order; the cache tensors come last.
    """

    file: str
    caches: tuple[int, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def results(self) -> tuple[TensorInfo, ...]:
        """The outputs that are not caches: logits or a hidden state; for the draft also candidates and log-probabilities."""
        return self.outputs[: len(self.outputs) - 2 * len(self.caches)]


def first_slots(slots: int) -> tuple[int, ...]:
    """How many of the first slots of a cache attention in a plan reads: the fewest of these that hold what a call sees.

    An eighth, a quarter and a half of all ``slots``, rounded down to a multiple of 16 as alignment needs, and all.
    """
    parts = (slots // (16 * part) * 16 for part in (8, 4, 2))
    return (*(some for some in parts if some >= FEWEST_SLOTS), slots)


def one_node_is_faster(max_seq_len: int, quantization: Quantizations) -> bool:
    """Whether TensorRT-RTX drafts faster with kernels for exactly one node than with those for a range.

    For exactly one node, attention reads the caches where they are; for a range it copies them in every call. But it has no
    such attention for long caches, and for exactly one node it writes int8 weights out as 16-bit ones in every call.
    """
    return max_seq_len <= LONG_CACHE and not quantization.drafts_with_int8


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of a file of the directory."""

    size: int
    sha256: str


@dataclass(frozen=True)
class LinkInfo:
    """A checkpoint file that is hard-linked into the directory.

    Only samples are hashed: hashing a whole checkpoint takes longer than the rest of a linked export.

    Attributes:
        size: Size in bytes.
        mtime_ns: Time of the last change, in nanoseconds since the epoch.
        samples: SHA-256 of 256 pieces of 4096 bytes at equal distances.
    """

    size: int
    mtime_ns: int
    samples: str


@dataclass(frozen=True)
class PlanInfo:
    """A TensorRT plan that was built from one graph. It has the inputs and outputs of the graph.

    Attributes:
        file: Name of the plan file.
        size: Size in bytes.
        sha256: SHA-256 of the plan file.
        flavour: ``tensorrt`` or ``tensorrt-rtx``.
        version: Version of the builder.
        compute_capabilities: GPUs that the plan was built for, such as ``8.9``. Empty: any GPU that the flavour supports.
        source: SHA-256 over everything that determines the plan: graph, weights, options and builder version.
        max_batch: Largest number of sequences of a call that decodes.
        profiles: (min, opt, max) nodes of a call: for decoding and, unless it is the draft's plan, for prefill.
        fused_attentions: Number of layers whose attention is a single kernel.
        fused_cache_updates: Number of cache updates that are a single kernel.
    """

    file: str
    size: int
    sha256: str
    flavour: str
    version: str
    compute_capabilities: tuple[str, ...]
    source: str
    max_batch: int
    profiles: tuple[tuple[int, ...], ...]
    fused_attentions: int
    fused_cache_updates: int


@dataclass(frozen=True)
class Manifest:
    """Description of an engine directory.

    Attributes:
        format_version: :data:`FORMAT_VERSION`.
        model: Name of the model directory that was exported.
        geometry: Geometry of the base model.
        exit_head: Configuration of the exit head.
        dtype: Element type of weights, caches and activations.
        quantization: Quantization of the weights.
        max_seq_len: S, the slots of the KV cache.
        max_tree_nodes: M, the drafted nodes that fit a round.
        draft_top_k: K, the candidates that the draft reports for each node.
        bos_token_id: Token that begins a text; None if the model has none.
        eos_token_ids: Tokens that end a text.
        draft: The draft graph.
        verify: The verify graph: its stages in order, or a single one.
        files: Size and hash of every file that the export wrote, besides the manifest.
        linked: Checkpoint files that are hard-linked into the directory; empty without ``--link-weights``.
        tools: Versions of the packages that wrote the directory.
        plans: TensorRT plans by the name of the graph file that they were built from.
    """

    format_version: int
    model: str
    geometry: Geometry
    exit_head: ExitConfig
    dtype: str
    quantization: Quantizations
    max_seq_len: int
    max_tree_nodes: int
    draft_top_k: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    draft: GraphInfo
    verify: tuple[GraphInfo, ...]
    files: dict[str, FileInfo]
    linked: dict[str, LinkInfo]
    tools: dict[str, str]
    plans: dict[str, PlanInfo]

    def on_rank(self, ranks: int) -> "Manifest":
        """This manifest with the geometry of one of so many ranks: that of caches and buffers there, but not of weights.

        Raises:
            EESDError: The model cannot be split over so many ranks.
        """
        if ranks > 1 and self.exit_head.eagle:
            raise EESDError("An EAGLE-3 head cannot be split over ranks; start one process, or export with an exit head.")
        if ranks > 1 and len(self.verify) > 1:
            raise EESDError("The directory has verify in stages; export it without --stages to split its layers over ranks.")
        return replace(self, geometry=self.geometry.on_rank(ranks))

    @property
    def gpu_slots(self) -> int:
        """Slots of the caches on a GPU: behind those of the text there is room for the nodes that pad a round.

        A multiple of 16, so that the caches of every layer are aligned as TensorRT requires.
        """
        return -(-(self.max_seq_len + self.max_tree_nodes) // 16) * 16

    def attended_slots(self, graph: GraphInfo) -> tuple[int, ...]:
        """How many of the first slots attention in a graph's plan may read, ascending: the columns of its mask.

        A draft that reads the caches where they are reads all slots: of fewer, TensorRT-RTX makes a copy, and reads that.
        """
        if graph == self.draft and one_node_is_faster(self.max_seq_len, self.quantization):
            return (self.gpu_slots,)
        return first_slots(self.gpu_slots)

    @property
    def gpu_prefill_chunk(self) -> int:
        """Prompt tokens of one prefill call on a GPU: what plans are built for unless the builder is told otherwise."""
        return min(GPU_PREFILL_CHUNK, self.max_seq_len)

    @property
    def graphs(self) -> tuple[GraphInfo, ...]:
        """The graphs that run: the draft graph, unless it is a place holder, and the stages of the verify graph."""
        return (self.draft, *self.verify) if self.exit_head.can_draft else self.verify

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file, linked files included, plans not included."""
        own = {name: info.size for name, info in self.files.items()}
        return own | {name: info.size for name, info in self.linked.items()}

    def weights_of(self, graph: GraphInfo) -> dict[str, StoredWeight]:
        """The weights that ``graph`` uses, by name. A weight that several graphs use has the same name in each."""
        layers = self.base_layers(graph)
        draft, packed = graph == self.draft, not self.linked
        shapes = graph_shapes(
            self.geometry, self.exit_head, self.max_seq_len, layers, draft, self.dtype, self.quantization, packed
        )
        wide = self.geometry.wide_norms
        return {
            name: stored_weight(name, shape, self.dtype, self.quantization, wide_norms=wide) for name, shape in shapes.items()
        }

    def weight_bytes(self, graph: GraphInfo) -> int:
        """Bytes of the weights that ``graph`` uses, scales, zero points and minimums included."""
        return sum(weight.nbytes for weight in self.weights_of(graph).values())

    def base_layers(self, graph: GraphInfo) -> range:
        """The base layers that ``graph`` runs; the draft with an EAGLE-3 head runs none."""
        layers = [index for index in graph.caches if index < self.geometry.num_layers]
        return range(layers[0], layers[-1] + 1) if layers else range(0)

    @property
    def num_caches(self) -> int:
        """One cache for each base layer and each block of the head, and those of states."""
        return self.geometry.num_layers + len(exit_caches(self.geometry, self.exit_head))

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """The base layers of each stage of verify."""
        return tuple(self.base_layers(stage) for stage in self.verify)

    def to_json(self) -> str:
        """The content of ``manifest.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"
