"""Models and heads with parts of their own on the device: the CPU's logits, and no other tokens with drafts than without."""

from typing import Any

import numpy as np
from support.family_grid import OPTIONS, family_cases

from eesd.common.manifest import load_manifest
from eesd.export.engine_dir import Head, export, untrained_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.torch_engine import open_torch
from lease import Lease
from lease.equality import compared, logits_of

PROMPTS = ([5, 9, 3, 17], [40, 2, 2, 8, 31, 30, 12])
TOKENS = 40


def families(lease: Lease) -> dict[str, Any]:
    """A random checkpoint of each family, exported in two types; a rehearsal takes one of both."""
    found: dict[str, Any] = {}
    for kind in [*OPTIONS][: None if lease.on_gpu else 1]:
        case = next(case for case in family_cases(kind, 9, seed=6) if case.options["num_hidden_layers"] > 2)
        model = case.write(lease.output / kind)
        checkpoint = Checkpoint(model)
        found[kind] = _judged(lease, checkpoint, untrained_head(checkpoint, 1), kind)
    return found


def _judged(lease: Lease, checkpoint: Checkpoint, head: Head, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16") if lease.on_gpu else ("float32",):
        directory = lease.output / f"{name}-{dtype}"
        if not (directory / "manifest.json").exists():
            export(checkpoint, head, ExportOptions(dtype, 96, 8, 4), directory)
        manifest = load_manifest(directory)
        here, there = (logits_of(open_torch(directory, manifest, 2, False, device)[0]) for device in ("cpu", lease.device))
        found[dtype] = {
            "largest difference from the CPU": float(np.abs(here - there).max()),
            "largest logit": float(np.abs(here).max()),
            "tokens": compared(directory, "torch", {"drafter": "exit", "tree": 2}, TOKENS, PROMPTS),
        }
    return found
