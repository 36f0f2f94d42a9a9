"""Tests of batches of engines that are not exact. Their calls have only the nodes and slots that
the longest row needs, and the tokens equal the tokens of plain decoding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_tensorrt, tiny_models
from support.batches import OPTIONS, alone, few, requests, run
from support.call_rules import violations
from support.command import succeed
from support.harness import Harness
from support.late_gpus import Setting, Shared, allow_few_slots, late_llm
from support.mutants import mutate

from eesd.common.manifest import Manifest
from eesd.runtime.batch.scheduler import Scheduler
from eesd.runtime.batch.service import Service
from eesd.runtime.engines import device_engine, torch_engine, trt_plans
from eesd.runtime.engines.base import Call
from eesd.runtime.engines.cuda_graph import CapturedGraph
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.device_engine import (
    DeviceEngine,
    make_engines,
)
from eesd.runtime.engines.forward_step import ForwardStep
from eesd.runtime.llm import LLM, Speculation, load
from eesd.runtime.request import Request
from eesd.serve.cli import main as serve_main

BUCKETS = (1, 2, 4, 13)
"""The node counts of calls of several rows, if rounds have up to 13 nodes."""
CHAINS = Speculation()
TREES = Speculation(tree=3)


@dataclass
class Steps:
    """Recorded calls over several rows, and the calls that the longest rows need. Each call is a
    tuple (rows, nodes, slots).

    Attributes:
        verify, draft: The calls of each engine.
        needed: The verify calls that the documented rule requires.
        captures: Number of captured CUDA graphs.
    """

    verify: list[tuple[int, int, int]] = field(default_factory=list)
    draft: list[tuple[int, int, int]] = field(default_factory=list)
    needed: list[tuple[int, int, int]] = field(default_factory=list)
    captures: int = 0

    def clear(self) -> None:
        for noted_calls in (self.verify, self.draft, self.needed):
            noted_calls.clear()
        self.captures = 0


@contextmanager
def noted(slots: Sequence[int]) -> Iterator[Steps]:
    """Record the calls of the engines. ``slots`` has the numbers of slots that attention may
    read."""
    steps = Steps()
    step = DeviceEngine._step
    run_calls = DeviceEngine._run
    capture = CapturedGraph.capture

    def noted_step(
        self: DeviceEngine, memory: RowMemory, first: int, rows: int, count: int, *others: Any
    ) -> Any:
        if memory.rows > 1:
            (steps.draft if self.is_draft else steps.verify).append((rows, count, others[0]))
        return step(self, memory, first, rows, count, *others)

    def noted_run(self: DeviceEngine, calls: Sequence[Call], *others: Any) -> Any:
        memory: RowMemory = calls[0].kv_cache.memory  # type: ignore[attr-defined]
        if memory.rows > 1 and not self.is_draft:
            count = min(
                bucket for bucket in BUCKETS if bucket >= max(len(call.tokens) for call in calls)
            )
            stop = max(call.slot for call in calls) + count
            steps.needed.append((memory.rows, count, min(some for some in slots if some >= stop)))
        return run_calls(self, calls, *others)

    def noted_capture(self: CapturedGraph, work: Callable[[], None]) -> None:
        steps.captures += 1
        capture(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceEngine, "_step", noted_step)
        patch.setattr(DeviceEngine, "_run", noted_run)
        patch.setattr(CapturedGraph, "capture", noted_capture)
        yield steps


@pytest.fixture(scope="module")
def planned(shared: Shared) -> Path:
    """An engine directory with plans that take three rows, and whose attention may read the first
    16, 48 or 112 slots."""

    def fill(path: Path) -> None:
        model = tiny_models.build(path / "model", 97, layers=4, damping=0.3, seed=0)
        tiny_models.export_tiny(model, path / "plans", slots=96)
        with pytest.MonkeyPatch.context() as patch:
            allow_few_slots(patch)
            fake_tensorrt.write_plans(path / "plans", batch=3)

    return shared("late-buckets", fill) / "plans"


def late_batch(planned: Path, setting: Setting, levels: int) -> tuple[Steps, Scheduler]:
    """Run a batch on a fake GPU whose work is done late, and check that the tokens are the tokens
    of plain decoding. Returns the calls after the preparation."""
    given = few(7)
    plain = load(planned, "ort", threads=1)
    with late_llm(planned, setting, seed=0) as (machine, llm), noted((16, 48, 112)) as steps:
        scheduler = Scheduler(llm, replace(OPTIONS, max_rows=3, levels=levels))
        assert steps.captures > 0
        steps.clear()
        found = [record.tokens for record in run(scheduler, given, every=2)]
        assert found == [alone(plain, request) for request in given] and violations(machine) == []
    return steps, scheduler


@pytest.mark.parametrize(
    ("setting", "levels", "counts"),
    [
        (Setting(1, 1, CHAINS, few_slots=True, exact=False), 0, {1}),
        (Setting(1, 1, CHAINS, few_slots=True, exact=False), 2, {1, 2, 4}),
        (Setting(1, 1, TREES, "tensorrt-rtx", few_slots=True, exact=False), 3, {1, 4, 13}),
        pytest.param(
            Setting(1, 1, CHAINS, "torch", few_slots=True, exact=False),
            2,
            {1, 2, 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "chains", "trees", "chains by torch"],
)
def test_a_call_has_as_few_nodes_and_slots_as_its_longest_row_needs(
    planned: Path, setting: Setting, levels: int, counts: set[int]
) -> None:
    """Each size is prepared and captured before the first request."""
    steps, _ = late_batch(planned, setting, levels)
    assert steps.verify == steps.needed and steps.captures == 0
    assert {count for _, count, _ in steps.verify} <= counts and {
        rows for rows, _, _ in steps.verify
    } == {3}
    assert max(counts) in {count for _, count, _ in steps.verify}
    assert {slots for _, _, slots in steps.verify} == {16, 48, 112}
    assert len({slots for _, _, slots in steps.draft}) > 1 or not levels, (
        "the draft reads the first slots, too"
    )


def test_an_exact_batch_has_one_node_count_and_reads_whole_caches(planned: Path) -> None:
    steps, scheduler = late_batch(planned, Setting(1, 1, CHAINS, few_slots=True), 2)
    assert steps.captures == 0
    assert set(steps.verify) == {(3, 13, 0)} and set(steps.draft) == {(3, 1, 0)}
    assert scheduler.rule.verify_size(2, 3) == (3, 3 * 13)


@contextmanager
def padded_device(
    directory: Path, speculation: Speculation = CHAINS, exact: bool | None = False
) -> Iterator[LLM]:
    """A torch LLM on the CPU that uses the calls and caches of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        pad(patch)
        yield load(directory, "torch", speculation=speculation, threads=1, exact=exact)


