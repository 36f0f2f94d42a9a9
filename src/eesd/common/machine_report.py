"""A description of this machine for reports. The module also asks the NVIDIA driver about its
GPUs."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from eesd.common.machine import nvidia_driver

CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def describe() -> dict[str, str]:
    """Describe Python, the processor, the memory, the GPU and its driver, and the providers of ONNX
    Runtime."""
    try:
        from onnxruntime import get_available_providers

        providers = ", ".join(get_available_providers())
    except ImportError as error:
        providers = f"onnxruntime cannot be loaded: {error}"
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "processor": ", ".join([processor_name(), f"{os.cpu_count()} cores", *cpu_features()]),
        "memory": _memory(),
        "GPU": _gpu(),
        "onnxruntime providers": providers,
    }


def cpu_features() -> list[str]:
    """The vector extensions that are useful for matrix products. Linux reports them."""
    flags = _processor().get("flags", "").split()
    return [feature for feature in CPU_FEATURES if feature in flags]


def _processor() -> dict[str, str]:
    """Fields of the first processor in Linux's report. The result is empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    named = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in named}


def processor_name() -> str:
    """The processor's name, and on Linux its family and model. docs/decisions/0120 has measurements
    by family and model."""
    found = {"model name": platform.processor() or "unknown processor"} | _processor()
    kinds = [f"{key} {found[key]}" for key in ("cpu family", "model") if key in found]
    return ", ".join([found["model name"], *kinds])


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none (no NVIDIA driver)"
    found = query_gpus("name,memory.total,driver_version,compute_cap")
    return "the NVIDIA driver does not answer" if found is None else "; ".join(found) or "none"


def compute_capability() -> str | None:
    """Compute capability of the first GPU that CUDA programs see, such as ``9.0``, or None if there
    is no GPU.

    The answer comes from torch if it is already imported, and from the driver if not. The driver
    numbers GPUs like ``CUDA_VISIBLE_DEVICES`` only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, or if all
    GPUs are of one kind.
    """
    torch = sys.modules.get("torch")
    if torch is not None and nvidia_driver() and torch.cuda.is_available():
        return "{}.{}".format(*torch.cuda.get_device_capability(0))
    return _of_first_gpu("compute_cap")


def _of_first_gpu(field: str) -> str | None:
    """The driver's value of a field for the first GPU that CUDA programs see."""
    gpus = [
        line.split(", ")
        for line in query_gpus(f"index,uuid,{field}") or ()
        if line.count(", ") == 2
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        # A UUID may be abbreviated. The name of a part of a GPU (MIG) does not identify the GPU, so
        # the first GPU is taken.
        gpus = [
            gpu
            for gpu in gpus
            if first and (first == gpu[0] or gpu[1].startswith(first) or first.startswith("MIG-"))
        ]
    return next((gpu[2] for gpu in gpus), None)


def query_gpus(fields: str) -> list[str] | None:
    """Returns a line for each GPU, or None if no driver answers."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return [line.strip() for line in found.splitlines()]
