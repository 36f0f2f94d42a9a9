"""Describes the machine, and measures three of its rates (memory, products and launches)."""

import importlib.util
import os
import platform
import subprocess
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from lab.lease import Lease

COPIED = 1 << 30
"""Number of bytes that are copied on a GPU. Its caches hold less."""
LAUNCHES = 1000
WANTED = "tensorrt tensorrt_rtx onnxruntime onnx transformers gguf triton torchao pytest"
SERVING = ("fastapi", "prometheus_client", "uvicorn")


def describe(lease: Lease) -> dict[str, Any]:
    """Return names and versions, and the three figures on which the constants of docs/predict.md
    are based."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "processors": len(os.sched_getaffinity(0)),
        "packages": [
            name for name in (*WANTED.split(), *SERVING) if importlib.util.find_spec(name)
        ],
        "gpu": None,
    }
    if lease.on_gpu:
        properties = torch.cuda.get_device_properties(lease.device)
        found |= {
            "gpu": properties.name,
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
        found |= {"capability": f"{properties.major}.{properties.minor}", "driver": _driver()}
    return found | {
        "bandwidth": bandwidth(lease),
        "products": products(lease),
        "launch": launch(lease),
    }


def _driver() -> str:
    command = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit",
        "--format=csv,noheader",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""


def seconds_of(work: Callable[[], object], lease: Lease, repeats: int = 7) -> float:
    """Return the median seconds of some work. A time lasts from the start of the work until the
    device has finished."""

    def finish() -> None:
        if lease.on_gpu:
            torch.cuda.synchronize()

    found = []
    for repeat in range(repeats + 2):
        finish()
        started = time.perf_counter()
        work()
        finish()
        if repeat >= 2:
            found.append(time.perf_counter() - started)
    return median(found)


def bandwidth(lease: Lease) -> float:
    """Return the bytes per second that a copy reads and writes."""
    size = COPIED if lease.on_gpu else COPIED // 16
    source = torch.ones(size, dtype=torch.uint8, device=lease.device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), lease)


def products(lease: Lease) -> float:
    """Return the operations per second of a large product of bfloat16 matrices."""
    size = 8192 if lease.on_gpu else 512
    one = torch.randn(size, size, device=lease.device).to(torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: one @ one, lease)


def launch(lease: Lease) -> float | None:
    """Return the seconds of a small kernel in a CUDA graph of many such kernels, or None if there
    is no GPU."""
    if not lease.on_gpu:
        return None
    value = torch.zeros(1, device=lease.device)
    value.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            value.add_(1)
    return seconds_of(graph.replay, lease) / LAUNCHES
