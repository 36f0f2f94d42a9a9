"""The backends by name: open the engines of a directory with one of them, or with the best one for this machine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eesd.common.checks import check_choice, check_integer
from eesd.common.errors import EESDError
from eesd.common.machine import available_memory, cores, torch_sees_gpu
from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Engine
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.ort_packages import check_onnxruntime

MAX_THREADS = 1024
"""More is taken for a typing error: the engines would start that many threads."""
INEXACT = (
    "On this processor ONNX Runtime's logits depend on how many tokens a call has, so quantized products keep float32 "
    "activations: slower, but drafting does not change tokens."
)
"""Notice for a quantized directory."""


class Engines(NamedTuple):
    """The engines of a directory.

    Attributes:
        verify: The verify engine.
        draft: The draft engine; None if it was not loaded.
        notice: What the user should know about how this machine runs the directory; empty if there is nothing.
        exact: Whether a check found that calls of every number of rows give the same bits here; None: it was not checked.
        int8_activations: Whether verify rounds activations to int8. A tree's nodes lie in other slots than a chain's, which
            changes the last bit of a sum, and so may change a logit by a whole int8 step.
        in_place: Whether only logits of nodes count that are in the slot that they would have in a chain.
        last_positions: The last positions whose tokens one kernel of verify computes, ascending. No round shall reach beyond
            the next one, or tokens would depend on what is drafted.
    """

    verify: Engine
    draft: Engine | None
    notice: str = ""
    exact: bool | None = None
    int8_activations: bool = False
    in_place: bool = False
    last_positions: tuple[int, ...] = ()


def open_engines(
    directory: Path, manifest: Manifest, backend: str, threads: int | None, draft: bool, exact: bool | None = None
) -> Engines:
    """Load the engines of a directory.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        backend: A name in :data:`BACKENDS`.
        threads: CPU threads of an engine; None: :func:`default_threads`.
        draft: Whether to load the draft engine.
        exact: True: drafting changes no bit of a logit. On a GPU every pass of verify has one node count, and a tree's path is
            cut where its bits would differ. None: on a GPU one node count where that costs little; trees are cut only where
            activations are int8. False: on a GPU as few nodes as possible.

    Raises:
        EESDError: There is no such backend, or it cannot run this directory on this machine.
    """
    check_choice("backend", backend, BACKENDS)
    if threads is not None:
        check_integer("threads", threads, 1, MAX_THREADS)
    engines = BACKENDS[backend](directory, manifest, threads or default_threads(), draft, exact)
    return engines._replace(in_place=engines.int8_activations or exact is True)


def default_threads() -> int:
    """The processors of this process, one fewer if there are more than four: the host's own code then has one to itself."""
    available = cores()
    return available if available <= 4 else available - 1


def _open_auto(directory: Path, manifest: Manifest, threads: int, draft: bool, exact: bool | None) -> Engines:
    """With a GPU, ``tensorrt`` if the directory has plans and otherwise ``torch``. Without a GPU, ``ort``, or ``torch`` where a
    16-bit directory fits the memory only as it is."""
    if torch_sees_gpu():
        return (_open_tensorrt if manifest.plans else _open_torch)(directory, manifest, threads, draft, exact)
    from eesd.runtime.engines.widened import widening_memory

    if manifest.dtype == "float32" or widening_memory(manifest) <= available_memory():
        return _open_ort(directory, manifest, threads, draft, exact)
    notice = f"There is too little memory to run {manifest.dtype} weights in float32, so torch runs them as they are: slowly."
    return _open_torch(directory, manifest, threads, draft, exact)._replace(notice=notice)


def _open_ort(directory: Path, manifest: Manifest, threads: int, draft: bool, exact: bool | None) -> Engines:
    check_onnxruntime()
    from onnxruntime import get_available_providers

    if "CUDAExecutionProvider" in get_available_providers() and torch_sees_gpu():
        from eesd.runtime.engines.ort_gpu import open_ort_gpu

        return Engines(*open_ort_gpu(directory, manifest, threads, draft, exact=exact))
    from eesd.runtime.engines import operators

    if lacking := operators.missing():
        standard = _open_standard(directory, manifest, threads, draft)
        return standard._replace(notice=f"{lacking} {standard.notice}".strip())
    from eesd.runtime.engines.cpu_engine import CpuEngine
    from eesd.runtime.engines.packed import packed_directory

    packed = packed_directory(directory, manifest)
    drafter = CpuEngine(packed, manifest, [manifest.draft], threads) if draft else None
    # Its sums have an order of their own, whatever else a call computes: equal bits by construction, in trees, too.
    return Engines(CpuEngine(packed, manifest, manifest.verify, threads), drafter, exact=True)


def _open_standard(directory: Path, manifest: Manifest, threads: int, draft: bool) -> Engines:
    """The engines of ONNX Runtime's own operators, on the CPU."""
    from eesd.runtime.engines.ort_cpu import OrtEngine

    widened: dict[str, Any] = {}
    load = partial(OrtEngine, directory, manifest, manifest.verify, threads, widened)
    verify, checked, notice = load(), None, ""
    int8_activations = bool(manifest.quantization.layers or manifest.quantization.head)
    if int8_activations:
        checked = int8_activations = Exactness(manifest).check_quickly(verify)
    if checked is False:
        del verify
        verify = load(int8_activations=False)
        checked = Exactness(manifest).check_quickly(verify)
        notice = INEXACT
    drafter = OrtEngine(directory, manifest, [manifest.draft], threads, widened) if draft else None
    if widened:
        wide = f"The CPU runs the {manifest.dtype} engines in float32: their weights take twice the memory."
        notice = f"{notice} {wide}".strip()
    return Engines(verify, drafter, notice, checked, int8_activations)


def _open_torch(directory: Path, manifest: Manifest, threads: int, draft: bool, exact: bool | None) -> Engines:
    try:
        from eesd.runtime.engines.torch_engine import open_torch
    except ImportError as error:
        raise EESDError(f"The torch backend needs {error.name}; install it with: pip install 'eesd[torch]'.") from None
    return Engines(*open_torch(directory, manifest, threads, draft, exact=exact))


def _open_tensorrt(directory: Path, manifest: Manifest, _threads: int, draft: bool, exact: bool | None) -> Engines:
    from eesd.runtime.engines.trt_plans import PlanDirectory

    plans = PlanDirectory(directory, manifest)
    try:
        from eesd.runtime.engines.trt_engine import open_tensorrt
    except ImportError as error:
        raise EESDError(f"The tensorrt backend needs {error.name}; install it with: pip install 'eesd[torch]'.") from None
    verify, drafter = open_tensorrt(manifest, plans, draft, exact=exact)
    return Engines(verify, drafter, last_positions=verify.last_positions)


BACKENDS: dict[str, Callable[[Path, Manifest, int, bool, bool | None], Engines]] = {
    "auto": _open_auto,
    "tensorrt": _open_tensorrt,
    "ort": _open_ort,
    "torch": _open_torch,
}
"""By the name that ``--backend`` takes. A backend's libraries are imported only when it is opened."""
