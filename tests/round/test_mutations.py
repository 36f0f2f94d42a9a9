"""Tests that make the classic mistakes of speculative decoding on purpose. Each mistake must make
its check fail.

Most mutants are the runtime's own source with one expression replaced. If the runtime changes such
an expression, the test fails until its mutation is adapted. For this reason, every mutation always
tests something.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_models
from support.command import export_engine, slow_but
from support.harness import (
    Harness,
    PauseUntil,
    RandomStop,
    SometimesCopies,
    Wrapped,
    without_budget,
)
from support.lossless_checks import (
    DRAFT_VOCAB,
    cache_of,
    check_cache,
    check_draft_ids,
    check_interrupted_anywhere,
    check_joint,
    check_reduced_proposals,
    check_same_tokens,
    check_sampler,
    check_tree_drafts,
)
from support.mutants import mutate
from support.without_operators import needs_operators, without_operators

from eesd.common.draft_vocab import DraftColumns
from eesd.controllers import make_controller
from eesd.export import onnx_graph
from eesd.export.onnx_ops import OnnxOperations
from eesd.runtime.compare import compare
from eesd.runtime.decoding import round as decoding_round
from eesd.runtime.decoding import samplers, sampling
from eesd.runtime.decoding.draft_tree import DraftTree
from eesd.runtime.decoding.round import Policy, Round, TokenSequence
from eesd.runtime.decoding.samplers import Coupled, Rejection, SpecSampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines import cpu_engine
from eesd.runtime.engines.base import Call, Logits, StepOutputs
from eesd.runtime.engines.cpu_cache import CpuKVCache
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.engines.ort_engine import OrtEngine
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.llm import Speculation, load

TREE = Speculation("fixed:k=4", tree=3, guard=False)
PROMPT = [60, 2, 44, 44, 17, 8, 90, 31]
REPEATING = [3, 1, 4, 1, 0, 3, 1, 4, 2, 3, 1]
GREEDY = Sampling()
COUPLED = Sampling(temperature=1.0, seed=2)
REJECTION = Sampling(temperature=1.0, method="rejection")


def caught() -> AbstractContextManager[Any]:
    """Check that the check fails, and that it fails for the right reason."""
    return pytest.raises(
        AssertionError,
        match=r"not follow|changed the tokens|changed the logits|Not equal to tolerance|miscounted",
    )


UNSCALED = ("_judge", "p /= p.sum()", "pass")
NOT_ZEROED = ("_judge", "np.where(np.arange(len(p)) == token, 0.0, p)", "p")
RESIDUAL = "np.maximum(p - q, 0)"
BONUS_FROM_Q = "self._draw(p if node.children else self._sampled.get(node.parent, p))"


@pytest.mark.parametrize(
    ("edits", "widths"),
    [
        pytest.param([UNSCALED], [2, 3], id="residual not renormalised between siblings"),
        # Inversion works with a residual of any scale, so in a chain ``_draw`` must be broken, too.
        pytest.param(
            [UNSCALED, ("_draw", " * cumulative[-1]", "")],
            [1],
            id="residual not renormalised in a chain",
        ),
        pytest.param(
            [("_judge", RESIDUAL, "p")], [1], id="rejected token drawn from p, not from p - q"
        ),
        pytest.param([("_judge", RESIDUAL, "q")], [1], id="rejected token drawn from q"),
        pytest.param(
            [("_judge", "self._draw(p)", BONUS_FROM_Q)], [1], id="bonus token drawn from q"
        ),
        pytest.param(
            [("_judge", "p[token] / q[token]", "p[token]")],
            [1],
            id="chain accepted with p, not with p / q",
        ),
        pytest.param([NOT_ZEROED], [2, 3], id="a sibling not zeroed"),
    ],
)
def test_a_mistake_in_rejection_sampling_is_caught(
    monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str, str]], widths: list[int]
) -> None:
    for name, old, new in edits:
        mutate(monkeypatch, Rejection, name, old, new)
    for width in widths:
        with caught():
            check_sampler(width, draws=3000)


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        pytest.param(
            SpecSampler,
            "_proposals",
            "self._columns.tokens(columns).tolist()",
            "columns",
            id="map forgotten",
        ),
        pytest.param(
            DraftColumns,
            "spread",
            "np.zeros(vocab_size)",
            "np.full(vocab_size, 0.3)",
            id="q not zero elsewhere",
        ),
        pytest.param(
            DraftColumns,
            "spread",
            "spread[self._ids] = values",
            "spread[: len(values)] = values",
            id="q by column",
        ),
    ],
)
def test_a_draft_vocabulary_that_breaks_rejection_sampling_is_caught(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str
) -> None:
    mutate(monkeypatch, owner, name, old, new)
    with caught(), np.errstate(divide="ignore", invalid="ignore"):
        check_sampler(1, draws=3000, draft_vocab=(1, 3))


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        pytest.param(
            SpecSampler,
            "_proposals",
            "self._columns.tokens(columns).tolist()",
            "columns",
            id="map forgotten",
        ),
        pytest.param(
            SpecSampler,
            "_adjusted",
            "columns.of([*self._tokens, *node.path()])",
            "{3, 5, 9, 60}",
            id="penalty",
        ),
        pytest.param(
            sampling.GumbelNoise, "best", "columns.tokens(likely)", "likely", id="noise by column"
        ),
        pytest.param(
            sampling.GumbelNoise,
            "best",
            "columns.tokens(found)",
            "found",
            id="noise by column, unlikely tokens",
        ),
    ],
)
def test_a_mistake_in_the_draft_vocabulary_shows_in_the_proposals(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str
) -> None:
    """All other mistakes with the draft vocabulary reduce only acceptance, because the output does
    not depend on the drafts."""
    mutate(monkeypatch, owner, name, old, new)
    with caught():
        check_reduced_proposals(Sampling(temperature=1.0, repetition_penalty=1.5), count=8)


def test_a_draft_graph_that_forgets_the_draft_vocabulary_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, onnx_graph, "_write_draft", "if head.draft_vocab:", "if False:")
    # The build for the CPU would refuse a graph without the map.
    monkeypatch.setattr(tiny_models, "build_for_cpu", lambda *_: None)
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    ids = tuple(DRAFT_VOCAB.tolist())
    forgetful = Harness(
        tiny_models.export_tiny(model, tmp_path / "plans", slots=64, draft_vocab=ids)
    )
    check_same_tokens(forgetful, PROMPT, GREEDY, make_controller("fixed:k=4"), width=1)
    with caught():
        check_draft_ids(forgetful, PROMPT)


def trimming(draft: Callable[..., None]) -> Callable[..., None]:
    """A mistake that drops the last drafted token because of its value."""

    def trimmed(rounds: Sequence[Round], policy: Policy) -> None:
        draft(rounds, policy)
        [current] = rounds
        if current.tree.steps and current.tree.nodes[-1].token in (1, 4):
            current.tree.nodes.pop().index = -1

    return trimmed


@pytest.mark.slow
def test_trimming_by_the_drafted_token_is_wrong_with_rejection_alone(
    five_token_harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimming is wrong with rejection sampling only, because the output of other samplers does not
    depend on the drafts."""
    monkeypatch.setattr(decoding_round, "draft", trimming(decoding_round.draft))
    with caught():
        check_joint(five_token_harness, [3], REJECTION, make_controller("fixed:k=2"), width=1)
    check_joint(
        five_token_harness,
        [3],
        replace(REJECTION, method="coupled"),
        make_controller("fixed:k=2"),
        width=1,
    )
    for sampled in (GREEDY, COUPLED):
        check_same_tokens(five_token_harness, [3], sampled, make_controller("fixed:k=2"), width=1)


