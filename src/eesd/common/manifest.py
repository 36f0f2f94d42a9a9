"""``manifest.json``: the contract between exporting and running an engine directory.

docs/engine-directory.md specifies the format. The module needs no torch.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry, draft_caches, exit_caches
from eesd.common.weights import DTYPES, QUANTIZED, Quantization, StoredWeight, graph_shapes, stored_weight

FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
DEFAULT_SLOTS, DEFAULT_TREE_NODES, DEFAULT_TOP_K = 4096, 32, 8
"""Defaults of an export for ``max_seq_len`` (or the model's positions, if fewer), ``max_tree_nodes`` and ``draft_top_k``."""
PREFILL_CHUNK = 128
"""Prompt tokens of one prefill call: the runtime's default, and the default that plans are built for."""
MASKED = -30000.0
"""Additive mask of a slot that must not be seen. It fits float16, and its softmax weight is exactly zero."""
FLAVOURS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""The flavours of TensorRT plans, and the Python module that builds and runs each."""

_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""Pieces of a linked file that are hashed: one megabyte in all. Weights of two models differ in every piece."""
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_LIMITS = ("max_seq_len", "max_tree_nodes", "draft_top_k")


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and element type of an input or output of a graph. ``B``, ``n`` and ``S`` in a shape are symbolic."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


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

    @classmethod
    def of(cls, path: Path) -> "LinkInfo":
        """Describe the file at ``path``."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, _sampled_sha256(path, status.st_size))


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
        max_batch: Largest number of sequences of a call.
        profiles: (min, opt, max) nodes of a call, for decoding and for prefill.
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
        quantization: Quantization of the linear weights; None if there is none.
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
    quantization: Quantization | None
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

    @property
    def graphs(self) -> tuple[GraphInfo, ...]:
        """The draft graph and the stages of the verify graph."""
        return (self.draft, *self.verify)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file, linked files included, plans not included."""
        own = {name: info.size for name, info in self.files.items()}
        return own | {name: info.size for name, info in self.linked.items()}

    def weights_of(self, graph: GraphInfo) -> dict[str, StoredWeight]:
        """The weights that ``graph`` uses, by name. A weight that several graphs use has the same name in each."""
        layers = self.base_layers(graph)
        shapes = graph_shapes(self.geometry, self.exit_head, self.max_seq_len, layers, graph == self.draft)
        return {name: stored_weight(name, shape, self.dtype, self.quantization) for name, shape in shapes.items()}

    def weight_bytes(self, graph: GraphInfo) -> int:
        """Bytes of the weights that ``graph`` uses, scales included."""
        return sum(weight.nbytes for weight in self.weights_of(graph).values())

    def base_layers(self, graph: GraphInfo) -> range:
        """The base layers that ``graph`` runs."""
        layers = [index for index in graph.caches if index < self.geometry.num_layers]
        return range(layers[0], layers[-1] + 1)

    @property
    def num_caches(self) -> int:
        """L + E: one cache for each base layer and each exit block."""
        return self.geometry.num_layers + self.exit_head.blocks

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """The base layers of each stage of verify."""
        return tuple(self.base_layers(stage) for stage in self.verify)

    def to_json(self) -> str:
        """The content of ``manifest.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file.

    Args:
        path: File to hash. It is read in pieces.
        progress: Called with the number of bytes of each piece.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def _sampled_sha256(path: Path, size: int) -> str:
    """SHA-256 of pieces at equal distances, including the first and the last bytes of the file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of an engine directory, and check that every file is there and has its full size.

    Raises:
        EESDError: ``directory`` is not an engine directory, is damaged, or has another format version.
    """
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise EESDError(f"{directory} is not a directory; give the output directory of eesd-export.")
    if not path.exists():
        raise EESDError(f"{directory} has no {MANIFEST_FILE}; give the output directory of eesd-export.")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise EESDError(f"{path} is not valid JSON; export the model again.") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version is None:
        raise EESDError(f"{path} is not an EESD manifest; give the output directory of eesd-export.")
    if version != FORMAT_VERSION:
        raise EESDError(
            f"{path} has format version {version}, this EESD reads version {FORMAT_VERSION}; export the model again."
        )
    try:
        manifest = _parse(raw)
    except (AttributeError, TypeError, ValueError):
        raise EESDError(f"{path} is damaged (a value is missing or invalid); export the model again.") from None
    for name, size in manifest.sizes.items():
        file = directory / name
        if not file.exists():
            raise EESDError(f"{file} is missing; export the model again.")
        if file.stat().st_size != size:
            raise EESDError(f"{file} has {file.stat().st_size} bytes where the manifest says {size}; export the model again.")
    return manifest


def verify_files(directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> None:
    """Check that no file was changed after the export.

    Files that the export wrote are hashed. For linked files the size, the time of the last change and the hash of the samples
    are compared.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        progress: Called with numbers of bytes that have been checked.

    Raises:
        EESDError: A file was changed. The message names the first one.
    """
    for name, info in manifest.files.items():
        if sha256_of(directory / name, progress) != info.sha256:
            raise EESDError(f"{directory / name} was changed after the export (its SHA-256 differs); export the model again.")
    for name, linked in manifest.linked.items():
        if LinkInfo.of(directory / name) != linked:
            raise EESDError(
                f"{directory / name}, a link to the checkpoint's own file, was changed after the export (or copied without its "
                "modification time); export the model again."
            )
        progress(linked.size)


def check_plan(directory: Path, plan: PlanInfo) -> None:
    """Check a plan's size and SHA-256. Raises :class:`EESDError` if it is missing or was changed."""
    path = directory / plan.file
    if not path.exists():
        raise EESDError(f"{path} is missing; build it with: eesd-build {directory}.")
    if path.stat().st_size != plan.size or sha256_of(path) != plan.sha256:
        raise EESDError(f"{path} was changed after it was built; build it again with: eesd-build --force {directory}.")


def _parse(raw: Mapping[str, Any]) -> Manifest:
    """Build a manifest from JSON. Raises AttributeError, TypeError or ValueError if a value is missing or invalid."""
    manifest: Manifest = _from_json(Manifest, raw)
    exit_head = manifest.exit_head
    sizes = [getattr(manifest.geometry, name) for name in _SIZES] + [getattr(manifest, name) for name in _LIMITS]
    if min(*sizes, exit_head.layer, exit_head.blocks) < 1 or manifest.dtype not in DTYPES:
        raise ValueError("a size is below 1, or the element type is unknown")
    quantized = manifest.quantization
    if quantized is not None and (quantized.weights not in QUANTIZED or quantized.block < 1):
        raise ValueError("an unknown quantization")
    if not {WEIGHTS_FILE, *(graph.file for graph in manifest.graphs)} <= manifest.files.keys():
        raise ValueError("a file is not listed")
    if any(Path(name).name != name for name in (*manifest.files, *manifest.linked)):
        raise ValueError("a file is outside the directory")
    _check_graph(manifest.draft, draft_caches(manifest.geometry, exit_head), manifest, first=True, last=True)
    _check_stages(manifest)
    if not manifest.plans.keys() <= {graph.file for graph in manifest.graphs}:
        raise ValueError("a plan of no graph")
    if any(Path(plan.file).name != plan.file for plan in manifest.plans.values()):
        raise ValueError("a plan is outside the directory")
    return manifest


def _check_stages(manifest: Manifest) -> None:
    """Check that each stage begins where the previous one ends, and that the first has every cache of the draft."""
    end, last = 0, len(manifest.verify) - 1
    for number, stage in enumerate(manifest.verify):
        exits = exit_caches(manifest.geometry, manifest.exit_head) if number == 0 else range(0)
        begin, end = end, end + len(stage.caches) - len(exits)
        if end < max(begin + 1, manifest.exit_head.layer):
            raise ValueError("stages")
        _check_graph(stage, [*range(begin, end), *exits], manifest, first=number == 0, last=number == last)
    if end != manifest.geometry.num_layers:
        raise ValueError("stages")


def _from_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the annotated type ``kind``: a dataclass, a tuple, a dict, an optional or a plain type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return value if type(value) in arguments else _from_json(arguments[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if value.keys() != hints.keys():
            raise ValueError(kind)
        return kind(**{name: _from_json(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is tuple and type(value) is list:
        return tuple(_from_json(arguments[0], item) for item in value)
    if origin is dict and type(value) is dict:
        return {name: _from_json(arguments[1], item) for name, item in value.items()}
    if type(value) is not kind:  # isinstance would accept True as a number
        raise TypeError(kind)
    return value


def _check_graph(graph: GraphInfo, caches: Sequence[int], manifest: Manifest, first: bool, last: bool) -> None:
    """Check that a graph has exactly these caches, and the inputs and outputs that the runtime binds.

    The first stage takes token ids and the last returns logits. Between stages a hidden state is passed on.
    """
    shape = ("B", manifest.geometry.num_kv_heads, "S", manifest.geometry.head_dim)
    wanted = [(f"{part}_{index}", shape) for index in caches for part in ("key", "value")]
    hidden = (("B", "n", manifest.geometry.hidden_size), manifest.dtype)
    x = TensorInfo("input_ids", ("B", "n"), "int64") if first else TensorInfo("hidden", *hidden)
    y = TensorInfo("logits", ("B", "n", manifest.geometry.vocab_size), "float32") if last else TensorInfo("hidden_out", *hidden)
    if list(graph.caches) != caches or [(tensor.name, tensor.shape) for tensor in graph.inputs[4:]] != wanted:
        raise ValueError("caches")
    if graph.inputs[:1] != (x,) or graph.outputs[:1] != (y,):
        raise ValueError("input_ids, hidden or logits")
