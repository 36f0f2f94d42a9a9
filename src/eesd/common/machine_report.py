"""This machine in words, for reports."""

import os
import platform
import shutil
from pathlib import Path

from eesd.common.machine import query_gpus

CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def describe() -> dict[str, str]:
    """Python, processor, memory, GPU and driver, and ONNX Runtime's providers, in words."""
    try:
        from onnxruntime import get_available_providers

        providers = ", ".join(get_available_providers())
    except ImportError as error:
        providers = f"onnxruntime cannot be loaded: {error}"
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "processor": f"{os.cpu_count()} cores, {', '.join(cpu_features()) or 'features unknown'}",
        "memory": _memory(),
        "GPU": _gpu(),
        "onnxruntime providers": providers,
    }


def cpu_features() -> list[str]:
    """The vector extensions that matter for matrix products and that Linux reports."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return []
    return [feature for feature in CPU_FEATURES if feature in flags]


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none (no NVIDIA driver)"
    found = query_gpus("name,memory.total,driver_version,compute_cap")
    return "the NVIDIA driver does not answer" if found is None else "; ".join(found) or "none"
