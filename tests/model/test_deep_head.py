"""A head with deep layers: on every backend, rounds compute the same as training in one pass; the
model is unchanged."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.command import assert_refused, run, succeed
from support.deep_heads import deep_head
from support.lossless_checks import check_kept_prefixes
from support.on_cache import OnCache

from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.distill.ages import AGES, random_roots, states_before
from eesd.distill.teacher import Teacher, full_sequence_inputs
from eesd.export.cli import main as export_main
from eesd.model import exit_head_file
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import ExitHead
from eesd.model.loading import load_decoder, load_exit_head, make_initial_head
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import operators
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.llm import Speculation, load

FamilyDir = Callable[[str], Path]
BACKENDS = ["ort", "torch", "ort-standard"]
TEXT = np.random.default_rng(5).integers(3, 90, 24).tolist()
ROUNDS = [(6, 3), (9, 1), (10, 4), (14, 2), (16, 6)]
"""Positions of roots, and the numbers of tokens that the rounds commit."""
SLOTS = 64


def fixed_roots(age: int) -> torch.Tensor:
    """The root of each position of the text [1, T] at one age. The first positions are younger."""
    return (torch.arange(len(TEXT)) - age).clamp_min(0)[None]


def aged_logits(checkpoint: Checkpoint, head: ExitHead, roots: torch.Tensor) -> NDArray[np.float32]:
    """The head's logits [T, V] after each token of the text, drafted from that token's root."""
    decoder = load_decoder(checkpoint)
    layers = (head.exit_config.layer, *head.exit_config.deep)
    ids = torch.tensor([TEXT])
    states, _ = Teacher(decoder, layers, 1, "float32")(ids)
    inputs, caches = full_sequence_inputs(
        checkpoint.geometry, 1, len(TEXT), len(head.blocks), torch.float32, ids.device
    )
    x, *deep = [states[layer] for layer in layers]
    features = head.lm_head_input(x, inputs, caches, states_before(head, deep, roots))
    lm_head = as_torch(checkpoint.lm_head()).float()
    logits: NDArray[np.float32] = (features @ lm_head.T)[0].detach().numpy()
    return logits


def drafted_logits(directory: Path, backend: str) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Root, age and logits of every draft step, in rounds that commit the text."""
    engines = open_engines(
        directory,
        load_manifest(directory),
        EngineOptions(backend.removesuffix("-standard"), 1, draft=True),
    )
    assert engines.draft is not None
    assert isinstance(engines.draft, CpuEngine) == (backend == "ort" and not operators.missing())
    cache = engines.verify.new_kv_caches()[0]
    cache.reserve(SLOTS)
    verify = OnCache(engines.verify, cache)
    draft = OnCache(engines.draft, cache)
    verify.prefill(TEXT[: ROUNDS[0][0]], 0)
    for root, committed in ROUNDS:
        for age in range(min(committed + 2, len(TEXT) - root)):  # the last two are rejected
            at = root + age
            yield root, age, draft.forward([TEXT[at]], [at], at, at).logits[0].copy()
        verify.forward(TEXT[root : root + committed], range(root, root + committed), root, root)


