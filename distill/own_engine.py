"""The frozen model as an engine of this project's operators, for distillation: weights as the checkpoint has them."""

import shutil
from pathlib import Path

from eesd.common.errors import EESDError
from eesd.common.manifest import MAX_SLOTS, Manifest, load_manifest
from eesd.common.quantization import DTYPES, Quantizations
from eesd.export.cpu.build import build_for_cpu
from eesd.export.engine_dir import export, untrained_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint

LEAST_SLOTS = 1024
"""Slots of an engine, at least, if the model has so many positions: own prompts and own text then share it."""
LAYER = 1
"""The exit layer of its head, which nothing runs."""


def own_engine(checkpoint: Checkpoint, directory: Path, slots: int) -> tuple[Path, Manifest]:
    """Export the model into a directory, unless an engine of this model with enough slots is there.

    Args:
        checkpoint: The model. Levels of a quantized one stay as they are, and so do weights of 16 and 32 bits.
        directory: The process's own. An engine with fewer slots that is there is replaced.
        slots: Slots of the engine, at least.

    Returns:
        The directory that engines open, and its manifest.
    """
    manifest = _stored(checkpoint, directory)
    if manifest is None or manifest.max_seq_len < slots:
        shutil.rmtree(directory, ignore_errors=True)
        manifest = _export(checkpoint, directory, slots)
    return build_for_cpu(directory, manifest), manifest


def _export(checkpoint: Checkpoint, directory: Path, slots: int) -> Manifest:
    dtype = checkpoint.dtype if checkpoint.dtype in DTYPES else "float32"
    own = checkpoint.own_levels if dtype == "float32" else {}
    quantization = Quantizations(checkpoint.quantization, tensors=own)
    slots = max(slots, min(LEAST_SLOTS, checkpoint.config.max_positions, MAX_SLOTS))
    options = ExportOptions(dtype, slots, max_tree_nodes=1, draft_top_k=1, quantization=quantization)
    return export(checkpoint, untrained_head(checkpoint, LAYER), options, directory)


def _stored(checkpoint: Checkpoint, directory: Path) -> Manifest | None:
    """The manifest of the engine that is there; None if there is none of this model, or a damaged one."""
    try:
        manifest = load_manifest(directory)
    except EESDError:
        return None
    return manifest if manifest.exit_head.base == checkpoint.fingerprint() else None
