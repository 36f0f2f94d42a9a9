"""Graphs that are read without their weights, which stay in their files."""

from pathlib import Path
from typing import Any

from eesd.common.errors import refused


def read_graph(path: Path) -> Any:
    """Read a graph without its weights.

    Returns:
        An ``onnx.ModelProto``.

    Raises:
        EESDError: onnx cannot read it.
    """
    import onnx

    with refused(lambda _: f"onnx cannot read {path}; export the model again."):
        return onnx.load(path, load_external_data=False)
