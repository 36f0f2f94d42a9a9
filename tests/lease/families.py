"""Models and heads with parts of their own on the device: the CPU's logits, and no other tokens with drafts than without."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import tiny_models
from support.eagle_heads import write_head
from support.family_grid import OPTIONS, family_cases

import eesd
from eesd.common.manifest import load_manifest
from eesd.export.engine_dir import Head, eagle_head, export, untrained_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.llm import Speculation
from lease import Lease

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


def eagle(lease: Lease) -> dict[str, Any]:
    """A random Llama with a random EAGLE-3 head."""
    shutil.rmtree(lease.output / "eagle-head", ignore_errors=True)
    model = tiny_models.build(lease.output / "eagle", 97, layers=5, damping=1.0, seed=0, head_dim=16, kv_heads=1)
    config = json.loads((model / "config.json").read_text())
    head = write_head(lease.output / "eagle-head", config, "specforge", draft_vocab=60, num_attention_heads=2)
    checkpoint = Checkpoint(model)
    return {"eagle": _judged(lease, checkpoint, eagle_head(checkpoint, head), "eagle")}


def _judged(lease: Lease, checkpoint: Checkpoint, head: Head, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16") if lease.on_gpu else ("float32",):
        directory = lease.output / f"{name}-{dtype}"
        if not (directory / "manifest.json").exists():
            export(checkpoint, head, ExportOptions(dtype, 96, 8, 4), directory)
        here, there = (_logits(directory, device) for device in ("cpu", lease.device))
        found[dtype] = {
            "largest difference from the CPU": float(np.abs(here - there).max()),
            "largest logit": float(np.abs(here).max()),
            "tokens": _compared(directory),
        }
    return found


def _logits(directory: Path, device: str) -> Any:
    """Of 20 tokens, in four calls of verify."""
    manifest = load_manifest(directory)
    verify, _ = open_torch(directory, manifest, 2, False, device)
    [kv_cache] = verify.new_kv_caches()
    kv_cache.reserve(32)
    tokens = torch.randint(3, 60, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    return np.concatenate(
        [
            verify.forward([Call(kv_cache, tokens[at:end], range(at, end), at)])[0].logits.copy()
            for at, end in ((0, 6), (6, 7), (7, 12), (12, 20))
        ]
    )


def _compared(directory: Path) -> str:
    """Of a tree of drafts against plain decoding."""
    llm = eesd.load(directory, "torch", speculation=Speculation("fixed:k=3", guard=False, tree=2, drafter="exit"))
    equal = rounds = 0
    for prompt in PROMPTS:
        plain = llm.generate(prompt, max_new_tokens=TOKENS, draft=False, ignore_eos=True)
        drafted = llm.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True)
        equal += sum(a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True))
        rounds += drafted.stats.rounds
    return f"{equal} of {TOKENS * len(PROMPTS)} equal, in {rounds} rounds"
