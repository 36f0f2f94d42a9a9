"""Runs a whole Llama 3 8B through ``LLM`` and ``Service``. Measures the tokens per second, and the
parts of a call's time.

Weights are random, so a script replaces each most likely token of the model by the next token of
the script's text. Drafted tokens are right at a given rate. All other code runs unchanged.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support.listening import listening

from eesd.common.geometry import ExitConfig
from eesd.common.manifest import DRAFT_VOCAB_FILE
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.decoding.draft_tree import Node
from eesd.runtime.decoding.samplers import SpecSampler, make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, StepOutputs
from eesd.runtime.engines.cuda_graph import CapturedGraph
from eesd.runtime.engines.device import DeviceStream
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.llm import LLM, Speculation
from lab.lease import Lease
from lab.lease.clients import streamed
from lab.lease.engines import made_up, random_engines
from lab.lease.machine import SERVING, seconds_of
from lab.lease.passes import exit_head, shape

LAYERS = 32
SLOTS = 4096
PROMPT = 64
RATES = (0.5, 0.7, 0.9)
CLIENTS = (1, 8, 32)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "16 bits, exact, 32 nodes": {"nodes": 32, "exact": True},
    "16 bits, exact, 15 nodes": {"nodes": 15, "exact": True},
    "16 bits, exact, 7 nodes": {"nodes": 7, "exact": True},
    "16 bits, not exact": {"nodes": 32, "exact": False},
    "4-bit draft of the whole model": {"nodes": 15, "exact": True, "levels": "draft"},
    "4 bits, exact, 15 nodes": {"nodes": 15, "exact": True, "levels": "both"},
    "4 bits, not exact": {"nodes": 32, "exact": False, "levels": "both"},
}

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "coupled": {"temperature": 0.6},
    "coupled, top-p": {"temperature": 0.6, "top_p": 0.9},
    "coupled, top-k and top-p": {"temperature": 0.6, "top_p": 0.9, "top_k": 40},
}


class Script:
    """The text that the engines produce.

    Attributes:
        rate: The share of drafts that are right, if all tokens before them are right.
    """

    rate = 1.0

    def __init__(self, verify: DeviceEngine, draft: DeviceEngine) -> None:
        """Let both engines follow the script from now on."""
        random = np.random.default_rng(0)
        self._vocabulary = verify.manifest.geometry.vocab_size
        self._tokens = random.integers(self._vocabulary, size=SLOTS + 1)
        self._chances = random.random(SLOTS + 1)
        verify_calls = verify.forward
        draft_calls = draft.forward

        def verified(calls: Sequence[Call]) -> list[StepOutputs]:
            found = verify_calls(calls)
            for call, outputs in zip(calls, found, strict=True):
                outputs._argmax_ids = self._tokens[np.asarray(call.positions) + 1]
            return found

        def drafted(calls: Sequence[Call]) -> list[StepOutputs]:
            return [
                self._guessed(_positions(call, one.levels), one)
                for call, one in zip(calls, draft_calls(calls), strict=True)
            ]

        verify.forward, draft.forward = verified, drafted  # type: ignore[method-assign]

    def _guessed(self, positions: Sequence[int], outputs: StepOutputs) -> StepOutputs:
        """Replace the candidates. Only the first candidate can be right."""
        assert outputs.topk_ids is not None and outputs.topk_logprobs is not None
        place = np.asarray(positions) + 1
        others = outputs.topk_ids.shape[1] - 1
        first = self._tokens[place] + (self._chances[place] >= self.rate)
        outputs.topk_ids = (first[:, None] + 2 * np.arange(others + 1)) % self._vocabulary
        outputs.topk_logprobs = np.full_like(
            outputs.topk_logprobs, log((1.0001 - self.rate) / others)
        )
        outputs.topk_logprobs[:, 0] = log(self.rate)
        return outputs


def _positions(call: Call, levels: int) -> list[int]:
    """Return the positions of the outputs of a draft call."""
    *others, last = call.positions
    return [*others, *range(last, last + levels)]


def scripted(
    lease: Lease, nodes: int, exact: bool, levels: str = "", slots: int = SLOTS
) -> tuple[LLM, Script]:
    """Return an LLM of 8B parameters (a small LLM on a CPU) and its script."""
    geometry = shape(lease, LAYERS if lease.on_gpu else 5)
    head = (
        ExitConfig(geometry.num_layers, blocks=0, trained=True)
        if levels == "draft"
        else exit_head(lease)
    )
    manifest = made_up(
        geometry,
        head,
        "bfloat16" if lease.on_gpu else "float32",
        slots if lease.on_gpu else 256,
        nodes,
    )
    engines = random_engines(manifest, lease.device, exact, levels=levels)
    directory = lease.output / "whole"  # there is no tokenizer, so prompts are token ids
    directory.mkdir(exist_ok=True)
    np.arange(head.draft_vocab, dtype="<i8").tofile(directory / DRAFT_VOCAB_FILE)
    return LLM(
        directory, manifest, Engines(*engines), Speculation(drafter="exit", guard=False)
    ), Script(*engines)


def variant(name: str, lease: Lease) -> dict[str, Any]:
    """Measure the tokens per second of plain decoding and of the default controller. The drafts are
    right at each of several rates."""
    options = VARIANTS[name]
    if options.get("levels") and not lease.on_gpu:
        return {"skipped": "4-bit products need a GPU"}
    llm, script = scripted(lease, **options)
    count = 256 if lease.on_gpu else 16
    found = dict[str, Any]()
    llm.generate([1] * PROMPT, max_new_tokens=count, ignore_eos=True)  # captures
    for rate in (None, *RATES):
        script.rate = rate or 1.0
        own = llm.with_speculation(llm.speculation)
        made = own.generate(
            [1] * PROMPT, max_new_tokens=count, ignore_eos=True, draft=rate is not None
        )
        assert made.tokens == script._tokens[PROMPT : PROMPT + count].tolist()
        kept = (
            "tokens_per_second",
            "tokens_per_round",
            "acceptance",
            "draft_steps",
            "rounds",
            "host_share",
        )
        found[f"right {rate}" if rate else "plain"] = {
            key: value for key, value in made.stats.to_dict().items() if key in kept
        }
    return found


def split(lease: Lease) -> dict[str, Any]:
    """Measure a verify call and a draft call with one node. The result has the milliseconds of each
    part (Python, launch, wait for the device) and of the kernels alone."""
    llm, _ = scripted(lease, 7, exact=False)
    verify = llm.engines.verify
    draft = llm.engines.draft
    assert isinstance(verify, DeviceEngine) and isinstance(draft, DeviceEngine)
    [kv_cache] = verify.new_kv_caches()
    kv_cache.reserve(verify.manifest.max_seq_len)
    found: dict[str, Any] = {}
    for name, engine in (("verify", verify), ("draft", draft)):
        call = Call(kv_cache, [7], [100], 100)
        engine.forward([call])
        samples = [_sample(engine, call) for _ in range(20 if lease.on_gpu else 2)]
        found[name] = {key: median(sample[key] for sample in samples) for key in samples[0]}
        found[f"kernels of {name}"] = _kernels_of(engine, call, lease)
    return found


def _kernels_of(engine: DeviceEngine, call: Call, lease: Lease) -> dict[str, Any]:
    """Return the number of kernels (operators on a CPU) that a call runs, their milliseconds, and
    the eight kernels that take the most time."""
    engine.forward([call])
    on_gpu = lease.on_gpu
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profile:
        engine.forward([call])
        if on_gpu:
            torch.cuda.synchronize()
    # The profiler also lists the host's calls. Each of them launched a kernel.
    events = [
        event
        for event in profile.key_averages()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU")
    ]
    spent = {
        event.key[:80]: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in events
    }
    return {
        "kernels": sum(event.count for event in events),
        "milliseconds": sum(spent.values()) / 1e3,
        "most time": sorted(spent.items(), key=lambda item: -item[1])[:8],
    }


def _sample(engine: DeviceEngine, call: Call) -> dict[str, float]:
    spent: dict[str, float] = {}

    def timed(name: str, work: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            started = time.perf_counter()
            work(*arguments)
            spent[name] = spent.get(name, 0) + 1e3 * (time.perf_counter() - started)

        return run

    with (
        patch.object(CapturedGraph, "run", timed("launch", CapturedGraph.run)),
        patch.object(DeviceStream, "synchronize", timed("wait", DeviceStream.synchronize)),
    ):
        timed("total", engine.forward)([call])  # type: ignore[arg-type]
    return spent | {"python": spent["total"] - spent["launch"] - spent["wait"]}


def served(clients: int, lease: Lease) -> dict[str, Any]:
    """Time the HTTP server with this number of clients. It decodes plainly, and then with drafting.
    The server accepts seven of ten drafted tokens."""
    if missing := [name for name in SERVING if importlib.util.find_spec(name) is None]:
        return {"skipped": f"the server needs {', '.join(missing)}"}
    from eesd.serve.http.options import ServeOptions

    llm, script = scripted(lease, 7, exact=True, slots=1024)
    script.rate = 0.7
    count = 128 if lease.on_gpu else 8
    found = dict[str, Any]()
    service = Service(llm, BatchOptions(max_rows=clients, kv_memory=64 << 30, prefix_memory=0))
    with listening(service, ServeOptions()) as (address, _):
        for name, draft in [("plain", False), ("drafting", True)] * 2:  # the first two warm up
            body = {"prompt": [1] * PROMPT, "max_tokens": count, "ignore_eos": True, "draft": draft}
            found[name] = streamed(address, clients, body)
            assert found[name].pop("tokens") == script._tokens[PROMPT : PROMPT + count].tolist()
    return found


def choices(lease: Lease) -> dict[str, Any]:
    """Measure the milliseconds that a device takes to choose the tokens that follow a round's
    nodes."""
    size = 128256 if lease.on_gpu else 512
    found = dict[str, Any]()
    for name, options in SAMPLINGS.items():
        for count in (1, 9, 33):
            logits = torch.randn(count, size, device=lease.device)
            choose = partial(_choose, make_sampler(Sampling(seed=1, **options), size), [1], logits)
            found[f"{name}, {count} nodes"] = 1e3 * seconds_of(choose, lease)
    return found


def _choose(sampler: SpecSampler, tokens: list[int], logits: torch.Tensor) -> None:
    tokens.extend([1] * len(logits))  # every round has new positions
    sampler.begin_round(tokens)
    choose = sampler.chooser([Node(1, index=0)] * len(logits), 0)
    assert choose is not None
    choose(logits)
