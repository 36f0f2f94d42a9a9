"""Open a directory's engines with a named backend, or with the best backend for this machine."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from eesd.common.checks import check_choice, check_flag, check_integer
from eesd.common.errors import EESDError
from eesd.common.integrity import check_loaded
from eesd.common.machine import (
    TORCH_ENGINE,
    cores,
    installed,
    nvidia_driver,
    pip_install,
    ranks,
    torch_sees_gpu,
)
from eesd.common.manifest import WEIGHTS_FILE, Manifest
from eesd.runtime.engines.base import Engine, KVCache
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES

MAX_THREADS = 1024
"""Maximum number of threads. A larger number is refused, because it is probably a typing error and
the engines would really start that many threads."""
ACTIVATIONS = ("int8", "float32")
"""The types of the activations that are multiplied by quantized weights on the CPU."""

ORT_PACKAGES = ("onnxruntime", "onnxruntime-gpu")
"""The packages of ONNX Runtime. The second one supports NVIDIA GPUs. Both packages install the same
files, so only one of them may be installed."""
FOR_GPUS = f"pip uninstall -y {' '.join(ORT_PACKAGES)}; pip install onnxruntime-gpu"
EXPORT_AGAIN = "export the model again"
NO_GPU = (
    "torch is missing or sees no GPU: install a build of torch for the driver's CUDA "
    "(pytorch.org), or update the driver"
)


class Engines(NamedTuple):
    """The engines of a directory.

    Attributes:
        verify: The verify engine.
        draft: The draft engine, or None if it was not loaded.
        notice: A message that tells the user how this machine runs the directory. It may be empty.
        exact: True if calls give the same bits for every number of rows by construction, or None if
            this is unknown.
        exact_trees: Whether a node of a tree has the same bits as the last node of a chain with the
            same path.
        in_place: Whether logits are valid only for nodes whose slot is the same as in a chain.
        last_positions: The positions, in ascending order, after which the verify engine uses
            another kernel. A round must end at or before the next of these positions. If it did
            not, tokens would depend on the draft.
        span: A function that takes the name of a part of a request, and returns a context manager
            that marks this part while it runs.
    """

    verify: Engine
    draft: Engine | None
    notice: str = ""
    exact: bool | None = None
    exact_trees: bool = False
    in_place: bool = False
    last_positions: tuple[int, ...] = ()
    span: Callable[[str], AbstractContextManager[object]] = nullcontext

    def new_kv_caches(self, count: int = 1) -> Sequence[KVCache]:
        """Make the caches of ``count`` sequences, and prepare the engines for them."""
        kv_caches = self.verify.new_kv_caches(count)
        for engine in (self.verify, self.draft):
            if engine is not None:
                engine.prepare(kv_caches)
        return kv_caches


@dataclass(frozen=True)
class EngineOptions:
    """How to open the engines of a directory.

    Attributes:
        backend: A name in :data:`BACKENDS`.
        threads: Number of CPU threads of an engine. If it is None, :func:`default_threads` are
            divided among the ranks.
        draft: Whether to load the draft engine.
        exact: If True, drafting does not change any bit of a logit. For this purpose every verify
            pass on a GPU has the same node count. If the logits of trees and chains are rounded
            differently, a tree's accepted path is cut where its bits would differ. If None, passes
            on a GPU have the same node count if that costs little, and paths are cut only if
            activations are int8. If False, passes on a GPU have the smallest possible number of
            nodes. In a batch, the longest row determines this number.
        activations: The type of the activations that are multiplied by quantized weights on the
            CPU. It is ``int8`` or ``float32``. If it is None, activations are int8, in blocks of
            32. Weights of 16 and 32 bits are always multiplied by float32.
        kv_cache_dtype: The type of the KV cache on the CPU. It is ``float32``, ``float16`` or
            ``int8``. If it is None, the cache is float32.
        nvtx: Whether to mark the phases prefill, draft, verify and accept as NVTX ranges for Nsight
            Systems.

    Raises:
        EESDError: A value has the wrong type, is unknown, or is out of range.
    """

    backend: str = "auto"
    threads: int | None = None
    draft: bool = True
    exact: bool | None = None
    activations: str | None = None
    kv_cache_dtype: str | None = None
    nvtx: bool = False

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        check_flag("nvtx", self.nvtx)
        if self.threads is not None:
            check_integer("threads", self.threads, 1, MAX_THREADS)
        if self.exact is not None:
            check_flag("exact", self.exact)
        for name, known in (("activations", ACTIVATIONS), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), known)

    @property
    def engine_threads(self) -> int:
        """CPU threads of an engine."""
        return self.threads or max(default_threads() // ranks(), 1)

    def refuse_choices(self, backend: str) -> None:
        """Raise :class:`EESDError` if the options choose the type of the activations or of the KV
        cache. This backend does not support such a choice."""
        for name, chosen in (
            ("activations", "its activations"),
            ("kv_cache_dtype", "the type of its KV cache"),
        ):
            if getattr(self, name) is not None:
                raise EESDError(f"The backend {backend} cannot choose {chosen}; leave {name} out.")


def open_engines(directory: Path, manifest: Manifest, options: EngineOptions) -> Engines:
    """Load the engines of a directory. ``manifest`` is its manifest.

    Raises:
        EESDError: The backend cannot run this directory on this machine, with these options, or
            with several ranks.
    """
    if ranks() > 1 and options.backend != "torch":
        raise EESDError(
            f"WORLD_SIZE is {ranks()}, but only the backend torch splits a model over "
            f"several processes, and {options.backend} was chosen; choose the backend "
            "torch, or start one process."
        )
    if options.nvtx and not torch_sees_gpu():
        raise EESDError(f"NVTX ranges need a GPU, and {NO_GPU}.")
    texts_and_graphs = {name: info for name, info in manifest.files.items() if name != WEIGHTS_FILE}
    check_loaded(directory, texts_and_graphs, EXPORT_AGAIN)
    try:
        engines = BACKENDS[options.backend](directory, manifest, options)
    except ModuleNotFoundError as error:
        raise EESDError(
            f"The {options.backend} backend needs {error.name}; install it with: "
            f"{pip_install('torch')}."
        ) from None
    span = importlib.import_module("torch.cuda.nvtx").range if options.nvtx else nullcontext
    return engines._replace(in_place=options.exact is True and not engines.exact_trees, span=span)


def _check_weights(directory: Path, manifest: Manifest) -> None:
    """Check the weights, which all backends except the CPU engine and TensorRT plans read.

    Raises:
        EESDError: The weights are only in the build for the CPU, or a file was changed."""
    manifest.check_whole(directory)
    check_loaded(directory, {WEIGHTS_FILE: manifest.files[WEIGHTS_FILE]}, EXPORT_AGAIN)
    check_loaded(directory, manifest.linked, EXPORT_AGAIN)


def default_threads() -> int:
    """Return the number of processors that this process may use. If there are more than four, the
    result is one fewer, so that a processor is left for the host's code."""
    available = cores()
    return available if available <= 4 else available - 1


