"""The draft tree of one round: how it grows level by level, and which of its nodes are verified."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eesd.controllers import DraftStep, SiblingLabel
from eesd.controllers.text_rule import combined
from eesd.controllers.tree_budget import TreeBudget

CANDIDATES = 4
"""Children proposed for a node when a budget chooses among them. Of the bundled model's greedy
tokens 82 % are the first candidate and 94 % are among four."""


class Proposal(NamedTuple):
    """A token that a sampler proposes as a child of a node.

    Attributes:
        token: Its id.
        logprob: Its log-probability under the draft.
        score: What paths are ranked by, summed along the path: the log-probability, or with coupled
            sampling the distance of the noisy score from the best one's. A child near the best is
            likely the verifier's token, however improbable it was before the noise.
        margin: Score (with noise, if there is any) minus that of the best other token; infinite if
            there is none. Of all the draft shows, the margin predicts best whether the verifier
            will agree.
    """

    token: int
    logprob: float
    score: float
    margin: float


@dataclass(eq=False, slots=True)
class Node:
    """A token in the tree; the root is the last committed token.

    Attributes:
        token: Its id.
        parent: None for the root.
        depth: Tokens between the root and this node, this one included.
        logprob: Log-probability of its path under the draft.
        rank: What its path is ranked by: the sum of scores or, with a budget, the chance that the
            path is accepted.
        margin: Its proposal's margin.
        index: Its slot, counted from the root's: while drafting in the order of expansion, after
            :meth:`DraftTree.prune` in the verify pass. -1: it is not in the pass.
        expanded: Whether the draft continues from it.
        candidates: Its proposed children, best first.
        score: Calibration score of the first candidate (with a budget).
        from_text: Whether the text proposed it, and the draft did not.
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
    from_text: bool = False

    @property
    def children(self) -> "list[Node]":
        """The candidates that are in the pass, best first."""
        return [child for child in self.candidates if child.index >= 0]

    def path(self) -> list[int]:
        """The tokens from the root's child down to this node; empty for the root."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class Share(NamedTuple):
    """What one draft of several may have verified.

    Attributes:
        levels: Levels at most, of a draft without a budget.
        price: For a budget: what the draft's first 1, 2, ... nodes cost together, in tokens.
    """

    levels: int
    price: Callable[[int], float]


class DraftTree:
    """The nodes of one round.

    Without a budget every node of a level is expanded and verified. With a budget, paths are ranked
    by their calibrated chances: the ``width`` best of a level are expanded, and :meth:`prune`
    chooses from all candidates ever proposed. What the text proposes is the end of the best path
    (:meth:`follow_text`), or joins the candidates (:meth:`join_text`).

    Attributes:
        root: The last committed token.
        nodes: The root and the expanded nodes, in the order of their slots.
        frontier: The last level of ``nodes``, best path first: the input of the next draft step.
        steps: Levels drafted.
        branching: Children to propose for each node.
    """

    def __init__(
        self,
        root_token: int,
        max_nodes: int,
        width: int = 1,
        budget: TreeBudget | None = None,
        in_place: bool = False,
    ) -> None:
        """Begin a tree.

        Args:
            root_token: The last committed token.
            max_nodes: Most nodes of the verify pass, the root not counted.
            width: Nodes of a level; 1: a chain.
            budget: Chooses what is verified; None: everything.
            in_place: Whether a budget shall choose among the nodes of the best path alone, since no
                others count.
        """
        self.root = Node(root_token, rank=0.0 if budget is None else 1.0, index=0, expanded=True)
        self.nodes = [self.root]
        self.frontier = [self.root]
        self.steps = 0
        self.branching = width if budget is None else max(width, CANDIDATES)
        self._max_nodes = max_nodes
        self._width = width
        self._budget = budget
        self._in_place = in_place

    @property
    def is_full(self) -> bool:
        return len(self.nodes) > self._max_nodes

    def grow(self, proposals: Sequence[Sequence[Proposal]]) -> DraftStep | None:
        """Add a level: the proposed children of each frontier node, of which the best paths are
        expanded.

        Returns:
            What a controller is told about the level; None if nothing was proposed.
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
            Node(p.token, parent, depth, parent.logprob + p.logprob, rank, p.margin)
            for p, rank in zip(proposals, ranks, strict=True)
        ]

    def follow_text(self, tokens: Sequence[int]) -> None:
        """Add the chain of these tokens, which the text proposes, behind the best path; nothing is
        drafted behind it."""
        parent = self.frontier[0]
        for token in tokens:
            node = Node(token, parent, parent.depth + 1, index=len(self.nodes), from_text=True)
            parent.candidates = [node]
            self.nodes.append(node)
            parent = node

    def join_text(self, node: Node, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Add the path that the text proposes to a budget's candidates. Call it when drafting is
        done.

        Not without a budget: a child that was sampled can have no siblings (rejection sampling).

        Args:
            node: What the path is behind.
            tokens: The path.
            chances: Of each token, if all before it are right.
        """
        for token, chance in zip(tokens, chances, strict=True):
            if not node.rank:
                return  # a chance may be too small for a number
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
                child = Node(token, node, node.depth + 1, rank=node.rank * own, from_text=True)
                node.candidates = [*drafted, child]
                node = child
            else:
                node = drafted[found]

    def prune(self, share: Share | None = None) -> list[Node]:
        """Choose what is verified. Call it once, when drafting is done.

        With a budget these are the most likely of all candidates, as many as the budget finds worth
        it. They form a tree because no path is likelier than its beginning. The best path comes
        first, so its nodes have the slots of a chain.

        Args:
            share: Of a draft beside others; None: all that is worth it alone.

        Returns:
            The nodes of the verify pass in the order of their slots, the root first.
        """
        if self._budget is None or not self.steps:
            return self.nodes if share is None else self._cut(share.levels)
        candidates = [*_behind(self.root)]
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
        """Leave out what lies deeper than ``levels``."""
        for node in self.nodes:
            if node.depth > levels:
                node.index = -1
        return [node for node in self.nodes if node.depth <= levels]

    def labels(self, tokens: Sequence[int]) -> list[SiblingLabel]:
        """What a budget learns when the verifier chose ``tokens`` behind the root: a label for each
        node with candidates."""
        node = self.root
        labels = []
        for token in tokens:
            drafted = [child for child in node.candidates if not child.from_text]
            if not drafted:
                break
            chosen = next((i for i, child in enumerate(drafted) if child.token == token), None)
            labels.append(SiblingLabel(node.score, chosen))
            if chosen is None:
                break
            node = drafted[chosen]
        return labels


def _best_first(node: Node) -> tuple[float, int]:
    """Parents come before their children, also where both are equally likely."""
    return -node.rank, node.depth


def _behind(node: Node) -> Iterator[Node]:
    """All candidates behind a node."""
    for child in node.candidates:
        yield child
        yield from _behind(child)


def _best_path(candidates: Sequence[Node]) -> list[Node]:
    """Of candidates sorted by value, which come behind their parents, the path with the greatest
    sum of values."""
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
    """Multiply the value of a node and of everything behind it."""
    node.rank *= factor
    for child in node.candidates:
        _rescale(child, factor)


def is_chain(nodes: Sequence[Node]) -> bool:
    """Whether each node is the child of the one before it."""
    return nodes[-1].depth == len(nodes) - 1


def tree_mask(nodes: Sequence[Node], first: int = 0) -> NDArray[np.bool_]:
    """[len - first, len]: which nodes each node from ``first`` on sees: its ancestors and
    itself."""
    seen = np.eye(len(nodes), dtype=np.bool_)
    for node in nodes[1:]:
        assert node.parent is not None and 0 <= node.parent.index < node.index
        seen[node.index] |= seen[node.parent.index]
    return seen[first:]
