"""Build plans with TensorRT or TensorRT-RTX. Both have the same Python API.

TensorRT-RTX also builds on machines without a GPU. Its plans hold portable kernels, which are
compiled when a plan is loaded. TensorRT times kernels on the GPU that will run them. With both
libraries, fused attention needs a fixed cache length S, an additive float mask, and a 16-bit
element type.
"""

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from eesd.common.checks import first_fault
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.integrity import HashedFile
from eesd.common.machine import pip_install
from eesd.common.machine_report import compute_capability
from eesd.common.manifest import (
    DRAFT_VOCAB_FILE,
    EXACT_NODES,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    FileInfo,
    GraphInfo,
    Manifest,
    PlanInfo,
    load_manifest,
)
from eesd.export.plan_graph import plan_graph
from eesd.runtime.engines.trt_plans import (
    FLAVOURS,
    attended_slots,
    check_gpu_supported,
    create,
    first_error,
    graph_read,
    library_version,
    make_logger,
    one_node_is_faster,
    refit_digest,
)

_TIMING_CACHE = "timing.cache"
_PRECISIONS = ("float16", "bfloat16")
USUAL_NODES = 8
"""Number of nodes for which a plan is tuned if the numbers of nodes in rounds vary."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        flavour: ``tensorrt`` or ``tensorrt-rtx``.
        max_batch: Largest number of sequences in a decoding call.
        prefill_chunk: Largest number of prompt tokens of a call.
        compute_capabilities: GPUs to build for, such as ``8.9``. Only TensorRT-RTX has this option.
            If it is empty, the plans are for every supported GPU.
        strip_weights: Whether plans have no weights. If they have none, the weights of the
            directory are read when a plan is loaded.
    """

    flavour: str
    max_batch: int
    prefill_chunk: int
    compute_capabilities: tuple[str, ...] = ()
    strip_weights: bool = False


def find_flavour(wanted: str | None) -> str:
    """Return the flavour to build. It is ``wanted``, or the installed one (TensorRT if both are
    installed).

    Raises:
        EESDError: The flavour, or another package that building needs, is not installed.
    """
    found = [flavour for flavour, module in FLAVOURS.items() if importlib.util.find_spec(module)]
    if wanted is not None and wanted not in found:
        raise EESDError(f"{wanted} is not installed; install it with: {pip_install(wanted)}.")
    if not found:
        raise EESDError(
            f"No TensorRT is installed; install one with: {pip_install('tensorrt-rtx')}, or the "
            "same with tensorrt."
        )
    flavour = wanted or found[0]
    if not importlib.util.find_spec("onnx"):
        raise EESDError(f"Building needs onnx; install it with: {pip_install(flavour)}.")
    return flavour


