"""Manifests of exports that are too large to make here."""

from dataclasses import replace

from eesd.common.geometry import ExitConfig, Geometry, draft_caches, exit_caches
from eesd.common.manifest import Manifest
from eesd.common.quantization import Quantizations
from eesd.export.memory import split_layers


def shaped_manifest(geometry: Geometry, small: Manifest, quantization: Quantizations, stages: int) -> Manifest:
    """The manifest of a float16 export of a geometry, exit after layer 4, 4096 slots.

    Args:
        geometry: Geometry of the model.
        small: Manifest of a small model in at least as many stages.
        quantization: Quantization of the linear weights.
        stages: Stages of verify.
    """
    exit_head = ExitConfig(4)
    caches = [tuple(layers) for layers in split_layers(geometry, exit_head, "float16", quantization, stages)]
    caches[0] += tuple(exit_caches(geometry, exit_head))
    files = [stage.file for stage in small.verify] if stages > 1 else ["verify.onnx"]
    return replace(
        small,
        geometry=geometry,
        exit_head=exit_head,
        dtype="float16",
        quantization=quantization,
        max_seq_len=4096,
        draft=replace(small.draft, caches=tuple(draft_caches(geometry, exit_head))),
        verify=tuple(
            replace(stage, file=file, caches=own) for stage, file, own in zip(small.verify, files, caches, strict=False)
        ),
    )