def test_trimming_shifts_the_distribution_as_computed_by_hand() -> None:
    """Here p = (.5, .5) and q = (.9, .1). If a drafted 1 is discarded, the token 0 has the
    probability .55."""
    p = np.log(np.array([[0.5, 0.5]] * 2, np.float32))
    q = np.log(np.array([[0.9, 0.1]], np.float32))
    zeros = {True: 0, False: 0}
    draws = 4000
    for seed in range(draws):
        for trim in zeros:
            sampler = Rejection(replace(REJECTION, seed=seed))
            tree = DraftTree(0, max_nodes=1)
            sampler.begin_round([0])
            proposals = sampler.propose(tree.root, StepOutputs(q), 0, 1)
            tree.grow([[] if trim and proposals[0].token == 1 else proposals])
            path, bonus = sampler.accept(tree.root, StepOutputs(p))
            zeros[trim] += (path[0].token if path else bonus) == 0
    assert zeros[False] / draws == pytest.approx(0.5, abs=0.025)
    assert zeros[True] / draws == pytest.approx(0.55, abs=0.025)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            "(p[token] if q is None",
            "(p[token] ** 0.5 if q is None",
            id="what the text proposes accepted too often",
        ),
        pytest.param(*NOT_ZEROED[1:], id="the text's token not removed when it was rejected"),
        pytest.param(
            "drafted = self._sampled.get(node)",
            "drafted = p * 0 + 1",
            id="rejected text drawn from a residual",
        ),
    ],
)
def test_a_mistake_with_text_in_rejection_sampling_is_caught(
    five_token_harness: Harness, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    mutate(monkeypatch, Rejection, "_judge", old, new)
    with caught():
        check_joint(
            five_token_harness,
            REPEATING,
            REJECTION,
            None,
            width=1,
            draws=1000,
            text=SometimesCopies(),
        )


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        pytest.param(DraftTree, "follow", "parent.depth + 1", "1", id="depth"),
        pytest.param(
            DraftTree,
            "follow",
            "index=len(self.nodes)",
            "index=len(self.nodes) - 1",
            id="slot",
        ),
        pytest.param(SpecSampler, "_position", "+ node.depth", "", id="noise"),
    ],
)
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a draft"])
def test_a_mistake_with_text_is_caught(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    old: str,
    new: str,
    behind: bool,
) -> None:
    mutate(monkeypatch, owner, name, old, new)
    controller = make_controller("fixed:k=2") if behind else None
    text = SometimesCopies(share=0.0 if behind else 1.0)
    with caught():
        check_same_tokens(
            harness,
            PROMPT,
            Sampling(temperature=0.3),
            controller,
            width=1,
            new_tokens=100,
            text=text,
        )


