"""``manifest.json``: what an engine directory holds. The one contract between exporting and running; needs no torch."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.weights import DTYPES, QUANTIZED, Quantization, StoredWeight, graph_shapes, stored_weight

FORMAT_VERSION = 3
NAME = "manifest.json"
WEIGHTS = "weights.bin"
SAMPLES, SAMPLE_BYTES = 256, 4096
"""Pieces of a linked file that its hash is of, a megabyte in all: weights of another model differ in every one."""
PREFILL_CHUNK = 128
"""Tokens of the prompt that the runtime gives to one call; a plan is built for as many."""
MASKED = -30000.0
"""Added to the attention score of a slot that must not be seen: fits float16, and its softmax weight is exactly zero."""
FLAVOURS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""Kinds of plans, and the module that builds and runs each."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
SLOTS, TREE_NODES, TOP_K = 4096, 32, 8
"""What an export takes for :data:`LIMITS` unless told otherwise; at most the model's positions."""
LIMITS = ("max_seq_len", "max_tree_nodes", "draft_top_k")


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape (``B``, ``n`` and ``S`` are symbolic) and element type of a graph's input or output."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class GraphInfo:
    """One graph: its file, its tensors, and which of the L + E caches it reads and writes, in input order."""

    file: str
    caches: tuple[int, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def results(self) -> tuple[TensorInfo, ...]:
        """The outputs besides the caches: logits or a hidden state, from a draft also candidates and log-probabilities."""
        return self.outputs[: len(self.outputs) - 2 * len(self.caches)]


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of a file of the directory."""

    size: int
    sha256: str


@dataclass(frozen=True)
class LinkInfo:
    """A file of the checkpoint itself, hard-linked into the directory: size in bytes, time of its last change (nanoseconds
    since the epoch), and SHA-256 of pieces of it. To hash all of it would take longer than the rest of the export."""

    size: int
    mtime_ns: int
    samples: str

    @classmethod
    def of(cls, path: Path) -> "LinkInfo":
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, _sampled_sha256(path, status.st_size))


@dataclass(frozen=True)
class PlanInfo:
    """A TensorRT plan that was built of one graph, and all that must fit before it may be loaded. Its tensors are the graph's.

    ``flavour`` is ``tensorrt`` or ``tensorrt-rtx``, ``version`` the builder's. ``compute_capabilities`` are those of the GPUs
    that it was built for, such as ``8.9``; none where any supported GPU will do. ``source`` is the hash of all that went into
    it. ``profiles`` are the (fewest, best, most) nodes of a call, for decoding and for prefill. The last two count the layers
    whose attention and whose cache update are a single kernel.
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
    """Everything the runtime must know about an engine directory."""

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
    """The stages of the verify graph in order; one, unless it was split over several devices."""
    files: dict[str, FileInfo]
    linked: dict[str, LinkInfo]
    """Files of the checkpoint that the graphs use as they are; none unless they were asked for."""
    tools: dict[str, str]
    plans: dict[str, PlanInfo]
    """Plans by the name of the graph file they were built of."""

    @property
    def graphs(self) -> tuple[GraphInfo, ...]:
        return (self.draft, *self.verify)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file, those of the checkpoint included, but not the plans."""
        own = {name: info.size for name, info in self.files.items()}
        return own | {name: info.size for name, info in self.linked.items()}

    def weights_of(self, graph: GraphInfo) -> dict[str, StoredWeight]:
        """The weights that a graph uses, by name. What several graphs use has the same name in each."""
        layers = [index for index in graph.caches if index < self.geometry.num_layers]
        shapes = graph_shapes(self.geometry, self.exit_head, self.max_seq_len, layers, graph == self.draft)
        return {name: stored_weight(name, shape, self.dtype, self.quantization) for name, shape in shapes.items()}

    @property
    def num_caches(self) -> int:
        """L + E: one key and one value cache for each base layer and each exit block."""
        return self.geometry.num_layers + self.exit_head.blocks

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """The base layers of each stage of verify."""
        base = [[index for index in stage.caches if index < self.geometry.num_layers] for stage in self.verify]
        return tuple(range(layers[0], layers[-1] + 1) for layers in base)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, read in pieces; ``progress`` is told the bytes of each."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def _sampled_sha256(path: Path, size: int) -> str:
    """SHA-256 of :data:`SAMPLES` pieces at equal distances, the first and the last one included."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def load_manifest(directory: Path) -> Manifest:
    """Read and check a directory's manifest and that every file it names is there in its full size.

    Raises :class:`EESDError` when the directory is no engine directory, is damaged, or is of another format version.
    """
    path = directory / NAME
    if not directory.is_dir():
        raise EESDError(f"{directory} is not a directory; give the output directory of eesd-export.")
    if not path.exists():
        raise EESDError(f"{directory} has no {NAME}; give the output directory of eesd-export.")
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
        raise EESDError(f"{path} is damaged (a value is missing or cannot be); export the model again.") from None
    for name, size in manifest.sizes.items():
        file = directory / name
        if not file.exists():
            raise EESDError(f"{file} is missing; export the model again.")
        if file.stat().st_size != size:
            raise EESDError(f"{file} has {file.stat().st_size} bytes where the manifest says {size}; export the model again.")
    return manifest


def verify_files(directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> None:
    """Hash every file again; :class:`EESDError` names the first that was changed after the export. Of a linked one, pieces are
    hashed, and the time of its last change must be the same."""
    for name, info in manifest.files.items():
        if sha256_of(directory / name, progress) != info.sha256:
            raise EESDError(f"{directory / name} was changed after the export (its SHA-256 differs); export the model again.")
    for name, linked in manifest.linked.items():
        if LinkInfo.of(directory / name) != linked:
            raise EESDError(
                f"{directory / name}, a link to the checkpoint's own file, was changed after the export (or copied without its "
                "time); export the model again."
            )
        progress(linked.size)


def check_plan(directory: Path, plan: PlanInfo) -> None:
    """Hash a plan; :class:`EESDError` when it is missing, cut short or changed."""
    path = directory / plan.file
    if not path.exists():
        raise EESDError(f"{path} is missing; build it with: eesd-build {directory}.")
    if path.stat().st_size != plan.size or sha256_of(path) != plan.sha256:
        raise EESDError(f"{path} was changed after it was built; build it again with: eesd-build --force {directory}.")


def _parse(raw: Mapping[str, Any]) -> Manifest:
    """The manifest in ``raw``; AttributeError, TypeError or ValueError where a value is missing or cannot be."""
    manifest: Manifest = _typed(Manifest, raw)
    exit_head = manifest.exit_head
    sizes = [getattr(manifest.geometry, name) for name in SIZES] + [getattr(manifest, name) for name in LIMITS]
    if min(*sizes, exit_head.layer, exit_head.blocks) < 1 or manifest.dtype not in DTYPES:
        raise ValueError("a size is below 1, or the element type is unknown")
    quantized = manifest.quantization
    if quantized is not None and (quantized.weights not in QUANTIZED or quantized.block < 1):
        raise ValueError("an unknown quantization")
    if not {WEIGHTS, *(graph.file for graph in manifest.graphs)} <= manifest.files.keys():
        raise ValueError("a file is not listed")
    if any(Path(name).name != name for name in (*manifest.files, *manifest.linked)):
        raise ValueError("a file is outside the directory")
    exits = range(manifest.geometry.num_layers, manifest.num_caches)
    _check_graph(manifest.draft, [*range(manifest.exit_head.layer), *exits], manifest, first=True, last=True)
    _check_stages(manifest, exits)
    if not manifest.plans.keys() <= {graph.file for graph in manifest.graphs}:
        raise ValueError("a plan of no graph")
    if any(Path(plan.file).name != plan.file for plan in manifest.plans.values()):
        raise ValueError("a plan is outside the directory")
    return manifest


def _check_stages(manifest: Manifest, exits: range) -> None:
    """Each stage goes on where the one before it ended; the first has all that the draft uses."""
    end, last = 0, len(manifest.verify) - 1
    for number, stage in enumerate(manifest.verify):
        own = exits if number == 0 else range(0)
        begin, end = end, end + len(stage.caches) - len(own)
        if end < max(begin + 1, manifest.exit_head.layer):
            raise ValueError("stages")
        _check_graph(stage, [*range(begin, end), *own], manifest, first=number == 0, last=number == last)
    if end != manifest.geometry.num_layers:
        raise ValueError("stages")


def _typed(kind: Any, value: Any) -> Any:
    """``value``, as it came from JSON, as the annotated type ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return value if type(value) in arguments else _typed(arguments[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if value.keys() != hints.keys():
            raise ValueError(kind)
        return kind(**{name: _typed(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is tuple and type(value) is list:
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is dict and type(value) is dict:
        return {name: _typed(arguments[1], item) for name, item in value.items()}
    if type(value) is not kind:  # isinstance would take True for a number
        raise TypeError(kind)
    return value


def _check_graph(graph: GraphInfo, caches: Sequence[int], manifest: Manifest, first: bool, last: bool) -> None:
    """The caches must be those of the geometry, and the tensors those that the runtime binds.

    The first stage takes token ids, the last gives logits; between them cross hidden states.
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
