"""Inputs for Polygraphy: a call of draft or verify behind a text whose keys and values fill the first slots.

Polygraphy's own random inputs give a graph of EESD slots that no text has, and masks that hide nothing. Its tools take
inputs from this script instead. It needs the graph alone, not EESD:

    cd plans/
    MODEL=verify.plan.onnx FILLED=1000 NODES=9 polygraphy run verify.plan.onnx --onnxrt --data-loader-script feed.py

MODEL is the graph, FILLED the slots that a text fills, NODES the tokens of the call, which see the text and one another in
order. All values are random with a fixed seed. docs/engine-directory.md describes the inputs.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

HIDDEN = -30000


def load_data() -> Iterator[dict[str, NDArray[Any]]]:
    """The inputs of one call by name. Polygraphy looks for a function of this name."""
    filled, nodes = int(os.environ.get("FILLED", "100")), int(os.environ.get("NODES", "1"))
    graph = onnx.load(os.environ.get("MODEL", "verify.plan.onnx"), load_external_data=False).graph
    given, rng = {value.name: value.type.tensor_type for value in graph.input}, np.random.default_rng(0)
    slots = next(kind.shape.dim[2].dim_value for name, kind in given.items() if name.startswith("key_"))
    if filled + nodes > slots:
        raise SystemExit(f"FILLED and NODES are {filled + nodes} slots; the cache has {slots}.")
    feed: dict[str, NDArray[Any]] = {}
    for name, kind in given.items():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [dim.dim_value or nodes for dim in kind.shape.dim]
        if name == "attn_mask":
            columns = kind.shape.dim[3].dim_value or -(-(filled + nodes) // 16) * 16
            seen = np.arange(columns) <= filled + np.arange(nodes)[:, None]
            value = np.where(seen, 0, HIDDEN)[None, None]
        elif name.startswith(("key_", "value_")):
            value = rng.standard_normal(shape)
            value[:, :, filled:] = 0
        elif name == "write_indices":
            value = np.array([filled])
        elif name == "position_ids":
            value = filled + np.arange(nodes)[None]
        elif name == "logit_rows":
            value = np.arange(nodes)
        elif dtype == np.int64:
            value = rng.integers(0, 90, shape)
        else:  # states that a draft continues from
            value = rng.standard_normal(shape)
        feed[name] = value.astype(dtype)
    yield feed
