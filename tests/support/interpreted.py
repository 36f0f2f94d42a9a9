"""Run quantized products and engines on the CPU in Triton's interpreter:
``python tests/support/interpreted.py DIR ...``

Prints JSON. This needs a separate process: Triton reads ``TRITON_INTERPRET`` during its import, and
torch imports Triton.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from numpy.typing import NDArray

from eesd.common.manifest import load_manifest
from eesd.runtime.engines import torch_fused
from eesd.runtime.engines.base import Call, Engine
from eesd.runtime.engines.device_engine import make_engines
from eesd.runtime.engines.torch_engine import TorchStageRunner, has_equal_rows, open_torch
from eesd.runtime.engines.torch_quantized import QuantizedLinear
from support.on_cache import OnCache
from support.quantized_products import all_checked

LONG = [5 + 7 * place % 90 for place in range(14)]
torch_fused.MOST_NODES = 8  # the interpreter is slow


def engines(directory: Path) -> dict[str, Any]:
    """Returns the logits with kernels and with torch's operators, and the weights that are kept and
    shared."""
    logits = []
    kept = []
    for kernels in (False, True):
        found = open_torch(directory, load_manifest(directory), 1, True, "cpu", kernels=kernels)
        logits.append(logits_of(*found))
        kept.append([levels_of(engine.stages[0]) for engine in found if engine is not None])
    verify, draft = kept[1]
    pairs = list(zip(*logits, strict=True))
    return {
        "difference": [float(abs(one - other).max()) for one, other in pairs],
        "deviation": [float(one.std()) for one, _ in pairs],
        "dequantized": [len(one) for one in kept[0]],
        "verify": sorted(verify),
        "draft": sorted(draft),
        "shared": sorted(
            name for name in verify.keys() & draft.keys() if verify[name] is draft[name]
        ),
    }


def logits_of(verify: Engine, draft: Engine | None) -> list[NDArray[np.float32]]:
    """Returns the logits of both engines. They run a prompt that torch's attention reads, and then
    a chain, a tree and a token in two rows."""
    assert draft is not None
    caches = verify.new_kv_caches(2)
    found = list[NDArray[np.float32]]()
    for row, kv_cache in enumerate(caches):
        prompt = Call(kv_cache, LONG[row:], range(len(LONG) - row), 0)
        found += [engine.forward([prompt])[0].logits.copy() for engine in (verify, draft)]
    start = len(LONG)
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    calls = [
        Call(caches[0], [7, 8, 9], [start, start + 1, start + 1], start, start, tree),
        Call(caches[1], [5], [start - 1], start - 1),
    ]
    found += [outputs.logits.copy() for outputs in verify.forward(calls)]
    found += [outputs.logits.copy() for call in calls for outputs in draft.forward([call])]
    drafted = OnCache(draft, caches[0]).chain(7, start, 2).topk_logprobs
    assert drafted is not None
    return [*found, drafted]


def best(dtype: torch.dtype, rows: tuple[int, int], size: int, count: int) -> float:
    """Compare with torch. Returns the sum of the differences of log-probabilities, or infinity if a
    token differs. Among equal logits the first must win, and NaN must rank above all numbers."""
    logits = (4 * torch.randn((*rows, size))).to(dtype)
    logits[..., 1::5] = 0
    logits[..., 2::5] = -0.0
    logits[..., 3::4] = logits.amax() if size % 2 else -torch.inf
    logits[..., torch_fused.PART : 2 * torch_fused.PART] = -torch.inf
    logits[0, -1, -2:] = -1 if count else torch.nan
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[..., : max(count, 1)]
    names = torch.arange(size) * 3 if count else torch.arange(size)
    found = torch_fused.find_best(logits, count, names if count else None)
    ids = found[: rows[0]].long()
    logprobs = found[rows[0] :]
    expected = logits.double().log_softmax(-1).gather(-1, order)[: len(logprobs)]
    return float("inf") if (ids != names[order]).any() else float(abs(logprobs - expected).sum())


def all_best() -> list[float]:
    """Returns the results for one row and for several rows. The rows have one part or several
    parts, and the last part may be full or not."""
    narrow = torch.bfloat16
    wide = torch.float32
    part = torch_fused.PART
    some = [
        best(narrow, (1, 1), 97, 4),
        best(wide, (2, 3), 2 * part + 1, 5),
        best(narrow, (1, 5), 5 * part - 2, 8),
    ]
    return [
        *some,
        best(wide, (3, 1), part, 1),
        best(torch.float16, (1, 33), 1001, 0),
        best(narrow, (2, 1), 2 * part + 6, 0),
    ]


def levels_of(stage: Any) -> dict[str, Any]:
    """Returns, for each layer, the weights of a stage that stay quantized."""
    assert isinstance(stage, TorchStageRunner)
    modules = stage.module.named_modules()
    return {name: module.weight for name, module in modules if isinstance(module, QuantizedLinear)}


def equal_bits(directory: Path) -> bool | None:
    """Returns whether calls of any number of nodes, padded as on a GPU, have equal bits. Returns
    None if the verify engine does not compute by rows."""
    manifest = replace(load_manifest(directory), max_tree_nodes=torch_fused.MOST_NODES - 1)
    verify, _ = open_torch(directory, manifest, 1, False, "cpu", kernels=True)
    if not torch_fused.computes_by_rows(verify.stages[0].module):  # type: ignore[attr-defined]
        return None
    found, _ = make_engines(
        manifest, verify.stages, None, verify.make_memory, pad=True, exact=True, by_rows=True
    )
    return found.buckets[:2] == (1, 2) and has_equal_rows(found)


def main() -> None:
    torch.set_num_threads(1)
    directories = [Path(name) for name in sys.argv[1:]]
    bits = [equal_bits(directory) for directory in directories]
    found = {
        "products": all_checked("cpu"),
        "engines": [engines(path) for path in directories],
        "bits": bits,
    }
    print(json.dumps(found | {"best": all_best()}))


if __name__ == "__main__":
    main()
