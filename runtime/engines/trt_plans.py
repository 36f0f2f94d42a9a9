"""The TensorRT plans of an engine directory, and the flavours of TensorRT with their versions and
the GPUs that they support.

Plans are checked before they are loaded, because errors of TensorRT's loader do not name a remedy.
"""

import hashlib
import importlib
import importlib.util
import logging
import mmap
from functools import partial
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.integrity import check_loaded, files_changed, link_info, sha256_of, verify_files
from eesd.common.machine import nvidia_driver, pip_install
from eesd.common.machine_report import compute_capability
from eesd.common.manifest import DRAFT_VOCAB_FILE, WEIGHTS_FILE, GraphInfo, Manifest, PlanInfo
from eesd.common.quantization import BITS, FP4, FP8, Quantizations

LOGGER = logging.getLogger("eesd.tensorrt")
LOGGER.addHandler(logging.NullHandler())  # without a handler, logging prints errors to stderr

FLAVOURS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""The flavours of TensorRT plans, and the Python module that builds and runs the plans of each
flavour."""
LONG_CACHE = 16384
"""Number of slots of the largest cache for which TensorRT-RTX is known to have an attention kernel
for exactly one node. This was measured. For 24576 slots there is no such kernel."""
FEWEST_SLOTS = 1024
"""Attention over fewer slots is not worth separate kernels, because reading the weights takes far
longer."""
TURING = "7.5"
"""The oldest compute capability that has kernels. This GPU generation has no kernels for bfloat16
and int4. Builds for these types end in a compiler error."""

_LEAST = {FP8: "8.9", FP4: "10.0"}
"""The oldest compute capability that has kernels for levels of these types, which only some GPUs
support."""


class PlanDirectory:
    """The plans of an engine directory, and the library that built them.

    TensorRT-RTX compiles the kernels of a plan when they first run. The compiled kernels are stored
    next to the plan, so the next start is fast.

    Attributes:
        trt: The Python module of the plans' flavour.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Check the plans, and import their library. Raises :class:`EESDError` if they cannot run
        here."""
        self._directory = directory
        self._manifest = manifest
        self._plans = [_find_plan(directory, manifest, graph) for graph in manifest.graphs]
        self.trt = _import_library(directory, self._plans)
        self._check_profiles()
        _check_gpu(directory, manifest, self._plans[0])
        if any(plan.refit for plan in self._plans) and files_changed(directory, manifest):
            verify_files(directory, manifest)  # only in this case, because it reads all weights
        self._errors: list[str] = []
        self._create = partial(
            create,
            self._plans[0].flavour,
            logger=make_logger(self.trt, self._errors),
            errors=self._errors,
        )
        self._runtime = self._create("Runtime")
        self._kernel_caches: dict[str, Any] = {}

    @property
    def notice(self) -> str:
        """A line for the user about kernels that TensorRT-RTX still has to compile. It is empty if
        there are no such kernels."""
        if not hasattr(self.trt, "IRuntimeCache") or all(
            self._kernel_file(graph).exists() for graph in self._manifest.graphs
        ):
            return ""
        return (
            "TensorRT-RTX compiles kernels before the first text, which may take minutes; the "
            "next start reads them."
        )

    @property
    def prefill_chunk(self) -> int:
        """Number of prompt tokens that every verify plan takes in one call."""
        return min(
            self._manifest.plans[graph.file].profiles[1][2] for graph in self._manifest.verify
        )

    @property
    def max_batch(self) -> int:
        """Number of sequences that every plan takes in one decoding call."""
        return min(plan.max_batch for plan in self._plans)

    def _check_profiles(self) -> None:
        most = self._manifest.max_tree_nodes + 1
        for plan in (self._manifest.plans[graph.file] for graph in self._manifest.verify):
            if (
                len(plan.profiles) != 2
                or plan.profiles[0][2] != most
                or plan.profiles[1][2] > self._manifest.max_seq_len
            ):
                raise EESDError(
                    f"{self._directory / plan.file} was not built for the manifest's rounds "
                    f"of {most} nodes in "
                    f"{self._manifest.max_seq_len} slots; {_rebuild(self._directory)}."
                )

    def load(self, graph: GraphInfo) -> Any:
        """Load the engine of a graph on the current GPU. Raises :class:`EESDError` with the
        loader's first error."""
        info = self._manifest.plans[graph.file]
        path = self._directory / info.file
        self._errors.clear()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = first_error(self._errors)
            remedy = "update the NVIDIA driver" if "driver" in reason else _rebuild(self._directory)
            raise EESDError(f"{self._plans[0].flavour} cannot load {path} ({reason}); {remedy}.")
        if not matches_graph(engine, graph):
            raise EESDError(f"{path} is not the plan of {graph.file}; {_rebuild(self._directory)}.")
        if not info.refit:
            return engine
        refitter = self._create("Refitter", engine)
        # The parser's memory holds the weights until the engine has them.
        parser = self._create("OnnxParserRefitter", refitter)
        if not (parser.refit_from_file(str(graph_read(path))) and refitter.refit_cuda_engine()):
            raise EESDError(
                f"{info.flavour} cannot refit {path} ({first_error(self._errors)}); "
                f"{_rebuild(self._directory)}."
            )
        return engine

    def make_context(self, engine: Any, graph: GraphInfo) -> Any:
        """Make an execution context that has no memory, with the kernels that an earlier start
        compiled."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        # TensorRT (without RTX) compiles all kernels when it builds the plan.
        if not hasattr(self.trt, "IRuntimeCache"):
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # A CUDA graph keeps the kernels that it captured, so they must not be the fallbacks that
        # run until the real kernels are compiled.
        config.dynamic_shapes_kernel_specialization_strategy = (
            self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        if graph.file not in self._kernel_caches:
            self._kernel_caches[graph.file] = cache = config.create_runtime_cache()
            path = self._kernel_file(graph)
            if path.exists() and not cache.deserialize(path.read_bytes()):
                LOGGER.info(
                    (
                        "%s was made with another GPU, driver or version, so its kernels are "
                        "compiled again"
                    ),
                    path,
                )
        config.set_runtime_cache(self._kernel_caches[graph.file])
        return engine.create_execution_context(config)

    def save_kernels(self, graph: GraphInfo) -> None:
        """Write the kernels compiled for a graph next to its plan, if they are new and the
        directory is writable."""
        cache = self._kernel_caches.get(graph.file)
        path = self._kernel_file(graph)
        if cache is None:
            return
        with cache.serialize() as memory:
            data = bytes(memory)
        try:
            if not path.exists() or path.read_bytes() != data:
                with written_whole(path) as temporary:
                    temporary.write_bytes(data)
        except OSError as error:
            LOGGER.info("%s was not written: %s", path, error)

    def _kernel_file(self, graph: GraphInfo) -> Path:
        return self._directory / Path(graph.file).with_suffix(".kernels").name


def matches_graph(engine: Any, graph: GraphInfo) -> bool:
    """Return whether the inputs and outputs of a TensorRT engine have the same names as those of a
    graph."""
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    return names == {tensor.name for tensor in (*graph.inputs, *graph.outputs)}


def _rebuild(directory: Path) -> str:
    return f"build it again with: eesd-build --force {directory}"


def _find_plan(directory: Path, manifest: Manifest, graph: GraphInfo) -> PlanInfo:
    plan = manifest.plans.get(graph.file)
    if plan is None or not (path := directory / plan.file).exists():
        raise EESDError(
            f"{directory} has no plan of {graph.file}; build it with: eesd-build {directory}."
        )
    if path.stat().st_size != plan.size:
        raise EESDError(
            f"{path} has {path.stat().st_size} bytes where the manifest says {plan.size}; "
            f"{_rebuild(directory)}."
        )
    check_loaded(directory, {plan.file: plan.written}, _rebuild(directory))
    source = graph_read(path)
    if plan.refit and not (source.exists() and plan.refit == refit_digest(source, manifest)):
        raise EESDError(
            f"{path} holds no weights, and {source.name} or the weights beside it are missing "
            "or were changed; build it again "
            f"with: eesd-build --strip-weights {directory}."
        )
    return plan


def graph_read(plan: Path) -> Path:
    """Return the path of the graph file that TensorRT read for a plan. It is next to the plan and
    the weights."""
    return plan.with_suffix(".plan.onnx")


def refit_digest(graph: Path, manifest: Manifest) -> str:
    """Return the SHA-256 of a graph file (see :func:`graph_read`) and of samples of the weights
    next to it. The samples of different models differ."""
    files = [
        name
        for name in (WEIGHTS_FILE, DRAFT_VOCAB_FILE, *manifest.linked)
        if name in manifest.sizes
    ]
    samples = [link_info(graph.parent / name).samples for name in files]
    return hashlib.sha256("".join([sha256_of(graph), *samples]).encode()).hexdigest()


def _import_library(directory: Path, plans: list[PlanInfo]) -> Any:
    """Import the library of the plans' flavour, in the version that built them. Raises
    :class:`EESDError` for another version."""
    flavours = {plan.flavour for plan in plans}
    versions = {plan.version for plan in plans}
    if len(flavours) != 1 or len(versions) != 1:
        raise EESDError(
            f"The plans in {directory} were built by different versions; {_rebuild(directory)}."
        )
    flavour = flavours.pop()
    built = versions.pop()
    if flavour not in FLAVOURS:
        raise EESDError(
            f"The plans in {directory} are of an unknown flavour {flavour!r}; "
            f"{_rebuild(directory)}."
        )
    if importlib.util.find_spec(FLAVOURS[flavour]) is None:
        raise EESDError(
            f"The plans in {directory} need {flavour}; install it with: {pip_install(flavour)}."
        )
    found = library_version(flavour)
    if found != built:
        raise EESDError(
            f"The plans in {directory} were built by {flavour} {built} and {found} is installed; "
            f"install {built}, or {_rebuild(directory)}."
        )
    return importlib.import_module(FLAVOURS[flavour])


def _check_gpu(directory: Path, manifest: Manifest, plan: PlanInfo) -> None:
    here = compute_capability() if nvidia_driver() else None
    if here is None:
        raise EESDError(
            "Plans run on an NVIDIA GPU, and no driver answers here; use --backend ort or "
            "--backend torch."
        )
    check_gpu_supported(plan.flavour, here, manifest)
    if plan.compute_capabilities and here not in plan.compute_capabilities:
        raise EESDError(
            f"The plans in {directory} are for compute capability "
            f"{', '.join(plan.compute_capabilities)} and this GPU has "
            f"{here}; {_rebuild(directory)}."
        )


def make_logger(trt: Any, errors: list[str]) -> Any:
    """Make a TensorRT logger that writes to Python's logging under ``eesd.tensorrt``, and appends
    error messages to ``errors``."""
    levels = {"INTERNAL_ERROR": logging.ERROR, "VERBOSE": logging.DEBUG}

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = levels.get(severity.name) or getattr(logging, severity.name)
            if level == logging.ERROR:
                errors.append(message)
            LOGGER.log(level, message)

    return Logger()


def first_error(errors: list[str]) -> str:
    """Return the first line of the first message that a logger of :func:`make_logger` received."""
    return errors[0].splitlines()[0][:300] if errors else "it does not say why"


def create(flavour: str, name: str, *subject: Any, logger: Any, errors: list[str]) -> Any:
    """Make a TensorRT object. Raises :class:`EESDError` if the library returns no object, because
    CUDA does not work.

    In that case, TensorRT's Python bindings raise a TypeError without a reason.
    """
    try:
        return getattr(importlib.import_module(FLAVOURS[flavour]), name)(*subject, logger)
    except TypeError:
        raise EESDError(
            f"{flavour} {library_version(flavour)} gives no {name} here "
            f"({first_error(errors)}); update the NVIDIA driver, or "
            "install a version for the driver's CUDA."
        ) from None


def library_version(flavour: str) -> str:
    """Return the version of a flavour's installed library.

    It is the version of the module and not of a package, because the packages ``tensorrt``,
    ``tensorrt-cu12`` and ``tensorrt-cu13`` install the same module.
    """
    return str(importlib.import_module(FLAVOURS[flavour]).__version__)


def supported_capabilities(flavour: str) -> tuple[str, ...]:
    """Return the compute capabilities for which the installed TensorRT-RTX has kernels.

    The result is empty for TensorRT. TensorRT builds only on the GPU that will run the plans, and
    raises errors there.
    """
    if flavour == "tensorrt":
        return ()
    known: Any = importlib.import_module(FLAVOURS[flavour]).ComputeCapability.__members__
    return tuple(f"{name[2:-1]}.{name[-1]}" for name in known if name.startswith("SM"))


def capabilities_for(flavour: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the compute capabilities for which TensorRT-RTX builds a directory's plans by default.

    If there are none, TensorRT-RTX builds for all except the oldest.
    """
    least = [_LEAST[one.weights] for one in manifest.quantization.used if one.weights in _LEAST]
    return tuple(
        one
        for one in supported_capabilities(flavour)
        if least and _number(one) >= max(map(_number, least))
    )


