"""Make the inputs of one call of the draft or verify graph for Polygraphy. A text fills the first
slots of the KV cache.

Polygraphy's own random inputs fill all slots, and their masks hide nothing. This script fills and
masks slots as a round does. It needs only the graph, not EESD:

    cd plans/
    MODEL=verify.plan.onnx FILLED=1000 NODES=9 polygraphy run verify.plan.onnx --onnxrt \\
        --data-loader-script feed.py

MODEL is the graph. FILLED is the number of slots that the text fills. NODES is the number of tokens
in the call. Each token attends to the text, the tokens before it, and itself. Values are random,
with a fixed seed. docs/engine-directory.md describes the inputs.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

HIDDEN = -30000


def load_data() -> Iterator[dict[str, NDArray[Any]]]:
    """Yields the inputs of one call by name. Polygraphy calls a function with this name."""
    filled = int(os.environ.get("FILLED", "100"))
    nodes = int(os.environ.get("NODES", "1"))
    graph = onnx.load(os.environ.get("MODEL", "verify.plan.onnx"), load_external_data=False).graph
    kinds = {value.name: value.type.tensor_type for value in graph.input}
    rng = np.random.default_rng(0)
    slots = next(
        kind.shape.dim[2].dim_value for name, kind in kinds.items() if name.startswith("key_")
    )
    if filled + nodes > slots:
        raise SystemExit(f"FILLED and NODES are {filled + nodes} slots; the cache has {slots}.")
    columns = kinds["attn_mask"].shape.dim[3].dim_value or -(-(filled + nodes) // 16) * 16
    token = np.arange(nodes)
    feed: dict[str, NDArray[Any]] = {
        "input_ids": rng.integers(0, 90, (1, nodes)),
        "position_ids": filled + token[None],
        "write_indices": np.array([filled]),
        "attn_mask": np.where(np.arange(columns) <= filled + token[:, None], 0, HIDDEN)[None, None],
        "logit_rows": token,
    }
    for name, kind in kinds.items():
        if name not in feed:  # a cache, or the states that a later stage reads
            feed[name] = rng.standard_normal([dim.dim_value or nodes for dim in kind.shape.dim])
        if name.startswith(("key_", "value_")):
            feed[name][:, :, filled:] = 0
    yield {
        name: feed[name].astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        for name, kind in kinds.items()
    }
