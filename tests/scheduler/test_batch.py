"""Tests of the batch. Every request has the bits that it has alone, whatever other requests run."""

import os
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import tiny_models
from support.batches import (
    OPTIONS,
    SAMPLINGS,
    Record,
    alone,
    arrive_at_random,
    check_pauses,
    logprobs,
    requests,
    run,
)
from support.command import export_engine
from support.harness import Harness
from support.without_operators import needs_operators

from eesd.common.errors import EESDError
from eesd.controllers import load_rule
from eesd.controllers.calibration import CostAwareTS
from eesd.runtime.batch.scheduler import PASSING, SHORT, BatchOptions, Scheduler
from eesd.runtime.batch.service import ClosedError, Service
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import operators
from eesd.runtime.engines.base import Call, StepOutputs, Values
from eesd.runtime.engines.cpu_cache import CpuKVCache
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_engine import OrtEngine
from eesd.runtime.llm import LLM, Speculation, load
from eesd.runtime.prefix_cache import BLOCK, PrefixCache
from eesd.runtime.request import Generation, QueueFullError, Request, Update
from eesd.runtime.session import Session
from eesd.serve.page.routes import estimates

ENGINE: Any = OrtEngine if operators.missing() else CpuEngine
CACHE: Any = HostKVCache if operators.missing() else CpuKVCache
"""The engines of batches on the CPU."""


@pytest.fixture(scope="module")
def llm(harness: Harness) -> LLM:
    return load(harness.directory, "ort", threads=1)


@pytest.mark.parametrize("levels", [None, 0, 1, 4])
@pytest.mark.parametrize("every", [0, 3])
def test_tokens_are_those_of_a_request_alone(llm: LLM, levels: int | None, every: int) -> None:
    given = list(requests(24))
    scheduler = Scheduler(llm, replace(OPTIONS, levels=levels))
    records = run(scheduler, given, every)
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request)
        assert record.reason in ("stop", "length")
        drafted = sum(len(update.rejected) for update in record.updates)
        assert levels != 0 or not drafted or request.sampling.method == "rejection"
    assert scheduler.running == scheduler.prefilling == 0
    if levels == 4:
        assert any(update.stats.accepted_tokens for record in records for update in record.updates)


@pytest.mark.parametrize("levels", [None, 2])
def test_rows_beside_others_draft_trees(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, levels: int | None
) -> None:
    """Trees have the same width as without a batch, and the tokens equal the tokens of plain
    decoding. The load determines which nodes are left out."""
    other = llm.with_speculation(Speculation(tree=3, drafter="exit"))
    given = [request for request in requests(24) if request.sampling.method != "rejection"]
    expected = [alone(llm, request) for request in given]
    scheduler = Scheduler(other, replace(OPTIONS, levels=levels))
    if levels is None:  # with an untrained head the rule would soon stop drafting
        monkeypatch.setattr(load_rule, "DEAREST", 1e9)
        monkeypatch.setattr(
            scheduler.rule, "goes_on", lambda reaches, depth, _: len(reaches) * (depth < 3)
        )
        monkeypatch.setattr(scheduler.rule, "levels", lambda values: [*map(len, values)])
        monkeypatch.setattr(scheduler.rule, "price", lambda nodes: 0.02 * nodes)
    called: list[Sequence[Call]] = []
    forward = scheduler._engine.forward

    def noted(calls: Sequence[Call]) -> Sequence[StepOutputs]:
        called.append(calls)
        return forward(calls)

    monkeypatch.setattr(scheduler._engine, "forward", noted)
    records = run(scheduler, given)
    assert [record.tokens for record in records] == expected
    several = [call for calls in called for call in calls if len(calls) > 1 and call.logits]
    assert sum(call.tree_mask is not None for call in several) > 20
    assert max(len(call.tokens) for call in several) > 1 + (levels or 1)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_tokens_of_quantized_engines_are_those_of_a_request_alone(
    tmp_path: Path, quantize: str
) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    directory = export_engine(
        model, tmp_path / "plans", "--quantize", quantize, "--max-seq-len", 384
    )
    llm = load(directory, "ort", threads=1)
    given = list(requests(12))
    for levels in (0, 3):
        records = run(Scheduler(llm, replace(OPTIONS, levels=levels)), given, every=3)
        assert [record.tokens for record in records] == [alone(llm, request) for request in given]


