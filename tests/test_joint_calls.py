"""Joint calls: sequences in several memories, each with nodes and slots of its own, get the bits of calls of their own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import tiny_models
from support.batches import OPTIONS, SAMPLINGS, alone, requests, run
from support.command import export_engine
from support.harness import Harness
from support.without_operators import needs_operators, without_operators

from eesd.common.errors import EESDError
from eesd.runtime.batch.request import Request
from eesd.runtime.batch.scheduler import Scheduler
from eesd.runtime.decoding.session import Session
from eesd.runtime.engines.base import Call, JoiningEngine, JointEngine, Part, StepOutputs
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.ort_cpu import OrtEngine
from eesd.runtime.engines.ort_joint import OrtJointEngine
from eesd.runtime.llm import LLM, load

ENOUGH = 1 << 40
TEXTS = (37, 5, 90)
"""Tokens of the texts."""


def load_own(directory: Path) -> LLM:
    """With this project's operators."""
    return load(directory, "ort", threads=1)


def load_standard(directory: Path) -> LLM:
    """With ONNX Runtime's own operators."""
    with without_operators():
        return load(directory, "ort", threads=1)


LOADS = [pytest.param(load_own, marks=needs_operators(), id="own"), pytest.param(load_standard, id="standard")]


@pytest.fixture(scope="module", params=LOADS)
def llm(request: pytest.FixtureRequest, harness: Harness) -> LLM:
    loaded: LLM = request.param(harness.directory)
    return loaded


@pytest.fixture(scope="module")
def standard(harness: Harness) -> LLM:
    return load_standard(harness.directory)


@pytest.fixture
def joint(llm: LLM) -> Any:
    """The class of the LLM's joint engine."""
    return CpuEngine if isinstance(llm.engines.verify, CpuEngine) else OrtJointEngine


class Texts:
    """Texts in caches of their own and in the rows of two memories; what calls of their own give is the truth."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.engines.verify
        assert isinstance(engine, JoiningEngine)
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
        return np.array(self.caches[text].values(call.slot, stop)).view(np.uint32)

    def forget(self, text: int, call: Call) -> None:
        """Overwrite what a call of the text wrote."""
        stop = call.slot + len(call.tokens)
        self.caches[text].fill(call.slot, np.zeros_like(self.caches[text].values(call.slot, stop)))


def bits(outputs: StepOutputs) -> NDArray[np.uint32]:
    return outputs.logits.copy().view(np.uint32)


KINDS = ("float32", "bfloat16", "int4", "stages", "qwen3", "llama-bias", "mistral-window", "no groups", "one KV head")


@pytest.fixture(scope="module", params=KINDS)
def plans(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: str = request.param
    directory = tmp_path_factory.mktemp(kind)
    if kind in ("qwen3", "llama-bias", "mistral-window"):
        model = request.getfixturevalue("family_dir")(kind)
    else:
        kv_heads = {"no groups": 4, "one KV head": 1}.get(kind, 2)
        model = tiny_models.build(directory / "model", 97, layers=4, damping=0.3, seed=0, kv_heads=kv_heads)
    if kind == "int4":
        return export_engine(model, directory / "plans", "--quantize", "int4", "--max-seq-len", 384)
    stages, dtype = (3 if kind == "stages" else 1), (kind if kind == "bfloat16" else "float32")
    return tiny_models.export_tiny(model, directory / "plans", slots=384, stages=stages, dtype=dtype)


@pytest.fixture(scope="module", params=LOADS)
def texts(request: pytest.FixtureRequest, plans: Path) -> Texts:
    return Texts(request.param(plans))


def test_every_node_gets_the_bits_that_it_gets_alone(texts: Texts) -> None:
    joint = texts.engine.join(3, ENOUGH)
    assert joint is not None and joint.parts >= 3
    for first, second in ((1, 1), (3, 2), (1, 9)):
        short = [texts.call(text, 1 + text % first) for text in range(3)]
        long = [texts.tree(1), texts.call(2, second)]
        piece = texts.call(0, 23)
        expected = [[texts.own(*pair) for pair in enumerate(short)], [texts.own(1, long[0]), texts.own(2, long[1])]]
        texts.own(0, piece)
        written = texts.written(0, piece)
        texts.forget(0, piece)
        assert not texts.written(0, piece).any()
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, joint: Any) -> None:
        self.calls: list[tuple[int, int]] = []
        forward = joint.forward

        def note(engine: JointEngine, parts: Sequence[Part]) -> Any:
            self.calls.append((sum(part.logits for part in parts), sum(not part.logits for part in parts)))
            return forward(engine, parts)

        monkeypatch.setattr(joint, "forward", note)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, joint: Any) -> Noted:
    monkeypatch.setattr("eesd.runtime.batch.scheduler.JOINT", (64, 2))
    return Noted(monkeypatch, joint)


@pytest.mark.parametrize("levels", [None, 0, 3])
def test_prompts_and_groups_share_calls(llm: LLM, noted: Noted, levels: int | None) -> None:
    given = list(requests(24, seed=7))
    scheduler = Scheduler(llm, replace(OPTIONS, levels=levels))
    noted.calls.clear()
    records = run(scheduler, given, every=3)
    own = isinstance(llm.engines.verify, CpuEngine)  # its rows are one group
    assert ({(1, 1), (1, 2)} if own else {(1, 1), (2, 0), (2, 1)}) <= {*noted.calls}
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


def test_a_second_copy_of_the_weights_has_a_limit(standard: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eesd.runtime.batch.scheduler.JOINT", (64, 2))
    noted = Noted(monkeypatch, OrtJointEngine)
    engine = standard.engines.verify
    assert isinstance(engine, OrtEngine)
    size = sum(standard.manifest.weight_bytes(graph) for graph in standard.manifest.verify)
    assert engine.join(3, size - 1) is None and engine.join(3, size) is not None
    given = list(requests(12, seed=3))
    records = run(Scheduler(standard, replace(OPTIONS, join_memory=size - 1)), given, every=3)
    assert [record.tokens for record in records] == [alone(standard, request) for request in given]
    assert not noted.calls


@needs_operators()
def test_operators_join_without_a_second_copy(harness: Harness) -> None:
    engine = load_own(harness.directory).engines.verify
    assert isinstance(engine, CpuEngine) and engine.join(3, 0) is engine


@pytest.mark.usefixtures("noted")
def test_a_call_that_fails_ends_its_rows_and_the_prompt_goes_on(llm: LLM, joint: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows what a failed call has written behind the prompt's known tokens, so the piece is run again."""
    scheduler = Scheduler(llm, OPTIONS)
    good, failing = joint.forward, [0]

    def fail(engine: JointEngine, parts: Sequence[Part]) -> Any:
        if any(not part.logits for part in parts) and not failing[0]:
            failing[0] = 1
            good(engine, parts)
            raise RuntimeError("out of order")
        return good(engine, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "forward", fail)
        given = [Request(tokens=[5] * n, max_new_tokens=40, ignore_eos=True) for n in (3, 90)]
        records = run(scheduler, given, every=2)
    assert failing == [1] and "out of order" in caplog.text
    assert records[0].reason == "error"
    assert records[1].tokens == alone(llm, given[1])