def pad(patch: pytest.MonkeyPatch) -> None:
    def make(
        manifest: Manifest,
        verify: Any,
        draft: Any,
        make_memory: Any,
        *,
        exact: bool | None,
        **_: Any,
    ) -> Any:
        memory = partial(RowMemory, *make_memory.args)
        slots = (
            ()
            if device_engine.has_one_count(manifest, exact)
            else trt_plans.first_slots(manifest.gpu_slots)
        )
        return make_engines(
            manifest, verify, draft, memory, pad=True, slots=(slots, slots), exact=exact
        )

    patch.setattr(trt_plans, "FEWEST_SLOTS", 48)
    patch.setattr(torch_engine, "make_engines", make)


SLOTS = (48, 96, 192, 400)
"""Attention may read these numbers of slots in the harness's caches."""


@pytest.mark.parametrize(
    ("speculation", "levels"),
    [(CHAINS, None), (CHAINS, 3), (TREES, 2)],
    ids=["load", "chains", "trees"],
)
def test_tokens_are_those_of_plain_decoding_on_the_cpu(
    harness: Harness, speculation: Speculation, levels: int | None
) -> None:
    """The tests use chains, trees and all kinds of sampling, and both short and long rows."""
    given = [
        replace(request, max_new_tokens=min(request.max_new_tokens, 30))
        for request in requests(12, seed=5)
    ]
    plain = load(harness.directory, "torch", threads=1, speculation=speculation)
    with padded_device(harness.directory, speculation) as llm, noted(SLOTS) as steps:
        scheduler = Scheduler(llm, replace(OPTIONS, levels=levels))
        steps.clear()
        records = run(scheduler, given, every=2)
    chosen = [
        number
        for number, request in enumerate(given)
        if speculation is CHAINS or request.sampling.method != "rejection"
    ]
    assert [records[number].tokens for number in chosen] == [
        alone(plain, given[number]) for number in chosen
    ]
    assert steps.verify == steps.needed and len(set(steps.verify)) > 3


def call(llm: LLM, kv_cache: Any, length: int, count: int) -> Call:
    """Returns a call with ``count`` nodes, in a row that has a text of ``length`` tokens."""
    llm.engines.verify.forward(
        [Call(kv_cache, [7, *range(3, length + 2)], range(length), 0, logits=False)]
    )
    return Call(kv_cache, [*range(20, 20 + count)], range(length, length + count), length)


def test_within_a_bucket_a_row_has_the_same_bits_whatever_is_beside_it(harness: Harness) -> None:
    with padded_device(harness.directory) as llm, noted(SLOTS) as steps:
        verify = llm.engines.verify
        kv_caches = verify.new_kv_caches(3)
        own, short, long = (
            call(llm, *row)
            for row in ((kv_caches[0], 60, 3), (kv_caches[1], 1, 1), (kv_caches[2], 90, 4))
        )
        steps.clear()
        found = [
            verify.forward(calls)[0].logits.copy()
            for calls in ([own], [own, short], [own, short, long])
        ]
        assert steps.verify == [(3, 4, 96)] * 3
        assert all(
            np.array_equal(logits.view(np.uint32), found[0].view(np.uint32)) for logits in found
        )


