"""TensorRT plans, checked before they are loaded, because the loader's own words for what is wrong help nobody."""

import importlib
import importlib.util
import json
import logging
import mmap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.manifest import FLAVOURS, GraphInfo, Manifest, PlanInfo
from eesd.runtime.doctor import compute_capability
from eesd.runtime.engines.backends import nvidia_driver

LOGGER = logging.getLogger("eesd.tensorrt")
LOGGER.addHandler(logging.NullHandler())  # or errors would be printed beside the sentence that we make of them


class Plans:
    """The plans of one engine directory: the library that made them, and the kernels it compiled for this GPU.

    TensorRT-RTX finishes its kernels when a plan is first run; they are kept beside the plans, for a fast second start.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._infos = [_info(directory, manifest, graph) for graph in manifest.graphs]
        self.trt = _library(directory, self._infos)
        self._check_profiles()
        _check_gpu(directory, self._infos[0])
        self._complaints: list[str] = []
        self._runtime = self.trt.Runtime(_logger(self.trt, self._complaints))
        self._kernels: dict[str, Any] = {}

    @property
    def prefill_chunk(self) -> int:
        """Tokens of the prompt that every plan takes in one call."""
        return min(plan.profiles[1][2] for plan in self._infos)

    def _check_profiles(self) -> None:
        most = self._manifest.max_tree_nodes + 1
        for plan in self._infos:
            if len(plan.profiles) != 2 or plan.profiles[0][2] != most or plan.profiles[1][2] > self._manifest.max_seq_len:
                raise EESDError(
                    f"{self._directory / plan.file} was not built for the manifest's rounds of {most} nodes in "
                    f"{self._manifest.max_seq_len} slots; {_rebuild(self._directory)}."
                )

    def load(self, graph: GraphInfo) -> Any:
        """The engine of a graph, on the current GPU; :class:`EESDError` with the loader's first complaint if it cannot be."""
        path = self._directory / self._manifest.plans[graph.file].file
        self._complaints.clear()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = self._complaints[0].splitlines()[0][:300] if self._complaints else "it does not say why"
            remedy = "update the NVIDIA driver" if "driver" in reason else _rebuild(self._directory)
            raise EESDError(f"{self._infos[0].flavour} cannot load {path} ({reason}); {remedy}.")
        if not computes(engine, graph):
            raise EESDError(f"{path} is not the plan of {graph.file}; {_rebuild(self._directory)}.")
        return engine

    def layers(self, graph: GraphInfo) -> list[tuple[str, str]]:
        """Name and kind of every layer of the built engine, as the engine inspector tells them."""
        inspector = self.load(graph).create_engine_inspector()
        told = json.loads(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))["Layers"]
        named = [layer if isinstance(layer, dict) else {"Name": layer} for layer in told]
        return [(layer.get("Name", ""), layer.get("LayerType", "")) for layer in named]

    def context(self, engine: Any, graph: GraphInfo) -> Any:
        """An execution context that brings no memory of its own, with the kernels that an earlier start compiled."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self.trt, "IRuntimeCache"):  # TensorRT compiled everything when it built the plan
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # A CUDA graph keeps the kernels that it was recorded with, so these must not be stand-ins for others to come.
        config.dynamic_shapes_kernel_specialization_strategy = self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        if graph.file not in self._kernels:
            self._kernels[graph.file] = kernels = config.create_runtime_cache()
            path = self._kernel_file(graph)
            if path.exists() and not kernels.deserialize(path.read_bytes()):
                LOGGER.info("%s is of another GPU, driver or version; its kernels are compiled anew", path)
        config.set_runtime_cache(self._kernels[graph.file])
        return engine.create_execution_context(config)

    def keep_kernels(self, graph: GraphInfo) -> None:
        """Write what was compiled for a graph beside its plan, where that is allowed and it is new."""
        kernels, path = self._kernels.get(graph.file), self._kernel_file(graph)
        if kernels is None:
            return
        with kernels.serialize() as memory:
            data = bytes(memory)
        try:
            if not path.exists() or path.read_bytes() != data:
                with written_whole(path) as temporary:
                    temporary.write_bytes(data)
        except OSError as error:
            LOGGER.info("%s is not kept: %s", path, error)

    def _kernel_file(self, graph: GraphInfo) -> Path:
        return self._directory / Path(graph.file).with_suffix(".kernels").name


def computes(engine: Any, graph: GraphInfo) -> bool:
    """Whether an engine has the inputs and outputs of a graph, by their names."""
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    return found == {tensor.name for tensor in (*graph.inputs, *graph.outputs)}


def _rebuild(directory: Path) -> str:
    return f"build it again with: eesd-build --force {directory}"


def _info(directory: Path, manifest: Manifest, graph: GraphInfo) -> PlanInfo:
    plan = manifest.plans.get(graph.file)
    if plan is None:
        raise EESDError(f"{directory} has no plan of {graph.file}; build it with: eesd-build {directory}.")
    path = directory / plan.file
    if not path.exists():
        raise EESDError(f"{path} is missing; build it with: eesd-build {directory}.")
    if path.stat().st_size != plan.size:
        raise EESDError(f"{path} has {path.stat().st_size} bytes where the manifest says {plan.size}; {_rebuild(directory)}.")
    return plan


def _library(directory: Path, infos: list[PlanInfo]) -> Any:
    """The module that loads these plans: of their flavour, and of the version that built them."""
    flavours, versions = {plan.flavour for plan in infos}, {plan.version for plan in infos}
    if len(flavours) != 1 or len(versions) != 1:
        raise EESDError(f"The plans in {directory} were built by different versions; {_rebuild(directory)}.")
    flavour, built = flavours.pop(), versions.pop()
    if flavour not in FLAVOURS:
        raise EESDError(f"The plans in {directory} are of an unknown flavour {flavour!r}; {_rebuild(directory)}.")
    if importlib.util.find_spec(FLAVOURS[flavour]) is None:
        raise EESDError(f"The plans in {directory} need {flavour}; install it with: pip install 'eesd[{flavour}]'.")
    found = version(FLAVOURS[flavour].replace("_", "-"))
    if found != built:
        raise EESDError(
            f"The plans in {directory} were built by {flavour} {built} and {found} is installed; "
            f"install {built}, or {_rebuild(directory)}."
        )
    return importlib.import_module(FLAVOURS[flavour])


def _check_gpu(directory: Path, plan: PlanInfo) -> None:
    here = compute_capability() if nvidia_driver() else None
    if here is None:
        raise EESDError("Plans run on an NVIDIA GPU, and no driver answers here; use --backend ort or --backend torch.")
    if plan.compute_capabilities and here not in plan.compute_capabilities:
        raise EESDError(
            f"The plans in {directory} are for compute capability {', '.join(plan.compute_capabilities)} and this GPU has "
            f"{here}; {_rebuild(directory)}."
        )


def _logger(trt: Any, complaints: list[str]) -> Any:
    """What the library says goes to Python's logging, under ``eesd.tensorrt``."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.INFO,
        trt.ILogger.VERBOSE: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if levels[severity] == logging.ERROR:
                complaints.append(message)
            LOGGER.log(levels[severity], message)

    return Logger()