def onnxruntime_versions() -> dict[str, str]:
    """Return the installed packages of ONNX Runtime and their versions. Packages with other names,
    such as custom builds, are not found."""
    return {
        package: version for package in ORT_PACKAGES if (version := installed(package)) is not None
    }


def onnxruntime_problem() -> str:
    """Return the reason why ONNX Runtime cannot be used, together with the remedy. The result is ""
    if it can be used."""
    versions = onnxruntime_versions()
    if len(versions) > 1:
        names = " and ".join(f"{package} {version}" for package, version in versions.items())
        return (
            f"{names} are both installed, and overwrite each other's files; run: {FOR_GPUS} (for "
            "the CPU alone: onnxruntime)"
        )
    try:
        importlib.import_module("onnxruntime").get_available_providers()
    except (ImportError, AttributeError) as error:
        # If both packages were installed and one was removed, the module is left without its
        # contents.
        package = next(iter(versions), ORT_PACKAGES[0])
        return (
            f"onnxruntime cannot be loaded ({error}); run: pip install --force-reinstall {package}"
        )
    return ""


def _open_auto(directory: Path, manifest: Manifest, options: EngineOptions) -> Engines:
    """On a GPU, open with ``tensorrt`` if the directory has plans, and with ``torch`` if not.
    Without a GPU, open with ``ort``, or with ``torch`` for a 16-bit directory that only ONNX
    Runtime's standard operators could run. A notice reports a GPU that torch cannot use."""
    if torch_sees_gpu():
        return (_open_tensorrt if manifest.plans else _open_torch)(directory, manifest, options)
    from eesd.runtime.engines.operators import missing

    if manifest.dtype == "float32" or not missing():
        engines = _open_ort(directory, manifest, options)
    else:
        notice = f"torch runs the {manifest.dtype} engines, slowly. {missing()}"
        if not all(installed(package) for package in TORCH_ENGINE):
            raise EESDError(
                f"{directory} has {manifest.dtype} engines. {missing()} To use ONNX Runtime, "
                "export with --dtype float32. The torch backend also runs them, but slowly: "
                f"{pip_install('torch')}."
            )
        engines = _open_torch(directory, manifest, options)._replace(notice=notice)
    unused = (
        f"There is an NVIDIA driver, but the CPU runs the engines, because {NO_GPU}. "
        f"{engines.notice}"
    )
    return engines._replace(notice=unused.strip()) if nvidia_driver() else engines


