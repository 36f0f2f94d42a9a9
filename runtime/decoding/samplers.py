"""How drafts are proposed and how they are accepted: greedy, coupled, and rejection sampling.

A sampler serves one request. It proposes children of a draft node from the draft's logits, and after the verify pass walks
down the tree and says which path is accepted and which token comes after it. All three are lossless:

* ``Greedy``: the verifier's token is its argmax, whatever was drafted.
* ``Coupled`` (Daliri et al. 2024, arXiv 2408.07978): the verifier's token at position t is argmax(log p_t + g_t) with noise g_t
  that depends on seed and position alone; the draft proposes the best of log q_t + g_t.
* ``Rejection`` (Leviathan et al. 2023): a chain samples x ~ q and accepts it with probability min(1, p/q), else draws from the
  normalised positive part of p - q; a tree proposes the likeliest tokens of q and accepts child x with probability p(x),
  else removes x from p, renormalises and tries its sibling.
"""

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple, Protocol

import numpy as np

from eesd.runtime.decoding.sampling import GumbelNoise, Logits, Sampling, Vector, normalize, penalize, philox, warp
from eesd.runtime.decoding.tree import TokenTree
from eesd.runtime.engines.base import StepOutputs


class Proposal(NamedTuple):
    """A candidate child: its token, its log-probability under the draft, and its rank among the candidates of a level.

    ``score`` sums along a path, and a level keeps the paths with the largest sums: the log-probability where the draft's
    distribution is all that is known; with coupled sampling how far the noisy score lies below the best one's, because there
    a child is likely the verifier's own when it is near the best, however improbable it was before the noise.
    ``margin`` is how far the score (with noise, if it has any) lies above the best other token's, infinite if there is none: of
    all that the draft shows the best single sign of whether the verifier will agree.
    """

    token: int
    logprob: float
    score: float
    margin: float


class AcceptResult(NamedTuple):
    """The accepted nodes, root's child first, and the verifier's own token behind them."""

    path: list[int]
    token: int


class SpecSampler(Protocol):
    follows_draft: bool
    """Whether a chain's proposals are simply the draft's likeliest tokens, so that it can be drafted without asking."""

    def begin(self, tokens: Sequence[int]) -> None:
        """A round starts; ``tokens`` is everything committed, the root last."""
        ...

    def propose(self, tree: TokenTree, node: int, outputs: StepOutputs, row: int, width: int) -> list[Proposal]:
        """The ``width`` best children for ``node``, whose draft results are in ``row``."""
        ...

    def accept(self, tree: TokenTree, outputs: StepOutputs) -> AcceptResult:
        """Judge the tree by the verifier's results for its nodes."""
        ...


def make_sampler(sampling: Sampling, vocab_size: int) -> SpecSampler:
    if sampling.greedy:
        return Greedy(sampling)
    return Coupled(sampling, vocab_size) if sampling.method == "coupled" else Rejection(sampling)


def _best(scores: Vector | Logits, width: int) -> list[int]:
    """Indices of the ``width`` largest scores, largest first; the lower index first among equals."""
    if width == 1:
        return [int(scores.argmax())]
    cut = np.partition(scores, -width)[-width]
    candidates = np.flatnonzero(scores >= cut)
    return [int(i) for i in candidates[np.argsort(-scores[candidates], kind="stable")][:width]]


def _margins(scores: Vector, tokens: list[int]) -> list[float]:
    """How far the score of each of ``tokens`` lies above that of the best other token. ``scores`` comes back as it was."""
    margins = []
    for token in tokens:
        own = scores[token]
        scores[token] = -np.inf
        margins.append(float(own - scores.max()))
        scores[token] = own
    return margins


def _likeliest(logprobs: Vector, width: int) -> list[Proposal]:
    """The tokens that have the largest log-probabilities, which are their scores."""
    tokens = [token for token in _best(logprobs, width) if logprobs[token] > -np.inf]
    pairs = zip(tokens, _margins(logprobs, tokens), strict=True)
    return [Proposal(token, float(logprobs[token]), float(logprobs[token]), margin) for token, margin in pairs]


