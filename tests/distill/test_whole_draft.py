"""Tests that drafting with the whole model in fewer bits changes no token, whatever the draft
writes into the KV cache."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_models
from support.command import add_tokenizer, assert_refused, export_engine, run, succeed
from support.lossless_checks import check_drafting

from eesd import BatchOptions, EESDError, Sampling, Service
from eesd.common.manifest import load_manifest
from eesd.common.quantization import is_linear
from eesd.common.weights import weights_of
from eesd.export.cli import main as export_main
from eesd.export.engine_dir import WHOLE_MODEL_PRIOR
from eesd.runtime.engines import operators
from eesd.runtime.engines.base import Call, Engine, StepOutputs
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.llm import LLM, Speculation, load

PROMPT = np.random.default_rng(5).integers(3, 90, 24).tolist()
WHOLE = ("--exit-head", "quantized")
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=0.9, seed=3, method="rejection"),
)
SPECULATIONS = {
    "chain": Speculation("fixed:k=4", guard=False, drafter="exit"),
    "tree": Speculation("fixed:k=3", tree=3, guard=False, drafter="exit"),
    "second candidates": Speculation("fixed:k=3", tree=1, guard=False, drafter="exit"),
    "default": Speculation(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build(
        tmp_path_factory.mktemp("whole") / "model", 97, layers=2, damping=0.5, seed=0
    )
    add_tokenizer(model)
    return model


@pytest.fixture(scope="module")
def plans(model: Path) -> Path:
    return export_engine(model, model.parent / "plans", *WHOLE, "--max-seq-len", 256)


class Spoiling:
    """An engine that writes garbage into every slot of its call, and returns nonsense. It can also
    write garbage into later slots."""

    def __init__(self, engine: Engine, garbage: float, speaks: bool) -> None:
        self._engine = engine
        self._garbage = garbage
        self._speaks = speaks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        single = [call._replace(levels=1) for call in calls]  # a chain on a device has no logits
        outputs = [one.fetched() for one in self._engine.forward(single)]
        for call, one in zip(calls, outputs, strict=True):
            values = np.array(call.kv_cache.values(call.slot, call.slot + len(call.tokens)))
            call.kv_cache.fill(call.slot, np.full_like(values, self._garbage))
            if not self._speaks and one.topk_logprobs is not None:
                one.logits[:] = np.nan
                one.topk_logprobs = np.full_like(one.topk_logprobs, np.nan)
        return outputs


def spoiled(llm: LLM, speculation: Speculation, garbage: float, speaks: bool) -> LLM:
    """Returns an LLM whose draft engine spoils the cache."""
    other = llm.with_speculation(speculation)
    assert llm.engines.draft is not None
    engine = Spoiling(llm.engines.draft, garbage, speaks)
    other.drafting = other.drafting.with_drafter(engine=engine)
    return other


def test_a_model_without_a_head_drafts_for_itself(plans: Path) -> None:
    manifest = load_manifest(plans)
    assert manifest.exit_head.is_whole(manifest.geometry) and manifest.exit_head.can_draft
    assert manifest.exit_head.calibration == WHOLE_MODEL_PRIOR
    assert list(manifest.draft.caches) == [0, 1] and manifest.num_caches == 2
    linear = [
        weight for name, weight in weights_of(manifest, manifest.draft).items() if is_linear(name)
    ]
    assert len(linear) == 9 and all(
        (weight.quantization is None) == (weight.shape[1] == 48) for weight in linear
    )


@pytest.mark.parametrize("backend", ["ort", "torch", "ort-standard"])
@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize(("garbage", "speaks"), [(np.nan, True), (np.inf, False), (3e4, True)])
def test_a_draft_that_spoils_the_cache_changes_no_token(
    plans: Path,
    backend: str,
    speculation: str,
    garbage: float,
    speaks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "ort-standard":
        monkeypatch.setattr(operators, "missing", lambda: "left out")
    llm = load(plans, backend.removesuffix("-standard"), threads=1)
    wrong = spoiled(llm, SPECULATIONS[speculation], garbage, speaks)
    for sampling in SAMPLINGS[:2]:
        plain = llm.with_speculation(None).generate(
            PROMPT[:6], sampling, max_new_tokens=24, ignore_eos=True
        )
        assert (
            wrong.generate(PROMPT[:6], sampling, max_new_tokens=24, ignore_eos=True).tokens
            == plain.tokens
        )
    if not speaks and speculation != "default":
        with wrong.session(PROMPT[:6], max_new_tokens=9, ignore_eos=True) as session:
            assert session.step().num_accepted == 0 and session.stats.draft_steps == 1, (
                "its first step ends the draft"
            )


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_what_a_cancelled_draft_wrote_is_never_seen(plans: Path, backend: str) -> None:
    """A round is cancelled after the draft wrote garbage into eight slots. The next rounds are
    short, and the garbage does not affect them."""
    llm = load(plans, backend, threads=1)
    plain = llm.with_speculation(None).generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    wrong = spoiled(llm, Speculation("fixed:k=8", guard=False, drafter="exit"), np.nan, speaks=True)
    with wrong.session(PROMPT, max_new_tokens=20, ignore_eos=True) as session:
        session.prefill()
        engines = session.engines
        session.engines = engines._replace(verify=Cancelling())  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            session.step()
        session.engines = engines
        session.drafting = replace(session.drafting, drafter=None, text=None)
        assert session.peek().argmax() == plain[0]
        while session.finish_reason is None:
            session.step()
        assert session.tokens[len(PROMPT) :] == plain
        followed = (
            llm.with_speculation(None).generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens
        )
    assert followed == plain
    assert (
        llm.with_speculation(None).generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens
        == plain
    )


def test_slots_that_are_not_cleared_are_noticed(
    plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "missing", lambda: "left out")
    test_what_a_cancelled_draft_wrote_is_never_seen(plans, "ort")
    monkeypatch.setattr(HostKVCache, "clear", lambda *_: None)
    with pytest.raises((AssertionError, EESDError)):
        test_what_a_cancelled_draft_wrote_is_never_seen(plans, "ort")


class Cancelling:
    """An engine that is interrupted."""

    chooses = False

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        raise KeyboardInterrupt


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_rows_beside_a_spoiling_draft_keep_their_tokens(plans: Path, backend: str) -> None:
    llm = load(plans, backend, threads=1)
    plain = llm.with_speculation(None)
    wrong = spoiled(llm, Speculation(guard=False), np.nan, speaks=True)
    prompts = [PROMPT[:4], PROMPT[:4] * 3, PROMPT[5:20], PROMPT]
    expected = [plain.generate(one, max_new_tokens=30, ignore_eos=True).tokens for one in prompts]
    service = Service(wrong, BatchOptions(max_rows=3, prefix_memory=1 << 20))
    try:
        for _ in range(2):  # the second time, prefixes are cached
            asked = [wrong.request(one, max_new_tokens=30, ignore_eos=True) for one in prompts]
            with ThreadPoolExecutor() as pool:
                assert [one.tokens for one in pool.map(service.generate, asked)] == expected
    finally:
        service.close()


@pytest.mark.parametrize("backend", ["ort", "torch"])
@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_drafting_changes_no_token(plans: Path, backend: str, speculation: str) -> None:
    llm = load(plans, backend, threads=1)
    accepted = check_drafting(llm, SPECULATIONS[speculation], [PROMPT[:6]])
    assert accepted > 40 or speculation != "chain", "most drafts are right"


@pytest.mark.parametrize("options", [("--quantize", "int4"), ("--exit-head", "none")])
def test_without_bits_to_save_the_text_drafts(
    model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = succeed(
        export_main, "--model", model, *options, "--max-seq-len", 128, "-o", tmp_path / "plans"
    )
    assert "Drafts come only from repeated text" in result.stderr
    manifest = load_manifest(tmp_path / "plans")
    assert not manifest.exit_head.can_draft and manifest.quantization.draft is None
    llm = load(tmp_path / "plans", threads=1)
    assert llm.engines.draft is None and llm.drafting.drafter is None and llm.drafting.text
    tokens = PROMPT[:5] * 3
    plain = llm.with_speculation(None).generate(tokens, max_new_tokens=20, ignore_eos=True)
    assert llm.generate(tokens, max_new_tokens=20, ignore_eos=True).tokens == plain.tokens
    with pytest.raises(EESDError, match="no exit head; export with --exit-head"):
        load(tmp_path / "plans", threads=1, speculation=Speculation(drafter="exit"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--exit-head", "quantized", "--quantize", "int4"), ("4 bits", "--exit-head DIR")),
        (
            ("--exit-head", "quantized", "--quantize-draft", "none"),
            ("--quantize-draft none", "--exit-head none"),
        ),
        (
            ("--exit-head", "quantized", "--exit-layer", 1),
            ("no exit layer", "leave --exit-layer out"),
        ),
        (("--exit-head", "quantized", "--stages", 2), ("--stages", "all layers")),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(run(export_main, "--model", model, *options, "-o", tmp_path / "plans"), *words)
    assert not (tmp_path / "plans").exists()


def test_one_layer_is_enough(tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=1, damping=1.0, seed=0)
    llm = load(export_engine(model, tmp_path / "plans", *WHOLE, "--max-seq-len", 128), threads=1)
    assert llm.engines.draft is not None
    plain = llm.with_speculation(None).generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens == plain.tokens
