"""Turn logits into a distribution. This module has a request's sampling options, their effect on
logits, and reproducible noise."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eesd.common.checks import check_choice, check_integer, check_number, shown
from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.common.errors import EESDError
from eesd.runtime.engines.base import Logits, check_largest

Vector = NDArray[np.float64]

LIKELY = 9.0
"""Tokens whose log-probability is at most this many nats below that of the most likely token are
tried first."""
BLOCK = 32
"""Number of scores per block in the search for the k-th largest score."""
METHODS = ("coupled", "rejection")


@dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens.

    Attributes:
        temperature: Divisor of the logits. 0 means greedy decoding.
        top_k: Keep the k most likely tokens. 0 turns this filter off.
        top_p: Keep the smallest set of tokens with at least this probability. 1 turns this filter
            off.
        min_p: Keep tokens whose probability is at least this share of the most likely token's
            probability. 0 turns this filter off.
        repetition_penalty: Number by which the logits of seen tokens are divided or multiplied. 1
            has no effect.
        presence_penalty: Number that is subtracted from the logit of each token that was generated.
            0 has no effect. Tokens of the prompt do not count.
        frequency_penalty: Number that is subtracted from the logit of a token once for each time
            that the token was generated. 0 has no effect.
        logit_bias: Numbers that are added to the logits of tokens. It is a mapping from token ids,
            or a sequence of pairs.
        seed: Seed of the request's random numbers. If it is None, each request draws a seed.
        method: How drafts are verified at temperature > 0. With ``coupled``, the same seed gives
            the same text with and without drafting. With ``rejection``, only the distribution is
            the same.

    Raises:
        EESDError: A value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    method: str = "coupled"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_number(
            "temperature",
            self.temperature,
            lambda x: 0 <= x < 100,
            "a number of at least 0 and below 100",
        )
        check_integer("top_k", self.top_k, 0, 2**63 - 1)
        check_number("top_p", self.top_p, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        check_number(
            "min_p", self.min_p, lambda x: 0 <= x < 1, "a number of at least 0 and below 1"
        )
        wanted = "a number of at least 0.01 and at most 100"
        check_number(
            "repetition_penalty", self.repetition_penalty, lambda x: 0.01 <= x <= 100, wanted
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), lambda x: -2 <= x <= 2, "a number from -2 to 2")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**63 - 1)
        check_choice("The sampling method", self.method, METHODS)

    def of_text(self, prompt: int = 0, choice: int = 0) -> "Sampling":
        """Return these options with the seed of one text. This is needed if there are several
        prompts and several choices for each prompt. If the options have no seed, a seed is drawn.

        The first text uses the seed itself. The seed of every other text is a random number from
        Philox, so no two texts share any noise.
        """
        if self.seed is None:
            return self if self.greedy else replace(self, seed=secrets.randbits(63))
        if prompt == choice == 0:
            return self
        bits = np.random.Philox(key=[self.seed, 2], counter=[0, 0, prompt, choice]).random_raw()
        return replace(self, seed=int(bits) >> 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def counts(self) -> bool:
        """Whether the options use the number of times that a token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def reweighs(self) -> bool:
        """Whether the options add anything to logits. If they do, the host chooses tokens, even if
        the logits are on a device."""
        return self.counts or bool(self.logit_bias)


def _pairs(bias: object) -> tuple[tuple[int, float], ...]:
    """Return a logit bias as a tuple of pairs, which can be hashed."""
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise EESDError(f"logit_bias is {shown(bias)}; give a mapping of token ids to numbers.")
    for token, value in pairs:
        check_integer("A token of logit_bias", token, 0, 2**63 - 1)
        check_number(
            "A value of logit_bias", value, lambda x: -100 <= x <= 100, "a number from -100 to 100"
        )
    return pairs


def add_to(logits: Logits, changes: Mapping[int, float], columns: DraftColumns = WHOLE) -> Logits:
    """Return logits with ``changes`` added for some tokens. Tokens without a column are left
    out."""
    if not changes:
        return logits
    tokens = np.fromiter(changes, np.int64)
    values = np.fromiter(changes.values(), np.float32)
    known = columns.has(tokens, len(logits))
    changed = logits.copy()
    changed[columns.of(tokens[known])] += values[known]
    return changed


def count_penalties(sampling: Sampling, counts: Mapping[int, int]) -> dict[int, float]:
    """Return the presence and frequency penalties of tokens. They depend on the number of times
    that each token was generated."""
    return {
        token: -sampling.presence_penalty - sampling.frequency_penalty * count
        for token, count in counts.items()
    }


def penalize(logits: Logits, penalty: float, seen: Iterable[int]) -> Logits:
    """Return logits [V] with the repetition penalty (Keskar 2019). The logits of seen tokens are
    divided by the penalty if they are positive, and multiplied by it if they are negative."""
    if penalty == 1:
        return logits
    tokens = np.fromiter(set(seen), dtype=np.int64)
    changed = logits.copy()
    scores = changed[tokens]
    changed[tokens] = np.where(scores > 0, scores / penalty, scores * penalty)
    return changed