def test_costs_are_those_of_what_calls_compute(harness: Harness) -> None:
    """Every call has all rows, and each row is padded to the bucket of the longest row. Three nodes
    therefore cost the same as four."""
    with padded_device(harness.directory) as llm:
        verify = llm.engines.verify
        rule = Scheduler(llm, OPTIONS).rule
        kv_caches = verify.new_kv_caches(5)
        assert verify.work([call(llm, kv_caches[0], 60, 3), call(llm, kv_caches[1], 20, 1)]) == (
            5 * 4,
            96,
            5,
        )
        assert [rule.verify_size(2, nodes) for nodes in (1, 2, 3, 5)] == [
            (5, 5),
            (5, 10),
            (5, 20),
            (5, 65),
        ]
        assert rule.draft_size(1, 1) == (5, 5) and rule.padded
        assert rule.verify._seen.keys() == {5, 10, 20, 65}
        rule.begin_round(5, 96)
        assert rule.price(np.array(2)) == rule.price(np.array(3))


def see_as_the_shortest_row(patch: pytest.MonkeyPatch) -> None:
    mutate(
        patch,
        DeviceEngine,
        "_size",
        "max(call.slot for call in calls)",
        "min(call.slot for call in calls)",
    )


def forget_the_nodes(patch: pytest.MonkeyPatch) -> None:
    mutate(
        patch,
        DeviceEngine,
        "_size",
        "max(call.slot for call in calls) + count",
        "max(call.slot for call in calls)",
    )


def keep_masks_of_calls_before(patch: pytest.MonkeyPatch) -> None:
    mutate(
        patch,
        ForwardStep,
        "_set_row",
        "inputs.tree_mask[:] = self._chain if tree_mask is None else 0",
        "pass",
    )


def show_padding_of_short_rows(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, ForwardStep, "_set_row", "self._chain if tree_mask is None else 0", "1")


@pytest.mark.parametrize(
    "mistake",
    [
        see_as_the_shortest_row,
        forget_the_nodes,
        keep_masks_of_calls_before,
        show_padding_of_short_rows,
    ],
)
def test_a_mistake_is_noticed(
    harness: Harness, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """One call has rows of different lengths, with a tree and a chain."""
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)

    def logits() -> list[Any]:
        with padded_device(harness.directory) as llm:
            kv_caches = llm.engines.verify.new_kv_caches(3)
            rows = ((kv_caches[0], 3, 2), (kv_caches[1], 47, 1), (kv_caches[2], 93, 3))
            first, second, third = (call(llm, *row) for row in rows)
            trees = third._replace(positions=[93, 94, 94], context_len=93, tree_mask=tree)
            calls = ([first, trees], [first, second])
            return [
                output.logits.copy()
                for together in calls
                for output in llm.engines.verify.forward(together)
            ]

    def alone_in_memory() -> list[Any]:
        llm = load(harness.directory, "torch", threads=1)
        found = []
        for length, count, mask in ((3, 2, None), (93, 3, tree), (3, 2, None), (47, 1, None)):
            [kv_cache] = llm.engines.verify.new_kv_caches()
            kv_cache.reserve(200)
            own = call(llm, kv_cache, length, count)
            own = (
                own._replace(positions=[93, 94, 94], context_len=93, tree_mask=tree)
                if mask is not None
                else own
            )
            found.append(llm.engines.verify.forward([own])[0].logits.copy())
        return found

    def wrong() -> bool:
        return not all(
            np.allclose(a, b, atol=1e-4) for a, b in zip(logits(), alone_in_memory(), strict=True)
        )

    assert not wrong()
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        assert wrong(), "nothing notices the mistake"


def test_the_server_runs_a_batch_that_is_not_exact(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses a device as ``eesd-serve --no-exact`` does."""
    pad(monkeypatch)
    found: list[list[int]] = []
    request = Request(tokens=[5, 9, 3], max_new_tokens=20, ignore_eos=True)

    def serve(app: Any, *_: Any) -> None:
        service: Service = app.state.serving.service
        assert (
            isinstance(service.llm.engines.verify, DeviceEngine)
            and not service.llm.engines.verify.exact
        )
        found.append(service.generate(request).tokens)
        service.close()

    monkeypatch.setattr("eesd.serve.http.run.serve", serve)
    options = ("--no-exact", "--backend", "torch", "--threads", 1, "--port", 0, "--max-rows", 3)
    succeed(serve_main, "--engine-dir", harness.directory, *options)
    assert found == [alone(load(harness.directory, "torch", threads=1), request)]
