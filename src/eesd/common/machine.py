"""Probes of this machine: packages, processors, memory, GPU. None of them loads torch unless there is an NVIDIA driver."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TORCH_ENGINE = ("torch", "safetensors", "onnx")
"""What the torch engine imports, besides what every installation has."""


def installed(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def user_cache() -> Path | None:
    """Where EESD keeps what it can make again, as the user or the system says. None for a user without a home."""
    given, xdg = os.environ.get("EESD_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    of_system = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA")}.get(sys.platform)
    try:
        return Path(given) if given else Path(xdg or of_system or "~/.cache").expanduser() / "eesd"
    except RuntimeError:
        return None


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of main memory that a program may still take; 8 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30


def release_freed_memory() -> None:
    """Give memory that the process has freed back to the system. glibc keeps it otherwise; elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def ranks() -> int:
    """The processes that were started together, as torchrun does, this one among them."""
    count = os.environ.get("WORLD_SIZE", "")
    return max(int(count), 1) if count.isdecimal() else 1


def rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", "0")) if ranks() > 1 else 0


def nvidia_driver() -> bool:
    """Whether there are traces of an NVIDIA driver."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def compute_capability() -> str | None:
    """Of the first GPU that CUDA programs see, such as ``9.0``; None without one.

    torch is asked where it is imported anyway. Else the driver is, whose order of GPUs is that of ``CUDA_VISIBLE_DEVICES`` only
    with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` or GPUs of one kind.
    """
    torch = sys.modules.get("torch")
    if torch is not None and nvidia_driver() and torch.cuda.is_available():
        return "{}.{}".format(*torch.cuda.get_device_capability(0))
    return _of_first_gpu("compute_cap")


def _of_first_gpu(field: str) -> str | None:
    """What the driver says of the first GPU that CUDA programs see."""
    gpus = [line.split(", ") for line in query_gpus(f"index,uuid,{field}") or () if line.count(", ") == 2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        # A UUID may be abbreviated. A part of a GPU (MIG) has a name that does not tell which GPU it is of: take the first.
        gpus = [gpu for gpu in gpus if first and (first == gpu[0] or gpu[1].startswith(first) or first.startswith("MIG-"))]
    return gpus[0][2] if gpus else None


def torch_sees_gpu() -> bool:
    """Whether the torch engine could use a GPU here. Imports torch, which takes seconds, only where there is a driver."""
    if not nvidia_driver() or any(importlib.util.find_spec(package) is None for package in TORCH_ENGINE):
        return False
    try:
        import torch
    except ImportError:  # installed and broken: the torch engine says what is missing
        return False
    return torch.cuda.is_available()


def query_gpus(fields: str) -> list[str] | None:
    """A line for each GPU; None where no driver answers."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return [line.strip() for line in found.splitlines()]
