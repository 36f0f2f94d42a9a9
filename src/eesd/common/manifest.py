"""``manifest.json`` is the contract between the export and the use of an engine directory.

docs/engine-directory.md specifies the format. Reading checks every value before anything uses it.
The module needs no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from eesd.common.checks import first_fault, is_file_name, shown
from eesd.common.errors import EESDError
from eesd.common.geometry import (
    ExitConfig,
    Geometry,
    draft_caches,
    draft_columns,
    exit_caches,
    head_fault,
)
from eesd.common.json_input import from_json, read_json
from eesd.common.quantization import (
    BLOCKS,
    DTYPES,
    FP8_WEIGHTS,
    LEVELS,
    MXFP4,
    NVFP4,
    OWN_BLOCKS,
    SCALE_TYPES,
    Quantization,
    Quantizations,
)

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
DRAFT_VOCAB_FILE = "draft_vocab.bin"
"""File with the ids of the draft vocabulary. They are little-endian int64 in ascending order. The
file is external data of the draft graph."""
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options that are adopted from a model's ``generation_config.json``, as vLLM does by
default."""
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens available to chat templates, by their names in tokenizer_config.json."""
DEFAULT_SLOTS = 4096
DEFAULT_TREE_NODES = 32
DEFAULT_TOP_K = 8
"""Defaults of an export for ``max_seq_len`` (at most the model's number of positions),
``max_tree_nodes`` and ``draft_top_k``."""
MAX_SLOTS = 1 << 24
MAX_TREE_NODES = 512
MAX_TOP_K = 64
"""Largest ``max_seq_len``, ``max_tree_nodes`` and ``draft_top_k``."""
PREFILL_CHUNK = 128
"""Number of prompt tokens of one prefill call on the CPU."""
GPU_PREFILL_CHUNK = 512
"""Number of prompt tokens of one prefill call on a GPU. Up to about this number of tokens, a call
takes longer to read all weights than to compute."""
MASKED = -30000.0
"""Value that the additive mask has at a hidden slot. It fits float16, and makes the slot's softmax
weight exactly zero."""
SLOTS_PROPERTY = "max_seq_len"
"""Name of a graph's metadata property, which stores the number of rows of its rotary tables."""
EXACT_NODES = 64
"""Up to this number of nodes, a GPU spends more time on reading weights than on computing, so a
call with this number of nodes costs little more than a smaller call."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and element type of an input or output of a graph. ``B``, ``n``, ``S`` and ``R``
    in a shape are symbolic dimensions."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def sized(self, **sizes: int) -> tuple[int, ...]:
        """The shape with the symbolic dimensions replaced by these sizes."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


@dataclass(frozen=True)
class GraphInfo:
    """One graph of the directory.

    Attributes:
        file: Name of the ONNX file.
        caches: Indices of the caches that the graph reads and writes, in input order.
        inputs: The inputs in order. The cache tensors come last.
        outputs: The outputs in order. The cache tensors come last.
    """

    file: str
    caches: tuple[int, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    @property
    def results(self) -> tuple[TensorInfo, ...]:
        """The outputs that are not caches. These are the logits or a hidden state. The draft also
        returns candidates and their log-probabilities."""
        return self.outputs[: len(self.outputs) - 2 * len(self.caches)]


@dataclass(frozen=True)
class FileInfo:
    """A file that EESD wrote.

    Attributes:
        size: Size in bytes.
        sha256: SHA-256 of the file.
        samples: SHA-256 of 256 pieces of 4096 bytes at equal distances, for a file that is too
            large to be hashed at each load. It is empty for a smaller file.
    """

    size: int
    sha256: str
    samples: str = ""


@dataclass(frozen=True)
class LinkInfo:
    """A checkpoint file that is hard-linked into the directory.

    Only samples are hashed, because hashing a whole checkpoint would take longer than the rest of
    an export with links.

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
    """A TensorRT plan built from one graph. It has the graph's inputs and outputs.

    Attributes:
        file: Name of the plan file.
        size: Size in bytes.
        sha256: SHA-256 of the plan file.
        flavour: ``tensorrt`` or ``tensorrt-rtx``.
        version: Version of the builder.
        compute_capabilities: GPUs that the plan was built for, such as ``8.9``. If it is empty, the
            plan runs on any GPU that the flavour supports.
        source: SHA-256 of everything that determines the plan. This includes the graph, the
            weights, the options and the builder version.
        max_batch: Largest number of sequences in a decoding call.
        profiles: The (min, opt, max) nodes of a call. There is one profile for decoding and, except
            in the draft's plan, another for prefill.
        fused_attentions: Number of layers whose attention runs as a single kernel.
        fused_cache_updates: Number of cache updates that run as a single kernel.
        refit: SHA-256 of the graph and weights that are loaded with a plan without weights.
            Empty if the plan contains its weights.
        samples: As in :class:`FileInfo`.
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
    refit: str = ""
    samples: str = ""

    @property
    def written(self) -> FileInfo:
        """Description of the plan's file."""
        return FileInfo(self.size, self.sha256, self.samples)


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling options of a model's ``generation_config.json``. An option is None if it is not
    in the file.

    Attributes:
        not_applied: Options of the file that would change the tokens but are not applied.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    not_applied: tuple[str, ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        """The options in the file, by name."""
        return {
            name: getattr(self, name)
            for name in SAMPLING_OPTIONS
            if getattr(self, name) is not None
        }

    @property
    def notice(self) -> str:
        """One line about the options that are not applied, or "" if there are none."""
        if not self.not_applied:
            return ""
        names = ", ".join(self.not_applied)
        return f"generation_config.json: not applied: {names}; transformers may give other tokens."


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
        max_seq_len: Number of slots of the KV cache, S.
        max_tree_nodes: The largest number of drafted nodes in a round, M.
        draft_top_k: Number of candidates that the draft returns for each node, K.
        bos_token_id: Token that begins a text, or None if the model has none.
        eos_token_ids: Tokens that end a text.
        sampling: Sampling options of requests that set none.
        draft: The draft graph.
        verify: The stages of the verify graph in order. An unsplit verify graph has a single stage.
        files: Description of every file that the export wrote, except the manifest and builds for
            the CPU.
        linked: Checkpoint files that are hard-linked into the directory. The list is empty without
            ``--link-weights``.
        tools: Versions of the packages that wrote the directory.
        plans: TensorRT plans. Each key is the name of the graph file that the plan was built from.
        packed: SHA-256 of the file list of a build for the CPU if the weights are only in that
            build. It is empty if they are elsewhere.
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
    sampling: SamplingDefaults
    draft: GraphInfo
    verify: tuple[GraphInfo, ...]
    files: dict[str, FileInfo]
    linked: dict[str, LinkInfo]
    tools: dict[str, str]
    plans: dict[str, PlanInfo]
    packed: str = ""

    def on_rank(self, ranks: int) -> "Manifest":
        """This manifest with the geometry of one rank. It describes the rank's caches and buffers,
        not its weights.

        Raises:
            EESDError: The model cannot be split over this many ranks.
        """
        fault = first_fault(
            {
                "An EAGLE-3 head cannot be split over ranks; start one process, or export with an "
                "exit head.": self.exit_head.eagle,
                "The directory has verify in stages; export it without --stages to split its "
                "layers over ranks.": len(self.verify) > 1,
            }
        )
        if ranks > 1 and fault:
            raise EESDError(fault)
        return replace(self, geometry=self.geometry.on_rank(ranks))

    @property
    def gpu_slots(self) -> int:
        """Number of cache slots on a GPU. The caches have slots for the text, and room for the
        nodes that pad a round.

        The number is a multiple of 16, so that the caches of every layer are aligned as TensorRT
        requires.
        """
        return -(-(self.max_seq_len + self.max_tree_nodes) // 16) * 16

    @property
    def gpu_prefill_chunk(self) -> int:
        """Number of prompt tokens of one prefill call on a GPU. The builder uses this default for
        plans."""
        return min(GPU_PREFILL_CHUNK, self.max_seq_len)

    @property
    def graphs(self) -> tuple[GraphInfo, ...]:
        """The graphs that run. These are the verify stages, and the draft graph unless it is a
        placeholder."""
        return (self.draft, *self.verify) if self.exit_head.can_draft else self.verify

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file, including linked files but not plans."""
        own = {name: info.size for name, info in self.files.items()}
        return own | {name: info.size for name, info in self.linked.items()}

    @property
    def is_packed(self) -> bool:
        """Whether the weights are only in a build for the CPU. The directory then has no
        :data:`WEIGHTS_FILE`."""
        return WEIGHTS_FILE not in self.files

    def check_whole(self, directory: Path) -> None:
        """Raise :class:`EESDError` unless any backend can read the weights in ``directory``."""
        if self.is_packed:
            raise EESDError(
                f"{directory} has weights packed for this project's operators alone, as --model "
                "keeps them on a CPU; give --model with this --backend, or export the model with "
                "eesd-export."
            )

    def base_layers(self, graph: GraphInfo) -> range:
        """The base layers that ``graph`` runs. The draft of an EAGLE-3 head runs none."""
        if graph == self.draft:
            return range(self.exit_head.layer)
        every = range(self.geometry.num_layers)
        layers = [one for one in every if self.geometry.caches_of(one).start in graph.caches]
        return range(min(layers, default=0), max(layers, default=-1) + 1)

    @property
    def num_caches(self) -> int:
        """Number of caches of the base layers and of the head."""
        return exit_caches(self.geometry, self.exit_head).stop

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """The base layers of each verify stage."""
        return tuple(self.base_layers(stage) for stage in self.verify)

    def to_json(self) -> str:
        """The content of ``manifest.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of an engine directory, and check that every file exists with its
    full size.

    Raises:
        EESDError: ``directory`` is not an engine directory, is damaged, or has another format
            version.
    """
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        if aside := [*directory.parent.glob(f".{escape(directory.name)}.eesd-*.old")]:
            raise EESDError(
                f"{directory} was moved to {aside[0]} by an export that was killed; rename "
                "it, or export again."
            )
        raise EESDError(
            f"{directory} is not a directory; give the output directory of eesd-export, or a model "
            "with --model."
        )
    if not path.exists() and (directory / "config.json").exists():
        raise EESDError(
            f"{directory} is a model, not an engine directory; give it with --model, or export it "
            "with eesd-export."
        )
    if not path.exists():
        raise EESDError(
            f"{directory} has no {MANIFEST_FILE}; give the output directory of eesd-export."
        )
    raw = read_json(path, "export the model again")
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version is None:
        raise EESDError(
            f"{path} is not an EESD manifest; give the output directory of eesd-export."
        )
    if version != FORMAT_VERSION:
        raise EESDError(
            f"{path} has format version {shown(version)}, this EESD reads version "
            f"{FORMAT_VERSION}; export the model again."
        )
    try:
        manifest = _parse(raw)
    except ValueError as error:
        raise EESDError(f"{path} is damaged ({error}); export the model again.") from None
    for name, size in manifest.sizes.items():
        file = directory / name
        if not file.exists():
            raise EESDError(f"{file} is missing; export the model again.")
        if file.stat().st_size != size:
            raise EESDError(
                f"{file} has {file.stat().st_size} bytes where the manifest says {size}; "
                "export the model again."
            )
    return manifest


def _parse(raw: Mapping[str, Any]) -> Manifest:
    """Build a manifest from JSON. Raises ValueError if a value is missing or invalid."""
    manifest = from_json(Manifest, raw)
    exit_head = manifest.exit_head
    geometry = manifest.geometry
    least = int(exit_head.eagle is None)
    most = geometry.num_layers - (exit_head.blocks > 0)
    # Check the numbers before they are used as sizes.
    sizes = {
        "max_seq_len": MAX_SLOTS,
        "max_tree_nodes": MAX_TREE_NODES,
        "draft_top_k": MAX_TOP_K,
    }
    faults = {
        f"{name} must be between 1 and {limit}": not 1 <= getattr(manifest, name) <= limit
        for name, limit in sizes.items()
    } | {
        "max_seq_len has no room for the nodes of a round": (
            manifest.max_seq_len <= manifest.max_tree_nodes
        ),
        "the element type is unknown": manifest.dtype not in DTYPES,
        "the exit head does not fit the model": (
            not least <= exit_head.layer <= most
            or not 0 <= exit_head.blocks <= len(geometry.attention_layers)
        ),
    }
    if fault := first_fault(faults):
        raise ValueError(fault)
    geometry.check_window(manifest.max_tree_nodes)
    graphs = {graph.file for graph in manifest.graphs}
    files = (*manifest.files, *manifest.linked)
    if fault := head_fault(geometry, exit_head) or first_fault(
        {
            "states of layers in several stages": (
                (exit_head.read_layers or not geometry.has_stages) and len(manifest.verify) > 1
            ),
            "the draft vocabulary": not _draft_vocab_fits(manifest),
            "an unknown quantization": not _is_known(manifest.quantization),
            "a file is not listed": not graphs <= manifest.files.keys(),
            "a file is outside the directory": not all(map(is_file_name, files)),
            "a plan of no graph": not manifest.plans.keys() <= graphs,
            "a plan is outside the directory": (
                not all(is_file_name(plan.file) for plan in manifest.plans.values())
            ),
        }
    ):
        raise ValueError(fault)
    _check_graph(manifest.draft, draft_caches(geometry, exit_head), manifest, first=True, last=True)
    _check_stages(manifest)
    return manifest


def _draft_vocab_fits(manifest: Manifest) -> bool:
    """Whether the draft vocabulary is consistent. Either there is none, or it has a file and enough
    tokens for a node's candidates."""
    head = manifest.exit_head
    listed = DRAFT_VOCAB_FILE in manifest.files
    if not head.draft_vocab:
        return not listed
    fits = manifest.draft_top_k <= head.draft_vocab <= manifest.geometry.vocab_size
    return (
        fits
        and head.own_lm_head
        and listed
        and manifest.files[DRAFT_VOCAB_FILE].size == 8 * head.draft_vocab
    )


def _is_known(quantization: Quantizations) -> bool:
    """Whether every kind of quantization is known."""
    places = (one for one in quantization.places.values() if one not in (None, NVFP4))
    return all(map(_is_known_kind, quantization.used)) and all(
        one is not None and one.block in BLOCKS for one in places
    )


def _is_known_kind(one: Quantization) -> bool:
    if one in (NVFP4, MXFP4):
        return True
    return (
        one.weights in LEVELS
        and one.block in OWN_BLOCKS
        and one.scales in (None, *SCALE_TYPES)
        and (one.integers or replace(one, block=32, scales=None) == FP8_WEIGHTS)
    )


def _check_stages(manifest: Manifest) -> None:
    """Check that each stage begins where the previous one ends, and that the first stage has all
    caches of the draft."""
    geometry = manifest.geometry
    end = 0
    last = len(manifest.verify) - 1
    for number, stage in enumerate(manifest.verify):
        layers = manifest.base_layers(stage)
        if layers.start != end or layers.stop < max(end + 1, manifest.exit_head.layer):
            raise ValueError("stages")
        caches = [*dict.fromkeys(one for layer in layers for one in geometry.caches_of(layer))]
        end = layers.stop
        if number == 0:
            caches += exit_caches(geometry, manifest.exit_head)
        _check_graph(stage, caches, manifest, first=number == 0, last=number == last)
    if end != manifest.geometry.num_layers:
        raise ValueError("stages")


def _check_graph(
    graph: GraphInfo, caches: Sequence[int], manifest: Manifest, first: bool, last: bool
) -> None:
    """Check that a graph has exactly these caches, and the inputs and outputs that the runtime
    binds.

    The first stage reads token ids, and the last stage returns logits. Between stages, hidden
    states are passed on.
    """
    geometry = manifest.geometry
    dtype = manifest.dtype
    shape = ("B", geometry.num_kv_heads, "S", geometry.head_dim)
    names = [f"{part}_{index}" for index in caches for part in ("key", "value")]
    hidden = (("B", "n", geometry.hidden_size), dtype)
    is_draft = graph is manifest.draft
    rows = last and not is_draft
    columns = draft_columns(geometry, manifest.exit_head) if is_draft else geometry.vocab_size
    inputs = [
        TensorInfo("input_ids", ("B", "n"), "int64") if first else TensorInfo("hidden", *hidden),
        TensorInfo("position_ids", ("B", "n"), "int64"),
        TensorInfo("write_indices", ("B",), "int64"),
        TensorInfo("attn_mask", ("B", 1, "n", "S"), dtype),
    ]
    outputs = [TensorInfo("hidden_out", *hidden)]
    if rows:
        inputs.append(TensorInfo("logit_rows", ("R",), "int64"))
    if last:
        outputs = [TensorInfo("logits", ("B", "R" if rows else "n", columns), "float32")]
    if is_draft:
        top = ("B", "n", manifest.draft_top_k)
        outputs.append(TensorInfo("topk_ids", top, "int64"))
        outputs.append(TensorInfo("topk_logprobs", top, "float32"))
    inputs += [TensorInfo(name, shape, dtype) for name in names]
    outputs += [TensorInfo(f"{name}_out", shape, dtype) for name in names]
    given = {tensor.name for tensor in graph.inputs}
    missing = [tensor.name for tensor in inputs if tensor.name not in given]
    if missing:
        raise ValueError(f"{graph.file} has no input {missing[0]}")
    if (
        list(graph.caches) != list(caches)
        or list(graph.inputs) != inputs
        or list(graph.outputs) != outputs
    ):
        raise ValueError("inputs, outputs or caches of a graph")
