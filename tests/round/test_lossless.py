"""Tests that drafting changes only the speed. The tokens, the ends of texts and the cache are the
same with every controller."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.harness import (
    FIRST_SLOTS,
    Harness,
    PauseUntil,
    RandomStop,
    finish,
    generated,
    recording_drafts,
)
from support.lossless_checks import (
    GREEDY,
    PROMPTS,
    SAMPLINGS,
    cache_of,
    check_cache,
    check_draft_ids,
    check_reduced_proposals,
    check_same_tokens,
    check_tree_drafts,
    drafted_logits,
)

import eesd
from eesd.common.errors import EESDError
from eesd.controllers import Controller, DraftStep, make_controller
from eesd.runtime.decoding.sampling import normalize
from eesd.runtime.engines.kv_cache import HostKVCache
from eesd.runtime.llm import Speculation
from eesd.runtime.session import Session

pytestmark = pytest.mark.fast

CONTROLLERS = {
    "fixed:k=4": "default_harness",
    "fixed:k=1": "harness",
    "calibration-ts": "default_harness",
    "beta-ts": "harness",
    "cost-aware-ts": "default_harness",
    "random": "harness",
}
"""The name of the fixture that each case uses. Half of the cases run on the default engine, half on
ONNX Runtime's own operators."""
ENGINES = pytest.mark.parametrize(
    ("name", "engine"), [("greedy", "default_harness"), ("T1", "harness")]
)


@pytest.fixture
def either(engine: str, request: pytest.FixtureRequest) -> Harness:
    """The harness with this name."""
    found: Harness = request.getfixturevalue(engine)
    return found


def controller(spec: str) -> Controller:
    return RandomStop(seed=3, chance=0.7) if spec == "random" else make_controller(spec, seed=3)


@pytest.mark.parametrize(("spec", "engine"), CONTROLLERS.items())
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafting_gives_the_tokens_of_plain_decoding(
    either: Harness, name: str, width: int, spec: str
) -> None:
    totals = Counter[str]()
    for prompt in PROMPTS:
        stats = check_same_tokens(either, prompt, SAMPLINGS[name], controller(spec), width)
        totals.update(accepted=stats.accepted_tokens, judged=sum(stats.verified_at_depth))
    by_clock = spec == "cost-aware-ts"  # all drafts of this controller may be accepted
    assert 0 < totals["accepted"] < totals["judged"] + by_clock, (
        "acceptance and rejection must both occur"
    )


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("name", ["greedy", "T1"])
def test_an_exit_head_of_two_blocks_is_lossless(
    two_block_harness: Harness, name: str, width: int
) -> None:
    harness = two_block_harness
    assert harness.manifest.exit_head.blocks == 2 and harness.manifest.num_caches == 6
    stats = check_same_tokens(harness, PROMPTS[0], SAMPLINGS[name], controller("fixed:k=4"), width)
    assert stats.accepted_tokens
    check_cache(harness, PROMPTS[0], SAMPLINGS[name], controller("fixed:k=4"), width)


