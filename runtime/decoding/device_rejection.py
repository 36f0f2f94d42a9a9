"""Rejection sampling where the logits are: what :class:`~eesd.runtime.decoding.samplers.Rejection` chooses, on a device.

Its uniform numbers are made on the host, which knows the number that each node will use: all nodes are judged at once. As in
:mod:`~eesd.runtime.decoding.device_sampler`, a choice that rounding could decide is marked as uncertain, and the host makes it
from the logits.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from eesd.common.draft_vocab import DraftColumns
from eesd.runtime.decoding.device_sampler import NEAR, DeviceScores, to_device
from eesd.runtime.decoding.draft_tree import Node
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import Logits

MASS = 1e-4
"""Where less probability is left behind rejected tokens, its digits are too few: the host chooses."""


class _Drawn(NamedTuple):
    """Of a node whose child was drawn: the draft's logits [V], and q, its probability of each column [V]."""

    logits: Tensor
    q: Tensor


class DeviceRejection:
    """Proposes and judges the drafts of one request. ``begin_round`` before each round."""

    def __init__(self, sampling: Sampling, columns: DraftColumns) -> None:
        """See :func:`~eesd.runtime.decoding.samplers.make_sampler`."""
        self._scores = DeviceScores(sampling, columns)
        self._drawn: dict[Node, _Drawn] = {}

    def begin_round(self) -> None:
        self._drawn = {}

    def draft_logits(self, node: Node) -> Logits | None:
        """The draft's logits [V] behind a node whose child was drawn, copied to the host; None: there was none."""
        drawn = self._drawn.get(node)
        if drawn is None:
            return None
        logits: Logits = drawn.logits.cpu().numpy()
        return logits

    def proposing(
        self, tokens: Sequence[int], nodes: Sequence[Node], count: int, numbers: Sequence[float]
    ) -> Callable[[Tensor], Tensor]:
        """What to run on the draft's logits.

        Args:
            tokens: Everything committed.
            nodes: The nodes of the rows.
            count: Proposals for each. One is drawn; more are the most likely.
            numbers: The uniform number of each draw.

        Returns:
            A function from logits [n, V] float32 to float64 [n, 3, count + 1]: columns, best first, or the one that was drawn
            and the best other one; their log-probabilities, -inf if there is no such token; and 1 if the columns are certainly
            the host's.
        """

        def choose(logits: Tensor) -> Tensor:
            scores, sure, clear = self._scores.filtered(logits, tokens, [node.path() for node in nodes], drafts=True)
            logprobs, certain = scores.log_softmax(-1), _known(scores, sure, clear)
            values, columns = _best(scores, count + 1)
            found = logprobs.gather(-1, columns).masked_fill(values == -inf, -inf)
            if count == 1:
                q = logprobs.exp()
                self._drawn.update(zip(nodes, map(_Drawn, logits.clone(), q), strict=True))  # the next call overwrites logits
                drawn, sharp = _draw(q, to_device(numbers, q.device, float))
                other = (columns[:, :1] == drawn).long()
                columns = torch.cat((drawn, columns.gather(-1, other)), -1)
                found = torch.cat((logprobs.gather(-1, drawn), found.gather(-1, other)), -1)
            else:
                sharp = ((values[:, :-1] == values[:, 1:]) | (values[:, :-1] - values[:, 1:] > NEAR)).all(-1)
            flags = (certain & sharp).double()[:, None].expand(columns.shape)
            return torch.stack((columns.double(), found, flags), -2)

        return choose

    def judging(
        self, tokens: Sequence[int], nodes: Sequence[Node], ahead: Callable[[int], Sequence[float]]
    ) -> Callable[[Tensor], Tensor]:
        """What to run on the verifier's logits.

        Args:
            tokens: Everything committed.
            nodes: The nodes of the rows, in the order of the pass.
            ahead: Gives so many of the next uniform numbers.

        Returns:
            A function from logits [n, V] float32 to float64 [n, 3]: of the children the accepted one, -1 for none; else the
            token behind the node; and 1 if both are certainly the host's.
        """

        offsets, children = offsets_of(nodes), [len(node.children) for node in nodes]
        numbers = Numbers(ahead(max(map(sum, zip(offsets, children, strict=True))) + 1), offsets, children)

        def choose(logits: Tensor) -> Tensor:
            scores, sure, clear = self._scores.filtered(logits, tokens, [node.path() for node in nodes], drafts=False)
            p, certain = scores.softmax(-1), _known(scores, sure, clear)
            return _judged(p, certain, self._children(nodes, p.device), *self._draft(nodes, p), numbers.to(p.device))

        return choose

    def _children(self, nodes: Sequence[Node], device: torch.device) -> Tensor:
        """The tokens of each node's children, -1 behind the last [n, most]."""
        tokens = [[child.token for child in node.children] for node in nodes]
        most = max(map(len, tokens))
        return to_device([[*row, *[-1] * (most - len(row))] for row in tokens], device).reshape(len(nodes), most)

    def _draft(self, nodes: Sequence[Node], p: Tensor) -> tuple[Tensor | None, Tensor]:
        """q of each token [n, V], None if no child was drawn; and of which nodes the child was drawn from it [n]."""
        drawn = [node in self._drawn for node in nodes]
        if not any(drawn):
            return None, to_device(drawn, p.device, bool)
        q = torch.zeros_like(p)
        for row, node in enumerate(nodes):
            if drawn[row]:
                found = self._drawn[node].q.to(p.device)
                ids = slice(None) if len(found) == p.shape[-1] else self._scores.ids(len(found), p.device)
                q[row, ids] = found
        return q, to_device(drawn, p.device, bool)


