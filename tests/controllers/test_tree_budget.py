"""Tests that a budget chooses which of the draft's proposals are verified, and that the tokens
remain those of plain decoding."""

from typing import Any

import numpy as np
import pytest
from support.command import slow_but
from support.harness import Harness, finish
from support.lossless_checks import (
    PROMPTS,
    SAMPLINGS,
    check_cache,
    check_joint,
    check_same_tokens,
    drafted,
)

from eesd.controllers import DraftStep, RoundOutcome, SiblingLabel, make_controller
from eesd.controllers.base import Fixed
from eesd.controllers.calibration import features, sigmoid
from eesd.controllers.tree_budget import COVERED, TreeBudget
from eesd.runtime.decoding.draft_tree import DraftTree
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.llm import Speculation, load

pytestmark = pytest.mark.fast

DRAFT = 0.1
PLAIN = 1.0
NODE = 0.05
"""How many seconds a draft step takes, how many a verify pass over the root takes, and how many
each additional node adds."""


def step(margin: float = 1.0) -> DraftStep:
    return DraftStep(depth=1, probability=0.6, path_probability=0.6, margin=margin, nodes=1)


def outcome(steps: int, accepted: int, nodes: int) -> RoundOutcome:
    drafting = DRAFT * steps
    verifying = PLAIN + NODE * nodes
    return RoundOutcome(steps, drafting, steps, nodes, verifying, accepted, num_expanded=accepted)


def observe(budget: TreeBudget, labels: list[SiblingLabel], round: RoundOutcome) -> None:
    budget.value.observe(round)
    budget.observe(round._replace(labels=labels))


def taught(budget: TreeBudget, rounds: int = 64, accepted: int = 2) -> TreeBudget:
    """Returns a budget that has seen rounds of all sizes. Each round had the same number of tokens,
    so the budget's rate is known and v(n) is linear."""
    for number in range(rounds):
        observe(budget, [], outcome(3, accepted, number % 12 + 1))
    return budget


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("spec", ["fixed:k=4", "cost-aware-ts"])
def test_drafting_with_a_budget_gives_the_tokens_of_plain_decoding(
    harness: Harness, name: str, width: int, spec: str
) -> None:
    budget = TreeBudget()
    accepted = 0
    for prompt in PROMPTS:
        accepted += check_same_tokens(
            harness, prompt, SAMPLINGS[name], make_controller(spec), width, budget=budget
        ).accepted_tokens
    assert accepted and (budget.covered, budget.missed) != COVERED


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["greedy", "T1"])
def test_the_cache_after_each_round_is_that_of_a_prefill(
    harness: Harness, name: str, width: int
) -> None:
    check_cache(
        harness, PROMPTS[2], SAMPLINGS[name], make_controller("fixed:k=4"), width, TreeBudget()
    )


@pytest.mark.parametrize("width", slow_but([1, 2], 2))
def test_rejection_sampling_follows_the_verifier(five_token_harness: Harness, width: int) -> None:
    sampling = Sampling(temperature=1.0, method="rejection")
    check_joint(
        five_token_harness, [3], sampling, make_controller("fixed:k=2"), width, budget=TreeBudget()
    )


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_best_of_the_proposed_paths_are_verified(harness: Harness, width: int) -> None:
    budget = taught(TreeBudget())
    tree = drafted(harness, PROMPTS[2], make_controller("fixed:k=4"), width, budget)
    proposed = {tuple(child.path()): child.rank for node in tree.nodes for child in node.candidates}
    for most in (1, 3, 7, 32):
        tree._max_nodes = most
        verified = tree.prune()
        paths = {tuple(node.path()) for node in verified[1:]}
        assert 1 <= len(paths) == len(verified) - 1 <= most
        assert all(node.parent in verified for node in verified[1:]), "a node lost its parent"
        assert [node.index for node in verified] == list(range(len(verified)))
        assert min(proposed[path] for path in paths) >= max(
            (proposed[p] for p in proposed.keys() - paths), default=-np.inf
        )


def test_a_chain_is_drafted_as_without_a_budget(harness: Harness) -> None:
    """Each step continues from the first choices, as on a device that drafts ahead."""
    for prompt in PROMPTS:
        alone, budgeted = (
            drafted(harness, prompt, make_controller("fixed:k=6"), 1, budget)
            for budget in (None, TreeBudget())
        )
        assert [node.token for node in budgeted.nodes] == [node.token for node in alone.nodes]


def test_a_chain_without_logits_has_the_engines_candidates() -> None:
    """All candidates are among the likeliest tokens that the draft engine returns."""

    def no_logits() -> Any:
        raise AssertionError("a chain that was drafted ahead has no logits")

    outputs = StepOutputs(no_logits, np.array([[5, 3]]), np.array([[-0.5, -1.5]], np.float32))
    sampler = make_sampler(Sampling(), vocab_size=10)
    tree = DraftTree(7, 8, 1, taught(TreeBudget()))
    tree.grow([sampler.propose(tree.root, outputs, 0, tree.branching)])
    assert [node.token for node in tree.nodes] == [7, 5]
    assert {node.token for node in tree.prune()[1:]} <= {5, 3}