@pytest.mark.parametrize("spec", ["fixed:k=4", "random"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_vocabulary_is_lossless(
    reduced_harness: Harness, name: str, width: int, spec: str
) -> None:
    """The tokens are right even if the draft cannot predict the verifier's token."""
    stats = check_same_tokens(reduced_harness, PROMPTS[2], SAMPLINGS[name], controller(spec), width)
    assert 0 < stats.accepted_tokens < sum(stats.verified_at_depth)
    plain = generated(reduced_harness.session(PROMPTS[2], SAMPLINGS[name]))
    assert any(token % 5 == 0 for token in plain)


def test_a_draft_vocabulary_keeps_the_cache(reduced_harness: Harness) -> None:
    check_cache(reduced_harness, PROMPTS[2], SAMPLINGS["T1"], controller("fixed:k=4"), width=3)


def test_the_draft_names_its_candidates_by_their_ids(reduced_harness: Harness) -> None:
    check_draft_ids(reduced_harness, PROMPTS[2])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("name", list(SAMPLINGS)[1:])
def test_a_draft_vocabulary_proposes_as_if_all_other_logits_were_infinitely_low(
    name: str, method: str, count: int
) -> None:
    check_reduced_proposals(replace(SAMPLINGS[name], method=method), count)


@pytest.mark.parametrize("width", [1, 2, 3])
@ENGINES
def test_the_cache_after_each_round_is_that_of_a_prefill(
    either: Harness, name: str, width: int
) -> None:
    check_cache(either, PROMPTS[2], SAMPLINGS[name], controller("fixed:k=4"), width)


@pytest.mark.parametrize(("width", "engine"), [(2, "default_harness"), (3, "harness")])
def test_tree_drafts_as_its_chains_would(either: Harness, width: int) -> None:
    check_tree_drafts(either, PROMPTS[2], width)


def test_the_python_api_is_lossless(harness: Harness) -> None:
    llm = eesd.load(
        harness.directory, threads=1, speculation=Speculation("beta-ts", tree=2, guard=True)
    )
    plain = eesd.load(harness.directory, threads=1, speculation=None)
    for sampling in SAMPLINGS.values():
        expected = plain.generate(PROMPTS[0], sampling, max_new_tokens=50)
        assert expected.stats.drafting_rounds == 0
        for draft in (True, False):
            actual = llm.generate(PROMPTS[0], sampling, max_new_tokens=50, draft=draft)
            assert (actual.tokens, actual.finish_reason) == (
                expected.tokens,
                expected.finish_reason,
            )


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("new_tokens", [1, 2, 3, 17])
def test_max_new_tokens_is_exact(harness: Harness, new_tokens: int, width: int) -> None:
    longer = generated(harness.session(PROMPTS[0], new_tokens=30))
    session = harness.session(
        PROMPTS[0], GREEDY, controller("fixed:k=8"), width, new_tokens=new_tokens
    )
    assert generated(session) == longer[:new_tokens]
    assert session.finish_reason == "length"
    assert (
        session.stats.new_tokens
        == session.stats.accepted_tokens + session.stats.rounds
        == new_tokens
    )
    with pytest.raises(EESDError, match="finished"):
        session.step()


@pytest.mark.parametrize("width", [1, 2])
def test_statistics_add_up(harness: Harness, width: int) -> None:
    session = harness.session(
        PROMPTS[0], SAMPLINGS["T1"], controller("random"), width, new_tokens=60
    )
    rounds = finish(session)
    stats = session.stats
    assert stats.prompt_tokens == len(PROMPTS[0])
    assert (
        stats.new_tokens
        == sum(len(r.tokens) for r in rounds)
        == stats.accepted_tokens + stats.rounds
        == 60
    )
    assert stats.rounds == len(rounds) >= stats.drafting_rounds == stats.verified_at_depth[0]
    assert (
        stats.accepted_tokens == sum(r.num_accepted for r in rounds) == sum(stats.accepted_at_depth)
    )
    assert all(r.num_accepted == len(r.tokens) - 1 for r in rounds)
    assert (
        stats.drafting_rounds
        <= stats.draft_steps
        <= stats.draft_tokens
        <= stats.draft_steps * width
    )
    assert stats.acceptance == stats.accepted_tokens / sum(stats.verified_at_depth)
    assert all(
        deeper <= accepted
        for deeper, accepted in zip(
            stats.verified_at_depth[1:], stats.accepted_at_depth, strict=False
        )
    )
    assert stats.host_seconds > 0 and stats.draft_seconds > 0 and stats.verify_seconds > 0
    assert json.loads(json.dumps(stats.to_dict()))["tokens_per_round"] == 60 / len(rounds)


def accepted_token(session: Session) -> int:
    """Returns a token that first occurs inside an accepted path."""
    seen: set[int] = set()
    for number, result in enumerate(finish(session)):
        inside = [token for token in result.tokens[:-2] if token not in seen]
        if number > 2 and inside:
            return inside[-1]
        seen.update(result.tokens)
    raise AssertionError("no path long enough")


@pytest.mark.parametrize("width", [1, 3])
@ENGINES
def test_eos_inside_an_accepted_path_ends_the_text(either: Harness, name: str, width: int) -> None:
    harness = either
    sampling = SAMPLINGS[name]
    eos = accepted_token(
        harness.session(PROMPTS[0], sampling, controller("fixed:k=6"), width, new_tokens=200)
    )
    plain = harness.session(PROMPTS[0], sampling, new_tokens=200, eos=(96, eos))
    drafting = harness.session(
        PROMPTS[0], sampling, controller("fixed:k=6"), width, new_tokens=200, eos=(96, eos)
    )
    assert generated(drafting) == generated(plain)
    assert drafting.tokens[-1] == eos and drafting.tokens.count(eos) == 1 + PROMPTS[0].count(eos)
    assert drafting.finish_reason == plain.finish_reason == "stop"
    stats = drafting.stats
    assert (
        stats.new_tokens
        == len(drafting.tokens) - len(PROMPTS[0])
        == stats.accepted_tokens + stats.rounds - 1
    )
    assert stats.accepted_tokens == sum(stats.accepted_at_depth), (
        "what was accepted behind EOS is not committed"
    )


@pytest.mark.parametrize("width", [1, 3])
@ENGINES
@pytest.mark.parametrize("left", [1, 2, 5, 40])
def test_the_end_of_the_cache_ends_the_text(
    either: Harness, left: int, name: str, width: int
) -> None:
    harness = either
    slots = either.manifest.max_seq_len
    prompt = np.random.default_rng(0).integers(0, 97, slots - left).tolist()
    plain = harness.session(prompt, SAMPLINGS[name], new_tokens=1000)
    drafting = harness.session(
        prompt, SAMPLINGS[name], controller("fixed:k=6"), width, new_tokens=1000
    )
    assert generated(drafting) == generated(plain)
    assert drafting.finish_reason == plain.finish_reason == "length"
    assert len(drafting.tokens) == slots
    with pytest.raises(EESDError, match="shorten the prompt"):
        harness.session(drafting.tokens)


@pytest.mark.parametrize("width", [1, 2])
def test_the_cache_grows_while_decoding(harness: Harness, width: int) -> None:
    workspace = harness.workspace()
    session = harness.session(
        PROMPTS[0], GREEDY, controller("fixed:k=4"), width, new_tokens=150, workspace=workspace
    )
    assert generated(session) == generated(harness.session(PROMPTS[0], new_tokens=150))
    # The cache grows by 128 slots.
    assert isinstance(workspace.kv_cache, HostKVCache) and workspace.kv_cache.slots == 256
    expected = cache_of(harness.fresh_prefill(session.tokens), session.tokens)
    np.testing.assert_allclose(cache_of(workspace, session.tokens), expected, rtol=0, atol=1e-4)


def test_a_short_text_does_not_pay_for_a_long_one_before_it(harness: Harness) -> None:
    workspace = harness.workspace()
    generated(harness.session(PROMPTS[0], new_tokens=150, workspace=workspace))
    workspace.kv_cache.reset()
    assert isinstance(workspace.kv_cache, HostKVCache) and workspace.kv_cache.slots == FIRST_SLOTS
    again = harness.session(
        PROMPTS[0], GREEDY, controller("fixed:k=4"), new_tokens=150, workspace=workspace
    )
    assert generated(again) == generated(harness.session(PROMPTS[0], new_tokens=150))


@pytest.mark.parametrize("rest", [1, 7, 20])
def test_drafts_are_as_good_after_plain_rounds(harness: Harness, rest: int) -> None:
    """The verifier also fills the exit head's cache, so nothing is missing after a pause of the
    draft."""
    rested, logits = recording_drafts(harness.workspace())
    session = harness.session(
        PROMPTS[0], GREEDY, controller("fixed:k=3"), guard=PauseUntil(rest), workspace=rested
    )
    assert not any(session.step().num_accepted for _ in range(rest)) and not logits
    always, expected = recording_drafts(harness.workspace())
    fresh = harness.session(session.tokens, GREEDY, controller("fixed:k=3"), workspace=always)
    assert session.step() == fresh.step()
    assert logits.keys() == expected.keys() and len(logits) == 3
    for slot, row in logits.items():
        np.testing.assert_allclose(row, expected[slot], rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [1, 3])
def test_a_pause_costs_no_acceptance(harness: Harness, width: int) -> None:
    """The test compares this run with a run that always drafts. After the pause there is a first
    position at which both runs begin a round. From this position on, the runs are equal."""
    always = harness.session(PROMPTS[0], GREEDY, controller("fixed:k=3"), width)
    rested = harness.session(
        PROMPTS[0],
        GREEDY,
        controller("fixed:k=3"),
        width,
        guard=PauseUntil(15),
        workspace=harness.workspace(),
    )
    starts = {}
    for session in (always, rested):
        begun = [len(session.tokens)]
        rounds = finish(session)
        for result in rounds:
            begun.append(begun[-1] + len(result.tokens))
        starts[session] = dict(zip(begun, rounds, strict=False))
    meeting = min(
        start
        for start in starts[rested]
        if start > len(PROMPTS[0]) + 15 and start in starts[always]
    )
    for start in starts[always]:
        assert start < meeting or starts[always][start] == starts[rested][start]


@pytest.mark.parametrize("seed", range(5))
def test_coupled_tree_accepts_at_least_what_its_chain_would(harness: Harness, seed: int) -> None:
    sampling = replace(SAMPLINGS["T1"], seed=seed)
    tree = harness.session(PROMPTS[0], sampling, controller("fixed:k=4"), width=3)
    while tree.finish_reason is None:
        chain = harness.session(
            tree.tokens, sampling, controller("fixed:k=4"), workspace=harness.workspace()
        )
        alone = chain.step()
        result = tree.step()
        if tree.finish_reason is None:  # the last round has less room
            assert result.tokens[: len(alone.tokens)] == alone.tokens


class Watcher(RandomStop):
    """Keeps its observations."""

    def __init__(self) -> None:
        super().__init__(seed=0, chance=1.0)
        self.steps: list[DraftStep] = []

    def keep_drafting(self, step: DraftStep) -> bool:
        self.steps.append(step)
        return step.depth < 3


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_controller_is_told_the_figures_of_the_best_node(
    harness: Harness, prompt: list[int], width: int
) -> None:
    """The controller receives, for each step, the figures of the best node of the level. The test
    recomputes them from the draft's logits at the node's parent."""
    watcher = Watcher()
    tree, logits = drafted_logits(harness, prompt, watcher, width)
    path_probability = {tree.root: 1.0}
    for node in tree.nodes[1:]:
        assert node.parent is not None
        q = np.exp(normalize(logits[node.parent.index].astype(np.float64)))
        path_probability[node] = path_probability[node.parent] * float(q[node.token])
    assert [step.depth for step in watcher.steps] == [1, 2, 3]
    for step in watcher.steps:
        best = max(
            (node for node in tree.nodes if node.depth == step.depth),
            key=path_probability.__getitem__,
        )
        assert best.parent is not None
        assert step.path_probability == pytest.approx(path_probability[best], rel=1e-4)
        assert step.probability == pytest.approx(
            path_probability[best] / path_probability[best.parent], rel=1e-4
        )
