"""Tests of batches with the engine that torch and the GPU backends share. Every request gets the
tokens that it gets alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support import fake_tensorrt, tiny_models
from support.batches import OPTIONS, alone, arrive_at_random, few, logprobs, requests, run
from support.call_rules import violations
from support.command import slow_but
from support.fake_cuda import Machine
from support.harness import Harness
from support.late_gpus import Setting, Shared, late_llm

from eesd.common.errors import EESDError
from eesd.runtime.batch.scheduler import Scheduler
from eesd.runtime.batch.service import Service
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.device import device_streams
from eesd.runtime.engines.device_cache import DeviceKVCache, RowMemory
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.torch_engine import TorchStageRunner
from eesd.runtime.llm import LLM, Speculation, load
from eesd.runtime.request import Request


@pytest.fixture(scope="module")
def llm(harness: Harness) -> LLM:
    return load(harness.directory, "torch", threads=1)


@pytest.fixture(scope="module")
def staged(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same model with a verify graph in three stages. Each stage has separate caches."""
    model = harness.directory.parent / "model"
    directory = tiny_models.export_tiny(
        model, tmp_path_factory.mktemp("staged") / "plans", slots=384, stages=3
    )
    return load(directory, "torch", threads=1)


@pytest.fixture(scope="module")
def whole(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same model. Its draft is all its layers in 4 bits."""
    model = harness.directory.parent / "model"
    directory = tiny_models.export_tiny(
        model, tmp_path_factory.mktemp("whole") / "plans", slots=384, whole=True
    )
    return load(directory, "torch", threads=1)


@pytest.mark.parametrize("levels", [None, 0, 4])
def test_tokens_are_those_of_a_request_alone(llm: LLM, levels: int | None) -> None:
    given = list(requests(16))
    records = run(Scheduler(llm, replace(OPTIONS, levels=levels)), given, every=3)
    assert [record.tokens for record in records] == [alone(llm, request) for request in given]
    if levels == 4:
        assert any(update.stats.accepted_tokens for record in records for update in record.updates)


def test_tokens_are_those_of_onnx_runtime(harness: Harness, llm: LLM) -> None:
    given = [request for request in requests(16) if request.sampling.method != "rejection"]
    other = load(harness.directory, "ort", threads=1)
    records = run(Scheduler(llm, OPTIONS), given)
    assert [record.tokens for record in records] == [alone(other, request) for request in given]


@pytest.mark.parametrize("name", ["staged", "whole"])
def test_stages_with_a_shard_each_and_drafts_of_all_layers_run_rows(
    name: str, request: pytest.FixtureRequest
) -> None:
    given = list(requests(8, seed=3))
    other = request.getfixturevalue(name)
    # Requests of the second half find kept prefixes.
    records = run(Scheduler(other, replace(OPTIONS, levels=3)), [*given, *given], every=2)
    # Rejection sampling depends on the drafts.
    llm = request.getfixturevalue("llm") if name == "staged" else other
    assert [record.tokens for record in records] == 2 * [alone(llm, request) for request in given]
    assert any(update.stats.accepted_tokens for record in records for update in record.updates)
    assert any(update.cached_tokens for record in records for update in record.updates)


def test_random_arrivals_and_cancellations(llm: LLM) -> None:
    records = arrive_at_random(llm, 24)
    assert 5 < sum(record.reason != "cancelled" for record in records) < 24


def test_logprobs_are_equal_in_every_bit(llm: LLM) -> None:
    found = [logprobs(llm, *sizes) for sizes in ((0, 1, 128), (3, 2, 7), (None, 5, 16))]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["llm", "whole"])
def test_a_service_runs_rows_in_its_thread(name: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(name)
    given = list(requests(4, seed=7))
    service = Service(llm, OPTIONS)
    try:
        assert [service.generate(request).tokens for request in given] == [
            alone(llm, request) for request in given
        ]
    finally:
        service.close()


def test_texts_of_all_lengths_share_memory_and_known_beginnings_are_copied(llm: LLM) -> None:
    scheduler = Scheduler(llm, OPTIONS)
    given = [
        Request(tokens=[7] * n, max_new_tokens=300 - n, ignore_eos=True)
        for n in (5, 90, 150, 20, 250)
    ]
    for request, record in zip(given, run(scheduler, given, every=7), strict=True):
        assert record.tokens == alone(llm, request)
    prompt = Request(tokens=[*range(90)], max_new_tokens=20, ignore_eos=True)
    first, again = (run(scheduler, [prompt])[0] for _ in range(2))
    assert first.tokens == again.tokens and [
        one.updates[0].cached_tokens for one in (first, again)
    ] == [0, 64]


def test_rows_that_change_each_other_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = TorchStageRunner.prepare

    def disturbed(runner: TorchStageRunner, inputs: object) -> Callable[[], list[torch.Tensor]]:
        call = prepare(runner, inputs)  # type: ignore[arg-type]

        def run_call() -> list[torch.Tensor]:
            results = call()
            if len(results[0]) > 1:
                results[0][1] = torch.nextafter(results[0][1], torch.tensor(torch.inf))
            return results

        return run_call

    monkeypatch.setattr(TorchStageRunner, "prepare", disturbed)
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)
    Scheduler(llm, replace(OPTIONS, max_rows=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keys_and_values_keep_their_bits(harness: Harness, dtype: str) -> None:
    """Keys and values are copied from a cache to one row and then to another row, in memory that
    grows. A row that starts again has no old values."""
    manifest = replace(harness.manifest, dtype=dtype)
    streams = device_streams(1, "cpu")
    first, second = (RowMemory(manifest, streams, rows, grow=True, spare=4) for rows in (1, 3))
    [cache] = first.caches()
    rows = second.caches()
    first.shards[0].normal_()
    second.shards[0].fill_(torch.inf)
    rows[1].reset()
    rows[1].fill(10, cache.values(0, 50))
    rows[1].reserve(200)
    assert second.version == 1 and second.slots == 256 + 4
    rows[2].reset()
    rows[2].copy_from(rows[1], 10, 60)
    assert torch.equal(second.shards[0][:, :, 2:, :, 10:60], first.shards[0][..., :50, :])
    assert torch.equal(second.shards[0][:, :, 1:2, :, 10:60], first.shards[0][..., :50, :])
    rows[2].clear(20)
    assert second.shards[0][:, :, 2, :, 10:20].any() and not second.shards[0][:, :, 2, :, 20:].any()
    assert (
        not second.shards[0][:, :, 1, :, 60:].any()
        and second.shards[0][:, :, 0, :, :128].isinf().all()
    )
    assert rows[0].slot_bytes == cache.slot_bytes == first.shards[0][..., 0, :].nbytes
    rows[1].reset()
    assert second.slots == 128 + 4 and not second.shards[0][:, :, 1].any()


def test_trees_of_several_rows_are_those_of_a_row_alone(llm: LLM) -> None:
    """Batches only draft chains, but rows can also run trees."""
    engine = llm.engines.verify
    seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    caches = engine.new_kv_caches(3)
    calls = []
    for row, length in ((0, 9), (2, 20)):
        kv_cache = caches[row]
        kv_cache.reserve(40)
        engine.forward([Call(kv_cache, list(range(length)), range(length), 0, logits=False)])
        calls.append(
            Call(kv_cache, [5, 6, 7 + row], [length, length + 1, length + 1], length, length, seen)
        )
    alone = [engine.forward([call])[0].logits.copy() for call in calls]
    for found, expected in zip(engine.forward(calls), alone, strict=True):
        np.testing.assert_allclose(found.logits, expected, rtol=0, atol=1e-5)
        assert found.argmax(2) == expected[2].argmax()


def test_a_16_bit_batch_is_exact_or_refused(tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    llm = load(
        tiny_models.export_tiny(model, tmp_path / "plans", slots=384, dtype="bfloat16"),
        "torch",
        threads=1,
    )
    try:
        scheduler = Scheduler(llm, replace(OPTIONS, levels=0))
    except EESDError as error:  # processors differ
        assert "max_rows 1" in str(error)
        return
    given = [replace(request, draft=False) for request in requests(8)]
    records = run(scheduler, given)
    assert {record.reason for record in records} <= {"length", "stop"}
    exactness = Exactness(llm.manifest)
    exactness.check(llm.engines.verify)
    # On other processors the tokens depend on the pieces of a prompt, even without a batch.
    if not exactness.chains.differing:
        assert [record.tokens for record in records] == [alone(llm, request) for request in given]


def fill(path: Path, whole: bool) -> None:
    model = tiny_models.build(path / "model", 97, layers=4, damping=0.3, seed=0)
    tiny_models.export_tiny(model, path / "plans", slots=96, whole=whole)
    fake_tensorrt.write_plans(path / "plans", batch=3)


@pytest.fixture(scope="module")
def planned(shared: Shared) -> Path:
    """An engine directory with plans that take three rows."""
    return shared("late-rows", partial(fill, whole=False)) / "plans"


@pytest.fixture(scope="module")
def planned_whole(shared: Shared) -> Path:
    """An engine directory like ``planned`` whose draft is all layers in 4 bits."""
    return shared("late-rows-whole", partial(fill, whole=True)) / "plans"


@pytest.mark.parametrize(
    ("name", "cuda_graphs"),
    slow_but([("planned", True), ("planned", False), ("planned_whole", True)], ("planned", True)),
)
def test_rows_on_a_gpu_whose_work_is_late(
    name: str, cuda_graphs: bool, request: pytest.FixtureRequest
) -> None:
    """With plans, every call has all rows, and all rows have the same node count. Each kind of call
    is captured once. The calls follow the rules of CUDA and TensorRT."""
    planned = request.getfixturevalue(name)
    given = few(6)
    plain = load(planned, "ort", threads=1)
    setting = Setting(1, 1, Speculation(), cuda_graphs=cuda_graphs)
    with late_llm(planned, setting, seed=0) as (machine, llm):
        scheduler = Scheduler(llm, replace(OPTIONS, max_rows=3, levels=3))
        for seed in range(3):
            machine.reseed(seed)
            records = run(scheduler, given, every=2)
            assert [record.tokens for record in records] == [
                alone(plain, request) for request in given
            ]
        assert any(update.cached_tokens for record in records for update in record.updates)
        assert violations(machine) == []
        rounds = [call for call in machine.log if call.name == "replay"]
        assert bool(rounds) == cuda_graphs


def clear_nothing(patch: pytest.MonkeyPatch, _: Machine) -> None:
    patch.setattr(RowMemory, "reset", lambda *_: None)
    patch.setattr(DeviceKVCache, "clear", lambda *_: None)
    patch.setattr(
        RowMemory,
        "_zeros",
        lambda self, _, shape: torch.empty(shape, device=self.streams[0].device),
    )


def copy_rows_in_another_stream(patch: pytest.MonkeyPatch, _: Machine) -> None:
    patch.setattr(RowMemory, "active_shards", lambda self: iter(self.shards))


def leave_prompts_where_they_ran(patch: pytest.MonkeyPatch, _: Machine) -> None:
    patch.setattr(DeviceKVCache, "copy_from", lambda *_: None)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    "mutate",
    slow_but(
        [clear_nothing, copy_rows_in_another_stream, leave_prompts_where_they_ran], clear_nothing
    ),
)
def test_a_mistake_on_a_gpu_is_noticed(
    planned: Path, mutate: Callable[[pytest.MonkeyPatch, Machine], None]
) -> None:
    given = few(6)
    plain = load(planned, "ort", threads=1)
    with (
        late_llm(planned, Setting(1, 1, Speculation()), seed=0) as (machine, llm),
        pytest.MonkeyPatch.context() as patch,
    ):
        mutate(patch, machine)
        try:
            scheduler = Scheduler(llm, replace(OPTIONS, max_rows=3, levels=3))
        except EESDError as error:
            assert "max_rows 1" in str(error)  # the check of rows refuses it
            return
        found = []
        for seed in range(10):
            machine.reseed(seed)
            found += [record.tokens for record in run(scheduler, given, every=2)]
        assert found != 10 * [alone(plain, request) for request in given]


def test_what_plans_and_memory_do_not_hold_is_refused(planned: Path) -> None:
    with late_llm(planned, Setting(1, 1, Speculation()), seed=0) as (_, llm):
        with pytest.raises(
            EESDError, match=r"take 3 rows in a call, and the batch may have 5; .* --batch 5"
        ):
            Scheduler(llm, OPTIONS)
        with pytest.raises(EESDError, match=r"3 rows of \d+ slots take 1 MiB of the GPU's memory"):
            Scheduler(llm, replace(OPTIONS, max_rows=3, kv_memory=1000))
