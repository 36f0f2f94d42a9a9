"""One of several processes that share a model's weights, with the kernels of GPUs in Triton's
interpreter.

``python tests/support/fused_rank.py DIRECTORY``, started for each rank. Rank 0 prints as JSON how
far its logits are from those of torch's operators in one process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from torch import nn

from eesd.common.manifest import load_manifest
from eesd.runtime.engines import torch_weights
from eesd.runtime.engines.team import TeamEngine
from eesd.runtime.engines.torch_engine import TorchStageRunner, open_team, open_torch
from eesd.runtime.engines.torch_fused import FusedBlock
from support.interpreted import levels_of, logits_of


def layers_of(engine: TeamEngine) -> list[nn.Module]:
    stage: Any = engine.own.stages[0]
    assert isinstance(stage, TorchStageRunner)
    return list(stage.module.model.layers)


def memory_of(block: Any) -> int:
    """Where the joined weights of queries, keys and values are; of a block that has none, a number
    of its own."""
    if not isinstance(block, FusedBlock):
        return id(block)
    joined = block.qkv_proj
    levels = None if joined.quantized is None else joined.quantized.weight.levels
    return (joined.weight if levels is None else levels).data_ptr()


def main(directory: Path) -> None:
    manifest = load_manifest(directory)
    torch_weights.has_kernels = lambda *_: True  # as on a GPU
    verify, draft = open_team(directory, manifest, 1, True)  # of the other ranks none returns
    assert draft is not None
    layers = [layers_of(engine) for engine in (verify, draft)]
    found = logits_of(verify, draft)
    expected = logits_of(*open_torch(directory, manifest, 1, True, "cpu", kernels=False))
    made = {
        "difference": [
            float(abs(one - other).max()) for one, other in zip(found, expected, strict=True)
        ],
        "deviation": [float(one.std()) for one in expected],
        "fused": [sum(isinstance(block, FusedBlock) for block in blocks) for blocks in layers],
        "shared": [memory_of(one) == memory_of(other) for one, other in zip(*layers, strict=True)],
        "levels": {
            name: list(weight.scales.shape)
            for name, weight in levels_of(verify.own.stages[0]).items()
        },
    }
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
