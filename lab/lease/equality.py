"""Check that a GPU computes the CPU's values for every family, and that drafting changes no token
on the GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.family_grid import OPTIONS, family_cases

import eesd
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.export.engine_dir import export, stored_head, untrained_head
from eesd.export.onnx_graph import ExportOptions
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.compare import first_divergence
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.llm import Speculation
from lab.lease import Lease
from lab.lease.engines import llama, made_up, random_engines

MODEL = Path(__file__).resolve().parents[2] / "examples/pycode/model"
PROMPTS = ("def main(", "import ", "class Tree:\n    def insert(self, ")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "chain": {"drafter": "exit"},
    "tree": {"tree": 2},
    "chain with second candidates": {"tree": 1},
    "text and head": {},
    "sampled": {"sampling": Sampling(temperature=0.7, top_p=0.9, seed=3)},
}
"""Ways to draft, with their options."""


def one_pass(lease: Lease) -> dict[str, Any]:
    """Compare the logits of a small random model on the device and on the CPU, with and without
    CUDA graphs."""
    geometry = llama(3, 128, 256, 4, 2, 512)
    manifest = made_up(geometry, ExitConfig(1), "float32", 256, 8)
    torch.manual_seed(0)
    engines = random_engines(manifest, "cpu"), random_engines(manifest, lease.device)
    for there, here in zip(_modules(engines[1]), _modules(engines[0]), strict=True):
        there.load_state_dict(here.state_dict())
    found = [logits_of(verify) for verify, _ in engines]
    engines[1][0].cuda_graphs = False
    eager = logits_of(engines[1][0])
    return _fused(lease) | {
        "largest difference from the CPU": float(np.abs(found[0] - found[1]).max()),
        "same most likely tokens": bool((found[0].argmax(-1) == found[1].argmax(-1)).all()),
        "graphs have the bits of eager calls": found[1].tobytes() == eager.tobytes(),
    }


def _fused(lease: Lease) -> dict[str, Any]:
    """Compare the logits of 16-bit blocks between our kernels and torch's, with and without a group
    of queries."""
    found: dict[str, Any] = {}
    if not lease.on_gpu:
        return found
    from eesd.runtime.engines.torch_fused import fuse

    for dtype, heads in (("float16", 4), ("bfloat16", 2)):
        manifest = made_up(llama(3, 256, 512, heads, 2, 512), ExitConfig(1), dtype, 1024, 8)
        engines = random_engines(manifest, lease.device, fused=False)
        verify, _ = engines
        verify.cuda_graphs = False  # the graphs would keep the blocks that they captured
        logits = [logits_of(verify)]
        fuse(*_modules(engines))
        logits.append(logits_of(verify))
        found[f"fused, {dtype}"] = {
            "largest difference": float(np.abs(logits[0] - logits[1]).max()),
            "deviation": float(logits[0].std()),
        }
    return found


def _modules(engines: tuple[DeviceEngine, DeviceEngine]) -> list[Any]:
    return [engine.stages[0].module for engine in engines]  # type: ignore[attr-defined]


def logits_of(engine: DeviceEngine) -> Any:
    """Return the logits of a prompt and of three more calls."""
    [kv_cache] = engine.new_kv_caches()
    kv_cache.reserve(64)
    engine.forward([Call(kv_cache, list(range(40)), range(40), 0, logits=False)])
    calls = (([5, 6, 7], 40), ([8], 43), ([9, 1, 4, 4], 44))
    parts = [
        engine.forward([Call(kv_cache, t, range(at, at + len(t)), at)])[0].logits.copy()
        for t, at in calls
    ]
    return np.concatenate(parts)


def tokens_in(dtype: str, lease: Lease) -> dict[str, Any]:
    """Check the bundled model. The step compares the bits of all kinds of calls and the tokens of
    all ways to draft. One of the texts is long."""
    directory = exported(lease, dtype)
    manifest = load_manifest(directory)
    checked = Exactness(manifest)
    verify, _ = open_torch(directory, manifest, 2, False, lease.device)
    checked.check(verify)
    found: dict[str, Any] = {"chains": str(checked.chains), "trees": str(checked.trees)}
    found |= {
        way: compared(directory, "torch", dict(options), 120 if lease.on_gpu else 16)
        for way, options in WAYS.items()
    }
    found["long text"] = compared(directory, "torch", {}, 700 if lease.on_gpu else 24)
    llm = eesd.load(directory, "torch", speculation=Speculation("fixed:k=4", guard=False))
    made = llm.generate(
        PROMPTS[0],
        Sampling(temperature=0.7, seed=1, method="rejection"),
        max_new_tokens=32,
        ignore_eos=True,
    )
    return found | {
        "rejection sampling": {"tokens": len(made.tokens), "acceptance": made.stats.acceptance}
    }


def exported(lease: Lease, dtype: str, stages: int = 1) -> Path:
    """Return the directory of the bundled model. An earlier step or this step exported it."""
    directory = lease.output / f"pycode-{dtype}-{stages}"
    if not (directory / "manifest.json").exists():
        checkpoint = Checkpoint(MODEL)
        export(
            checkpoint,
            stored_head(checkpoint, MODEL),
            ExportOptions(dtype, 1024, 32, 8, stages),
            directory,
        )
    return directory


def compared(
    directory: Path,
    backend: str,
    options: dict[str, Any],
    tokens: int,
    prompts: Sequence[str | list[int]] = PROMPTS,
) -> dict[str, Any]:
    """Compare drafting with plain decoding."""
    sampling = options.pop("sampling", Sampling())
    llm = eesd.load(
        directory, backend, speculation=Speculation("fixed:k=4", guard=False, **options)
    )
    differ = 0
    rounds = 0
    gap = 0.0
    for prompt in prompts:
        plain = llm.generate(prompt, sampling, max_new_tokens=tokens, draft=False, ignore_eos=True)
        drafted = llm.generate(prompt, sampling, max_new_tokens=tokens, ignore_eos=True)
        rounds += drafted.stats.rounds
        if plain.tokens != drafted.tokens:
            differ += 1
            ids = llm.encode(prompt) if isinstance(prompt, str) else prompt
            divergence = (
                None
                if sampling.temperature
                else first_divergence(llm, ids, plain.tokens, drafted.tokens)
            )
            gap = max(gap, abs(divergence.logit_gap) if divergence else 0.0)
    return {
        "texts": len(prompts),
        "differ": differ,
        "largest gap": gap,
        "tokens a round": len(prompts) * tokens / rounds,
    }


def families(lease: Lease) -> dict[str, Any]:
    """Compare a random checkpoint of each family that is exported in two types. A rehearsal has
    only one family and one type."""
    found: dict[str, Any] = {}
    for kind, dtype in [(kind, dtype) for kind in OPTIONS for dtype in ("float32", "bfloat16")][
        : None if lease.on_gpu else 1
    ]:
        directory = lease.output / f"{kind}-{dtype}"
        if not (directory / "manifest.json").exists():
            case = next(
                case
                for case in family_cases(kind, 9, seed=6)
                if case.options["num_hidden_layers"] > 2
            )
            checkpoint = Checkpoint(case.write(lease.output / kind))
            export(
                checkpoint, untrained_head(checkpoint, 1), ExportOptions(dtype, 96, 8, 4), directory
            )
        manifest = load_manifest(directory)
        prompts = ([5, 9, 3, 17], [40, 2, 2, 8, 31, 30, 12])
        here, there = (
            logits_of(open_torch(directory, manifest, 2, False, device)[0])
            for device in ("cpu", lease.device)
        )
        found[f"{kind}, {dtype}"] = {
            "largest difference from the CPU": float(np.abs(here - there).max()),
            "largest logit": float(np.abs(here).max()),
            "tokens": compared(directory, "torch", {"drafter": "exit", "tree": 2}, 40, prompts),
        }
    return found
