"""A fake of TensorRT's Python API for machines without a GPU. Its plans refer to ONNX graphs, which
ONNX Runtime runs.

The names and calls are those of a real version (``trt_api.py``), and anything else is refused.
Tensors are at addresses in host memory. Some mistakes that the real API may ignore are errors here.
They are shapes outside the profile, missing addresses, a cache whose output address differs from
its input address, too little scratch memory, and new shapes for a context that has run. A call
overwrites its scratch memory and its results before it computes anything.
"""

import json
import sys
from collections.abc import Callable
from ctypes import memset
from dataclasses import replace
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from eesd.common.integrity import sha256_of
from eesd.common.manifest import MANIFEST_FILE, GraphInfo, Manifest, PlanInfo, load_manifest
from eesd.export.plan_graph import attend_to_first, plan_graph
from eesd.runtime.embed import Host
from eesd.runtime.engines import backends, trt_plans
from eesd.runtime.engines.trt_plans import FLAVOURS, attended_slots, graph_read, refit_digest
from support import fake_cuda
from support.fake_cuda import GARBAGE
from support.trt_api import VERSIONS, Api, load

VERSION = "99.1"
SCRATCH = {"draft.onnx": 300, "verify.onnx": 4096}


def write_plans(
    directory: Path,
    flavour: str = "tensorrt",
    chunk: int = 16,
    capabilities: tuple[str, ...] = (),
    batch: int = 1,
    stripped: bool = False,
) -> Manifest:
    """Write a fake plan for each graph of a directory, and record the plans in its manifest.
    Returns the manifest.

    A call processes at most ``chunk`` tokens of the prompt, or decodes ``batch`` sequences. The
    plans are for GPUs of these compute ``capabilities``, or for any GPU if there are none. If
    ``stripped`` is true, the plans have no weights, and their graphs are next to them.
    """
    manifest = load_manifest(directory)
    plans = {}
    for graph in manifest.graphs:
        decoding = ((1, 4, manifest.max_tree_nodes + 1), (1, chunk, chunk))
        profiles = ((1, 1, 1),) if graph == manifest.draft else decoding
        path = directory / Path(graph.file).with_suffix(".plan").name
        plan: dict[str, Any] = {
            "path": str(_as_built(directory, manifest, graph)),
            "profiles": profiles,
            "name": graph.file,
            "slots": manifest.gpu_slots,
            "least": attended_slots(manifest, graph)[0],
            "batch": batch,
        }
        if stripped:
            plan["stripped"] = True
            graph_read(path).write_bytes(plan_graph(directory, manifest, graph, batch, True))
        path.write_text(json.dumps(plan))
        size = path.stat().st_size
        fused = len(graph.caches)
        refit = refit_digest(graph_read(path), manifest) if stripped else ""
        plans[graph.file] = PlanInfo(
            path.name,
            size,
            sha256_of(path),
            flavour,
            VERSION,
            capabilities,
            "",
            batch,
            profiles,
            fused,
            2 * fused,
            refit,
        )
    manifest = replace(manifest, plans=plans)
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def _as_built(directory: Path, manifest: Manifest, graph: GraphInfo) -> Path:
    """Returns the graph that a plan computes. Its attention may read only the first slots. The
    graph is stored next to the weights."""
    if len(attended_slots(manifest, graph)) == 1:
        return directory / graph.file
    model = onnx.load(directory / graph.file, load_external_data=False)
    attend_to_first(model.graph)
    del model.graph.value_info[:]
    path = directory / Path(graph.file).with_suffix(".built.onnx").name
    path.write_bytes(model.SerializeToString())
    return path


