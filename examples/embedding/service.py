"""A typical TensorRT service with EESD embedded. The service keeps its own logger, allocator,
stream, engines and memory.

    python service.py plans/ "def fibonacci(n):"

Everything above ``speculate`` is the service without EESD. EESD adds the decode loop. It uses the
service's engines, execution contexts, stream and memory. It starts no thread, handles no signal,
and logs through ``logging``.
"""

import importlib
import logging
import mmap
from pathlib import Path
from typing import Any

import click
import torch

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest, load_manifest
from eesd.runtime.embed import Host, embed
from eesd.runtime.engines.trt_plans import FLAVOURS
from eesd.runtime.llm import LLM, Speculation

LOG = logging.getLogger("service")


class Service:
    """Loads plans, and owns their resources on one GPU."""

    def __init__(self, directory: Path, device: int = 0) -> None:
        self.manifest = load_manifest(directory)
        if not self.manifest.plans:
            raise EESDError(f"{directory} has no plans; build them with: eesd-build {directory}.")
        if not torch.cuda.is_available():
            raise EESDError("This service runs plans on an NVIDIA GPU, and there is none.")
        self.trt = importlib.import_module(
            FLAVOURS[next(iter(self.manifest.plans.values())).flavour]
        )
        torch.cuda.set_device(device)
        self.stream = torch.cuda.Stream(device)
        self.allocator = make_allocator(self.trt, device)
        self.runtime = self.trt.Runtime(make_logger(self.trt))
        self.runtime.gpu_allocator = self.allocator
        plans = {
            graph.file: directory / self.manifest.plans[graph.file].file
            for graph in self.manifest.graphs
        }
        self.engines = {file: load_engine(self.runtime, path) for file, path in plans.items()}
        self.contexts = ContextMaker(self.trt)

    def memory(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory. Memory of another library works too, through ``torch.from_dlpack``."""
        with torch.cuda.stream(self.stream):
            return torch.zeros(shape, dtype=dtype, device="cuda")


def load_engine(runtime: Any, path: Path) -> Any:
    """Load a plan. The file is mapped, because a copy of a large model's plan would fill the main
    memory a second time."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise EESDError(f"{path} cannot be loaded; the log says why.")
    return engine


class ContextMaker:
    """Makes execution contexts that get their memory later."""

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.kernels: dict[Any, Any] = {}
        """The compiled kernels of TensorRT-RTX by engine. ``serialize()`` could save them for the
        next start."""

    def __call__(self, engine: Any) -> Any:
        """Make a context. TensorRT-RTX compiles its kernels now, because a CUDA graph would keep
        fallback kernels."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self.trt, "IRuntimeCache"):
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.dynamic_shapes_kernel_specialization_strategy = (
            self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        if engine not in self.kernels:
            self.kernels[engine] = config.create_runtime_cache()
        config.set_runtime_cache(self.kernels[engine])
        return engine.create_execution_context(config)


def make_logger(trt: Any) -> Any:
    """Make a TensorRT logger that writes to the service's log."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            failed = severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
            LOG.log(logging.ERROR if failed else logging.DEBUG, message)

    return Logger()


def make_allocator(trt: Any, device: int) -> Any:
    """Make an allocator that serves TensorRT from the memory pool that the rest of the service
    uses.

    All five methods must be overridden, or TensorRT's bindings cannot call them. Errors must not
    propagate through TensorRT, so the methods return None if there is no memory. torch aligns
    memory to 512 bytes, which is more than TensorRT requires.
    """

    class Allocator(trt.IGpuAllocator):
        def __init__(self) -> None:
            trt.IGpuAllocator.__init__(self)

        def allocate(self, size: int, alignment: int, flags: int) -> int | None:
            memory = self.allocate_async(size, alignment, flags, 0)
            # Memory that was freed on that stream may still be in use there.
            torch.cuda.default_stream(device).synchronize()
            return memory

        def reallocate(self, _address: int, _alignment: int, _new_size: int) -> None:
            """Return None, because the memory cannot grow. TensorRT then allocates new memory."""

        def deallocate(self, memory: int) -> bool:
            torch.cuda.synchronize(device)  # as cudaFree does: TensorRT may still use it
            return self.deallocate_async(memory, 0)

        def allocate_async(
            self, size: int, _alignment: int, _flags: int, stream: int
        ) -> int | None:
            try:
                return torch.cuda.caching_allocator_alloc(size, device, stream) if size else None
            except torch.OutOfMemoryError:
                return None

        def deallocate_async(self, memory: int, _stream: int) -> bool:
            if memory:
                torch.cuda.caching_allocator_delete(memory)
            return True

    return Allocator()


def speculate(service: Service, directory: Path) -> LLM:
    """Make an LLM on the service's engines. This is the only function that uses EESD."""
    manifest: Manifest = service.manifest
    dtype = getattr(torch, manifest.dtype)
    sizes = 2, 1, manifest.geometry.num_kv_heads, manifest.gpu_slots, manifest.geometry.head_dim
    scratch = max(engine.device_memory_size_v2 for engine in service.engines.values())
    host = Host(
        verify=[service.engines[stage.file] for stage in manifest.verify],
        draft=service.engines[manifest.draft.file],
        make_context=service.contexts,
        stream=service.stream,
        kv_cache=[
            service.memory(len(stage.caches), *sizes, dtype=dtype) for stage in manifest.verify
        ],
        scratch=service.memory(max(scratch, 1), dtype=torch.uint8),
    )
    return embed(directory, host, Speculation())


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("-n", "--max-new-tokens", default=128, show_default=True)
def main(directory: Path, prompt: str, max_new_tokens: int) -> None:
    """Continue PROMPT with the plans in DIRECTORY."""
    logging.basicConfig(level=logging.INFO)
    llm = speculate(Service(directory), directory)
    for piece in llm.stream(prompt, max_new_tokens=max_new_tokens):
        click.echo(piece.text, nl=False)
    click.echo()


if __name__ == "__main__":
    main()
