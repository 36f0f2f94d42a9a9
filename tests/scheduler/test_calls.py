"""Tests of calls that process several sequences in one pass. The bits of each token are the same as
in a separate call, and prompts run together with decoding rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import tiny_models
from support.batches import OPTIONS, SAMPLINGS, alone, requests, run
from support.command import export_engine, slow_but
from support.harness import Harness
from support.without_operators import needs_operators, without_operators

from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.runtime.batch.scheduler import Scheduler
from eesd.runtime.engines.base import Call, StepOutputs
from eesd.runtime.llm import LLM, load
from eesd.runtime.request import Request
from eesd.runtime.session import Session

TEXTS = (37, 5, 90)
"""The lengths of the texts in tokens."""


def load_own(directory: Path) -> LLM:
    """Load the directory with this project's operators."""
    return load(directory, "ort", threads=1)


def load_standard(directory: Path) -> LLM:
    """Load the directory with ONNX Runtime's own operators."""
    if load_manifest(directory).dtype != "float32":
        pytest.skip("they run float32 engines")
    with without_operators():
        return load(directory, "ort", threads=1)


LOADS = [
    pytest.param(load_own, marks=needs_operators(), id="own"),
    pytest.param(load_standard, id="standard"),
]


@pytest.fixture(scope="module", params=LOADS)
def llm(request: pytest.FixtureRequest, harness: Harness) -> LLM:
    loaded: LLM = request.param(harness.directory)
    return loaded


@pytest.fixture
def engine(llm: LLM) -> Any:
    """The class of the LLM's engines."""
    return type(llm.engines.verify)


class Texts:
    """Texts in caches. The expected results are the results of separate calls."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engines.verify
        self.size = llm.manifest.geometry.vocab_size
        self.random = np.random.default_rng(0)
        self.caches = self.engine.new_kv_caches(len(TEXTS))
        for cache, length in zip(self.caches, TEXTS, strict=True):
            cache.reserve(length + 30)
            self.engine.forward([Call(cache, self.tokens(length), range(length), 0, logits=False)])

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.random.integers(0, self.size, count)]

    def call(self, text: int, count: int, logits: bool = True) -> Call:
        start = TEXTS[text]
        return Call(
            self.caches[text], self.tokens(count), range(start, start + count), start, logits=logits
        )

    def tree(self, text: int) -> Call:
        """Returns a root with two branches. One branch has two nodes, and the other has one
        node."""
        start = TEXTS[text]
        mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], np.bool_)
        return Call(
            self.caches[text],
            self.tokens(4),
            [start, start + 1, start + 2, start + 1],
            start,
            start,
            mask,
        )

    def own(self, call: Call) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Returns the bits that a call gives when it runs alone, and the values that it writes.
        These values are then removed from the cache."""
        [outputs] = self.engine.forward([call])
        found = bits(outputs)
        written = self.written(call)
        call.kv_cache.fill(call.slot, np.zeros(written.shape, np.float32))
        assert not self.written(call).any()
        return found, written

    def written(self, call: Call) -> NDArray[np.uint32]:
        return np.array(call.kv_cache.values(call.slot, call.slot + len(call.tokens))).view(
            np.uint32
        )


def bits(outputs: StepOutputs) -> NDArray[np.uint32]:
    return outputs.logits.copy().view(np.uint32)


KINDS = (
    "float32",
    "bfloat16",
    "int4",
    "stages",
    "qwen3",
    "llama-bias",
    "mistral-window",
    "lfm2",
    "gemma4",
    "no groups",
    "one KV head",
)


@pytest.fixture(
    scope="module",
    params=slow_but(
        KINDS, "float32", "bfloat16", "int4", "stages", "mistral-window", "lfm2", "gemma4"
    ),
)
def plans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: str = request.param
    directory = tmp_path_factory.mktemp(kind)
    if kind in ("qwen3", "llama-bias", "mistral-window", "lfm2", "gemma4"):
        model = request.getfixturevalue("family_dir")(kind)
    else:
        kv_heads = {"no groups": 4, "one KV head": 1}.get(kind, 2)
        model = tiny_models.build(
            directory / "model", 97, layers=4, damping=0.3, seed=0, kv_heads=kv_heads
        )
    if kind == "int4":
        return export_engine(model, directory / "plans", "--quantize", "int4", "--max-seq-len", 384)
    stages = 3 if kind == "stages" else 1
    dtype = kind if kind == "bfloat16" else "float32"
    return tiny_models.export_tiny(
        model, directory / "plans", slots=384, stages=stages, dtype=dtype
    )


@pytest.mark.parametrize("loads", LOADS)
def test_every_node_gets_the_bits_that_it_gets_alone(plans: Path, loads: Any) -> None:
    texts = Texts(loads(plans))
    for first, second in ((1, 1), (3, 2), (1, 9)):
        for calls in (
            [texts.call(0, first), texts.tree(1), texts.call(2, second)],
            [texts.call(0, 23, logits=False), texts.call(1, first), texts.call(2, 1)],
            [texts.tree(2), texts.call(1, second)],
            [texts.call(2, 17, logits=False), texts.call(0, 3, logits=False)],
        ):
            expected = [texts.own(call) for call in calls]
            found = texts.engine.forward(calls)
            for call, outputs, (logits, written) in zip(calls, found, expected, strict=True):
                assert (texts.written(call) == written).all()
                assert len(outputs.logits) == (len(call.tokens) if call.logits else 0)
                assert (bits(outputs) == logits).all()
            assert texts.engine.work(calls).nodes == sum(len(call.tokens) for call in calls)