def source_hash(manifest: Manifest, graph: GraphInfo, options: BuildOptions) -> str:
    """SHA-256 of everything that determines a plan. A plan with the same hash is up to date."""
    files = [
        manifest.files[name].sha256
        for name in (graph.file, WEIGHTS_FILE, DRAFT_VOCAB_FILE)
        if name in manifest.files
    ]
    files += [link.samples for link in manifest.linked.values()]
    parts = [files, asdict(options), library_version(options.flavour), manifest.gpu_slots]
    parts += [*profile_nodes(manifest, graph, options), attended_slots(manifest, graph)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def up_to_date(
    directory: Path, manifest: Manifest, graph: GraphInfo, options: BuildOptions
) -> bool:
    """Whether the graph's plan exists and was built from the same sources with the same options."""
    plan = manifest.plans.get(graph.file)
    return (
        plan is not None
        and plan.source == source_hash(manifest, graph, options)
        and (directory / plan.file).exists()
        and (directory / plan.file).stat().st_size == plan.size
        and graph_read(directory / plan.file).exists()
        and (
            not plan.refit
            or plan.refit == refit_digest(graph_read(directory / plan.file), manifest)
        )
    )


def check_options(manifest: Manifest, options: BuildOptions) -> None:
    """Raise :class:`EESDError` if the builder cannot build plans with these options.

    If ``compute_capabilities`` is empty, the plans must run on the GPU of this machine (if there is
    one).
    """
    if options.prefill_chunk > manifest.max_seq_len:
        raise EESDError(
            f"--prefill-chunk {options.prefill_chunk} is more than the cache's "
            f"{manifest.max_seq_len} slots; reduce it."
        )
    if options.compute_capabilities and options.flavour != "tensorrt-rtx":
        raise EESDError(
            "--compute-capability is for tensorrt-rtx; tensorrt builds for the GPU of this machine."
        )
    here = compute_capability()
    if options.flavour == "tensorrt" and here is None:
        raise EESDError(
            "tensorrt needs a GPU to build on, and there is none; use --target tensorrt-rtx, "
            "or another machine."
        )
    if options.strip_weights and here is None:
        raise EESDError(
            "tensorrt-rtx strips plans only where it finds a GPU, and there is none; leave "
            "--strip-weights out."
        )
    for capability in options.compute_capabilities or filter(None, [here]):
        check_gpu_supported(options.flavour, capability, manifest)


def check_precision(manifest: Manifest) -> None:
    """Raise :class:`EESDError` if the builders have no kernels for the directory's element type or
    quantization."""
    used = manifest.quantization.used
    missing = ""
    if manifest.geometry.attention_cap:
        missing = "cap for scores"
    if manifest.geometry.sinks:
        missing = "sinks"
    fault = first_fault(
        {
            f"The directory holds {manifest.dtype} graphs, and TensorRT's fused attention has "
            f"no {manifest.dtype} kernel; export with --dtype float16 or --dtype bfloat16.": (
                manifest.dtype not in _PRECISIONS
            ),
            f"TensorRT's attention has no {missing}, which "
            f"{manifest.geometry.architecture} needs; run the directory with --backend torch.": (
                bool(missing)
            ),
            "Plans of layers with the gated delta rule or a state space, which "
            f"{manifest.geometry.architecture} has, are not supported; run the directory with "
            "--backend ort or torch.": manifest.geometry.delta is not None,
            "The directory's weights have the levels of their GGUF file, for which TensorRT "
            "has no kernels; export with --quantize none or int4.": manifest.quantization.tensors,
            "The directory's weights have minimums, for which TensorRT has no kernels; export "
            "with --symmetric.": any(one.minimums for one in used),
            "The directory's weights have zero points, and TensorRT has none for 4 bits; "
            "export a checkpoint that was quantized without zero points.": (
                any(one.zero_points for one in used)
            ),
        }
    )
    if fault:
        raise EESDError(fault)


def build(
    directory: Path,
    manifest: Manifest,
    graph: GraphInfo,
    options: BuildOptions,
    monitor: Callable[[Any], Any],
    attempts: tuple[bool, ...] = (True, False),
) -> PlanInfo:
    """Build one plan. Write the plan next to its graph, with the graph that the builder read.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        graph: Graph to build the plan from.
        options: Options of the build.
        monitor: Creates a progress monitor from the builder's base class for monitors.
        attempts: Builds to try in turn. If an item is True, each attention must be one kernel. If
            it is False, an attention may be built from parts if there is no kernel.

    Returns:
        Description of the plan for the manifest.

    Raises:
        EESDError: The graph cannot be built. The message has the builder's first error.
    """
    trt = importlib.import_module(FLAVOURS[options.flavour])
    path = directory / Path(graph.file).with_suffix(".plan").name
    errors = list[str]()
    with written_whole(path) as temporary, written_whole(graph_read(path)) as source:
        for whole in attempts:
            source.write_bytes(plan_graph(directory, manifest, graph, options.max_batch, whole))
            found = _build_once(
                trt, source, manifest, graph, options, monitor, whole, temporary, errors
            )
            if isinstance(found, Built):
                refit = refit_digest(source, manifest) if options.strip_weights else ""
                return _plan_info(path.name, found, manifest, graph, options, refit)
            if not found:
                break
        raise EESDError(
            f"{options.flavour} cannot build {directory / graph.file} ({first_error(errors)})."
        )


class Built(NamedTuple):
    """A plan's file. It also has the numbers of attentions and of cache updates that are single
    kernels."""

    file: FileInfo
    attentions: int
    updates: int


def _build_once(
    trt: Any,
    source: Path,
    manifest: Manifest,
    graph: GraphInfo,
    options: BuildOptions,
    monitor: Callable[[Any], Any],
    whole: bool,
    path: Path,
    errors: list[str],
) -> Built | bool:
    """Build a plan into a file. If ``whole`` is true, each attention is one kernel, or the build
    fails.

    Returns:
        The plan. If the build failed, this tells whether the builder could read the graph. If it
        could, it may still build the attention from parts.
    """
    logger = make_logger(trt, errors)
    builder = create(options.flavour, "Builder", logger=logger, errors=errors)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    # The parser's memory holds the weights until the plan is built.
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(source)):
        return False
    attentions, updates = count_fused(trt, network)
    config = _config(trt, builder, manifest, graph, options, monitor)
    timings = source.with_name(_TIMING_CACHE)
    _load_timing_cache(options, config, timings)
    built = _serialize(trt, builder, network, config, path)
    if built is None:
        return True
    if options.flavour == "tensorrt":
        _save_timing_cache(config, timings)
    return Built(built, attentions * whole, updates)


def _serialize(trt: Any, builder: Any, network: Any, config: Any, path: Path) -> FileInfo | None:
    """Build a plan into a file piece by piece, and hash it at the same time. Returns None if the
    build fails.

    The whole plan is never in memory, which saves about a fifth of the memory (measured).
    """

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failed: OSError | None = None

        def write(self, data: Any) -> int:
            try:
                return hashed.write(data)
            except OSError as error:  # exceptions must not propagate through the builder
                self.failed = error
                return 0

    writer = Writer()
    with path.open("wb") as file:
        hashed = HashedFile(file)
        built = bool(builder.build_serialized_network_to_stream(network, config, writer))
        if writer.failed is not None:
            raise writer.failed
        return hashed.info() if built else None


