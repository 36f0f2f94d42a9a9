"""Tests that choose, train, store, export and run a draft vocabulary. test_lossless.py shows that
it is lossless."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import assert_refused, export_engine, run, succeed
from support.distilling import SMALL, distill, read_losses, read_metrics
from support.engine_dirs import assert_weights_match_manifest, edit_manifest, logits_of
from torch.nn.functional import cross_entropy, log_softmax

import eesd
from eesd.common.draft_vocab import DraftColumns, load_draft_vocab
from eesd.common.errors import EESDError
from eesd.common.manifest import DRAFT_VOCAB_FILE, load_manifest
from eesd.common.weights import SCALES, weights_of
from eesd.distill.cli import main as distill_main
from eesd.distill.data import Rows, count_next_tokens, most_used
from eesd.distill.losses import token_losses
from eesd.export.inspect import main as inspect_main
from eesd.export.reference import least_cosine
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_exit_head

SIZE = 60


def test_the_most_used_tokens_are_chosen_and_those_that_end_a_text() -> None:
    counts = np.array([0, 5, 2, 9, 2, 2, 0, 7])
    assert most_used(counts, 4, ()).tolist() == [1, 2, 3, 7]  # ties go to the lowest id
    assert most_used(counts, 4, (6, 99)).tolist() == [1, 3, 6, 7]
    assert counts[6] == 0 and most_used(counts, 8, (0,)).tolist() == list(range(8))


def test_tokens_are_counted_where_training_predicts_them() -> None:
    tokens = np.array([[1, 2, 2, 3], [4, 5, 0, 0], [6, 6, 6, 6]], np.int32)
    rows = Rows(tokens, np.array([4, 2, 4]), num_primary=2)
    assert count_next_tokens(rows, 7).tolist() == [0, 0, 2, 1, 0, 1, 0]


def test_columns_and_tokens_belong_together() -> None:
    columns = DraftColumns(np.array([1, 4, 6]))
    assert columns.tokens([2, 0]).tolist() == [6, 1]
    assert np.asarray(columns.of([6, 5, 0, 9, 1])).tolist() == [2, 0]
    assert columns.spread(np.array([0.2, 0.3, 0.5]), 8).tolist() == [0, 0.2, 0, 0, 0.3, 0, 0.5, 0]


def test_losses_leave_out_what_the_draft_cannot_predict() -> None:
    """The gradients are computed from the teacher's whole distribution, so no probability moves to
    another token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, generator=generator, requires_grad=True)
    teacher = log_softmax(torch.randn(3, 6, generator=generator), -1).sort(descending=True)[0]
    ids = torch.tensor([[0, 1, 2, 3, -1, -1], [-1, 2, 0, -1, 1, 3], [-1, -1, -1, -1, -1, -1]])
    (ce, kl, _), agrees = token_losses(logits, torch.eye(4), ids, teacher)
    assert ce[1] == ce[2] == kl[2] == 0 and not agrees[1:].any()
    torch.testing.assert_close(ce[0], cross_entropy(logits[0], torch.tensor(0)))
    (gradient,) = torch.autograd.grad(kl.sum(), logits)
    for row in range(3):
        inside = ids[row] >= 0
        p = torch.zeros(4).index_add(0, ids[row][inside], teacher[row].exp()[inside])
        expected = p.sum() * logits[row].softmax(-1) - p
        torch.testing.assert_close(gradient[row], expected, atol=1e-6, rtol=0)
        assert kl[row] >= 0


