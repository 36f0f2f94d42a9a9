"""Graphs that torch traces once, for all exports of all tests, until code changes that makes
them."""

import sys
from copy import copy
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from filelock import FileLock
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx._internal.exporter._registration import ONNXRegistry

from eesd.common.geometry import ExitConfig, Geometry
from eesd.export import onnx_graph

SLOTS = 100_057
"""Stands for the slots of the KV cache while a graph is traced: a prime that no model has as a
size."""
ROOT = Path(__file__).parents[2]
GRAPHS = ROOT / "build/traced"
"""Where graphs lie, without weights. A run that makes one drops the graphs of other code."""
traced = onnx_graph._traced
"""The function that traces, which remembers nothing."""


@cache
def _code() -> str:
    """A name for all that decides about graphs."""
    files = sorted(
        path
        for room in ("model", "export", "src/eesd/common")
        for path in (ROOT / room).rglob("*.py")
    )
    texts = (
        sys.version,
        torch.__version__,
        ir.__version__,
        *(path.read_text("utf-8") for path in files),
    )
    return sha256("".join(texts).encode()).hexdigest()[:16]


@cache
def _remembered(*arguments: Any) -> ir.Model:
    path = GRAPHS / f"{_code()}-{sha256(repr(arguments).encode()).hexdigest()}.onnx"
    GRAPHS.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            for old in GRAPHS.iterdir():
                if not old.name.startswith(_code()):
                    old.unlink(missing_ok=True)
            model = traced(*arguments)
            for name, value in model.graph.initializers.items():
                assert value.dtype is not None and value.shape is not None
                assert isinstance(value.const_value, ir.TensorProtocol) and isinstance(
                    value.const_value.raw, FakeTensor
                )
                value.const_value = ir.ExternalTensor(
                    "none", 0, 0, value.dtype, shape=value.shape, name=name
                )
            # Some tests let other ways to write fail.
            with path.with_suffix(".new").open("wb") as file:
                file.write(ir.to_proto(model).SerializeToString())
            path.with_suffix(".new").replace(path)
    return ir.load(path)


def _copied(
    geometry: Geometry, exit_config: ExitConfig, dtype: str, slots: int, *rest: Any
) -> ir.Model:
    """A copy of a graph that may have been traced before.

    Models that differ in nothing but their weights share a graph. So tracing is not told the rest:
    if it depended on that, the exports of all tests would be wrong.
    """
    geometry = replace(geometry, rope_theta=10_000.0, rope_scaling=None, tied_embeddings=False)
    exit_config = replace(exit_config, base="", trained=False, calibration=None)
    model = _remembered(geometry, exit_config, dtype, SLOTS, *rest).clone()
    values = [
        *model.graph.inputs,
        *model.graph.initializers.values(),
        *(out for node in model.graph for out in node.outputs),
    ]
    for value in values:
        value.type = copy(value.type)  # a clone shares it, and exports change it
        if value.shape is not None:
            value.shape = ir.Shape([slots if size == SLOTS else size for size in value.shape])
    return model


def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember graphs, and the table of operators, which torch makes again for each graph in half
    the time of tracing."""
    monkeypatch.setattr(onnx_graph, "_traced", _copied)
    monkeypatch.setattr(
        ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))
    )