def warp(logits: Logits, sampling: Sampling, normalized: bool = True) -> Vector:
    """Return the log-probabilities [V] after the temperature, and then the filters top-k, top-p and
    min-p. They are -inf for tokens that a filter removed.

    The filters have the same order as in ``transformers``. Each filter works on the tokens that the
    previous filter kept, after their probabilities are renormalised. If ``normalized`` is false,
    the same number is missing from all results. This saves time if only their order counts.

    Raises:
        EESDError: A logit is NaN, or infinitely large.
    """
    scores = logits.astype(np.float64)
    largest = scores.max()
    check_largest(largest)
    scores -= largest
    # With a tiny temperature, all scores except the best become -inf, which is the correct limit.
    with np.errstate(over="ignore"):
        scores /= sampling.temperature
    tokens = None
    if 0 < sampling.top_k < len(logits):
        tokens = np.flatnonzero(scores >= _kth_largest(scores, sampling.top_k))
        scores = scores[tokens]
    if sampling.top_p < 1:
        kept = _nucleus(normalize(scores), sampling.top_p)
        tokens = kept if tokens is None else tokens[kept]
        scores = scores[kept]
    if sampling.min_p > 0:
        kept = np.flatnonzero(scores >= scores.max() + np.log(sampling.min_p))
        tokens = kept if tokens is None else tokens[kept]
        scores = scores[kept]
    scores = normalize(scores) if normalized else scores
    if tokens is None:
        return scores
    logprobs = np.full(len(logits), -np.inf)
    logprobs[tokens] = scores
    return logprobs


def normalize(scores: Vector) -> Vector:
    """Turn scores [n] into log-probabilities."""
    shifted: Vector = scores - scores.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _kth_largest(scores: Vector, k: int) -> np.float64:
    """Return the k-th largest score. The k-th largest of the maximums of all blocks is a lower
    bound, so only the few scores that reach this bound are sorted."""
    if len(scores) >= 4 * k * BLOCK:
        maxima = scores[: len(scores) // BLOCK * BLOCK].reshape(-1, BLOCK).max(1)
        scores = scores[scores >= np.partition(maxima, -k)[-k]]
    kth: np.float64 = np.partition(scores, -k)[-k]
    return kth


def _nucleus(logprobs: Vector, top_p: float) -> NDArray[np.int64]:
    """Return the indices, in ascending order, of the smallest set of most likely tokens whose total
    probability is at least ``top_p``."""
    # A set of the most likely tokens with enough probability contains the nucleus, so the other
    # tokens need not be sorted.
    for reach in (LIKELY, 2 * LIKELY, np.inf):
        candidates = np.flatnonzero(logprobs >= logprobs.max() - reach)
        order = candidates[np.argsort(-logprobs[candidates], kind="stable")]
        probabilities = np.exp(logprobs[order])
        total = np.cumsum(probabilities)
        if total[-1] >= top_p:
            break
    return np.sort(order[total - probabilities < top_p])


def philox(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return a random generator that depends only on these three numbers. It is counter-based, so
    there is no state to keep or roll back."""
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, index, 0]))


class GumbelNoise:
    """The Gumbel noise of each position of one request. The draft and the verifier use the same
    noise.

    It is made from the raw output of Philox4x64-10, whose values its paper defines (Salmon et al.
    2011), so they do not depend on the version of NumPy. The two logarithms are computed only for
    tokens that could be among the best.
    """

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self._size = size
        self._kept: dict[int, tuple[NDArray[np.uint64], float]] = {}
        """52 random bits for each token [V], and the largest noise of any token, for each
        position."""

    def at(self, position: int) -> Vector:
        """Return the noise g [V] for the token at ``position`` of the sequence."""
        return _gumbel(self._bits(position)[0])

    def best(
        self, scores: Vector, position: int, count: int, columns: DraftColumns = WHOLE
    ) -> tuple[NDArray[np.int64], Vector]:
        """Return all columns, in ascending order, that may be among the ``count`` best of
        ``scores`` plus noise. Also return their noisy scores.

        The other columns are left out because even the largest noise would not lift them into the
        ``count`` best. Columns that a filter removed may be left out, too. A column has the noise
        of its token.
        """
        bits, largest = self._bits(position)
        peak = scores.max()
        likely = np.flatnonzero(scores >= peak - LIKELY)
        noisy = scores[likely] + _gumbel(bits[columns.tokens(likely)])
        if count <= len(likely):
            reach = (
                (noisy.max() if count == 1 else np.partition(noisy, -count)[-count])
                - largest
                - 1e-9
            )
            if reach > peak - LIKELY:
                return likely, noisy
        else:
            reach = -np.inf
        found = np.flatnonzero((scores >= reach) & (scores > -np.inf))
        return found, scores[found] + _gumbel(bits[columns.tokens(found)])

    def _bits(self, position: int) -> tuple[NDArray[np.uint64], float]:
        kept = self._kept.get(position)
        if kept is None:
            if len(self._kept) >= 16:  # enough for most rounds; each position takes 8 V bytes
                self._kept.pop(next(iter(self._kept)))
            bits = np.random.Philox(key=[self._seed, 0], counter=[0, 0, position, 0]).random_raw(
                self._size
            )
            bits >>= np.uint64(12)  # with 53 bits the uniform number would sometimes round up to 1
            kept = self._kept[position] = bits, float(_gumbel(bits.max()))
        return kept


def _gumbel(bits: NDArray[np.uint64]) -> Vector:
    """Return the Gumbel noise that 52 random bits give."""
    noise: Vector = -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-52))
    return noise