@pytest.fixture(
    scope="module",
    params=[("llama-bias", 1), ("qwen3", 2), ("qwen2.5-tied", 1), ("mistral", 1)],
    ids=str,
)
def exported(
    request: pytest.FixtureRequest, family_dir: FamilyDir, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    family, blocks = request.param
    path = tmp_path_factory.mktemp("deep")
    model = family_dir(family)
    deep_head(Checkpoint(model), path / "head", blocks)
    command = (
        "--model",
        model,
        "--dtype",
        "float32",
        "--quantize",
        "none",
        "--quantize-draft",
        "none",
        "--max-seq-len",
        SLOTS,
    )
    succeed(export_main, *command, "--exit-head", path / "head", "--output", path / "plans")
    succeed(export_main, *command, "--exit-layer", 1, "--output", path / "untrained")
    (path / "model").symlink_to(model)
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_draft_what_training_computes(
    exported: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "ort-standard":
        monkeypatch.setattr(operators, "missing", lambda: "left out")
    checkpoint = Checkpoint((exported / "model").resolve())
    head = load_exit_head(checkpoint, exported / "head")
    by_age = [aged_logits(checkpoint, head, fixed_roots(age)) for age in range(AGES)]
    seen = list(drafted_logits(exported / "plans", backend))
    for root, age, logits in seen:
        np.testing.assert_allclose(logits, by_age[age][root + age], atol=2e-4)
    # A stale deep state is one of another age, and would be noticed.
    assert all(
        np.abs(logits - by_age[age + 1][root + age]).max() > 2e-3
        for root, age, logits in seen
        if age + 1 < AGES
    )


def test_random_roots_are_rounds_of_at_most_so_many_ages() -> None:
    roots = random_roots(3, 200, seed=1, number=7)
    ages = torch.arange(200) - roots
    assert torch.equal(roots, random_roots(3, 200, seed=1, number=7))
    assert not torch.equal(roots, random_roots(3, 200, seed=1, number=8))
    assert int(ages.min()) == 0 and int(ages.max()) == AGES - 1
    assert 0.25 < float((ages == 0).float().mean()) < 0.45


def test_mixed_ages_in_one_pass_are_those_of_passes_of_one_age(
    family_dir: FamilyDir, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(family_dir("llama-bias"))
    head = deep_head(checkpoint, tmp_path)
    [roots] = random_roots(1, len(TEXT), seed=2, number=0)
    mixed = aged_logits(checkpoint, head, roots)
    for at, root in enumerate(roots.tolist()):
        expected = aged_logits(checkpoint, head, fixed_roots(at - root))[at]
        np.testing.assert_allclose(mixed[at], expected, atol=1e-5)


def test_an_untrained_deep_head_is_the_plain_one(family_dir: FamilyDir) -> None:
    checkpoint = Checkpoint(family_dir("qwen3-bias"))
    decoder = load_decoder(checkpoint)
    ids = torch.tensor([TEXT])
    states, _ = Teacher(decoder, (1, 2, 3), 1, "float32")(ids)
    inputs, caches = full_sequence_inputs(
        checkpoint.geometry, 1, len(TEXT), 1, torch.float32, ids.device
    )
    plain = make_initial_head(checkpoint, ExitConfig(1))
    deep = make_initial_head(checkpoint, ExitConfig(1, deep=(2, 3)))
    expected = plain.lm_head_input(states[1], inputs, caches)
    state = states_before(deep, [states[2], states[3]], fixed_roots(2))
    found = deep.lm_head_input(states[1], inputs, caches, state)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_verify_has_the_bits_that_it_has_without_deep_layers(exported: Path) -> None:
    logits = []
    for name in ("plans", "untrained"):
        engines = open_engines(
            exported / name, load_manifest(exported / name), EngineOptions("ort", 1, draft=False)
        )
        cache = engines.verify.new_kv_caches()[0]
        cache.reserve(SLOTS)
        logits.append(
            OnCache(engines.verify, cache).forward(TEXT, range(len(TEXT)), 0).logits.copy()
        )
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize("backend", ["ort", "torch"])
@pytest.mark.parametrize(
    "speculation", [Speculation(controller="fixed:k=4"), Speculation(tree=2), Speculation()]
)
def test_drafting_changes_no_token(exported: Path, backend: str, speculation: Speculation) -> None:
    llm = load(exported / "plans", backend=backend, threads=1)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        plain = llm.with_speculation(None).generate(TEXT[:6], max_new_tokens=40, sampling=sampling)
        found = llm.with_speculation(speculation).generate(
            TEXT[:6], max_new_tokens=40, sampling=sampling
        )
        assert found.tokens == plain.tokens


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_kept_prefixes_hold_the_deep_states(exported: Path, backend: str) -> None:
    assert check_kept_prefixes(exported / "plans", backend, [*TEXT, *TEXT[:12]]) > 200


def test_what_does_not_fit_is_refused(exported: Path, tmp_path: Path) -> None:
    model = (exported / "model").resolve()
    command = ("--model", model, "--exit-head", exported / "head", "--output", tmp_path / "plans")
    assert_refused(run(export_main, *command, "--stages", 2), "deep layers")
    for deep in ((1,), (2, 2), (3, 2), (99,)):
        config = exit_head_file.read_exit_config(exported / "head", Checkpoint(model).fingerprint())
        exit_head_file.save_config(dataclasses.replace(config, deep=deep), exported / "head")
        try:
            assert_refused(run(export_main, *command), "deep layers must ascend")
        finally:
            exit_head_file.save_config(config, exported / "head")
