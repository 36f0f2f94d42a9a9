"""Graphs that torch traces once for all exports of a test process."""

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import onnx_ir as ir
import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from eesd.common.geometry import ExitConfig, Geometry
from eesd.export import onnx_graph

SLOTS = 100_057
"""Stands for the slots of the KV cache while a graph is traced: a prime that no model has as a size."""
traced = onnx_graph._traced
"""The function that traces, which remembers nothing."""
_remembered = cache(traced)


def _copied(geometry: Geometry, exit_config: ExitConfig, dtype: str, slots: int, *rest: Any) -> ir.Model:
    """A copy of a graph that may have been traced before.

    Models that differ in nothing but their weights share a graph. So tracing is not told the rest: if it depended on that, the
    exports of all tests would be wrong.
    """
    geometry = replace(geometry, rope_theta=10_000.0, rope_scaling=None, tied_embeddings=False)
    exit_config = replace(exit_config, base="", trained=False, calibration=None)
    model = _remembered(geometry, exit_config, dtype, SLOTS, *rest).clone()
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(out for node in model.graph for out in node.outputs)]
    for value in values:
        value.type = copy(value.type)  # a clone shares it, and exports change it
        if value.shape is not None:
            value.shape = ir.Shape([slots if size == SLOTS else size for size in value.shape])
    return model


def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember graphs, and the table of operators, which torch makes again for each graph in half the time of tracing."""
    monkeypatch.setattr(onnx_graph, "_traced", _copied)
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
