"""Joint calls: sequences in several memories, each with nodes and slots of its own, get the bits of calls of their own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import tiny_models
from support.batches import OPTIONS, alone, requests, run
from support.command import export_engine
from support.harness import Harness

from eesd.common.errors import EESDError
from eesd.runtime.batch.request import Request
from eesd.runtime.batch.scheduler import Scheduler
from eesd.runtime.decoding.session import Session
from eesd.runtime.engines.base import Call, JointEngine, Part, StepOutputs
from eesd.runtime.engines.ort_cpu import OrtEngine
from eesd.runtime.engines.ort_joint import OrtJointEngine
from eesd.runtime.llm import LLM, load

ENOUGH = 1 << 40
TEXTS = (37, 5, 90)
"""Tokens of the texts."""


@pytest.fixture(scope="module")
def llm(harness: Harness) -> LLM:
    return load(harness.directory, "ort", threads=1)


class Texts:
    """Texts in caches of their own and in the rows of two memories; what calls of their own give is the truth."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.engines.verify
        assert isinstance(engine, OrtEngine)
        self.engine, self.size = engine, llm.manifest.geometry.vocab_size
        self.random = np.random.default_rng(0)
        self.caches = [engine.new_kv_cache() for _ in TEXTS]
        for cache, length in zip(self.caches, TEXTS, strict=True):
            cache.reserve(length + 30)
            engine.bind(cache).prefill(self.tokens(length), 0)
        self.rows = [engine.new_rows(len(TEXTS)) for _ in range(2)]
        for rows, slots in zip(self.rows, (128, 256), strict=True):
            rows.resize(slots, [])
            for row, (cache, length) in enumerate(zip(self.caches, TEXTS, strict=True)):
                rows.take(row, cache, length)

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.random.integers(0, self.size, count)]

    def call(self, text: int, count: int) -> Call:
        start = TEXTS[text]
        return Call(self.tokens(count), range(start, start + count), start)

    def tree(self, text: int) -> Call:
        """A root with two branches, of two nodes and of one."""
        start = TEXTS[text]
        mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], np.bool_)
        return Call(self.tokens(4), [start, start + 1, start + 2, start + 1], start, start, mask)

    def own(self, text: int, call: Call) -> NDArray[np.uint32]:
        """The bits of a call of the text alone."""
        return bits(self.engine.bind(self.caches[text]).forward(*call))

    def written(self, text: int, call: Call) -> NDArray[np.uint32]:
        stop = call.slot + len(call.tokens)
        return np.ascontiguousarray(self.caches[text].values(call.slot, stop)).view(np.uint32)


def bits(outputs: StepOutputs) -> NDArray[np.uint32]:
    return outputs.logits.copy().view(np.uint32)


@pytest.fixture(
    scope="module",
    params=["float32", "bfloat16", "int4", "stages", "qwen3", "llama-bias", "mistral-window", "no groups", "one KV head"],
)
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    kind: str = request.param
    directory = tmp_path_factory.mktemp(kind)
    if kind in ("qwen3", "llama-bias", "mistral-window"):
        model = request.getfixturevalue("family_dir")(kind)
    else:
        kv_heads = {"no groups": 4, "one KV head": 1}.get(kind, 2)
        model = tiny_models.build(directory / "model", 97, layers=4, damping=0.3, seed=0, kv_heads=kv_heads)
    if kind == "int4":
        plans = export_engine(model, directory / "plans", "--quantize", "int4", "--max-seq-len", 384)
    else:
        stages, dtype = (3 if kind == "stages" else 1), (kind if kind == "bfloat16" else "float32")
        plans = tiny_models.export_tiny(model, directory / "plans", slots=384, stages=stages, dtype=dtype)
    return Texts(load(plans, "ort", threads=1, speculation=None))


def test_every_node_gets_the_bits_that_it_gets_alone(texts: Texts) -> None:
    joint = texts.engine.join(3, ENOUGH)
    assert joint is not None and joint.parts == 3
    for first, second in ((1, 1), (3, 2), (1, 9)):
        short = [texts.call(text, 1 + text % first) for text in range(3)]
        long = [texts.tree(1), texts.call(2, second)]
        piece = texts.call(0, 23)
        expected = [[texts.own(*pair) for pair in enumerate(short)], [texts.own(1, long[0]), texts.own(2, long[1])]]
        texts.own(0, piece)
        written = texts.written(0, piece)
        texts.caches[0].data[..., TEXTS[0] :, :] = 0
        found = joint.forward(
            [Part(texts.rows[0], 0, short), Part(texts.rows[1], 1, long), Part(texts.caches[0], 0, [piece], logits=False)]
        )
        assert [len(part) for part in found] == [3, 2, 0]
        for outputs, truth in zip(found, expected, strict=False):
            for one, its in zip(outputs, truth, strict=True):
                assert (bits(one) == its).all()
        assert (texts.written(0, piece) == written).all()


def test_parts_may_be_missing_and_memory_may_change(texts: Texts) -> None:
    joint = texts.engine.join(3, ENOUGH)
    assert joint is not None
    for slots in (128, 256, 384):
        texts.rows[0].resize(slots, TEXTS)
        call, piece = texts.call(1, 2), texts.call(2, 11)
        expected = texts.own(1, call), texts.own(2, piece)
        [[rows]] = joint.forward([Part(texts.rows[0], 1, [call])])
        assert (bits(rows) == expected[0]).all()
        [[rows], [prompt]] = joint.forward([Part(texts.rows[0], 1, [call]), Part(texts.caches[2], 0, [piece])])
        assert (bits(rows) == expected[0]).all() and (bits(prompt) == expected[1]).all()


