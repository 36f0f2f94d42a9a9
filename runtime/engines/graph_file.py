"""Graphs that are changed in memory when they are loaded. Their weights stay in their files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd.common.errors import refused

if TYPE_CHECKING:
    import onnxruntime as ort


def read_graph(path: Path) -> Any:
    """Read a graph, to change it in memory, without its weights.

    Returns:
        An ``onnx.ModelProto``.

    Raises:
        EESDError: onnx cannot read it.
    """
    import onnx

    with refused(lambda _: f"onnx cannot read {path}; export the model again."):
        return onnx.load(path, load_external_data=False)


def to_session(model: Any, path: Path, options: "ort.SessionOptions") -> bytes:
    """A changed graph, as a session takes it. The options get the directory of the weights that stay in files."""
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    data: bytes = model.SerializeToString()
    return data
