"""Tests that compare the distributions that are computed from logits with the plain definitions.
Other tests check the noise that chooses a token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import gumbel_r, kstest
from support.lossless_checks import Vector, reference_probabilities

from eesd.runtime.decoding.sampling import GumbelNoise, Sampling, penalize, philox, warp

pytestmark = pytest.mark.fast

OPTIONS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 120),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.9),
    repetition_penalty=st.floats(0.5, 3),
)


def random_logits(seed: int, size: int = 97) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def distribution(
    logits: NDArray[np.float32], options: Sampling, seen: list[int] | None = None
) -> Vector:
    probabilities: Vector = np.exp(
        warp(penalize(logits, options.repetition_penalty, seen or []), options)
    )
    return probabilities


@settings(derandomize=True, deadline=None, max_examples=400)
@given(options=OPTIONS, seed=st.integers(0, 1000))
def test_distribution_is_the_defined_one(options: Sampling, seed: int) -> None:
    logits = random_logits(seed)
    seen = [3, 5, 5, 96]
    actual = distribution(logits, options, seen)
    np.testing.assert_allclose(
        actual, reference_probabilities(logits, options, seen), rtol=1e-4, atol=1e-6
    )
    assert actual.sum() == pytest.approx(1)


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_exact(top_p: float) -> None:
    logits = random_logits(1, size=32000)
    options = Sampling(temperature=1.0, top_p=top_p)
    np.testing.assert_allclose(
        distribution(logits, options), reference_probabilities(logits, options), atol=1e-9
    )


def test_each_filter_works_on_what_the_ones_before_it_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # If only the top two tokens are left, .4 becomes .571, so a nucleus of .5 contains only that
    # token. Without top-k, the nucleus contains both.
    assert distribution(logits, Sampling(temperature=1.0, top_k=2, top_p=0.5)).tolist() == [
        1,
        0,
        0,
        0,
    ]
    assert distribution(logits, Sampling(temperature=1.0, top_p=0.5)) == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    # The temperature of 2 flattens the distribution first. The value .4 becomes .326, so a nucleus
    # of .4 needs two tokens.
    assert np.count_nonzero(distribution(logits, Sampling(temperature=2.0, top_p=0.4))) == 2
    assert np.count_nonzero(distribution(logits, Sampling(temperature=1.0, min_p=0.6))) == 2


def test_filters_never_leave_nothing() -> None:
    options = Sampling(temperature=0.01, top_k=1, top_p=1e-9, min_p=0.99)
    assert distribution(random_logits(2), options).max() == 1
    assert distribution(
        np.zeros(5, np.float32), Sampling(temperature=1.0, top_k=2)
    ) == pytest.approx([0.2] * 5)


def test_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    assert penalize(logits, 2.0, [0, 1, 1]).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]
    assert penalize(logits, 1.0, [0]) is logits


def test_noise_depends_on_seed_and_position_alone() -> None:
    noise = GumbelNoise(seed=7, size=50)
    first = noise.at(3).copy()
    for position in range(500):
        noise.at(position)
    assert np.array_equal(noise.at(3), first) and np.array_equal(GumbelNoise(7, 50).at(3), first)
    assert np.array_equal(GumbelNoise(7, 20).at(3), first[:20])
    assert (
        not np.isin(first, noise.at(4)).any() and not np.isin(first, GumbelNoise(8, 50).at(3)).any()
    )


def test_noise_is_gumbel_noise() -> None:
    values = np.concatenate(
        [GumbelNoise(seed, 200).at(position) for seed in range(10) for position in range(10)]
    )
    assert kstest(values, gumbel_r.cdf).pvalue > 1e-3


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_whatever_the_bits(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Infinite noise would choose a token that the filters removed."""

    class Stuck:
        def __init__(self, **_: Any) -> None: ...

        def random_raw(self, size: int) -> NDArray[np.uint64]:
            return np.full(size, bits, np.uint64)

    monkeypatch.setattr(np.random, "Philox", Stuck)
    assert np.isfinite(GumbelNoise(0, 4).at(0)).all()


def test_random_streams_are_apart() -> None:
    draws = {
        (seed, stream, index): philox(seed, stream, index).random()
        for seed in (0, 1)
        for stream in (0, 1)
        for index in (5, 6)
    }
    assert len(set(draws.values())) == len(draws)
    assert philox(0, 1, 5).random() == draws[0, 1, 5]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    options=OPTIONS,
    seed=st.integers(0, 1000),
    size=st.sampled_from([7, 97, 4096]),
    count=st.integers(1, 5),
)
def test_the_best_tokens_are_those_of_all_scores_plus_noise(
    options: Sampling, seed: int, size: int, count: int
) -> None:
    """Noise is computed for few tokens, and none of the best is missed."""
    scores = warp(random_logits(seed, size), options)
    noise = GumbelNoise(seed, size)
    tokens, noisy = noise.best(scores, seed, count)
    expected = scores + noise.at(seed)
    np.testing.assert_array_equal(noisy, expected[tokens])
    finite = [
        token for token in np.argsort(-expected, kind="stable")[:count] if expected[token] > -np.inf
    ]
    assert set(finite) <= set(tokens.tolist())
