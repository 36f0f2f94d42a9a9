"""The kernel of the writer for GPUs, on a machine that needs none: prints JSON.

``interpreted``: its largest difference from torch. ``compiled``: bytes of shared memory, by head size. Each is a process of its
own: Triton reads ``TRITON_INTERPRET`` when it is imported.
"""

import json
import os
import sys
from typing import Any

if sys.argv[1] == "interpreted":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eesd.distill import decode_kernel as kernel

SLOTS = 150


def difference(group: int, size: int) -> float:
    """Over rows whose texts end in the first and the last slot, and on both sides of a border of the kernel's steps."""
    torch.manual_seed(0)
    positions = torch.tensor([0, kernel.SLOTS - 1, kernel.SLOTS, 101, SLOTS - 1])
    queries, keys, values = (torch.randn(len(positions), 2, count, size) for count in (group, SLOTS, SLOTS))
    seen = (torch.arange(SLOTS) <= positions[:, None])[:, None, None]
    expected = scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    return float((kernel.decode_attention(queries, keys, values, positions) - expected).abs().max())


def shared_memory(group: int, size: int, capability: int) -> int:
    constants = {"GROUP": group, "SIZE": size, "QUERIES": kernel.QUERIES, "SLOTS": kernel.SLOTS}
    types = {"positions": "*i64", "slots": "i32", "scale": "fp32"}
    names = kernel._attend.arg_names
    given = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    source = ASTSource(kernel._attend, given, {(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": 4, "num_stages": 3}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def found() -> dict[str, Any]:
    if sys.argv[1] == "interpreted":
        return {f"{group} {size}": difference(group, size) for group, size in ((1, 16), (3, 64), (8, 128))}
    return {f"{size}": shared_memory(4, size, capability) for size, capability in ((64, 80), (128, 90))}


if __name__ == "__main__":
    print(json.dumps(found()))