def test_prompts_that_fail_together_end_together(llm: LLM, joint: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> list[list[StepOutputs]]:
        raise RuntimeError("out of order")

    scheduler = Scheduler(llm, OPTIONS)
    given = [Request(tokens=[5] * n, max_new_tokens=10, ignore_eos=True) for n in (9, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "forward", fail)
        assert [record.reason for record in run(scheduler, given)] == ["error", "error"]
    assert "out of order" in caplog.text and not scheduler.kv_used
    assert [record.tokens for record in run(scheduler, given)] == [alone(llm, request) for request in given]


add_piece = Session.add_piece


def count_too_many(session: Session, piece: Call, seconds: float) -> None:
    add_piece(session, piece, seconds)
    if session.prefilled < session.stats.prompt_tokens - 1:
        add_piece(session, piece._replace(tokens=piece.tokens[:1]), 0)


def test_a_mistake_with_pieces_is_caught(llm: LLM, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a prompt that are left out show in what follows."""
    random, scheduler = np.random.default_rng(0), Scheduler(llm, OPTIONS)
    given = [
        Request(tokens=random.integers(0, 97, n).tolist(), sampling=SAMPLINGS[1], max_new_tokens=40, ignore_eos=True)
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


def test_a_mistake_with_memories_is_caught(llm: LLM, joint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of another row show in the first check."""
    forward = joint.forward

    def take_the_row_before(engine: JointEngine, parts: Sequence[Part]) -> Any:
        return forward(engine, [part._replace(first=max(part.first - 1, 0)) for part in parts])

    monkeypatch.setattr(joint, "forward", take_the_row_before)
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)


def test_joint_calls_that_change_a_bit_are_refused(llm: LLM, joint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = joint.forward

    def disturbed(engine: JointEngine, parts: Sequence[Part]) -> Any:
        found = forward(engine, parts)
        found[-1][-1].logits[:] = np.nextafter(found[-1][-1].logits, np.float32(np.inf))
        return found

    monkeypatch.setattr(joint, "forward", disturbed)
    with pytest.raises(EESDError, match="max_rows 1"):
        Scheduler(llm, OPTIONS)
    if joint is OrtJointEngine:
        Scheduler(llm, replace(OPTIONS, join_memory=0))
