"""Measure calls at the widths of an 8B model that has fewer layers and random weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.manifest import Manifest
from eesd.export.predict import bytes_of_pass, operations_of_node
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.device_engine import DeviceEngine
from lab.lease import Lease
from lab.lease.engines import llama, made_up, random_engines
from lab.lease.machine import seconds_of

NODES = 32


def shape(lease: Lease, layers: int) -> Geometry:
    """Return a Llama 3 8B with fewer layers, or a small model on a CPU."""
    if lease.on_gpu:
        return llama(layers, 4096, 14336, 32, 8, 128256)
    return llama(layers, 128, 256, 4, 2, 512)


def exit_head(lease: Lease) -> ExitConfig:
    """Return a head after layer 4 with a quarter of the vocabulary, as ``eesd-distill`` makes
    it."""
    return ExitConfig(4, own_lm_head=True, draft_vocab=32064 if lease.on_gpu else 128, deep=())


def with_slots(slots: int, lease: Lease) -> dict[str, Any]:
    """Measure the milliseconds of verify passes, prompts, draft steps and chains. This is done with
    and without CUDA graphs, with our kernels and torch's, and with buckets and with one node
    count."""
    found: dict[str, Any] = {}
    manifest = made_up(
        shape(lease, 8), exit_head(lease), "bfloat16", slots if lease.on_gpu else 256, NODES
    )
    for name, exact, graphs, fused in (
        ("graphs", False, True, None),
        ("graphs of torch's operators", False, True, False),
        ("eager", False, False, None),
        ("one node count", True, True, None),
    ):
        verify, draft = random_engines(manifest, lease.device, exact, fused)
        verify.cuda_graphs = draft.cuda_graphs = graphs
        found[name] = _timed(manifest, verify, draft, lease)
    read = {"bytes": manifest.verify[0], "draft bytes": manifest.draft}
    found |= {
        name: bytes_of_pass(manifest, graph, manifest.gpu_slots) for name, graph in read.items()
    }
    operations = operations_of_node(manifest, manifest.verify[0])
    return found | {"layers": 8, "slots": manifest.max_seq_len, "operations of a node": operations}


def _timed(
    manifest: Manifest, verify: DeviceEngine, draft: DeviceEngine, lease: Lease
) -> dict[str, float]:
    """Return the milliseconds of calls after some tokens, and after a text that fills the cache."""
    [kv_cache] = verify.new_kv_caches()
    kv_cache.reserve(manifest.max_seq_len)

    def call(
        engine: DeviceEngine, start: int, count: int, logits: bool = True
    ) -> Callable[[], object]:
        return lambda: engine.forward(
            [Call(kv_cache, [7] * count, range(start, start + count), start, logits=logits)]
        )

    found: dict[str, float] = {}
    for start in (min(1000, manifest.max_seq_len // 2), manifest.max_seq_len - NODES - 1):
        calls = {f"verify {count}": call(verify, start, count) for count in (1, 2, 8, NODES + 1)}
        calls |= {
            "prompt": call(verify, start, min(512, manifest.max_seq_len - start), logits=False),
            "draft": call(draft, start, 1),
        }
        if draft.buckets:
            calls["chain of 4"] = partial(
                draft.forward, [Call(kv_cache, [7], [start], start, levels=4)]
            )
        found |= {
            f"{name} behind {start}": 1e3 * seconds_of(work, lease) for name, work in calls.items()
        }
    return found
