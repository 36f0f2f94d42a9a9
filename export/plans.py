"""Graphs to TensorRT plans, by TensorRT or TensorRT-RTX: their Python API is one, and so is the code.

TensorRT-RTX builds on a machine without a GPU; its plans hold portable kernels that the GPU's driver finishes when they are
loaded. TensorRT times kernels on the GPU that will run them. Both want the cache's length S fixed, an additive float mask, and
16-bit types for their fused attention.
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.manifest import FLAVOURS, NAME, WEIGHTS, FileInfo, GraphInfo, Manifest, PlanInfo
from eesd.runtime.doctor import compute_capability

TIMING_CACHE = "timing.cache"
PRECISIONS = ("float16", "bfloat16")


@dataclass(frozen=True)
class BuildOptions:
    """What a plan depends on besides its graph and the builder."""

    flavour: str
    max_batch: int
    prefill_chunk: int
    compute_capabilities: tuple[str, ...] = ()
    """RTX only: GPUs to build for (``"8.9"``); none for a plan that every supported GPU can load."""


def find_flavour(wanted: str | None) -> str:
    """The flavour to build with: the one asked for, else the one installed, TensorRT before TensorRT-RTX."""
    found = [flavour for flavour, module in FLAVOURS.items() if importlib.util.find_spec(module)]
    if wanted is not None and wanted not in found:
        raise EESDError(f"{wanted} is not installed; install it with: pip install 'eesd[{wanted}]'.")
    if not found:
        raise EESDError("No TensorRT is installed; install one with: pip install 'eesd[tensorrt-rtx]' or 'eesd[tensorrt]'.")
    if not importlib.util.find_spec("polygraphy"):
        raise EESDError(f"Building needs polygraphy; install it with: pip install 'eesd[{wanted or found[0]}]'.")
    return wanted or found[0]


def builder_version(flavour: str) -> str:
    return version(FLAVOURS[flavour].replace("_", "-"))


def source_hash(manifest: Manifest, graph: GraphInfo, options: BuildOptions) -> str:
    """SHA-256 of everything that goes into a plan: equal, and the plan that is there is the plan to be built."""
    files = [manifest.files[name].sha256 for name in (graph.file, WEIGHTS)]
    files += [link.samples for link in manifest.linked.values()]
    parts = [files, asdict(options), builder_version(options.flavour), manifest.max_seq_len, manifest.max_tree_nodes]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def up_to_date(directory: Path, manifest: Manifest, graph: GraphInfo, options: BuildOptions) -> bool:
    plan = manifest.plans.get(graph.file)
    return (
        plan is not None
        and plan.source == source_hash(manifest, graph, options)
        and (directory / plan.file).exists()
        and (directory / plan.file).stat().st_size == plan.size
    )


def check_options(manifest: Manifest, options: BuildOptions) -> None:
    """Refuse what the builders cannot build, before they begin."""
    if options.prefill_chunk > manifest.max_seq_len:
        raise EESDError(
            f"--prefill-chunk {options.prefill_chunk} is more than the cache's {manifest.max_seq_len} slots; give less."
        )
    if options.compute_capabilities and options.flavour != "tensorrt-rtx":
        raise EESDError("--compute-capability is for tensorrt-rtx; tensorrt builds for the GPU that is here.")
    if options.flavour == "tensorrt" and compute_capability() is None:
        raise EESDError("tensorrt needs a GPU to build on and there is none; build there, or use --target tensorrt-rtx.")
    known = _known_capabilities(options.flavour) if options.compute_capabilities else ()
    for capability in options.compute_capabilities:
        if capability not in known:
            raise EESDError(
                f"{options.flavour} {builder_version(options.flavour)} does not build for compute capability {capability}; "
                f"it knows {', '.join(known)}. Leave the option out for a plan that any of them can load."
            )


def _known_capabilities(flavour: str) -> tuple[str, ...]:
    names = importlib.import_module(FLAVOURS[flavour]).ComputeCapability.__members__
    return tuple(f"{name[2:-1]}.{name[-1]}" for name in names if name.startswith("SM"))


def weight_bytes(directory: Path, graph: GraphInfo) -> int:
    """Bytes of the weights that a graph refers to."""
    model = onnx.load(directory / graph.file, load_external_data=False)
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def check_precision(manifest: Manifest) -> None:
    """Refuse element types that the builders have no kernels for."""
    if manifest.dtype not in PRECISIONS:
        raise EESDError(
            f"The directory holds {manifest.dtype} graphs, and TensorRT's fused attention has no {manifest.dtype} kernel: "
            "export with --dtype float16 or --dtype bfloat16."
        )


def build(
    directory: Path, manifest: Manifest, graph: GraphInfo, options: BuildOptions, monitor: Callable[[Any], Any]
) -> PlanInfo:
    """Build one plan and put it beside its graph; ``monitor`` makes a progress monitor of the builder's base class.

    Raises :class:`EESDError` with the builder's first complaint when the graph cannot be built.
    """
    import polygraphy.config

    polygraphy.config.USE_TENSORRT_RTX = options.flavour == "tensorrt-rtx"  # before anything else of it is imported
    from polygraphy.backend.trt import network_from_onnx_path
    from polygraphy.exception import PolygraphyException

    trt = importlib.import_module(FLAVOURS[options.flavour])
    path = directory / Path(graph.file).with_suffix(".plan").name
    complaints: list[str] = []
    built = None
    with _recording(complaints), _fixed_graph(directory, manifest, graph, options) as fixed, written_whole(path) as temporary:
        with suppress(PolygraphyException):
            builder, network, _parser = network_from_onnx_path(str(fixed), strongly_typed=True)
            fused = count_fused(trt, network)
            config = _config(trt, manifest, graph, options, directory, monitor)(builder, network)
            if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):  # a call that took memory could not become a CUDA graph
                config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            built = _serialize(trt, builder, network, config, temporary)
        if built is None:
            reason = complaints[0].splitlines()[0][:300] if complaints else "it does not say why"
            raise EESDError(f"{options.flavour} cannot build {directory / graph.file} ({reason}).")
        if options.flavour == "tensorrt":
            _keep_timings(config, directory / TIMING_CACHE)
    return _describe(path.name, built, manifest, graph, options, fused)


def _serialize(trt: Any, builder: Any, network: Any, config: Any, path: Path) -> FileInfo | None:
    """Build into a file, piece by piece, and hash it on the way; None if the builder gave up.

    The whole plan is never in memory (measured: a fifth less than with it).
    """
    digest = hashlib.sha256()

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failed: OSError | None = None

        def write(self, data: Any) -> int:
            try:
                digest.update(data)
                return file.write(data)
            except OSError as error:  # an exception may not cross the builder
                self.failed = error
                return 0

    writer = Writer()
    with path.open("wb") as file:
        built = bool(builder.build_serialized_network_to_stream(network, config, writer))
    if writer.failed is not None:
        raise writer.failed
    return FileInfo(path.stat().st_size, digest.hexdigest()) if built else None


def _keep_timings(config: Any, path: Path) -> None:
    with written_whole(path) as temporary, config.get_timing_cache().serialize() as timings:
        temporary.write_bytes(timings)


@contextmanager
def _recording(complaints: list[str]) -> Iterator[None]:
    """Collect what the builder logs as errors; nothing of it goes to the terminal."""
    from polygraphy.logger import G_LOGGER

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(record.getMessage())

    logger, recorder = logging.getLogger("Polygraphy"), Recorder(logging.ERROR)
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.module_severity = G_LOGGER.ERROR
    G_LOGGER.colors = G_LOGGER.letter = False  # it would print what it lacks for colours
    logger.addHandler(recorder)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(recorder)
        logger.propagate = propagate


@contextmanager
def _fixed_graph(directory: Path, manifest: Manifest, graph: GraphInfo, options: BuildOptions) -> Iterator[Path]:
    """The graph with its fixed dimensions filled in, for a moment, beside the weights that it refers to."""
    model = onnx.load(directory / graph.file, load_external_data=False)
    fixed = {"S": manifest.max_seq_len} | ({"B": 1} if options.max_batch == 1 else {})
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in fixed:
                dim.dim_value = fixed[dim.dim_param]
    del model.graph.value_info[:]  # shapes in between would contradict
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".", suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        yield Path(file.name)


def count_fused(trt: Any, network: Any) -> tuple[int, int]:
    """(attentions, cache updates) of a network that will run as one kernel each.

    An attention that may not be decomposed either becomes one kernel or fails the build.
    """
    kinds = [network.get_layer(index).type for index in range(network.num_layers)]
    attentions = kinds.count(trt.LayerType.ATTENTION_INPUT)
    return attentions, kinds.count(trt.LayerType.KV_CACHE_UPDATE)


def profile_nodes(manifest: Manifest, graph: GraphInfo, options: BuildOptions) -> tuple[tuple[int, int, int], ...]:
    """(Fewest, best, most) nodes of a call: for decoding, and for a chunk of the prompt."""
    most = manifest.max_tree_nodes + 1
    best = 1 if graph.file == manifest.draft.file else min(8, most)
    return (1, best, most), (1, options.prefill_chunk, options.prefill_chunk)


def profile_shapes(manifest: Manifest, graph: GraphInfo, options: BuildOptions) -> list[dict[str, list[tuple[int, ...]]]]:
    """For each profile, the least, best and most shape of every input that varies."""
    batch = options.max_batch
    profiles = []
    for counts in profile_nodes(manifest, graph, options):
        sizes = [{"B": b, "n": n, "S": manifest.max_seq_len} for b, n in zip((1, batch, batch), counts, strict=True)]
        profiles.append(
            {
                tensor.name: [tuple(size[d] if isinstance(d, str) else d for d in tensor.shape) for size in sizes]
                for tensor in graph.inputs
                if "n" in tensor.shape or batch > 1
            }
        )
    return profiles


def _config(trt: Any, manifest: Manifest, graph: GraphInfo, options: BuildOptions, directory: Path, monitor: Any) -> Any:
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import CreateConfig, Profile

    profiles = []
    for shapes in profile_shapes(manifest, graph, options):
        profile = Profile()
        for name, (least, best, most) in shapes.items():
            profile.add(name, least, best, most)
        profiles.append(profile)
    common = {
        "profiles": profiles,
        "profiling_verbosity": trt.ProfilingVerbosity.DETAILED,
        "progress_monitor": monitor(trt.IProgressMonitor),
    }
    if options.flavour == "tensorrt-rtx":
        capabilities = [tuple(map(int, capability.split("."))) for capability in options.compute_capabilities]
        return CreateConfigRTX(compute_capabilities=capabilities or None, **common)
    return CreateConfig(load_timing_cache=str(directory / TIMING_CACHE), **common)


def _describe(
    name: str, built: FileInfo, manifest: Manifest, graph: GraphInfo, options: BuildOptions, fused: tuple[int, int]
) -> PlanInfo:
    capabilities = options.compute_capabilities
    if options.flavour == "tensorrt":
        capabilities = (compute_capability() or "unknown",)
    return PlanInfo(
        file=name,
        size=built.size,
        sha256=built.sha256,
        flavour=options.flavour,
        version=builder_version(options.flavour),
        compute_capabilities=capabilities,
        source=source_hash(manifest, graph, options),
        max_batch=options.max_batch,
        profiles=profile_nodes(manifest, graph, options),
        fused_attentions=fused[0],
        fused_cache_updates=fused[1],
    )


def record(directory: Path, manifest: Manifest, graph: GraphInfo, plan: PlanInfo) -> Manifest:
    """Write the manifest anew with the plan in it."""
    manifest = replace(manifest, plans={**manifest.plans, graph.file: plan})
    with written_whole(directory / NAME) as temporary:
        temporary.write_text(manifest.to_json())
    return manifest
