"""Tests of the TensorRT engine with a fake of TensorRT's Python API (support/fake_tensorrt.py).
test_gpu.py runs real plans on a GPU."""

import gc
import importlib.util
import logging
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import fake_tensorrt as fake
from support import tiny_models
from support.command import assert_refused, run, succeed
from support.engine_dirs import edit_manifest, recorded
from support.harness import Harness
from support.late_gpus import allow_few_slots
from support.on_cache import OnCache
from support.trt_api import VERSIONS

import eesd
from eesd.common import integrity
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.export.build import main as build_main
from eesd.runtime import embed
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.cli import main
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.embed import Host, open_host_engines
from eesd.runtime.engines import backends, device, trt_engine, trt_plans
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.device import DeviceStream
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.trt_plans import first_slots
from eesd.runtime.llm import LLM, Speculation

CPU = DeviceStream(torch.device("cpu"))
PROMPTS = [
    [5, 9, 3],
    [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12],
    [token % 97 for token in range(3, 50)],
]
SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling(temperature=0.9, top_p=0.9, seed=4)}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both flavours of TensorRT and a GPU are installed. The CPU does the GPU's work at once."""
    fake.install(monkeypatch)
    monkeypatch.setattr(trt_engine, "device_streams", lambda stages: [CPU] * stages)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns a function that takes a number of stages and gives the engine directory of a
    four-layer model, with plans. Copy it before changing anything."""
    root = tmp_path_factory.mktemp("stages")
    model = tiny_models.build(root / "model", 97, layers=4, damping=0.3, seed=0)

    @cache
    def directory(stages: int) -> Path:
        exported = tiny_models.export_tiny(model, root / f"plans-{stages}", slots=96, stages=stages)
        fake.write_plans(exported)
        return exported

    return directory


@pytest.mark.usefixtures("installed")
def test_a_draft_vocabulary_drafts_chains_on_the_device(
    reduced_harness: Harness, tmp_path: Path
) -> None:
    directory = shutil.copytree(reduced_harness.directory, tmp_path / "plans")
    fake.write_plans(directory)
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    for name, sampling in SAMPLINGS.items():
        llm = eesd.load(
            directory, "tensorrt", speculation=Speculation("fixed:k=4", guard=False, drafter="exit")
        )
        expected = plain.generate(PROMPTS[1], sampling, max_new_tokens=40, ignore_eos=True)
        drafted = llm.generate(PROMPTS[1], sampling, max_new_tokens=40, ignore_eos=True)
        assert drafted.tokens == expected.tokens and drafted.stats.acceptance > 0.2, name


def contexts_of(llm: LLM) -> dict[str, list[fake.IExecutionContext]]:
    """The execution contexts that were made for each graph."""
    stages = [*llm.engines.verify.stages, *llm.engines.draft.stages]  # type: ignore[attr-defined, union-attr]
    return {stage.graph.file: stage.make_context.args[0]._contexts for stage in stages}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(
    "speculation",
    [
        Speculation("fixed:k=4", guard=False),
        Speculation("calibration-ts", 2, guard=False),
        Speculation("beta-ts", 3, guard=False),
        Speculation("fixed:k=4", guard=False, tree=1),
    ],
    ids=["chain of known length", "tree of width 2", "tree of width 3", "chain with a budget"],
)
@pytest.mark.parametrize(("stages", "flavour"), [(1, "tensorrt"), (3, "tensorrt-rtx")])
@pytest.mark.usefixtures("installed")
def test_tokens_match_onnx_runtime_until_the_cache_is_full(
    staged: Callable[[int], Path],
    tmp_path: Path,
    stages: int,
    speculation: Speculation,
    name: str,
    flavour: str,
) -> None:
    """At the end of the cache, calls have no room for a bucket."""
    directory = shutil.copytree(staged(stages), tmp_path / "plans")
    fake.write_plans(directory, flavour)
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    llm = eesd.load(directory, "tensorrt", speculation=speculation)
    for prompt in PROMPTS:
        expected = plain.generate(prompt, SAMPLINGS[name], max_new_tokens=200, ignore_eos=True)
        completion = llm.generate(prompt, SAMPLINGS[name], max_new_tokens=200, ignore_eos=True)
        assert completion.tokens == expected.tokens and len(prompt) + len(completion.tokens) == 96
        assert completion.stats.accepted_tokens > 5
        undrafted = llm.generate(
            prompt, SAMPLINGS[name], max_new_tokens=200, draft=False, ignore_eos=True
        )
        assert undrafted.tokens == expected.tokens


@pytest.mark.parametrize("version", VERSIONS["tensorrt"])
@pytest.mark.usefixtures("installed")
def test_every_version_of_tensorrt_gives_the_tokens_of_onnx_runtime(
    staged: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", fake.module("tensorrt", version))
    plain = eesd.load(staged(1), "ort", speculation=None, threads=1)
    llm = eesd.load(staged(1), "tensorrt", speculation=Speculation("fixed:k=4", guard=False))
    expected = plain.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True)
    assert llm.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True).tokens == expected.tokens


@pytest.mark.usefixtures("installed")
def test_a_level_of_a_tree_drafted_node_by_node_is_as_in_one_call(
    staged: Callable[[int], Path],
) -> None:
    """A plan of the draft takes one node per call. ONNX Runtime takes the level and its children in
    one call."""
    found = []
    mask = np.array(
        [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=bool
    )
    for backend in ("ort", "tensorrt"):
        engines = eesd.load(staged(1), backend).engines
        kv_cache = engines.verify.new_kv_caches()[0]
        kv_cache.reserve(20)
        verify = OnCache(engines.verify, kv_cache)
        draft = OnCache(engines.draft, kv_cache)  # type: ignore[arg-type]
        verify.prefill([5, 9, 3, 44], 0)
        draft.forward([17], [4], 4)
        found.append(draft.forward([8, 90, 31, 2], [5, 5, 6, 6], 5, 4, mask))
    expected, actual = found
    assert actual.topk_ids is not None and expected.topk_ids is not None
    np.testing.assert_allclose(actual.logits, expected.logits, atol=1e-4)
    assert np.array_equal(actual.topk_ids, expected.topk_ids)


@pytest.mark.usefixtures("installed")
def test_calls_are_padded_to_buckets_prepared_before_the_first_round(
    staged: Callable[[int], Path],
) -> None:
    """Each bucket has its own execution context with the profile for its node count."""
    llm = eesd.load(
        staged(1), "tensorrt", speculation=Speculation("calibration-ts", guard=False), exact=False
    )
    for _ in range(2):
        with llm.session(PROMPTS[2], max_new_tokens=20) as session:
            prepared = {
                file: [(context._count, context._profile) for context in made]
                for file, made in contexts_of(llm).items()
            }
            assert prepared == {
                "draft.onnx": [(1, 0), (1, 0)],
                "verify.onnx": [
                    (1, 0),
                    (2, 0),
                    (3, 0),
                    (4, 0),
                    (5, 0),
                    (6, 0),
                    (7, 0),
                    (8, 0),
                    (12, 0),
                    (13, 0),
                    (16, 1),
                ],
            }
            session.step()
    contexts = {context._count: context for context in contexts_of(llm)["verify.onnx"]}
    assert contexts[16]._runs == 1 + 3 * 2, "warm-up, and twice 46 tokens of the prompt in 3 chunks"
    rows = {count: context._shapes["logit_rows"][0] for count, context in contexts.items()}
    assert rows == {count: count for count in contexts} | {16: 1}, (
        "a chunk of a prompt has logits for one node"
    )


@pytest.mark.parametrize("exact", [None, True])
@pytest.mark.usefixtures("installed")
def test_one_kernel_computes_every_token_whatever_is_drafted(
    staged: Callable[[int], Path], exact: bool | None
) -> None:
    """Rounds, trees, plain decoding and the last slots of the cache run in one context. Only
    prompts have another context."""
    directory = staged(1)
    expected = eesd.load(directory, "ort", speculation=None, threads=1)
    llm = eesd.load(
        directory, "tensorrt", speculation=Speculation("fixed:k=3", 2, guard=False), exact=exact
    )
    for prompt in PROMPTS:
        for draft in (True, False):
            found = llm.generate(prompt, max_new_tokens=200, draft=draft, ignore_eos=True)
            assert (
                found.tokens
                == expected.generate(prompt, max_new_tokens=200, ignore_eos=True).tokens
            )
    contexts = [(context._count, context._profile) for context in contexts_of(llm)["verify.onnx"]]
    assert contexts == [(13, 0), (16, 1)] and llm.engines.in_place is bool(exact)


@pytest.fixture
def few_slots(
    staged: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory with plans whose attention may read the first 16, 48 or 112 slots."""
    directory = shutil.copytree(staged(1), tmp_path / "few")
    allow_few_slots(monkeypatch)
    fake.write_plans(directory)
    return directory