class Fake:
    """An object of a class of the real API. It has the public names of the class in its version,
    and accepts the calls that pybind11 would accept. Names with an underscore are for tests.

    Attributes:
        _trt: The module of the object.
        _api: The API of the module's version.
    """

    _trt: Any
    _api: Api

    @classmethod
    def _class(cls) -> str:
        """The name of the class in the real API. Subclasses that the runtime defines have the same
        name."""
        return next(base.__name__ for base in cls.__mro__ if base.__name__ in NAMES)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("_"):
            return value
        if not self._api.has(self._class(), name):
            raise AttributeError(f"{self._class()} of {self._api.version} has no {name}")
        if self._api.is_property(self._class(), name):
            return value
        return partial(self._call, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not self._api.is_settable(self._class(), name):
            raise AttributeError(
                f"{self._class()} of {self._api.version} has no {name} that can be set"
            )
        object.__setattr__(self, name, value)

    def _call(self, name: str, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._api.check_call(self._class(), name, args, kwargs)
        return method(*args, **kwargs)


class ILogger(Fake):
    def __init__(self) -> None:
        self._made = True

    def log(self, severity: Any, msg: str) -> None: ...


class Runtime(Fake):
    def __init__(self, logger: ILogger) -> None:
        self._api.check_call("Runtime", "__init__", (logger,), {})
        if not hasattr(logger, "_made"):
            raise TypeError("ILogger.__init__() must be called when overriding __init__")
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> "ICudaEngine | None":
        try:
            plan = json.loads(bytes(serialized_engine))
        except ValueError:
            self._logger.log(self._trt.ILogger.ERROR, "Magic tag does not match\nand more")
            return None
        self._logger.log(self._trt.ILogger.INFO, "Loaded engine")
        engine: ICudaEngine = self._trt.ICudaEngine(**plan)
        return engine


class ICudaEngine(Fake):
    """``_contexts`` lists the engine's execution contexts. ``_copied`` lists the caches that the
    builder failed to update in place."""

    def __init__(
        self,
        path: str,
        profiles: list[list[int]],
        name: str,
        slots: int,
        least: int,
        batch: int = 1,
        stripped: bool = False,
    ) -> None:
        self._read(path)
        self._refittable = stripped
        self._has_weights = not stripped
        self._profiles = profiles
        self._graph = name
        self._slots = slots
        self._least = least
        self._batch = batch
        self._inputs = {tensor.name: tensor for tensor in self._session.get_inputs()}
        self._outputs = {tensor.name: tensor for tensor in self._session.get_outputs()}
        self._names: list[str] = [*self._inputs, *self._outputs]
        self._contexts: list[IExecutionContext] = []
        self._copied: set[str] = set()
        machine = fake_cuda.installed()
        self._device = -1
        if machine is not None:
            machine.write("load")
            self._device = machine.own.device

    def _read(self, path: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH.get(self._graph, 1000)

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        cache = name.removesuffix("_out")
        if cache != name and cache in self._inputs and cache not in self._copied:
            return cache
        return None

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        fixed = {"S": self._slots}
        tensor = (self._inputs | self._outputs)[name]
        return tuple(
            size if isinstance(size, int) else fixed.get(size, -1) for size in tensor.shape
        )

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, int]]:
        assert name == "position_ids"
        batches = (1, self._batch, self._batch) if profile_index == 0 else (1, 1, 1)
        return [*zip(batches, self._profiles[profile_index], strict=True)]

    def create_execution_context(self, how: Any) -> "IExecutionContext":
        config = None
        if isinstance(how, IRuntimeConfig):
            config = how
            how = config._strategy
        assert how is self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._contexts.append(self._trt.IExecutionContext(self, config))
        return self._contexts[-1]

    def create_runtime_config(self) -> "IRuntimeConfig":
        config: IRuntimeConfig = self._trt.IRuntimeConfig()
        return config


class IExecutionContext(Fake):
    def __init__(self, engine: ICudaEngine, config: "IRuntimeConfig | None") -> None:
        self._engine = engine
        self._config = config
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._runs = 0
        self._machine = fake_cuda.installed()
        self._number = 0 if self._machine is None else self._machine.number()
        self._write("context")
        self._scratch = self._scratch_size = 0

    def __del__(self) -> None:
        self._write("destroy")

    def _write(self, name: str, stream: int | None = None) -> None:
        if self._machine is not None:
            self._machine.write(name, stream, self._number, self._engine._device)

    @property
    def _count(self) -> int:
        return self._shapes["position_ids"][1]

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._write("profile", stream_handle)
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None and self._runs == 0
        self._write("shape")
        least, _, most = self._engine._profiles[self._profile]
        if name == "position_ids" and not least <= shape[1] <= most:
            return False
        first = most if name == "logit_rows" else self._engine._batch
        # A prefill computes the logits of one node.
        if not 1 <= shape[0] <= (1 if self._profile else first):
            return False
        if name == "attn_mask" and not self._engine._least <= shape[3] <= self._engine._slots:
            return False
        given = [
            self._engine._slots if size == "S" else size
            for size in self._engine._inputs[name].shape
        ]
        fits = len(given) == len(shape) and all(
            a == b for a, b in zip(given, shape, strict=True) if isinstance(a, int)
        )
        self._shapes[name] = shape
        return fits

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._write("address")
        self._addresses[name] = memory
        return name in self._engine._names

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def set_device_memory(self, memory: int, size: int) -> None:
        self._write("memory")
        self._scratch = memory
        self._scratch_size = size

    def is_stream_capturable(self, stream: int) -> bool:
        return stream != 0  # the default stream cannot be captured

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        if self._scratch_size < engine.device_memory_size_v2 or self._addresses.keys() != set(
            engine._names
        ):
            return False
        if any(self._addresses[f"{name}_out"] != self._addresses[name] for name in self._caches()):
            return False
        self._runs += 1
        if self._config is not None and self._config._cache is not None:
            self._config._cache._kernels.add(f"{self._profile}:{self._count}")
        self._write("execute", stream_handle)
        if self._machine is None:
            self._work()()
        else:
            self._machine.enqueue(self._machine.streams[stream_handle], self._work())
        return True

    def _caches(self) -> list[str]:
        return [name for name in self._engine._inputs if name.startswith(("key_", "value_"))]

    def _work(self) -> Callable[[], None]:
        """Returns the work of a call with the context's current shapes and addresses. Results and
        scratch memory are overwritten first."""
        engine = self._engine
        addresses = dict(self._addresses)
        shapes = dict(self._shapes)
        sizes = {
            "n": self._count,
            "B": shapes["position_ids"][0],
            "S": engine._slots,
            "R": shapes.get("logit_rows", (0,))[0],
        }
        results = {
            name: [sizes.get(dim, dim) for dim in tensor.shape]
            for name, tensor in engine._outputs.items()
        }
        scratch = self._scratch
        size = engine.device_memory_size_v2
        caches = {f"{name}_out" for name in self._caches()}

        def work() -> None:
            memset(scratch, GARBAGE, size)
            io = engine._session.io_binding()
            for name, tensor in engine._inputs.items():
                io.bind_input(name, "cpu", 0, _type(tensor), shapes[name], addresses[name])
            for name, tensor in engine._outputs.items():
                if name not in caches:
                    memset(
                        addresses[name],
                        GARBAGE,
                        prod(results[name]) * np.dtype(_type(tensor)).itemsize,
                    )
                io.bind_output(name, "cpu", 0, _type(tensor), results[name], addresses[name])
            if engine._has_weights:  # without weights, results are garbage
                engine._session.run_with_iobinding(io)

        return work


def _type(tensor: Any) -> type:
    return {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}[
        tensor.type
    ]


class IRuntimeCache(Fake):
    """TensorRT-RTX's compiled kernels. It refuses kernels of another GPU."""

    _gpu = "this GPU"

    def __init__(self) -> None:
        self._kernels: set[str] = set()
        self._loaded = False

    def deserialize(self, blob: bytes) -> bool:
        gpu, kernels = json.loads(blob)
        if gpu != self._gpu:
            return False
        self._kernels = set(kernels)
        self._loaded = True
        return True

    def serialize(self) -> "IHostMemory":
        memory: IHostMemory = self._trt.IHostMemory(
            json.dumps([self._gpu, sorted(self._kernels)]).encode()
        )
        return memory


class IHostMemory(Fake):
    """Bytes. The real class is also a buffer, which Python classes cannot be before 3.12."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> "IHostMemory":
        return self

    def __exit__(self, *_: object) -> None: ...

    def __bytes__(self) -> bytes:
        return self._data


class IRuntimeConfig(Fake):
    def __init__(self) -> None:
        self._strategy: Any = None
        self._cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        cache: IRuntimeCache = self._trt.IRuntimeCache()
        return cache

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        eager = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        assert self.dynamic_shapes_kernel_specialization_strategy is eager
        self._cache = cache
        return True


class Refitter(Fake):
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self._api.check_call("Refitter", "__init__", (engine, logger), {})
        if not engine._refittable:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._engine = engine
        self._given = ""

    def refit_cuda_engine(self) -> bool:
        if self._given:
            self._engine._read(self._given)
            self._engine._has_weights = True
        return bool(self._given)


class OnnxParserRefitter(Fake):
    def __init__(self, refitter: Refitter, logger: ILogger) -> None:
        self._api.check_call("OnnxParserRefitter", "__init__", (refitter, logger), {})
        self._refitter = refitter

    def refit_from_file(self, model: str) -> bool:
        self._refitter._given = model
        return Path(model).exists()


CLASSES = (
    *(ILogger, Runtime, ICudaEngine, IExecutionContext, IRuntimeConfig, IRuntimeCache, IHostMemory),
    *(Refitter, OnnxParserRefitter),
)
NAMES = {cls.__name__ for cls in CLASSES}


def host_of(directory: Path, stream: Any = None) -> Host:
    """Returns the engines and the scratch memory of a service. On the CPU there is no stream."""
    manifest = load_manifest(directory)
    trt = module("tensorrt")
    runtime = trt.Runtime(trt.ILogger())
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    plans = {file: (directory / plan.file).read_bytes() for file, plan in manifest.plans.items()}
    engines = {
        graph.file: runtime.deserialize_cuda_engine(plans[graph.file]) for graph in manifest.graphs
    }
    verify = [engines[stage.file] for stage in manifest.verify]
    scratch = torch.zeros(5000, dtype=torch.uint8)
    contexts = lambda engine: engine.create_execution_context(strategy)  # noqa: E731
    return Host(verify, engines[manifest.draft.file], contexts, stream, scratch=scratch)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that both flavours, a driver, and a GPU of compute capability 8.9 are installed."""
    for flavour, name in FLAVOURS.items():
        monkeypatch.setitem(sys.modules, name, module(flavour))
    monkeypatch.setattr(trt_plans, "nvidia_driver", lambda: True)
    monkeypatch.setattr(trt_plans, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(backends, "torch_sees_gpu", lambda: True)


def module(flavour: str, version: str = "") -> Any:
    """Returns the module of a flavour. ``version`` is a version of
    :data:`~support.trt_api.VERSIONS`, and the newest version is the default."""
    api = load(version or VERSIONS[flavour][-1])
    made: Any = ModuleType(flavour.replace("-", "_"))
    made.__spec__ = SimpleNamespace(name=made.__name__)
    made.__version__ = VERSION
    for name, members in api.enums.items():
        setattr(made, name.rpartition(".")[2], Enum(name.rpartition(".")[2], members))
    for cls in CLASSES:
        if cls.__name__ in api.classes:
            setattr(made, cls.__name__, type(cls.__name__, (cls,), {"_trt": made, "_api": api}))
    for severity in made.Severity:
        setattr(made.ILogger, severity.name, severity)
    del made.Severity  # the real module has it in ILogger only
    return made