class _Base:
    follows_draft = False

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._tokens: Sequence[int] = ()

    def begin(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def _penalized(self, logits: Logits, tree: TokenTree, node: int) -> Logits:
        """Logits after ``node``, with the repetition penalty for everything on the way there."""
        if self._sampling.repetition_penalty == 1:
            return logits
        drafted = [tree.tokens[n] for n in tree.path(node)]
        return penalize(logits, self._sampling.repetition_penalty, [*self._tokens, *drafted])

    def _position(self, tree: TokenTree, node: int) -> int:
        """Position in the sequence of the token that follows ``node``."""
        return len(self._tokens) + tree.depths[node]


class _Deterministic(_Base):
    """Walks the tree along the verifier's own tokens, which do not depend on what was drafted."""

    def accept(self, tree: TokenTree, outputs: StepOutputs) -> AcceptResult:
        node = 0
        path: list[int] = []
        while True:
            token = self._target(tree, node, outputs)
            child = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
            if child is None:
                return AcceptResult(path, token)
            path.append(child)
            node = child

    def _target(self, tree: TokenTree, node: int, outputs: StepOutputs) -> int:
        raise NotImplementedError


class Greedy(_Deterministic):
    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling)
        self.follows_draft = sampling.repetition_penalty == 1

    def propose(self, tree: TokenTree, node: int, outputs: StepOutputs, row: int, width: int) -> list[Proposal]:
        ids, logprobs = outputs.topk_ids, outputs.topk_logprobs
        if self.follows_draft and ids is not None and logprobs is not None:
            width = min(width, ids.shape[1])  # all that there is of a chain that was drafted ahead
            tokens, top = ids[row].tolist(), logprobs[row].tolist()
            ahead = [top[1] if len(top) > 1 else log(max(1 - exp(top[0]), 1e-9)), *[top[0]] * (width - 1)]
            return [Proposal(tokens[i], top[i], top[i], top[i] - ahead[i]) for i in range(width)]
        return _likeliest(normalize(self._penalized(outputs.logits[row], tree, node).astype(np.float64)), width)

    def _target(self, tree: TokenTree, node: int, outputs: StepOutputs) -> int:
        if self.follows_draft:
            return outputs.argmax(node)
        return int(self._penalized(outputs.logits[node], tree, node).argmax())


class Coupled(_Deterministic):
    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        super().__init__(sampling)
        self._noise = GumbelNoise(sampling.seed, vocab_size)

    def propose(self, tree: TokenTree, node: int, outputs: StepOutputs, row: int, width: int) -> list[Proposal]:
        logprobs = warp(self._penalized(outputs.logits[row], tree, node), self._sampling)
        noisy = logprobs + self._noise.at(self._position(tree, node))
        best = [token for token in _best(noisy, width) if logprobs[token] > -np.inf]
        scores = noisy[best] - noisy[best[0]]
        columns = (logprobs[best].tolist(), scores.tolist(), _margins(noisy, best))
        return [Proposal(token, *values) for token, *values in zip(best, *columns, strict=True)]

    def _target(self, tree: TokenTree, node: int, outputs: StepOutputs) -> int:
        logprobs = warp(self._penalized(outputs.logits[node], tree, node), self._sampling)
        return int((logprobs + self._noise.at(self._position(tree, node))).argmax())


class Rejection(_Base):
    """The random numbers of a round depend on seed and position of its root alone: a cancelled round leaves no trace."""

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self._random = philox(self._sampling.seed, 1, len(tokens))
        self._sampled: dict[int, Vector] = {}
        """q after each node whose single child was sampled from it."""

    def propose(self, tree: TokenTree, node: int, outputs: StepOutputs, row: int, width: int) -> list[Proposal]:
        logprobs = warp(self._penalized(outputs.logits[row], tree, node), self._sampling)
        if width > 1:
            return _likeliest(logprobs, width)
        self._sampled[node] = q = np.exp(logprobs)
        token = self._draw(q)
        return [Proposal(token, float(logprobs[token]), float(logprobs[token]), _margins(logprobs, [token])[0])]

    def accept(self, tree: TokenTree, outputs: StepOutputs) -> AcceptResult:
        node = 0
        path: list[int] = []
        while True:
            p = np.exp(warp(self._penalized(outputs.logits[node], tree, node), self._sampling))
            child = None
            for candidate in tree.children(node):
                token = tree.tokens[candidate]
                q = self._sampled.get(node)
                ratio = p[token] if q is None else p[token] / q[token]
                if self._random.random() < ratio:
                    child = candidate
                    break
                p = np.maximum(p - q, 0) if q is not None else np.where(np.arange(len(p)) == token, 0.0, p)
                p /= p.sum()
            if child is None:
                return AcceptResult(path, self._draw(p))
            path.append(child)
            node = child

    def _draw(self, probabilities: Vector) -> int:
        """A token with the given probabilities [V], by inversion."""
        cumulative = np.cumsum(probabilities)
        token = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return min(token, len(probabilities) - 1)