@pytest.mark.parametrize(
    "speculation",
    [Speculation("fixed:k=4", guard=False), Speculation("calibration-ts", 2, guard=False)],
)
@pytest.mark.usefixtures("installed")
def test_attention_reads_as_many_slots_for_a_token_whatever_is_drafted(
    few_slots: Path, monkeypatch: pytest.MonkeyPatch, speculation: Speculation
) -> None:
    """If the number of slots changes, other kernels may run. A round therefore ends before a token
    that plain decoding computes with a different number of slots."""
    passes: list[int] = []
    original = DeviceEngine._step

    def step(
        self: DeviceEngine,
        memory: Any,
        first: int,
        rows: int,
        count: int,
        slots: int,
        only_caches: bool,
    ) -> Any:
        if not self.is_draft:
            passes.append(slots)
        return original(self, memory, first, rows, count, slots, only_caches)

    monkeypatch.setattr(DeviceEngine, "_step", step)
    llm = eesd.load(few_slots, "tensorrt", speculation=speculation)

    def run_through(prompt: list[int], draft: bool) -> tuple[list[int], dict[int, int]]:
        """Returns the tokens of the text. The second result maps each position to the number of
        slots that the pass over its token read."""
        read: dict[int, int] = {}
        with llm.session(prompt, max_new_tokens=200, draft=draft, ignore_eos=True) as session:
            while session.finish_reason is None:
                root = len(session.tokens) - 1
                made = session.step().tokens
                read |= dict.fromkeys(range(root, root + len(made)), passes[-1])
        assert session.stats.accepted_tokens > 3 or not draft
        return session.tokens, read

    for length in range(1, 8):  # rounds begin anywhere before position 35
        prompt = PROMPTS[1][:length]
        drafted = run_through(prompt, True)
        assert drafted == run_through(prompt, False)
        assert drafted[0] == [*prompt, *tokens_of_onnx_runtime(few_slots, prompt)]
        read = [16] * 4 + [48] * 32 + [112] * 59
        assert drafted[1] == dict(enumerate(read[length - 1 :], length - 1))


