"""Checks products with quantized weights on the device, and times them for a block of an 8B
model."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from support.quantized_products import all_checked, random_weight
from torch import Tensor
from torch.nn.functional import linear

from eesd.common.quantization import Quantization
from eesd.runtime.engines.torch_quantized import arranged, product
from lab.lease import Lease
from lab.lease.machine import seconds_of

SHAPES = {
    "8B": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "70B": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
}
"""The numbers of inputs and outputs of the packed layers of a Llama 3 block. Even at 4 bits, the
weights do not fit a GPU's caches."""
ROWS = (1, 8, 16, 33)
BLOCK = 32


def products(lease: Lease) -> dict[str, Any]:
    """Compare products with all kinds of quantized weights with the products of dequantized
    weights. Also measure the milliseconds of a block's products in a CUDA graph.

    On a CPU this step needs Triton's interpreter, and nothing is timed.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None or not (lease.on_gpu or interpreted):
        return {"skipped": "it needs Triton, and a GPU or TRITON_INTERPRET=1"}
    checked = all_checked(lease.device)
    found = {
        "wrong": [name for name, case in checked.items() if case["error"] > 1],
        "rows depend on each other": [
            name for name, case in checked.items() if not case["rows do not depend on each other"]
        ],
    }
    return found | ({"milliseconds of a block": _timed(lease)} if lease.on_gpu else {})


def _timed(lease: Lease) -> dict[str, dict[str, float]]:
    timed: dict[str, dict[str, float]] = {}
    for model, shapes in SHAPES.items():
        for kind in ("bfloat16", "int8", "int4"):
            layers = [_layer(kind, *shape, lease.device) for shape in shapes]
            timed[f"{model}, {kind}"] = {
                str(rows): 1e3 * _seconds(layers, rows, lease) for rows in ROWS
            }
    return timed


def _layer(
    kind: str, inputs: int, outputs: int, device: str
) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Return the inputs of a layer and a function that computes its product."""
    if kind == "bfloat16":
        dense = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        return inputs, lambda x: linear(x, dense)
    quantization = Quantization(kind, BLOCK)
    weight = arranged(
        random_weight(quantization, inputs, outputs, "bfloat16"), quantization, torch.device(device)
    )
    return inputs, lambda x: product(x, weight)


def _seconds(
    layers: list[tuple[int, Callable[[Tensor], Tensor]]], rows: int, lease: Lease
) -> float:
    given = [
        torch.randn(rows, inputs, dtype=torch.bfloat16, device=lease.device) for inputs, _ in layers
    ]

    def run() -> None:
        for x, (_, multiplied) in zip(given, layers, strict=True):
            multiplied(x)

    run()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return seconds_of(graph.replay, lease, 20)
