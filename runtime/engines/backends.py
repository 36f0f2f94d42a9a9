"""Which engines can run an engine directory here, and opening them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from eesd.common.errors import EESDError
from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Engine

MOST_THREADS = 1024  # a slip of the pen beyond it would take every thread that the machine can start


class Engines(NamedTuple):
    """The verify engine, and the draft engine unless it was not asked for."""

    verify: Engine
    draft: Engine | None


def open_engines(directory: Path, manifest: Manifest, backend: str, threads: int | None, draft: bool) -> Engines:
    """Load the engines of a directory with ``backend``; raises :class:`EESDError` where that cannot be."""
    if backend not in BACKENDS:
        raise EESDError(f"There is no backend {backend!r}; there are {', '.join(BACKENDS)}.")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise EESDError(f"threads is {threads}; it must be between 1 and {MOST_THREADS}.")
    return BACKENDS[backend](directory, manifest, threads or default_threads(), draft)


def default_threads() -> int:
    """The processors this process may use; one is left out of many, for the host's own work."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return available if available <= 4 else available - 1


def nvidia_driver() -> bool:
    """Whether there are traces of an NVIDIA driver."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def torch_sees_gpu() -> bool:
    """Whether the torch engine could use a GPU here. Torch is imported only where there is a driver: that takes seconds."""
    if not nvidia_driver():
        return False
    try:
        import torch

        from eesd.runtime.engines import torch_engine  # noqa: F401  # it needs more than torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _auto(directory: Path, manifest: Manifest, threads: int, draft: bool) -> Engines:
    """Plans where there are some and a GPU to run them, else torch on a GPU, else ONNX Runtime on the CPU."""
    if not torch_sees_gpu():
        return _ort(directory, manifest, threads, draft)
    return (_tensorrt if manifest.plans else _torch)(directory, manifest, threads, draft)


def _ort(directory: Path, manifest: Manifest, threads: int, draft: bool) -> Engines:
    from onnxruntime import get_available_providers

    if "CUDAExecutionProvider" in get_available_providers() and torch_sees_gpu():
        from eesd.runtime.engines.ort_gpu import open_ort_device

        return Engines(*open_ort_device(directory, manifest, threads, draft))
    from eesd.runtime.engines.ort_cpu import OrtEngine

    verify = OrtEngine(directory, manifest, manifest.verify, threads)
    return Engines(verify, OrtEngine(directory, manifest, [manifest.draft], threads) if draft else None)


def _torch(directory: Path, manifest: Manifest, threads: int, draft: bool) -> Engines:
    try:
        from eesd.runtime.engines.torch_engine import open_torch
    except ImportError as error:
        raise EESDError(f"The torch backend needs {error.name}; install it with: pip install 'eesd[torch]'.") from None
    return Engines(*open_torch(directory, manifest, threads, draft))


def _tensorrt(directory: Path, manifest: Manifest, _threads: int, draft: bool) -> Engines:
    from eesd.runtime.engines.trt_plans import Plans

    plans = Plans(directory, manifest)
    try:
        from eesd.runtime.engines.trt_engine import open_tensorrt
    except ImportError as error:
        raise EESDError(f"The tensorrt backend needs {error.name}; install it with: pip install 'eesd[torch]'.") from None
    return Engines(*open_tensorrt(manifest, plans, draft))


BACKENDS: dict[str, Callable[[Path, Manifest, int, bool], Engines]] = {
    "auto": _auto,
    "tensorrt": _tensorrt,
    "ort": _ort,
    "torch": _torch,
}
"""By the name that ``--backend`` takes. Each loads its libraries only when it is asked for."""