def tokens_of_onnx_runtime(directory: Path, prompt: list[int] = PROMPTS[0]) -> list[int]:
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    return plain.generate(prompt, max_new_tokens=200, ignore_eos=True).tokens


@pytest.mark.usefixtures("installed")
def test_calls_over_the_first_slots_are_prepared_before_the_first_round(few_slots: Path) -> None:
    llm = eesd.load(few_slots, "tensorrt", speculation=Speculation("fixed:k=4", guard=False))

    def prepared() -> dict[str, list[tuple[int, int]]]:
        shapes = {
            file: [context._shapes["attn_mask"] for context in made]
            for file, made in contexts_of(llm).items()
        }
        return {
            file: [(shape[2], shape[3]) for shape in of_file] for file, of_file in shapes.items()
        }

    with llm.session(PROMPTS[0]):
        found = prepared()
    assert found["verify.onnx"] == [(count, slots) for count in (13, 16) for slots in (16, 48, 112)]
    assert found["draft.onnx"] == [(1, slots) for slots in (16, 48, 112) for _ in range(2)], (
        "a forward call and a chain"
    )
    for prompt in PROMPTS:
        llm.generate(prompt, max_new_tokens=200, ignore_eos=True)
    assert prepared() == found


@pytest.mark.usefixtures("installed")
def test_rounds_of_several_node_counts_draft_beyond_any_slot(few_slots: Path) -> None:
    """The tokens of rounds that are not exact may depend on the drafts."""
    llm = eesd.load(
        few_slots, "tensorrt", speculation=Speculation("fixed:k=4", guard=False), exact=False
    )
    assert llm.engines.last_positions == ()
    made = llm.generate(PROMPTS[0], max_new_tokens=200, ignore_eos=True).tokens
    assert made == tokens_of_onnx_runtime(few_slots)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (2046, (2046,)),
        (2048, (1024, 2048)),
        (4128, (1024, 2064, 4128)),
        (32800, (4096, 8192, 16400, 32800)),
    ],
)
def test_first_slots_are_aligned_parts_of_all_slots(slots: int, expected: tuple[int, ...]) -> None:
    assert first_slots(slots) == expected