@pytest.mark.skipif(bool(operators.missing()), reason="the operators are not built")
def test_texts_over_small_caches_get_the_bits_that_they_get_alone(harness: Harness) -> None:
    llm = load(harness.directory, "ort", threads=1, kv_cache_dtype="int8")
    given = list(requests(12))
    for levels in (0, 3):
        records = run(Scheduler(llm, replace(OPTIONS, levels=levels)), given, every=3)
        assert [record.tokens for record in records] == [alone(llm, request) for request in given]
    assert logprobs(llm, 0, 1, 256) == logprobs(llm, 3, 2, 7) == logprobs(llm, None, 5, 16)


def test_logprobs_are_equal_in_every_bit(llm: LLM) -> None:
    """The bits of the logits do not depend on drafts, on other rows or on the pieces of the
    prompt."""
    found = [logprobs(llm, *sizes) for sizes in ((0, 1, 256), (3, 2, 7), (None, 5, 16))]
    assert found[0] == found[1] == found[2]
    first = found[0][0][0]
    assert (
        first is not None
        and first.logprob is not None
        and len(first.top) == 5
        and first.logprob <= first.top[0][1]
    )


def test_prompts_are_cut_into_even_pieces(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small piece would read all weights for few tokens."""
    sizes = []
    add_piece = Session.add_piece

    def note(session: Session, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        sizes.append(len(piece.tokens))
        add_piece(session, piece, outputs, seconds)

    scheduler = Scheduler(llm, replace(OPTIONS, prefill_tokens=256, prefix_memory=0))
    # Without this, the policy would depend on measured costs.
    monkeypatch.setattr(scheduler._policy, "prompt_tokens", lambda sessions, slot, most: most)
    monkeypatch.setattr(Session, "add_piece", note)
    given = [Request(tokens=[5] * (1 + length), max_new_tokens=2) for length in (300, 200, 60, 50)]
    run(scheduler, given)
    # Short prompts share a call with a piece of a long prompt that fills more than half of it.
    assert sorted(sizes) == [50, 60, 100, 200, 200]


def test_short_prompts_pass_long_ones_and_hold_them_up_little(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    add_piece = Session.add_piece

    def note(session: Session, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        done.append(len(piece.tokens) if len(session.tokens) > 100 else -len(piece.tokens))
        add_piece(session, piece, outputs, seconds)

    monkeypatch.setattr(Session, "add_piece", note)
    scheduler = Scheduler(llm, replace(OPTIONS, max_rows=24, prefix_memory=0))
    lengths = [200] * 8 + [20] * 12
    given = [Request(tokens=[5] * (1 + length), max_new_tokens=2) for length in lengths]
    run(scheduler, given)
    passed = 0
    long = 0
    for tokens in done:
        passed += max(-tokens, 0)
        long += max(tokens, 0)
        # Four requests take turns, so none comes after the last four.
        if long <= 4 * 200:
            assert passed <= SHORT + 20 + PASSING * long
    assert sum(-tokens for tokens in done[:8] if tokens < 0) >= SHORT
    assert sum(map(abs, done)) == sum(lengths)


@pytest.mark.parametrize(
    ("rows", "stretch", "prompts"),
    [(1, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 1), (12, 1, 1), (4, 1, 3)],
)
def test_prompts_beside_many_rows_take_no_more_time_than_they(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int, stretch: int, prompts: int
) -> None:
    """The costs are given and not measured. A plain round takes 20 ms, and a round with drafts
    takes ``stretch`` times that. A token of a prompt takes 1 ms, plus 10 us for each slot before
    it."""
    scheduler = Scheduler(
        llm, replace(OPTIONS, max_rows=rows + prompts, prefill_tokens=96, prefix_memory=0, levels=0)
    )
    monkeypatch.setattr(scheduler.rule, "round_seconds", lambda rows, slots: 0.02 * stretch)
    monkeypatch.setattr(
        scheduler._policy._prompts,
        "curve",
        lambda _, tokens, slot: np.array(tokens) * (1e-3 + slot * 1e-5),
    )
    pieces: list[Call] = []
    add_piece = Session.add_piece

    def note(session: Session, piece: Call, outputs: StepOutputs, seconds: float) -> None:
        pieces.append(piece)
        add_piece(session, piece, outputs, seconds)

    for row in range(rows):
        scheduler.add(
            Generation(Request(tokens=[5 + row] * 3, max_new_tokens=80, ignore_eos=True), Record())
        )
    while scheduler.running < rows:
        scheduler.step()
    monkeypatch.setattr(Session, "add_piece", note)
    records = [Record() for _ in range(prompts)]
    for record in records:
        scheduler.add(Generation(Request(tokens=[5] * 251, max_new_tokens=2), record))
    while not all(record.updates for record in records):
        scheduler.step()
        assert scheduler.running >= rows
    assert sum(len(piece.tokens) for piece in pieces) == 250 * prompts
    for piece in pieces:
        taken = len(piece.tokens) * (1e-3 + piece.slot * 1e-5)
        assert len(piece.tokens) <= 8 or taken <= 0.014 * stretch * max(8, rows, 4 * prompts) / rows
    few = rows < 8 or stretch > 1 or prompts > rows / 4
    assert len(pieces[0].tokens) > 8 if few else len(pieces) > 20


def test_prompt_logprobs_are_the_models(llm: LLM) -> None:
    prompt = [5, 9, 3, 44, 17, 8]
    [record] = run(
        Scheduler(llm, OPTIONS), [Request(tokens=prompt, max_new_tokens=1, prompt_logprobs=2)]
    )
    reported = record.updates[0].prompt_logprobs
    assert (
        reported is not None
        and [one.token for one in reported] == prompt
        and reported[0].logprob is None
    )
    for end in range(1, len(prompt)):
        with llm.session(prompt[:end]) as session:
            scores = session.peek().astype(np.float64)
        expected = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        assert reported[end].logprob == pytest.approx(expected[prompt[end]], abs=1e-9)
        assert reported[end].top[0][0] == expected.argmax()


def test_random_arrivals_and_cancellations(llm: LLM) -> None:
    records = arrive_at_random(llm, 40)
    assert 10 < sum(record.reason != "cancelled" for record in records) < 40


def test_texts_of_all_lengths_run_side_by_side(llm: LLM) -> None:
    given = [
        Request(tokens=[7] * n, max_new_tokens=300 - n, ignore_eos=True)
        for n in (5, 90, 150, 20, 250)
    ]
    records = run(Scheduler(llm, OPTIONS), given, every=7)
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request)


def test_known_beginnings_are_not_computed_again(llm: LLM) -> None:
    scheduler = Scheduler(llm, OPTIONS)
    prompt = list(range(90))
    first, again, other = (
        run(scheduler, [Request(tokens=tokens, max_new_tokens=8, ignore_eos=True)])[0]
        for tokens in (prompt, prompt, [*prompt[:40], 3, 3])
    )
    assert first.tokens == again.tokens
    assert [record.updates[0].cached_tokens for record in (first, again, other)] == [0, 64, 32]
    going_on = [*prompt, *first.tokens, 4]
    [record] = run(scheduler, [Request(tokens=going_on, max_new_tokens=4, ignore_eos=True)])
    assert record.updates[0].cached_tokens == 96
    assert (
        record.tokens
        == llm.generate(going_on, max_new_tokens=4, ignore_eos=True, draft=False).tokens
    )


def test_the_prefix_cache_keeps_what_was_used_last() -> None:
    values = np.ones((2, 2, 1, 8, 4), np.float32)
    block = values[:, :, :, :1].nbytes * BLOCK
    cache = PrefixCache(4 * block)
    texts = [[start] * (2 * BLOCK) for start in range(3)]
    for text in texts[:2]:
        cache.add(text, lambda start, stop: np.full((2, 2, 1, stop - start, 4), start, np.float32))
    assert [found[0, 0, 0, 0, 0] for found in cache.find(texts[0])] == [0, BLOCK]
    cache.add(texts[2], lambda start, stop: np.ones((2, 2, 1, stop - start, 4), np.float32))
    assert cache.bytes_used <= 4 * block
    assert [len(cache.find(text)) for text in texts] == [2, 0, 2]
    cache.add(
        [9] * (6 * BLOCK), lambda start, stop: np.ones((2, 2, 1, stop - start, 4), np.float32)
    )
    assert cache.bytes_used <= 4 * block and len(cache.find([9] * (6 * BLOCK))) == 4


def test_eos_waits_for_the_least_number_of_tokens(llm: LLM) -> None:
    stopping = next(
        request
        for request in requests(200, seed=5)
        if request.sampling.greedy
        and not request.ignore_eos
        and 1 <= len(alone(llm, replace(request, max_new_tokens=60))) < 40
    )
    short = alone(llm, replace(stopping, max_new_tokens=60))
    least = len(short) + 3
    for levels in (0, 3):
        [record] = run(
            Scheduler(llm, replace(OPTIONS, levels=levels)),
            [replace(stopping, max_new_tokens=60, min_tokens=least)],
        )
        assert len(record.tokens) >= least and record.tokens[: len(short) - 1] == short[:-1]
        assert not {*llm.manifest.eos_token_ids} & {*record.tokens[: least - 1]}


class OnlyEven:
    """Allows even tokens."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        return np.tile([True, False], 49)[:97]

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return ()


class Pairs:
    """A constraint that forces the next number after each even token."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_] | None:
        forced = self.forced(tokens, 1)
        return np.array([token in forced for token in range(97)]) if forced else None

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return [tokens[-1] + 1][:most] if tokens and tokens[-1] % 2 == 0 and tokens[-1] < 96 else []


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("constraint", [OnlyEven, Pairs])
def test_a_constraint_holds_and_drafts_change_nothing(
    llm: LLM, sampling: Sampling, constraint: type
) -> None:
    found = []
    for levels in (0, 3):
        given = [
            Request(
                tokens=[5, n],
                sampling=sampling,
                max_new_tokens=30,
                ignore_eos=True,
                constraint=constraint(),
                draft=levels > 0,
            )
            for n in range(3)
        ]
        found.append(
            [
                record.tokens
                for record in run(Scheduler(llm, replace(OPTIONS, levels=levels)), given)
            ]
        )
        for tokens in found[-1]:
            for at, token in enumerate(tokens):
                assert (mask := constraint().allowed(tokens[:at])) is None or mask[token]
    assert found[0] == found[1] or sampling.method == "rejection"


def test_forced_tokens_are_a_draft_for_nothing(llm: LLM) -> None:
    base = Request(
        tokens=[], max_new_tokens=40, ignore_eos=True, constraint=Pairs(), sampling=SAMPLINGS[1]
    )
    records = run(
        Scheduler(llm, replace(OPTIONS, levels=2)), [replace(base, tokens=[5, n]) for n in range(4)]
    )
    pairs = [
        pairwise([output for update in record.updates for output in update.tokens])
        for record in records
    ]
    behind = [
        (one, later)
        for both in pairs
        for one, later in both
        if one.token % 2 == 0 and one.token < 96
    ]
    assert behind and all(later.token == one.token + 1 for one, later in behind)
    assert all(later.source == "text" for one, later in behind if one.source == "verify")


class Broken:
    """A constraint that fails after some tokens."""

    def allowed(self, tokens: Sequence[int]) -> None:
        if len(tokens) > 5:
            raise RuntimeError("out of order")

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return ()


def test_a_request_that_fails_ends_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    given = [
        *requests(4),
        Request(tokens=[1], max_new_tokens=20, ignore_eos=True, constraint=Broken()),
    ]
    records = run(Scheduler(llm, OPTIONS), given)
    assert records[4].reason == "error" and "log says why" in str(records[4].updates[-1].error)
    assert "out of order" in caplog.text
    for request, record in zip(given[:4], records[:4], strict=True):
        assert record.tokens == alone(llm, request)


def test_an_engine_that_fails_ends_its_rows_and_no_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(llm, OPTIONS)
    forward = ENGINE.forward
    monkeypatch.setattr(ENGINE, "forward", lambda *_: 1 / 0)
    assert {record.reason for record in run(scheduler, list(requests(3)))} == {"error"}
    monkeypatch.setattr(ENGINE, "forward", forward)
    given = list(requests(4))
    assert [record.tokens for record in run(scheduler, given)] == [
        alone(llm, request) for request in given
    ]


fill = CACHE.fill


def half(kv_cache: Any, start: int, values: Values) -> None:
    values = values.copy()
    # Zeros, because values that an earlier request left there may be right.
    values[..., values.shape[3] // 2 :, :] = 0
    fill(kv_cache, start, values)


def share(scheduler: Scheduler, _: object) -> None:
    scheduler._free.append(scheduler._kv_caches[0])


@pytest.mark.parametrize(
    ("owner", "name", "mistake"), [(CACHE, "fill", half), (Scheduler, "_give_back", share)]
)
def test_a_mistake_with_caches_is_caught(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mistake: Callable[..., None]
) -> None:
    """Wrong tokens reveal keys and values that were copied only in part, or that two requests
    wrote."""
    scheduler = Scheduler(llm, OPTIONS)
    given = list(requests(12))
    expected = [alone(llm, request) for request in given]
    monkeypatch.setattr(owner, name, mistake)
    found = [record.tokens for record in run(scheduler, given)]
    # This run finds kept prefixes of the prompts.
    again = [record.tokens for record in run(scheduler, given)]
    assert [found, again] != [expected, expected]


@pytest.fixture
def service(llm: LLM) -> Iterator[Service]:
    service = Service(llm, replace(OPTIONS, max_queue=2))
    yield service
    service.close()


def test_a_service_takes_requests_from_many_threads(llm: LLM, service: Service) -> None:
    given = [replace(request, max_new_tokens=20) for request in requests(12)]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        while number not in found:
            try:
                found[number] = service.generate(given[number]).tokens
            except QueueFullError as error:
                assert error.retry_after > 0

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(12)] == [alone(llm, request) for request in given]
    assert service.load().rounds > 0 and service.alive


def test_a_full_queue_and_a_closed_service_refuse(service: Service) -> None:
    endless = Request(tokens=[1], max_new_tokens=370, ignore_eos=True)
    hold = threading.Event()
    entered = threading.Event()

    def on_update(_: Update) -> None:
        entered.set()
        hold.wait(20)

    running = [service.submit(endless, on_update)]
    assert entered.wait(20)  # the thread of the service now waits in on_update
    running += [service.submit(endless, lambda _: None) for _ in range(OPTIONS.max_rows - 1 + 2)]
    with pytest.raises(QueueFullError, match="The queue is full: "):
        service.submit(endless, lambda _: None)
    for one in running:
        one.cancel()
    hold.set()
    service.close()
    with pytest.raises(ClosedError, match="no more requests"):
        service.submit(endless, lambda _: None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_needs_a_service_of_its_own(service: Service) -> None:
    """The service has no thread."""
    child = os.fork()
    if child == 0:
        told = ""
        try:
            service.submit(Request(tokens=[5]), lambda _: None)
        except ClosedError as error:
            told = str(error)
        finally:
            os._exit("was forked" not in told or "being stopped" in told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("raises", [ValueError, SystemExit, CancelledError])
def test_a_callback_that_raises_ends_its_request_alone(
    llm: LLM, service: Service, raises: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Update] = []

    def fail(update: Update) -> None:
        seen.append(update)
        raise raises

    given = list(requests(4))
    records = [Record() for _ in given]
    for request, record in zip(given, records, strict=True):
        service.submit(request, record)
    service.submit(Request(tokens=[1], max_new_tokens=370, ignore_eos=True), fail)
    service.submit(Request(tokens=[1], max_new_tokens=1), fail)  # its first update is its last
    assert service.generate(given[0]).tokens == alone(llm, given[0])
    service.close(drain_seconds=60)
    assert [record.tokens for record in records] == [alone(llm, request) for request in given]
    assert len(seen) == 3 and [one.finish_reason for one in seen].count("cancelled") == 1
    assert (
        "The on_update of a request failed; the request ends." in caplog.text
        and service.load().running == 0
    )


def test_deadlines_and_cancelling_end_a_request(service: Service) -> None:
    late = Record()
    cancelled = Record()
    request = Request(tokens=[1], max_new_tokens=370, ignore_eos=True)
    service.submit(replace(request, seconds=1e-6), late)
    service.submit(request, cancelled).cancel()
    service.close(drain_seconds=20)
    assert late.reason == "deadline" and cancelled.reason == "cancelled"
    assert len(cancelled.tokens) < 370


def test_closing_drains_or_cancels(llm: LLM) -> None:
    for drain, reason in ((30.0, "length"), (0.0, "cancelled")):
        service = Service(llm, OPTIONS)
        record = Record()
        service.submit(Request(tokens=[1], max_new_tokens=300, ignore_eos=True), record)
        service.close(drain)
        assert record.reason == reason and not service.alive


def test_what_the_batch_believes_changes_with_what_it_sees(llm: LLM) -> None:
    service = Service(llm, replace(OPTIONS, levels=2))
    before = estimates(service.deciding)
    for request in requests(6):
        service.generate(request)
    after = estimates(service.deciding)
    service.close()
    assert before.keys() == after.keys() == {"alone", "accept", "text"}
    assert not after["alone"]
    assert before["accept"]["mean"] == [0.0, 1.0, 0.0] != after["accept"]["mean"]
    assert len(after["accept"]["covariance"]) == 6


def test_a_lone_request_reports_the_controller_that_drafted_it(llm: LLM) -> None:
    fresh = llm.with_speculation(Speculation())
    service = Service(fresh, OPTIONS)
    request = Request(tokens=[1, 2, 1, 2, 1], max_new_tokens=60, ignore_eos=True)
    service.generate(request)
    found = estimates(service.deciding)
    assert found["alone"] and found["plain_seconds"] > 0
    drafter = fresh.drafting.drafter
    text = fresh.drafting.text
    assert drafter is not None and text is not None
    controller = drafter.controller
    assert isinstance(controller, CostAwareTS)
    assert found["accept"]["mean"] == controller.accept.mean != [0.0, 1.0, 0.0]
    assert found["text"]["covariance"] == text.accept.covariance
    service.generate(replace(request, draft=False))
    assert estimates(service.deciding) == {"alone": True}
    service.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(tokens=[]), "The prompt is empty"),
        (Request(tokens=[97]), "token id 97"),
        (Request(tokens=[1] * 400), "The prompt has 400 tokens"),
        (Request(tokens=[1], stop=("x",)), "no tokenizer.json"),
        (Request(tokens=[1], max_new_tokens=380), "more memory"),
    ],
)
def test_requests_that_can_never_run_are_refused(llm: LLM, request_: Request, message: str) -> None:
    service = Service(llm, BatchOptions(kv_memory=100_000))
    with pytest.raises(EESDError, match=message):
        service.submit(request_, lambda _: None)
    service.close()


@needs_operators()
def test_rows_that_change_each_other_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CpuEngine.forward

    def disturbed(engine: CpuEngine, calls: Sequence[Call]) -> list[StepOutputs]:
        found = forward(engine, calls)
        if len(calls) > 1 and calls[1].logits:
            found[1].logits[:] = np.nextafter(found[1].logits, np.float32(np.inf))
        return found

    monkeypatch.setattr(CpuEngine, "forward", disturbed)
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)
    Scheduler(llm, replace(OPTIONS, max_rows=1))


def test_requests_pause_where_memory_runs_out(llm: LLM) -> None:
    check_pauses(llm)