def _number(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def check_gpu_supported(flavour: str, capability: str, manifest: Manifest) -> None:
    """Raise :class:`EESDError` if ``flavour`` has no kernels for a directory's plans on GPUs of
    this compute capability."""
    known = supported_capabilities(flavour)
    if known and capability not in known:
        raise EESDError(
            f"{flavour} {library_version(flavour)} has no kernels for compute capability "
            f"{capability}; "
            f"supported are {', '.join(known)}. Data-centre GPUs (H100: 9.0, B200: 10.0) need "
            "tensorrt: on a machine with one, "
            f"{pip_install('tensorrt')}, and build with: eesd-build --target tensorrt. "
            "Other GPUs: --backend torch."
        )
    for one in manifest.quantization.used:
        least = _LEAST.get(one.weights, capability)
        if _number(capability) < _number(least):
            raise EESDError(
                f"TensorRT has no kernels for {one.name} weights on GPUs of compute "
                f"capability {capability}, only from {least} "
                "on; export with --quantize int8 or int4."
            )
    int4 = any(one.weights == "int4" for one in manifest.quantization.used)
    if capability == TURING and (int4 or manifest.dtype == "bfloat16"):
        raise EESDError(
            f"TensorRT has no kernels for {'int4 weights' if int4 else manifest.dtype} on "
            f"GPUs of compute capability {TURING}; "
            "export with --dtype float16, without --quantize or with --quantize int8."
        )


def first_slots(slots: int) -> tuple[int, ...]:
    """Return the numbers of slots, from the first slot on, that attention in a plan may read. A
    call reads the smallest number that includes all slots that it sees.

    The numbers are an eighth, a quarter and a half of ``slots``, rounded down to a multiple of 16
    for alignment, and ``slots``.
    """
    parts = (slots // (16 * part) * 16 for part in (8, 4, 2))
    return (*(some for some in parts if some >= FEWEST_SLOTS), slots)


def one_node_is_faster(max_seq_len: int, quantization: Quantizations) -> bool:
    """Return whether TensorRT-RTX drafts faster with kernels for exactly one node than with kernels
    for a range of node counts.

    For exactly one node, attention reads the caches in place. For a range of node counts, it copies
    the caches in every call. But there is no such attention kernel for long caches, and kernels for
    exactly one node expand int8 weights to 16 bits in every call.
    """
    own = quantization.draft
    copies = own is not None and BITS[own.weights] < BITS["int8"]  # copies of all int8 weights
    int8 = not copies and any(one.weights == "int8" for one in quantization.used)
    return max_seq_len <= LONG_CACHE and not int8


def attended_slots(manifest: Manifest, graph: GraphInfo) -> tuple[int, ...]:
    """Return the numbers of slots, from the first slot on, that attention in a graph's plan may
    read, in ascending order. Its mask has one of these numbers of columns.

    A draft that reads the caches in place reads all slots, because TensorRT-RTX would copy a
    smaller number of slots.
    """
    if graph == manifest.draft and one_node_is_faster(manifest.max_seq_len, manifest.quantization):
        return (manifest.gpu_slots,)
    return first_slots(manifest.gpu_slots)
