"""A fake of TensorRT's Python API for machines without a GPU. Its plans name ONNX graphs, which ONNX Runtime runs.

Tensors are at addresses in host memory. Mistakes that the real API may ignore are errors here: shapes outside the profile,
addresses that are not set, a cache whose output address differs from its input address, too little scratch memory, and new
shapes for a context that has run.
"""

import json
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from eesd.common.integrity import sha256_of
from eesd.common.manifest import MANIFEST_FILE, Manifest, PlanInfo
from eesd.common.manifest_reader import load_manifest

VERSION = "99.1"
SCRATCH = {"draft.onnx": 300, "verify.onnx": 4096}


def write_plans(directory: Path, flavour: str = "tensorrt", chunk: int = 16, capabilities: tuple[str, ...] = ()) -> Manifest:
    """Write a fake plan for each graph of a directory, and record the plans in its manifest.

    Args:
        directory: Engine directory.
        flavour: Flavour of the plans.
        chunk: Tokens of the prompt that one call takes at most.
        capabilities: Compute capabilities that the plans are for; empty: any.

    Returns:
        The new manifest.
    """
    manifest, plans = load_manifest(directory), {}
    for graph in manifest.graphs:
        decoding = ((1, 4, manifest.max_tree_nodes + 1), (1, chunk, chunk))
        profiles = ((1, 1, 1),) if graph == manifest.draft else decoding
        path = directory / Path(graph.file).with_suffix(".plan").name
        plan = {"path": str(directory / graph.file), "profiles": profiles, "name": graph.file, "slots": manifest.gpu_slots}
        path.write_text(json.dumps(plan))
        plans[graph.file] = PlanInfo(
            file=path.name,
            size=path.stat().st_size,
            sha256=sha256_of(path),
            flavour=flavour,
            version=VERSION,
            compute_capabilities=capabilities,
            source="",
            max_batch=1,
            profiles=profiles,
            fused_attentions=len(graph.caches),
            fused_cache_updates=2 * len(graph.caches),
        )
    manifest = replace(manifest, plans=plans)
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


class Strategy(Enum):
    USER_MANAGED = 2


class ComputeCapability(Enum):
    """The members of TensorRT-RTX 1.7, with values of our own."""

    NONE, CURRENT, SM75, SM80, SM86, SM89, SM120, SM121 = range(8)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None: ...

    def log(self, severity: int, message: str) -> None: ...


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, buffer: Any) -> "Engine | None":
        try:
            plan = json.loads(bytes(buffer))
        except ValueError:
            self._logger.log(ILogger.ERROR, "Magic tag does not match\nand more")
            return None
        self._logger.log(ILogger.INFO, "Loaded engine")
        return Engine(**plan)


class Engine:
    """An ``ICudaEngine``. ``contexts`` lists the execution contexts that were made of it."""

    def __init__(self, path: str, profiles: list[list[int]], name: str, slots: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.profiles, self._slots = profiles, slots
        self.device_memory_size_v2 = SCRATCH.get(name, 1000)
        self.inputs = {tensor.name: tensor for tensor in self.session.get_inputs()}
        self.outputs = {tensor.name: tensor for tensor in self.session.get_outputs()}
        self.names: list[str] = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)
        self.contexts: list[Context] = []
        self.copied: set[str] = set()
        """Caches that a builder failed to update in place."""

    def get_aliased_input_tensor(self, name: str) -> str | None:
        cache = name.removesuffix("_out")
        return cache if cache != name and cache in self.inputs and cache not in self.copied else None

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        fixed = {"S": self._slots}
        tensor = (self.inputs | self.outputs)[name]
        return tuple(size if isinstance(size, int) else fixed.get(size, -1) for size in tensor.shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, int]]:
        assert name == "position_ids"
        return [(1, count) for count in self.profiles[profile]]

    def create_execution_context(self, how: Any) -> "Context":
        config = how if isinstance(how, RuntimeConfig) else None
        assert (config.strategy if config else how) is Strategy.USER_MANAGED
        self.contexts.append(Context(self, config))
        return self.contexts[-1]

    def create_runtime_config(self) -> "RuntimeConfig":
        return RuntimeConfig()

    def create_engine_inspector(self) -> Any:
        """An inspector whose layers are objects (detailed verbosity) or names (any other verbosity)."""
        layers = [{"Name": "node_Attention_3", "LayerType": "attention"}, {"Name": "kv_cache_update 7"}, "gemm"]
        return SimpleNamespace(get_engine_information=lambda _: json.dumps({"Layers": layers, "Bindings": []}))


