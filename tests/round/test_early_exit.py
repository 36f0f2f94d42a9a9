"""Tests of models that were trained to exit early (LayerSkip). They draft with their own norm and
LM head, on every backend and in every way of drafting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import tiny_models
from support.command import add_tokenizer, assert_refused, export_engine, run, slow_but, succeed
from support.distilling import SMALL
from support.lossless_checks import HEADS_DRAFT, check_drafting
from support.on_cache import both_on_cache
from transformers import AutoModelForCausalLM

from eesd.common.manifest import load_manifest
from eesd.distill.acceptance import ValidationSet, replay_acceptance
from eesd.distill.cli import main as distill_main
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_exit_head
from eesd.runtime.engines import operators
from eesd.runtime.llm import Speculation, load

TEXT = np.random.default_rng(5).integers(3, 90, 24).tolist()
SIZE = 40
COMMAND = ("--max-seq-len", 256, "--quantize-draft", "none")


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second layer changes little, so an exit after the first one is often right. Its
    name says LayerSkip."""
    directory = tmp_path_factory.mktemp("early")
    model = tiny_models.build(directory / "layerskip-tiny", 97, layers=2, damping=0.05, seed=0)
    add_tokenizer(model)
    return model


@pytest.fixture(scope="module")
def plans(early: Path) -> Path:
    return export_engine(early, early.parent / "plans", *COMMAND)


@pytest.fixture(scope="module")
def reduced_head(early: Path) -> Path:
    """A head that is the model's own exit over a part of the vocabulary. The exit is calibrated."""
    np.save(
        early.parent / "rows.npy",
        np.random.default_rng(1).integers(3, 60, (32, 25)).astype(np.uint16),
    )
    command = (
        "--model",
        early,
        "--exit-layer",
        1,
        "--blocks",
        0,
        "--steps",
        0,
        "--draft-vocab",
        SIZE,
        *SMALL,
    )
    succeed(
        distill_main, *command, "--data", early.parent / "rows.npy", "-o", early.parent / "head"
    )
    return early.parent / "head"


@pytest.fixture(scope="module")
def reduced(early: Path, reduced_head: Path) -> Path:
    return export_engine(early, early.parent / "reduced", "--exit-head", reduced_head, *COMMAND)


def exit_logits(model: Path) -> NDArray[np.float32]:
    """Returns the logits [T, V] of an exit after the first layer, which transformers computes."""
    reference: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        states = reference.model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states[1]
        logits: NDArray[np.float32] = reference.lm_head(reference.model.norm(states))[0].numpy()
    return logits


@pytest.mark.parametrize("backend", ["ort", "torch", "ort-standard"])
def test_the_draft_is_the_models_own_exit(
    early: Path, plans: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "ort-standard":
        monkeypatch.setattr(operators, "missing", lambda: "left out")
    manifest = load_manifest(plans)
    assert (
        manifest.num_caches == 2
        and manifest.draft.caches == (0,)
        and manifest.exit_head.blocks == 0
    )
    verify, draft, _ = both_on_cache(plans, backend.removesuffix("-standard"), 64)
    expected = exit_logits(early)
    verify.prefill(TEXT[:10], 0)
    for at in range(10, 14):
        np.testing.assert_allclose(
            draft.forward([TEXT[at]], [at], at, at).logits[0], expected[at], atol=2e-4
        )


@pytest.mark.parametrize("backend", ["ort", "torch"])
@pytest.mark.parametrize("speculation", HEADS_DRAFT)
@pytest.mark.parametrize("directory", slow_but(["plans", "reduced"], "reduced"))
def test_drafting_changes_no_token(
    request: pytest.FixtureRequest, directory: str, backend: str, speculation: Speculation
) -> None:
    accepted = check_drafting(
        load(request.getfixturevalue(directory), backend, threads=1), speculation, [TEXT[:6]]
    )
    assert speculation.drafter != "exit" or accepted > 8


def test_stages_share_the_draft(early: Path, plans: Path, tmp_path: Path) -> None:
    staged = export_engine(early, tmp_path / "plans", *COMMAND, "--stages", 2)
    speculation = Speculation("fixed:k=3", guard=False, drafter="exit")
    llms = [load(one, "ort", threads=1, speculation=speculation) for one in (plans, staged)]
    whole, cut = (llm.generate(TEXT[:6], max_new_tokens=30, ignore_eos=True) for llm in llms)
    assert (whole.tokens, whole.stats.accepted_tokens) == (cut.tokens, cut.stats.accepted_tokens)


def test_a_calibrated_exit_knows_how_often_it_is_right(
    early: Path, reduced_head: Path, reduced: Path
) -> None:
    """The counts of replayed rounds equal the counts of the engines. The draft vocabulary has the
    most used tokens."""
    (stored,) = reduced_head.glob("validation-*.safetensors")
    validation = ValidationSet.load(stored)
    checkpoint = Checkpoint(early)
    head = load_exit_head(checkpoint, reduced_head)
    assert (
        head.exit_config.blocks == 0 and head.exit_config.trained and head.draft_vocab is not None
    )
    assert len(head.draft_vocab) == SIZE and load_manifest(reduced).exit_head.draft_vocab == SIZE
    rows = head.rows_of(as_torch(checkpoint.lm_head()))
    replayed = replay_acceptance(validation.correct_drafts(head, checkpoint.geometry, rows), 5)
    llm = load(
        reduced, "ort", threads=1, speculation=Speculation("fixed:k=5", guard=False, drafter="exit")
    )
    accepted = rounds = 0
    for tokens, start, end in zip(
        validation.tokens, validation.starts, validation.ends, strict=True
    ):
        completion = llm.generate(
            tokens[:start].tolist(), max_new_tokens=int(end - start), ignore_eos=True
        )
        accepted = accepted + completion.stats.accepted_tokens
        rounds = rounds + completion.stats.rounds
    assert (accepted, rounds) == (sum(replayed.accepted), replayed.rounds) and accepted > 10


def test_the_export_says_what_drafts(
    early: Path, tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    """The model's name says that it was trained to exit early."""
    options = ("--output", tmp_path / "plans", "--no-check")
    found = succeed(export_main, "--model", early, "--exit-layer", 1, *options)
    assert (
        "the model's own final norm and LM head" in found.output
        and "not trained" not in found.output
    )
    assert "the model's own norm and LM head" in succeed(inspect_main, tmp_path / "plans").output
    plain = family_dir("llama-bias")
    found = succeed(export_main, "--model", plain, "--exit-layer", 1, *options)
    assert (
        "own final norm" not in found.output
        and load_manifest(tmp_path / "plans").exit_head.blocks == 1
    )


def test_what_makes_no_draft_is_refused(
    early: Path, tmp_path: Path, family_dir: Callable[[str], Path]
) -> None:
    plain = ("--model", family_dir("llama-bias"), "--output", tmp_path / "plans")
    assert_refused(run(export_main, *plain, "--exit-head", "own"), "--exit-layer N")
    assert_refused(run(export_main, *plain, "--exit-head", "own", "--exit-layer", 99), "exit layer")
    command = ("--model", early, "--exit-layer", 1, "--blocks", 0, "-o", tmp_path / "head")
    assert_refused(run(distill_main, *command, "--steps", 5), "head without blocks")
    deep = ("--steps", 0, "--deep", "2", "--data", early.parent / "rows.npy")
    assert_refused(run(distill_main, *command, *deep), "without blocks")
