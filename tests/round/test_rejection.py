"""Tests that rejection sampling is exact. All outcomes of a five-token vocabulary have the
verifier's joint distribution."""

from collections import Counter
from itertools import product

import pytest
from support.command import slow_but
from support.harness import Harness, RandomStop
from support.lossless_checks import Joint, check_joint, check_sampler, exact_joint, g_test

from eesd.bench.replay.replay import Threshold
from eesd.controllers import Controller, make_controller
from eesd.controllers.calibration import RejectionTS
from eesd.runtime.decoding.sampling import Sampling

PROMPT = [3]
PLAIN = Sampling(temperature=1.0, method="rejection")


def controller(spec: str) -> Controller:
    if spec == "threshold":
        return Threshold(p=0.27)
    if spec == "default":
        return RejectionTS(1, None)
    return RandomStop(seed=1) if spec == "random" else make_controller(spec, seed=1)


@pytest.mark.parametrize(
    "spec", slow_but(["fixed:k=1", "fixed:k=2", "random", "threshold", "default"], "default")
)
def test_chains_follow_the_verifiers_distribution(five_token_harness: Harness, spec: str) -> None:
    check_joint(five_token_harness, PROMPT, PLAIN, controller(spec), width=1)


@pytest.mark.parametrize(
    ("width", "spec"),
    slow_but([(2, "fixed:k=2"), (3, "fixed:k=2"), (2, "random"), (3, "random")], (3, "random")),
)
def test_trees_follow_the_verifiers_distribution(
    five_token_harness: Harness, width: int, spec: str
) -> None:
    check_joint(five_token_harness, PROMPT, PLAIN, controller(spec), width)


OPTIONS = {
    "cold-top-p": Sampling(temperature=0.6, top_p=0.85, method="rejection"),
    "hot-top-k-top-p": Sampling(temperature=1.7, top_k=3, top_p=0.9, method="rejection"),
    "min-p-penalty": Sampling(
        temperature=1.2, min_p=0.15, repetition_penalty=1.6, method="rejection"
    ),
}


@pytest.mark.parametrize(
    ("options", "width"), slow_but([*product(OPTIONS, (1, 2))], ("hot-top-k-top-p", 2))
)
def test_every_sampling_option_keeps_the_distribution(
    five_token_harness: Harness, options: str, width: int
) -> None:
    check_joint(five_token_harness, PROMPT, OPTIONS[options], controller("random"), width)


@pytest.mark.parametrize("width", slow_but([1, 3], 3))
def test_coupled_follows_the_same_distribution(five_token_harness: Harness, width: int) -> None:
    check_joint(
        five_token_harness,
        PROMPT,
        Sampling(temperature=1.3, top_p=0.9),
        controller("random"),
        width,
    )


@pytest.mark.parametrize("width", slow_but([1, 2, 3], 2))
def test_the_sampler_alone_follows_p(width: int) -> None:
    check_sampler(width)


@pytest.mark.parametrize("width", slow_but([1, 2], 1))
def test_the_sampler_alone_follows_p_with_a_draft_vocabulary(width: int) -> None:
    check_sampler(width, draft_vocab=(1, 3))


@pytest.mark.parametrize("width", slow_but([1, 2], 2))
def test_a_draft_vocabulary_follows_the_verifiers_distribution(
    reduced_five_token_harness: Harness, width: int
) -> None:
    check_joint(reduced_five_token_harness, PROMPT, PLAIN, controller("fixed:k=2"), width)


def test_a_longer_prompt_keeps_the_distribution(five_token_harness: Harness) -> None:
    check_joint(five_token_harness, [0, 4, 2, 2, 1, 3], PLAIN, controller("fixed:k=2"), width=1)


def test_g_test_knows_a_wrong_distribution() -> None:
    expected: Joint = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    assert g_test(Counter({(0,): 503, (1,): 296, (2,): 201}), expected) > 0.5
    assert g_test(Counter({(0,): 560, (1,): 250, (2,): 190}), expected) < 1e-3
    assert g_test(Counter({(0,): 500, (1,): 300, (3,): 1}), expected) == 0


def test_joint_sums_to_one(five_token_harness: Harness) -> None:
    joint = exact_joint(five_token_harness, PROMPT, PLAIN)
    assert len(joint) == 125
    assert sum(joint.values()) == pytest.approx(1)
