"""Which engines can run an engine directory here, and opening them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from eesd.export.manifest import Manifest
from eesd.runtime.engine import Engine
from eesd.runtime.errors import EESDError

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


def _ort(directory: Path, manifest: Manifest, threads: int, draft: bool) -> Engines:
    from eesd.runtime.ort_engine import OrtEngine

    verify = OrtEngine(directory, manifest, manifest.verify, threads)
    return Engines(verify, OrtEngine(directory, manifest, [manifest.draft], threads) if draft else None)


BACKENDS: dict[str, Callable[[Path, Manifest, int, bool], Engines]] = {"auto": _ort, "ort": _ort}
"""By the name that ``--backend`` takes. Each loads its libraries only when it is asked for."""
