"""Samplers propose draft tokens, and decide which of them are accepted.

A sampler serves one request. It proposes children of a draft node from the draft's logits. After
the verify pass it walks down the tree, and returns the accepted path and the token after it, the
bonus token. All three samplers are lossless:

* ``Greedy``: The verifier's token is the argmax of its logits, whatever was drafted.
* ``Coupled`` (Daliri et al. 2024, arXiv 2408.07978): The verifier's token at position t is
  argmax(log p_t + g_t). The noise g_t depends only on the seed and the position. The draft proposes
  the tokens with the largest log q_t + g_t.
* ``Rejection`` (Leviathan et al. 2023, arXiv 2211.17192): In a chain, x ~ q is sampled, and
  accepted with probability min(1, p/q). If x is rejected, the next token is drawn from the
  normalised positive part of p - q. In a tree, the most likely tokens of q are proposed, and child
  x is accepted with probability p(x). If x is rejected, it is removed from p, p is renormalised,
  and the next sibling is tried.

If logits are on a device, ``Greedy`` and ``Coupled`` choose the same tokens there
(:mod:`~eesd.runtime.decoding.device_sampler`). For constraints, a logit bias, penalties that count
tokens, and rejection sampling, the logits are fetched to the host.

With a draft vocabulary, q has columns for only some of the tokens, and is zero for all other
tokens. Proposals are chosen among the columns, with the noise and the penalty of their tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.runtime.decoding.draft_tree import Node, Proposal
from eesd.runtime.decoding.sampling import (
    GumbelNoise,
    Sampling,
    Vector,
    add_to,
    count_penalties,
    normalize,
    penalize,
    philox,
    warp,
)
from eesd.runtime.engines.base import Choose, Logits, StepOutputs, most_likely

if TYPE_CHECKING:
    from eesd.runtime.decoding.device_sampler import DeviceSampler


class AcceptResult(NamedTuple):
    """The accepted nodes (the root's child is first), and the verifier's token after them."""

    path: list[Node]
    bonus_token: int


Allowed = Callable[[Sequence[int]], NDArray[np.bool_] | None]
"""A function that returns a mask [V] of the tokens that may follow the committed tokens and a path
of drafted tokens. It returns None if all tokens may follow."""


def make_sampler(
    sampling: Sampling,
    vocab_size: int,
    columns: DraftColumns = WHOLE,
    allowed: Allowed | None = None,
) -> "SpecSampler":
    """The sampler of a request.

    Args:
        sampling: Its options.
        vocab_size: V.
        columns: The token of each column of the draft's logits.
        allowed: A function that returns the tokens that may be chosen, at least one. It is None if
            all tokens may always be chosen.
    """
    if sampling.greedy:
        return Greedy(sampling, columns, allowed)
    if sampling.method == "coupled":
        return Coupled(sampling, vocab_size, columns, allowed)
    return Rejection(sampling, columns, allowed)


def _best(scores: Vector | Logits, count: int) -> list[int]:
    """Return the indices of the ``count`` largest scores, the largest score first. Among equal
    scores, the lower index is first."""
    if count == 1:
        return [int(scores.argmax())]
    cut = np.partition(scores, -count)[-count]
    candidates = np.flatnonzero(scores >= cut)
    return [int(i) for i in candidates[np.argsort(-scores[candidates], kind="stable")][:count]]


def _margins(scores: Vector, indices: list[int]) -> list[float]:
    """Return the score at each of ``indices`` minus the best other score. ``scores`` is changed
    during the call, but unchanged on return."""
    margins = []
    for index in indices:
        own = scores[index]
        scores[index] = -np.inf
        margins.append(float(own - scores.max()))
        scores[index] = own
    return margins


class SpecSampler:
    proposes_top_tokens = False
    """Whether the proposals for a chain are simply the draft's most likely tokens, so that an
    engine can draft the chain by itself."""

    def __init__(
        self, sampling: Sampling, columns: DraftColumns = WHOLE, allowed: Allowed | None = None
    ) -> None:
        self._sampling = sampling
        self._columns = columns
        self._allowed = allowed
        self._tokens: Sequence[int] = ()
        self._bias = dict(sampling.logit_bias)
        self._counts = sampling.counts
        self._generated = Counter[int]()  # occurrences of each token, if penalties need them
        self._counted = 0

    def begin_round(self, tokens: Sequence[int]) -> None:
        """Begin a round. ``tokens`` are all committed tokens, the root last."""
        # Before the first round there is only the prompt.
        if self._counts and self._counted:
            self._generated.update(tokens[self._counted :])
        self._tokens = tokens
        self._counted = len(tokens)

    def chooser(self, nodes: Sequence[Node], count: int) -> Choose | None:
        """Return a function that chooses tokens on a device. After each of these nodes it chooses
        ``count`` proposals or, if ``count`` is 0, the verifier's token. Return None if this sampler
        chooses from logits on the host, or from the engine's other outputs."""
        return None

    def propose(self, node: Node, outputs: StepOutputs, row: int, count: int) -> list[Proposal]:
        """Return the ``count`` best children for ``node``, the best child first. The draft's
        outputs for the node are in row ``row``."""
        raise NotImplementedError

    def accept(self, root: Node, outputs: StepOutputs) -> AcceptResult:
        """Accept a path of the tree according to the verifier's outputs. The outputs for a node are
        in row ``node.index``."""
        raise NotImplementedError

    def _adjusted(self, logits: Logits, node: Node, columns: DraftColumns = WHOLE) -> Logits:
        """Return the adjusted logits after ``node``. They include the bias, and the penalties for
        the committed tokens and the tokens on the node's path. They are -inf for tokens that are
        not allowed."""
        logits = add_to(logits, self._bias, columns)
        if self._sampling.repetition_penalty != 1:
            logits = penalize(
                logits, self._sampling.repetition_penalty, columns.of([*self._tokens, *node.path()])
            )
        if self._counts:
            logits = add_to(
                logits,
                count_penalties(self._sampling, self._generated + Counter(node.path())),
                columns,
            )
        mask = None if self._allowed is None else self._allowed(node.path())
        if mask is None:
            return logits
        return np.where(mask[columns.tokens(np.arange(len(logits)))], logits, np.float32(-np.inf))

    def _drafted(self, logits: Logits, node: Node) -> Vector | None:
        """Return the draft's log-probabilities after ``node``, with a column for each token that
        the draft can predict. Return None if it cannot predict any allowed token."""
        adjusted = self._adjusted(logits, node, self._columns)
        if self._allowed is not None and adjusted.max() == -np.inf:
            return None
        return warp(adjusted, self._sampling)

    def _proposals(
        self,
        columns: Sequence[int] | NDArray[np.int64],
        logprobs: Vector,
        scores: Sequence[float],
        margins: Sequence[float],
    ) -> list[Proposal]:
        """Return one proposal for each column. The other arguments have a value for each column."""
        tokens = self._columns.tokens(columns).tolist()
        return [
            Proposal(*values)
            for values in zip(tokens, logprobs.tolist(), scores, margins, strict=True)
        ]

    def _top(self, logprobs: Vector, count: int) -> list[Proposal]:
        """Propose the most likely tokens. Their scores are their log-probabilities."""
        columns = [column for column in _best(logprobs, count) if logprobs[column] > -np.inf]
        return self._proposals(
            columns, logprobs[columns], logprobs[columns].tolist(), _margins(logprobs, columns)
        )

    def _position(self, node: Node) -> int:
        """Return the position in the sequence of the token that follows ``node``."""
        return len(self._tokens) + node.depth


class _Deterministic(SpecSampler):
    """Walks the tree along the verifier's tokens, which do not depend on the draft."""

    _device: "DeviceSampler | None" = None

    def chooser(self, nodes: Sequence[Node], count: int) -> Choose | None:
        if self.proposes_top_tokens or self._allowed is not None or self._sampling.reweighs:
            return None
        if self._device is None:
            from eesd.runtime.decoding.device_sampler import DeviceSampler

            self._device = DeviceSampler(self._sampling, self._columns)
        return self._device.chooser(self._tokens, [node.path() for node in nodes], count)

    def _chosen(self, found: Vector, count: int) -> list[Proposal]:
        """Return the proposals that a device chose. ``found`` has their columns, log-probabilities
        and noisy scores, [3, at most count + 1]. A margin is a noisy score minus the best other
        noisy score."""
        columns, logprobs, noisy = found[:, found[2] > -np.inf]
        scores = noisy if self._sampling.greedy else noisy - noisy[0]
        others = [noisy[1] if len(noisy) > 1 else -np.inf, *[noisy[0]] * (len(noisy) - 1)]
        margins = (noisy - others).tolist()
        return self._proposals(columns.astype(np.int64), logprobs, scores.tolist(), margins)[:count]

    def accept(self, root: Node, outputs: StepOutputs) -> AcceptResult:
        node = root
        path: list[Node] = []
        while True:
            chosen, certain = (0, 0) if outputs.chosen is None else outputs.chosen[node.index]
            token = int(chosen) if certain else self._target(node, outputs)
            right = [
                child for child in node.candidates if child.token == token and child.index >= 0
            ]
            if not right:
                return AcceptResult(path, token)
            node = right[0]
            path.append(node)

    def _target(self, node: Node, outputs: StepOutputs) -> int:
        """Return the verifier's token after ``node``."""
        raise NotImplementedError


class Greedy(_Deterministic):
    def __init__(
        self, sampling: Sampling, columns: DraftColumns = WHOLE, allowed: Allowed | None = None
    ) -> None:
        super().__init__(sampling, columns, allowed)
        self.proposes_top_tokens = (
            sampling.repetition_penalty == 1 and allowed is None and not sampling.reweighs
        )

    def propose(self, node: Node, outputs: StepOutputs, row: int, count: int) -> list[Proposal]:
        ids = outputs.topk_ids
        logprobs = outputs.topk_logprobs
        if self.proposes_top_tokens and ids is not None and logprobs is not None:
            # There are no logits if the engine drafted a chain by itself.
            count = min(count, ids.shape[1])
            tokens = ids[row].tolist()
            top = logprobs[row].tolist()
            others = [
                top[1] if len(top) > 1 else log(max(1 - exp(top[0]), 1e-9)),
                *[top[0]] * (count - 1),
            ]
            return [Proposal(tokens[i], top[i], top[i], top[i] - others[i]) for i in range(count)]
        if outputs.chosen is not None:
            return self._chosen(outputs.chosen[row], count)
        adjusted = self._adjusted(outputs.logits[row], node, self._columns)
        if self._allowed is not None and adjusted.max() == -np.inf:
            return []
        return self._top(normalize(adjusted.astype(np.float64)), count)

    def _target(self, node: Node, outputs: StepOutputs) -> int:
        if self.proposes_top_tokens:
            return outputs.argmax(node.index)
        return most_likely(self._adjusted(outputs.logits[node.index], node))


class Coupled(_Deterministic):
    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        columns: DraftColumns = WHOLE,
        allowed: Allowed | None = None,
    ) -> None:
        super().__init__(sampling, columns, allowed)
        self._noise = GumbelNoise(sampling.seed or 0, vocab_size)

    def propose(self, node: Node, outputs: StepOutputs, row: int, count: int) -> list[Proposal]:
        if outputs.chosen is not None:
            return self._chosen(outputs.chosen[row], count)
        logprobs = self._drafted(outputs.logits[row], node)
        if logprobs is None:
            return []
        # This finds one more candidate, which the last margin needs.
        columns, noisy = self._noise.best(logprobs, self._position(node), count + 1, self._columns)
        best = [index for index in _best(noisy, min(count, len(noisy))) if noisy[index] > -np.inf]
        scores = noisy[best] - noisy[best[0]]
        return self._proposals(
            columns[best], logprobs[columns[best]], scores.tolist(), _margins(noisy, best)
        )

    def _target(self, node: Node, outputs: StepOutputs) -> int:
        logits = self._adjusted(outputs.logits[node.index], node)
        scores = warp(logits, self._sampling, normalized=False)  # the best is the same
        tokens, noisy = self._noise.best(scores, self._position(node), 1)
        return int(tokens[noisy.argmax()])