def _open_ort(directory: Path, manifest: Manifest, options: EngineOptions) -> Engines:
    if problem := onnxruntime_problem():
        raise EESDError(f"The ort backend cannot run: {problem}.")
    from onnxruntime import get_available_providers

    if "CUDAExecutionProvider" in get_available_providers() and torch_sees_gpu():
        from eesd.runtime.engines.ort_engine import open_on_device

        options.refuse_choices("ort on a GPU")
        _check_weights(directory, manifest)
        return Engines(
            *open_on_device(
                directory, manifest, options.engine_threads, options.draft, exact=options.exact
            )
        )
    from eesd.runtime.engines import operators

    if lacking := operators.missing():
        options.refuse_choices("ort without this project's operators")
        _check_weights(directory, manifest)
        from eesd.runtime.engines.ort_engine import open_on_cpu

        return Engines(
            *open_on_cpu(directory, manifest, options.engine_threads, options.draft), notice=lacking
        )
    from eesd.runtime.engines.cpu_build import built_for_cpu
    from eesd.runtime.engines.cpu_engine import CpuEngine

    int8 = options.activations != "float32"
    cells = options.kv_cache_dtype or "float32"
    build = built_for_cpu(directory, manifest)
    threads = options.engine_threads
    make = partial(
        CpuEngine, build, manifest, threads=threads, int8_activations=int8, kv_cache_dtype=cells
    )
    verify = make(manifest.verify)
    drafter = make([manifest.draft]) if options.draft else None
    # The order of the terms of each sum does not depend on what else a call computes. So bits are
    # equal by construction, even in trees.
    return Engines(verify, drafter, exact=True, exact_trees=True)


def _open_torch(directory: Path, manifest: Manifest, options: EngineOptions) -> Engines:
    options.refuse_choices("torch")
    _check_weights(directory, manifest)
    from eesd.runtime.engines.torch_engine import open_team, open_torch

    if ranks() > 1:
        return Engines(
            *open_team(directory, manifest, options.engine_threads, options.draft, options.exact)
        )
    return Engines(
        *open_torch(directory, manifest, options.engine_threads, options.draft, exact=options.exact)
    )


def _open_tensorrt(directory: Path, manifest: Manifest, options: EngineOptions) -> Engines:
    options.refuse_choices("tensorrt")
    manifest.check_whole(directory)
    from eesd.runtime.engines.trt_plans import PlanDirectory

    plans = PlanDirectory(directory, manifest)
    if not torch_sees_gpu():
        raise EESDError(f"Plans run in memory of torch, and {NO_GPU}.")
    from eesd.runtime.engines.trt_engine import open_tensorrt

    verify, drafter = open_tensorrt(manifest, plans, options.draft, exact=options.exact)
    return Engines(verify, drafter, plans.notice, last_positions=verify.last_positions)


BACKENDS: dict[str, Callable[[Path, Manifest, EngineOptions], Engines]] = {
    "auto": _open_auto,
    "tensorrt": _open_tensorrt,
    "ort": _open_ort,
    "torch": _open_torch,
}
"""The functions that open engines. The keys are the names that ``--backend`` accepts. A backend's
libraries are imported only when the backend is opened."""