def filters_first(logits: Logits, options: Sampling, normalized: bool = True) -> sampling.Vector:
    """A mistake that applies the temperature after top-k, top-p and min-p."""
    kept = sampling.warp(logits, replace(options, temperature=1.0), normalized)
    return sampling.normalize(kept / options.temperature)


@pytest.mark.parametrize("method", slow_but(["coupled", "rejection"], "coupled"))
def test_temperature_after_top_p_is_caught(
    five_token_harness: Harness, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    options = Sampling(temperature=0.6, top_p=0.7, method=method)
    monkeypatch.setattr(samplers, "warp", filters_first)
    with caught():
        check_joint(five_token_harness, [3], options, RandomStop(seed=1), width=1)


@pytest.mark.parametrize("options", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        pytest.param(None, "", "", "", id="none"),
        pytest.param(
            HostKVCache,
            "compact",
            "self.data[..., sources, :]",
            "self.data[..., targets, :]",
            id="stale slot",
        ),
        pytest.param(
            TokenSequence, "call", "root + node.depth", "root + node.index", id="positions"
        ),
        pytest.param(
            decoding_round,
            "tree_mask",
            "seen[node.index] |= seen[node.parent.index]",
            "seen[node.index, : node.index] = True",
            id="mask",
        ),
        pytest.param(Round, "commit", "compact(len(tokens)", "compact(len(tokens) - 1", id="root"),
    ],
)
def test_a_mistake_in_the_tree_is_caught(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    old: str,
    new: str,
    width: int,
    options: Sampling,
) -> None:
    """The mistakes are a compaction that moves nothing or to the wrong place, positions in draft
    order, and siblings that attend to each other."""
    if owner is not None:
        new = new.replace("targets", "list(range(start, start + len(sources)))")
        mutate(monkeypatch, owner, name, old, new)
    for check in (check_same_tokens, check_cache):
        with caught() if owner else nullcontext():
            check(harness, PROMPT, options, make_controller("fixed:k=4"), width)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("root + node.depth", "root + (node.index if first else node.depth)"),
        ("tree_mask(nodes, first)", "tree_mask(nodes, first) | (first > 0)"),
    ],
    ids=["positions", "mask"],
)
def test_a_mistake_in_the_drafts_tree_shows_in_its_logits(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """Mistakes in the draft's tree reduce only acceptance, so only the draft's logits show them."""
    mutate(monkeypatch, TokenSequence, "call", old, new)
    check_same_tokens(harness, PROMPT, GREEDY, make_controller("fixed:k=4"), width=2)
    with caught():
        check_tree_drafts(harness, PROMPT, width=2)


def test_noise_that_forgets_the_depth_is_caught(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, Coupled, "_position", "+ node.depth", "")
    for width in (1, 2):
        with caught():
            check_same_tokens(harness, PROMPT, COUPLED, make_controller("fixed:k=4"), width)


def test_a_penalty_that_forgets_the_draft_is_caught(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, SpecSampler, "_adjusted", "*node.path()", "")
    with caught():
        check_same_tokens(
            harness, PROMPT, Sampling(repetition_penalty=1.5), make_controller("fixed:k=4"), width=1
        )


def test_a_stale_exit_cache_is_caught(harness: Harness) -> None:
    """If a verify pass does not fill the exit head's cache, the tokens are right, but the next
    drafts are wrong."""
    workspace = harness.workspace()
    exit_cache = harness.manifest.geometry.num_layers
    kv_cache = workspace.kv_cache
    kept = list[Any]()
    assert isinstance(kv_cache, HostKVCache)

    def before(_: Sequence[int], __: int) -> None:
        kept[:] = [kv_cache.data[exit_cache].copy()]

    def after(_: Sequence[int], __: int, ___: object) -> None:
        kv_cache.data[exit_cache] = kept[0]

    stale = replace(workspace, verify=Wrapped(workspace.verify, before, after))
    running = harness.session(
        PROMPT, GREEDY, make_controller("fixed:k=4"), guard=PauseUntil(8), workspace=stale
    )
    for _ in range(8):
        running.step()
    fresh = cache_of(harness.fresh_prefill(running.tokens), running.tokens)
    actual = cache_of(workspace, running.tokens)
    np.testing.assert_allclose(actual[:exit_cache], fresh[:exit_cache], rtol=0, atol=1e-4)
    with caught():
        np.testing.assert_allclose(actual[exit_cache:], fresh[exit_cache:], rtol=0, atol=1e-4)


def last_bit(tokens: Sequence[int], _: int, outputs: StepOutputs) -> None:
    """An engine that changes the last bit of one logit in calls of several tokens."""
    if len(tokens) > 1:
        outputs.logits[-1, 5] = np.nextafter(outputs.logits[-1, 5], np.float32(np.inf))


def test_one_changed_bit_of_a_logit_is_caught(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = harness.workspace()
    broken = replace(parts, verify=Wrapped(parts.verify, after=last_bit))
    monkeypatch.setattr(harness, "workspace", lambda: broken)
    with caught():
        check_same_tokens(harness, PROMPT, GREEDY, make_controller("fixed:k=4"), width=1)


def export_unfolded(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """Export engines whose verify graph keeps heads separate, as the draft graph does. The
    attention of one token then has a single query."""
    monkeypatch.setattr(OnnxOperations, "_folded", lambda *_: False)
    model = tiny_models.build(directory / "model", 97, layers=3, damping=0.3, seed=0)
    return export_engine(model, directory / "plans", "--max-seq-len", 256)


def test_attention_over_a_single_query_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfolded = Harness(export_unfolded(monkeypatch, tmp_path))
    with caught():
        check_same_tokens(unfolded, PROMPT, GREEDY, make_controller("fixed:k=4"), width=1)
    exactness = Exactness(unfolded.manifest)
    exactness.check(
        OrtEngine(unfolded.directory, unfolded.manifest, unfolded.manifest.verify, threads=1)
    )
    assert "rows" in exactness.chains.kinds and exactness.chains.largest < 1e-4


def test_unpadded_calls_of_torch_are_caught(harness: Harness) -> None:
    verify, _ = open_torch(harness.directory, harness.manifest, 1, draft=False, device="cpu")
    for multiple, equal in ((4, True), (1, False)):
        verify.multiple = multiple
        exactness = Exactness(harness.manifest)
        exactness.check(verify)
        assert (exactness.chains.differing == 0) == equal


@pytest.fixture(scope="module")
def int8_plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("int8")
    model = tiny_models.build(directory / "model", 97, layers=3, damping=0.3, seed=0)
    return export_engine(model, directory / "plans", "--quantize", "int8", "--max-seq-len", 256)


def test_logits_of_displaced_nodes_are_caught(
    int8_plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_operators():
        llm = load(int8_plans, "ort", threads=1, speculation=TREE, exact=True)
    without_budget(llm)
    assert compare(llm, PROMPT, COUPLED, 60, ignore_eos=True).logits.differing == 0
    monkeypatch.setattr(decoding_round, "cut_displaced", lambda path, bonus: (path, bonus))
    assert compare(llm, PROMPT, COUPLED, 60, ignore_eos=True).logits.differing


def in_another_order(paths: Callable[[Call], list[list[int]]]) -> Callable[[Call], list[list[int]]]:
    """Every node sees its path in reverse order."""
    return lambda call: [path[::-1] for path in paths(call)]


def by_index(paths: Callable[[Call], list[list[int]]]) -> Callable[[Call], list[list[int]]]:
    """Every node sees all nodes before it."""
    return lambda call: paths(call._replace(tree_mask=np.tri(len(call.tokens)) > 0))


@needs_operators()
@pytest.mark.parametrize("mistake", [in_another_order, by_index])
def test_a_tree_that_sees_other_slots_or_in_another_order_is_caught(
    int8_plans: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]
) -> None:
    llm = load(int8_plans, "ort", threads=1, speculation=TREE)
    without_budget(llm)
    assert compare(llm, PROMPT, COUPLED, 60, ignore_eos=True).logits.differing == 0
    monkeypatch.setattr(cpu_engine, "_paths", mistake(cpu_engine._paths))
    found = compare(llm, PROMPT, COUPLED, 60, ignore_eos=True)
    assert found.logits.differing or found.divergence is not None


def stale(kv_cache: CpuKVCache, start: int, sources: list[int]) -> None:
    """A mistake: the compaction moves nothing."""


@needs_operators()
def test_a_cpu_cache_that_is_not_compacted_is_caught(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(harness.directory, "ort", threads=1, speculation=TREE)
    without_budget(llm)
    assert compare(llm, PROMPT, COUPLED, 60, ignore_eos=True).logits.differing == 0
    monkeypatch.setattr(CpuKVCache, "compact", stale)
    found = compare(llm, PROMPT, COUPLED, 60, ignore_eos=True)
    assert found.logits.differing or found.divergence is not None


def test_a_commit_in_pieces_is_caught(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "vars(sequence).update(\n        tokens=[*tokens, *result.tokens],\n"
        "        stats=sequence.stats.with_round(result),\n"
        "        finish_reason=result.finish_reason,\n    )"
    )
    pieces = (
        "sequence.tokens = [*tokens, *result.tokens]\n"
        "    sequence.stats = sequence.stats.with_round(result)\n"
        "    sequence.finish_reason = result.finish_reason"
    )
    mutate(monkeypatch, Round, "commit", line, pieces)
    with caught():
        check_interrupted_anywhere(
            lambda: harness.session(PROMPT, controller=make_controller("fixed:k=2"), new_tokens=8),
            1,
        )