class Noted:
    """What the joint calls of a test were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int]] = []
        forward = OrtJointEngine.forward

        def note(engine: OrtJointEngine, parts: Sequence[Part]) -> list[list[StepOutputs]]:
            self.calls.append((sum(part.logits for part in parts), sum(not part.logits for part in parts)))
            return forward(engine, parts)

        monkeypatch.setattr(OrtJointEngine, "forward", note)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    monkeypatch.setattr("eesd.runtime.batch.scheduler.JOINT", (64, 2))
    return Noted(monkeypatch)


@pytest.mark.parametrize("levels", [None, 0, 3])
def test_prompts_and_groups_share_calls(llm: LLM, noted: Noted, levels: int | None) -> None:
    given = list(requests(24, seed=7))
    scheduler = Scheduler(llm, replace(OPTIONS, levels=levels))
    noted.calls.clear()
    records = run(scheduler, given, every=3)
    assert {(1, 1), (2, 0), (2, 1)} <= {*noted.calls}
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request)
    assert scheduler.running == scheduler.prefilling == 0 and scheduler.kv_used == 0


def test_short_prompts_share_calls(llm: LLM, noted: Noted) -> None:
    """Three prompts without rows that decode, two in the call of a round, and one of a single token, which needs no prefill."""
    given = [Request(tokens=[n % 7, 5, 3] * n, max_new_tokens=30, ignore_eos=True) for n in (9, 8, 12, 7, 6)]
    given.append(replace(given[0], tokens=(4,)))
    scheduler = Scheduler(llm, replace(OPTIONS, prefill_tokens=64))
    noted.calls.clear()
    records = run(scheduler, given)
    assert noted.calls[0] == (0, 3) and (1, 2) in noted.calls
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request)


def test_a_second_copy_of_the_weights_has_a_limit(llm: LLM, noted: Noted) -> None:
    engine = llm.engines.verify
    assert isinstance(engine, OrtEngine)
    size = sum(llm.manifest.weight_bytes(graph) for graph in llm.manifest.verify)
    assert engine.join(3, size - 1) is None and engine.join(3, size) is not None
    given = list(requests(12, seed=3))
    records = run(Scheduler(llm, replace(OPTIONS, join_memory=size - 1)), given, every=3)
    assert [record.tokens for record in records] == [alone(llm, request) for request in given]
    assert not noted.calls


@pytest.mark.usefixtures("noted")
def test_a_call_that_fails_ends_its_rows_and_the_prompt_goes_on(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows what a failed call has written behind the prompt's known tokens, so the piece is run again."""
    scheduler = Scheduler(llm, OPTIONS)
    good, failing = OrtJointEngine.forward, [0]

    def fail(engine: JointEngine, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        assert isinstance(engine, OrtJointEngine)
        if any(not part.logits for part in parts) and not failing[0]:
            failing[0] = 1
            good(engine, parts)
            raise RuntimeError("out of order")
        return good(engine, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrtJointEngine, "forward", fail)
        given = [Request(tokens=[5] * n, max_new_tokens=40, ignore_eos=True) for n in (3, 90)]
        records = run(scheduler, given, every=2)
    assert failing == [1] and "out of order" in caplog.text
    assert records[0].reason == "error"
    assert records[1].tokens == alone(llm, given[1])


def test_prompts_that_fail_together_end_together(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> list[list[StepOutputs]]:
        raise RuntimeError("out of order")

    scheduler = Scheduler(llm, OPTIONS)
    given = [Request(tokens=[5] * n, max_new_tokens=10, ignore_eos=True) for n in (9, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrtJointEngine, "forward", fail)
        assert [record.reason for record in run(scheduler, given)] == ["error", "error"]
    assert "out of order" in caplog.text and not scheduler.kv_used
    assert [record.tokens for record in run(scheduler, given)] == [alone(llm, request) for request in given]


add_piece, bind = Session.add_piece, OrtJointEngine._bind


def count_too_many(session: Session, piece: Call, seconds: float) -> None:
    add_piece(session, piece, seconds)
    add_piece(session, piece._replace(tokens=piece.tokens[:1]), 0)


def take_the_row_before(engine: OrtJointEngine, parts: Sequence[Part]) -> list[Any]:
    return bind(engine, [part._replace(first=max(part.first - 1, 0)) for part in parts])


def test_a_mistake_with_pieces_is_caught(llm: LLM, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a prompt that are left out show in what follows."""
    scheduler = Scheduler(llm, OPTIONS)
    monkeypatch.setattr(Session, "add_piece", count_too_many)
    given = [Request(tokens=[7, 5, 3] * n, max_new_tokens=40, ignore_eos=True) for n in (1, 20, 23)]
    records = run(scheduler, given, every=2)
    assert noted.calls and [record.tokens for record in records] != [alone(llm, request) for request in given]


def test_a_mistake_with_memories_is_caught(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of another row show in the first check."""
    monkeypatch.setattr(OrtJointEngine, "_bind", take_the_row_before)
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)


def test_joint_calls_that_change_a_bit_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = OrtJointEngine.forward

    def disturbed(engine: OrtJointEngine, parts: Sequence[Part]) -> list[list[StepOutputs]]:
        found = forward(engine, parts)
        found[-1][-1].logits[:] = np.nextafter(found[-1][-1].logits, np.float32(np.inf))
        return found

    monkeypatch.setattr(OrtJointEngine, "forward", disturbed)
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)
    Scheduler(llm, replace(OPTIONS, join_memory=0))