def _load_timing_cache(options: BuildOptions, config: Any, path: Path) -> None:
    """Load the timings of the last build, if there are any. TensorRT-RTX does not time kernels
    during a build."""
    if options.flavour == "tensorrt":
        timings = path.read_bytes() if path.exists() else b""
        config.set_timing_cache(config.create_timing_cache(timings), ignore_mismatch=False)


def _save_timing_cache(config: Any, path: Path) -> None:
    with written_whole(path) as temporary, config.get_timing_cache().serialize() as timings:
        temporary.write_bytes(timings)


def count_fused(trt: Any, network: Any) -> tuple[int, int]:
    """Count the attentions and the cache updates of a network that will each run as one kernel.

    An attention that must not be decomposed becomes one kernel, or the build fails.

    Args:
        trt: The module of the builder.
        network: The parsed network.

    Returns:
        Number of attentions and number of cache updates.
    """
    kinds = [network.get_layer(index).type for index in range(network.num_layers)]
    attentions = kinds.count(trt.LayerType.ATTENTION_INPUT)
    return attentions, kinds.count(trt.LayerType.KV_CACHE_UPDATE)


def profile_nodes(
    manifest: Manifest, graph: GraphInfo, options: BuildOptions
) -> tuple[tuple[int, int, int], ...]:
    """Returns the (min, opt, max) nodes of a call. There is one profile for decoding and, unless
    the graph is the draft's, another for prefill.

    The draft has only one profile. With a profile for exactly one node and another for a range, the
    plan would hold its weights twice. If a round has few nodes, the verify plan is tuned for all of
    them.
    """
    if graph.file == manifest.draft.file:
        one = one_node_is_faster(manifest.max_seq_len, manifest.quantization)
        return ((1, 1, 1 if one else 2),)
    largest = manifest.max_tree_nodes + 1
    usual = largest if largest <= EXACT_NODES else USUAL_NODES
    return (1, usual, largest), (1, options.prefill_chunk, options.prefill_chunk)


def profile_shapes(
    manifest: Manifest, graph: GraphInfo, options: BuildOptions
) -> list[dict[str, list[tuple[int, ...]]]]:
    """Returns the (min, opt, max) shapes of every input with dynamic dimensions, for each profile.

    The mask has a column for each slot that attention reads. In decoding, every node gets logits.
    In prefill, one token gets logits. The profile allows two, because TensorRT-RTX expands the int8
    weights of a product for exactly one row to 16 bits. Several sequences decode together, but each
    of them is prefilled separately.
    """
    batch = options.max_batch
    slots = attended_slots(manifest, graph)
    seen = {"attn_mask": (slots[0], slots[len(slots) // 2], slots[-1])}
    counts_of = profile_nodes(manifest, graph, options)
    profiles = []
    for counts, rows, most in zip(counts_of, (counts_of[0], (1, 1, 2)), (batch, 1), strict=False):
        sizes = [
            {"B": b, "n": n, "R": r} for b, n, r in zip((1, most, most), counts, rows, strict=True)
        ]
        profiles.append(
            {
                tensor.name: [
                    tensor.sized(**size, S=s)
                    for size, s in zip(sizes, seen.get(tensor.name, slots[-1:] * 3), strict=True)
                ]
                for tensor in graph.inputs
                if {"n", "R"} & set(tensor.shape) or batch > 1
            }
        )
    return profiles


def _config(
    trt: Any,
    builder: Any,
    manifest: Manifest,
    graph: GraphInfo,
    options: BuildOptions,
    monitor: Any,
) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = monitor(trt.IProgressMonitor)
    for shapes in profile_shapes(manifest, graph, options):
        profile = builder.create_optimization_profile()
        for name, sizes in shapes.items():
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
    # Calls that allocate cannot be captured in a CUDA graph.
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if options.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, capability in enumerate(options.compute_capabilities):
            config.set_compute_capability(
                getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), index
            )
    return config


def _plan_info(
    name: str, built: Built, manifest: Manifest, graph: GraphInfo, options: BuildOptions, refit: str
) -> PlanInfo:
    capabilities = options.compute_capabilities
    if options.flavour == "tensorrt":
        capabilities = (compute_capability() or "unknown",)
    return PlanInfo(
        file=name,
        size=built.file.size,
        sha256=built.file.sha256,
        flavour=options.flavour,
        version=library_version(options.flavour),
        compute_capabilities=capabilities,
        source=source_hash(manifest, graph, options),
        max_batch=options.max_batch,
        profiles=profile_nodes(manifest, graph, options),
        fused_attentions=built.attentions,
        fused_cache_updates=built.updates,
        refit=refit,
        samples=built.file.samples,
    )


def record(directory: Path, manifest: Manifest, graph: GraphInfo, plan: PlanInfo) -> Manifest:
    """Add a plan to the manifest on disk, and return the new manifest. Raises EESDError if another
    process has changed it."""
    if load_manifest(directory) != manifest:
        raise EESDError(f"{directory} was rewritten in the meantime; build its plans again.")
    manifest = replace(manifest, plans={**manifest.plans, graph.file: plan})
    with written_whole(directory / MANIFEST_FILE) as temporary:
        temporary.write_text(manifest.to_json())
    return manifest
