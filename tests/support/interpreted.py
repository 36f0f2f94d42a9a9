"""Run quantized products and engines on the CPU in Triton's interpreter: ``python tests/support/interpreted.py DIR``

Prints JSON. It is a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported, and torch imports Triton.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from eesd.common.manifest_reader import load_manifest
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.torch_engine import TorchStageRunner, open_torch
from eesd.runtime.engines.torch_quantized import QuantizedLinear
from support.quantized_products import all_checked

PROMPT = [5, 9, 3, 60, 2, 44]


def engines(directory: Path) -> dict[str, Any]:
    """Logits with kept levels against those with dequantized weights, and which weights are kept and shared."""
    logits, kept = [], []
    for keep in (False, True):
        found = open_torch(directory, load_manifest(directory), 1, True, "cpu", keep_levels=keep)
        [kv_cache] = found[0].new_kv_caches()
        call = Call(kv_cache, PROMPT, range(len(PROMPT)), 0)
        logits.append([engine.forward([call])[0].logits.copy() for engine in found if engine is not None])
        kept.append([levels_of(engine.stages[0]) for engine in found if engine is not None])
    (verify, draft), pairs = kept[1], list(zip(*logits, strict=True))
    return {
        "difference": [float(abs(one - other).max()) for one, other in pairs],
        "deviation": [float(one.std()) for one, _ in pairs],
        "tokens": [[one.argmax(-1).tolist() for one in pair] for pair in pairs],
        "dequantized": [len(one) for one in kept[0]],
        "verify": sorted(verify),
        "draft": sorted(draft),
        "shared": sorted(name for name in verify.keys() & draft.keys() if verify[name] is draft[name]),
    }


def levels_of(stage: Any) -> dict[str, Any]:
    """The weights of a stage that are kept quantized, by the layer."""
    assert isinstance(stage, TorchStageRunner)
    modules = stage.module.named_modules()
    return {name: module.weight for name, module in modules if isinstance(module, QuantizedLinear)}


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({"products": all_checked("cpu"), "engines": engines(Path(sys.argv[1]))}))


if __name__ == "__main__":
    main()
