"""One of several processes that share a model's weights. It runs the Triton kernels for GPUs in the
interpreter.

``python tests/support/fused_rank.py DIRECTORY``, started for each rank. Rank 0 prints, as JSON, the
difference between its logits and the logits of torch's operators in one process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from torch import Tensor

from eesd.common.manifest import load_manifest
from eesd.runtime.engines import torch_weights
from eesd.runtime.engines.team import TeamEngine
from eesd.runtime.engines.torch_engine import TorchStageRunner, open_team, open_torch
from eesd.runtime.engines.torch_fused import FusedOperations, joined
from eesd.runtime.engines.torch_quantized import QuantizedLinear
from support.interpreted import levels_of, logits_of


def layers_of(engine: TeamEngine) -> list[Any]:
    """Returns the attentions of those layers that have weights. The list is empty if no kernels
    compute with these weights."""
    stage: Any = engine.own.stages[0]
    assert isinstance(stage, TorchStageRunner)
    model: Any = stage.module.model
    attentions = [block.self_attn for block in model.layers]
    return [one for one in attentions if is_there(one)] * (
        stage.module.operations is FusedOperations
    )


def is_there(attention: Any) -> bool:
    layer = attention.q_proj
    return isinstance(layer, QuantizedLinear) or not layer.weight.is_meta


def memory_of(attention: Any) -> int:
    """Returns the address of the joined weights of queries, keys and values."""
    if isinstance(attention.q_proj, QuantizedLinear):
        return attention.q_proj.weight.levels.data_ptr()
    parts: list[Tensor] = [getattr(attention, f"{part}_proj").weight for part in "qkv"]
    assert joined(parts).data_ptr() == parts[0].data_ptr(), "they lie together"
    return parts[0].data_ptr()


def main(directory: Path) -> None:
    manifest = load_manifest(directory)
    torch_weights.has_kernels = lambda *_: True  # as on a GPU
    verify, draft = open_team(directory, manifest, 1, True)  # returns on rank 0 only
    assert draft is not None
    layers = [layers_of(engine) for engine in (verify, draft)]
    found = logits_of(verify, draft)
    expected = logits_of(*open_torch(directory, manifest, 1, True, "cpu", kernels=False))
    made = {
        "difference": [
            float(abs(one - other).max()) for one, other in zip(found, expected, strict=True)
        ],
        "deviation": [float(one.std()) for one in expected],
        "fused": [len(attentions) for attentions in layers],
        "shared": [memory_of(one) == memory_of(other) for one, other in zip(*layers, strict=False)],
        "levels": {
            name: list(weight.scales.shape)
            for name, weight in levels_of(verify.own.stages[0]).items()
        },
    }
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
