"""The library of this project's operators. On the CPU, ONNX Runtime runs these operators in place
of standard nodes.

It is built together with the package if there is a C++ compiler (``runtime/operators/``). Without
the library, or on a processor that has neither AVX2 nor AVX-512, ONNX Runtime's standard operators
run the graphs.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from eesd.common.errors import EESDError, reason, refused
from eesd.common.machine import available_memory, pip_install
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES

DOMAIN = "eesd"
LIBRARY = Path(__file__).with_name(
    "libeesd_operators" + (".dll" if platform.system() == "Windows" else ".so")
)
KERNELS = ("avx512", "avx2vnni", "avx2", "i8mm", "neon", "scalar")
"""The names of kernels, the fastest first."""
MISSING = (
    "The operators of this project are not built, so ONNX Runtime's own run the model: 2 to 6 "
    "times slower, and in float32."
)
SLOW = "This processor has neither AVX2 nor AVX-512, so ONNX Runtime's own operators run the model."
_making = RLock()
"""The lock that is held while a session is made, and while kernels are queried. Both operations set
the configuration of a session's nodes, which is global to the process."""


@cache
def _library() -> Any:
    """The library, or None if it is not built or cannot be loaded on this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    library.eesd_configure.restype = ctypes.c_char_p
    library.eesd_configure.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    return library


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        EESDError: The library is not built, or cannot be loaded on this machine.
    """
    found: ctypes.CDLL | None = _library()
    if found is None:
        raise EESDError(missing())
    return found


def missing() -> str:
    """Return the reason, in one sentence, why the operators cannot be used on this machine. Return
    "" if they can be used."""
    if _library() is None:
        return f"{MISSING} Remedy: {build_remedy()}."
    return SLOW if fastest() == "scalar" and platform.machine() in ("x86_64", "AMD64") else ""


def build_remedy() -> str:
    """Return the command that builds the library. The command avoids pip's cache, which may have a
    wheel without the library."""
    again = ("--force-reinstall", "--no-deps", "--no-cache-dir")
    return f"install a C++ compiler (g++ or clang++), and then run: {pip_install('', *again)}"


def fastest() -> str:
    """Return the name of the fastest kernels that this processor supports."""
    return configure("", 1, True)


def supported() -> list[str]:
    """Return the names of the kernels that this processor supports, the fastest first."""
    with _making:
        return [
            name
            for name in KERNELS
            if _library().eesd_configure(name.encode(), 1, True, 0, 0) is not None
        ]


def configure(
    kernels: str, threads: int, int8_activations: bool, kv_cache_dtype: str = "float32"
) -> str:
    """Configure the nodes of the next session. Returns the name of the kernels.

    Raises:
        EESDError: This processor does not support the kernels.
    """
    with _making:
        cells = KV_CACHE_DTYPES.index(kv_cache_dtype)
        most_copied = available_memory() // 4
        name = _library().eesd_configure(
            kernels.encode(), threads, int8_activations, cells, most_copied
        )
    if name is None:
        raise EESDError(
            f"This processor does not support the kernels {kernels!r}; choose from "
            f"{', '.join(supported())}."
        )
    return str(name.decode())


def make_session(
    graph: Path,
    threads: int,
    int8_activations: bool,
    kernels: str = "",
    kv_cache_dtype: str = "float32",
) -> Any:
    """Load a graph with operators of this project into an ONNX Runtime session.

    Args:
        graph: The graph file.
        threads: CPU threads of the session.
        int8_activations: Whether products with levels round activations to 8 bits.
        kernels: A name in :data:`KERNELS`, or "" for the fastest kernels.
        kv_cache_dtype: Type of the caches that attention reads and writes. It is in
            :data:`KV_CACHE_DTYPES`.

    Raises:
        EESDError: The graph cannot be loaded, or the processor does not support the kernels.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False
    # Draft and verify calls alternate, so threads that go on spinning after a call would take the
    # cores from the other session's threads.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with _making:
        configure(kernels, threads, int8_activations, kv_cache_dtype)
        remedy = f"run: eesd-build --target cpu --force {graph.parent.parent}"
        with refused(lambda error: f"ONNX Runtime cannot load {graph} ({reason(error)}); {remedy}"):
            options.register_custom_ops_library(str(LIBRARY))
            return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def buffer(array: NDArray[Any]) -> tuple[Any, ...]:
    """Return the arguments that ``bind_input`` and ``bind_output`` take for an array."""
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