class Rejection(SpecSampler):
    """Rejection sampling. A round's random numbers depend only on the seed and the root's position,
    so a cancelled round leaves no trace."""

    def begin_round(self, tokens: Sequence[int]) -> None:
        super().begin_round(tokens)
        self._random = philox(self._sampling.seed or 0, 1, len(tokens))
        self._sampled: dict[Node, Vector] = {}
        """The distribution q (by column) from which a node's only child was sampled, for each such
        node."""

    def propose(self, node: Node, outputs: StepOutputs, row: int, count: int) -> list[Proposal]:
        logprobs = self._drafted(outputs.logits[row], node)
        if logprobs is None:
            return []
        if count > 1:
            return self._top(logprobs, count)
        self._sampled[node] = q = np.exp(logprobs)
        column = self._draw(q)
        return self._proposals(
            [column], logprobs[[column]], [float(logprobs[column])], _margins(logprobs, [column])
        )

    def accept(self, root: Node, outputs: StepOutputs) -> AcceptResult:
        node = root
        path: list[Node] = []
        while True:
            rank, token = self._judge(node, outputs.logits[node.index])
            if rank < 0:
                return AcceptResult(path, token)
            node = node.children[rank]
            path.append(node)

    def _judge(self, node: Node, logits: Logits) -> tuple[int, int]:
        """Return the index and the token of the accepted child. If all children are rejected,
        return -1 and the next token."""
        p = np.exp(warp(self._adjusted(logits, node), self._sampling))
        drafted = self._sampled.get(node)
        q = None if drafted is None else self._columns.spread(drafted, len(p))
        for rank, child in enumerate(node.children):
            token = child.token
            if self._random.random() < (p[token] if q is None else p[token] / q[token]):
                return rank, token
            p = (
                np.maximum(p - q, 0)
                if q is not None
                else np.where(np.arange(len(p)) == token, 0.0, p)
            )
            p /= p.sum()
        return -1, self._draw(p)

    def _draw(self, probabilities: Vector) -> int:
        """Draw an index with the given probabilities, by inversion."""
        cumulative = np.cumsum(probabilities)
        index = int(
            np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        )
        return min(index, len(probabilities) - 1)
