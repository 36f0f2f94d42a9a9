"""The draft tree of one round. It grows level by level, and then the nodes to verify are chosen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.controllers import DraftStep, SiblingLabel
from eesd.controllers.text_rule import combined
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import Price

CANDIDATES = 4
"""Number of children that are proposed for a node if a budget chooses among them. For the bundled
model, the greedy token is the first candidate in 82 % of cases, and among the first four in 94
%."""


class Proposal(NamedTuple):
    """A token that a sampler proposes as a child of a node.

    Attributes:
        token: Its id.
        logprob: Its log-probability under the draft.
        score: Paths are ranked by the sum of scores. A score is the log-probability or, with
            coupled sampling, the noisy score minus the best noisy score. A child whose score is
            near the best score is likely to be the verifier's token, however improbable it was
            before the noise.
        margin: The score (including noise, if there is any) minus the score of the best other
            token. It is infinite if there is no other token. The margin predicts better than any
            other output of the draft whether the verifier will choose the token.
    """

    token: int
    logprob: float
    score: float
    margin: float


@dataclass(eq=False, slots=True)
class Node:
    """A token in the tree. The root is the last committed token.

    Attributes:
        token: Its id.
        parent: The node before this node, or None for the root.
        depth: Number of tokens after the root, up to and including this node.
        logprob: Log-probability of its path under the draft.
        rank: Rank of its path. It is the sum of scores or, with a budget, the chance that the path
            is accepted.
        margin: Margin of its proposal.
        index: Its slot, counted from the root's slot. During drafting, slots are in the order of
            expansion. :meth:`DraftTree.prune` sets the slots of the verify pass. The index is -1 if
            the node is not in the pass.
        expanded: Whether the draft continues after this node.
        candidates: Its proposed children, best first.
        score: Calibration score of the first candidate, which is set if there is a budget.
        source: Name of the first drafter that proposed it.
    """

    token: int
    parent: "Node | None" = None
    depth: int = 0
    logprob: float = 0.0
    rank: float = 0.0
    margin: float = 0.0
    index: int = -1
    expanded: bool = False
    candidates: "list[Node]" = field(default_factory=list)
    score: float = 0.0
    source: str = ""

    @property
    def children(self) -> "list[Node]":
        """The candidates that are in the pass, the best one first."""
        return [child for child in self.candidates if child.index >= 0]

    def first_path(self) -> "list[Node]":
        """The best path below this node that is in the pass."""
        path = []
        node = self
        while children := node.children:
            node = children[0]
            path.append(node)
        return path

    def path(self) -> list[int]:
        """The tokens from the root's child down to this node. The path of the root is empty."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class Share(NamedTuple):
    """The part of a batch's verify pass that one row may use.

    Attributes:
        levels: Maximum number of levels of a draft without a budget.
        price: A function for a draft with a budget. It maps numbers of draft nodes to prices.
    """

    levels: int
    price: Price


