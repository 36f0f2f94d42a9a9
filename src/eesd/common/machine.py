"""Probes of this machine: packages, processors, memory, GPU. None of them loads torch unless there
is an NVIDIA driver."""

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
"""What the torch engine imports, besides what every installation has."""


def installed(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pip_install(extra: str = "", *options: str) -> str:
    """The command that installs EESD again, from where it came: it may be in no package index.

    Args:
        extra: An extra of it to install, too.
        options: Further options of pip.
    """
    wanted = f"[{extra}]" if extra else ""
    checkout = Path(str(eesd.__file__)).parents[2]
    if (checkout / "setup.py").exists():
        return shlex.join(["pip", "install", *options, "-e", f"{checkout}{wanted}"])
    url = _installed_from()
    source = f"eesd{wanted} @ {url}" if url else f"eesd{wanted}"
    if url.startswith("file:"):
        source = f"{url2pathname(urlsplit(url).path)}{wanted}"
    command = shlex.join(["pip", "install", *options, source])
    return command if url else f"{command} (from the index or the directory that eesd came from)"


def _installed_from() -> str:
    """The URL of the checkout, wheel or repository that pip installed EESD from; "" if it was an
    index."""
    try:
        found = distribution("eesd").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    return str(json.loads(found)["url"]) if found else ""


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_freed_memory() -> None:
    """Give memory that the process has freed back to the system. glibc keeps it otherwise;
    elsewhere nothing happens."""
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


def torch_sees_gpu() -> bool:
    """Whether the torch engine could use a GPU here. Imports torch, which takes seconds, only where
    there is a driver."""
    if not nvidia_driver() or any(
        importlib.util.find_spec(package) is None for package in TORCH_ENGINE
    ):
        return False
    try:
        import torch
    except ImportError:  # installed and broken: the torch engine says what is missing
        return False
    return torch.cuda.is_available()


def available_memory() -> int:
    """Bytes of main memory that a program may still take; 8 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30