@pytest.mark.usefixtures("installed")
def test_compiled_kernels_are_saved_for_the_next_start(
    staged: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of another GPU are compiled again. A read-only directory is not an error."""
    directory = shutil.copytree(staged(1), tmp_path / "plans")
    fake.write_plans(directory, "tensorrt-rtx")

    def caches() -> list[fake.IRuntimeCache]:
        llm = eesd.load(directory, "tensorrt", speculation=Speculation("calibration-ts"))
        llm.generate(PROMPTS[0], max_new_tokens=5)
        return [made[0]._config._cache for made in contexts_of(llm).values()]  # type: ignore[union-attr, misc]

    assert (
        "TensorRT-RTX compiles kernels before the first text"
        in eesd.load(directory, "tensorrt").engines.notice
    )
    assert (
        not any(cache._loaded for cache in caches())
        and not eesd.load(directory, "tensorrt").engines.notice
    )
    saved = {path.name: path.read_bytes() for path in directory.glob("*.kernels")}
    assert (
        saved.keys() == {"draft.kernels", "verify.kernels"} and b"0:13" in saved["verify.kernels"]
    )
    assert all(cache._loaded for cache in caches())
    monkeypatch.setattr(fake.IRuntimeCache, "_gpu", "another GPU")
    assert not any(cache._loaded for cache in caches())
    assert b"another GPU" in (directory / "draft.kernels").read_bytes()
    load_manifest(directory)

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(trt_plans, "written_whole", refuse)
    (directory / "draft.kernels").unlink()
    caches()
    assert not (directory / "draft.kernels").exists()


@pytest.mark.usefixtures("installed")
def test_messages_of_the_library_go_to_logging(
    staged: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "eesd.tensorrt"):
        eesd.load(staged(1), "tensorrt")
    assert [record.getMessage() for record in caplog.records] == ["Loaded engine", "Loaded engine"]


def kv_memory(directory: Path) -> list[torch.Tensor]:
    """Returns memory for a KV cache."""
    manifest = load_manifest(directory)
    sizes = 2, 1, manifest.geometry.num_kv_heads, manifest.gpu_slots, manifest.geometry.head_dim
    return [torch.zeros(len(stage.caches), *sizes) for stage in manifest.verify]


def embedded(directory: Path, host: Host, stream: DeviceStream = CPU) -> LLM:
    manifest = load_manifest(directory)
    engines = open_host_engines(manifest, host, [stream] * len(manifest.verify))
    return LLM(directory, manifest, engines, Speculation("beta-ts", guard=False))


def test_open_sessions_never_share_the_memory_of_the_host(staged: Callable[[int], Path]) -> None:
    directory = staged(1)
    host = fake.host_of(directory)
    llm = embedded(directory, replace(host, kv_cache=kv_memory(directory)))
    with llm.session(PROMPTS[0]) as first:
        first.step()
        with (
            pytest.raises(EESDError, match="belongs to another open session"),
            llm.session(PROMPTS[1]),
        ):
            pass
    llm.generate(PROMPTS[1], max_new_tokens=5)  # the memory is free again

    llm = embedded(directory, replace(host, kv_cache=lambda _: kv_memory(directory)))
    with ExitStack() as stack:
        opened = [llm.session(prompt, max_new_tokens=20, ignore_eos=True) for prompt in PROMPTS]
        sessions = [stack.enter_context(session) for session in opened]
        while any(session.finish_reason is None for session in sessions):
            for session in sessions:
                if session.finish_reason is None:
                    session.step()
    for prompt, session in zip(PROMPTS, sessions, strict=True):
        assert (
            session.tokens[len(prompt) :]
            == llm.generate(prompt, max_new_tokens=20, ignore_eos=True).tokens
        )


def test_what_overflowed_in_one_request_does_not_reach_the_next(
    staged: Callable[[int], Path],
) -> None:
    directory = staged(1)
    memory = kv_memory(directory)
    llm = embedded(directory, replace(fake.host_of(directory), kv_cache=memory))
    expected = llm.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True).tokens
    memory[0][..., 50, :] = np.inf
    assert llm.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True).tokens == expected


def test_a_plan_that_copies_a_cache_is_refused(staged: Callable[[int], Path]) -> None:
    """If the addresses were equal, the copy would be an error. If they were different, the cache
    would never be written."""
    directory = staged(1)
    host = fake.host_of(directory)
    host.draft._copied.add("value_0")
    with pytest.raises(EESDError, match=r"plan of draft\.onnx does not update value_0 in place"):
        embedded(directory, host)


class Place(DeviceStream):
    """A device that records whether it is current. No two such devices are equal."""

    current: "list[Place]" = []  # noqa: RUF012
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @contextmanager
    def activate(self) -> Iterator[None]:
        Place.current.append(self)
        yield
        Place.current.pop()


def test_each_stage_works_in_its_own_stream_and_scratch_memory(
    staged: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and caches are copied to the host in the stream that wrote them."""
    directory = staged(3)
    places = [Place(torch.device("cpu")) for _ in range(3)]
    manifest = load_manifest(directory)
    scratch = [torch.zeros(5000, dtype=torch.uint8) for _ in places]
    engines = open_host_engines(manifest, replace(fake.host_of(directory), scratch=scratch), places)
    stages: Any = engines.verify.stages  # type: ignore[attr-defined]
    assert [stage.scratch.data_ptr() for stage in stages] == [
        memory.data_ptr() for memory in scratch
    ]
    cache: Any = engines.verify.new_kv_caches()[0]
    outputs = OnCache(engines.verify, cache).forward([5, 9], [0, 1], 0)
    entered: list[Place] = []

    @contextmanager
    def enter(place: Place) -> Iterator[None]:
        entered.append(place)
        yield

    monkeypatch.setattr(Place, "activate", enter)
    assert outputs.logits.shape == (2, 97) and entered == [places[2]]
    cache.values(0, 1)
    assert entered == [places[2], *places]


def test_memory_of_calls_is_freed_without_the_collector(staged: Callable[[int], Path]) -> None:
    """A reference cycle would hold buffers on the GPU until the collector runs, perhaps during a
    capture."""
    llm: Any = embedded(staged(1), fake.host_of(staged(1)))
    gc.collect()
    gc.disable()
    try:
        kv_caches = llm.engines.verify.new_kv_caches()
        found: list[Any] = []
        for engine in llm.engines[:2]:
            engine.prepare(kv_caches)
            [prepared] = engine._prepared.values()
            found += [
                weakref.ref(step) for step in [*prepared.steps.values(), *prepared.loops.values()]
            ]
        assert len(found) > 3
        del kv_caches, prepared
        assert not any(reference() for reference in found)
    finally:
        gc.enable()


@pytest.mark.parametrize("stages", [1, 2])
def test_embedded_llm_runs_on_the_engines_and_memory_of_the_host(
    staged: Callable[[int], Path], stages: int
) -> None:
    """An embedded LLM needs no TensorRT library, and none is installed here. The memory may consist
    of a buffer for each layer."""
    directory = staged(stages)
    expected = eesd.load(directory, "ort", speculation=None, threads=1).generate(
        PROMPTS[1], max_new_tokens=60
    )
    for split in (
        lambda shards: shards if stages > 1 else shards[0],
        lambda shards: [layer for s in shards for layer in s],
    ):
        memory = [shard.fill_(np.nan) for shard in kv_memory(directory)]
        llm = embedded(directory, replace(fake.host_of(directory), kv_cache=split(memory)))
        assert llm.generate(PROMPTS[1], max_new_tokens=60).tokens == expected.tokens
        assert all(shard.any() for shard in memory), "the cache is not in the host's memory"


def test_a_service_runs_in_the_rows_that_the_host_lends(
    staged: Callable[[int], Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(staged(1), tmp_path / "plans")
    fake.write_plans(directory, batch=2)
    lent: list[tuple[int, torch.Tensor]] = []

    def lend(rows: int) -> list[torch.Tensor]:
        [memory] = kv_memory(directory)
        memory = memory.expand(-1, -1, rows, -1, -1, -1).contiguous()
        lent.append((rows, memory))
        return [memory]

    llm = embedded(directory, replace(fake.host_of(directory), kv_cache=lend))
    service = Service(llm, BatchOptions(max_rows=2))
    found = service.generate(llm.request(PROMPTS[2], max_new_tokens=20, ignore_eos=True)).tokens
    service.close()
    assert [rows for rows, _ in lent] == [2, 1] and all(memory.any() for _, memory in lent)
    assert found == llm.generate(PROMPTS[2], max_new_tokens=20, ignore_eos=True).tokens
    llm = embedded(directory, replace(fake.host_of(directory), kv_cache=kv_memory(directory)))
    with pytest.raises(
        EESDError, match="kv_cache given is for one sequence; for 2 rows give a function"
    ):
        Service(llm, BatchOptions(max_rows=2))


def test_embedding_refuses_engines_and_memory_that_do_not_match(
    staged: Callable[[int], Path],
) -> None:
    directory = staged(1)
    manifest = load_manifest(directory)
    host = fake.host_of(directory)

    def opened(**changes: Any) -> Engines:
        return open_host_engines(manifest, replace(host, **changes), [CPU])

    with pytest.raises(
        EESDError, match="The manifest has 1 stages of verify, but 2 engines were given"
    ):
        opened(verify=[*host.verify, *host.verify])
    with pytest.raises(EESDError, match=r"given for verify\.onnx has other inputs"):
        opened(verify=[host.draft])
    # The memory of another library becomes a tensor, whatever its address is.
    (fine,) = kv_memory(directory)
    odd = torch.from_numpy(np.zeros(fine.numel() + 1, np.float32)[1:]).view(fine.shape)
    for memory, words in (
        (
            [torch.zeros(3)],
            r"kv_cache given is \[3\] of torch.float32 on cpu at .* \[5, 2, 1, 2, 112, 8\]",
        ),
        ([fine, fine], "2 tensors are given as kv_cache, and these engines need 1"),
        ([*fine][1:], "4 tensors are given as kv_cache, and these engines need 5"),
        (fine.numpy(), "kv_cache given must be tensors of torch"),
        ([odd], r"kv_cache given is .* at a multiple of 256 bytes"),
    ):
        with pytest.raises(EESDError, match=words):
            opened(kv_cache=memory).verify.new_kv_caches()
    context = host.make_context(host.verify[0])
    with pytest.raises(EESDError, match="make_context gave a context that is in use already"):
        opened(make_context=lambda _: context).verify.prepare(opened().verify.new_kv_caches())
    with pytest.raises(
        EESDError, match="5 bytes of scratch memory are given, and these engines need 4096"
    ):
        opened(scratch=torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(
        EESDError, match="There are 1 stages of verify, and 2 tensors of scratch memory are given"
    ):
        opened(scratch=[host.scratch, host.scratch])
    for scratch in (
        torch.zeros(5001, dtype=torch.uint8)[1:],
        torch.zeros(5000, 2, dtype=torch.uint8)[:, 0],
    ):
        with pytest.raises(
            EESDError, match="need contiguous memory on cpu, at a multiple of 256 bytes"
        ):
            opened(scratch=scratch)


def test_inputs_at_an_odd_address_are_refused(
    staged: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = embedded(staged(1), fake.host_of(staged(1)))
    monkeypatch.setattr(device, "HOST_ALIGNMENT", 1 << 40)
    with pytest.raises(EESDError, match="TensorRT needs input_ids aligned"):
        llm.generate(PROMPTS[0], max_new_tokens=2)


def stream_of(handle: int, gpu: int = 0) -> Any:
    """Returns a stand-in for a stream of the service."""
    return SimpleNamespace(cuda_stream=handle, device_index=gpu)


def test_streams_that_cannot_do_are_refused(
    staged: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default stream cannot be captured, and two streams of one device would not be ordered."""
    directory = staged(3)
    host = fake.host_of(directory)
    first = stream_of(16)
    second = stream_of(32, gpu=1)
    for stream in (stream_of(0), stream_of(1), 0):
        with pytest.raises(EESDError, match="is the default stream"):
            embed.embed(directory, replace(host, stream=stream), Speculation())
    with pytest.raises(
        EESDError, match=r"is a str; give a torch\.cuda\.Stream, or the int of a cudaStream_t"
    ):
        embed.stage_streams(replace(host, stream=["16", "16", "16"]), 3)  # type: ignore[list-item]
    with pytest.raises(EESDError, match="has 3 stages of verify, but 2 streams were given"):
        embed.embed(directory, replace(host, stream=[first, second]), Speculation())
    with pytest.raises(EESDError, match="on one device must share its stream"):
        embed.embed(
            directory, replace(host, stream=[first, second, stream_of(48, gpu=1)]), Speculation()
        )
    assert [
        place.device.index
        for place in embed.stage_streams(replace(host, stream=[first, second, second]), 3)
    ] == [0, 1, 1]
    monkeypatch.setattr(torch.cuda, "ExternalStream", stream_of)
    for lent in (first, 16):
        assert [place.handle for place in embed.stage_streams(replace(host, stream=lent), 3)] == [
            16,
            16,
            16,
        ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_real_library_without_a_driver_ends_in_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real TensorRT-RTX cannot load a real plan without CUDA, and prints many lines about
    it."""
    real = pytest.importorskip("tensorrt_rtx")
    model = tiny_models.build(tmp_path / "model", 97, layers=2, damping=0.3, seed=0, head_dim=32)
    directory = tiny_models.export_tiny(model, tmp_path / "plans", slots=64, dtype="float16")
    succeed(build_main, directory, "--target", "tensorrt-rtx", "--prefill-chunk", 32)
    monkeypatch.setattr(trt_plans, "nvidia_driver", lambda: True)
    monkeypatch.setattr(trt_plans, "compute_capability", lambda: "8.9")
    options = ("--engine-dir", directory, "-p", "hello", "--backend", "tensorrt")
    assert_refused(run(main, *options), "torch is missing or sees no GPU", "update the driver")
    monkeypatch.setattr(backends, "nvidia_driver", lambda: True)
    assert "an NVIDIA driver, but the CPU runs the engines" in eesd.load(directory).engines.notice
    monkeypatch.setattr(backends, "torch_sees_gpu", lambda: True)
    assert_refused(
        run(main, *options), "tensorrt-rtx cannot load", "verify.plan", "update the NVIDIA driver"
    )
    # This is a TypeError, which pybind11 raises if the library returns a null pointer.
    monkeypatch.setattr(real, "Runtime", len)
    assert_refused(
        run(main, *options), "tensorrt-rtx", "gives no Runtime here", "update the NVIDIA driver"
    )
    monkeypatch.setattr(real, "Builder", len)
    assert_refused(
        run(build_main, directory, "--force"), "gives no Builder here", "update the NVIDIA driver"
    )


Damage = Callable[[Path], Any]


def edited(change: Callable[[bytes], bytes], name: str = "verify.plan") -> Damage:
    """Return a function that changes the bytes of a file."""
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


def stripped(damage: Damage) -> Damage:
    """Returns a function that does the same damage to a directory whose plans have no weights."""
    return lambda directory: (fake.write_plans(directory, stripped=True), damage(directory))


def with_old_weights(directory: Path) -> None:
    """Write other weights without changing the file's modification time."""
    weights = directory / "weights.bin"
    written = weights.stat().st_mtime_ns
    weights.write_bytes(weights.read_bytes()[::-1])
    os.utime(weights, ns=(written, written))


def swap(directory: Path) -> None:
    for name in ("verify.plan", "draft.plan"):
        text = (directory / name).read_text()
        old = name.replace(".plan", ".onnx")
        new = "draft.onnx" if name == "verify.plan" else "verify.onnx"
        (directory / name).write_text(text.replace(old, new))


def change_plans(**values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        plans = load_manifest(directory).plans
        edit_manifest(
            directory, "plans", {file: vars(plan) | values for file, plan in plans.items()}
        )

    return change


STRIPPED = (
    ".plan.onnx or the weights beside it are missing or were changed",
    "eesd-build --strip-weights",
)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda d: edit_manifest(d, "plans", {}),
            ("has no plan of draft.onnx", "build it with: eesd-build"),
        ),
        (
            lambda d: (d / "verify.plan").unlink(),
            ("has no plan of verify.onnx", "build it with: eesd-build"),
        ),
        (
            edited(lambda plan: plan[:-1]),
            ("verify.plan has", "where the manifest says", "eesd-build --force"),
        ),
        (
            edited(lambda plan: b"x" * len(plan)),
            ("verify.plan is not the file that was written there", "eesd-build --force"),
        ),
        (
            recorded(edited(lambda plan: b"x" * len(plan))),
            (
                "tensorrt cannot load",
                "verify.plan (Magic tag does not match)",
                "eesd-build --force",
            ),
        ),
        (  # nodes that pad a round would have no room after the text
            recorded(edited(lambda plan: plan.replace(b'"slots": 112', b'"slots":  96'))),
            (
                "plan of verify.onnx is for caches of 96 slots, and its calls need 112",
                "eesd-build --force",
            ),
        ),
        (recorded(swap), ("verify.plan is not the plan of verify.onnx", "eesd-build --force")),
        (
            change_plans(version="1.0"),
            ("built by tensorrt 1.0 and 99.1 is installed", "eesd-build --force"),
        ),
        (
            change_plans(compute_capabilities=["8.6", "12.0"]),
            ("for compute capability 8.6, 12.0 and this GPU has 8.9",),
        ),
        (
            change_plans(flavour="tensorrt-xl"),
            ("of an unknown flavour 'tensorrt-xl'", "eesd-build --force"),
        ),
        (
            change_plans(profiles=[[1, 4, 5], [1, 16, 16]]),
            ("was not built for the manifest's rounds of 13 nodes in 96 slots",),
        ),
        (stripped(lambda d: (d / "verify.plan.onnx").unlink()), STRIPPED),
        (stripped(edited(lambda graph: graph + b"\0", "verify.plan.onnx")), STRIPPED),
        (stripped(with_old_weights), STRIPPED),
        (
            stripped(recorded(edited(lambda plan: plan.replace(b'ped": true', b'ped":    0')))),
            ("gives no Refitter here",),
        ),
    ],
)
@pytest.mark.usefixtures("installed")
def test_unusable_plans_are_refused_with_a_remedy(
    staged: Callable[[int], Path], tmp_path: Path, damage: Damage, words: tuple[str, ...]
) -> None:
    directory = shutil.copytree(staged(1), tmp_path / "plans")
    damage(directory)
    assert_refused(
        run(main, "--engine-dir", directory, "-p", "hello", "--backend", "tensorrt"), *words
    )


@pytest.mark.usefixtures("installed")
def test_plans_are_refused_on_gpus_without_kernels_for_them(
    staged: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX has no kernels for data centre GPUs, and no bfloat16 kernels for Turing."""
    directory = shutil.copytree(staged(1), tmp_path / "plans")
    for gpu in ("9.0", "10.0", "7.5"):
        monkeypatch.setattr(trt_plans, "compute_capability", lambda gpu=gpu: gpu)
        manifest = fake.write_plans(directory, "tensorrt-rtx")
        if gpu != "7.5":
            result = run(main, "--engine-dir", directory, "-p", "hello", "--backend", "tensorrt")
            assert_refused(
                result,
                f"tensorrt-rtx 99.1 has no kernels for compute capability {gpu}",
                "--target tensorrt",
            )
            manifest = fake.write_plans(directory, "tensorrt", capabilities=(gpu,))
        trt_plans.PlanDirectory(directory, manifest)
    with pytest.raises(
        EESDError, match=r"no kernels for bfloat16 on GPUs .* 7\.5; export with --dtype float16"
    ):
        trt_plans.PlanDirectory(directory, replace(manifest, dtype="bfloat16"))


def test_a_missing_driver_or_library_is_named(
    engine_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write_plans(engine_copy)
    command = ("--engine-dir", engine_copy, "-p", "hello", "--backend", "tensorrt")
    with monkeypatch.context() as absent:
        absent.setattr(importlib.util, "find_spec", lambda _: None)
        assert_refused(run(main, *command), "need tensorrt; install it with: pip", "[tensorrt]'")
    fake.install(monkeypatch)
    monkeypatch.setattr(trt_plans, "nvidia_driver", lambda: False)
    assert_refused(
        run(main, *command), "Plans run on an NVIDIA GPU", "no driver answers here", "--backend ort"
    )


@pytest.mark.parametrize("flavour", trt_plans.FLAVOURS)
@pytest.mark.usefixtures("installed")
def test_plans_without_weights_get_those_of_the_directory(
    staged: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    """If a file is newer than the manifest, whole hashes are compared first, because samples may
    miss a change."""
    monkeypatch.setattr(integrity, "_SAMPLES", 2)
    directory = shutil.copytree(staged(2), tmp_path / "plans")
    fake.write_plans(directory, flavour, stripped=True)
    weights = directory / "weights.bin"
    command = ("--engine-dir", directory, "-p", "hello", "--backend", "tensorrt")
    for _ in range(2):
        llm = eesd.load(
            directory, "tensorrt", speculation=Speculation("fixed:k=4", guard=False, drafter="exit")
        )
        found = llm.generate(PROMPTS[0], max_new_tokens=200, ignore_eos=True)
        assert found.tokens == tokens_of_onnx_runtime(directory) and found.stats.acceptance > 0.2
        weights.touch()
    assert (
        embedded(directory, fake.host_of(directory)).generate(PROMPTS[0], max_new_tokens=9).tokens
        != found.tokens[:9]
    )
    middle = weights.stat().st_size // 2
    edited(
        lambda data: data[:middle] + bytes([data[middle] ^ 64]) + data[middle + 1 :], "weights.bin"
    )(directory)
    assert_refused(run(main, *command), "weights.bin was changed after it was written")
    fake.write_plans(directory, flavour, stripped=True)
    monkeypatch.setattr(fake.OnnxParserRefitter, "refit_from_file", lambda *_: False)
    assert_refused(run(main, *command), f"{flavour} cannot refit", "eesd-build --force")


@pytest.mark.parametrize("backend", ["tensorrt", "torch"])
@pytest.mark.usefixtures("installed")
def test_nvtx_ranges_are_paired_in_the_order_of_calls(
    staged: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """NVTX ranges are paired for single requests and for a batch, even if a call fails."""
    ranges: list[str] = []
    monkeypatch.setattr(
        torch.cuda.nvtx,
        "_nvtx",
        SimpleNamespace(rangePushA=ranges.append, rangePop=lambda: ranges.append("")),
    )
    speculation = Speculation("fixed:k=3", guard=False, drafter="exit")
    plain, llm = (
        eesd.load(staged(1), backend, speculation=speculation, nvtx=nvtx) for nvtx in (False, True)
    )
    expected = plain.generate(PROMPTS[2], max_new_tokens=20, ignore_eos=True)
    assert ranges == []
    assert llm.generate(PROMPTS[2], max_new_tokens=20, ignore_eos=True).tokens == expected.tokens
    count = len(ranges) // 2 - 3 * expected.stats.rounds
    order = ["prefill"] * count + ["draft", "verify", "accept"] * expected.stats.rounds
    assert count > 0 and ranges == [text for name in order for text in (name, "")]
    service = Service(llm, BatchOptions(max_rows=1))
    assert (
        service.generate(llm.request(PROMPTS[2], max_new_tokens=20, ignore_eos=True)).tokens
        == expected.tokens
    )
    service.close()
    monkeypatch.setattr(DeviceEngine, "_run", lambda *_: 1 // 0)
    ranges.clear()
    with pytest.raises(ZeroDivisionError):
        llm.generate([5])
    assert ranges == ["draft", "", "verify", ""]
    monkeypatch.setattr(backends, "torch_sees_gpu", lambda: False)
    assert_refused(
        run(main, "--engine-dir", staged(1), "-p", "hello", "--nvtx"),
        "NVTX ranges need a GPU",
        "update the driver",
    )
