"""Compile the kernel for quantized weights for GPUs, on a machine that needs none: prints JSON."""

import json
import re
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eesd.runtime.engines import torch_kernel as kernel
from eesd.runtime.engines.torch_quantized import PANEL, WORDS

VARIANTS = {
    "int4": {"BITS": 4, "MIDDLE": 8, "BLOCK": 32, "zeros": None, "minimums": None},
    "int8": {"BITS": 8, "MIDDLE": 128, "BLOCK": 32, "zeros": None, "minimums": None},
    "minimums": {"BITS": 4, "MIDDLE": 0, "BLOCK": 16, "zeros": None},
    "zero points": {"BITS": 4, "MIDDLE": 0, "BLOCK": 128, "minimums": None},
}
TYPES = {"x": "*bf16", "levels": "*i32", "scales": "*fp32", "zeros": "*u8", "minimums": "*fp32", "y": "*bf16"}


def compiled(constants: dict[str, Any], groups: int, capability: int) -> dict[str, Any]:
    """Bytes of shared memory, and the products of tensor cores by their kind."""
    constants = constants | {"GROUPS": groups, "PANEL": PANEL, "ROWS": kernel.ROWS, "STEPS": 8, "WHOLE": True, "ASM": True}
    constants["STEP"] = WORDS * 32 // constants["BITS"]
    names = kernel._multiply.arg_names
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants and name != "rows"]
    source = ASTSource(
        kernel._multiply,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_stages": kernel.STAGES, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": made.metadata.shared, "products": Counter(re.findall(r"w?g?mma\.\S+", made.asm["ptx"]))}


if __name__ == "__main__":
    chosen = {"int4": (2, 100), "int8": (1, 90), "minimums": (3, 90), "zero points": (4, 80)}
    print(json.dumps({name: compiled(VARIANTS[name], *of) for name, of in chosen.items()}))
