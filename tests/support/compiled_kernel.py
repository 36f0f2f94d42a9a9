"""Compiles Triton kernels for GPUs on a machine that has no GPU. Prints JSON."""

import json
import re
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eesd.runtime.decoding.device_noise import WIDE, _noisy_best
from eesd.runtime.engines import torch_fused as fused
from eesd.runtime.engines import torch_kernel as kernel
from eesd.runtime.engines.torch_quantized import PANEL, WORDS

VARIANTS = {
    "int4": {"BITS": 4, "MIDDLE": 8, "BLOCK": 32, "zeros": None, "minimums": None},
    "int8": {"BITS": 8, "MIDDLE": 128, "BLOCK": 32, "zeros": None, "minimums": None},
    "minimums": {"BITS": 4, "MIDDLE": 0, "BLOCK": 16, "zeros": None},
    "zero points": {"BITS": 4, "MIDDLE": 0, "BLOCK": 128, "minimums": None},
}
TYPES = {
    "x": "*bf16",
    "levels": "*i32",
    "scales": "*fp32",
    "zeros": "*u8",
    "minimums": "*fp32",
    "y": "*bf16",
}


def compiled(constants: dict[str, Any], groups: int, capability: int) -> dict[str, Any]:
    """Returns the bytes of shared memory, and the number of tensor core products of each kind."""
    constants = constants | {
        "GROUPS": groups,
        "PANEL": PANEL,
        "ROWS": kernel.ROWS,
        "STEPS": 8,
        "WHOLE": True,
        "ASM": True,
    }
    constants["STEP"] = WORDS * 32 // constants["BITS"]
    made = made_of(
        kernel._multiply,
        TYPES,
        constants,
        ("rows",),
        capability,
        num_stages=kernel.STAGES,
        enable_fp_fusion=False,
    )
    return {
        "shared": made.metadata.shared,
        "products": Counter(re.findall(r"w?g?mma\.\S+", made.asm["ptx"])),
    }


def made_of(
    function: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    odd: tuple[str, ...],
    capability: int,
    **options: Any,
) -> Any:
    """Returns a kernel that is compiled for a GPU. ``odd`` arguments need not be multiples of
    16."""
    names = function.arg_names
    types = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants and name not in odd]
    source = ASTSource(
        function,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


NOISE = {"scores": "*fp64", "values": "*fp64", "seed": "i64"} | dict.fromkeys(
    ("positions", "tokens", "columns"), "*i64"
)
FUSED = {"scale": "fp32"} | dict.fromkeys(("q", "keys", "values", "logits"), "*bf16")
FUSED |= dict.fromkeys(("sums", "peaks", "best"), "*fp32") | dict.fromkeys(
    ("write_indices", "below", "tree", "tokens"), "*i64"
)
SIZES = {"KV_HEADS": 8, "GROUP": 4, "SIZE": 128, "WIDTH": 128, "ROWS": fused.ROWS, "SPLIT": 128}
WIDEST = SIZES | {"SIZE": fused.WIDEST_HEAD, "WIDTH": fused.WIDEST_HEAD}
OTHERS: tuple[tuple[Any, dict[str, str], dict[str, Any], tuple[str, ...]], ...] = (
    (_noisy_best, NOISE, {"COUNT": 2, "WIDTH": WIDE}, ("seed", "size")),
    (_noisy_best, NOISE, {"COUNT": 2, "WIDTH": WIDE, "tokens": None}, ("seed", "size")),
    (fused._attend, FUSED, SIZES, ("count", "columns", "scale")),
    (fused._attend, FUSED, WIDEST, ("count", "columns", "scale")),
    (fused._attend, FUSED, SIZES | {"below": None, "tree": None}, ("count", "columns", "scale")),
    (fused._best_of_part, FUSED | {"keys": "*i64"}, {"COUNT": 8, "WIDTH": fused.PART}, ("size",)),
    (
        fused._join_best,
        FUSED | {"keys": "*i64"},
        {"COUNT": 8, "PARTS": 32, "KEYS": 256},
        ("parts",),
    ),
)


if __name__ == "__main__":
    chosen = {"int4": (2, 100), "int8": (1, 90), "minimums": (3, 90), "zero points": (4, 80)}
    found = {name: compiled(VARIANTS[name], *of) for name, of in chosen.items()}
    others = [
        int(made_of(*one, gpu, num_stages=2).metadata.shared) for one in OTHERS for gpu in (80, 90)
    ]
    print(json.dumps({"others": others, "products": found}))