class DraftTree:
    """The nodes of one round.

    Without a budget every node of a level is expanded and verified. With a budget, paths are ranked
    by their calibrated chances. The ``width`` best nodes of a level are expanded, and :meth:`prune`
    chooses from all candidates that were ever proposed. Tokens of another drafter, such as the
    text, extend the best path (:meth:`follow`), or join the candidates (:meth:`join`).

    Attributes:
        source: Name of the drafter that grows the tree level by level. It is empty if there is no
            such drafter.
        root: The last committed token.
        nodes: The root and the expanded nodes, in the order of their slots.
        frontier: The last level of ``nodes``, which is the input of the next draft step. The best
            path is first.
        steps: Number of levels that were drafted.
        branching: Number of children to propose for each node.
    """

    def __init__(
        self,
        root_token: int,
        max_nodes: int,
        width: int = 1,
        budget: TreeBudget | None = None,
        in_place: bool = False,
        source: str = "",
    ) -> None:
        """Begin a tree.

        Args:
            root_token: The last committed token.
            max_nodes: Maximum number of nodes of the verify pass, not counting the root.
            width: Number of nodes of a level. It is 1 for a chain.
            budget: The budget that chooses the nodes to verify. If it is None, all nodes are
                verified.
            in_place: Whether a budget may only choose nodes of the best path, because no other node
                can be accepted.
            source: Name of the drafter that grows the tree.
        """
        self.source = source
        self.root = Node(root_token, rank=float(budget is not None), index=0, expanded=True)
        self.nodes = [self.root]
        self.frontier = [self.root]
        self.steps = 0
        self.branching = width
        if budget is not None:
            self.branching = max(width, CANDIDATES)
        self._max_nodes = max_nodes
        self._width = width
        self._budget = budget
        self._in_place = in_place

    def grow(self, proposals: Sequence[Sequence[Proposal]]) -> DraftStep | None:
        """Add a level, which has the proposed children of each frontier node. The best paths are
        expanded.

        Returns:
            The step to show to the controller, or None if nothing was proposed.
        """
        self.steps += 1
        for parent, children in zip(self.frontier, proposals, strict=True):
            self._add_candidates(parent, children)
        level = [child for parent in self.frontier for child in parent.candidates]
        if len(level) > 1:
            level.sort(key=_best_first)
        self.frontier = level[: min(self._width, self._max_nodes + 1 - len(self.nodes))]
        for index, node in enumerate(self.frontier, start=len(self.nodes)):
            node.index = index
            node.expanded = True
        self.nodes += self.frontier
        if not self.frontier:
            return None
        best = self.frontier[0]
        assert best.parent is not None
        probability = exp(best.logprob - best.parent.logprob)
        return DraftStep(
            self.steps, probability, exp(best.logprob), best.margin, len(self.nodes) - 1
        )

    def _add_candidates(self, parent: Node, proposals: Sequence[Proposal]) -> None:
        depth = parent.depth + 1
        if self._budget is None or not proposals:
            ranks = [parent.rank + p.score for p in proposals]
        else:
            first = proposals[0]
            logprob = parent.logprob + first.logprob
            step = DraftStep(depth, exp(first.logprob), exp(logprob), first.margin, len(self.nodes))
            parent.score, chances = self._budget.chances(step, [p.score for p in proposals])
            ranks = [parent.rank * chance for chance in chances]
        parent.candidates = [
            Node(
                p.token,
                parent,
                depth,
                parent.logprob + p.logprob,
                rank,
                p.margin,
                source=self.source,
            )
            for p, rank in zip(proposals, ranks, strict=True)
        ]

    def follow(self, tokens: Sequence[int], source: str) -> None:
        """Append another drafter's chain to the best path. Drafting ends there."""
        parent = self.frontier[0]
        for token in tokens:
            node = Node(token, parent, parent.depth + 1, index=len(self.nodes), source=source)
            parent.candidates = [node]
            self.nodes.append(node)
            parent = node

    def join(
        self, node: Node, tokens: Sequence[int], chances: Sequence[float], source: str
    ) -> None:
        """Add another drafter's path to a budget's candidates. Call this when drafting is done.

        The tree must have a budget, because without a budget a child that was drawn by rejection
        sampling must not get siblings.

        Args:
            node: The node before the path.
            tokens: The path.
            chances: Chance of each token, given that all tokens before it are right.
            source: Name of the drafter.
        """
        for token, chance in zip(tokens, chances, strict=True):
            if not node.rank:
                return  # the chance is too small for a float
            drafted = node.candidates
            found = next((i for i, child in enumerate(drafted) if child.token == token), None)
            mixed, own = (
                combined([child.rank / node.rank for child in drafted], found, chance)
                if drafted
                else ([], chance)
            )
            for child, value in zip(drafted, mixed, strict=True):
                if child.rank:
                    _rescale(child, node.rank * value / child.rank)
            if found is None:
                child = Node(token, node, node.depth + 1, rank=node.rank * own, source=source)
                node.candidates = [*drafted, child]
                node = child
            else:
                node = drafted[found]

    def prune(self, share: Share | None = None) -> list[Node]:
        """Choose the nodes to verify. Call it once, when drafting is done.

        A budget chooses the number of nodes, and the most likely candidates. They form a tree
        because no path is likelier than its beginning. The best path comes first, so its nodes have
        the slots of a chain.

        Args:
            share: The row's part of a batch's pass, or None for a sequence that runs alone.

        Returns:
            The nodes of the verify pass in the order of their slots, the root first.
        """
        if self._budget is None or not self.steps:
            return self.nodes if share is None else self._cut(share.levels)
        candidates = [*_descendants(self.root)]
        if not candidates:
            return self.nodes
        for candidate in candidates:
            candidate.index = -1
        candidates.sort(key=_best_first)
        best = _best_path(candidates)
        if self._in_place:
            candidates = best
        size = self._budget.size(
            [candidate.rank for candidate in candidates[: self._max_nodes]], share and share.price
        )
        on_path = set(best)
        chosen = sorted(candidates[:size], key=lambda node: (node not in on_path, node.depth))
        verified = [self.root, *chosen]
        for index, node in enumerate(verified):
            node.index = index
        return verified

    def _cut(self, levels: int) -> list[Node]:
        """Leave out all nodes deeper than ``levels``."""
        for node in self.nodes:
            if node.depth > levels:
                node.index = -1
        return [node for node in self.nodes if node.depth <= levels]

    def labels(self, tokens: Sequence[int]) -> list[SiblingLabel]:
        """Return the labels for the budget. There is a label for each node that has candidates and
        is on the path of the verifier's ``tokens`` after the root."""
        node = self.root
        labels: list[SiblingLabel] = []
        for token in tokens:
            drafted = [child for child in node.candidates if child.source == self.source]
            if not drafted:
                break
            chosen = next((i for i, child in enumerate(drafted) if child.token == token), None)
            labels.append(SiblingLabel(node.score, chosen))
            if chosen is None:
                break
            node = drafted[chosen]
        return labels


def _best_first(node: Node) -> tuple[float, int]:
    """A sort key that puts the likeliest node first, and a parent before an equally likely
    child."""
    return -node.rank, node.depth


def _descendants(node: Node) -> Iterator[Node]:
    """Return all candidates below a node."""
    for child in node.candidates:
        yield child
        yield from _descendants(child)


def _best_path(candidates: Sequence[Node]) -> list[Node]:
    """Return the path with the greatest sum of values. The candidates are sorted by value, and each
    candidate comes after its parent."""
    sums: dict[Node, float] = {}
    for node in candidates:
        assert node.parent is not None
        sums[node] = sums.get(node.parent, 0.0) + node.rank
    node = max(sums, key=sums.__getitem__)
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _rescale(node: Node, factor: float) -> None:
    """Multiply the values of a node and all its descendants."""
    node.rank *= factor
    for child in node.candidates:
        _rescale(child, factor)


def tree_mask(nodes: Sequence[Node], first: int = 0) -> NDArray[np.bool_]:
    """Return a mask [len - first, len] of the nodes that each node from ``first`` on sees. A node
    sees its ancestors and itself."""
    seen = np.eye(len(nodes), dtype=np.bool_)
    for node in nodes[1:]:
        assert node.parent is not None and 0 <= node.parent.index < node.index
        seen[node.index] |= seen[node.parent.index]
    return seen[first:]