def test_a_chain_gets_second_candidates(harness: Harness) -> None:
    """With the same number of drafted tokens there are fewer rounds, because some second choices
    are right."""
    chain, budgeted = (
        harness.session(
            PROMPTS[2],
            SAMPLINGS["T0.7"],
            make_controller("fixed:k=3"),
            budget=budget,
            new_tokens=80,
        )
        for budget in (None, TreeBudget())
    )
    assert len(finish(budgeted)) < len(finish(chain))
    assert chain.stats.draft_tokens == chain.stats.draft_steps


class Listener(Fixed):
    """A controller that drafts three tokens, and stores the outcomes that it observes."""

    def __init__(self) -> None:
        super().__init__(k=3)
        self.told: list[RoundOutcome] = []

    def observe(self, outcome: RoundOutcome) -> None:
        self.told.append(outcome)


@pytest.mark.parametrize("budget", [None, TreeBudget()], ids=["all", "budget"])
def test_second_candidates_are_not_expanded(harness: Harness, budget: TreeBudget | None) -> None:
    listener = Listener()
    session = harness.session(PROMPTS[2], SAMPLINGS["T0.7"], listener, budget=budget, new_tokens=80)
    finish(session)
    assert sum(outcome.accepted for outcome in listener.told) == session.stats.accepted_tokens
    ahead = [outcome.accepted - outcome.num_expanded for outcome in listener.told]
    assert set(ahead) == ({0, 1} if budget else {0}), "behind a second choice nothing was drafted"
    assert all(outcome.steps >= outcome.depth >= outcome.accepted for outcome in listener.told)


def test_the_python_api_keeps_one_budget(harness: Harness) -> None:
    plain = load(harness.directory, threads=1, speculation=None).generate(
        PROMPTS[0], max_new_tokens=30
    )
    llm = load(harness.directory, threads=1, speculation=Speculation("fixed:k=3", tree=2))
    for _ in range(2):
        assert llm.generate(PROMPTS[0], max_new_tokens=30).tokens == plain.tokens
    drafter = llm.drafting.drafter
    assert drafter and drafter.budget and drafter.budget.covered != COVERED[0]


def test_chances_are_calibrated_and_shared_by_scores() -> None:
    """The first choice has the calibrated chance. The other choices share the remaining probability
    by their scores, in order."""
    budget = TreeBudget()
    z, (first, *others) = budget.chances(step(), [-0.5, -1.5, -2.0, -4.0])
    assert z == budget.accept.score(features(step())) and first == pytest.approx(sigmoid(z))
    assert others == sorted(others, reverse=True)
    assert sum(others) == pytest.approx((1 - first) * COVERED[0] / sum(COVERED))
    assert others[0] / others[1] == pytest.approx(np.exp(1.25 * 0.5))
    assert budget.chances(step(), [-0.5])[1] == [first]
    unsure = DraftStep(depth=1, probability=0.1, path_probability=0.1, margin=0.0, nodes=1)
    _, (first, *others) = budget.chances(unsure, [-2.0, -2.0, -9.0])
    assert first < 0.5 and max(others) == first, "no other is likelier than the first"


def test_the_budget_learns_how_often_other_candidates_are_right() -> None:
    budget = TreeBudget()
    random = np.random.default_rng(0)
    z = budget.accept.score(features(step()))
    for _ in range(4000):
        miss = random.random() < 0.4
        chosen = (1 if random.random() < 0.3 else None) if miss else 0
        observe(budget, [SiblingLabel(z, chosen)], outcome(1, int(not miss), 4))
    _, (first, *others) = budget.chances(step(), [-0.5, -1.5, -2.0, -4.0])
    assert first == pytest.approx(0.6, abs=0.05)
    assert sum(others) / (1 - first) == pytest.approx(0.3, abs=0.03)


def test_the_size_has_the_best_value_of_all_sizes() -> None:
    budget = taught(TreeBudget())
    rate = budget.value.rate
    random = np.random.default_rng(1)
    sizes = set()
    for _ in range(200):
        values = sorted((random.random(12) ** 4).tolist(), reverse=True)
        worth = [sum(values[:n]) - rate * NODE * n for n in range(1, 13)]
        assert worth[budget.size(values) - 1] > max(worth) - 0.01
        sizes.add(budget.size(values))
    assert len(sizes) > 5


def test_sizes_stay_near_those_that_were_measured() -> None:
    budget = TreeBudget()
    assert budget.size([0.9] * 12) == budget.value.verify.known == 4
    observe(budget, [], outcome(3, 1, 5))
    assert budget.size([0.9] * 12) == 10
    assert budget.size([0.9] * 2) == 2