class Context:
    """An ``IExecutionContext``."""

    def __init__(self, engine: Engine, config: "RuntimeConfig | None") -> None:
        self._engine, self._config = engine, config
        self.profile: int | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.runs = 0
        self._memory = 0

    @property
    def count(self) -> int:
        return self.shapes["position_ids"][1]

    def set_optimization_profile_async(self, index: int, _stream: int) -> bool:
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None and self.runs == 0
        least, _, most = self._engine.profiles[self.profile]
        if name == "position_ids" and not least <= shape[1] <= most:
            return False
        if name == "logit_rows" and not 1 <= shape[0] <= (1 if self.profile else most):  # a prefill computes no other logits
            return False
        given = self._engine.inputs[name].shape
        fits = len(given) == len(shape) and all(a == b for a, b in zip(given, shape, strict=True) if isinstance(a, int))
        self.shapes[name] = shape
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self._engine.names

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine.inputs if name not in self.shapes]

    def set_device_memory(self, _address: int, size: int) -> None:
        self._memory = size

    def execute_async_v3(self, _stream: int) -> bool:
        engine, io = self._engine, self._engine.session.io_binding()
        if self._memory < engine.device_memory_size_v2 or self.addresses.keys() != set(engine.names):
            return False
        sizes = {"n": self.count, "B": 1, "S": self.shapes["attn_mask"][3], "R": self.shapes.get("logit_rows", (0,))[0]}
        for name, tensor in engine.inputs.items():
            io.bind_input(name, "cpu", 0, _type(tensor), self.shapes[name], self.addresses[name])
        for name, tensor in engine.outputs.items():
            cache = name.removesuffix("_out") if name.startswith(("key_", "value_")) else name
            if self.addresses[name] != self.addresses[cache]:
                return False
            shape = [sizes.get(dim, dim) for dim in tensor.shape]
            io.bind_output(name, "cpu", 0, _type(tensor), shape, self.addresses[name])
        engine.session.run_with_iobinding(io)
        self.runs += 1
        if self._config is not None and self._config.cache is not None:
            self._config.cache.kernels.add(f"{self.profile}:{self.count}")
        return True


def _type(tensor: Any) -> type:
    return {"tensor(float)": np.float32, "tensor(int64)": np.int64}[tensor.type]


class RuntimeCache:
    """TensorRT-RTX's compiled kernels. It refuses kernels of another GPU."""

    gpu = "this GPU"

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self.loaded = False

    def deserialize(self, data: bytes) -> bool:
        gpu, kernels = json.loads(data)
        if gpu != self.gpu:
            return False
        self.kernels, self.loaded = set(kernels), True
        return True

    @contextmanager
    def serialize(self) -> Any:
        yield json.dumps([self.gpu, sorted(self.kernels)]).encode()


class RuntimeConfig:
    def __init__(self) -> None:
        self.strategy: Strategy | None = None
        self.cache: RuntimeCache | None = None
        self.dynamic_shapes_kernel_specialization_strategy = ""

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> None:
        assert self.dynamic_shapes_kernel_specialization_strategy == "eager"
        self.cache = cache


def module(flavour: str) -> ModuleType:
    """The module that importing a flavour gives."""
    made = ModuleType(flavour.replace("-", "_"))
    made.__spec__ = SimpleNamespace(name=made.__name__)  # type: ignore[assignment]
    made.__version__ = VERSION  # type: ignore[attr-defined]
    made.ILogger, made.Runtime, made.ExecutionContextAllocationStrategy = ILogger, Runtime, Strategy  # type: ignore[attr-defined]
    made.LayerInformationFormat = SimpleNamespace(JSON="json")  # type: ignore[attr-defined]
    if flavour == "tensorrt-rtx":
        made.ComputeCapability = ComputeCapability  # type: ignore[attr-defined]
        made.IRuntimeCache = RuntimeCache  # type: ignore[attr-defined]
        made.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")  # type: ignore[attr-defined]
    return made