@pytest.fixture(scope="session")
def reduced_head(learner: Path, own_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with 60 tokens, trained for 12 steps. It reads no deep layers, so that the verify
    graph can have stages."""
    output = tmp_path_factory.mktemp("reduced-head") / "head"
    options = ("--draft-vocab", SIZE, "--shared-lm-head", "--deep", "none")
    distill(learner, own_rows, output, *options, "--steps", 12, "--lr", 1e-2, "--batch", 16)
    return output


def test_a_head_stores_its_draft_vocabulary(learner: Path, reduced_head: Path) -> None:
    tensors = load_file(reduced_head / "exit_head.safetensors")
    ids = tensors["draft_vocab"]
    assert (
        ids.dtype == torch.int32
        and len(ids) == SIZE
        and 2 in ids
        and "lm_head.weight" not in tensors
    )
    assert json.loads((reduced_head / "exit_head.json").read_text())["draft_vocab"] == SIZE
    head = load_exit_head(Checkpoint(learner), reduced_head)
    assert head.draft_vocab is not None and head.draft_vocab.tolist() == ids.tolist()
    assert head.columns(torch.tensor([int(ids[5]), 96 if 96 not in ids else 0]))[0] == 5
    assert read_metrics(reduced_head)[-1]["tokens_per_round"] > 1


def test_an_own_lm_head_begins_with_the_rows_of_the_draft_vocabulary(
    learner: Path, own_rows: Path, tmp_path: Path
) -> None:
    distill(learner, own_rows, tmp_path, "--draft-vocab", SIZE, "--steps", 1, "--lr", 1e-9)
    tensors = load_file(tmp_path / "exit_head.safetensors")
    rows = as_torch(Checkpoint(learner).lm_head())[tensors["draft_vocab"].long()]
    # Stored in bfloat16.
    torch.testing.assert_close(tensors["lm_head.weight"].float(), rows.float(), atol=0.02, rtol=0)


def test_another_draft_vocabulary_is_another_run_and_another_head(
    learner: Path, own_rows: Path, reduced_head: Path, tmp_path: Path
) -> None:
    options = (
        "--model",
        learner,
        "--exit-layer",
        1,
        "--data",
        own_rows,
        *SMALL,
        "--batch",
        16,
        "--lr",
        1e-2,
        "--steps",
        12,
        "--deep",
        "none",
        "--shared-lm-head",
    )
    found = run(distill_main, *options, "-o", reduced_head, "--draft-vocab", 50)
    assert_refused(found, "other options (draft_vocab: 60, now 50)")
    for size in (0, 50):
        found = run(
            distill_main,
            *options,
            "-o",
            tmp_path,
            "--init-head",
            reduced_head,
            "--draft-vocab",
            size,
        )
        assert_refused(found, "--draft-vocab 60", "give these options")
    assert_refused(run(distill_main, *options, "-o", tmp_path, "--draft-vocab", 1), "at least 2")


def test_a_head_that_goes_on_keeps_its_draft_vocabulary_and_the_cache_serves_any(
    learner: Path,
    own_rows: Path,
    reduced_head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = ("--steps", 2, "--offline", tmp_path / "cache")
    distill(learner, own_rows, tmp_path / "whole", *more)
    monkeypatch.setattr(
        "eesd.distill.run.load_decoder", lambda *_: pytest.fail("the teacher was loaded")
    )
    distill(
        learner,
        own_rows,
        tmp_path / "more",
        *more,
        "--draft-vocab",
        SIZE,
        "--init-head",
        reduced_head,
    )
    ids = [
        load_file(path / "exit_head.safetensors")["draft_vocab"]
        for path in (reduced_head, tmp_path / "more")
    ]
    assert torch.equal(*ids)
    distill(learner, own_rows, tmp_path / "all", *more, "--draft-vocab", 97)
    assert read_losses(tmp_path / "all") == read_losses(tmp_path / "whole")


@pytest.mark.parametrize("change", ["order", "range", "type"])
def test_a_damaged_draft_vocabulary_of_a_head_is_refused(
    learner: Path, reduced_head: Path, tmp_path: Path, change: str
) -> None:
    tensors = load_file(reduced_head / "exit_head.safetensors")
    ids = tensors["draft_vocab"]
    damaged = {"order": ids.flip(0), "range": ids + 97, "type": ids.long()}[change]
    save_file(tensors | {"draft_vocab": damaged}, tmp_path / "exit_head.safetensors")
    (tmp_path / "exit_head.json").write_text((reduced_head / "exit_head.json").read_text())
    with pytest.raises(EESDError, match="damaged draft_vocab; train it again"):
        load_exit_head(Checkpoint(learner), tmp_path)


@pytest.mark.parametrize(
    "options",
    [("--stages", 2), ("--quantize", "int4"), ("--link-weights",), ("--dtype", "bfloat16")],
)
def test_every_kind_of_directory_has_it(
    learner: Path, reduced_head: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    directory = export_engine(
        learner, tmp_path / "plans", "--exit-head", reduced_head, "--max-seq-len", 64, *options
    )
    manifest = load_manifest(directory)
    ids = load_draft_vocab(directory, manifest)
    assert ids is not None and len(ids) == SIZE == manifest.draft.results[0].shape[-1]
    names = weights_of(manifest, manifest.draft)["exit_head.lm_head.weight"].tensors
    assert ("exit_head.lm_head.weight" + SCALES in names) == (
        options[0] == "--quantize" or options == ("--stages", 2)
    )
    if options != ("--link-weights",):
        assert_weights_match_manifest(directory)
    logits = [logits_of(directory, backend) for backend in ("ort", "torch")]
    assert logits[0][2].shape == (1, SIZE) and logits[0][1].shape == (1, 97)
    assert least_cosine(logits[0][2], logits[1][2]) > 0.99


def test_inspect_shows_it_and_damage_is_refused(
    learner: Path, reduced_head: Path, tmp_path: Path
) -> None:
    directory = export_engine(learner, tmp_path / "plans", "--exit-head", reduced_head)
    assert "60 of 97 tokens" in succeed(inspect_main, directory).stdout
    path = directory / DRAFT_VOCAB_FILE
    ids = np.fromfile(path, "<i8")
    ids[::-1].tofile(path)
    with pytest.raises(EESDError, match=r"draft_vocab\.bin is not the file that was written there"):
        eesd.load(directory, "ort", threads=1)
    with pytest.raises(EESDError, match=r"draft_vocab\.bin is damaged; export the model again"):
        load_draft_vocab(directory, load_manifest(directory))
    for field, value in (("draft_vocab", 61), ("draft_vocab", 0), ("own_lm_head", False)):
        before = (directory / "manifest.json").read_text()
        edit_manifest(directory, f"exit_head/{field}", value)
        with pytest.raises(EESDError, match=r"is damaged \(the draft vocabulary\)"):
            load_manifest(directory)
        (directory / "manifest.json").write_text(before)
