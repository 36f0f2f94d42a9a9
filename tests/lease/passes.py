"""How long calls take at the widths of an 8B model, of which some layers are made up."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.manifest import Manifest
from eesd.export.predict import bytes_of_pass, operations_of_node
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.device_engine import DeviceEngine
from lease import Lease
from lease.engines import llama, made_up, random_engines
from lease.machine import seconds_of

NODES = 32
ROWS = (1, 8, 32)


def shape(lease: Lease, layers: int) -> Geometry:
    """Llama 3 8B with fewer layers; on a CPU a small model."""
    if lease.on_gpu:
        return llama(layers, 4096, 14336, 32, 8, 128256)
    return llama(layers, 128, 256, 4, 2, 512)


def exit_head(lease: Lease) -> ExitConfig:
    """After layer 4 with a quarter of the vocabulary, as ``eesd-distill`` makes it."""
    return ExitConfig(4, own_lm_head=True, draft_vocab=32064 if lease.on_gpu else 128, deep=())


def with_slots(slots: int) -> Callable[[Lease], dict[str, Any]]:
    """The step that times calls over caches of so many slots."""
    return partial(_with_slots, slots)


def _with_slots(slots: int, lease: Lease) -> dict[str, Any]:
    """Milliseconds of verify passes, prompts, draft steps and chains: in CUDA graphs and not, with buckets and one count."""
    found: dict[str, Any] = {}
    manifest = made_up(shape(lease, 8), exit_head(lease), "bfloat16", slots if lease.on_gpu else 256, NODES)
    for name, exact, graphs in (("graphs", False, True), ("eager", False, False), ("one node count", True, True)):
        verify, draft = random_engines(manifest, lease.device, exact)
        verify.cuda_graphs = draft.cuda_graphs = graphs
        found[name] = _timed(manifest, verify, draft, lease)
    graph = manifest.verify[0]
    floor = {
        "weights and cache": bytes_of_pass(manifest, graph, manifest.gpu_slots),
        "operations of a node": operations_of_node(manifest, graph),
    }
    return found | {
        "layers": 8,
        "slots": manifest.max_seq_len,
        "bytes": floor,
        "draft bytes": bytes_of_pass(manifest, manifest.draft, manifest.gpu_slots),
    }


def _timed(manifest: Manifest, verify: DeviceEngine, draft: DeviceEngine, lease: Lease) -> dict[str, float]:
    [kv_cache] = verify.new_kv_caches()
    start = min(1000, manifest.max_seq_len // 2)
    kv_cache.reserve(manifest.max_seq_len)

    def call(engine: DeviceEngine, count: int, logits: bool = True) -> Callable[[], object]:
        return lambda: engine.forward([Call(kv_cache, [7] * count, range(start, start + count), start, logits=logits)])

    calls = {f"verify {count}": call(verify, count) for count in (1, 2, 8, NODES + 1)}
    calls |= {"prompt": call(verify, min(512, manifest.max_seq_len - start), logits=False), "draft": call(draft, 1)}
    if draft.buckets:
        calls["chain of 4"] = lambda: draft.draft_chain(kv_cache, 7, start, 4)
    return {name: 1e3 * seconds_of(work, lease) for name, work in calls.items()}


def rows(lease: Lease) -> dict[str, Any]:
    """Milliseconds of a batch that decodes plainly, with a round's nodes for each row, and with one where it is not exact."""
    found: dict[str, Any] = {}
    for nodes, exact in ((1, True), (4, True), (NODES, True), (NODES, False)):
        manifest = made_up(shape(lease, 8), exit_head(lease), "bfloat16", 2048 if lease.on_gpu else 256, nodes)
        verify, _ = random_engines(manifest, lease.device, exact)
        for count in ROWS:
            kv_caches = verify.new_kv_caches(count)
            for kv_cache in kv_caches:
                kv_cache.reserve(manifest.max_seq_len)
            calls = [Call(kv_cache, [7], [100], 100) for kv_cache in kv_caches]
            name = f"{count} rows of {nodes + 1} nodes" if exact else f"{count} rows, not exact"
            found[name] = 1e3 * seconds_of(partial(verify.forward, calls), lease)
    return found


def constants(lease: Lease) -> dict[str, Any]:
    """What docs/predict.md assumes: kernels of a block, kernels besides, and the host's part of a call."""
    counted = {layers: _kernels(lease, layers) for layers in (5, 9)}
    block = (counted[9][0] - counted[5][0]) / 4
    tiny = made_up(llama(5, 128, 256, 4, 2, 512), ExitConfig(1), "bfloat16", 256, 8)
    verify, _ = random_engines(tiny, lease.device, False)
    [kv_cache] = verify.new_kv_caches()
    kv_cache.reserve(64)
    call = seconds_of(lambda: verify.forward([Call(kv_cache, [7], [9], 9)]), lease, 50)
    return {
        "kernels of a block": block,
        "other kernels": counted[5][0] - 5 * block,
        "milliseconds of a call of a tiny model": 1e3 * call,
        "kernels of the tiny model's call": _kernels(lease, 5, tiny)[0],
        "most time, 9 layers": counted[9][1],
    }


def _kernels(lease: Lease, layers: int, manifest: Manifest | None = None) -> tuple[int, list[Any]]:
    """Kernels that an eager verify pass over a node launches (on a CPU: operators), and the eight that take the most time."""
    manifest = manifest or made_up(shape(lease, layers), exit_head(lease), "bfloat16", 256, 8)
    verify, _ = random_engines(manifest, lease.device, False)
    verify.cuda_graphs = False
    [kv_cache] = verify.new_kv_caches()
    kv_cache.reserve(64)
    call = Call(kv_cache, [7], [9], 9)
    verify.forward([call])
    on_gpu = lease.on_gpu
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        verify.forward([call])
        if on_gpu:
            torch.cuda.synchronize()
    # The profiler lists the host's calls, too, each of which launched one of them.
    events = [event for event in profile.key_averages() if event.device_type.name == ("CUDA" if on_gpu else "CPU")]
    spent = sorted(events, key=lambda event: -(event.self_device_time_total if on_gpu else event.self_cpu_time_total))
    most = [
        [event.key[:80], event.count, event.self_device_time_total if on_gpu else event.self_cpu_time_total]
        for event in spent[:8]
    ]
    return sum(event.count for event in events), most