def test_a_call_without_tokens_is_refused(llm: LLM) -> None:
    [kv_cache] = llm.engines.verify.new_kv_caches()
    with pytest.raises(EESDError, match="no tokens"):
        llm.engines.verify.forward([Call(kv_cache, [], [], 0)])


class Noted:
    """Records the calls with logits and the calls of prompts in a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Any, verify: Any) -> None:
        self.calls: list[tuple[int, int]] = []
        forward = engine.forward

        def note(self_: Any, calls: Sequence[Call]) -> Any:
            if self_ is verify:
                self.calls.append(
                    (sum(call.logits for call in calls), sum(not call.logits for call in calls))
                )
            return forward(self_, calls)

        monkeypatch.setattr(engine, "forward", note)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, llm: LLM, engine: Any) -> Noted:
    return Noted(monkeypatch, engine, llm.engines.verify)


@pytest.mark.parametrize("levels", [None, 0, 3])
def test_prompts_share_calls_with_rows(llm: LLM, noted: Noted, levels: int | None) -> None:
    given = list(requests(24, seed=7))
    scheduler = Scheduler(llm, replace(OPTIONS, levels=levels))
    noted.calls.clear()
    records = run(scheduler, given, every=3)
    assert any(rows > 1 and pieces for rows, pieces in noted.calls)
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request)
    assert scheduler.running == scheduler.prefilling == 0 and scheduler.kv_used == 0


def test_short_prompts_share_calls(llm: LLM, noted: Noted) -> None:
    """Four prompts run without decoding rows. One prompt runs with a request of a single token,
    which needs no prefill."""
    given = [
        Request(tokens=[n % 7, 5, 3] * n, max_new_tokens=30, ignore_eos=True)
        for n in (9, 8, 12, 7, 6)
    ]
    given.append(replace(given[0], tokens=(4,)))
    scheduler = Scheduler(llm, replace(OPTIONS, prefill_tokens=64, max_rows=6))
    noted.calls.clear()
    records = run(scheduler, given[:4])
    assert noted.calls[0] == (0, 4)
    noted.calls.clear()
    records += run(scheduler, given[4:])
    assert noted.calls[0] == (1, 1)
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request)


def test_a_call_that_fails_ends_its_rows_and_the_prompt_goes_on(
    llm: LLM, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed call may have written anything after the prompt's prefilled tokens, so the piece is
    run again."""
    scheduler = Scheduler(llm, OPTIONS)
    good = engine.forward
    failing = [0]

    def fail(self: Any, calls: Sequence[Call]) -> Any:
        found = good(self, calls)
        if len({call.logits for call in calls}) == 2 and not failing[0]:
            failing[0] = 1
            raise RuntimeError("out of order")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "forward", fail)
        given = [Request(tokens=[5] * n, max_new_tokens=40, ignore_eos=True) for n in (3, 90)]
        records = run(scheduler, given, every=2)
    assert failing == [1] and "out of order" in caplog.text
    assert records[0].reason == "error"
    assert records[1].tokens == alone(llm, given[1])


def test_prompts_that_fail_together_end_together(
    llm: LLM, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> list[StepOutputs]:
        raise RuntimeError("out of order")

    scheduler = Scheduler(llm, OPTIONS)
    given = [Request(tokens=[5] * n, max_new_tokens=10, ignore_eos=True) for n in (9, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "forward", fail)
        assert [record.reason for record in run(scheduler, given)] == ["error", "error"]
    assert "out of order" in caplog.text and not scheduler.kv_used
    assert [record.tokens for record in run(scheduler, given)] == [
        alone(llm, request) for request in given
    ]


add_piece = Session.add_piece


def count_too_many(session: Session, piece: Call, outputs: StepOutputs, seconds: float) -> None:
    add_piece(session, piece, outputs, seconds)
    if session.unfilled:
        session._prefilled += 1


def test_a_mistake_with_pieces_is_caught(
    llm: LLM, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing tokens of a prompt change the tokens that follow."""
    random = np.random.default_rng(0)
    scheduler = Scheduler(llm, OPTIONS)
    given = [
        Request(
            tokens=random.integers(0, 97, n).tolist(),
            sampling=SAMPLINGS[1],
            max_new_tokens=40,
            ignore_eos=True,
        )
        for n in (3, 60, 69)
    ]
    expected = [alone(llm, request) for request in given]
    assert [record.tokens for record in run(scheduler, given, every=2)] == expected
    noted.calls.clear()
    scheduler = Scheduler(llm, OPTIONS)
    monkeypatch.setattr(Session, "add_piece", count_too_many)
    records = run(scheduler, given, every=2)
    assert (1, 1) in noted.calls and {record.reason for record in records} == {"length"}
    assert [record.tokens for record in records] != expected


def rotated(calls: Sequence[Call]) -> list[Call]:
    """Each call gets the cache of the previous call."""
    return [call._replace(kv_cache=calls[number - 1].kv_cache) for number, call in enumerate(calls)]


def test_a_mistake_with_caches_is_caught(
    llm: LLM, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first check reveals keys and values of another row."""
    forward = engine.forward
    monkeypatch.setattr(engine, "forward", lambda self, calls: forward(self, rotated(calls)))
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)
    Scheduler(llm, replace(OPTIONS, max_rows=1))
