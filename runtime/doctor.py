"""``eesd-doctor``: what is installed, what could run here, and what to install for the rest."""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from eesd.common.cli import one_line_errors
from eesd.runtime.engines.backends import nvidia_driver, torch_sees_gpu

PACKAGES = (
    ("eesd", ""),
    ("numpy", ""),
    ("onnxruntime", ""),
    ("tokenizers", ""),
    ("torch", "export"),
    ("transformers", "export"),
    ("onnx", "export"),
    ("onnxscript", "export"),
    ("safetensors", "export"),
    ("tensorrt", "tensorrt"),
    ("tensorrt-rtx", "tensorrt-rtx"),
    ("polygraphy", "tensorrt-rtx"),
)
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@one_line_errors
def main(as_json: bool) -> None:
    """Show versions, processor, GPU, and for each job whether this machine can do it."""
    facts = {"packages": packages(), "machine": machine(), "jobs": jobs()}
    if as_json:
        click.echo(json.dumps(facts))
        return
    console = Console()
    for title, rows in facts.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)


def installed(package: str) -> str | None:
    """Version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def packages() -> dict[str, str]:
    return {
        name: installed(name) or f"not installed: pip install 'eesd[{extra}]'" if extra else installed(name) or "missing"
        for name, extra in PACKAGES
    }


def machine() -> dict[str, str]:
    """Processor, memory, GPU and driver, ONNX Runtime's providers."""
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
    """The vector extensions that matter for matrix products, of those that Linux reports."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return []
    return [feature for feature in CPU_FEATURES if feature in flags]


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def available_memory() -> int:
    """Bytes of main memory that a program may still take; 8 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none (no NVIDIA driver)"
    found = _query_gpus("name,memory.total,driver_version,compute_cap")
    return "the NVIDIA driver does not answer" if found is None else "; ".join(found) or "none"


def compute_capability() -> str | None:
    """Of the first GPU, such as ``9.0``; None without one."""
    return next(iter(_query_gpus("compute_cap") or ()), None)


def _query_gpus(fields: str) -> list[str] | None:
    """A line for each GPU, None where no driver answers."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return [line.strip() for line in found.splitlines()]


def jobs() -> dict[str, str]:
    """What can be done here, or what to install for it."""
    missing = [name for name, extra in PACKAGES if not extra and not installed(name)]
    exporting = [name for name, extra in PACKAGES if extra == "export" and not installed(name)]
    return {
        "run on the CPU (ort)": "yes, float32 engines"
        if not missing
        else f"no: {', '.join(missing)} missing; pip install eesd",
        "run on the CPU (torch)": _torch_lacks() or "yes, engines of every type",
        "run plans on a GPU (tensorrt)": _plans_lack("torch") or _gpu_lacks() or "yes",
        "run on a GPU (torch)": _torch_lacks() or _gpu_lacks() or "yes, engines of every type",
        "build plans": _plans_lack("onnx", "polygraphy") or "yes",
        "export": "yes" if not exporting else f"no: {', '.join(exporting)} missing; pip install 'eesd[export]'",
    }


def _torch_lacks() -> str:
    """What the torch engine lacks here, nothing if it could run."""
    missing = [name for name in ("torch", "onnx", "safetensors") if not installed(name)]
    return f"no: {', '.join(missing)} missing; pip install 'eesd[torch]'" if missing else ""


def _plans_lack(*others: str) -> str:
    """What is missing for plans: either flavour of TensorRT, and these packages."""
    missing = [name for name in others if not installed(name)]
    if not installed("tensorrt") and not installed("tensorrt-rtx"):
        missing.insert(0, "tensorrt or tensorrt-rtx")
    return f"no: {', '.join(missing)} missing; pip install 'eesd[tensorrt-rtx]' or 'eesd[tensorrt]'" if missing else ""


def _gpu_lacks() -> str:
    if not nvidia_driver():
        return "no: there is no NVIDIA driver"
    return (
        "" if torch_sees_gpu() else "no: the installed torch sees no GPU; install a build for the driver's CUDA (pytorch.org)"
    )


if __name__ == "__main__":
    main()