class Numbers(NamedTuple):
    """The uniform numbers that nodes use: each its own few, from an offset on.

    A node uses one for each child up to the accepted one, or for all children and one more to draw the token behind it. So a
    node's offset depends on its path alone.
    """

    values: Sequence[float]
    offsets: Sequence[int]
    children: Sequence[int]
    """How many children each node has."""

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those for the children [n, most children], and that for the token behind each node [n]."""
        most, last = max(self.children), len(self.values) - 1
        table = [[self.values[min(offset + i, last)] for i in range(most)] for offset in self.offsets]
        final = [self.values[offset + count] for offset, count in zip(self.offsets, self.children, strict=True)]
        return to_device(table, device, float).reshape(len(final), most), to_device(final, device, float)


def offsets_of(nodes: Sequence[Node]) -> list[int]:
    """How many uniform numbers are used before each node, if its path is accepted. Parents come before their children."""
    offsets = {nodes[0]: 0}
    for node in nodes:
        for rank, child in enumerate(node.children):
            offsets[child] = offsets[node] + rank + 1
    return [offsets[node] for node in nodes]


def _known(scores: Tensor, sure: Tensor | None, clear: Tensor | None) -> Tensor:
    """Whether each row has certainly the tokens of the host [n], from what :meth:`DeviceScores.filtered` returns."""
    known = torch.isfinite(scores.amax(-1))
    if sure is not None:
        known &= (sure | (scores == -inf)).all(-1)
    return known if clear is None else known & clear


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best scores of each row, -inf where there are no more, and their columns [n, count]; the first column of equals."""
    left, values, columns = scores.clone(), [], []
    for _ in range(count):
        value, column = left.max(-1, keepdim=True)  # topk may take any of equals
        left.scatter_(-1, column, -inf)
        values.append(value)
        columns.append(column)
    return torch.cat(values, -1), torch.cat(columns, -1)


def _draw(probabilities: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """By inversion of each row [n, V], the column [n, 1], and whether it certainly is the host's [n]."""
    sums = probabilities.cumsum(-1)
    value = numbers[:, None] * sums[:, -1:]
    column = torch.searchsorted(sums, value, right=True).clamp_max(sums.shape[-1] - 1)
    below = torch.where(column > 0, sums.gather(-1, (column - 1).clamp_min(0)), -inf)
    return column, ((value - below > NEAR) & (sums.gather(-1, column) - value > NEAR))[:, 0]


def _judged(
    p: Tensor, certain: Tensor, children: Tensor, q: Tensor | None, drawn: Tensor, numbers: tuple[Tensor, Tensor]
) -> Tensor:
    """What :meth:`DeviceRejection.judging` says, from p [n, V], the rows that are known [n], and the tokens of the children."""
    accepted = children.new_full((len(p),), -1)
    for rank, (token, number) in enumerate(zip(children.t(), numbers[0].t(), strict=True)):
        judged, column = (token >= 0) & (accepted < 0), token.clamp_min(0)[:, None]
        chance, rest = p.gather(-1, column)[:, 0], p.scatter(-1, column, 0.0)
        if q is not None:
            chance = torch.where(drawn, chance / q.gather(-1, column)[:, 0], chance)
            rest = torch.where(drawn[:, None], (p - q).clamp_min(0), rest)
        hit, mass = number < chance, rest.sum(-1)
        sharp = ((number - chance).abs() > NEAR) & (hit | (mass > MASS))
        certain = certain & (sharp | ~judged)
        accepted = torch.where(judged & hit, rank, accepted)
        p = torch.where((token >= 0)[:, None], rest / mass[:, None], p)
    tokens, sharp = _draw(p, numbers[1])
    certain = certain & (sharp | (accepted >= 0))
    return torch.stack((accepted.double(), tokens[:, 0].double(), certain.double()), -1)
