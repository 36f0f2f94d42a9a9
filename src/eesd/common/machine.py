"""Probes of this machine, which look at its packages, processors, memory and GPU. They load torch
only if there is an NVIDIA driver."""

import ctypes
import importlib.util
import json
import os
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import eesd

TORCH_ENGINE = ("torch", "safetensors", "onnx")
"""Packages that the torch engine imports, in addition to the packages of every installation."""


def installed(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pip_install(extra: str = "", *options: str) -> str:
    """The command that installs EESD again from its source, because it may not be in a package
    index.

    Args:
        extra: Name of an extra to install, too.
        options: Further options of pip.
    """
    wanted = f"[{extra}]" if extra else ""
    checkout = Path(str(eesd.__file__)).parents[2]
    if (checkout / "setup.py").exists():
        return shlex.join(["pip", "install", *options, "-e", f"{checkout}{wanted}"])
    url = _installed_from()
    if not url:
        command = shlex.join(["pip", "install", *options, f"eesd{wanted}"])
        return f"{command} (from the index or the directory that eesd came from)"
    source = f"eesd{wanted} @ {url}"
    if url.startswith("file:"):
        source = f"{url2pathname(urlsplit(url).path)}{wanted}"
    return shlex.join(["pip", "install", *options, source])


def _installed_from() -> str:
    """The URL of the checkout, wheel or repository from which pip installed EESD, or "" if it came
    from a package index."""
    try:
        found = distribution("eesd").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    return str(json.loads(found)["url"]) if found else ""


def cores() -> int:
    """Number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def release_freed_memory() -> None:
    """Return memory that the process has freed to the system, because glibc would keep it. This
    function does nothing with other C libraries."""
    if os.name == "posix" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def ranks() -> int:
    """Number of processes that torchrun or a similar program started together."""
    count = os.environ.get("WORLD_SIZE", "")
    return max(int(count), 1) if count.isdecimal() else 1


def rank() -> int:
    """The number of this process among the ranks."""
    return int(os.environ.get("RANK", "0")) if ranks() > 1 else 0


def nvidia_driver() -> bool:
    """Whether an NVIDIA driver seems to be installed."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def torch_sees_gpu() -> bool:
    """Whether the torch engine could use a GPU here. Imports torch, which takes seconds, only if
    there is a driver."""
    if not nvidia_driver() or any(
        importlib.util.find_spec(package) is None for package in TORCH_ENGINE
    ):
        return False
    try:
        import torch
    except ImportError:  # torch is installed but broken, and the torch engine reports the cause
        return False
    return torch.cuda.is_available()


def available_memory() -> int:
    """Number of bytes of main memory that are still available, or 8 GiB if the system does not
    report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30
